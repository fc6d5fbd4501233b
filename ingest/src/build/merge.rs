//! A build that merges late samples into the partitions of a dataset.

use onefold_datasets::{Commit, DatasetWriter, PartitionChoice, Schema, Snapshot};

use crate::cluster::Clustering;
use crate::decide::{OutputPlan, decide};
use crate::merge::{self, Merge, MergeSummary};
use crate::pipeline::Pipeline;
use crate::reading::Reading;
use crate::row_counts::{Reason, RowCounts};
use crate::{Error, Result};

impl<'a> Pipeline<'a> {
    /// Folds the samples of `reading`, decides, and plans to write them together with those of the ranges of buckets of
    /// the dataset that change. The dataset has the snapshot `old`; `choice` are the partitions that may change. The
    /// files of the merge live until it is dropped.
    pub(super) async fn merge(
        &self,
        reading: &Reading<'a>,
        old: &Snapshot,
        choice: &PartitionChoice<'_>,
        mut writer: DatasetWriter,
    ) -> Result<(DatasetWriter, Clustering<'a>, OutputPlan, Option<Merge<'a>>)> {
        let Self { config, out, reporter, .. } = *self;
        let mut merge = Merge::new(config, reading, (out, old.clone()))?;
        let mut late = merge.encode(reading, reporter).await?;
        let known = writer.appended_to().map(|old| (out, old));
        let mut decided = decide(config, reading, &mut late.totals.statistics, known).await?;
        if decided.schema.kept != writer.schema().kept {
            // Refused, because the dataset has other types.
            let schema = Schema { kept: decided.schema.kept.clone(), ..writer.schema().clone() };
            writer = self.with_schema(writer, &schema)?;
        }
        merge::know_originals(config, reading, &mut decided)?;
        merge.place(choice, &decided).await?;
        let clustering = merge.cluster(late, &decided).await?;
        for (key, range) in merge.changed() {
            writer.replaces(key, *range)?;
        }
        if merge.summary().samples_added == 0 {
            // Nothing is written, so ids that only samples of other partitions have get no numbers.
            decided.vocabularies.clear();
        }
        Ok((writer, clustering, decided, Some(merge)))
    }

    /// The outcome for the rows of `[samples]` that were merged into a dataset, if `others` of the late samples are of
    /// partitions that may not change.
    pub(super) fn merged_rows(reading: &Reading<'_>, merged: &MergeSummary, others: u64) -> RowCounts {
        let known = merged.samples_added + merged.samples_skipped;
        let samples = reading.candidates.unwrap_or(known + others);
        let mut rows = reading.rows_of(samples);
        rows.written = merged.samples_added;
        rows.leave_out(Reason::AlreadyThere, merged.samples_skipped);
        rows.leave_out(Reason::OtherPartition, samples.saturating_sub(known));
        rows
    }

    /// What merging into a dataset that was not there did.
    pub(super) fn merged_into_nothing(&self, samples: u64) -> Option<MergeSummary> {
        let summary = MergeSummary { samples_added: samples, ..MergeSummary::default() };
        (self.options.commit == Commit::Merge).then_some(summary)
    }

    /// Refuses to append samples without keys to a dataset that has keys.
    pub(super) fn check_keys(&self, old: &Snapshot) -> Result<()> {
        if !old.sample_keys || !self.config.samples.key.is_empty() {
            return Ok(());
        }
        Err(Error::config(
            &self.config.path,
            "the samples of the dataset have keys, but `[samples].key` is not declared",
            "declare the key that the dataset was built with, or build the dataset anew",
        ))
    }
}
