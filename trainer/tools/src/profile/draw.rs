//! Draws random tables, plans for them, and ids to look up.

use onefold_ikjt::{Feature, Group};
use onefold_sharding::{
    ACCESS_BATCH, AccessBins, AnalyticCost, DataType, FeatureConfig, IdPolicy, Lookups, Plan, Pooling, Shard,
    ShardingType, Table, TableOptimizer, TablePlan, Topology,
};
use onefold_sharding_benchmark::PoolTable;
use onefold_trainer::{Error, Result};
use rand::Rng;
use rand::distr::Distribution;
use rand_chacha::ChaCha8Rng;

use super::ProfileOptions;

/// The maximum number of tables per two ranks of a set, as in NeuroShard.
pub(super) const MAX_TABLES: usize = 15;
/// The numbers of columns of a table, from 4 to 128.
const COLUMNS: [u64; 6] = [4, 8, 16, 32, 64, 128];
/// One in this many sets has tables that are not deduplicated.
const PLAIN_SETS: usize = 3;
/// The minimum number of samples per rank in the steps of a set.
const LEAST_SAMPLES: u64 = 1024;
/// The number of ids above which a set gets fewer samples, so that no step takes seconds.
const MAX_IDS: f64 = 16e6;
/// The maximum number of rows of a replicated table, over all ranks; larger tables are not replicated.
const MAX_COPIED: u64 = 2_000_000;

/// Random tables, and a plan for them.
pub(super) struct Drawn {
    pub(super) tables: Vec<Table>,
    pub(super) plan: Plan,
    /// The Zipf exponents of the ids, by table and feature.
    pub(super) exponents: Vec<Vec<f64>>,
}

/// Draws set number `number`: a number of ranks, tables for it, and a random plan.
pub(super) fn draw(
    rng: &mut ChaCha8Rng,
    pool: &[PoolTable],
    options: &ProfileOptions,
    number: usize,
) -> Result<Drawn> {
    let ranks = options.ranks[rng.random_range(0..options.ranks.len())];
    let optimizers =
        [TableOptimizer::RowWiseAdagrad, TableOptimizer::Sgd, TableOptimizer::Adagrad, TableOptimizer::Adam];
    // Half of the sets use row-wise Adagrad, which most models use.
    let optimizer = if rng.random_bool(0.5) { optimizers[0] } else { optimizers[rng.random_range(1..4)] };
    let count = rng.random_range(1..=MAX_TABLES * (ranks as usize).div_ceil(2));
    let (mut tables, mut placed, mut exponents) = (Vec::with_capacity(count), Vec::new(), Vec::new());
    // Half of the memory is for the first tables. The other half is reserved in equal parts, for tables that
    // then do not fit.
    let (mut left, part) = (options.memory_bytes / 2, options.memory_bytes / 2 / count as u64);
    while tables.len() < count {
        let (table, exponent) = table(rng, pool, tables.len(), (optimizer, number));
        let plan = placement(rng, &table, ranks);
        let copies = if plan.sharding_type == ShardingType::DataParallel { u64::from(ranks) } else { 1 };
        let bytes = table.memory_bytes().unwrap_or(u64::MAX).saturating_mul(copies);
        if bytes > left {
            left = left.max(part);
            continue;
        }
        left -= bytes;
        exponents.push(vec![exponent]);
        placed.push(plan);
        tables.push(table);
    }
    let most = options.samples as f64;
    let least = most.min((LEAST_SAMPLES * u64::from(ranks)) as f64);
    let drawn = least * (most / least).powf(rng.random());
    let ids: f64 = tables.iter().map(|table| table.first.pooling_factor / table.first.dedupe_factor).sum();
    let samples_per_rank = (drawn.min(MAX_IDS / ids.max(1e-9)) / f64::from(ranks)).floor().max(1.0) as u64;
    // The topology has ample memory, because buffers do not matter here.
    let topology = Topology::h100(ranks, 1 << 50).map_err(unsuitable)?;
    let batch = topology.global_batch_size(samples_per_rank);
    let plan = Plan::predict("profile", &tables, placed, &topology, &AnalyticCost, batch);
    Ok(Drawn { tables, plan: plan.map_err(unsuitable)?, exponents })
}

