//! Writes one Parquet file.
//!
//! ```text
//! row group 0 ─▶ decode ─▶ choose encodings ─▶ count, encode ─┐
//! row group 1 ─▶ decode ─▶ wait for these   ─▶ count, encode ─┼─ in their order ─▶ file ─▶ upload, checksums
//! row group 2 ─▶ …                                            ┘
//! ```
//!
//! Each row group has its own thread, which runs its work on the writer's thread pool. A single row group is
//! encoded by all threads of the pool, column by column.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Float32Type, SchemaRef};
use futures::FutureExt;
use futures::channel::oneshot;
use futures::executor::block_on;
use futures::future::Shared;
use onefold_storage::Storage;
use parquet::arrow::arrow_writer::{ArrowColumnChunk, ArrowRowGroupWriterFactory};
use parquet::arrow::{ArrowSchemaConverter, add_encoded_arrow_schema_to_metadata};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use rayon::prelude::*;

use super::checksums::ChecksumWriter;
use super::columns::{FileColumns, leaf_path};
use super::count::Counter;
use super::encoders::Encoders;
use super::encodings::{Encoded, compression};
use super::row_group::{choose_encodings, encode};
use super::{WriterOptions, session_ids, times};
use crate::conform::conform;
use crate::footer::checksums_entry;
use crate::schema::with_sample_keys;
use crate::snapshot::RowGroupStatistics;
use crate::{Buckets, ColumnChanges, DataFile, DenseStatistics, Error, FileSet, Result, RowGroup, Schema};

/// A function that returns the samples of a row group, in batches with the columns of [`Schema::to_arrow`]
/// and, if the dataset has sample keys, [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN). Lists may be
/// `ListView`s.
pub type Decode = Box<
    dyn FnOnce() -> std::result::Result<Vec<RecordBatch>, Box<dyn std::error::Error + Send + Sync>> + Send,
>;

/// The properties that all files of a dataset share, and the threads that encode them.
#[derive(Debug)]
pub(super) struct Format {
    pub(super) columns_of_samples: SchemaRef,
    pub(super) options: WriterOptions,
    pub(super) columns: FileColumns,
    pub(super) counter: Counter,
    /// The features that no file of a set has.
    lacks: Vec<String>,
    /// The indices of the dense features among the samples' columns.
    pub(super) dense: Vec<usize>,
    pub(super) encoders: Encoders,
}

impl Format {
    /// Creates the format of files with these columns. Statistics are not collected for the features in `lacks`,
    /// which no file of the set has.
    pub(super) fn new(
        schema: &Schema,
        columns: FileColumns,
        lacks: &[String],
        options: WriterOptions,
        encoders: Encoders,
    ) -> Self {
        let columns_of_samples = with_sample_keys(schema.to_arrow(), options.sample_keys);
        let counted = schema.dense.iter().filter(|name| !lacks.contains(name));
        let dense = counted.filter_map(|name| columns_of_samples.index_of(name).ok()).collect();
        let (counter, lacks) = (Counter::new(schema, lacks), lacks.to_vec());
        Self { columns_of_samples, options, columns, counter, lacks, dense, encoders }
    }

    /// Returns the format of whole files that lack the features `lacks`.
    pub(super) fn without(&self, schema: &Schema, lacks: &[String]) -> Self {
        self.of_some(schema, self.columns.without(lacks, self.options.order), lacks)
    }

    /// Returns the format of files that have only these `columns`. Statistics are not collected for the
    /// features in `lacks`, which no file of the set has.
    pub(super) fn of_some(&self, schema: &Schema, columns: FileColumns, lacks: &[String]) -> Self {
        Self::new(schema, columns, lacks, self.options.clone(), self.encoders.clone())
    }
}

/// The pushed samples of a row group.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pushed {
    /// The decoded size of the samples in bytes.
    pub(super) bytes: usize,
    /// The number of sessions that begin with one of these samples.
    pub(super) sessions: u64,
}

/// A data file to which row groups are appended.
#[derive(Debug)]
pub(super) struct DataFileWriter {
    /// The path relative to the dataset's folder.
    path: String,
    full_path: PathBuf,
    format: Arc<Format>,
    /// The division of the dataset's sessions into buckets.
    buckets: Buckets,
    /// The decoded size of the rows in the file, in bytes.
    pub(super) bytes: usize,
    /// The empty file, until the first row group takes it.
    empty: Option<(ChecksumWriter, oneshot::Sender<Arc<ArrowRowGroupWriterFactory>>)>,
    /// The factory of column writers. It is available once the first row group has chosen the encodings.
    factory: Shared<oneshot::Receiver<Arc<ArrowRowGroupWriterFactory>>>,
    /// The row groups that are being encoded, in file order.
    encoding: VecDeque<JoinHandle<Result<EncodedRowGroup>>>,
    file: Option<Box<SerializedFileWriter<ChecksumWriter>>>,
    row_groups: Vec<RowGroup>,
    /// The statistics of each row group.
    statistics: Vec<RowGroupStatistics>,
}

