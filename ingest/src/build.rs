//! Runs a configuration: raw logs to a committed dataset.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use datafusion::arrow::array::RecordBatch;
use onefold_datasets::process::peak_rss_bytes;
use onefold_datasets::progress::Reporter;
use onefold_datasets::{
    Commit, DatasetWriter, Layout, MANIFEST_FILE, Manifest, Order, PartitionFilter, PartitionKey,
    WriterOptions,
};
use serde::Serialize;

use crate::cluster::Clustering;
use crate::decide::{Decided, GroupSummary, decide, has_features};
use crate::engine::{EngineOptions, Joins};
use crate::reading::{self, Reading, Wanted};
use crate::samples::SkipCounts;
use crate::{Config, Error, Result, sources};

/// How a dataset is built.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// Where feature groups come from.
    pub groups: Groups,
    /// Columns that stand first in the files, those that jobs read most.
    pub column_order: Vec<String>,
    /// What the build may use.
    pub engine: EngineOptions,
    /// What becomes of a dataset that is there.
    pub commit: Commit,
    /// Take whole sessions, chosen by the hash of what identifies them, until about so many samples are expected; all if
    /// `None`. What is built then stands for the share of the sessions that [`BuildSummary::share`] says.
    pub about_samples: Option<u64>,
    /// Partitions that are written; samples of others are left out and counted.
    pub partitions: PartitionFilter,
}

/// Where feature groups come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Groups {
    /// From `[features]`.
    Given,
    /// From what changes together in the samples; what `[features]` says of groups is not looked at.
    Auto,
}

/// What a build did.
#[derive(Debug, Clone, Serialize)]
pub struct BuildSummary {
    /// Samples of the dataset: all of its partitions, also those that were there before.
    pub samples: u64,
    /// Sessions they belong to.
    pub sessions: u64,
    /// `samples / sessions`.
    pub samples_per_session: f64,
    /// Partitions of the dataset.
    pub partitions: usize,
    /// Partitions that this build wrote.
    pub partitions_written: usize,
    /// Samples that this build wrote.
    pub samples_written: u64,
    /// Samples of partitions that were not to be written.
    pub samples_of_other_partitions: u64,
    /// Files of the dataset.
    pub files: usize,
    /// Size of the data files.
    pub bytes_on_disk: u64,
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// The share of the sessions that was taken.
    pub share: f64,
    /// Rows that declared steps left out or filled up.
    pub skipped: SkipCounts,
    /// The groups that were found, and why; empty if they were given.
    pub groups: Vec<GroupSummary>,
    /// Ids of each vocabulary.
    pub vocabularies: BTreeMap<String, u64>,
    /// Rows of the sources, all together; Parquet files say, others do not.
    pub source_rows: Option<u64>,
    /// Bytes of the sources' files.
    pub source_bytes: u64,
    /// Whether joins were sorted, because their held sides did not fit into the memory limit.
    pub sorted_joins: bool,
    /// Time from start to commit.
    pub wall_seconds: f64,
    /// `samples_written / wall_seconds`.
    pub samples_per_second: f64,
    /// Largest resident set of the process, where the kernel tells.
    pub peak_rss_bytes: Option<u64>,
}

/// Builds the dataset of `config` in the directory `out`. Nothing of it is visible before it is complete.
///
/// # Errors
///
/// [`Error::Source`], [`Error::Config`], [`Error::Column`] and [`Error::Rows`] for what is found wrong before or while
/// the query runs, [`Error::NoSamples`] if it gives none, [`Error::Memory`] if an operator that cannot spill
/// needs more than the limit, [`Error::Dataset`] if `out` may not be or cannot be written. After any error
/// `out` is as it was.
pub fn build(
    config: &Config,
    out: &Path,
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<BuildSummary> {
    let started = Instant::now();
    let mut summary = reading::run(config, options.engine.threads, reporter, async |joins| {
        Build { config, out, options, joins, reporter }.run().await
    })?;
    summary.wall_seconds = started.elapsed().as_secs_f64();
    summary.samples_per_second = summary.samples_written as f64 / summary.wall_seconds;
    summary.peak_rss_bytes = peak_rss_bytes();
    Ok(summary)
}

/// One run of a configuration.
struct Build<'a> {
    config: &'a Config,
    out: &'a Path,
    options: &'a BuildOptions,
    joins: Joins,
    reporter: &'a dyn Reporter,
}

