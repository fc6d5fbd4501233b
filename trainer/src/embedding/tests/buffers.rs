//! Compares the buffers that a plan reserves with the bytes that ranks exchange.

use onefold_sharding::{
    ACCESS_BATCH, AccessBins, AnalyticCost, Plan, Shard as Part, ShardingType, Table, TablePlan, Topology,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

const RANKS: u32 = 4;
const SAMPLES: usize = 3_000;
const TABLE_ROWS: u64 = 4_000;
const COLUMNS: u64 = 16;

/// A table with uniformly used rows, looked up by lists of 0 to 8 ids.
fn table(pooling: Pooling) -> (FeatureConfig, Table) {
    let config = FeatureConfig { rows: TABLE_ROWS, dim: COLUMNS, ..config("a", pooling) };
    let access_bins = Some(AccessBins::uniform(TABLE_ROWS, 4.0 * ACCESS_BATCH as f64));
    let table = Table::new("a", TABLE_ROWS, COLUMNS);
    // One list in nine is empty, and is not looked up.
    let list_dedupe_factor = Some(9.0 / 8.0);
    (
        config,
        Table {
            first: onefold_sharding::Lookups {
                pooling,
                pooling_factor: 4.0,
                list_dedupe_factor,
                access_bins,
                ..table.first.clone()
            },
            ..table
        },
    )
}

fn placed(table: &Table, kind: ShardingType) -> TablePlan {
    let part = |rank, rows, columns| Part { rank, rows, columns };
    let quarter = |of: u64, i: u32| of / 4 * u64::from(i)..of / 4 * u64::from(i + 1);
    let shards = match kind {
        ShardingType::TableWise => vec![part(2, 0..TABLE_ROWS, 0..COLUMNS)],
        ShardingType::ColumnWise => vec![part(0, 0..TABLE_ROWS, 0..4), part(3, 0..TABLE_ROWS, 4..16)],
        ShardingType::RowWise => (0..4).map(|i| part(i, quarter(TABLE_ROWS, i), 0..COLUMNS)).collect(),
        ShardingType::DataParallel => (0..4).map(|i| part(i, 0..TABLE_ROWS, 0..COLUMNS)).collect(),
    };
    TablePlan { sharding_type: kind, shards, ..TablePlan::table_wise(table, 0) }
}

fn group(rank: u32) -> Group {
    let mut rng = ChaCha8Rng::seed_from_u64(u64::from(rank));
    let row = |_| (0..rng.random_range(0..=8)).map(|_| rng.random_range(0..TABLE_ROWS as i64)).collect();
    let rows: Vec<Vec<i64>> = (0..SAMPLES).map(row).collect();
    Group::try_new("g", None, vec![Feature::from_rows("a", &rows).unwrap()]).unwrap()
}

/// Returns the number of distinct rows of each rank's lists.
fn rows_of_ranks() -> Vec<usize> {
    let of_rank = |rank| {
        let mut ids = group(rank).features()[0].values().to_vec();
        ids.sort_unstable();
        ids.dedup();
        ids.len()
    };
    (0..RANKS).map(of_rank).collect()
}

/// Returns the bytes of requests, and of answers and gradients, that all ranks together send in a step.
fn sent(config: &FeatureConfig, plan: &Plan) -> [u64; 2] {
    let configs = [config.clone()];
    let shards = Shard::of_plan(plan, &configs).unwrap();
    let optimizer = optimizer(TableOptimizer::Sgd);
    let of_ranks = on_ranks(RANKS as usize, |collectives| {
        let group = group(collectives.rank());
        let placement = Placement { shards: shards.clone(), collectives, dtype: DataType::Fp32 };
        let mut embeddings = Embeddings::new(&configs, &placement, &optimizer, 7, 1).unwrap();
        let lookups = look_up(&embeddings, &group);
        let lookup = &lookups.groups[0];
        let values = |lookup: &FeatureLookup| vec![0.1; lookup.table_rows.len() * COLUMNS as usize];
        let sequences = lookup.sequences.iter().map(values).collect();
        let gradients = LookupGradients { pooled: vec![0.1; lookup.pooled.len()], sequences };
        update(&mut embeddings, &lookups, gradients, &optimizer);
        embeddings.sent_bytes()
    });
    let sum = |of: fn(&SentBytes) -> u64| of_ranks.iter().map(of).sum::<u64>();
    [sum(|sent| sent.requests), sum(|sent| sent.answers + sent.gradients)]
}

#[test]
fn plans_reserve_what_ranks_exchange() {
    let kinds = [
        ShardingType::TableWise,
        ShardingType::ColumnWise,
        ShardingType::RowWise,
        ShardingType::DataParallel,
    ];
    for pooling in [Pooling::Sum, Pooling::Attention] {
        for kind in kinds {
            let (config, table) = table(pooling);
            let topology = Topology::h100(RANKS, 1 << 30).unwrap();
            let tables = [table];
            let placed = vec![placed(&tables[0], kind)];
            let plan = Plan::predict(
                "test",
                &tables,
                placed,
                &topology,
                &AnalyticCost,
                topology.global_batch_size(SAMPLES as u64),
            );
            let plan = plan.unwrap();
            plan.check(&tables, &topology, plan.global_batch_size).unwrap();
            let reserved: u64 = plan.ranks.iter().map(|rank| rank.buffer_bytes).sum();
            // Every byte that is sent is also received. A request is in memory twice on each side: as a message,
            // and as the lookup. With replicated tables, every rank has the rows of all ranks.
            let [requests, vectors] = sent(&config, &plan);
            let looked_up = match kind {
                ShardingType::DataParallel => RANKS as usize * rows_of_ranks().iter().sum::<usize>() * 4,
                _ => 2 * requests as usize,
            };
            let exchanged = 2 * vectors + 2 * requests + looked_up as u64;
            let ratio = reserved as f64 / exchanged as f64;
            assert!(
                (ratio - 1.0).abs() < 0.1,
                "{pooling:?}, {kind:?}: {reserved} reserved, {exchanged} exchanged"
            );
        }
    }
}
