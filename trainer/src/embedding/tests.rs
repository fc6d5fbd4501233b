use onefold_ikjt::{Feature, deduplicate, fold_windows};
use onefold_sharding::{IdPolicy, Pooling};
use proptest::prelude::*;

use super::*;

type Lists = Vec<Vec<i64>>;

const ROWS: u64 = 10;
const DIM: usize = 3;

fn optimizer(kind: TableOptimizerKind) -> TableOptimizerConfig {
    TableOptimizerConfig { kind, learning_rate: 0.1, eps: 1e-8, beta1: 0.9, beta2: 0.999 }
}

fn config(feature: &str, pooling: Pooling) -> TableConfig {
    let (feature, target, ids) = (feature.into(), None, IdPolicy::Checked);
    TableConfig { feature, rows: ROWS, dim: DIM as u64, pooling, target, ids }
}

fn configs() -> [TableConfig; 3] {
    [config("a", Pooling::Sum), config("b", Pooling::Attention), config("c", Pooling::Mean)]
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
        tables.iter().map(|table| table.weights().iter().map(|w| f64::from(*w)).collect()).collect();
    for sample in 0..group.samples() {
        for (f, (feature, table)) in group.features().iter().zip(tables).enumerate() {
            let ids = feature.row(group.row_of(sample));
            let mean = table.config().pooling == Pooling::Mean;
            let scale = if mean { 1.0 / ids.len().max(1) as f64 } else { 1.0 };
            for d in 0..DIM {
                let weight = |id: &i64| f64::from(table.weights()[*id as usize * DIM + d]);
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
    LookupGradients { pooled, sequences: vec![sequence] }
}

proptest! {
    #[test]
    fn lookups_and_updates_equal_the_definition(
        plain in groups(), form in 0_usize..3, pooling: bool, sequences: bool,
    ) {
        let group = match form {
            0 => plain,
            1 => deduplicate(&plain),
            _ => fold_windows(&deduplicate(&plain)),
        };
        let sgd = optimizer(TableOptimizerKind::Sgd);
        let mut embeddings = Embeddings::new(&configs(), &sgd, 7, 2).unwrap();
        let (expected, updated) = naive(&group, &embeddings.tables);
        let steps = Steps { pooling, sequences, ..Steps::default() };
        let lookups = embeddings.forward(std::slice::from_ref(&group), steps).unwrap();
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
        for (table, expected) in embeddings.tables.iter().zip(updated) {
            for (weight, expected) in table.weights().iter().zip(expected) {
                prop_assert!((f64::from(*weight) - expected).abs() < 1e-4, "{weight} {expected}");
            }
        }
    }
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
        let mut embeddings = Embeddings::new(&[config("a", Pooling::Sum)], &optimizer, 1, 1).unwrap();
        let before = embeddings.tables[0].clone();
        assert_eq!(before.accumulators().len(), ROWS as usize * width, "{kind:?}");
        let lookups = embeddings.forward(std::slice::from_ref(&group), Steps::default()).unwrap();
        let gradients = LookupGradients { pooled: vec![1.0; 2 * DIM], sequences: Vec::new() };
        embeddings.update(&lookups, &[gradients], &optimizer);
        for row in 0..ROWS as usize {
            let (old, new) =
                (&before.weights()[row * DIM..][..DIM], &embeddings.tables[0].weights()[row * DIM..]);
            assert_eq!(old == &new[..DIM], ![3, 5].contains(&row), "{kind:?}, row {row}");
        }
    }
}

#[test]
fn ids_without_a_row_are_named_or_hashed() {
    let feature = |id: i64| Feature::from_rows("a", &[[3_i64], [id]]).unwrap();
    let optimizer = optimizer(TableOptimizerKind::Sgd);
    let forward = |config: TableConfig, id: i64| {
        let group = Group::try_new("g", None, vec![feature(id)]).unwrap();
        Embeddings::new(&[config], &optimizer, 1, 1).unwrap().forward(&[group], Steps::default())
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
    let tables = |threads| Embeddings::new(&configs, &optimizer, 3, threads).unwrap().tables;
    assert_eq!(tables(1), tables(4));
    let weights = |seed, stream| Table::new(&configs[0], seed, stream, 1).weights().to_vec();
    assert_ne!(weights(3, 0), weights(4, 0));
    assert_ne!(weights(3, 0), weights(3, 1));
}
