//! Slices of timelines, which contain the windows of samples. They are read in step with the sorted records.

use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::partition;
use datafusion::arrow::datatypes::Int64Type;
use datafusion::arrow::row::{OwnedRow, RowConverter, SortField};
use datafusion::execution::SendableRecordBatchStream;
use futures::StreamExt;
use onefold_datasets::PartitionKey;

use super::columns::column;
use super::origin::Origin;
use super::partitions::Partitions;
use crate::error::{Result, arrow_bug};
use crate::sessionize::BUCKET;
use crate::timeline::{FIRST, POSITION};

/// A part of a timeline that contains all windows of some consecutive samples of a bucket: its rows by position,
/// column by column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Slice {
    /// The number of the slice, starting at 1; 0 for the empty slice.
    pub(super) number: i64,
    /// The positions of the rows in the timeline, in increasing order.
    pub(super) positions: Vec<i64>,
    /// The values of the rows, one column for each list that the timeline produces.
    pub(super) columns: Vec<Vec<i64>>,
}

/// The partition and the bucket of samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BucketOfPartition {
    pub(super) partition: PartitionKey,
    pub(super) bucket: u32,
}

/// Reads the slices of one timeline in order.
pub(super) struct Slices {
    rows: SendableRecordBatchStream,
    partitions: Partitions,
    /// The columns that identify a slice.
    apart: Vec<String>,
    /// The names of the lists that the timeline produces.
    lists: Vec<String>,
    /// The current batch and its remaining runs. Each run consists of rows of one slice; the next run is the last
    /// element.
    batch: Option<(RecordBatch, Vec<Run>)>,
    /// The bucket and the first sample of the current slice.
    start: Option<(BucketOfPartition, i64)>,
    current: Arc<Slice>,
}

/// Consecutive rows of a batch that belong to one slice.
struct Run {
    /// The bucket and the first sample of the slice.
    start: (BucketOfPartition, i64),
    rows: Range<usize>,
}

impl Slices {
    /// Creates a reader of slices. `rows` has the rows of [`sessionize::slices`](crate::sessionize::slices) in the
    /// order of the samples. `place` has the names of the columns that identify the bucket of a slice.
    pub(super) fn new(
        rows: SendableRecordBatchStream,
        partitions: Partitions,
        place: &[String],
        lists: Vec<String>,
    ) -> Self {
        let apart = place.iter().cloned().chain([FIRST.to_owned()]).collect();
        let columns = vec![Vec::new(); lists.len()];
        let current = Arc::new(Slice { columns, ..Slice::default() });
        Self { rows, partitions, apart, lists, batch: None, start: None, current }
    }

    /// Returns the slice that was reached last.
    pub(super) fn current(&self) -> &Arc<Slice> {
        &self.current
    }

    /// Returns the number of the first sample of the next slice, if that slice belongs to this bucket.
    pub(super) async fn next_in(&mut self, place: &BucketOfPartition) -> Result<Option<i64>> {
        while self.batch.as_ref().is_none_or(|(_, runs)| runs.is_empty()) {
            let Some(batch) = self.rows.next().await.transpose()? else { return Ok(None) };
            let runs = self.runs(&batch)?;
            self.batch = Some((batch, runs));
        }
        let next = self.batch.as_ref().and_then(|(_, runs)| runs.last());
        Ok(next.filter(|run| run.start.0 == *place).map(|run| run.start.1))
    }

    /// Divides a batch into runs of rows of one slice. The first run is the last element.
    fn runs(&self, batch: &RecordBatch) -> Result<Vec<Run>> {
        let apart = self.apart.iter().map(|name| Ok(Arc::clone(column(batch, name)?)));
        let apart: Vec<ArrayRef> = apart.collect::<Result<_>>()?;
        let buckets = column(batch, BUCKET)?.as_primitive::<Int64Type>();
        let firsts = column(batch, FIRST)?.as_primitive::<Int64Type>();
        let run = |rows: Range<usize>| {
            let partition = self.partitions.key(batch, rows.start)?;
            let place = BucketOfPartition { partition, bucket: buckets.value(rows.start) as u32 };
            Ok(Run { start: (place, firsts.value(rows.start)), rows })
        };
        partition(&apart).map_err(arrow_bug)?.ranges().into_iter().rev().map(run).collect()
    }

