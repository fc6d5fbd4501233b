//! Batches as Arrow record batches.
//!
//! | column | type | what |
//! |---|---|---|
//! | a feature's name | `ListView<Int64>` | the lists of a group without an inverse index |
//! | a feature's name | `Dictionary<Int32, ListView<Int64>>` | the distinct rows of a group; its keys are the inverse index |
//! | `dense`, `labels` | `FixedSizeList<Float32>[D]` | absent if D is 0 |
//! | `weights` | `Float32` | sample weights, if there are any |
//! | `timestamps` | `Timestamp(µs, "UTC")` | sample times, if there are any |
//! | a kept column's name | `Int64` or `Utf8`, nullable | its values |
//!
//! The metadata of a feature's field names its group; the metadata of a kept column's field marks it as kept. No
//! buffer is copied. The inverse index of a group is one buffer that all its columns share. Rows that share values
//! keep sharing them, which list views allow.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, DictionaryArray, FixedSizeListArray, Float32Array, Int32Array, Int64Array, ListViewArray,
    RecordBatch, RecordBatchOptions, TimestampMicrosecondArray,
};
use arrow::buffer::ScalarBuffer;
use arrow::datatypes::{DataType, Field, FieldRef, Schema};

use crate::batch::{Batch, Feature, Group};
use crate::error::{Error, Result};

/// The metadata key of a feature's field. Its value is the name of the feature's group.
pub const GROUP_KEY: &str = "onefold.group";
/// The metadata key that marks the field of a kept column.
pub const KEPT_KEY: &str = "onefold.kept";
const DENSE: &str = "dense";
const LABELS: &str = "labels";
/// The name of the column of sample weights.
pub(crate) const WEIGHTS: &str = "weights";
const TIMESTAMPS: &str = "timestamps";

impl Batch {
    /// Returns the batch as a record batch with one row per sample, without copying buffers.
    ///
    /// Features are columns of type `ListView<Int64>`, or `Dictionary<Int32, ListView<Int64>>` if the group has an
    /// inverse index. The field's metadata names the feature's group under [`GROUP_KEY`]. `dense` and `labels` are
    /// fixed-size lists of `Float32`, `weights` are `Float32` and `timestamps` are `Timestamp(Microsecond, "UTC")`.
    /// Kept columns keep their type, and their fields' metadata has [`KEPT_KEY`]. Absent parts of the batch have no
    /// column. `widths` are the numbers of dense features and labels per sample, which cannot be derived from a batch
    /// without samples.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if two columns would have the same name.
    pub fn to_record_batch(&self, widths: (usize, usize)) -> Result<RecordBatch> {
        let mut columns = Columns::default();
        for (name, matrix, width) in [(DENSE, self.dense(), widths.0), (LABELS, self.labels(), widths.1)] {
            if width > 0 {
                columns.push(name, matrix_column(name, matrix, width)?, None)?;
            }
        }
        if let Some(weights) = self.weights() {
            columns.push(WEIGHTS, Arc::new(Float32Array::new(weights.clone(), None)), None)?;
        }
        if let Some(timestamps) = self.timestamps() {
            let timestamps = TimestampMicrosecondArray::new(timestamps.clone(), None).with_timezone("UTC");
            columns.push(TIMESTAMPS, Arc::new(timestamps), None)?;
        }
        for column in self.kept() {
            columns.push(&column.name, Arc::clone(&column.values), Some((KEPT_KEY, "")))?;
        }
        for group in self.groups() {
            for feature in group.features() {
                let tag = Some((GROUP_KEY, group.name()));
                columns.push(feature.name(), list_column(group, feature), tag)?;
            }
        }
        columns.finish(self.size())
    }
}

fn wrong(column: &str, message: impl std::fmt::Display) -> Error {
    Error::invariant(format!("column `{column}`"), message)
}

/// The columns of a record batch under construction.
#[derive(Default)]
struct Columns {
    fields: Vec<Field>,
    arrays: Vec<ArrayRef>,
    names: HashSet<String>,
}

impl Columns {
    /// Adds a column. `tag` is the metadata of its field. Only kept columns may have nulls.
    fn push(&mut self, name: &str, array: ArrayRef, tag: Option<(&str, &str)>) -> Result<()> {
        if !self.names.insert(name.to_owned()) {
            return Err(wrong(name, "the name is used twice"));
        }
        let is_kept = tag.is_some_and(|(key, _)| key == KEPT_KEY);
        let metadata = tag.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let field = Field::new(name, array.data_type().clone(), is_kept);
        self.fields.push(field.with_metadata(metadata.into_iter().collect()));
        self.arrays.push(array);
        Ok(())
    }

    fn finish(self, rows: usize) -> Result<RecordBatch> {
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(Arc::new(Schema::new(self.fields)), self.arrays, &options)
            .map_err(|error| Error::invariant("record batch", error.to_string()))
    }
}

fn item(data_type: DataType) -> FieldRef {
    Arc::new(Field::new("item", data_type, false))
}

fn matrix_column(name: &str, matrix: &ScalarBuffer<f32>, width: usize) -> Result<ArrayRef> {
    let width = i32::try_from(width).map_err(|_| wrong(name, format!("{width} values a sample")))?;
    let values = Arc::new(Float32Array::new(matrix.clone(), None));
    Ok(Arc::new(FixedSizeListArray::new(item(DataType::Float32), width, values, None)))
}

