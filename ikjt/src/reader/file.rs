//! Data files: checked against the snapshot, footers read.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arrow::datatypes::{FieldRef, SchemaRef};
use onefold_base::process::catch_panic;
use onefold_datasets::footer::{self, check_counts, same_field};
use onefold_datasets::{ColumnChanges, DataFile, FileSet, Schema, with_name};
use onefold_storage::{Object, Ranges, Storage};
use parquet::arrow::ProjectionMask;
use parquet::file::metadata::RowGroupMetaData;

use crate::{Error, Result};

/// The objects of a dataset's files that were found first, by their paths: all readers of a process that share their
/// workers know the same. Every request asks for that version, so that no change remains unnoticed.
#[derive(Debug, Default)]
pub(super) struct KnownFiles(Mutex<HashMap<String, Object>>);

/// The columns to read, and those that the files of a row group must have.
#[derive(Debug)]
pub(super) struct WantedColumns {
    /// The columns that the files have together, in any order.
    pub(super) all: SchemaRef,
    /// The names of those that are read, if they are there.
    pub(super) wanted: HashSet<String>,
}

/// The files that are read of some row groups.
#[derive(Debug)]
pub(super) struct OpenFiles {
    pub(super) storage: Storage,
    /// The full path or URL of the first file.
    pub(super) path: Arc<PathBuf>,
    /// The files with columns that are read, and the first one in any case.
    pub(super) files: Vec<OpenFile>,
    /// Columns that are wanted, and that the files lack because their features were added later.
    pub(super) lacking: Vec<FieldRef>,
    /// Columns that have other names in the files than in the schema.
    pub(super) changes: ColumnChanges,
}

/// A data file whose footer agrees with the snapshot.
#[derive(Debug)]
pub(super) struct OpenFile {
    /// The full path or URL.
    pub(super) path: Arc<PathBuf>,
    /// The path in the dataset.
    pub(super) name: Arc<str>,
    pub(super) object: Object,
    pub(super) footer: footer::Footer,
    /// The columns to read.
    pub(super) columns: ProjectionMask,
}

impl WantedColumns {
    /// The columns of `schema`, a projection of the dataset's, and the `extra` ones.
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
}

impl OpenFiles {
    /// Checks the sizes, row groups and columns of files against the snapshot. The files do not have the columns that
    /// are `lacking`, and may have others of features that were dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a file is missing or has another size, row count or columns than the snapshot says,
    /// [`Error::Corrupt`] if a footer is not the one that was written.
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
        let is_read = |(number, file): &(usize, &DataFile)| {
            let mut names = file.columns.iter().filter_map(|name| set.changes.in_schema(name));
            *number == 0 || names.any(|name| columns.wanted.contains(name))
        };
        let files = set.files.iter().enumerate().filter(is_read);
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

    /// Memory that the footers take.
    pub(super) fn memory_size(&self) -> usize {
        self.files.iter().map(|file| file.footer.metadata.metadata().memory_size()).sum()
    }

    /// The field of a column that is read.
    pub(super) fn field(&self, name: &str) -> Option<&FieldRef> {
        self.files.iter().flat_map(|file| file.fields()).find(|field| field.name() == name)
    }
}

impl OpenFile {
    /// Opens file number `number` of a set.
    fn open(
        storage: &Storage,
        (set, number): (&FileSet, usize),
        columns: &WantedColumns,
        known: &KnownFiles,
    ) -> Result<Self> {
        let file = &set.files[number];
        let object = known.find(storage, file)?;
        let path = storage.shown(&file.path);
        let mismatch = |message: String| Error::mismatch(&path, message);
        let footer = footer::Footer::read(storage, file, object.e_tag.clone())?;
        let footer = footer.map_err(|message| Error::corrupt(&path, None, message))?;
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

    /// The columns named `names`, of those that are there.
    pub(super) fn mask(&self, names: &[&str]) -> ProjectionMask {
        let fields = self.fields().iter().enumerate();
        let places = fields.filter(|(_, field)| names.contains(&field.name().as_str())).map(|(i, _)| i);
        ProjectionMask::roots(self.footer.metadata.parquet_schema(), places)
    }

    /// The Parquet columns in a mask, and the names of their fields.
    pub(super) fn leaves(&self, columns: &ProjectionMask) -> impl Iterator<Item = (usize, &str)> {
        let (parquet, fields) = (self.footer.metadata.parquet_schema(), self.fields());
        let leaves = (0..parquet.num_columns()).filter(move |leaf| columns.leaf_included(*leaf));
        leaves.map(move |leaf| (leaf, fields[parquet.get_column_root_idx(leaf)].name().as_str()))
    }

    /// The byte ranges of some columns of a row group.
    pub(super) fn byte_ranges(&self, row_group: usize, columns: &ProjectionMask) -> Result<Vec<Range<u64>>> {
        let ranges = self.footer.byte_ranges(row_group, columns, self.object.bytes);
        ranges.map_err(|message| Error::corrupt(&self.path, Some(row_group), message))
    }

    /// Reads some columns of a row group on this thread.
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

impl KnownFiles {
    /// The object of a data file, which must have the size that the snapshot says.
    fn find(&self, storage: &Storage, file: &DataFile) -> Result<Object> {
        let objects = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(object) = objects().get(&file.path) {
            return Ok(object.clone());
        }
        let mismatch = |message: String| Error::mismatch(storage.shown(&file.path), message);
        let object = footer::find(storage, file)?.map_err(mismatch)?;
        Ok(objects().entry(file.path.clone()).or_insert(object).clone())
    }
}

/// Runs a decoder on bytes that may be anything: its errors, and its panics, become [`Error::Corrupt`].
pub(super) fn guarded<T>(
    path: &Path,
    row_group: Option<usize>,
    decode: impl FnOnce() -> Result<T, String>,
) -> Result<T> {
    catch_panic(decode).map_err(|message| Error::corrupt(path, row_group, message))
}
