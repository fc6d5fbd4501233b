//! A build that merges late samples into the partitions of a dataset.

use onefold_datasets::{Commit, Schema, Snapshot};

use super::{Build, BuildSummary};
use crate::decide::decide;
use crate::merge::{self, Merge, MergeSummary};
use crate::reading::{Reading, ReadingOptions};
use crate::sources::Source;
use crate::{Error, Result};

impl Build<'_> {
    /// Merges the samples of `sources` into the dataset, of which there is the snapshot `old`.
    pub(super) async fn merge(&self, sources: Vec<Source>, old: &Snapshot) -> Result<BuildSummary> {
        let Self { config, options, reporter, .. } = *self;
        let (layout, order) = self.layout_and_order(Some(old));
        let mut writer = self.writer(layout, order, &self.first_schema(Some(old)))?;
        // The snapshot that the commit will be compared with: what was committed meanwhile is not lost.
        let old = Snapshot::load_at(self.out, writer.appended_to().map(|old| old.snapshot))?;
        merge::check(config, &old)?;
        let wanted = ReadingOptions { observe_changes: false, ..self.wanted(Some(&old))? };
        let reading = Reading::plan(config, sources, &options.engine, &wanted).await?;
        writer.set_partition_columns(reading.partition_columns())?;
        let choice = options.partitions.choice(writer.partition_columns())?;
        let mut merge = Merge::new(config, &reading, &wanted, (self.out, old))?;
        let mut late = merge.encode(&reading, reporter).await?;
        let known = writer.appended_to().map(|old| (self.out, old));
        let mut decided = decide(config, &reading, &mut late.totals.statistics, known).await?;
        if decided.schema.kept != writer.schema().kept {
            // Refused, because the dataset has other types.
            let schema = Schema { kept: decided.schema.kept.clone(), ..writer.schema().clone() };
            writer = self.with_schema(writer, &schema)?;
        }
        merge::know_originals(config, &reading, &mut decided)?;
        merge.place(&choice, &decided).await?;
        let clustering = merge.cluster(late, &decided).await?;
        for (key, bucket) in merge.changed() {
            writer.replaces(key, *bucket)?;
        }
        if merge.summary().samples_added == 0 {
            // Nothing is written, so ids that only samples of other partitions have get no numbers.
            decided.vocabularies.clear();
        }
        let written = self.write(clustering, (&reading, &decided), &mut writer, true).await?;
        let written = written.ok_or_else(|| reading.no_samples())?;
        let output = self.commit(&reading, writer, written).await?;
        Ok(BuildSummary { merged: Some(merge.summary()), ..self.summary(output, &decided, reading) })
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