/// Returns the rows of a feature as list views, in a dictionary with the group's inverse index as keys if it has one.
/// Features and groups satisfy the invariants of these arrays.
fn list_column(group: &Group, feature: &Feature) -> ArrayRef {
    let ids = Arc::new(Int64Array::new(feature.values().clone(), None));
    let (offsets, sizes) = (feature.offsets().clone(), feature.sizes().clone());
    let lists = Arc::new(ListViewArray::new(item(DataType::Int64), offsets, sizes, ids, None));
    match group.inverse() {
        None => lists,
        Some(keys) => Arc::new(DictionaryArray::new(Int32Array::new(keys.clone(), None), lists)),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::{Float32Type, Int32Type, Int64Type, TimestampMicrosecondType};
    use proptest::prelude::*;

    use super::*;
    use crate::batch::BatchParts;
    use crate::batch::arbitrary::batches;

    fn to_rows(batch: &Batch) -> RecordBatch {
        batch.to_record_batch((batch.dense_width(), batch.label_width())).unwrap()
    }

    /// Returns a column of a record batch.
    fn column<'a>(rows: &'a RecordBatch, name: &str) -> &'a ArrayRef {
        rows.column_by_name(name).unwrap()
    }

    proptest! {
        #[test]
        fn what_arrow_reads_in_the_columns_is_what_samples_have(batch in batches()) {
            // Arrow's own code expands the dictionaries and copies the list views.
            let rows = to_rows(&batch);
            prop_assert_eq!(rows.num_rows(), batch.size());
            for group in batch.groups() {
                for feature in group.features() {
                    let column = column(&rows, feature.name());
                    let plain = match column.as_any_dictionary_opt() {
                        None => Arc::clone(column),
                        Some(dictionary) => arrow::compute::take(dictionary.values(), dictionary.keys(), None).unwrap(),
                    };
                    for i in 0..batch.size() {
                        let list = plain.as_list_view::<i32>().value(i);
                        prop_assert_eq!(&list.as_primitive::<Int64Type>().values()[..], feature.row(group.row_of(i)));
                    }
                }
            }
        }

        #[test]
        fn no_buffer_is_copied(batch in batches()) {
            let rows = to_rows(&batch);
            for (name, matrix, width) in
                [(DENSE, batch.dense(), batch.dense_width()), (LABELS, batch.labels(), batch.label_width())]
            {
                let found = rows.column_by_name(name).map(|found| found.as_fixed_size_list());
                prop_assert_eq!(found.map(|found| found.value_length()), (width > 0).then_some(width as i32));
                let values = found.map(|found| found.values().as_primitive::<Float32Type>().values().as_ptr());
                prop_assert!(values.is_none_or(|values| values == matrix.as_ptr()));
            }
            let weights = rows.column_by_name(WEIGHTS).map(|weights| weights.as_primitive::<Float32Type>().values());
            prop_assert_eq!(weights.map(|weights| weights.as_ptr()), batch.weights().map(|weights| weights.as_ptr()));
            let times = rows.column_by_name(TIMESTAMPS);
            let times = times.map(|times| times.as_primitive::<TimestampMicrosecondType>().values().as_ptr());
            prop_assert_eq!(times, batch.timestamps().map(|times| times.as_ptr()));
            for kept in batch.kept() {
                prop_assert_eq!(column(&rows, &kept.name), &kept.values);
            }
            for group in batch.groups() {
                for feature in group.features() {
                    let column = column(&rows, feature.name());
                    let (keys, lists) = match column.as_dictionary_opt::<Int32Type>() {
                        None => (None, column),
                        Some(dictionary) => (Some(dictionary.keys().values().as_ptr()), dictionary.values()),
                    };
                    prop_assert_eq!(keys, group.inverse().map(|inverse| inverse.as_ptr()));
                    let lists = lists.as_list_view::<i32>();
                    prop_assert_eq!(lists.offsets().as_ptr(), feature.offsets().as_ptr());
                    prop_assert_eq!(lists.sizes().as_ptr(), feature.sizes().as_ptr());
                    let ids = lists.values().as_primitive::<Int64Type>().values();
                    prop_assert_eq!(ids.as_ptr(), feature.values().as_ptr());
                }
            }
        }
    }

    #[test]
    fn a_batch_without_samples_has_the_columns_of_others() {
        let feature = Feature::from_rows("x", &[[1], [2]]).unwrap();
        let batch = Batch::try_new(BatchParts {
            size: 2,
            dense: vec![0.0; 6].into(),
            labels: vec![1.0; 2].into(),
            weights: Some(vec![1.0; 2].into()),
            timestamps: None,
            kept: Vec::new(),
            groups: vec![Group::try_new("g", Some(vec![0, 1].into()), vec![feature]).unwrap()],
        })
        .unwrap();
        let schema = |batch: &Batch| batch.to_record_batch((3, 1)).unwrap().schema();
        assert_eq!(schema(&batch.slice(1..1)), schema(&batch));
    }

    /// A schema has none of these names for columns of its own.
    #[test]
    fn the_columns_of_batches_are_reserved_names() {
        assert_eq!(onefold_datasets::BATCH_COLUMNS, [DENSE, LABELS, WEIGHTS, TIMESTAMPS]);
    }

    #[test]
    fn names_that_collide_are_refused() {
        let feature = Feature::from_rows("dense", &[[1]]).unwrap();
        let batch = Batch::try_new(BatchParts {
            size: 1,
            dense: vec![1.0].into(),
            labels: vec![].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: vec![Group::try_new("g", None, vec![feature]).unwrap()],
        });
        let refused = batch.unwrap().to_record_batch((1, 0)).unwrap_err().to_string();
        assert_eq!(refused, "column `dense`: the name is used twice");
    }
}