    /// Advances to the slice of sample number `sample` of a bucket. Buckets, and samples within a bucket, must be
    /// visited in order.
    pub(super) async fn reach(&mut self, place: &BucketOfPartition, sample: i64) -> Result<()> {
        while self.next_in(place).await?.is_some_and(|first| first <= sample) {
            let Some((batch, runs)) = &mut self.batch else { break };
            let Some(run) = runs.pop() else { break };
            if self.start.as_ref() != Some(&run.start) {
                // Create a new slice instead of clearing the old one, which samples that are not decoded yet may
                // need.
                let columns = vec![Vec::new(); self.lists.len()];
                let number = self.current.number + 1;
                self.current = Arc::new(Slice { number, positions: Vec::new(), columns });
                self.start = Some(run.start);
            }
            let values = |name: &str| -> Result<&[i64]> {
                Ok(&column(batch, name)?.as_primitive::<Int64Type>().values()[run.rows.clone()])
            };
            let current = Arc::make_mut(&mut self.current);
            current.positions.extend_from_slice(values(POSITION)?);
            for (ids, name) in current.columns.iter_mut().zip(&self.lists) {
                ids.extend_from_slice(values(name)?);
            }
        }
        Ok(())
    }

    /// The size of the current slice in bytes.
    pub(super) fn bytes(&self) -> usize {
        let columns = self.current.columns.iter().chain([&self.current.positions]);
        columns.map(|values| 8 * values.capacity()).sum()
    }
}

/// Numbers the samples of each bucket from 1, as the query of the slices does: samples that are equal in the order
/// columns have the number of the first of them.
pub(super) struct SampleNumbers {
    /// The columns that order the samples of a bucket.
    columns: Vec<String>,
    converter: Option<RowConverter>,
    place: Option<BucketOfPartition>,
    last: Option<OwnedRow>,
    number: i64,
    seen: i64,
}

impl SampleNumbers {
    /// Creates a numbering of samples that arrive in the order of `columns`, bucket by bucket.
    pub(super) fn new(columns: Vec<String>) -> Self {
        Self { columns, converter: None, place: None, last: None, number: 0, seen: 0 }
    }

    /// Returns the numbers of the samples `rows` of a sorted batch, which belong to one bucket. Samples that the
    /// dataset already has (according to `origins`) need no slice: they are not counted, and get the number of the
    /// previous sample.
    pub(super) fn of(
        &mut self,
        place: &BucketOfPartition,
        records: &RecordBatch,
        rows: Range<usize>,
        origins: Option<&[i64]>,
    ) -> Result<Vec<i64>> {
        if self.place.as_ref() != Some(place) {
            (self.place, self.last, self.number, self.seen) = (Some(place.clone()), None, 0, 0);
        }
        let keys = self.columns.iter().map(|name| Ok(column(records, name)?.slice(rows.start, rows.len())));
        let keys: Vec<ArrayRef> = keys.collect::<Result<_>>()?;
        let converter = match &mut self.converter {
            Some(converter) => converter,
            none => {
                let fields = keys.iter().map(|key| SortField::new(key.data_type().clone()));
                none.insert(RowConverter::new(fields.collect()).map_err(arrow_bug)?)
            }
        };
        let keys = converter.convert_columns(&keys).map_err(arrow_bug)?;
        let mut numbers = Vec::with_capacity(keys.num_rows());
        let mut before = None;
        for (row, key) in keys.iter().enumerate() {
            if origins.is_none_or(|origins| Origin::of(origins[rows.start + row]) != Some(Origin::Old)) {
                self.seen += 1;
                let is_same = match before {
                    None => self.last.as_ref().is_some_and(|last| last.row() == key),
                    Some(before) => keys.row(before) == key,
                };
                if !is_same {
                    self.number = self.seen;
                }
                before = Some(row);
            }
            numbers.push(self.number);
        }
        if let Some(last) = before {
            self.last = Some(keys.row(last).owned());
        }
        Ok(numbers)
    }
}
