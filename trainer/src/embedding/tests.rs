use onefold_ikjt::{Feature, deduplicate, fold_windows};
use onefold_sharding::{DataType, IdPolicy, Pooling};
use proptest::prelude::*;

use super::*;
use crate::config::TableOptimizerKind;

type Lists = Vec<Vec<i64>>;

const ROWS: u64 = 10;
const DIM: usize = 3;

fn optimizer(kind: TableOptimizerKind) -> TableOptimizerConfig {
    TableOptimizerConfig::new(kind, 0.1)
}

fn config(feature: &str, pooling: Pooling) -> TableConfig {
    let (feature, target, ids, dtype) = (feature.into(), None, IdPolicy::Checked, DataType::Fp32);
    TableConfig { feature, rows: ROWS, dim: DIM as u64, pooling, target, ids, dtype }
}

fn configs(dtype: DataType) -> [TableConfig; 3] {
    [config("a", Pooling::Sum), config("b", Pooling::Attention), config("c", Pooling::Mean)]
        .map(|config| TableConfig { dtype, ..config })
}

fn dtypes() -> impl Strategy<Value = DataType> {
    prop::sample::select(vec![DataType::Fp32, DataType::Bf16, DataType::Fp16])
}

/// The distance from a number to the next one of a type.
fn step(dtype: DataType, value: f64) -> f64 {
    match dtype {
        DataType::Fp32 => 0.0,
        DataType::Bf16 => value.abs() * 2_f64.powi(-7),
        DataType::Fp16 => (value.abs() * 2_f64.powi(-10)).max(2_f64.powi(-24)),
    }
}

/// Seven samples of three features, in which lists repeat and slide.
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

/// The gradient of a sample's pooled vector of feature `f` at dimension `d`.
fn upstream(sample: usize, f: usize, d: usize) -> f32 {
    (sample + 2 * f + 1) as f32 / (d + 1) as f32
}

/// The definition in double precision on samples: pooled vectors, and the tables after an SGD step of rate 0.1, where
/// the gradient of an element of feature b is that of its sample.
fn naive(group: &Group, tables: &[Table]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut pooled = Vec::new();
    let mut updated: Vec<Vec<f64>> =
        tables.iter().map(|table| table.weights().to_f32().into_iter().map(f64::from).collect()).collect();
    let stored = updated.clone();
    for sample in 0..group.samples() {
        for (f, (feature, table)) in group.features().iter().zip(tables).enumerate() {
            let ids = feature.row(group.row_of(sample));
            let mean = table.config().pooling == Pooling::Mean;
            let scale = if mean { 1.0 / ids.len().max(1) as f64 } else { 1.0 };
            for d in 0..DIM {
                let weight = |id: &i64| stored[f][*id as usize * DIM + d];
                if f != 1 {
                    pooled.push(scale * ids.iter().map(weight).sum::<f64>());
                }
                for id in ids {
                    let gradient = scale * f64::from(upstream(sample, f, d));
                    updated[f][*id as usize * DIM + d] -= f64::from(0.1_f32) * gradient;
                }
            }
        }
    }
    (pooled, updated)
}

/// What autograd and the attention kernel would give for [`upstream`], folded to the lookup's rows and values.
fn gradients(group: &Group, lookup: &Lookup) -> LookupGradients {
    let row = |sample: usize, by_sample: bool| if by_sample { sample } else { group.row_of(sample) };
    let mut pooled = vec![0.0; lookup.pooled.len()];
    let mut sequence = vec![0.0; lookup.sequences[0].table_rows.len() * DIM];
    for sample in 0..group.samples() {
        for (slot, f) in [(0, 0), (1, 2)] {
            for d in 0..DIM {
                let at = (row(sample, lookup.pooled_by_sample) * 2 + slot) * DIM + d;
                pooled[at] += upstream(sample, f, d);
            }
        }
        let (rows, row) = (&lookup.sequences[0].rows, row(sample, lookup.sequences_by_sample));
        for value in rows.offsets[row]..rows.offsets[row] + rows.sizes[row] {
            for d in 0..DIM {
                sequence[value as usize * DIM + d] += upstream(sample, 1, d);
            }
        }
    }
    LookupGradients { pooled: pooled.into(), sequences: vec![sequence.into()] }
}