fn unsuitable(source: onefold_sharding::Error) -> Error {
    Error::Sharding { path: "a drawn set of tables".into(), source }
}

/// Draws a table from the pool, and the Zipf exponent of its ids.
fn table(
    rng: &mut ChaCha8Rng,
    pool: &[PoolTable],
    number: usize,
    (optimizer, set): (TableOptimizer, usize),
) -> (Table, f64) {
    let source = &pool[rng.random_range(0..pool.len())];
    let dim = COLUMNS[rng.random_range(0..COLUMNS.len())];
    // Smaller tables are included, because only these are replicated.
    let rows = (source.rows >> rng.random_range(0..8)).max(1);
    let exponent = rng.random_range(0.4..1.2);
    let plain = set.is_multiple_of(PLAIN_SETS);
    let dedupe_factor = if plain { 1.0 } else { 16f64.powf(rng.random_range(0.0..1.0)) };
    let pooling_factor = source.pooling_factor;
    let accesses = pooling_factor * ACCESS_BATCH as f64 / dedupe_factor;
    let table = Table {
        dtype: [DataType::Fp32, DataType::Fp32, DataType::Bf16, DataType::Fp16][rng.random_range(0..4)],
        optimizer,
        first: Lookups {
            pooling: if rng.random_bool(0.2) { Pooling::Attention } else { Pooling::Sum },
            pooling_factor,
            dedupe_factor,
            // If there are fewer ids than lists, most lists are empty.
            list_dedupe_factor: Some(dedupe_factor / pooling_factor.clamp(1e-6, 1.0)),
            access_bins: Some(AccessBins::zipf(rows, accesses, exponent)),
            ..Lookups::default()
        },
        ..Table::new(format!("table_{number}"), rows, dim)
    };
    (table, exponent)
}

/// Draws a placement of a table: in half of the cases whole on a rank, otherwise split by columns or rows, or
/// replicated.
fn placement(rng: &mut ChaCha8Rng, table: &Table, ranks: u32) -> TablePlan {
    let first = rng.random_range(0..ranks);
    let whole = TablePlan::table_wise(table, first);
    let (rows, parts) = (table.rows, u64::from(ranks));
    match rng.random_range(0..6) {
        _ if ranks == 1 => whole,
        0 if table.dim >= 8 => {
            let halves = if table.dim >= 16 && ranks >= 4 && rng.random_bool(0.5) { 4 } else { 2 };
            let width = table.dim / halves;
            let shard = |i: u64| Shard {
                rank: (first + i as u32) % ranks,
                rows: 0..rows,
                columns: i * width..(i + 1) * width,
            };
            let shards = (0..halves.min(parts)).map(shard).collect::<Vec<_>>();
            let complete = shards.len() as u64 == halves;
            if complete {
                TablePlan { sharding_type: ShardingType::ColumnWise, shards, ..whole }
            } else {
                whole
            }
        }
        1 => TablePlan::row_wise(table, ranks).unwrap_or(whole),
        2 if rows * parts <= MAX_COPIED => TablePlan::data_parallel(table, ranks),
        _ => whole,
    }
}

/// Draws the distinct lists of one feature that `samples` samples of a rank look up in `table`.
pub(super) fn fill(
    rng: &mut ChaCha8Rng,
    (name, table): (&str, &Table),
    (lookups, exponent): (&Lookups, f64),
    samples: u64,
) -> Result<(FeatureConfig, Group)> {
    let config = FeatureConfig {
        feature: name.to_owned(),
        table: Some(table.name.clone()),
        rows: table.rows,
        dim: table.dim,
        pooling: lookups.pooling,
        target: None,
        ids: IdPolicy::Checked,
        dtype: table.dtype,
    };
    let [lists, ids] = lookups.distinct(samples as f64);
    let lists = lists.round().max(1.0);
    let mean = ids / lists;
    // Lengths vary around the mean; with a mean below one, some lists are empty.
    let length = |rng: &mut ChaCha8Rng| match mean {
        mean if mean < 1.0 => usize::from(rng.random_bool(mean)),
        mean => 1 + ((mean - 1.0) * 2.0 * rng.random::<f64>()).round() as usize,
    };
    let lengths: Vec<usize> = (0..lists as usize).map(|_| length(rng)).collect();
    let total: usize = lengths.iter().sum();
    let rows = config.rows;
    let ids: Vec<i64> = match rand_distr::Zipf::new(rows as f64, exponent) {
        // Frequent rows are not adjacent: multiplication by a number that is coprime to the number of rows
        // spreads them.
        Ok(zipf) => (0..total).map(|_| spread(zipf.sample(rng) as u64 - 1, rows) as i64).collect(),
        Err(_) => (0..total).map(|_| rng.random_range(0..rows) as i64).collect(),
    };
    let feature = Feature::from_lengths(name.to_owned(), ids, lengths)?;
    let group = Group::try_new(name.to_owned(), None, vec![feature])?;
    Ok((config, group))
}

