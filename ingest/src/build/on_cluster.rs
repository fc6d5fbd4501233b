//! Builds a dataset on a cluster: its executors read the logs and write the files, and this process commits them.

use std::sync::Arc;

use onefold_datasets::{Commit, DatasetWriter};

use super::{Build, BuildSummary, Groups};
use crate::cluster::RemoteClustering;
use crate::decide::{OutputPlan, decide};
use crate::reading::{Reading, ReadingOptions};
use crate::remote::Cluster;
use crate::sources::count_skipped;
use crate::{Error, Result};

impl Build<'_> {
    /// Refuses what a cluster cannot do, before anything is read.
    pub(super) fn check_cluster(&self, has_dataset: bool) -> Result<()> {
        if self.options.commit != Commit::Merge || !has_dataset {
            return Ok(());
        }
        Err(Error::Config {
            path: self.config.path.clone(),
            message: "late samples are merged in one process, not on a cluster".to_owned(),
            hint: "use `onefold-ingest append --merge`".to_owned(),
        })
    }

    /// Writes the samples on `cluster`, and commits them.
    pub(super) async fn on_cluster(
        &self,
        cluster: &Arc<dyn Cluster>,
        reading: Reading<'_>,
        wanted: &ReadingOptions,
        mut writer: DatasetWriter,
    ) -> Result<BuildSummary> {
        let mut clustering = reading.clustering_on(cluster, wanted).await?;
        let decided = self.decide_on_cluster(&reading, &mut clustering, &writer).await?;
        if decided.schema != *writer.schema() {
            let options = writer.options().clone();
            drop(writer);
            writer = self.writer(options.layout, options.order, &decided.schema)?;
        }
        writer.set_buckets(reading.buckets(wanted))?;
        for (name, vocabulary) in &decided.vocabularies {
            writer.add_vocabulary(name, vocabulary)?;
        }
        // Records pass through other machines, so they are digested when they are decoded, too.
        let spec = self.write_spec(&writer, &reading, clustering.cut());
        let mut add = |bucket| Ok(writer.add(bucket)?);
        let written = clustering.write(spec, &decided.lists, self.reporter, &mut add).await?;
        reading.check_count(written.as_ref().map_or(0, |written| written.samples), None)?;
        let written = written.ok_or_else(|| reading.no_samples())?;
        if self.writes_the_samples_as_read() {
            writer.expect(written.samples, written.digest);
        }
        count_skipped(&reading.context, cluster, &reading.sources).await?;
        let output = self.commit(&reading, writer, &written.statistics, written.left_out).await?;
        Ok(self.summary(output, &decided, reading))
    }

    /// The vocabularies and groups. Where they follow from the samples, all of these are folded first; otherwise nothing
    /// is read.
    async fn decide_on_cluster(
        &self,
        reading: &Reading<'_>,
        clustering: &mut RemoteClustering<'_>,
        writer: &DatasetWriter,
    ) -> Result<OutputPlan> {
        if self.config.vocabularies.is_empty() && self.options.groups == Groups::Given {
            return Ok(OutputPlan::as_configured(self.config, &reading.kept));
        }
        let totals = clustering.fold(self.reporter).await?;
        reading.check_count(totals.as_ref().map_or(0, |totals| totals.samples), None)?;
        let totals = totals.ok_or_else(|| reading.no_samples())?;
        let old = writer.appended_to().map(|old| (self.out, old));
        decide(self.config, reading, &mut totals.statistics, old).await
    }
}
