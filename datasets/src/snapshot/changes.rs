//! Features that changed after files were written, and what stands for the columns that the files do not have.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int32Array, Int64Array, ListArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, FieldRef, Schema as ArrowSchema, SchemaRef};
use serde::{Deserialize, Serialize};

use super::{FileSet, Layout, Snapshot};
use crate::Schema;

/// What samples have of a dense feature that was added after they were written.
pub const MISSING_DENSE: f32 = 0.0;

/// How the columns of files differ from those of the schema, because features changed after the files were written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnChanges {
    /// Features that the files have no columns of, because they were added later. All samples have the missing value:
    /// an empty list, or [`MISSING_DENSE`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

impl ColumnChanges {
    /// Whether the files have the columns of the schema.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the files have no columns of this feature.
    pub fn lacks(&self, feature: &str) -> bool {
        self.lacks.iter().any(|lacking| lacking == feature)
    }

    /// Adds features that the dataset has from now on.
    pub(super) fn add_features(&mut self, added: &[String]) {
        self.lacks.extend(added.iter().cloned());
    }
}

impl Snapshot {
    /// The columns that the files of `set` have together.
    pub fn columns_of(&self, set: &FileSet) -> SchemaRef {
        match set.changes.is_none() {
            true => self.file_columns(),
            false => Arc::new(ArrowSchema::new(self.divided_columns(set).0)),
        }
    }

    /// The columns of the dataset that the files of `set` do not have. [`missing_column`] gives their values.
    pub fn lacking(&self, set: &FileSet) -> Vec<FieldRef> {
        if set.changes.is_none() { Vec::new() } else { self.divided_columns(set).1 }
    }

    /// The columns that the files of `set` have, and those that they lack.
    fn divided_columns(&self, set: &FileSet) -> (Vec<FieldRef>, Vec<FieldRef>) {
        let mut lacking: HashSet<String> = set.changes.lacks.iter().cloned().collect();
        for group in &self.schema.groups {
            let windows = group.features.iter().filter(|feature| {
                self.layout == Layout::Folded
                    && group.folds_to_window(feature)
                    && set.changes.lacks(&feature.name)
            });
            lacking.extend(windows.map(|feature| feature.length_column()));
        }
        let columns = self.file_columns();
        columns.fields().iter().cloned().partition(|field| !lacking.contains(field.name()))
    }

    /// Checks that only features that were added later are missing in files.
    pub(super) fn check_changes(&self) -> Result<(), String> {
        let names = feature_names(&self.schema);
        for (feature, since) in &self.features_since {
            if !names.contains(feature.as_str()) || *since > self.snapshot {
                return Err(format!(
                    "`{feature}`, a feature since snapshot {since}, is not one of the schema"
                ));
            }
        }
        let mut lacking = self.manifests.iter().flat_map(|entry| &entry.changes.lacks);
        match lacking.find(|feature| !self.features_since.contains_key(*feature)) {
            None => Ok(()),
            Some(feature) => {
                Err(format!("files lack `{feature}`, which is not a feature that was added later"))
            }
        }
    }
}

/// The names of all dense and sparse features.
fn feature_names(schema: &Schema) -> HashSet<&str> {
    let sparse = schema.sparse_features().map(|feature| feature.name.as_str());
    schema.dense.iter().map(String::as_str).chain(sparse).collect()
}

/// The values of the column `field` of a data file in a row group that lacks it: all samples have an empty list, or
/// [`MISSING_DENSE`]. In the `folded` layout the empty list is stored in the first of the `rows`.
pub fn missing_column(field: &Field, rows: usize) -> ArrayRef {
    let first_only = || (0..rows).map(|row| row == 0).collect::<NullBuffer>();
    match field.data_type() {
        DataType::List(item) => {
            let ids = Arc::new(Int64Array::from(Vec::<i64>::new()));
            let nulls = field.is_nullable().then(first_only);
            Arc::new(ListArray::new(Arc::clone(item), OffsetBuffer::new_zeroed(rows), ids, nulls))
        }
        DataType::Int32 => Arc::new(Int32Array::new(vec![0; rows].into(), Some(first_only()))),
        _ => Arc::new(Float32Array::from(vec![MISSING_DENSE; rows])),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, AsArray, RecordBatch};
    use arrow::datatypes::Float32Type;

    use super::*;
    use crate::folded::samples::schema;
    use crate::folded::unfold_group;

    #[test]
    fn missing_columns_unfold_to_empty_lists() {
        for rows in [0, 1, 5] {
            let columns = schema().to_folded_arrow();
            let lists = columns.fields().iter().skip(3).map(|field| missing_column(field, rows));
            let columns = Arc::new(ArrowSchema::new(columns.fields()[3..].to_vec()));
            let batch = RecordBatch::try_new(columns, lists.collect()).unwrap();
            let unfolded = unfold_group(&batch, &schema().groups[0]).unwrap();
            assert_eq!(unfolded.inverse, vec![0; rows]);
            for feature in unfolded.features {
                assert_eq!((feature.offsets.len(), feature.sizes), (rows.min(1), vec![0; rows.min(1)]));
            }
            assert_eq!(batch.column_by_name("item").unwrap().null_count(), 0);
        }
        let dense = missing_column(&Field::new("age", DataType::Float32, false), 2);
        assert_eq!(dense.as_primitive::<Float32Type>().values(), &[MISSING_DENSE; 2]);
    }
}
