use onefold_ikjt::{Feature, deduplicate, fold_windows};
use onefold_kernels::element::Elements;
use onefold_sharding::{DataType, IdPolicy, Pooling};
use proptest::prelude::*;

use super::*;
use crate::config::TableOptimizer;
use crate::tensors;

mod buffers;
mod device;
mod waiting;

type Lists = Vec<Vec<i64>>;

const ROWS: u64 = 10;
const DIM: usize = 3;

fn optimizer(kind: TableOptimizer) -> TableOptimizerConfig {
    TableOptimizerConfig::new(kind, 0.1)
}

fn config(feature: &str, pooling: Pooling) -> FeatureConfig {
    let (feature, target, ids, dtype) = (feature.into(), None, IdPolicy::Checked, DataType::Fp32);
    FeatureConfig { feature, table: None, rows: ROWS, dim: DIM as u64, pooling, target, ids, dtype }
}

/// The table of each of three features: separate or shared.
const SHARING: [[usize; 3]; 4] = [[0, 1, 2], [0, 1, 0], [0, 1, 1], [0, 0, 0]];

fn configs(dtype: DataType, table_of: [usize; 3]) -> [FeatureConfig; 3] {
    let configs = [config("a", Pooling::Sum), config("b", Pooling::Attention), config("c", Pooling::Mean)];
    let mut tables = table_of.into_iter().map(|table| Some(format!("table {table}")));
    configs.map(|config| FeatureConfig { dtype, table: tables.next().unwrap(), ..config })
}

fn sharing() -> impl Strategy<Value = [usize; 3]> {
    prop::sample::select(SHARING.to_vec())
}

/// Returns the table of a feature.
fn table_of(config: &FeatureConfig) -> TableConfig {
    tables_of(std::slice::from_ref(config)).0.remove(0)
}

fn dtypes() -> impl Strategy<Value = DataType> {
    prop::sample::select(vec![DataType::Fp32, DataType::Bf16, DataType::Fp16])
}

/// Returns the distance from a value to the next value of a type.
fn step(dtype: DataType, value: f64) -> f64 {
    match dtype {
        DataType::Fp32 => 0.0,
        DataType::Bf16 => value.abs() * 2_f64.powi(-7),
        DataType::Fp16 => (value.abs() * 2_f64.powi(-10)).max(2_f64.powi(-24)),
    }
}

/// Seven samples of three features, with lists that repeat and slide.
fn groups() -> impl Strategy<Value = Group> {
    let lists = || {
        let random = prop::collection::vec(prop::collection::vec(0_i64..10, 0..6), 7);
        let sliding = (0_i64..4, 1_i64..6).prop_map(|(start, length)| {
            (0..7).map(|i| (start + i / 2..start + i / 2 + length).map(|id| id % 10).collect()).collect()
        });
        prop_oneof![random, sliding]
    };
    (lists(), lists(), lists()).prop_map(|(a, b, c): (Lists, Lists, Lists)| {
        let feature = |name: &str, rows: &[Vec<i64>]| Feature::from_rows(name, rows).unwrap();
        Group::try_new("g", None, vec![feature("a", &a), feature("b", &b), feature("c", &c)]).unwrap()
    })
}

/// Returns the gradient of a sample's pooled vector of feature `f` in dimension `d`.
fn upstream(sample: usize, f: usize, d: usize) -> f32 {
    (sample + 2 * f + 1) as f32 / (d + 1) as f32
}

/// Computes by the definition, in double precision on samples: pooled vectors, and the tables after an SGD step
/// with rate 0.1. The gradient of an element of feature b is the gradient of its sample.
fn naive(group: &Group, configs: &[FeatureConfig], before: &[Vec<f32>]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (_, table_of) = tables_of(configs);
    let mut pooled = Vec::new();
    let mut updated: Vec<Vec<f64>> =
        before.iter().map(|weights| weights.iter().map(|weight| f64::from(*weight)).collect()).collect();
    let stored = updated.clone();
    for sample in 0..group.samples() {
        for (f, (feature, config)) in group.features().iter().zip(configs).enumerate() {
            let ids = feature.row(group.row_of(sample));
            let (mean, table) = (config.pooling == Pooling::Mean, table_of[f]);
            let scale = if mean { 1.0 / ids.len().max(1) as f64 } else { 1.0 };
            for d in 0..DIM {
                let weight = |id: &i64| stored[table][*id as usize * DIM + d];
                if f != 1 {
                    pooled.push(scale * ids.iter().map(weight).sum::<f64>());
                }
                for id in ids {
                    let gradient = scale * f64::from(upstream(sample, f, d));
                    updated[table][*id as usize * DIM + d] -= f64::from(0.1_f32) * gradient;
                }
            }
        }
    }
    (pooled, updated)
}