/// A prime that is larger than any table, so it is coprime to all numbers of rows.
const PRIME: u64 = 2_654_435_761;

fn spread(row: u64, rows: u64) -> u64 {
    row.wrapping_mul(PRIME) % rows
}

#[cfg(test)]
mod tests {
    use onefold_sharding_benchmark::pool;
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn sets_are_of_all_kinds_and_within_bounds() {
        let options = ProfileOptions {
            sets: 0,
            first_set: 0,
            samples: 65_536,
            memory_bytes: 1 << 30,
            ranks: vec![1, 4],
            seed: 1,
        };
        let (pool, mut rng) = (pool(), ChaCha8Rng::seed_from_u64(9));
        let (mut seen, mut kinds, mut optimizers) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..200 {
            let Drawn { tables, plan, exponents } = draw(&mut rng, &pool, &options, number).unwrap();
            plan.check(&tables, &plan.topology, plan.global_batch_size).unwrap();
            let ranks = plan.topology.ranks;
            assert_eq!((tables.len(), ranks == 1 || ranks == 4), (exponents.len(), true));
            let samples = plan.global_batch_size as f64;
            let ids: f64 =
                tables.iter().map(|table| table.first.pooling_factor / table.first.dedupe_factor).sum();
            assert!((ids * samples <= 1.01 * MAX_IDS || plan.samples_per_rank() == 1) && samples <= 65_536.0);
            seen.push(samples);
            let plain = tables.iter().all(|table| table.first.dedupe_factor == 1.0);
            assert!(plain || !number.is_multiple_of(PLAIN_SETS));
            kinds.extend(plan.tables.iter().map(|table| table.sharding_type));
            optimizers.push(tables[0].optimizer);
        }
        seen.sort_by(f64::total_cmp);
        assert!(seen[20] < 6_144.0 && seen[100] > 6_000.0 && seen[180] > 16_000.0, "{seen:?}");
        let share = |kind| kinds.iter().filter(|other| **other == kind).count() as f64 / kinds.len() as f64;
        for kind in [ShardingType::ColumnWise, ShardingType::RowWise, ShardingType::DataParallel] {
            assert!(share(kind) > 0.05, "{kind:?} {}", share(kind));
        }
        for optimizer in [TableOptimizer::Sgd, TableOptimizer::Adagrad, TableOptimizer::Adam] {
            assert!(optimizers.iter().filter(|other| **other == optimizer).count() > 10);
        }
    }

    #[test]
    fn the_number_of_lists_is_that_of_the_table() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for (pooling_factor, list_dedupe_factor) in [(20.0, 2.0), (0.5, 8.0)] {
            let table = Table {
                first: Lookups {
                    pooling_factor,
                    dedupe_factor: 2.0,
                    list_dedupe_factor: Some(list_dedupe_factor),
                    ..Lookups::default()
                },
                ..Table::new("t", 100, 4)
            };
            let lookups = table.lookups().next().unwrap();
            let [lists, ids] = lookups.distinct(40_000.0);
            let (_, group) = fill(&mut rng, ("f", &table), (lookups, 0.8), 40_000).unwrap();
            let feature = &group.features()[0];
            assert_eq!(feature.rows() as f64, lists);
            assert!((feature.values().len() as f64 / ids - 1.0).abs() < 0.03, "{}", feature.values().len());
            assert!(feature.sizes().iter().all(|size| *size > 0));
        }
    }

    #[test]
    fn spreading_is_a_permutation_of_rows() {
        let mut seen: Vec<u64> = (0..1000).map(|row| spread(row, 1000)).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    }
}
