//! Runs a configuration: raw logs to a committed dataset.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::prelude::SessionContext;
use onefold_datasets::console::{Reporter, peak_rss_bytes};
use onefold_datasets::{
    Commit, CountBudget, DatasetWriter, Layout, MANIFEST_FILE, Manifest, Order, PartitionFilter,
    PartitionKey, WriterOptions,
};
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::cluster::{ClusterOptions, Clustering};
use crate::decide::{Decided, GroupSummary, decide, has_features};
use crate::engine::{self, Joins};
use crate::samples::{Samples, SkipCounts};
use crate::sessionize::{NARROW_VIEW, SAMPLES_VIEW};
use crate::{Config, Error, Result, samples, sessionize, sources};

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
    /// Bytes that the build may hold: a quarter for the last samples of sessions, and as much for vocabularies; the rest for
    /// DataFusion's sorts, joins, aggregations and windows, which spill beyond it. Its scans and the row groups
    /// being written (64 MiB decoded each) come on top.
    pub memory_limit: u64,
    /// Threads of the engine and of the writer.
    pub threads: usize,
    /// What becomes of a dataset that is there.
    pub commit: Commit,
    /// Take whole sessions, chosen by the hash of what identifies them, until about so many samples are expected; all if
    /// `None`. What is built then stands for the share of the sessions that [`BuildSummary::share`] says.
    pub about_samples: Option<u64>,
    /// Partitions that are written; samples of others are left out and counted.
    pub partitions: PartitionFilter,
    /// Where operators spill; the system's temporary directory if `None`.
    pub spill_directory: Option<PathBuf>,
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
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.threads.max(1))
        .enable_all()
        .build()?;
    let once = |joins| {
        let build = Build { config, out, options, joins, reporter };
        name_unreadable(config, &runtime, || runtime.block_on(build.run()))
    };
    let mut summary = match once(Joins::Hash) {
        // The held side of a hash join cannot spill. Nothing was written yet, or it was removed again.
        Err(Error::Memory { message }) => {
            tracing::info!("again, with sorted joins: {message}");
            reporter.end();
            once(Joins::Sorted)
        }
        other => other,
    }?;
    summary.wall_seconds = started.elapsed().as_secs_f64();
    summary.samples_per_second = summary.samples_written as f64 / summary.wall_seconds;
    summary.peak_rss_bytes = peak_rss_bytes();
    Ok(summary)
}

/// Runs the engine. Where it cannot read a source, which decoders of damaged bytes say by an error or a panic, the
/// source is named; other panics go on.
fn name_unreadable<T>(config: &Config, runtime: &Runtime, engine: impl FnOnce() -> Result<T>) -> Result<T> {
    let find_unreadable = || runtime.block_on(sources::find_unreadable(config));
    match catch_unwind(AssertUnwindSafe(engine)) {
        Ok(Err(error @ Error::Unreadable { .. })) => Err(find_unreadable().unwrap_or(error)),
        Ok(result) => result,
        Err(panic) => match find_unreadable() {
            Some(error) => Err(error),
            None => resume_unwind(panic),
        },
    }
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
        let context = engine::context(config, options, self.joins)?;
        sources::register(&context, &sources).await?;
        let planned = samples::plan(&context, config).await?;
        let columns = planned.wide.schema().as_arrow().clone();
        let share = self.register_samples(&context, &planned).await?;

        let budget = CountBudget::new(engine::state_bytes(options.memory_limit) as u64);
        let row_bytes = sources::widest_row_bytes(&sources);
        let mut clustering = self.clustering(&context, &columns, row_bytes, &budget).await?;
        let Some(folded) = clustering.fold(self.reporter).await? else {
            let hint =
                "check that the logs are not empty, that the join's keys match, and the query's `WHERE`"
                    .to_owned();
            return Err(Error::NoSamples { path: config.path.clone(), hint });
        };
        let old = writer.appended_to().map(|old| (self.out, old));
        let decided = decide(config, &context, &folded.facts, old, &budget).await?;
        if decided.schema != *writer.schema() {
            drop(writer);
            writer = self.writer(&decided.schema)?;
        }
        let (manifest, written) = self.write(clustering, &decided, writer).await?;
        let mut summary = self.summary(&manifest, &decided, &written);
        summary.share = share;
        summary.skipped = planned.skipped;
        summary.source_rows = sources::total_rows(&sources);
        summary.source_bytes = sources::total_bytes(&sources);
        Ok(summary)
    }

    /// Makes the samples views of the query, or those of the sessions that are taken; gives the share of these.
    async fn register_samples(&self, context: &SessionContext, planned: &Samples) -> Result<f64> {
        let all = match self.options.about_samples {
            None => 0,
            Some(_) => match planned.expected {
                Some(expected) => expected,
                None => planned.narrow.clone().count().await? as u64,
            },
        };
        let (share, taken) = sessionize::taken(self.config, self.options.about_samples.unwrap_or(0), all);
        for (view, samples) in [(SAMPLES_VIEW, &planned.wide), (NARROW_VIEW, &planned.narrow)] {
            let samples = match &taken {
                None => samples.clone(),
                Some(condition) => samples.clone().filter(samples.parse_sql_expr(condition)?)?,
            };
            context.register_table(view, samples.into_view())?;
        }
        Ok(share)
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
            threads: self.options.threads,
            column_order: self.options.column_order.clone(),
            ..WriterOptions::new(self.options.order)
        };
        Ok(DatasetWriter::create(self.out, schema.clone(), options)?)
    }

    async fn clustering(
        &self,
        context: &SessionContext,
        columns: &ArrowSchema,
        row_bytes: u64,
        budget: &CountBudget,
    ) -> Result<Clustering<'_>> {
        let options = ClusterOptions {
            order: self.options.order,
            state_bytes: engine::state_bytes(self.options.memory_limit),
            budget: budget.clone(),
            threads: self.options.threads,
            query_batch_rows: engine::batch_rows(row_bytes),
            observe_changes: self.options.groups == Groups::Auto,
        };
        Clustering::plan(self.config, context, columns, &options).await
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

    fn summary(&self, manifest: &Manifest, decided: &Decided, written: &Written) -> BuildSummary {
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
            share: 1.0,
            skipped: SkipCounts::default(),
            groups: decided.groups.clone(),
            vocabularies: manifest.vocabularies.iter().map(entries).collect(),
            source_rows: None,
            source_bytes: 0,
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