/// An encoded row group that can be appended to its file.
struct EncodedRowGroup {
    /// The file, if this is its first row group.
    file: Option<Box<SerializedFileWriter<ChecksumWriter>>>,
    chunks: Vec<ArrowColumnChunk>,
    described: RowGroup,
    statistics: RowGroupStatistics,
}

impl DataFileWriter {
    /// Starts the file `path` of the dataset in `storage`.
    pub(super) fn create(
        storage: &Storage,
        path: String,
        format: &Arc<Format>,
        buckets: Buckets,
    ) -> Result<Self> {
        let upload = storage.upload(&path)?;
        let (chosen, factory) = oneshot::channel();
        Ok(Self {
            full_path: storage.shown(&path),
            path,
            bytes: 0,
            empty: Some((ChecksumWriter::new(upload), chosen)),
            factory: factory.shared(),
            encoding: VecDeque::new(),
            file: None,
            row_groups: Vec::new(),
            statistics: Vec::new(),
            format: Arc::clone(format),
            buckets,
        })
    }

    /// Starts to decode and encode the next row group, which contains the samples `pushed`. It waits if the
    /// encoders already work on the maximum number of row groups.
    pub(super) fn write_row_group(&mut self, pushed: Pushed, decode: Decode) -> Result<()> {
        self.bytes += pushed.bytes;
        let slot = self.format.encoders.row_group();
        let slot = slot.map_err(|error| Error::write(&self.full_path, error))?;
        let (path, format, buckets) = (self.full_path.clone(), Arc::clone(&self.format), self.buckets);
        let number = self.row_groups.len() + self.encoding.len();
        let (empty, factory) = (self.empty.take(), self.factory.clone());
        let work = move || {
            let encoded = encode_row_group(&path, (&format, buckets), number, decode, empty, factory);
            drop(slot);
            let mut encoded = encoded?;
            encoded.described.sessions = pushed.sessions;
            Ok(encoded)
        };
        let thread = std::thread::Builder::new().name("onefold-encode".to_owned()).spawn(work)?;
        self.encoding.push_back(thread);
        Ok(())
    }

    /// Returns the number of row groups that are being encoded or wait to be appended.
    pub(super) fn encoding(&self) -> usize {
        self.encoding.len()
    }

    /// Appends the row groups that are already encoded.
    pub(super) fn append_encoded(&mut self) -> Result<()> {
        while self.encoding.front().is_some_and(JoinHandle::is_finished) {
            self.append_next()?;
        }
        Ok(())
    }

    /// Waits for the next row group and appends it, if there is one.
    pub(super) fn append_next(&mut self) -> Result<()> {
        let Some(thread) = self.encoding.pop_front() else { return Ok(()) };
        let encoded = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let EncodedRowGroup { file, chunks, mut described, statistics } = encoded;
        let wrong = |error: ParquetError| Error::write_parquet(&self.full_path, error);
        self.file = file.or(self.file.take());
        let Some(file) = &mut self.file else { return Err(self.failed_before()) };
        let length = |chunk: &ArrowColumnChunk| chunk.close().metadata.compressed_size();
        file.inner_mut().expect(chunks.iter().map(|chunk| u64::try_from(length(chunk)).unwrap_or(0)));
        let mut row_group = file.next_row_group().map_err(wrong)?;
        for chunk in chunks {
            chunk.append_to_row_group(&mut row_group).map_err(wrong)?;
        }
        let written = row_group.close().map_err(wrong)?;
        described.bytes_on_disk = u64::try_from(written.compressed_size()).unwrap_or(0);
        self.row_groups.push(described);
        self.statistics.push(statistics);
        Ok(())
    }

