//! Differences between the columns of existing files and the current schema, and the values of missing
//! columns.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int32Array, Int64Array, ListArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, FieldRef, Schema as ArrowSchema, SchemaRef};
use serde::{Deserialize, Serialize};

use super::{DataFile, FileSet, Layout, Snapshot};

/// The value of a dense feature for samples that were written before the feature was added.
pub const MISSING_DENSE: f32 = 0.0;

/// The differences between the columns of files and the schema. They result from changes of features after
/// the files were written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnChanges {
    /// Features that were added later, so the files have no columns of them. All samples have the missing
    /// value: an empty list or [`MISSING_DENSE`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    /// For columns of renamed features: the column's name in the schema, mapped to its name in the files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub renamed: BTreeMap<String, String>,
    /// Columns of the files whose features were dropped. A later feature may have the same name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unused: Vec<String>,
    /// Whether the digests of the row groups already account for `renamed` and `unused`. This is the case
    /// if columns were written beside the files after features were dropped or renamed, or to replace
    /// columns of the files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub digested: bool,
}

impl ColumnChanges {
    /// Returns whether the files have the columns of the schema.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether the files have no columns of this feature.
    pub fn lacks(&self, feature: &str) -> bool {
        self.lacks.iter().any(|lacking| lacking == feature)
    }

    /// Returns whether the digest of a row group covers the columns under their current names, which means
    /// that no feature of the files was dropped or renamed since the digest was computed.
    pub fn are_digested(&self) -> bool {
        self.digested || self.renamed.is_empty() && self.unused.is_empty()
    }

    /// Returns the name in the files of a schema column that the files have.
    pub fn in_files<'n>(&'n self, column: &'n str) -> &'n str {
        self.renamed.get(column).map_or(column, String::as_str)
    }

    /// Returns the schema column of a column in the files; `None` if its feature was dropped.
    pub fn in_schema<'n>(&'n self, column: &'n str) -> Option<&'n str> {
        if self.unused.iter().any(|unused| unused == column) {
            return None;
        }
        let renamed = self.renamed.iter().find(|(_, in_files)| *in_files == column);
        Some(renamed.map_or(column, |(name, _)| name))
    }

    /// Drops a feature with these columns.
    pub(super) fn drop_feature(&mut self, name: &str, columns: &[String]) {
        if self.lacks(name) {
            self.lacks.retain(|lacking| lacking != name);
            return;
        }
        self.digested = false;
        for column in columns {
            let in_files = self.renamed.remove(column).unwrap_or_else(|| column.clone());
            self.unused.push(in_files);
        }
    }

    /// Renames a feature with these columns, given as pairs of new and old names.
    pub(super) fn rename_feature(&mut self, (old, new): (&str, &str), columns: &[(String, String)]) {
        if self.lacks(old) {
            self.lacks.retain(|lacking| lacking != old);
            self.lacks.push(new.to_owned());
            return;
        }
        self.digested = false;
        for (new, old) in columns {
            let in_files = self.renamed.remove(old).unwrap_or_else(|| old.clone());
            if in_files != *new {
                self.renamed.insert(new.clone(), in_files);
            }
        }
    }

    /// Records features that were added to the dataset after these files were written.
    pub(super) fn add_features(&mut self, added: &[String]) {
        self.lacks.extend(added.iter().cloned());
    }

    /// Records that `columns` of the dataset are written to a new file beside `files`. Columns that `files`
    /// already have become unused. Returns the names of the columns in the new file, which no other file of
    /// the set uses. Marks the row groups as [`digested`](Self::digested), because they get new digests.
    pub(crate) fn write_beside(&mut self, columns: &[String], files: &[DataFile]) -> Vec<String> {
        let in_files = || files.iter().flat_map(|file| file.columns.iter());
        let mut taken: HashSet<String> = in_files().cloned().collect();
        let mut names = Vec::with_capacity(columns.len());
        for column in columns {
            if let Some(replaced) = in_files().find(|name| self.in_schema(name) == Some(column.as_str())) {
                self.renamed.remove(column);
                self.unused.push(replaced.clone());
            }
            let numbered = (2..).map(|number| format!("{column}~{number}"));
            let mut free = std::iter::once(column.clone()).chain(numbered);
            let name = free.find(|name| !taken.contains(name)).unwrap_or_default();
            if name != *column {
                self.renamed.insert(column.clone(), name.clone());
            }
            taken.insert(name.clone());
            names.push(name);
        }
        self.digested = !self.renamed.is_empty() || !self.unused.is_empty();
        names
    }

    /// Returns the first file, and all other files with a used column. Removes the columns of the omitted
    /// files from `unused`.
    pub(crate) fn used_files(&mut self, files: &[DataFile]) -> Vec<DataFile> {
        let is_used = |file: &DataFile| file.columns.iter().any(|name| self.in_schema(name).is_some());
        let used = files.iter().enumerate().filter(|(number, file)| *number == 0 || is_used(file));
        let used: Vec<DataFile> = used.map(|(_, file)| file.clone()).collect();
        self.unused.retain(|name| used.iter().any(|file| file.columns.contains(name)));
        used
    }
}

