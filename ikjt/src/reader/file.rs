//! Data files: checked against the snapshot, footers read.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::datatypes::{DataType, Field, SchemaRef};
use onefold_base::process::catch_panic;
use onefold_datasets::footer::{check_counts, decode_footer};
use onefold_datasets::{DataFile, Schema};
use onefold_storage::{FEW_REQUESTS, MANY_REQUESTS, Object, Ranges, Storage};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;

use super::budget::Account;
use super::kept::KeptFile;
use crate::{Error, Result};

/// What is known of the files of a dataset that were read before, by their paths: all readers of a process that share
/// their workers know the same.
#[derive(Debug, Default)]
pub(super) struct KnownFiles {
    /// The objects that were found first. Every request asks for that version, so that no change remains unnoticed.
    objects: Mutex<HashMap<String, Object>>,
    /// The files whose bytes were found to be what the snapshot says.
    verified: Mutex<HashSet<String>>,
    /// Files that are being verified.
    verifying: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

/// The columns to read, and those that a file must have.
#[derive(Debug)]
pub(super) struct WantedColumns {
    /// The columns that a data file has, in any order.
    pub(super) all: SchemaRef,
    /// The names of those that are read, if they are there.
    pub(super) wanted: HashSet<String>,
}

/// What is known of a data file whose footer agrees with the snapshot.
#[derive(Debug)]
pub(super) struct Footer {
    /// The full path or URL.
    pub(super) path: Arc<PathBuf>,
    pub(super) storage: Storage,
    pub(super) object: Object,
    /// The SHA-256 of the file, as the snapshot says.
    pub(super) sha256: Arc<str>,
    pub(super) metadata: ArrowReaderMetadata,
    pub(super) columns: ProjectionMask,
}

/// A data file that is being read.
#[derive(Debug, Clone)]
pub(super) struct OpenFile {
    pub(super) footer: Arc<Footer>,
    /// Its bytes, if they are kept.
    pub(super) kept: KeptFile,
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

impl Footer {
    /// Checks a file's size, row groups and columns against the snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing or has another size, row count or schema than the snapshot says,
    /// [`Error::Corrupt`] if the footer cannot be decoded.
    pub(super) fn open(
        storage: &Storage,
        file: &DataFile,
        columns: &WantedColumns,
        known: &KnownFiles,
        kept: &KeptFile,
    ) -> Result<Self> {
        let object = known.find(storage, file)?;
        let path = storage.shown(&file.path);
        let footer = decode_footer(object.bytes, |start| {
            let end = || std::iter::once(start..object.bytes).collect();
            kept.copy(end()).map_or_else(
                || storage.read_ranges(&object.path, object.bytes, end(), object.e_tag.clone()),
                Ok,
            )
        });
        let metadata = footer?.map_err(|message| Error::corrupt(&path, None, message))?;
        check_counts(metadata.metadata(), file).map_err(|message| Error::mismatch(&path, message))?;
        let places = find_columns(&path, &metadata, &columns.all)?;
        let is_wanted = |(field, _): &(&Arc<Field>, usize)| columns.wanted.contains(field.name());
        let wanted = columns.all.fields().iter().zip(places).filter(is_wanted).map(|(_, place)| place);
        let mask = ProjectionMask::roots(metadata.parquet_schema(), wanted);
        let (storage, path) = (storage.clone(), Arc::new(path));
        let sha256 = file.sha256.as_str().into();
        let footer = Self { path, storage, object, sha256, metadata, columns: mask };
        let counts = footer.row_counts()?;
        if !file.row_groups.iter().map(|row_group| row_group.samples).eq(counts) {
            let message = "its row groups have other numbers of rows than the snapshot says".to_owned();
            return Err(Error::mismatch(footer.path.as_path(), message));
        }
        Ok(footer)
    }

    /// The rows of every row group.
    pub(super) fn row_counts(&self) -> Result<Vec<u64>> {
        let row_groups = self.metadata.metadata().row_groups().iter().enumerate();
        let counts = row_groups.map(|(index, row_group)| {
            let rows = row_group.num_rows();
            let fits = i32::try_from(rows).ok().and_then(|rows| u64::try_from(rows).ok());
            fits.ok_or_else(|| {
                Error::corrupt(&self.path, Some(index), format!("it says that it has {rows} rows"))
            })
        });
        let counts = counts.collect::<Result<Vec<_>>>()?;
        let sum: u64 = counts.iter().sum();
        let rows = self.metadata.metadata().file_metadata().num_rows();
        if u64::try_from(rows) != Ok(sum) {
            let message = format!("its row groups have {sum} rows together, its footer says {rows}");
            return Err(Error::corrupt(&self.path, None, message));
        }
        Ok(counts)
    }

