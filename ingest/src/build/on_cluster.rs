//! Builds a dataset on a cluster: its executors read the logs and write the files, and this process commits them.

use std::sync::Arc;

use onefold_datasets::DatasetWriter;

use super::{Build, BuildSummary, Groups};
use crate::Result;
use crate::cluster::{RemoteClustering, WrittenSamples};
use crate::decide::{OutputPlan, decide};
use crate::reading::{Reading, ReadingOptions};
use crate::remote::Cluster;
use crate::sources::count_skipped;

impl Build<'_> {
    /// Writes the samples on `cluster`, and commits them.
    pub(super) async fn on_cluster(
        &self,
        cluster: &Arc<dyn Cluster>,
        reading: Reading<'_>,
        wanted: &ReadingOptions,
        writer: DatasetWriter,
    ) -> Result<BuildSummary> {
        let mut clustering = reading.clustering_on(cluster, wanted).await?;
        let decided = self.decide_on_cluster(&reading, &mut clustering, &writer).await?;
        let mut writer = self.with_schema(writer, &decided.schema)?;
        writer.set_buckets(reading.buckets(wanted))?;
        for (name, vocabulary) in &decided.vocabularies {
            writer.add_vocabulary(name, vocabulary)?;
        }
        let written = self.write_on(cluster, clustering, (&reading, &decided), &mut writer).await?;
        reading.check_count(written.as_ref().map_or(0, |written| written.samples), None)?;
        let written = written.filter(|written| written.samples > 0).ok_or_else(|| reading.no_samples())?;
        if self.writes_the_samples_as_read() {
            writer.expect(written.samples, written.digest);
        }
        let output = self.commit(&reading, writer, &written.statistics, written.left_out).await?;
        Ok(self.summary(output, &decided, reading))
    }

    /// Writes samples that are planned on `cluster`, and adds their buckets to `writer`. Gives `None` if nothing is known
    /// of any samples.
    pub(super) async fn write_on(
        &self,
        cluster: &Arc<dyn Cluster>,
        clustering: RemoteClustering<'_>,
        (reading, decided): (&Reading<'_>, &OutputPlan),
        writer: &mut DatasetWriter,
    ) -> Result<Option<WrittenSamples>> {
        // Records pass through other machines, so they are digested when they are decoded, too.
        let spec = self.write_spec(writer, clustering.cut());
        let mut add = |bucket| Ok(writer.add(bucket)?);
        let written = clustering.write(spec, &decided.lists, self.reporter, &mut add).await?;
        count_skipped(&reading.context, cluster, &reading.sources).await?;
        Ok(written)
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
