//! Opens data files: reads their footers, and checks the files against the snapshot.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::{FieldRef, SchemaRef};
use onefold_base::process::catch_panic;
use onefold_datasets::footer::{Footer, check_counts, same_field};
use onefold_datasets::{ColumnChanges, DataFile, FileSet, Schema, with_name};
use onefold_storage::{Object, Ranges, Storage};
use parquet::arrow::ProjectionMask;
use parquet::file::metadata::RowGroupMetaData;

use super::known::KnownFiles;
use crate::error::{Error, Result};

/// The columns to read, and the columns that the files of a row group must have.
#[derive(Debug)]
pub(super) struct WantedColumns {
    /// All columns that the files of a set have together, in any order.
    pub(super) all: SchemaRef,
    /// The names of the columns that are read where they exist.
    pub(super) wanted: HashSet<String>,
}

/// The open files of a set, whose row groups correspond to each other.
#[derive(Debug)]
pub(super) struct OpenFiles {
    pub(super) storage: Storage,
    /// The full path or URL of the first file.
    pub(super) path: Arc<PathBuf>,
    /// The files that contain columns to read. The first file of the set is always included.
    pub(super) files: Vec<OpenFile>,
    /// The wanted columns that the files lack, because their features were added later.
    pub(super) lacking: Vec<FieldRef>,
    /// The renamed and dropped columns, which have other names in the files than in the schema.
    pub(super) changes: ColumnChanges,
}

/// A data file whose footer agrees with the snapshot.
#[derive(Debug)]
pub(super) struct OpenFile {
    /// The full path or URL of the file.
    pub(super) path: Arc<PathBuf>,
    /// The path within the dataset.
    pub(super) name: Arc<str>,
    pub(super) object: Object,
    pub(super) footer: Arc<Footer>,
    /// The columns to read.
    pub(super) columns: ProjectionMask,
}

impl WantedColumns {
    /// Selects the columns of `schema`, which is a projection of the dataset's schema, and the columns `extra`.
    pub(super) fn new(all: SchemaRef, schema: &Schema, extra: &[&str]) -> Self {
        let mut wanted: HashSet<String> = schema
            .float_columns()
            .chain(schema.kept_names())
            .chain(extra.iter().copied())
            .map(str::to_owned)
            .collect();
        for feature in schema.sparse_features() {
            wanted.extend([feature.name.clone(), feature.length_column()]);
        }
        Self { all, wanted }
    }

    /// Returns the files of a set that contain columns to read, with their numbers. The first file is always included.
    pub(super) fn files_to_read<'a>(
        &'a self,
        set: &'a FileSet,
    ) -> impl Iterator<Item = (usize, &'a DataFile)> {
        let is_read = move |(number, file): &(usize, &DataFile)| {
            let mut names = file.columns.iter().filter_map(|name| set.changes.in_schema(name));
            *number == 0 || names.any(|name| self.wanted.contains(name))
        };
        set.files.iter().enumerate().filter(is_read)
    }
}

impl OpenFiles {
    /// Opens files, and checks their sizes, row groups and columns against the snapshot. The files lack the columns
    /// `lacking`, and may contain columns of dropped features.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a file is missing or differs from the snapshot in its size, row count or columns,
    /// [`Error::Corrupt`] if a footer differs from the one that was written.
    pub(super) fn open(
        storage: &Storage,
        (set, lacking): (&FileSet, &[FieldRef]),
        columns: &WantedColumns,
        known: &KnownFiles,
    ) -> Result<Self> {
        let names = || set.files.iter().flat_map(|file| file.columns.iter());
        let mismatch = |message: String| Error::mismatch(storage.shown(set.path()), message);
        let mut seen = HashSet::new();
        if let Some(twice) = names().find(|name| !seen.insert(name.as_str())) {
            return Err(mismatch(format!("it has the column `{twice}` twice")));
        }
        let is_missing = |field: &&FieldRef| {
            !seen.contains(set.changes.in_files(field.name())) && !lacking.contains(*field)
        };
        if let Some(missing) = columns.all.fields().iter().find(is_missing) {
            let found: Vec<_> = names().map(|name| format!("`{name}`")).collect();
            let message = format!("it has no column `{}`, it has {}", missing.name(), found.join(", "));
            return Err(mismatch(message));
        }
        let files = columns.files_to_read(set);
        let files = files.map(|(number, _)| OpenFile::open(storage, (set, number), columns, known));
        let files = files.collect::<Result<Vec<_>>>()?;
        let lacking = lacking.iter().filter(|field| columns.wanted.contains(field.name())).cloned().collect();
        let changes = set.changes.clone();
        Ok(Self {
            storage: storage.clone(),
            path: Arc::new(storage.shown(set.path())),
            files,
            lacking,
            changes,
        })
    }