    /// Completes the file, which then appears in the storage. Returns a file set with this single file, and
    /// the statistics of its row groups.
    pub(super) fn finish(mut self) -> Result<(FileSet, Vec<RowGroupStatistics>)> {
        while self.encoding() > 0 {
            self.append_next()?;
        }
        let Some(mut file) = self.file.take() else { return Err(self.failed_before()) };
        let wrong = |error: io::Error| Error::write(&self.full_path, error);
        file.flush().map_err(wrong)?;
        let checksums = checksums_entry(file.inner().chunks().map_err(wrong)?);
        file.append_key_value_metadata(checksums);
        // This call writes the footer.
        let file = file.into_inner().map_err(|error| Error::write_parquet(&self.full_path, error))?;
        let end = file.finish()?;
        let row_groups = std::mem::take(&mut self.row_groups);
        let file = DataFile {
            path: std::mem::take(&mut self.path),
            bytes_on_disk: end.bytes,
            footer_bytes: end.footer_bytes,
            footer_checksum: end.footer_checksum,
            columns: Arc::clone(&self.format.columns.names),
            row_group_bytes: row_groups.iter().map(|row_group| row_group.bytes_on_disk).collect(),
        };
        let samples = row_groups.iter().map(|row_group| row_group.samples).sum();
        let bucket = row_groups.first().map_or(0, |row_group| row_group.bucket);
        let changes = ColumnChanges { lacks: self.format.lacks.clone(), ..ColumnChanges::default() };
        let set = FileSet { bucket, samples, row_groups, files: vec![file], changes };
        Ok((set, std::mem::take(&mut self.statistics)))
    }

    fn failed_before(&self) -> Error {
        Error::write(&self.full_path, io::Error::other("it failed before"))
    }
}

impl Drop for DataFileWriter {
    fn drop(&mut self) {
        // No thread may continue to write a file that was given up.
        for thread in self.encoding.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Decodes and encodes row group `number` of a file. The first row group gets the `empty` file and begins it.
fn encode_row_group(
    path: &Path,
    (format, buckets): (&Format, Buckets),
    number: usize,
    decode: Decode,
    empty: Option<(ChecksumWriter, oneshot::Sender<Arc<ArrowRowGroupWriterFactory>>)>,
    factory: Shared<oneshot::Receiver<Arc<ArrowRowGroupWriterFactory>>>,
) -> Result<EncodedRowGroup> {
    let wrong = |error: ParquetError| Error::write_parquet(path, error);
    let rows = decode().map_err(Error::Decoding)?;
    let rows =
        rows.iter().map(|rows| conform(rows, &format.columns_of_samples)).collect::<Result<Vec<_>>>()?;
    let (columns, pool) = (&format.columns, &format.encoders.pool);
    let mut file = None;
    if let Some((empty, chosen)) = empty {
        let encodings = pool.install(|| choose_encodings(path, columns, &rows))?;
        let (begun, factory) = begin(empty, columns, &encodings).map_err(wrong)?;
        file = Some(Box::new(begun));
        // If there is only one row group, no other thread receives this.
        let _ = chosen.send(Arc::new(factory));
    }
    // The thread that begins the file reports its own errors.
    let lost = |_| Error::write(path, io::Error::other("its first row group failed"));
    // This wait is outside the pool, because the first row group needs the pool's threads.
    let writers = block_on(factory).map_err(lost)?.create_column_writers(number).map_err(wrong)?;
    let count = || rayon::join(|| format.counter.count(&rows), || dense_statistics(&format.dense, &rows));
    let ((counts, dense), chunks) =
        pool.install(|| rayon::join(count, || encode(path, columns, &rows, writers)));
    let values = counts.features.iter().map(|feature| feature.values).sum();
    let mut described = RowGroup { values, digest: counts.digest, ..RowGroup::default() };
    rows.iter().for_each(|rows| described.add(buckets, session_ids(rows), times(rows)));
    let statistics = RowGroupStatistics { features: counts.features, dense };
    Ok(EncodedRowGroup { file, chunks: chunks?, described, statistics })
}

/// Returns the statistics of the dense features in the columns `dense` of a row group. Each column is
/// computed by one thread.
fn dense_statistics(dense: &[usize], rows: &[RecordBatch]) -> Vec<DenseStatistics> {
    let statistics = |column: &usize| {
        let parts =
            rows.iter().map(|batch| &batch.column(*column).as_primitive::<Float32Type>().values()[..]);
        DenseStatistics::of(parts)
    };
    dense.par_iter().map(statistics).collect()
}

/// Starts a Parquet file; `encodings` has one element per field.
fn begin(
    file: ChecksumWriter,
    columns: &FileColumns,
    encodings: &[Encoded],
) -> Result<(SerializedFileWriter<ChecksumWriter>, ArrowRowGroupWriterFactory), ParquetError> {
    let mut properties = WriterProperties::builder()
        .set_compression(compression()?)
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
    Ok((writer, factory))
}
