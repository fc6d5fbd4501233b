//! Record batches to a [`Batch`].

use std::ops::Range;

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::buffer::ScalarBuffer;
use arrow::datatypes::{Float32Type, Int64Type};
use onefold_datasets::{FeatureGroup, Schema};

use crate::{Batch, BatchParts, Dedupe, Error, Feature, Group, Result, deduplicate};

/// Rows of decoded row groups, in order.
pub(crate) type Parts = Vec<(RecordBatch, Range<usize>)>;

/// The samples `parts` as one batch.
///
/// # Errors
///
/// [`Error::Invariant`] if a column is missing or a feature has more ids than 32-bit offsets address.
pub(crate) fn to_batch(parts: &Parts, schema: &Schema, dedupe: Dedupe) -> Result<Batch> {
    let size = parts.iter().map(|(_, rows)| rows.len()).sum();
    let groups = schema.groups.iter().map(|group| to_group(parts, group, dedupe)).collect::<Result<_>>()?;
    let weights = schema.weight.as_slice();
    Batch::try_new(BatchParts {
        size,
        dense: row_major(parts, &schema.dense, size)?,
        labels: row_major(parts, &schema.labels, size)?,
        weights: if weights.is_empty() { None } else { Some(row_major(parts, weights, size)?) },
        groups,
    })
}

fn column<'a>(rows: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    rows.column_by_name(name).ok_or_else(|| Error::invariant(format!("column `{name}`"), "it was not decoded"))
}

/// Float columns, interleaved to `[rows, columns]`.
fn row_major(parts: &Parts, names: &[String], size: usize) -> Result<ScalarBuffer<f32>> {
    let mut matrix = vec![0.0_f32; size * names.len()];
    for (i, name) in names.iter().enumerate() {
        let mut cells = matrix.iter_mut().skip(i).step_by(names.len());
        for (rows, range) in parts {
            let values = &column(rows, name)?.as_primitive::<Float32Type>().values()[range.clone()];
            for (cell, value) in cells.by_ref().zip(values) {
                *cell = *value;
            }
        }
    }
    Ok(matrix.into())
}

fn to_group(parts: &Parts, group: &FeatureGroup, dedupe: Dedupe) -> Result<Group> {
    let features = group.features.iter().map(|feature| to_feature(parts, &feature.name)).collect::<Result<_>>()?;
    let plain = Group::try_new(group.name.as_str(), None, features)?;
    Ok(match dedupe {
        Dedupe::Exact if group.deduplicated => deduplicate(&plain),
        _ => plain,
    })
}

/// The lists of a column; without a copy if they come from one row group.
fn to_feature(parts: &Parts, name: &str) -> Result<Feature> {
    let mut values: Option<ScalarBuffer<i64>> = None;
    let mut copied = Vec::new();
    let mut lengths = Vec::new();
    for (rows, range) in parts {
        let lists = column(rows, name)?.as_list::<i32>();
        let offsets = &lists.offsets()[range.start..=range.end];
        let (start, end) = (offsets[0] as usize, offsets[range.len()] as usize);
        let ids = lists.values().as_primitive::<Int64Type>().values();
        if parts.len() == 1 {
            values = Some(ids.slice(start, end - start));
        } else {
            copied.extend_from_slice(&ids[start..end]);
        }
        lengths.extend(offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize));
    }
    Feature::from_lengths(name, values.unwrap_or_else(|| copied.into()), lengths)
}