proptest! {
    #[test]
    fn lookups_and_updates_equal_the_definition(
        plain in groups(), form in 0_usize..3, pooling: bool, sequences: bool, dtype in dtypes(),
    ) {
        let group = match form {
            0 => plain,
            1 => deduplicate(&plain),
            _ => fold_windows(&deduplicate(&plain)),
        };
        let sgd = optimizer(TableOptimizerKind::Sgd);
        let mut embeddings = LocalEmbeddings::new(&configs(dtype), &sgd, 7, 2).unwrap();
        let (expected, updated) = naive(&group, embeddings.tables());
        let steps = Steps { pooling, sequences, ..Steps::default() };
        let lookups = embeddings.lookup(std::slice::from_ref(&group), steps).unwrap();
        for sample in 0..group.samples() {
            let row = if lookups[0].pooled_by_sample { sample } else { group.row_of(sample) };
            let found = &lookups[0].pooled[row * 2 * DIM..][..2 * DIM];
            for (found, expected) in found.iter().zip(&expected[sample * 2 * DIM..]) {
                prop_assert!((f64::from(*found) - expected).abs() < 1e-5);
            }
        }
        let gradients = gradients(&group, &lookups[0]);
        embeddings.update(&lookups, &[gradients], &sgd);
        prop_assert_eq!(embeddings.steps(), 1);
        for (table, expected) in embeddings.tables().iter().zip(updated) {
            for (weight, expected) in table.weights().to_f32().into_iter().zip(expected) {
                let bound = 1e-4 + step(dtype, expected);
                prop_assert!((f64::from(weight) - expected).abs() < bound, "{weight} {expected}");
            }
        }
    }
}

/// Ways to divide a table of ten rows and three columns over up to four ranks.
fn divisions() -> impl Strategy<Value = Vec<Shard>> {
    let shard = |rank, rows, columns| Shard { table: 0, rank, rows, columns };
    let rank = || 0_u32..4;
    prop_oneof![
        rank().prop_map(move |rank| vec![shard(rank, 0..ROWS, 0..3)]),
        (rank(), rank(), rank(), 1..5_u64, 5..ROWS).prop_map(move |(a, b, c, first, second)| vec![
            shard(a, 0..first, 0..3),
            shard(b, first..second, 0..3),
            shard(c, second..ROWS, 0..3),
        ]),
        (rank(), rank(), 1..3_u64)
            .prop_map(move |(a, b, cut)| vec![shard(a, 0..ROWS, 0..cut), shard(b, 0..ROWS, cut..3)]),
        Just((0..4).map(|rank| shard(rank, 0..ROWS, 0..3)).collect()),
    ]
}

fn shards() -> impl Strategy<Value = Vec<Shard>> {
    let tables = (divisions(), divisions(), divisions());
    tables.prop_map(|(a, b, c)| {
        let tables = [a, b, c].into_iter().enumerate();
        let numbered = |(table, shards): (usize, Vec<Shard>)| {
            shards.into_iter().map(move |shard| Shard { table, ..shard })
        };
        tables.flat_map(numbered).collect()
    })
}