/// Returns the gradients that autograd and the attention kernel would compute from [`upstream`], summed by the
/// lookup's rows and values. The group's first sample has the number `first`.
fn gradients(group: &Group, lookup: &Lookup, first: usize) -> LookupGradients {
    let mut pooled = vec![0.0; lookup.pooled.len()];
    let mut sequence = vec![0.0; lookup.sequences[0].table_rows.len() * DIM];
    for sample in 0..group.samples() {
        let row = group.row_of(sample);
        for (slot, f) in [(0, 0), (1, 2)] {
            for d in 0..DIM {
                pooled[(row * 2 + slot) * DIM + d] += upstream(first + sample, f, d);
            }
        }
        let rows = &lookup.sequences[0].rows;
        for value in rows.offsets[row]..rows.offsets[row] + rows.sizes[row] {
            for d in 0..DIM {
                sequence[value as usize * DIM + d] += upstream(first + sample, 1, d);
            }
        }
    }
    LookupGradients { pooled, sequences: vec![sequence] }
}

/// Returns whole tables on one rank.
fn alone(
    configs: &[FeatureConfig],
    optimizer: &TableOptimizerConfig,
    seed: u64,
    threads: usize,
) -> Embeddings {
    Embeddings::new(configs, &Placement::alone(configs), optimizer, seed, threads).unwrap()
}

fn look_up(embeddings: &Embeddings, group: &Group) -> Lookups {
    let request = embeddings.request(std::slice::from_ref(group), Status::default()).unwrap();
    embeddings.host().unwrap().lookup(request).unwrap()
}

fn update(
    embeddings: &mut Embeddings,
    lookups: &Lookups,
    gradients: LookupGradients,
    optimizer: &TableOptimizerConfig,
) {
    let gradients = [gradients];
    let sent = embeddings.host().unwrap().send_gradients(lookups, &gradients).unwrap();
    embeddings.update(lookups, &gradients, sent, optimizer).unwrap();
}

