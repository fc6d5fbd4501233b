//! Divides the samples of a range of buckets into row groups.

use std::ops::Range;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::DataType;

use super::{BucketWriter, session_ids, times};
use crate::lists::Lists;
use crate::{Result, WrittenBucket};

/// Writes samples of a range of buckets of a partition in dataset order.
#[derive(Debug)]
pub(crate) struct SampleWriter {
    writer: BucketWriter,
    /// The samples that are not yet in a row group.
    rows: Vec<RecordBatch>,
}

impl SampleWriter {
    pub(super) fn new(writer: BucketWriter) -> Self {
        Self { writer, rows: Vec::new() }
    }

    /// Appends a batch of samples in the form that [`DatasetWriter::write`](super::DatasetWriter::write)
    /// takes.
    pub(crate) fn append(&mut self, batch: &RecordBatch) -> Result<()> {
        let (sessions, times, bytes) = (session_ids(batch), times(batch), decoded_row_bytes(batch));
        let mut start = 0;
        for row in 0..batch.num_rows() {
            if self.writer.push(sessions[row], times[row], bytes[row])? {
                self.keep(batch, start..row);
                self.end_row_group()?;
                start = row;
            }
        }
        self.keep(batch, start..batch.num_rows());
        Ok(())
    }

    fn keep(&mut self, batch: &RecordBatch, rows: Range<usize>) {
        if !rows.is_empty() {
            self.rows.push(batch.slice(rows.start, rows.len()));
        }
    }

    fn end_row_group(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.rows);
        if rows.is_empty() { Ok(()) } else { self.writer.write_row_group(Box::new(move || Ok(rows))) }
    }

    /// Completes the last row group, and returns the writer, whose files the caller must complete.
    pub(super) fn end(mut self) -> Result<BucketWriter> {
        self.end_row_group()?;
        Ok(self.writer)
    }

    /// Completes the last row group and the files.
    pub(crate) fn finish(self) -> Result<WrittenBucket> {
        self.end()?.finish()
    }
}

/// Returns the decoded size of each row of `batch` in bytes: 8 for a session id, a time, a kept value and
/// each id of a list, 4 for each float, and the length of each kept text.
pub(super) fn decoded_row_bytes(batch: &RecordBatch) -> Vec<usize> {
    let floats = batch.columns().iter().filter(|column| *column.data_type() == DataType::Float32).count();
    let lists: Vec<Lists> = batch.columns().iter().filter_map(Lists::of).collect();
    let numbers = batch.num_columns() - floats - lists.len();
    let mut bytes = vec![4 * floats + 8 * numbers; batch.num_rows()];
    for column in lists {
        for (row, bytes) in bytes.iter_mut().enumerate() {
            *bytes += 8 * column.size(row);
        }
    }
    for texts in batch.columns().iter().filter_map(|column| column.as_string_opt::<i32>()) {
        let lengths = texts.offsets().windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        bytes.iter_mut().zip(lengths).for_each(|(bytes, length)| *bytes += length);
    }
    bytes
}
