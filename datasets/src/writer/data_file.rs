//! One Parquet file while it is written.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Float32Type;
use parquet::arrow::arrow_writer::{ArrowColumnWriter, ArrowRowGroupWriterFactory};
use parquet::arrow::{ArrowSchemaConverter, add_encoded_arrow_schema_to_metadata};
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::columns::{FileColumns, leaf_path};
use super::count::{Counter, Counts};
use super::encodings::Encoded;
use super::row_group::{choose_encodings, encode};
use super::{session_ids, times};
use crate::dense::DenseSketch;
use crate::storage::{HashingWriter, Storage};
use crate::{DataFile, DenseStatistics, Error, Result, RowGroup, RowGroups};

/// What all files of a dataset have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) columns: FileColumns,
    pub(super) counter: Counter,
    /// The samples' columns of dense features.
    pub(super) dense: Vec<usize>,
    pub(super) level: ZstdLevel,
    pub(super) pool: ThreadPool,
}

/// A data file that rows are appended to. A row group is gathered here and then encoded on a thread of its own, while
/// the next one is gathered; there are never more than these two.
#[derive(Debug)]
pub(super) struct DataFileWriter {
    /// Relative to the dataset's directory.
    path: String,
    encoder: State,
    /// The rows of the current row group.
    rows: Vec<RecordBatch>,
    /// Decoded bytes of the rows in the file.
    pub(super) file_bytes: usize,
    /// Decoded bytes of the rows in the current row group.
    pub(super) group_bytes: usize,
}

/// Where the encoder is.
#[derive(Debug)]
enum State {
    Idle(Box<Encoder>),
    Busy(JoinHandle<Result<Box<Encoder>>>),
    /// Lost by an error that was already given.
    Failed,
}

/// Encodes row groups into a file.
#[derive(Debug)]
struct Encoder {
    path: PathBuf,
    shared: Arc<Shared>,
    output: Output,
    counts: Counts,
    /// By dense feature.
    dense: Vec<DenseSketch>,
    row_groups: Vec<RowGroup>,
}

/// A file, empty until the first row group has told how its columns are encoded.
#[derive(Debug)]
enum Output {
    Empty(Box<HashingWriter>),
    Begun(Box<SerializedFileWriter<HashingWriter>>, ArrowRowGroupWriterFactory),
    Failed,
}

impl DataFileWriter {
    /// Starts the file `path` of the dataset in `storage`.
    pub(super) fn create(storage: &Storage, path: String, shared: &Arc<Shared>) -> Result<Self> {
        let upload = storage.upload(&path)?;
        let output = Output::Empty(Box::new(HashingWriter::new(upload)));
        let (path_shown, shared) = (storage.shown(&path), Arc::clone(shared));
        let counts = shared.counter.nothing();
        let dense = vec![DenseSketch::default(); shared.dense.len()];
        let encoder = State::Idle(Box::new(Encoder {
            path: path_shown,
            shared,
            output,
            counts,
            dense,
            row_groups: Vec::new(),
        }));
        Ok(Self { path, encoder, rows: Vec::new(), file_bytes: 0, group_bytes: 0 })
    }

    /// Appends `rows`, columns of [`Schema::to_arrow`](crate::Schema::to_arrow) with `bytes` decoded bytes, to the
    /// current row group.
    pub(super) fn append(&mut self, rows: RecordBatch, bytes: usize) {
        self.group_bytes += bytes;
        self.file_bytes += bytes;
        self.rows.push(rows);
    }

    /// Ends the row group; the next rows start another. Errors of the one before appear here.
    pub(super) fn end_row_group(&mut self) -> Result<()> {
        self.group_bytes = 0;
        let rows = std::mem::take(&mut self.rows);
        if rows.is_empty() {
            return Ok(());
        }
        let mut encoder = self.encoder()?;
        let work = move || {
            let shared = Arc::clone(&encoder.shared);
            shared.pool.install(|| encoder.write_row_group(&rows))?;
            Ok(encoder)
        };
        let thread = std::thread::Builder::new().name("onefold-encode".to_owned()).spawn(work)?;
        self.encoder = State::Busy(thread);
        Ok(())
    }