/// Returns the field with another name.
pub fn with_name(field: &FieldRef, name: &str) -> FieldRef {
    match field.name() == name {
        true => Arc::clone(field),
        false => Arc::new(Field::clone(field).with_name(name)),
    }
}

impl Snapshot {
    /// Returns the columns of the dataset that the files of `set` have, with the names in the schema.
    pub fn columns_of(&self, set: &FileSet) -> SchemaRef {
        match set.changes.is_none() {
            true => self.file_columns(),
            false => Arc::new(ArrowSchema::new(self.divided_columns(set).0)),
        }
    }

    /// Returns the columns of the dataset that the files of `set` do not have. [`missing_column`] creates
    /// their values.
    pub fn lacking(&self, set: &FileSet) -> Vec<FieldRef> {
        if set.changes.is_none() { Vec::new() } else { self.divided_columns(set).1 }
    }

    /// Returns the columns that the files of `set` have, and the columns that they lack.
    fn divided_columns(&self, set: &FileSet) -> (Vec<FieldRef>, Vec<FieldRef>) {
        let mut lacking: HashSet<String> = set.changes.lacks.iter().cloned().collect();
        if self.layout == Layout::Folded {
            let features =
                self.schema.grouped_features().filter(|(_, feature)| set.changes.lacks(&feature.name));
            let windows = features.filter(|(group, feature)| group.folds_to_window(feature));
            lacking.extend(windows.map(|(_, feature)| feature.length_column()));
        }
        let columns = self.file_columns();
        columns.fields().iter().cloned().partition(|field| !lacking.contains(field.name()))
    }

    /// Checks that the files lack only features that were added later.
    pub(super) fn check_changes(&self) -> Result<(), String> {
        let names: HashSet<&str> = self.schema.feature_names().collect();
        for (feature, since) in &self.features_since {
            if !names.contains(feature.as_str()) || *since > self.snapshot {
                return Err(format!(
                    "`{feature}`, a feature since snapshot {since}, is not one of the schema"
                ));
            }
        }
        let mut lacking = self.manifests.iter().flat_map(|entry| &entry.changes.lacks);
        if let Some(feature) = lacking.find(|feature| !self.features_since.contains_key(*feature)) {
            return Err(format!("files lack `{feature}`, which is not a feature that was added later"));
        }
        let mut renamed = self.manifests.iter().flat_map(|entry| entry.changes.renamed.keys()).peekable();
        if renamed.peek().is_none() {
            return Ok(());
        }
        let columns = self.file_columns();
        match renamed.find(|column| columns.field_with_name(column).is_err()) {
            None => Ok(()),
            Some(column) => Err(format!("files have another name for `{column}`, which is not a column")),
        }
    }
}

/// Creates the column `field` for a row group of `rows` samples whose files lack it. Every sample has an
/// empty list, or [`MISSING_DENSE`]. In the `folded` layout, only the first Parquet row stores the empty
/// list.
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

    fn file(columns: &[&str]) -> DataFile {
        DataFile {
            path: columns.concat(),
            bytes_on_disk: 0,
            footer_bytes: 0,
            footer_checksum: 0,
            columns: columns.iter().map(|name| (*name).to_owned()).collect(),
            row_group_bytes: Vec::new(),
        }
    }

    #[test]
    fn columns_beside_others_have_names_of_their_own() {
        let label = ["clicked".to_owned()];
        let mut files = vec![file(&["session_id", "clicked", "views"])];
        let mut changes = ColumnChanges::default();
        // A column is rewritten several times. Files with only unused columns are omitted.
        for expected in ["clicked~2", "clicked~3", "clicked~2"] {
            assert_eq!(changes.write_beside(&label, &files), [expected]);
            files = changes.used_files(&files);
            files.push(file(&[expected]));
            assert_eq!((files.len(), changes.in_files("clicked")), (2, expected));
            assert_eq!((changes.in_schema(expected), changes.in_schema("clicked")), (Some("clicked"), None));
            assert_eq!(changes.unused, ["clicked"]);
            assert!(changes.are_digested());
        }
        // The files use these names for renamed and dropped features.
        changes.rename_feature(("views", "seen"), &[("seen".to_owned(), "views".to_owned())]);
        assert!(!changes.are_digested());
        changes.add_features(&["views".to_owned()]);
        assert_eq!(changes.write_beside(&["views".to_owned(), "age".to_owned()], &files), ["views~2", "age"]);
        assert_eq!((changes.in_schema("views"), changes.in_schema("views~2")), (Some("seen"), Some("views")));
        assert_eq!((changes.in_files("views"), changes.in_files("age")), ("views~2", "age"));
        assert!(changes.are_digested());
        changes.drop_feature("seen", &["seen".to_owned()]);
        assert_eq!((changes.in_schema("views"), changes.are_digested()), (None, false));
    }

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
