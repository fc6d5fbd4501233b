//! Random groups and batches for property tests, and the naive model that they are compared with.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray};
use arrow::buffer::ScalarBuffer;
use proptest::prelude::*;

use crate::batch::{Batch, BatchParts, Feature, Group, KeptValues};

/// The ids of one sample for one feature.
pub(crate) type List = Vec<i64>;

/// Returns the list of every sample and feature of a group, `[samples][features]`.
pub(crate) fn lists(group: &Group) -> Vec<Vec<List>> {
    let sample = |i| group.features().iter().map(|feature| feature.row(group.row_of(i)).to_vec()).collect();
    (0..group.samples()).map(sample).collect()
}

/// The values of one sample, independent of how the batch is deduplicated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) dense: Vec<f32>,
    pub(crate) labels: Vec<f32>,
    pub(crate) weight: Option<f32>,
    pub(crate) timestamp: Option<i64>,
    pub(crate) kept: Vec<Option<String>>,
    /// The lists, `[groups][features]`.
    pub(crate) lists: Vec<Vec<List>>,
}

/// Returns the samples of a batch, for comparisons.
pub(crate) fn samples(batch: &Batch) -> Vec<Sample> {
    let groups: Vec<_> = batch.groups().iter().map(lists).collect();
    let row = |matrix: &[f32], width: usize, i: usize| matrix[i * width..(i + 1) * width].to_vec();
    let sample = |i| Sample {
        dense: row(batch.dense(), batch.dense_width(), i),
        labels: row(batch.labels(), batch.label_width(), i),
        weight: batch.weights().map(|weights| weights[i]),
        timestamp: batch.timestamps().map(|timestamps| timestamps[i]),
        kept: batch.kept().iter().map(|column| column.shown(i)).collect(),
        lists: groups.iter().map(|group| group[i].clone()).collect(),
    };
    (0..batch.size()).map(sample).collect()
}

/// The properties that batches must share to be concatenated.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    dense: usize,
    labels: usize,
    weights: bool,
    timestamps: bool,
    /// For every kept column, whether it holds texts.
    kept: Vec<bool>,
    /// The number of features of each group.
    groups: Vec<usize>,
}

/// Generates random shapes: one to three groups of one to three features.
pub(crate) fn shapes() -> impl Strategy<Value = Shape> {
    let groups = prop::collection::vec(1_usize..=3, 1..=3);
    let kept = prop::collection::vec(any::<bool>(), 0..3);
    (0_usize..3, 0_usize..3, any::<bool>(), any::<bool>(), kept, groups).prop_map(
        |(dense, labels, weights, timestamps, kept, groups)| Shape {
            dense,
            labels,
            weights,
            timestamps,
            kept,
            groups,
        },
    )
}

/// Generates batches of `shape` with up to 12 samples.
pub(crate) fn batches_of(shape: Shape) -> impl Strategy<Value = Batch> {
    (0_usize..=12).prop_flat_map(move |size| {
        let shape = shape.clone();
        let groups: Vec<_> =
            shape.groups.iter().enumerate().map(|(i, &features)| groups_of(i, features, size)).collect();
        let floats = |width: usize| prop::collection::vec(-2.0_f32..2.0, size * width);
        let weights = floats(1);
        let timestamps = prop::collection::vec(any::<i64>(), size);
        let kept: Vec<_> =
            shape.kept.iter().enumerate().map(|(i, &is_text)| kept_values(i, is_text, size)).collect();
        (floats(shape.dense), floats(shape.labels), weights, timestamps, kept, groups).prop_map(
            move |(dense, labels, weights, timestamps, kept, groups)| {
                Batch::try_new(BatchParts {
                    size,
                    dense: dense.into(),
                    labels: labels.into(),
                    weights: shape.weights.then(|| weights.into()),
                    timestamps: shape.timestamps.then(|| timestamps.into()),
                    kept,
                    groups,
                })
                .unwrap()
            },
        )
    })
}

/// Generates the kept column `k{index}`, with nulls.
fn kept_values(index: usize, is_text: bool, size: usize) -> impl Strategy<Value = KeptValues> {
    prop::collection::vec(prop::option::of(any::<i64>()), size).prop_map(move |values| {
        let values: ArrayRef = if is_text {
            let texts = values.iter().map(|value| value.map(|value| "é".repeat(value as usize % 4)));
            Arc::new(texts.collect::<StringArray>())
        } else {
            Arc::new(Int64Array::from(values))
        };
        KeptValues::new(format!("k{index}"), values)
    })
}

