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
        timestamps: None,
        groups,
    })
}

fn column<'a>(rows: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    rows.column_by_name(name)
        .ok_or_else(|| Error::invariant(format!("column `{name}`"), "it was not decoded"))
}

/// Float columns, interleaved to `[rows, columns]`.
fn row_major(parts: &Parts, names: &[String], size: usize) -> Result<ScalarBuffer<f32>> {
    let mut matrix = vec![0.0_f32; size * names.len()];
    for (i, name) in names.iter().enumerate() {
        let mut cells = matrix.iter_mut().skip(i).step_by(names.len());
        for (rows, range) in parts {
            let values = &column(rows, name)?.as_primitive::<Float32Type>().values()[range.clone()];
            // The values first: `zip` has taken a cell by the time it finds that there is no value left.
            for (value, cell) in values.iter().zip(cells.by_ref()) {
                *cell = *value;
            }
        }
    }
    Ok(matrix.into())
}

fn to_group(parts: &Parts, group: &FeatureGroup, dedupe: Dedupe) -> Result<Group> {
    let features =
        group.features.iter().map(|feature| to_feature(parts, &feature.name)).collect::<Result<_>>()?;
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::Float32Array;

    use super::*;

    #[test]
    fn a_batch_of_several_parts_keeps_every_value_in_its_place() {
        let part = |start: f32| {
            let column = |shift: f32| {
                Arc::new(Float32Array::from_iter_values((0..3).map(|i| start + shift + i as f32)))
            };
            let columns = [("a", column(0.0) as ArrayRef), ("b", column(100.0) as ArrayRef)];
            RecordBatch::try_from_iter(columns).unwrap()
        };
        let parts = vec![(part(1.0), 1..3), (part(4.0), 0..3), (part(7.0), 0..1)];
        let matrix = row_major(&parts, &["a".to_owned(), "b".to_owned()], 6).unwrap();
        let expected: Vec<f32> = (2..8).flat_map(|i| [i as f32, i as f32 + 100.0]).collect();
        assert_eq!(matrix[..], expected);
    }
}
