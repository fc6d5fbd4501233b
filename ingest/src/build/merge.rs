//! A build that merges late samples into the partitions of a dataset.

use onefold_datasets::{Commit, DatasetWriter, PartitionChoice, Schema, Snapshot};

use crate::cluster::Clustering;
use crate::decide::{OutputPlan, decide};
use crate::error::{Error, Result};
use crate::merge::{self, Merge, MergeSummary};
use crate::pipeline::Pipeline;
use crate::reading::Reading;
use crate::row_counts::{Reason, RowCounts};

impl<'a> Pipeline<'a> {
    /// Folds the samples of `reading`, decides on vocabularies, and plans to write the samples together with the
    /// samples of the ranges of buckets that change. `old` is the snapshot of the dataset, `choice` selects the
    /// partitions that may change. The temporary files of the returned [`Merge`] exist until it is dropped.
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
            // The new writer refuses the schema, because the dataset has other types.
            let schema = Schema { kept: decided.schema.kept.clone(), ..writer.schema().clone() };
            writer = self.with_schema(writer, &schema)?;
        }
        merge::know_originals(config, reading, &mut decided)?;
        merge.place(choice, &decided).await?;
        let clustering = merge.cluster(late, &decided).await?;
        for (key, range) in &merge.changed {
            writer.replaces(key, *range)?;
        }
        if merge.summary.samples_added == 0 {
            // Nothing is written, so ids that occur only in samples of other partitions get no numbers.
            decided.vocabularies.clear();
        }
        Ok((writer, clustering, decided, Some(merge)))
    }

    /// Returns the counts for the rows of `[samples]` that were merged into a dataset. `others` is the number of late
    /// samples whose partitions may not change.
    pub(super) fn merged_rows(reading: &Reading<'_>, merged: &MergeSummary, others: u64) -> RowCounts {
        let known = merged.samples_added + merged.samples_skipped;
        let samples = reading.candidates.unwrap_or(known + others);
        let mut rows = reading.rows_of(samples);
        rows.written = merged.samples_added;
        rows.leave_out(Reason::AlreadyThere, merged.samples_skipped);
        rows.leave_out(Reason::OtherPartition, samples.saturating_sub(known));
        rows
    }

    /// Returns the summary of a merge into a dataset that did not exist.
    pub(super) fn merged_into_nothing(&self, samples: u64) -> Option<MergeSummary> {
        let summary = MergeSummary { samples_added: samples, ..MergeSummary::default() };
        (self.options.commit == Commit::Merge).then_some(summary)
    }

    /// Refuses to append samples without keys to a dataset that has sample keys.
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
