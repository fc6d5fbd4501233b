//! Slices of timelines: the parts in which the windows of samples lie. They are read in step with the sorted records.

use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch, UInt32Array};
use datafusion::arrow::compute::partition;
use datafusion::arrow::datatypes::Int64Type;
use datafusion::arrow::row::{OwnedRow, RowConverter, SortField};
use datafusion::execution::SendableRecordBatchStream;
use futures::StreamExt;
use onefold_datasets::bucket_of_session;

use super::convert::{column, engine};
use super::partitions::Partitions;
use crate::Result;
use crate::merge::OLD;
use crate::sessionize::SESSION;
use crate::timeline::{FIRST, POSITION};

/// A part of a timeline that contains all windows of some consecutive samples: its rows by position, column by column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Slice {
    /// The number of the first sample, counted from 1, which no other slice of the timeline has; 0 for the empty slice.
    pub(super) number: i64,
    /// Positions of the rows in the timeline, rising.
    pub(super) positions: Vec<i64>,
    /// The rows' values, once for each list that the timeline makes.
    pub(super) columns: Vec<Vec<i64>>,
}

/// The slices of one timeline, one after the other.
pub(super) struct Slices {
    rows: SendableRecordBatchStream,
    /// The names of the lists that the timeline makes.
    lists: Vec<String>,
    /// The batch being read, and its runs of rows of one slice that are left, the next one last.
    batch: Option<(RecordBatch, Vec<Range<usize>>)>,
    current: Arc<Slice>,
}

impl Slices {
    /// The slices in `rows`, the rows of [`sessionize::slices`](crate::sessionize::slices).
    pub(super) fn new(rows: SendableRecordBatchStream, lists: Vec<String>) -> Self {
        let columns = vec![Vec::new(); lists.len()];
        Self { rows, lists, batch: None, current: Arc::new(Slice { columns, ..Slice::default() }) }
    }

    /// The slice that was reached last.
    pub(super) fn current(&self) -> &Arc<Slice> {
        &self.current
    }

    /// The number of the next slice's first sample; `None` after the last slice.
    pub(super) async fn next(&mut self) -> Result<Option<i64>> {
        while self.batch.as_ref().is_none_or(|(_, runs)| runs.is_empty()) {
            let Some(batch) = self.rows.next().await.transpose()? else { return Ok(None) };
            let mut runs = partition(&[column(&batch, FIRST)?.clone()]).map_err(engine)?.ranges();
            runs.reverse();
            self.batch = Some((batch, runs));
        }
        let Some((batch, runs)) = &self.batch else { return Ok(None) };
        let Some(rows) = runs.last() else { return Ok(None) };
        Ok(Some(column(batch, FIRST)?.as_primitive::<Int64Type>().value(rows.start)))
    }

    /// Goes to the slice of sample number `sample`, which is not before the current slice.
    pub(super) async fn reach(&mut self, sample: i64) -> Result<()> {
        while let Some(number) = self.next().await? {
            if number > sample {
                break;
            }
            if self.current.number != number {
                // Samples that are not decoded yet may need the slice before.
                let columns = vec![Vec::new(); self.lists.len()];
                self.current = Arc::new(Slice { number, positions: Vec::new(), columns });
            }
            let Some((batch, runs)) = &mut self.batch else { break };
            let Some(rows) = runs.pop() else { break };
            let values = |name: &str| -> Result<&[i64]> {
                Ok(&column(batch, name)?.as_primitive::<Int64Type>().values()[rows.clone()])
            };
            let current = Arc::make_mut(&mut self.current);
            current.positions.extend_from_slice(values(POSITION)?);
            for (ids, name) in current.columns.iter_mut().zip(&self.lists) {
                ids.extend_from_slice(values(name)?);
            }
        }
        Ok(())
    }

    /// The bytes that the current slice takes.
    pub(super) fn bytes(&self) -> usize {
        let columns = self.current.columns.iter().chain([&self.current.positions]);
        columns.map(|values| 8 * values.capacity()).sum()
    }
}

/// Numbers samples from 1 as the slices' query does: samples that its order cannot tell apart have the number of the
/// first.
pub(super) struct SampleNumbers {
    /// The columns that order the samples of a bucket.
    columns: Vec<String>,
    buckets: u32,
    converter: Option<RowConverter>,
    last: Option<OwnedRow>,
    number: i64,
    seen: i64,
}

impl SampleNumbers {
    /// Numbers of samples that come in the order of partitions, buckets and these columns.
    pub(super) fn new(columns: Vec<String>, buckets: u32) -> Self {
        Self { columns, buckets, converter: None, last: None, number: 0, seen: 0 }
    }

    /// The numbers of the samples of a sorted batch. Samples that the dataset already has (by
    /// `origins`) need no slice: they are not counted, and have the number of the sample before them.
    pub(super) fn of(
        &mut self,
        partitions: &Partitions,
        records: &RecordBatch,
        origins: Option<&[i64]>,
    ) -> Result<Vec<i64>> {
        let mut keys: Vec<ArrayRef> = partitions.columns(records)?;
        let sessions = column(records, SESSION)?.as_primitive::<Int64Type>().values();
        let buckets = sessions.iter().map(|session| bucket_of_session(*session, self.buckets));
        keys.push(Arc::new(UInt32Array::from_iter_values(buckets)));
        for name in &self.columns {
            keys.push(column(records, name)?.clone());
        }
        let converter = match &mut self.converter {
            Some(converter) => converter,
            none => {
                let fields = keys.iter().map(|key| SortField::new(key.data_type().clone()));
                none.insert(RowConverter::new(fields.collect()).map_err(engine)?)
            }
        };
        let rows = converter.convert_columns(&keys).map_err(engine)?;
        let mut numbers = Vec::with_capacity(rows.num_rows());
        let mut before = None;
        for row in 0..rows.num_rows() {
            if origins.is_none_or(|origins| origins[row] != OLD) {
                self.seen += 1;
                let is_same = match before {
                    None => self.last.as_ref().is_some_and(|last| last.row() == rows.row(row)),
                    Some(before) => rows.row(before) == rows.row(row),
                };
                if !is_same {
                    self.number = self.seen;
                }
                before = Some(row);
            }
            numbers.push(self.number);
        }
        if let Some(last) = before {
            let last = rows.row(last).owned();
            self.last = Some(last);
        }
        Ok(numbers)
    }
}
