//! Writes the segments.

use std::cmp::Reverse;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, take_record_batch};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use onefold_datasets::Error as DatasetError;
use parquet::arrow::{ArrowSchemaConverter, ArrowWriter};
use parquet::basic::{Compression, Encoding, Type as PhysicalType, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use rayon::prelude::*;
use serde::Serialize;

use super::output::{Output, SegmentWriter};
use crate::error::{Error, Result};

/// The target size of a decoded row group in bytes, if the memory suffices.
const ROW_GROUP_BYTES: u64 = 512 << 20;
const ZSTD_LEVEL: i32 = 3;

/// The options of [`shard`](super::shard).
#[derive(Debug, Clone)]
pub(crate) struct ShardOptions {
    /// The columns of the key.
    pub(crate) by: Vec<String>,
    /// The number of segments, at least 1.
    pub(crate) segments: usize,
    /// The bytes for buffered rows and for row groups that are being encoded. Reading needs additional memory: two
    /// batches of up to 8 MiB and a page of each column.
    pub(crate) memory_limit: u64,
    /// The number of threads that split, encode and verify, in addition to the reading thread.
    pub(crate) threads: usize,
    /// The bytes of a page before compression. zstd finds copies of a list only within a page, and a reader decodes
    /// whole pages.
    pub(crate) page_bytes: usize,
    /// Whether existing segments are replaced.
    pub(crate) overwrite: bool,
}

/// A segment that was written.
#[derive(Debug, Clone, Serialize)]
pub(super) struct SegmentFile {
    /// The name of the file.
    pub(super) path: String,
    pub(super) rows: u64,
    pub(super) bytes_on_disk: u64,
}

/// All segments, with their buffered rows.
#[derive(Debug)]
pub(super) struct Segments<'a> {
    output: &'a Output,
    schema: SchemaRef,
    segments: Vec<Segment>,
    /// The decoded bytes of the buffered rows of all segments.
    waiting_bytes: u64,
    most_waiting_bytes: u64,
    row_group_bytes: u64,
    /// The number of row groups that are encoded at the same time.
    threads: usize,
    /// The Parquet settings, chosen from the first rows that are written.
    properties: Option<WriterProperties>,
    page_bytes: usize,
}

#[derive(Debug)]
struct Segment {
    name: String,
    /// The writer; `None` before the first row group.
    writer: Option<ArrowWriter<SegmentWriter>>,
    waiting: Vec<RecordBatch>,
    waiting_bytes: u64,
    rows: u64,
}

impl<'a> Segments<'a> {
    /// Makes the segments of rows with the columns of `schema` in `output`.
    pub(super) fn new(output: &'a Output, schema: &SchemaRef, options: &ShardOptions) -> Self {
        let segment = |name: &String| Segment {
            name: name.clone(),
            writer: None,
            waiting: Vec::new(),
            waiting_bytes: 0,
            rows: 0,
        };
        let threads = options.threads.max(1);
        // Half of the memory is for buffered rows. Encoding holds a row group twice more: concatenated, and encoded.
        let share = options.memory_limit / (4 * threads as u64);
        Self {
            output,
            schema: Arc::clone(schema),
            segments: output.names.iter().map(segment).collect(),
            waiting_bytes: 0,
            most_waiting_bytes: options.memory_limit / 2,
            row_group_bytes: ROW_GROUP_BYTES.min(share).max(1),
            threads,
            properties: None,
            page_bytes: options.page_bytes,
        }
    }

    /// Appends rows of `batch` to each segment.
    pub(super) fn append(&mut self, batch: &RecordBatch, rows_by_segment: &[UInt32Array]) -> Result<()> {
        let segments = self.segments.par_iter_mut().zip(rows_by_segment);
        let bytes = segments.map(|(segment, rows)| segment.append(batch, rows));
        let bytes = bytes.collect::<Result<Vec<u64>, ArrowError>>().map_err(DatasetError::Internal)?;
        self.waiting_bytes += bytes.into_iter().sum::<u64>();
        loop {
            let largest = self.segments.iter().map(|segment| segment.waiting_bytes).max().unwrap_or(0);
            if largest < self.row_group_bytes && self.waiting_bytes <= self.most_waiting_bytes {
                return Ok(());
            }
            self.write_largest()?;
        }
    }

    /// Writes a row group for each of the segments with the most buffered bytes.
    fn write_largest(&mut self) -> Result<()> {
        let properties = self.properties()?;
        let mut largest: Vec<&mut Segment> = self.segments.iter_mut().collect();
        largest.sort_by_key(|segment| Reverse(segment.waiting_bytes));
        largest.truncate(self.threads);
        let written: u64 = largest.iter().map(|segment| segment.waiting_bytes).sum();
        let (output, schema) = (self.output, &self.schema);
        largest.into_par_iter().try_for_each(|segment| segment.write(output, schema, &properties))?;
        self.waiting_bytes -= written;
        Ok(())
    }

    /// Writes the buffered rows, and closes the files.
    pub(super) fn finish(mut self) -> Result<Vec<SegmentFile>> {
        let properties = self.properties()?;
        let Self { output, schema, segments, .. } = self;
        output.make_room()?;
        segments.into_par_iter().map(|segment| segment.finish(output, &schema, &properties)).collect()
    }

    /// Returns the settings of all files. The first call chooses them from the buffered rows.
    fn properties(&mut self) -> Result<WriterProperties> {
        if let Some(properties) = &self.properties {
            return Ok(properties.clone());
        }
        let Some(largest) = self.segments.iter().max_by_key(|segment| segment.waiting_bytes) else {
            return Ok(WriterProperties::default());
        };
        let rows = concat_batches(&self.schema, &largest.waiting).map_err(DatasetError::Internal)?;
        let properties =
            choose_properties(&rows, self.page_bytes).map_err(parquet_error(self.output, &largest.name))?;
        self.properties = Some(properties.clone());
        Ok(properties)
    }
}