    /// The columns named `names`, of those that are there.
    pub(super) fn mask(&self, names: &[&str]) -> ProjectionMask {
        let fields = self.metadata.schema().fields().iter().enumerate();
        let places = fields.filter(|(_, field)| names.contains(&field.name().as_str())).map(|(i, _)| i);
        ProjectionMask::roots(self.metadata.parquet_schema(), places)
    }
}

impl OpenFile {
    /// Checks the file's bytes once, and keeps them in `kept`. Pages carry no checksums, so a flipped bit in one may
    /// decode to other samples. Gives the number of bytes read for it.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if its SHA-256 is not the one that the snapshot records; an error if the epoch is dropped
    /// meanwhile.
    pub(super) fn verify(
        storage: &Storage,
        file: &DataFile,
        known: &KnownFiles,
        kept: &KeptFile,
        account: &Account,
    ) -> Result<u64> {
        // Whoever comes while a file is being verified need not do it again.
        let of_file = known.verifying(file);
        let _verifying = of_file.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_verified(file) {
            return Ok(0);
        }
        let object = known.find(storage, file)?;
        let requests = if kept.is_kept() { MANY_REQUESTS } else { FEW_REQUESTS };
        let found = storage.sha256(&file.path, &object, requests, |read| {
            kept.add(read);
            // Of a file that nobody waits for any more no further byte is fetched.
            account.check_open().map_err(std::io::Error::other)
        })?;
        if found != file.sha256 {
            let message = format!("its bytes have SHA-256 {found}, the snapshot says {}", file.sha256);
            return Err(Error::corrupt(&storage.shown(&file.path), None, message));
        }
        known.verified().insert(file.path.clone());
        known.verifying.lock().unwrap_or_else(PoisonError::into_inner).remove(&file.path);
        Ok(file.bytes_on_disk)
    }

    /// Reads ranges of the file, which are at hand if the file is kept; `then` is called with them, and with the number
    /// of bytes that had to come from the storage, on a thread that must not be blocked for long.
    ///
    /// # Errors
    ///
    /// As [`Storage::start_reading`].
    pub(super) fn start_reading(
        &self,
        wanted: Vec<Range<u64>>,
        then: impl FnOnce(Result<Ranges>, u64) + Send + 'static,
    ) -> Result<()> {
        let Footer { storage, object, .. } = &*self.footer;
        if let Some(ranges) = self.kept.copy(wanted.clone()) {
            then(Ok(ranges), 0);
            return Ok(());
        }
        storage.start_reading(&object.path, object.bytes, wanted, object.e_tag.clone(), |ranges| {
            let read = ranges.as_ref().map_or(0, Ranges::bytes);
            then(ranges.map_err(Error::from), read);
        })?;
        Ok(())
    }
}

impl KnownFiles {
    fn verified(&self) -> MutexGuard<'_, HashSet<String>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is locked while a file is verified.
    fn verifying(&self, file: &DataFile) -> Arc<Mutex<()>> {
        let mut verifying = self.verifying.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(verifying.entry(file.path.clone()).or_default())
    }

    /// Whether a file's bytes were found to be what the snapshot says.
    pub(super) fn is_verified(&self, file: &DataFile) -> bool {
        self.verified().contains(&file.path)
    }

    /// The object of a data file, which must have the size that the snapshot says.
    fn find(&self, storage: &Storage, file: &DataFile) -> Result<Object> {
        let objects = || self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(object) = objects().get(&file.path) {
            return Ok(object.clone());
        }
        let mismatch = |message: String| Error::mismatch(storage.shown(&file.path), message);
        let object = storage.head(&file.path)?;
        let object = object.ok_or_else(|| mismatch("it is missing, the snapshot names it".to_owned()))?;
        if object.bytes != file.bytes_on_disk {
            let message = format!("it has {} bytes, the snapshot says {}", object.bytes, file.bytes_on_disk);
            return Err(mismatch(message));
        }
        Ok(objects().entry(file.path.clone()).or_insert(object).clone())
    }
}

/// Where the `expected` columns stand in a file: wherever its writer thought that they are read best.
fn find_columns(path: &Path, metadata: &ArrowReaderMetadata, expected: &SchemaRef) -> Result<Vec<usize>> {
    let fields = metadata.schema().fields();
    let mismatch = |message: String| Error::mismatch(path, message);
    let mut places = HashMap::with_capacity(fields.len());
    for (place, field) in fields.iter().enumerate() {
        if places.insert(field.name().as_str(), place).is_some() {
            return Err(mismatch(format!("it has the column `{}` twice", field.name())));
        }
    }
    let find = |expected: &Arc<Field>| {
        let name = expected.name();
        let Some(&place) = places.get(name.as_str()) else {
            let found: Vec<_> = fields.iter().map(|field| format!("`{}`", field.name())).collect();
            return Err(mismatch(format!("it has no column `{name}`, it has {}", found.join(", "))));
        };
        match &fields[place] {
            found if same_field(found, expected) => Ok(place),
            found => Err(mismatch(format!("the column `{name}` should be {expected}, but is {found}"))),
        }
    };
    expected.fields().iter().map(find).collect()
}

/// Equal but for the name of a list's items, which other writers choose differently.
fn same_field(found: &Field, expected: &Field) -> bool {
    let same_type = match (found.data_type(), expected.data_type()) {
        (DataType::List(found), DataType::List(expected)) => {
            found.data_type() == expected.data_type() && found.is_nullable() == expected.is_nullable()
        }
        (found, expected) => found == expected,
    };
    same_type && found.name() == expected.name() && found.is_nullable() == expected.is_nullable()
}

/// Runs a decoder on bytes that may be anything: its errors, and its panics, become [`Error::Corrupt`].
pub(super) fn guarded<T>(
    path: &Path,
    row_group: Option<usize>,
    decode: impl FnOnce() -> Result<T, String>,
) -> Result<T> {
    catch_panic(decode).map_err(|message| Error::corrupt(path, row_group, message))
}
