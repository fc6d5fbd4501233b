//! Data files to record batches, one row group at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, SchemaRef};
use onefold_datasets::{DataFile, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};

use crate::{Error, Result};

/// One row group of a data file: the unit of decoding.
#[derive(Debug, Clone)]
pub(crate) struct RowGroup {
    path: Arc<PathBuf>,
    metadata: ArrowReaderMetadata,
    columns: ProjectionMask,
    index: usize,
}

/// Reads a file's footer and gives its row groups, for the columns of `schema`.
///
/// # Errors
///
/// [`Error::Io`] if the file is missing, [`Error::Corrupt`] if the footer cannot be decoded, and
/// [`Error::Mismatch`] if the file has another size, row count or schema than the dataset's manifest says.
pub(crate) fn open(directory: &Path, file: &DataFile, all: &SchemaRef, schema: &Schema) -> Result<Vec<RowGroup>> {
    let path = Arc::new(directory.join(&file.path));
    let handle = fs_err::File::open(path.as_path())?;
    let bytes = handle.metadata()?.len();
    if bytes != file.bytes_on_disk {
        let message = format!("it has {bytes} bytes, the manifest says {}", file.bytes_on_disk);
        return Err(Error::Mismatch { path: path.to_path_buf(), message });
    }
    let load = || ArrowReaderMetadata::load(handle.file(), ArrowReaderOptions::new());
    let metadata = guarded(&path, None, || load().map_err(|error| error.to_string()))?;
    let rows = metadata.metadata().file_metadata().num_rows();
    if u64::try_from(rows).ok() != Some(file.samples) {
        let message = format!("it has {rows} rows, the manifest says {}", file.samples);
        return Err(Error::Mismatch { path: path.to_path_buf(), message });
    }
    check_schema(&path, &metadata, all)?;
    let wanted: Vec<usize> = schema.to_arrow().fields().iter().filter_map(|field| all.index_of(field.name()).ok()).collect();
    let columns = ProjectionMask::roots(metadata.parquet_schema(), wanted);
    let groups = metadata.metadata().num_row_groups();
    Ok((0..groups)
        .map(|index| RowGroup { path: Arc::clone(&path), metadata: metadata.clone(), columns: columns.clone(), index })
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
fn guarded<T>(path: &Path, row_group: Option<usize>, decode: impl FnOnce() -> Result<T, String>) -> Result<T> {
    let decoded = catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| Err("the decoder gave up".to_owned()));
    decoded.map_err(|message| Error::Corrupt { path: path.to_owned(), row_group, message })
}