impl Segment {
    /// Buffers `rows` of `batch`, and returns their bytes.
    fn append(&mut self, batch: &RecordBatch, rows: &UInt32Array) -> Result<u64, ArrowError> {
        if rows.is_empty() {
            return Ok(0);
        }
        let taken = take_record_batch(batch, rows)?;
        let columns = taken.columns().iter().map(compacted).collect();
        let taken = RecordBatch::try_new(taken.schema(), columns)?;
        let bytes = taken.get_array_memory_size() as u64;
        self.rows += taken.num_rows() as u64;
        self.waiting_bytes += bytes;
        self.waiting.push(taken);
        Ok(bytes)
    }

    /// Writes the buffered rows as a row group.
    fn write(&mut self, output: &Output, schema: &SchemaRef, properties: &WriterProperties) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let rows = concat_batches(schema, &self.waiting).map_err(DatasetError::Internal)?;
        self.waiting.clear();
        self.waiting_bytes = 0;
        let mut writer = self.open(output, schema, properties)?;
        writer.write(&rows).and_then(|()| writer.flush()).map_err(parquet_error(output, &self.name))?;
        self.writer = Some(writer);
        Ok(())
    }

    fn open(
        &mut self,
        output: &Output,
        schema: &SchemaRef,
        properties: &WriterProperties,
    ) -> Result<ArrowWriter<SegmentWriter>> {
        match self.writer.take() {
            Some(writer) => Ok(writer),
            None => {
                let file = output.file(&self.name)?;
                let writer = ArrowWriter::try_new(file, Arc::clone(schema), Some(properties.clone()));
                writer.map_err(parquet_error(output, &self.name))
            }
        }
    }

    fn finish(
        mut self,
        output: &Output,
        schema: &SchemaRef,
        properties: &WriterProperties,
    ) -> Result<SegmentFile> {
        self.write(output, schema, properties)?;
        let writer = self.open(output, schema, properties)?;
        let bytes_on_disk = writer.into_inner().map_err(parquet_error(output, &self.name))?.finish()?;
        Ok(SegmentFile { path: self.name, rows: self.rows, bytes_on_disk })
    }
}

/// Returns a column that keeps only its own rows in memory. View arrays would keep the texts of the whole batch.
fn compacted(column: &ArrayRef) -> ArrayRef {
    match column.data_type() {
        DataType::Utf8View => Arc::new(column.as_string_view().gc()),
        DataType::BinaryView => Arc::new(column.as_binary_view().gc()),
        _ => Arc::clone(column),
    }
}

/// Chooses the encoding of each column in which `rows` are smallest.
///
/// If ids are stored plainly, zstd finds a list that occurs in many rows; a dictionary hides the repetition. The copies
/// of a list are far apart in a segment, so complete rows are tried. (Sessions in a dataset are contiguous, so its
/// writer tries a small sample of each column.)
fn choose_properties(rows: &RecordBatch, page_bytes: usize) -> Result<WriterProperties, ParquetError> {
    let columns = ArrowSchemaConverter::new().convert(rows.schema_ref())?;
    let mut delta = base_properties(page_bytes)?.set_dictionary_enabled(false);
    for column in columns.columns() {
        if matches!(column.physical_type(), PhysicalType::INT32 | PhysicalType::INT64) {
            delta = delta.set_column_encoding(column.path().clone(), Encoding::DELTA_BINARY_PACKED);
        }
    }
    let plain = base_properties(page_bytes)?.set_dictionary_enabled(false);
    let candidates = [base_properties(page_bytes)?, plain, delta].map(WriterPropertiesBuilder::build);
    let sizes: Vec<Vec<i64>> = candidates
        .par_iter()
        .map(|candidate| encoded_sizes(rows, candidate.clone()))
        .collect::<Result<_, ParquetError>>()?;
    let mut chosen = base_properties(page_bytes)?;
    for (at, column) in columns.columns().iter().enumerate() {
        let size = |candidate: &usize| sizes[*candidate].get(at).copied().unwrap_or(0);
        let smallest = (0..candidates.len()).min_by_key(size).unwrap_or(0);
        let path = column.path();
        let dictionary = candidates[smallest].dictionary_enabled(path);
        chosen = chosen.set_column_dictionary_enabled(path.clone(), dictionary);
        if let Some(encoding) = candidates[smallest].encoding(path) {
            chosen = chosen.set_column_encoding(path.clone(), encoding);
        }
    }
    Ok(chosen.build())
}

/// Returns the compressed bytes of each column of a row group of `rows`.
fn encoded_sizes(rows: &RecordBatch, properties: WriterProperties) -> Result<Vec<i64>, ParquetError> {
    let mut writer = ArrowWriter::try_new(std::io::sink(), rows.schema(), Some(properties))?;
    writer.write(rows)?;
    let metadata = writer.finish()?;
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    Ok(columns.map(|column| column.compressed_size()).collect())
}

fn base_properties(page_bytes: usize) -> Result<WriterPropertiesBuilder, ParquetError> {
    Ok(WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(ZSTD_LEVEL)?))
        .set_data_page_size_limit(page_bytes)
        .set_max_row_group_row_count(None))
}

fn parquet_error(output: &Output, name: &str) -> impl FnOnce(ParquetError) -> Error + use<> {
    let path = output.path(name);
    move |source| Error::Dataset(DatasetError::write_parquet(path, source))
}
