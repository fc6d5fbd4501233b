//! Batches of delta records, which the engine sorts.

use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, BinaryBuilder, BooleanArray, BooleanBufferBuilder, Int64Array, RecordBatch, UInt64Array,
    new_null_array,
};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::row::{RowConverter, Rows, SortField};

use super::record::end_chain;
use crate::error::{Result, arrow_bug};

/// The number of columns of records that are not keys: time, two halves of the digest, record, and the flag of
/// totals.
const OTHER_COLUMNS: usize = 5;
/// The maximum number of rows, and the approximate maximum size in bytes, of a batch of records.
const BATCH_ROWS: usize = 4096;
const BATCH_BYTES: usize = 2 << 20;
/// The size of a cache line in bytes.
pub(super) const CACHE_LINE: usize = 64;

/// A record that is held until it is known whether it is the last of its chain.
#[derive(Debug)]
pub(super) struct Pending {
    /// The sample's keys, encoded by [`RecordBatches::keys`].
    keys: Vec<u8>,
    time: i64,
    digest: u128,
    record: Vec<u8>,
}

/// Collects records into batches.
#[derive(Debug)]
pub(super) struct RecordBatches {
    schema: SchemaRef,
    /// Encodes the key columns, so that a record can be kept after its batch is dropped.
    converter: RowConverter,
    /// The encoded keys of all records, concatenated, and the end of each.
    keys: Vec<u8>,
    key_ends: Vec<usize>,
    times: Vec<i64>,
    digests: Vec<u128>,
    records: BinaryBuilder,
    totals: BooleanBufferBuilder,
    bytes: usize,
    complete: Vec<RecordBatch>,
}

impl Pending {
    pub(super) fn new(keys: &[u8], time: i64, digest: u128, record: &[u8]) -> Self {
        Self { keys: keys.to_vec(), time, digest, record: record.to_vec() }
    }

    /// Replaces the record.
    pub(super) fn set(&mut self, keys: &[u8], time: i64, digest: u128, record: &[u8]) {
        self.keys.clear();
        self.keys.extend_from_slice(keys);
        self.record.clear();
        self.record.extend_from_slice(record);
        (self.time, self.digest) = (time, digest);
    }

    /// Reads a byte of every cache line of the record, and of the keys.
    pub(super) fn touch(&self) -> u64 {
        let lines = self.record.iter().step_by(CACHE_LINE).chain(self.keys.first());
        lines.fold(0, |sum, byte| sum + u64::from(*byte))
    }

    /// The number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.keys.capacity() + self.record.capacity()
    }
}

impl RecordBatches {
    /// Creates an empty collection of records with the columns of `schema`: the keys, the time, the two halves of
    /// the digest, the record, and the flag of [totals](super::totals).
    pub(super) fn new(schema: &SchemaRef) -> Result<Self> {
        let keys = &schema.fields()[..schema.fields().len() - OTHER_COLUMNS];
        let keys = keys.iter().map(|field| SortField::new(field.data_type().clone()));
        Ok(Self {
            schema: Arc::clone(schema),
            converter: RowConverter::new(keys.collect()).map_err(arrow_bug)?,
            keys: Vec::new(),
            key_ends: Vec::new(),
            times: Vec::new(),
            digests: Vec::new(),
            records: BinaryBuilder::new(),
            totals: BooleanBufferBuilder::new(BATCH_ROWS),
            bytes: 0,
            complete: Vec::new(),
        })
    }

    /// Encodes key columns row by row.
    pub(super) fn keys(&self, columns: &[ArrayRef]) -> Result<Rows> {
        self.converter.convert_columns(columns).map_err(arrow_bug)
    }

    /// Adds a record. `ends` says whether it is the last of its chain.
    pub(super) fn push(&mut self, pending: &mut Pending, ends: bool) -> Result<()> {
        if ends {
            end_chain(&mut pending.record);
        }
        self.row((&pending.keys, pending.time, pending.digest), &pending.record, false)
    }

    /// Adds part `number` of a worker's totals.
    pub(super) fn push_totals(&mut self, worker: u64, number: i64, part: &[u8]) -> Result<()> {
        let fields = &self.schema.fields()[..self.schema.fields().len() - OTHER_COLUMNS];
        let none: Vec<ArrayRef> = fields.iter().map(|field| new_null_array(field.data_type(), 1)).collect();
        let keys = self.keys(&none)?;
        self.row((keys.row(0).as_ref(), number, u128::from(worker) << 64), part, true)
    }

    fn row(&mut self, (keys, time, digest): (&[u8], i64, u128), record: &[u8], totals: bool) -> Result<()> {
        self.keys.extend_from_slice(keys);
        self.key_ends.push(self.keys.len());
        self.times.push(time);
        self.digests.push(digest);
        self.records.append_value(record);
        self.totals.append(totals);
        self.bytes += record.len();
        if self.times.len() >= BATCH_ROWS || self.bytes >= BATCH_BYTES {
            self.complete_batch()?;
        }
        Ok(())
    }

    /// Takes the complete batches.
    pub(super) fn take(&mut self) -> Vec<RecordBatch> {
        std::mem::take(&mut self.complete)
    }

    /// Completes a batch with the remaining records.
    pub(super) fn complete_batch(&mut self) -> Result<()> {
        if self.times.is_empty() {
            return Ok(());
        }
        let parser = self.converter.parser();
        let starts = std::iter::once(0).chain(self.key_ends.iter().copied());
        let rows = starts.zip(&self.key_ends).map(|(start, end)| parser.parse(&self.keys[start..*end]));
        let keys = self.converter.convert_rows(rows).map_err(arrow_bug)?;
        self.keys.clear();
        self.key_ends.clear();
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(self.schema.fields().len());
        for (key, field) in keys.into_iter().zip(self.schema.fields()) {
            // The converter decodes dictionaries to their values, so they must be cast back.
            let fits = key.data_type() == field.data_type();
            columns.push(if fits { key } else { cast(&key, field.data_type()).map_err(arrow_bug)? });
        }
        let digests = std::mem::take(&mut self.digests);
        let half = |shift: u32| -> ArrayRef {
            Arc::new(UInt64Array::from_iter_values(digests.iter().map(|digest| (digest >> shift) as u64)))
        };
        columns.push(Arc::new(Int64Array::from(std::mem::take(&mut self.times))));
        columns.extend([half(64), half(0)]);
        columns.push(Arc::new(self.records.finish()));
        columns.push(Arc::new(BooleanArray::new(self.totals.finish(), None)));
        // The next batch will have about the same size.
        self.records = BinaryBuilder::with_capacity(digests.len(), self.bytes + self.bytes / 8);
        self.bytes = 0;
        self.complete.push(RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(arrow_bug)?);
        Ok(())
    }
}