/// All of a shard's buffers.
fn stored(embeddings: &dyn Embeddings, shard: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for buffer in 0..embeddings.buffers(shard).len() {
        embeddings
            .read(shard, buffer, RowSet::All, &mut |bytes| {
                all.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap();
    }
    all
}

/// Looks a group up on both, compares what samples get, and updates both; thrice.
fn assert_alike(
    local: &mut LocalEmbeddings,
    sharded: &mut ShardedEmbeddings,
    group: &Group,
    steps: Steps,
    optimizer: &TableOptimizerConfig,
) -> Result<(), TestCaseError> {
    let (group, dtype) = (std::slice::from_ref(group), local.configs()[0].dtype);
    for _ in 0..3 {
        let lookups = [local.lookup(group, steps).unwrap(), sharded.lookup(group, steps).unwrap()];
        let [expected, found] = &lookups;
        prop_assert_eq!(expected[0].pooled.len(), found[0].pooled.len());
        let bound = |value: f32| 1e-4 + 20.0 * step(dtype, f64::from(value).abs().max(1.0)) as f32;
        for (expected, found) in expected[0].pooled.iter().zip(&found[0].pooled[..]) {
            prop_assert!((expected - found).abs() < bound(*expected), "{expected} {found}");
        }
        let sequences = [local.sequence(&expected[0].sequences[0]), sharded.sequence(&found[0].sequences[0])];
        prop_assert_eq!(sequences[0].offsets, sequences[1].offsets);
        prop_assert_eq!(sequences[0].sizes, sequences[1].sizes);
        for (&expected, &found) in sequences[0].rows.iter().zip(sequences[1].rows) {
            let vector =
                |sequence: &Sequence<'_>, row: u32| sequence.table.slice(row as usize * DIM, DIM).to_f32();
            let pairs = vector(&sequences[0], expected).into_iter().zip(vector(&sequences[1], found));
            for (expected, found) in pairs {
                prop_assert!((expected - found).abs() < bound(expected), "{expected} {found}");
            }
        }
        let gradients = [0, 1].map(|i| [gradients(&group[0], &lookups[i][0])]);
        local.update(&lookups[0], &gradients[0], optimizer);
        sharded.update(&lookups[1], &gradients[1], optimizer);
    }
    Ok(())
}

proptest! {
    #[test]
    fn shards_give_and_learn_what_whole_tables_do(
        plain in groups(), form in 0_usize..3, pooling: bool, sequences: bool, shards in shards(),
        kind in prop::sample::select(vec![
            TableOptimizerKind::Sgd, TableOptimizerKind::Adagrad, TableOptimizerKind::Adam,
            TableOptimizerKind::RowWiseAdagrad,
        ]),
        dtype in dtypes(), max_norm in prop::option::of(0.5_f32..20.0),
    ) {
        // A column shard's accumulator is of its own columns.
        let divides_columns = shards.iter().any(|shard| shard.columns != (0..DIM as u64));
        prop_assume!(!divides_columns || kind != TableOptimizerKind::RowWiseAdagrad && max_norm.is_none());
        let group = match form {
            0 => plain,
            1 => deduplicate(&plain),
            _ => fold_windows(&deduplicate(&plain)),
        };
        let optimizer = TableOptimizerConfig { max_row_grad_norm: max_norm, ..optimizer(kind) };
        let mut local = LocalEmbeddings::new(&configs(dtype), &optimizer, 7, 2).unwrap();
        let tables = local.tables().to_vec();
        let mut sharded = ShardedEmbeddings::new(tables, shards.clone(), 2).unwrap();
        prop_assert_eq!(sharded.ranks(), shards.iter().map(|shard| shard.rank + 1).max().unwrap());
        let steps = Steps { pooling, sequences, ..Steps::default() };
        assert_alike(&mut local, &mut sharded, &group, steps, &optimizer)?;
        let (local, sharded): (&dyn Embeddings, &dyn Embeddings) = (&local, &sharded);
        for table in 0..configs(dtype).len() {
            let weights = [local, sharded].map(|embeddings| embeddings.weights(table).unwrap());
            for (expected, found) in weights[0].iter().zip(&weights[1]) {
                // The same noise, and sums that differ in their last bits.
                let bound = 1e-4 + step(dtype, f64::from(*expected)) as f32;
                prop_assert!((expected - found).abs() <= bound, "{expected} {found}");
            }
        }
        // Replicas stay the same.
        for (i, shard) in shards.iter().enumerate() {
            for (j, other) in shards.iter().enumerate().skip(i + 1) {
                if shard.is_replica_of(other) {
                    prop_assert_eq!(stored(sharded, i), stored(sharded, j));
                }
            }
        }
    }
}

/// With row-wise Adagrad a column shard learns as a table of these columns does.
#[test]
fn a_column_shard_has_its_own_accumulator() {
    let optimizer = optimizer(TableOptimizerKind::RowWiseAdagrad);
    let whole = Table::new(&config("a", Pooling::Sum), 1, 0, 1);
    let shards = [0..1, 1..3].map(|columns| Shard { table: 0, rank: 1, rows: 0..ROWS, columns });
    let parts = shards.clone().map(|shard| whole.part(&shard));
    let mut sharded = ShardedEmbeddings::new(vec![whole], shards.to_vec(), 1).unwrap();
    let feature = Feature::from_rows("a", &[[3_i64, 5], [5, 5]]).unwrap();
    let group = [Group::try_new("g", None, vec![feature]).unwrap()];
    let gradient = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let lookups = sharded.lookup(&group, Steps::default()).unwrap();
    let gradients = LookupGradients { pooled: gradient.to_vec().into(), sequences: Vec::new() };
    sharded.update(&lookups, &[gradients], &optimizer);
    for (number, (part, columns)) in parts.into_iter().zip([0..1, 1..3]).enumerate() {
        let mut local = LocalEmbeddings::from_tables(vec![part], 1).unwrap();
        let lookups = local.lookup(&group, Steps::default()).unwrap();
        let own: Vec<f32> = gradient.chunks(DIM).flat_map(|row| &row[columns.clone()]).copied().collect();
        local.update(&lookups, &[LookupGradients { pooled: own.into(), sequences: Vec::new() }], &optimizer);
        assert_eq!(stored(&local, 0), stored(&sharded, number));
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
    let plan =
        onefold_sharding::Plan::predict("test", &planned, placed, &topology, &AnalyticCost, 8).unwrap();
    let shard = |table, rank, rows| Shard { table, rank, rows, columns: 0..DIM as u64 };
    let expected = [shard(0, 0, 0..ROWS), shard(1, 1, 0..4), shard(1, 0, 4..ROWS)];
    assert_eq!(Shard::of_plan(&plan, &configs).unwrap(), expected);
    let error = Shard::of_plan(&plan, &configs[..1]).unwrap_err().to_string();
    assert!(error.contains("it places table `b`, which should not be there"), "{error}");
}

#[test]
fn every_optimizer_touches_the_rows_of_the_batch_alone() {
    let feature = Feature::from_rows("a", &[[3_i64, 5], [5, 5]]).unwrap();
    let group = Group::try_new("g", None, vec![feature]).unwrap();
    let kinds = [
        TableOptimizerKind::RowWiseAdagrad,
        TableOptimizerKind::Adagrad,
        TableOptimizerKind::Sgd,
        TableOptimizerKind::Adam,
    ];
    for (kind, width) in kinds.into_iter().zip([1, DIM, 0, 2 * DIM]) {
        let optimizer = optimizer(kind);
        let mut embeddings = LocalEmbeddings::new(&[config("a", Pooling::Sum)], &optimizer, 1, 1).unwrap();
        let before = embeddings.tables()[0].clone();
        assert_eq!(before.accumulators().len(), ROWS as usize * width, "{kind:?}");
        let lookups = embeddings.lookup(std::slice::from_ref(&group), Steps::default()).unwrap();
        let gradients = LookupGradients { pooled: vec![1.0; 2 * DIM].into(), sequences: Vec::new() };
        embeddings.update(&lookups, &[gradients], &optimizer);
        for row in 0..ROWS as usize {
            let tables = [&before, &embeddings.tables()[0]];
            let [old, new] = tables.map(|table| table.weights().slice(row * DIM, DIM).to_f32());
            assert_eq!(old == new, ![3, 5].contains(&row), "{kind:?}, row {row}");
        }
    }
}

#[test]
fn noise_does_not_depend_on_what_came_before() {
    // Every row, so that there are many weights to round.
    let feature = Feature::from_rows("a", &[[0_i64, 1, 2, 3, 4], [5, 6, 7, 8, 9]]).unwrap();
    let group = [Group::try_new("g", None, vec![feature]).unwrap()];
    let optimizer = optimizer(TableOptimizerKind::Sgd);
    let config = TableConfig { dtype: DataType::Bf16, ..config("a", Pooling::Sum) };
    let step = |embeddings: &mut LocalEmbeddings| {
        let lookups = embeddings.lookup(&group, Steps::default()).unwrap();
        let pooled = (0..2 * DIM).map(|i| 0.013 * (i as f32 + 1.0)).collect::<Vec<_>>();
        let gradients = LookupGradients { pooled: pooled.into(), sequences: Vec::new() };
        embeddings.update(&lookups, &[gradients], &optimizer);
    };
    let new = |seed| LocalEmbeddings::new(std::slice::from_ref(&config), &optimizer, seed, 1).unwrap();
    let (mut whole, mut before) = (new(1), new(1));
    step(&mut whole);
    step(&mut before);
    // Resumed: a new table, filled from a checkpoint.
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
    let optimizer = optimizer(TableOptimizerKind::Sgd);
    let forward = |config: TableConfig, id: i64| {
        let group = Group::try_new("g", None, vec![feature(id)]).unwrap();
        LocalEmbeddings::new(&[config], &optimizer, 1, 1).unwrap().lookup(&[group], Steps::default())
    };
    for id in [10, -1, i64::MIN, i64::MAX] {
        let error = forward(config("a", Pooling::Sum), id).unwrap_err().to_string();
        let expected = format!("feature `a`: id {id} is outside the table's rows 0..10");
        assert!(error.starts_with(&expected), "{error}");
        let hashed = TableConfig { ids: IdPolicy::Hashed, ..config("a", Pooling::Sum) };
        assert!(forward(hashed, id).is_ok());
    }
}

#[test]
fn threads_change_nothing() {
    let configs: Vec<_> = (0..5).map(|i| config(&format!("f{i}"), Pooling::Sum)).collect();
    let optimizer = optimizer(TableOptimizerKind::RowWiseAdagrad);
    let tables = |threads| LocalEmbeddings::new(&configs, &optimizer, 3, threads).unwrap().tables().to_vec();
    assert_eq!(tables(1), tables(4));
    let weights = |seed, stream| Table::new(&configs[0], seed, stream, 1).weights().to_f32();
    assert_ne!(weights(3, 0), weights(4, 0));
    assert_ne!(weights(3, 0), weights(3, 1));
}