    /// The encoder, once it is free.
    fn encoder(&mut self) -> Result<Box<Encoder>> {
        match std::mem::replace(&mut self.encoder, State::Failed) {
            State::Idle(encoder) => Ok(encoder),
            State::Busy(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            State::Failed => Err(Error::write(&self.path, io::Error::other("it failed before"))),
        }
    }

    /// Ends the file, which appears in the storage then; gives the statistics of its samples, those of dense features
    /// in the schema's order.
    pub(super) fn finish(mut self) -> Result<(DataFile, Counts, Vec<DenseStatistics>)> {
        self.end_row_group()?;
        let encoder = self.encoder()?;
        let path = std::mem::take(&mut self.path);
        let Encoder { path: full_path, output, counts, dense, row_groups, .. } = *encoder;
        let Output::Begun(writer, _) = output else {
            return Err(Error::write(full_path, io::Error::other("it has no rows")));
        };
        // Writes the footer.
        let writer = writer.into_inner().map_err(|error| Error::write_parquet(&full_path, error))?;
        let (bytes_on_disk, sha256) = writer.finish()?;
        let samples = row_groups.iter().map(|row_group| row_group.samples).sum();
        let row_groups = RowGroups::Listed(row_groups);
        let file = DataFile { path, bucket: 0, samples, row_groups, bytes_on_disk, sha256 };
        Ok((file, counts, dense.iter().map(DenseSketch::statistics).collect()))
    }
}

impl Drop for DataFileWriter {
    fn drop(&mut self) {
        // The encoder must not go on writing a file that is given up.
        if let State::Busy(thread) = std::mem::replace(&mut self.encoder, State::Failed) {
            let _ = thread.join();
        }
    }
}

impl Encoder {
    fn write_row_group(&mut self, rows: &[RecordBatch]) -> Result<()> {
        let path = self.path.clone();
        let wrong = |error: ParquetError| Error::write_parquet(&path, error);
        let writers = self.column_writers(rows)?;
        let shared = &self.shared;
        let count = || rayon::join(|| shared.counter.count(rows), || sketch_dense(&shared.dense, rows));
        let ((counts, dense), chunks) = rayon::join(count, || encode(&path, &shared.columns, rows, writers));
        self.counts.merge(&counts);
        self.dense.iter_mut().zip(&dense).for_each(|(all, next)| all.merge(next));
        let Output::Begun(writer, _) = &mut self.output else { return Ok(()) };
        let mut row_group = writer.next_row_group().map_err(wrong)?;
        for chunk in chunks? {
            chunk.append_to_row_group(&mut row_group).map_err(wrong)?;
        }
        let written = row_group.close().map_err(wrong)?;
        let mut described = RowGroup {
            values: counts.features.iter().map(|feature| feature.values).sum(),
            bytes_on_disk: u64::try_from(written.compressed_size()).unwrap_or(0),
            ..RowGroup::default()
        };
        rows.iter().for_each(|rows| described.add(session_ids(rows), times(rows)));
        self.row_groups.push(described);
        Ok(())
    }

    /// The writers of the next row group's columns, whose first rows decide how they are encoded.
    fn column_writers(&mut self, rows: &[RecordBatch]) -> Result<Vec<ArrowColumnWriter>> {
        let wrong = |error: ParquetError| Error::write_parquet(&self.path, error);
        if let Output::Empty(_) = &self.output {
            let Shared { columns, level, .. } = &*self.shared;
            let encodings = choose_encodings(&self.path, columns, rows, *level)?;
            let Output::Empty(file) = std::mem::replace(&mut self.output, Output::Failed) else {
                return Ok(Vec::new());
            };
            self.output = begin(*file, columns, *level, &encodings).map_err(wrong)?;
        }
        match &self.output {
            Output::Begun(writer, factory) => {
                factory.create_column_writers(writer.flushed_row_groups().len()).map_err(wrong)
            }
            Output::Empty(_) | Output::Failed => Ok(Vec::new()),
        }
    }
}

/// Sketches the dense features in the columns `dense` of a row group, each on one thread.
fn sketch_dense(dense: &[usize], rows: &[RecordBatch]) -> Vec<DenseSketch> {
    let sketch = |column: &usize| {
        let parts =
            rows.iter().map(|batch| &batch.column(*column).as_primitive::<Float32Type>().values()[..]);
        DenseSketch::of(&parts.collect::<Vec<_>>())
    };
    dense.par_iter().map(sketch).collect()
}

/// Starts a Parquet file; `encodings` has one for every field.
fn begin(
    file: HashingWriter,
    columns: &FileColumns,
    level: ZstdLevel,
    encodings: &[Encoded],
) -> Result<Output, ParquetError> {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_max_row_group_row_count(None)
        .set_sorting_columns(Some(columns.sorting.clone()))
        .set_dictionary_enabled(false);
    for (field, encoded) in columns.file.fields().iter().zip(encodings) {
        let leaf = leaf_path(field);
        properties = match encoded {
            Encoded::Dictionary => properties.set_column_dictionary_enabled(leaf, true),
            Encoded::Values(encoding) => properties.set_column_encoding(leaf, *encoding),
        };
    }
    let mut properties = properties.build();
    add_encoded_arrow_schema_to_metadata(&columns.file, &mut properties);
    let schema = ArrowSchemaConverter::new().convert(&columns.file)?;
    let writer = SerializedFileWriter::new(file, schema.root_schema_ptr(), Arc::new(properties))?;
    let factory = ArrowRowGroupWriterFactory::new(&writer, Arc::clone(&columns.file));
    Ok(Output::Begun(Box::new(writer), factory))
}