    /// Returns the field of a column that is read.
    pub(super) fn field(&self, name: &str) -> Option<&FieldRef> {
        self.files.iter().flat_map(|file| file.fields()).find(|field| field.name() == name)
    }
}

impl OpenFile {
    /// Opens file `number` of a set.
    fn open(
        storage: &Storage,
        (set, number): (&FileSet, usize),
        columns: &WantedColumns,
        known: &KnownFiles,
    ) -> Result<Self> {
        let file = &set.files[number];
        let (object, footer) = known.open(storage, file)?;
        let path = storage.shown(&file.path);
        let mismatch = |message: String| Error::mismatch(&path, message);
        check_counts(footer.metadata.metadata(), set, number).map_err(mismatch)?;
        let fields = footer.metadata.schema().fields();
        if !fields.iter().map(|field| field.name()).eq(file.columns.iter()) {
            return Err(mismatch("it has other columns than the snapshot says".to_owned()));
        }
        let mut wanted = Vec::new();
        for (place, found) in fields.iter().enumerate() {
            let Some(name) = set.changes.in_schema(found.name()) else { continue };
            match columns.all.field_with_name(name) {
                Ok(expected) if !same_field(&with_name(found, name), expected) => {
                    return Err(mismatch(format!(
                        "the column `{name}` should be {expected}, but is {found}"
                    )));
                }
                Ok(_) if columns.wanted.contains(name) => wanted.push(place),
                _ => {}
            }
        }
        let columns = ProjectionMask::roots(footer.metadata.parquet_schema(), wanted);
        Ok(Self { path: Arc::new(path), name: file.path.as_str().into(), object, footer, columns })
    }

    pub(super) fn fields(&self) -> &[FieldRef] {
        self.footer.metadata.schema().fields()
    }

    pub(super) fn row_group(&self, index: usize) -> &RowGroupMetaData {
        self.footer.metadata.metadata().row_group(index)
    }

    /// Returns the mask of the columns `names`, as far as the file has them.
    pub(super) fn mask(&self, names: &[&str]) -> ProjectionMask {
        let fields = self.fields().iter().enumerate();
        let places = fields.filter(|(_, field)| names.contains(&field.name().as_str())).map(|(i, _)| i);
        ProjectionMask::roots(self.footer.metadata.parquet_schema(), places)
    }

    /// Returns the index of each Parquet column in a mask, and the name of its field.
    pub(super) fn leaves(&self, columns: &ProjectionMask) -> impl Iterator<Item = (usize, &str)> {
        let (parquet, fields) = (self.footer.metadata.parquet_schema(), self.fields());
        let leaves = (0..parquet.num_columns()).filter(move |leaf| columns.leaf_included(*leaf));
        leaves.map(move |leaf| (leaf, fields[parquet.get_column_root_idx(leaf)].name().as_str()))
    }

    /// Returns the byte ranges of columns of a row group.
    pub(super) fn byte_ranges(&self, row_group: usize, columns: &ProjectionMask) -> Result<Vec<Range<u64>>> {
        let ranges = self.footer.byte_ranges(row_group, columns, self.object.bytes);
        ranges.map_err(|message| Error::corrupt(&self.path, Some(row_group), message))
    }

    /// Reads columns of a row group on this thread.
    pub(super) fn read(
        &self,
        storage: &Storage,
        row_group: usize,
        columns: &ProjectionMask,
    ) -> Result<Ranges> {
        let Object { path, bytes, e_tag, .. } = &self.object;
        let ranges = self.byte_ranges(row_group, columns)?;
        Ok(storage.read_ranges(path, *bytes, ranges, e_tag.clone())?)
    }
}

/// Runs a decoder on untrusted bytes. Its errors and its panics become [`Error::Corrupt`].
pub(super) fn guarded<T>(
    path: &Path,
    row_group: Option<usize>,
    decode: impl FnOnce() -> Result<T, String>,
) -> Result<T> {
    catch_panic(decode).map_err(|message| Error::corrupt(path, row_group, message))
}
