//! A directory of **raw logs**: Parquet tables in arrival order, with a `dataset.toml` that defines how to build a
//! dataset from them, and a `train.toml` that defines a model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{AsArray, ListArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use serde::Serialize;

use crate::{Error, Result, error};
use onefold_storage::commit::{StagedDirectory, write_atomically};

/// The configuration file for `onefold-ingest build`. It marks a directory as raw logs.
pub const DATASET_CONFIG_FILE: &str = "dataset.toml";
/// The model configuration file for `onefold-train run`.
pub const TRAIN_CONFIG_FILE: &str = "train.toml";

/// Returns the schema of a table with these columns, which have no nulls.
pub(crate) fn schema<'n>(columns: impl IntoIterator<Item = (&'n str, DataType)>) -> SchemaRef {
    let fields = columns.into_iter().map(|(name, kind)| Field::new(name, kind, false));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// The data type of times.
pub(crate) const TIME: DataType = DataType::Timestamp(TimeUnit::Microsecond, None);

/// Returns the list of a row, which must exist in `lists`.
pub(crate) fn list_row(lists: &ListArray, row: usize) -> &[i64] {
    let offsets = lists.value_offsets();
    &lists.values().as_primitive::<Int64Type>().values()[offsets[row] as usize..offsets[row + 1] as usize]
}

/// Writes a directory of raw logs. It is created atomically by [`commit`](Self::commit).
#[derive(Debug)]
pub struct RawLogWriter {
    directory: StagedDirectory,
}

impl RawLogWriter {
    /// Starts raw logs that will be stored at `out`.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] if `out` exists and may not be replaced: `overwrite` is false, or it is not a directory of
    /// raw logs.
    pub fn create(out: &Path, overwrite: bool) -> Result<Self> {
        Ok(Self { directory: StagedDirectory::create(out, DATASET_CONFIG_FILE, overwrite)? })
    }

    /// Starts the Parquet file `name`, which includes its extension. Parent directories are created.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Fault`] if the file cannot be created.
    pub fn table(&self, name: &str, schema: SchemaRef) -> Result<TableWriter> {
        let path = self.directory.path().join(name);
        if let Some(parent) = path.parent() {
            fs_err::create_dir_all(parent)?;
        }
        let wrong = |source: ParquetError| table_error(&path, &source);
        let zstd = ZstdLevel::try_new(3).map_err(wrong)?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(zstd))
            .set_max_row_group_row_count(Some(64 << 10))
            .set_max_row_group_bytes(Some(64 << 20))
            .build();
        let file = fs_err::File::create(&path)?;
        let writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties)).map_err(wrong)?;
        Ok(TableWriter { path, schema, writer })
    }

    /// Writes a complete table. The columns are the fields of the rows.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Fault`] if the table cannot be written.
    pub fn write_table(&self, name: &str, schema: SchemaRef, rows: &[impl Serialize]) -> Result<()> {
        let mut table = self.table(name, schema)?;
        table.write_rows(rows)?;
        table.finish()
    }

    /// Writes a text file ([`DATASET_CONFIG_FILE`], [`TRAIN_CONFIG_FILE`]).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        Ok(write_atomically(&self.directory.path().join(name), text.as_bytes())?)
    }

    /// Moves the directory to its final place.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the directory cannot be moved.
    pub fn commit(self) -> Result<()> {
        Ok(self.directory.commit()?)
    }
}

/// One Parquet table of raw logs.
#[derive(Debug)]
pub struct TableWriter {
    path: PathBuf,
    schema: SchemaRef,
    writer: ArrowWriter<fs_err::File>,
}

impl TableWriter {
    /// Appends rows.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the rows cannot be written or have other columns.
    pub fn write(&mut self, rows: &RecordBatch) -> Result<()> {
        self.writer.write(rows).map_err(|source| table_error(&self.path, &source))
    }

    /// Appends rows whose fields are the columns.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the rows cannot be written, [`Error::Internal`] if they do not have these fields.
    pub fn write_rows(&mut self, rows: &[impl Serialize]) -> Result<()> {
        let rows = serde_arrow::to_record_batch(self.schema.fields(), &rows);
        self.write(&rows.map_err(|error| ArrowError::ExternalError(Box::new(error)))?)
    }

    /// Writes the footer and syncs the file.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] or [`Error::Io`] if the file cannot be written.
    pub fn finish(mut self) -> Result<()> {
        self.writer.finish().map_err(|source| table_error(&self.path, &source))?;
        Ok(self.writer.inner().sync_all()?)
    }
}

fn table_error(path: &Path, source: &ParquetError) -> Error {
    error::parquet(path, source, "check the disk's free space and permissions")
}
