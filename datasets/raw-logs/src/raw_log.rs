//! A directory of **raw logs**: Parquet tables in arrival order, with a `dataset.toml` that defines how a dataset is
//! built from them and a `train.toml` that defines a model.

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

/// The configuration that `onefold-ingest build` reads. It marks a directory as raw logs.
pub const DATASET_CONFIG_FILE: &str = "dataset.toml";
/// The model configuration that `onefold-train run` reads.
pub const TRAIN_CONFIG_FILE: &str = "train.toml";

/// The schema of a table with these columns, none of which has nulls.
pub(crate) fn schema<'n>(columns: impl IntoIterator<Item = (&'n str, DataType)>) -> SchemaRef {
    let fields = columns.into_iter().map(|(name, kind)| Field::new(name, kind, false));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// The type of a time.
pub(crate) const TIME: DataType = DataType::Timestamp(TimeUnit::Microsecond, None);

/// The list of a row, which must be one of `lists`.
pub(crate) fn list_row(lists: &ListArray, row: usize) -> &[i64] {
    let offsets = lists.value_offsets();
    &lists.values().as_primitive::<Int64Type>().values()[offsets[row] as usize..offsets[row + 1] as usize]
}

/// Writes a directory of raw logs, which appears whole at [`commit`](Self::commit) or not at all.
#[derive(Debug)]
pub struct RawLogWriter {
    directory: StagedDirectory,
}

impl RawLogWriter {
    /// Starts raw logs that will be at `out`.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] if something is there and may not be replaced: `overwrite` is false, or it is not a
    /// directory of raw logs.
    pub fn create(out: &Path, overwrite: bool) -> Result<Self> {
        Ok(Self { directory: StagedDirectory::create(out, DATASET_CONFIG_FILE, overwrite)? })
    }

    /// Starts the Parquet file `name` (with its extension; folders on the way are made).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Fault`] if it cannot be created.
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

    /// Writes a whole table; the columns are fields of the rows.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Fault`] if it cannot be written.
    pub fn write_table(&self, name: &str, schema: SchemaRef, rows: &[impl Serialize]) -> Result<()> {
        let mut table = self.table(name, schema)?;
        table.write_rows(rows)?;
        table.finish()
    }

    /// Writes a text file ([`DATASET_CONFIG_FILE`], [`TRAIN_CONFIG_FILE`]).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be written.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        Ok(write_atomically(&self.directory.path().join(name), text.as_bytes())?)
    }

    /// Makes the directory visible.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be moved to its place.
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
    /// [`Error::Fault`] if they cannot be written or have other columns.
    pub fn write(&mut self, rows: &RecordBatch) -> Result<()> {
        self.writer.write(rows).map_err(|source| table_error(&self.path, &source))
    }

    /// Appends rows that have the columns as fields.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if they cannot be written, [`Error::Internal`] if they have no such fields.
    pub fn write_rows(&mut self, rows: &[impl Serialize]) -> Result<()> {
        let rows = serde_arrow::to_record_batch(self.schema.fields(), &rows);
        self.write(&rows.map_err(|error| ArrowError::ExternalError(Box::new(error)))?)
    }

    /// Writes the footer and syncs the file.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] or [`Error::Io`] if it cannot be written.
    pub fn finish(mut self) -> Result<()> {
        self.writer.finish().map_err(|source| table_error(&self.path, &source))?;
        Ok(self.writer.inner().sync_all()?)
    }
}

fn table_error(path: &Path, source: &ParquetError) -> Error {
    error::parquet(path, source, "check the disk's free space and permissions")
}
