//! Data files to record batches, one row group at a time.

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, SchemaRef};
use onefold_datasets::console::catch_panic;
use onefold_datasets::units::format_hex;
use onefold_datasets::{DataFile, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// One row group of a data file: the unit of decoding.
#[derive(Debug, Clone)]
pub(crate) struct RowGroup {
    path: Arc<PathBuf>,
    metadata: ArrowReaderMetadata,
    columns: ProjectionMask,
    index: usize,
}

/// The files whose bytes were found to be what the manifest says.
#[derive(Debug, Default)]
pub(crate) struct Verified(Mutex<HashSet<PathBuf>>);

impl Verified {
    /// Checks a file's bytes once. Pages carry no checksums, so a flipped bit in one may decode to other samples.
    fn check(&self, path: &Path, mut file: &fs_err::File, sha256: &str) -> Result<()> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known().contains(path) {
            return Ok(());
        }
        let mut digest = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let length = file.read(&mut buffer)?;
            match buffer.get(..length) {
                None | Some([]) => break,
                Some(bytes) => digest.update(bytes),
            }
        }
        let found = format_hex(&digest.finalize());
        if found != sha256 {
            let message = format!("its bytes have SHA-256 {found}, the manifest says {sha256}");
            return Err(Error::Corrupt { path: path.to_owned(), row_group: None, message });
        }
        known().insert(path.to_owned());
        Ok(())
    }
}

/// Checks a file against the manifest, reads its footer and gives its row groups, for the columns of `schema`.
///
/// # Errors
///
/// [`Error::Mismatch`] if the file is missing or has another size, row count or schema than the dataset's manifest
/// says, [`Error::Corrupt`] if it has another checksum or the footer cannot be decoded.
pub(crate) fn open(
    directory: &Path,
    file: &DataFile,
    all: &SchemaRef,
    schema: &Schema,
    verified: &Verified,
) -> Result<Vec<RowGroup>> {
    let path = Arc::new(directory.join(&file.path));
    let mismatch = |message: String| Error::Mismatch { path: path.to_path_buf(), message };
    let handle = fs_err::File::open(path.as_path()).map_err(|error| match error.kind() {
        ErrorKind::NotFound => mismatch("it is missing, the manifest names it".to_owned()),
        _ => error.into(),
    })?;
    let bytes = handle.metadata()?.len();
    if bytes != file.bytes_on_disk {
        return Err(mismatch(format!("it has {bytes} bytes, the manifest says {}", file.bytes_on_disk)));
    }
    verified.check(&path, &handle, &file.sha256)?;
    let load = || ArrowReaderMetadata::load(handle.file(), ArrowReaderOptions::new());
    let metadata = guarded(&path, None, || load().map_err(|error| error.to_string()))?;
    let rows = metadata.metadata().file_metadata().num_rows();
    if u64::try_from(rows).ok() != Some(file.samples) {
        return Err(mismatch(format!("it has {rows} rows, the manifest says {}", file.samples)));
    }
    check_schema(&path, &metadata, all)?;
    let wanted: Vec<usize> =
        schema.to_arrow().fields().iter().filter_map(|field| all.index_of(field.name()).ok()).collect();
    let columns = ProjectionMask::roots(metadata.parquet_schema(), wanted);
    let groups = metadata.metadata().num_row_groups();
    Ok((0..groups)
        .map(|index| RowGroup {
            path: Arc::clone(&path),
            metadata: metadata.clone(),
            columns: columns.clone(),
            index,
        })
        .collect())
}

fn check_schema(path: &Path, metadata: &ArrowReaderMetadata, expected: &SchemaRef) -> Result<()> {
    let found = metadata.schema();
    for (i, field) in expected.fields().iter().enumerate() {
        if !found.fields().get(i).is_some_and(|found| same_field(found, field)) {
            let found = found.fields().get(i).map_or_else(|| "nothing".to_owned(), |found| found.to_string());
            let message = format!("column {i} should be {field}, but is {found}");
            return Err(Error::Mismatch { path: path.to_owned(), message });
        }
    }
    Ok(())
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

impl RowGroup {
    /// Decodes the row group.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file is gone, [`Error::Corrupt`] if its pages cannot be decoded.
    pub(crate) fn decode(&self) -> Result<Vec<RecordBatch>> {
        let file = fs_err::File::open(self.path.as_path())?.into_file();
        let rows = self.metadata.metadata().row_group(self.index).num_rows();
        guarded(&self.path, Some(self.index), || {
            let rows = usize::try_from(rows).map_err(|_| format!("{rows} rows"))?;
            let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
                .with_projection(self.columns.clone())
                .with_row_groups(vec![self.index])
                .with_batch_size(rows.max(1))
                .build()
                .map_err(|error| error.to_string())?;
            let batches = reader.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
            let found: usize = batches.iter().map(RecordBatch::num_rows).sum();
            if found == rows { Ok(batches) } else { Err(format!("{found} rows decoded of {rows}")) }
        })
    }
}

/// Runs a decoder on bytes that may be anything: its errors, and its panics, become [`Error::Corrupt`].
fn guarded<T>(
    path: &Path,
    row_group: Option<usize>,
    decode: impl FnOnce() -> Result<T, String>,
) -> Result<T> {
    catch_panic(decode).map_err(|message| Error::Corrupt { path: path.to_owned(), row_group, message })
}