impl Build<'_> {
    async fn run(&self) -> Result<BuildSummary> {
        let Self { config, options, .. } = *self;
        let sources = sources::find(config).await?;
        // Before any work: whether there may be a dataset at all.
        let old = self.old_manifest()?;
        let mut writer = self.writer(match &old {
            Some(old) if options.groups == Groups::Auto && has_features(&old.schema, config) => &old.schema,
            _ => &config.schema,
        })?;
        let wanted = Wanted {
            order: options.order,
            observe_changes: options.groups == Groups::Auto,
            about_samples: options.about_samples,
        };
        let reading = Reading::plan(config, sources, &options.engine, self.joins, &wanted).await?;
        let mut clustering = reading.clustering(&wanted).await?;
        let folded = reading.fold(&mut clustering, self.reporter).await?;
        let (samples, digest) = (folded.samples, folded.digest);
        let old = writer.appended_to().map(|old| (self.out, old));
        let decided = decide(config, &reading.context, &folded.facts, old, &reading.budget).await?;
        if decided.schema != *writer.schema() {
            drop(writer);
            writer = self.writer(&decided.schema)?;
        }
        if self.writes_all_that_is_folded() {
            writer.expect(samples, digest);
        }
        let (manifest, written) = self.write(clustering, &decided, writer).await?;
        Ok(self.summary(&manifest, &decided, &written, reading))
    }

    /// Whether what is written has the digest of what is folded: the same samples, and neither ids that vocabularies change
    /// nor lists that timelines make.
    fn writes_all_that_is_folded(&self) -> bool {
        let (config, filter) = (self.config, &self.options.partitions);
        config.vocabularies.is_empty() && config.timelines.is_empty() && *filter == PartitionFilter::default()
    }

    /// The manifest of the dataset that will be appended to, if there is one.
    fn old_manifest(&self) -> Result<Option<Manifest>> {
        let is_there = self.options.commit == Commit::Append && self.out.join(MANIFEST_FILE).exists();
        Ok(if is_there { Some(Manifest::load(self.out)?) } else { None })
    }

    fn writer(&self, schema: &onefold_datasets::Schema) -> Result<DatasetWriter> {
        let options = WriterOptions {
            layout: self.options.layout,
            commit: self.options.commit,
            threads: self.options.engine.threads,
            column_order: self.options.column_order.clone(),
            ..WriterOptions::new(self.options.order)
        };
        Ok(DatasetWriter::create(self.out, schema.clone(), options)?)
    }

    /// Writes the samples and commits.
    async fn write(
        &self,
        clustering: Clustering<'_>,
        decided: &Decided,
        mut writer: DatasetWriter,
    ) -> Result<(Manifest, Written)> {
        for (name, vocabulary) in &decided.vocabularies {
            writer.add_vocabulary(name, vocabulary)?;
        }
        let mut written = Written::default();
        let mut give = |partition: &PartitionKey, batch: RecordBatch| {
            if !self.options.partitions.matches(partition)? {
                written.elsewhere += batch.num_rows() as u64;
                return Ok(());
            }
            written.samples += batch.num_rows() as u64;
            if written.partitions.last() != Some(partition) {
                written.partitions.push(partition.clone());
            }
            Ok(writer.write(partition, &batch)?)
        };
        clustering.unfold(decided.lists.clone(), self.reporter, &mut give).await?;
        if written.samples == 0 {
            let hint = format!("no sample is of a partition that `{}` chooses", self.options.partitions);
            return Err(Error::NoSamples { path: self.config.path.clone(), hint });
        }
        Ok((writer.finish()?, written))
    }

    fn summary(
        &self,
        manifest: &Manifest,
        decided: &Decided,
        written: &Written,
        reading: Reading<'_>,
    ) -> BuildSummary {
        let statistics = &manifest.statistics;
        let entries =
            |(name, file): (&String, &onefold_datasets::VocabularyFile)| (name.clone(), file.entries);
        BuildSummary {
            samples: statistics.samples,
            sessions: statistics.sessions,
            samples_per_session: statistics.samples as f64 / statistics.sessions.max(1) as f64,
            partitions: manifest.partitions.len(),
            partitions_written: written.partitions.len(),
            samples_written: written.samples,
            samples_of_other_partitions: written.elsewhere,
            files: manifest.partitions.iter().map(|partition| partition.files.len()).sum(),
            bytes_on_disk: statistics.bytes_on_disk,
            layout: manifest.layout,
            order: manifest.order,
            share: reading.share,
            source_rows: sources::total_rows(&reading.sources),
            source_bytes: sources::total_bytes(&reading.sources),
            skipped: reading.planned.skipped,
            groups: decided.groups.clone(),
            vocabularies: manifest.vocabularies.iter().map(entries).collect(),
            sorted_joins: self.joins == Joins::Sorted,
            wall_seconds: 0.0,
            samples_per_second: 0.0,
            peak_rss_bytes: None,
        }
    }
}

/// What went to the writer, and what did not.
#[derive(Debug, Default)]
struct Written {
    samples: u64,
    partitions: Vec<PartitionKey>,
    elsewhere: u64,
}
