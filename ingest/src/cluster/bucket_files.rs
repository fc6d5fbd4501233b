//! Writes the files of ranges of buckets, one range after the other.

use std::collections::BTreeMap;
use std::path::PathBuf;

use onefold_datasets::{
    BucketWriter, BucketWriters, ClosingBuckets, Decode, PartitionChoice, PartitionColumn, PartitionFilter,
    PartitionKey, Schema, WriterOptions, WrittenBucket,
};
use serde::{Deserialize, Serialize};

use super::unfold::{CutSpec, RowGroups};
use crate::error::Result;

/// The features that the files of some ranges of buckets lack, by partition and range, in this order.
pub(crate) type Lacks = Vec<((PartitionKey, u32), Vec<String>)>;

/// Options for writing ranges of buckets.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WriteSpec {
    /// The dataset: a local path or a URL.
    pub(crate) location: PathBuf,
    pub(crate) schema: Schema,
    pub(crate) options: WriterOptions,
    /// The partitions to write. Samples of other partitions are only counted.
    pub(crate) filter: PartitionFilter,
    pub(crate) partition_columns: Vec<PartitionColumn>,
    pub(crate) lacks: Lacks,
    pub(crate) cut: CutSpec,
}

impl WriteSpec {
    /// Returns the partitions to write.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if the filter does not fit the partition columns.
    pub(super) fn choice(&self) -> crate::error::Result<PartitionChoice<'_>> {
        Ok(self.filter.choice(&self.partition_columns)?)
    }
}

/// The number of samples that were not written because their partitions were not chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeftOut {
    pub(crate) samples: u64,
    /// For each partition that was not chosen, the number of its samples whose own time lies in a chosen partition:
    /// the session started in the partition that was not chosen.
    pub(crate) tails: BTreeMap<String, u64>,
}

impl LeftOut {
    /// Adds the counts of another writer.
    pub(super) fn merge(&mut self, other: Self) {
        self.samples += other.samples;
        for (partition, samples) in other.tails {
            *self.tails.entry(partition).or_default() += samples;
        }
    }
}

/// Writes the ranges of buckets of the chosen partitions.
pub(super) struct BucketFiles<'a> {
    spec: &'a WriteSpec,
    /// The chosen partitions.
    choice: PartitionChoice<'a>,
    writers: BucketWriters,
    open: Option<BucketWriter>,
    closing: ClosingBuckets,
    left_out: LeftOut,
}

impl<'a> BucketFiles<'a> {
    /// Creates a writer that has written nothing.
    pub(super) fn new(spec: &'a WriteSpec, writers: BucketWriters) -> Result<Self> {
        let closing = ClosingBuckets::new(&writers);
        let choice = spec.choice()?;
        Ok(Self { spec, choice, writers, open: None, closing, left_out: LeftOut::default() })
    }

    /// Returns the next range whose files are complete.
    pub(super) fn take(&mut self) -> Option<WrittenBucket> {
        self.closing.take()
    }

    /// Waits until all files are complete.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.close()?;
        Ok(self.closing.finish()?)
    }

    /// Takes the counts of the samples that were not written.
    pub(super) fn left_out(&mut self) -> LeftOut {
        std::mem::take(&mut self.left_out)
    }

    fn close(&mut self) -> Result<()> {
        Ok(self.open.take().map_or(Ok(()), |open| self.closing.close(open))?)
    }
}

impl RowGroups for BucketFiles<'_> {
    fn wants(&mut self, partition: &PartitionKey) -> Result<bool> {
        Ok(self.choice.matches(partition)?)
    }

    /// Counts the samples, and separately those whose own time lies in a chosen partition.
    fn leave_out(&mut self, partition: &PartitionKey, times: &[i64]) -> Result<()> {
        self.left_out.samples += times.len() as u64;
        // Nearly all samples lie in the partition of their session, so the last decision is cached.
        let mut last: Option<(PartitionKey, bool)> = None;
        for time in times {
            let own = self.spec.cut.partitions.at(partition, *time);
            let Some(own) = own.filter(|own| own != partition) else { continue };
            let is_chosen = match &last {
                Some((known, chosen)) if *known == own => *chosen,
                _ => self.choice.matches(&own)?,
            };
            last = Some((own, is_chosen));
            if is_chosen {
                *self.left_out.tails.entry(partition.to_string()).or_default() += 1;
            }
        }
        Ok(())
    }

    fn enter(&mut self, partition: &PartitionKey, range: u32) -> Result<()> {
        self.close()?;
        let spec = self.spec;
        let lacks = spec.lacks.binary_search_by(|((key, of), _)| (key, of).cmp(&(partition, &range)));
        let lacks: &[String] = match lacks {
            Ok(place) => &spec.lacks[place].1,
            Err(_) => &[],
        };
        self.open = Some(self.writers.without(&spec.schema, lacks).range(partition, range));
        Ok(())
    }

    fn push(&mut self, session: i64, time: i64, bytes: usize) -> Result<bool> {
        Ok(self.open.as_mut().map_or(Ok(false), |open| open.push(session, time, bytes))?)
    }

    fn write_row_group(&mut self, decode: Decode) -> Result<()> {
        Ok(self.open.as_mut().map_or(Ok(()), |open| open.write_row_group(decode))?)
    }
}
