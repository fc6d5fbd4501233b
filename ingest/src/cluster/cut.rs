//! Cuts the sorted records of buckets into row groups and reads the slices of timelines that they need in parallel.

use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::execution::SendableRecordBatchStream;

use super::decode::{DecodedTotals, ListColumn};
use super::timelines::{BucketOfPartition, SampleNumbers, Slices};
use super::unfold::{CutSpec, RowGroups, SortedRecords, Unfolding};
use crate::error::Result;

/// Cuts records that arrive in the order of the dataset.
pub(super) struct Cutter {
    unfolding: Unfolding,
    timelines: Vec<Slices>,
    numbers: SampleNumbers,
}

impl Cutter {
    /// Creates a cutter. `slices` has one stream per timeline, with the slices that contain the windows of the
    /// records.
    pub(super) fn new(
        spec: &CutSpec,
        lists: Vec<ListColumn>,
        slices: impl IntoIterator<Item = SendableRecordBatchStream>,
    ) -> Self {
        let slices = slices.into_iter().zip(&spec.timelines).map(|(rows, lists)| {
            Slices::new(rows, spec.partitions.clone(), &spec.place_of_slices, lists.clone())
        });
        Self {
            unfolding: Unfolding::new(spec.clone(), lists),
            timelines: slices.collect(),
            numbers: SampleNumbers::new(spec.numbered_by.clone()),
        }
    }

    /// Cuts the next batch of sorted records.
    pub(super) async fn cut(&mut self, batch: &RecordBatch, output: &mut dyn RowGroups) -> Result<()> {
        let records = Arc::new(SortedRecords::of(batch)?);
        for (partition, bucket, rows) in self.unfolding.places(batch, &records)? {
            self.unfolding.enter(&partition, bucket, output)?;
            let place = BucketOfPartition { partition, bucket };
            let numbers = match self.timelines.is_empty() {
                true => Vec::new(),
                false => self.numbers.of(&place, batch, rows.clone(), records.origins())?,
            };
            let mut start = rows.start;
            while start < rows.end {
                let mut end = rows.end;
                for timeline in &mut self.timelines {
                    let left = &numbers[start - rows.start..end - rows.start];
                    timeline.reach(&place, left[0]).await?;
                    let next = timeline.next_in(&place).await?.unwrap_or(i64::MAX);
                    end = start + left.partition_point(|number| *number < next);
                }
                let slices: Vec<_> =
                    self.timelines.iter().map(|timeline| Arc::clone(timeline.current())).collect();
                self.unfolding.push(&records, start..end, &slices, output)?;
                start = end;
            }
        }
        Ok(())
    }

    /// The number of buffered bytes that belong to the unfinished row group.
    pub(super) fn held_bytes(&self) -> usize {
        self.unfolding.held_bytes() + self.timelines.iter().map(Slices::bytes).sum::<usize>()
    }

    /// Ends the last row group.
    pub(super) fn leave(&mut self, output: &mut dyn RowGroups) -> Result<()> {
        self.unfolding.leave(output)
    }

    /// Returns the totals of all records. Call it after all row groups are decoded.
    pub(super) fn totals(self) -> DecodedTotals {
        self.unfolding.totals()
    }
}