impl Embeddings {
    /// Returns the weights of a table, `[rows, dim]`, or `None` if the table is not whole on this rank.
    pub(crate) fn weights(&self, table: usize) -> std::io::Result<Option<Vec<f32>>> {
        let Some(shard) = self.exchange.whole(table) else { return Ok(None) };
        let mut bytes = Vec::new();
        self.read(shard, 0, RowSet::All, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(Some(widened(self.layout.tables[table].dtype, &bytes)))
    }
}

/// Converts stored weights to 32-bit floats.
fn widened(dtype: DataType, bytes: &[u8]) -> Vec<f32> {
    // The bytes may be unaligned.
    let halves = || bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect::<Vec<_>>();
    match dtype {
        DataType::Fp32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        DataType::Bf16 => Elements::Bf16(&halves()).to_f32(),
        DataType::Fp16 => Elements::Fp16(&halves()).to_f32(),
    }
}

fn weights(embeddings: &Embeddings, table: usize) -> Vec<f32> {
    embeddings.weights(table).unwrap().expect("the table is whole")
}

fn folded(plain: &Group, form: usize) -> Group {
    match form {
        0 => plain.clone(),
        1 => deduplicate(plain),
        _ => fold_windows(&deduplicate(plain)),
    }
}

proptest! {
    #[test]
    fn lookups_and_updates_equal_the_definition(
        plain in groups(), form in 0_usize..3, dtype in dtypes(), sharing in sharing(),
    ) {
        let group = folded(&plain, form);
        let sgd = optimizer(TableOptimizer::Sgd);
        let configs = configs(dtype, sharing);
        let mut embeddings = alone(&configs, &sgd, 7, 2);
        let tables = 0..embeddings.tables().len();
        let before: Vec<Vec<f32>> = tables.map(|table| weights(&embeddings, table)).collect();
        let (expected, updated) = naive(&group, &configs, &before);
        let lookups = look_up(&embeddings, &group);
        for sample in 0..group.samples() {
            let found = &lookups.groups[0].pooled[group.row_of(sample) * 2 * DIM..][..2 * DIM];
            for (found, expected) in found.iter().zip(&expected[sample * 2 * DIM..]) {
                prop_assert!((f64::from(*found) - expected).abs() < 1e-5);
            }
        }
        let gradients = gradients(&group, &lookups.groups[0], 0);
        update(&mut embeddings, &lookups, gradients, &sgd);
        prop_assert_eq!(embeddings.steps(), 1);
        for (table, expected) in updated.into_iter().enumerate() {
            for (weight, expected) in weights(&embeddings, table).into_iter().zip(expected) {
                let bound = 1e-4 + step(dtype, expected);
                prop_assert!((f64::from(weight) - expected).abs() < bound, "{weight} {expected}");
            }
        }
    }
}

/// Rows that several features look up are updated once, with the sum of all gradients, as if one feature had the
/// samples of all of them.
#[test]
fn a_shared_row_is_updated_once() {
    let (a, b) = ([vec![3_i64, 5], vec![5, 5], vec![]], [vec![5_i64], vec![1, 3], vec![9]]);
    let feature = |name: &str, rows: &[Vec<i64>]| Feature::from_rows(name, rows).unwrap();
    let group = |features| Group::try_new("g", None, features).unwrap();
    let features =
        ["a", "b"].map(|name| FeatureConfig { table: Some("t".into()), ..config(name, Pooling::Sum) });
    let both = group(vec![feature("a", &a), feature("b", &b)]);
    let one = group(vec![feature("t", &[a, b].concat())]);
    let gradient: Vec<f32> = (0..6 * DIM).map(|i| (i % 5) as f32 - 1.5).collect();
    // The same gradients, ordered by sample and feature.
    let by_sample = (0..3).flat_map(|sample| [sample, 3 + sample]);
    let of_both: Vec<f32> = by_sample.flat_map(|row| gradient[row * DIM..(row + 1) * DIM].to_vec()).collect();
    let kinds =
        [TableOptimizer::RowWiseAdagrad, TableOptimizer::Adagrad, TableOptimizer::Sgd, TableOptimizer::Adam];
    for (kind, max_row_grad_norm) in kinds.into_iter().flat_map(|kind| [(kind, None), (kind, Some(0.7))]) {
        let optimizer = TableOptimizerConfig { max_row_grad_norm, ..optimizer(kind) };
        let train = |features: &[FeatureConfig], group: &Group, pooled: &[f32]| {
            let mut embeddings = alone(features, &optimizer, 3, 1);
            for _ in 0..3 {
                let lookups = look_up(&embeddings, group);
                let gradients = LookupGradients { pooled: pooled.to_vec(), sequences: Vec::new() };
                update(&mut embeddings, &lookups, gradients, &optimizer);
            }
            (stored(&embeddings, 0), embeddings.touched(0))
        };
        let expected = train(&[config("t", Pooling::Sum)], &one, &gradient);
        assert_eq!(train(&features, &both, &of_both), expected, "{kind:?}, {max_row_grad_norm:?}");
        assert_eq!(expected.1, [1, 3, 5, 9]);
    }
}

/// Ways to divide a table of ten rows and three columns over `ranks` ranks.
fn divisions(ranks: u32) -> impl Strategy<Value = Vec<Shard>> {
    let shard = |rank, rows, columns| Shard { table: 0, rank, rows, columns };
    let rank = || 0..ranks;
    prop_oneof![
        rank().prop_map(move |rank| vec![shard(rank, 0..ROWS, 0..3)]),
        (rank(), rank(), rank(), 1..5_u64, 5..ROWS).prop_map(move |(a, b, c, first, second)| vec![
            shard(a, 0..first, 0..3),
            shard(b, first..second, 0..3),
            shard(c, second..ROWS, 0..3),
        ]),
        (rank(), rank(), 1..3_u64)
            .prop_map(move |(a, b, cut)| vec![shard(a, 0..ROWS, 0..cut), shard(b, 0..ROWS, cut..3)]),
        Just((0..ranks).map(|rank| shard(rank, 0..ROWS, 0..3)).collect()),
    ]
}

/// Shards of three tables, and the batch of every rank.
fn jobs() -> impl Strategy<Value = (Vec<Shard>, Vec<Group>)> {
    (1_u32..5).prop_flat_map(|ranks| {
        let tables = (divisions(ranks), divisions(ranks), divisions(ranks));
        let shards = tables.prop_map(|(a, b, c)| {
            let tables = [a, b, c].into_iter().enumerate();
            let numbered = |(table, shards): (usize, Vec<Shard>)| {
                shards.into_iter().map(move |shard| Shard { table, ..shard })
            };
            tables.flat_map(numbered).collect()
        });
        (shards, prop::collection::vec(groups(), ranks as usize))
    })
}

/// Returns the contents of all buffers of a shard.
fn stored(embeddings: &Embeddings, shard: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for buffer in 0..embeddings.buffers(shard).len() {
        let mut sink = |bytes: &[u8]| {
            all.extend_from_slice(bytes);
            Ok(())
        };
        embeddings.read(shard, buffer, RowSet::All, &mut sink).unwrap();
    }
    all
}

/// Runs `work` on every rank of a job, each on a separate thread. Returns the results, by rank.
fn on_ranks<T: Send>(ranks: usize, work: impl Fn(Arc<dyn Collectives>) -> T + Sync) -> Vec<T> {
    let collectives = crate::distributed::threads(ranks as u32, std::time::Duration::from_secs(300));
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            collectives.into_iter().map(|own| scope.spawn(move || work(Arc::new(own)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The lookups and the shards of a rank after three steps.
struct Outcome {
    /// For each step, the pooled vectors, and the vectors of the sequence's values.
    vectors: Vec<(Vec<f32>, Vec<f32>)>,
    /// For each shard, its index, the contents of all buffers, and the rows that changed.
    shards: Vec<(usize, Vec<u8>, Vec<u32>)>,
}

/// Takes three steps with one batch. The batch's first sample has the number `first`.
fn three_steps(
    embeddings: &mut Embeddings,
    group: &Group,
    first: usize,
    optimizer: &TableOptimizerConfig,
) -> Outcome {
    let mut vectors = Vec::new();
    for _ in 0..3 {
        let lookups = look_up(embeddings, group);
        let lookup = &lookups.groups[0];
        let sequence = embeddings.host().unwrap().sequence(&lookup.sequences[0]);
        let vector = |&row: &u32| sequence.table.slice(row as usize * DIM, DIM).to_f32();
        vectors.push((lookup.pooled.clone(), sequence.rows.iter().flat_map(vector).collect()));
        let gradients = gradients(group, lookup, first);
        update(embeddings, &lookups, gradients, optimizer);
    }
    let held = (0..embeddings.shards().len()).filter(|shard| embeddings.holds(*shard));
    let shards = held.map(|shard| (shard, stored(embeddings, shard), embeddings.touched(shard)));
    Outcome { shards: shards.collect(), vectors }
}

/// Returns the samples of all ranks as one batch.
fn together(groups: &[Group]) -> Group {
    let feature = |number: usize| {
        let rows = groups.iter().flat_map(|group| {
            (0..group.samples())
                .map(move |sample| group.features()[number].row(group.row_of(sample)).to_vec())
        });
        Feature::from_rows(groups[0].features()[number].name(), &rows.collect::<Vec<_>>()).unwrap()
    };
    Group::try_new("g", None, (0..3).map(feature).collect()).unwrap()
}

fn near(found: &[f32], expected: &[f32], bound: impl Fn(f32) -> f32) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= bound(*b))
}

proptest! {
    #![proptest_config(onefold_property::cases(96))]
    #[test]
    fn lookups_and_updates_of_several_ranks_equal_those_of_one(
        (shards, plain) in jobs(), form in 0_usize..3,
        kind in prop::sample::select(vec![
            TableOptimizer::Sgd, TableOptimizer::Adagrad, TableOptimizer::Adam,
            TableOptimizer::RowWiseAdagrad,
        ]),
        dtype in dtypes(), max_norm in prop::option::of(0.5_f32..20.0), sharing in sharing(),
        wire in prop::sample::select(vec![DataType::Fp32, DataType::Fp32, DataType::Bf16, DataType::Fp16]),
    ) {
        let configs = configs(dtype, sharing);
        let (tables, _) = tables_of(&configs);
        let shards: Vec<Shard> = shards.into_iter().filter(|shard| shard.table < tables.len()).collect();
        // A column shard has an accumulator of its own columns.
        let divides_columns = shards.iter().any(|shard| shard.columns != (0..DIM as u64));
        prop_assume!(!divides_columns || kind != TableOptimizer::RowWiseAdagrad && max_norm.is_none());
        let optimizer = TableOptimizerConfig { max_row_grad_norm: max_norm, eps: 0.1, ..optimizer(kind) };
        let all = together(&plain);
        let mut reference = alone(&configs, &optimizer, 7, 2);
        let expected = three_steps(&mut reference, &all, 0, &optimizer);
        let found = on_ranks(plain.len(), |collectives| {
            let rank = collectives.rank() as usize;
            let placement = Placement { shards: shards.clone(), collectives, dtype: wire };
            let mut embeddings = Embeddings::new(&configs, &placement, &optimizer, 7, 1).unwrap();
            let samples: usize = plain[..rank].iter().map(Group::samples).sum();
            three_steps(&mut embeddings, &folded(&plain[rank], form), samples, &optimizer)
        });
        // The tolerance for 16-bit messages and 16-bit weights, which are rounded in every step.
        let coarse = |dtype, value: f32| 10.0 * step(dtype, f64::from(value).abs().max(1.0)) as f32;
        let bound = |value: f32| 1e-4 + coarse(dtype, value) + 4.0 * coarse(wire, value);
        let mut first = 0;
        for (rank, outcome) in found.iter().enumerate() {
            let group = folded(&plain[rank], form);
            for (step, (pooled, _)) in outcome.vectors.iter().enumerate() {
                for sample in 0..group.samples() {
                    let own = &pooled[group.row_of(sample) * 2 * DIM..][..2 * DIM];
                    let expected = &expected.vectors[step].0[(first + sample) * 2 * DIM..][..2 * DIM];
                    prop_assert!(near(own, expected, bound), "rank {rank}, step {step}: {own:?} {expected:?}");
                }
            }
            for (number, bytes, touched) in &outcome.shards {
                let shard = &shards[*number];
                let whole = weights(&reference, shard.table);
                let rows = shard.rows.start as usize..shard.rows.end as usize;
                let columns = shard.columns.start as usize..shard.columns.end as usize;
                let expected_weights: Vec<f32> =
                    rows.clone().flat_map(|row| whole[row * DIM..][columns.clone()].to_vec()).collect();
                let size = expected_weights.len() * dtype.bytes() as usize;
                let found = widened(dtype, &bytes[..size]);
                prop_assert!(near(&found, &expected_weights, bound), "{shard:?}: {found:?} {expected_weights:?}");
                let expected_rows: Vec<u32> = reference.touched(shard.table).into_iter()
                    .filter(|row| rows.contains(&(*row as usize)))
                    .map(|row| row - rows.start as u32)
                    .collect();
                prop_assert_eq!(touched, &expected_rows);
            }
            first += plain[rank].samples();
        }
        // Replicas are equal in all bits.
        let all_shards: Vec<_> = found.iter().flat_map(|outcome| &outcome.shards).collect();
        for (i, bytes, _) in &all_shards {
            for (j, other, _) in &all_shards {
                prop_assert!(!shards[*i].is_replica_of(&shards[*j]) || bytes == other);
            }
        }
    }
}

/// A shard begins with the initial weights of its rectangle of the whole table.
#[test]
fn a_shard_has_the_initial_weights_of_its_rectangle() {
    let optimizer = optimizer(TableOptimizer::Sgd);
    let config = FeatureConfig { rows: 100, dim: 12, ..config("a", Pooling::Sum) };
    let config = table_of(&config);
    let whole = Table::initial(&config, &optimizer, 5, &Shard::whole(3, &config, 0)).weights().to_f32();
    for (rows, columns) in
        [(0..100, 0..12), (7..31, 0..12), (99..100, 0..12), (0..100, 4..8), (13..50, 11..12)]
    {
        let shard = Shard { table: 3, rank: 0, rows: rows.clone(), columns: columns.clone() };
        let found = Table::initial(&config, &optimizer, 5, &shard).weights().to_f32();
        let expected = rows.flat_map(|row| {
            whole[row as usize * 12..][columns.start as usize..columns.end as usize].to_vec()
        });
        assert_eq!(found, expected.collect::<Vec<f32>>(), "{shard:?}");
    }
}

/// With row-wise Adagrad, a column shard learns like a separate table with these columns.
#[test]
fn a_column_shard_has_its_own_accumulator() {
    let optimizer = optimizer(TableOptimizer::RowWiseAdagrad);
    let config = [config("a", Pooling::Sum)];
    let shards = [0..1, 1..3].map(|columns| Shard { table: 0, rank: 0, rows: 0..ROWS, columns });
    let placement = Placement { shards: shards.to_vec(), ..Placement::alone(&config) };
    let mut sharded = Embeddings::new(&config, &placement, &optimizer, 1, 1).unwrap();
    let feature = Feature::from_rows("a", &[[3_i64, 5], [5, 5]]).unwrap();
    let group = Group::try_new("g", None, vec![feature]).unwrap();
    let lookups = look_up(&sharded, &group);
    let pooled = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    update(&mut sharded, &lookups, LookupGradients { pooled, sequences: Vec::new() }, &optimizer);
    // Row 5 has the gradients [1, 2, 3] + 2 [4, 5, 6].
    for (shard, (row_3, row_5)) in [(1.0, 81.0), (6.5, (144.0 + 225.0) / 2.0)].into_iter().enumerate() {
        let mut accumulators = Vec::new();
        let mut sink = |bytes: &[u8]| {
            accumulators.extend_from_slice(bytemuck::cast_slice::<u8, f32>(bytes));
            Ok(())
        };
        sharded.read(shard, 1, RowSet::All, &mut sink).unwrap();
        assert_eq!((accumulators[3], accumulators[5]), (row_3, row_5));
    }
}

#[test]
fn a_plan_gives_shards_in_the_order_of_tables() {
    use onefold_sharding::{AnalyticCost, ShardingType, Table as Planned, TablePlan, Topology};
    let configs = [config("a", Pooling::Sum), config("b", Pooling::Sum)];
    let planned = [Planned::new("b", ROWS, DIM as u64), Planned::new("a", ROWS, DIM as u64)];
    let mut placed = vec![TablePlan::table_wise(&planned[0], 1), TablePlan::table_wise(&planned[1], 0)];
    placed[0].sharding_type = ShardingType::RowWise;
    placed[0].shards[0].rows = 0..4;
    placed[0].shards.push(onefold_sharding::Shard { rank: 0, rows: 4..ROWS, columns: 0..DIM as u64 });
    let topology = Topology::h100(2, 1 << 30).unwrap();
    let plan = onefold_sharding::Plan::predict(
        "test",
        &planned,
        placed,
        &topology,
        &AnalyticCost,
        topology.global_batch_size(8),
    )
    .unwrap();
    let shard = |table, rank, rows| Shard { table, rank, rows, columns: 0..DIM as u64 };
    let expected = [shard(0, 0, 0..ROWS), shard(1, 1, 0..4), shard(1, 0, 4..ROWS)];
    assert_eq!(Shard::of_plan(&plan, &configs).unwrap(), expected);
    // Features that share a table use one table of the plan.
    let shared =
        ["x", "y"].map(|name| FeatureConfig { table: Some("a".into()), ..config(name, Pooling::Sum) });
    let [x, y] = shared;
    assert_eq!(Shard::of_plan(&plan, &[x, configs[1].clone(), y]).unwrap(), expected);
    let error = Shard::of_plan(&plan, &configs[..1]).unwrap_err().to_string();
    assert!(error.contains("it places table `b`, which should not be there"), "{error}");
}

#[test]
fn every_optimizer_touches_the_rows_of_the_batch_alone() {
    let feature = Feature::from_rows("a", &[[3_i64, 5], [5, 5]]).unwrap();
    let group = Group::try_new("g", None, vec![feature]).unwrap();
    let kinds =
        [TableOptimizer::RowWiseAdagrad, TableOptimizer::Adagrad, TableOptimizer::Sgd, TableOptimizer::Adam];
    for (kind, width) in kinds.into_iter().zip([1, DIM, 0, 2 * DIM]) {
        let optimizer = optimizer(kind);
        let mut embeddings = alone(&[config("a", Pooling::Sum)], &optimizer, 1, 1);
        let before = weights(&embeddings, 0);
        assert_eq!(embeddings.buffers(0)[1].columns, width, "{kind:?}");
        let lookups = look_up(&embeddings, &group);
        let gradients = LookupGradients { pooled: vec![1.0; 2 * DIM], sequences: Vec::new() };
        update(&mut embeddings, &lookups, gradients, &optimizer);
        let after = weights(&embeddings, 0);
        for row in 0..ROWS as usize {
            let same = before[row * DIM..][..DIM] == after[row * DIM..][..DIM];
            assert_eq!(same, ![3, 5].contains(&row), "{kind:?}, row {row}");
        }
        assert_eq!(embeddings.touched(0), [3, 5]);
        embeddings.clear_touched();
        assert!(embeddings.touched(0).is_empty());
    }
}

#[test]
fn noise_does_not_depend_on_what_came_before() {
    // All rows are looked up, so that many weights are rounded.
    let feature = Feature::from_rows("a", &[[0_i64, 1, 2, 3, 4], [5, 6, 7, 8, 9]]).unwrap();
    let group = Group::try_new("g", None, vec![feature]).unwrap();
    let optimizer = optimizer(TableOptimizer::Sgd);
    let config = FeatureConfig { dtype: DataType::Bf16, ..config("a", Pooling::Sum) };
    let step = |embeddings: &mut Embeddings| {
        let lookups = look_up(embeddings, &group);
        let pooled = (0..2 * DIM).map(|i| 0.013 * (i as f32 + 1.0)).collect::<Vec<_>>();
        update(embeddings, &lookups, LookupGradients { pooled, sequences: Vec::new() }, &optimizer);
    };
    let new = |seed| alone(std::slice::from_ref(&config), &optimizer, seed, 1);
    let (mut whole, mut before) = (new(1), new(1));
    step(&mut whole);
    step(&mut before);
    // A resumed run: a new table, filled from a checkpoint.
    let mut resumed = new(1);
    let mut bytes = Vec::new();
    before
        .read(0, 0, RowSet::All, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })
        .unwrap();
    resumed
        .write(0, 0, RowSet::All, &mut |part| {
            part.copy_from_slice(&bytes);
            Ok(())
        })
        .unwrap();
    resumed.set_steps(before.steps());
    step(&mut whole);
    step(&mut resumed);
    assert_eq!(stored(&whole, 0), stored(&resumed, 0));
    // Another step has other noise.
    resumed
        .write(0, 0, RowSet::All, &mut |part| {
            part.copy_from_slice(&bytes);
            Ok(())
        })
        .unwrap();
    step(&mut resumed);
    assert_ne!(stored(&whole, 0), stored(&resumed, 0));
}

#[test]
fn ids_without_a_row_are_named_or_hashed() {
    let feature = |id: i64| Feature::from_rows("a", &[[3_i64], [id]]).unwrap();
    let optimizer = optimizer(TableOptimizer::Sgd);
    let forward = |config: FeatureConfig, id: i64| {
        let group = Group::try_new("g", None, vec![feature(id)]).unwrap();
        alone(&[config], &optimizer, 1, 1).request(&[group], Status::default())
    };
    for id in [10, -1, i64::MIN, i64::MAX] {
        let error = forward(config("a", Pooling::Sum), id).unwrap_err().to_string();
        let expected = format!("feature `a`: id {id} is outside the table's rows 0..10");
        assert!(error.starts_with(&expected), "{error}");
        let hashed = FeatureConfig { ids: IdPolicy::Hashed, ..config("a", Pooling::Sum) };
        assert!(forward(hashed, id).is_ok());
    }
}

#[test]
fn threads_change_nothing() {
    let configs: Vec<_> = (0..5).map(|i| config(&format!("f{i}"), Pooling::Sum)).collect();
    let optimizer = optimizer(TableOptimizer::RowWiseAdagrad);
    let tables = |threads| {
        let embeddings = alone(&configs, &optimizer, 3, threads);
        (0..configs.len()).map(|table| weights(&embeddings, table)).collect::<Vec<_>>()
    };
    assert_eq!(tables(1), tables(4));
    let weights = |seed, table| {
        let config = table_of(&configs[0]);
        let shard = Shard::whole(table, &config, 0);
        Table::initial(&config, &optimizer, seed, &shard).weights().to_f32()
    };
    assert_ne!(weights(3, 0), weights(4, 0));
    assert_ne!(weights(3, 0), weights(3, 1));
}