/// Generates random batches.
pub(crate) fn batches() -> impl Strategy<Value = Batch> {
    shapes().prop_flat_map(batches_of)
}

/// Generates random groups: plain, exactly deduplicated and partially deduplicated (with overlapping rows).
pub(crate) fn groups() -> impl Strategy<Value = Group> {
    (1_usize..=3, 0_usize..=16).prop_flat_map(|(features, size)| groups_of(0, features, size))
}

/// Generates group `g{index}` with the features `f{index}_0`, `f{index}_1`, ... and `size` samples.
fn groups_of(index: usize, features: usize, size: usize) -> impl Strategy<Value = Group> {
    inverses(size).prop_flat_map(move |(inverse, rows)| {
        let inverse: Option<ScalarBuffer<i32>> = inverse.map(Into::into);
        let features: Vec<_> = (0..features).map(|i| features_of(format!("f{index}_{i}"), rows)).collect();
        features
            .prop_map(move |features| Group::try_new(format!("g{index}"), inverse.clone(), features).unwrap())
    })
}

/// Generates an inverse index (`None` for a plain group) and the number of rows.
fn inverses(size: usize) -> impl Strategy<Value = (Option<Vec<i32>>, usize)> {
    let steps = move |most: i32| prop::collection::vec(0..=most, size);
    prop_oneof![
        Just((None, size)),
        // Row numbers in ascending order, as in a folded dataset (steps of at most 1) or after samples were dropped.
        (1..3_i32).prop_flat_map(steps).prop_map(|steps| {
            let ends = steps.iter().scan(0, |row, step| {
                *row += step;
                Some(*row)
            });
            let inverse: Vec<i32> = ends.collect();
            let rows = inverse.last().map_or(0, |row| *row as usize + 1);
            (Some(inverse), rows)
        }),
        // Row numbers in any order, including rows that no sample uses.
        (1..=size.max(1)).prop_flat_map(move |rows| {
            let inverse = prop::collection::vec(0..rows as i32, size);
            inverse.prop_map(move |inverse| (Some(inverse), rows))
        }),
    ]
}

/// How the rows of a random feature lie in its values.
#[derive(Debug, Clone, Copy)]
enum Layout {
    OneAfterTheOther,
    SlidingWindows,
    Anywhere,
}

fn features_of(name: String, rows: usize) -> impl Strategy<Value = Feature> {
    let layouts =
        prop::sample::select(vec![Layout::OneAfterTheOther, Layout::SlidingWindows, Layout::Anywhere]);
    // Few different ids, so that lists repeat.
    let ids = prop::collection::vec(-1_i64..3, 0..24);
    let slices = prop::collection::vec((0_usize..24, 0_usize..6), rows);
    (layouts, ids, slices).prop_map(move |(layout, mut ids, slices)| {
        let slices = layout.place(&mut ids, slices);
        let (offsets, sizes): (Vec<i32>, Vec<i32>) =
            slices.into_iter().map(|(offset, size)| (offset as i32, size as i32)).unzip();
        Feature::try_new(name.clone(), ids, offsets, sizes).unwrap()
    })
}

impl Layout {
    /// Turns pairs of random numbers into the `(offset, size)` of rows. May replace `ids`.
    fn place(self, ids: &mut Vec<i64>, slices: Vec<(usize, usize)>) -> Vec<(usize, usize)> {
        let mut end = 0;
        match self {
            Self::OneAfterTheOther => {
                let total = slices.iter().map(|(_, size)| size).sum();
                let cycle = if ids.is_empty() { vec![7] } else { ids.clone() };
                *ids = cycle.into_iter().cycle().take(total).collect();
                let place = |(_, size): (usize, usize)| {
                    end += size;
                    (end - size, size)
                };
                slices.into_iter().map(place).collect()
            }
            Self::SlidingWindows => {
                let slide = |(step, size): (usize, usize)| {
                    end = ids.len().min(end + step % 3);
                    (end, size.min(ids.len() - end))
                };
                slices.into_iter().map(slide).collect()
            }
            Self::Anywhere => {
                let place = |(offset, size): (usize, usize)| {
                    let offset = offset.min(ids.len());
                    (offset, size.min(ids.len() - offset))
                };
                slices.into_iter().map(place).collect()
            }
        }
    }
}
