//! Computes columns for existing samples of a dataset from the logs: features that the samples lack, or their labels.
//!
//! ```text
//! logs ─▶ samples with these columns alone ─▶ decode as for a build ─▶ temporary file ─┐ join by key,
//! dataset ─▶ key, time and index of each sample ───────────────────────────────────────┴─ sort by index ─▶ files beside
//! ```
//!
//! A sample of the logs matches the sample of the dataset with the same key, the same time, and the same user or
//! session key. The columns are written in the order of the dataset. The logs may form other sessions, because they
//! may contain more or fewer samples. All steps can spill to disk, so the memory limit of a build holds here, too.

mod changes;
mod computing;
mod filling;
mod plan;
mod sql;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use datafusion::prelude::SessionContext;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_base::units::count_of;
use onefold_datasets::{
    Commit, DatasetWriter, PartitionFilter, Schema, Snapshot, Vocabulary, WriterOptions, Written,
    unless_removed,
};
use onefold_sql::Query as _;
use onefold_storage::Storage;
use serde::Serialize;

pub use self::changes::LabelChanges;
use self::computing::Computing;
use self::filling::Filling;
use self::plan::{Plan, only, with_features};
use self::sql::Sql;
use crate::cluster::DecodedSamples;
use crate::config::Config;
use crate::engine;
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::merge::OldDataset;
use crate::pipeline::{BuildOptions, Pipeline, Target};
use crate::planned::PlannedTable;
use crate::reading::Reading;
use crate::spool::{Spool, counts};
use crate::times::shown;

/// Options for computing columns.
#[derive(Debug, Clone)]
pub struct ColumnsOptions {
    /// The threads, memory and disk space to use.
    pub engine: EngineOptions,
    /// The partitions whose samples get the columns.
    pub partitions: PartitionFilter,
    /// Whether samples of the dataset may be missing in the logs. Such samples get the missing values of features, or
    /// keep their labels.
    pub allow_missing: bool,
}

/// The summary of the computed and written columns.
#[derive(Debug, Clone, Serialize)]
pub struct ColumnsSummary {
    /// The number of the dataset's newest snapshot after the command.
    pub snapshot: u64,
    /// Whether a snapshot was committed; `false` if there was nothing to write.
    pub changed: bool,
    /// The columns that were computed.
    pub columns: Vec<String>,
    /// The number of samples of the dataset that lacked a column, or for which labels were computed.
    pub samples: u64,
    /// The number of these samples that the logs do not have.
    pub samples_missing: u64,
    /// The number of samples of the logs that match none of these samples.
    pub samples_ignored: u64,
    /// The number of partitions that were written.
    pub partitions_written: usize,
    /// The number of files that were written.
    pub files_written: usize,
    /// The size of the written files in bytes.
    pub bytes_written: u64,
    /// The counts of changed labels; `None` if features were added.
    #[serde(flatten)]
    pub labels: Option<LabelChanges>,
    /// The seconds from the start to the commit.
    pub wall_seconds: f64,
    /// `samples / wall_seconds`.
    pub samples_per_second: f64,
    /// The largest resident set size of the process in bytes; `None` if the kernel does not report it.
    pub peak_rss_bytes: Option<u64>,
}

/// The columns to compute for the samples of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// The features of the configuration that samples lack.
    Features,
    /// The labels and weights, from the current logs. Only changed ones are written.
    Labels,
}

/// Computes columns of `config` for the samples of the dataset at `out`, and writes them to new files beside the existing
/// ones.
///
/// # Errors
///
/// [`Error::Fault`] if samples have no key, the configuration changes features of the dataset instead of only adding
/// some, samples of the dataset are missing in the logs, or another writer changed the same partitions meanwhile;
/// [`Error::Dataset`] if the dataset cannot be read or written; otherwise the errors of [`build`](crate::build()). An
/// error leaves the dataset unchanged.
pub async fn compute_columns(
    task: Task,
    config: &Config,
    out: &Path,
    options: &ColumnsOptions,
    reporter: &dyn Reporter,
) -> Result<ColumnsSummary> {
    Recomputing { task, config, out, options, reporter }.run().await
}

/// A computation of columns for the samples of a dataset.
struct Recomputing<'a> {
    task: Task,
    config: &'a Config,
    out: &'a Path,
    options: &'a ColumnsOptions,
    reporter: &'a dyn Reporter,
}

impl Recomputing<'_> {
    async fn run(&self) -> Result<ColumnsSummary> {
        let started = Instant::now();
        let head = Snapshot::load_head(self.out)?;
        self.check(&head)?;
        let mut writer = self.writer(&head)?;
        // The snapshot against which the commit is checked, so that a commit of another writer is not lost.
        let base = writer.appended_to().map_or(head.snapshot, |base| base.snapshot);
        let snapshot = Snapshot::load_at(self.out, Some(base))?;
        let plan = Plan::new(self.task, &snapshot, writer.schema(), &self.options.partitions)?;
        let mut summary = ColumnsSummary {
            snapshot: base,
            changed: false,
            columns: plan.columns.clone(),
            samples: plan.samples(),
            samples_missing: 0,
            samples_ignored: 0,
            partitions_written: 0,
            files_written: 0,
            bytes_written: 0,
            labels: (self.task == Task::Labels).then(LabelChanges::default),
            wall_seconds: 0.0,
            samples_per_second: 0.0,
            peak_rss_bytes: None,
        };
        if summary.samples > 0 {
            let filled = self.fill(&snapshot, &plan, writer, &mut summary).await;
            writer = unless_removed(&Storage::open(self.out)?, base, filled)?;
            let Written { snapshot, changed, partitions } = writer.finish()?;
            summary.snapshot = snapshot.snapshot;
            summary.changed = changed;
            summary.partitions_written = if changed { partitions.len() } else { 0 };
        }
        summary.wall_seconds = started.elapsed().as_secs_f64();
        summary.samples_per_second = summary.samples as f64 / summary.wall_seconds;
        summary.peak_rss_bytes = peak_rss_bytes();
        Ok(summary)
    }

    /// Checks that samples of the logs can be matched with samples of the dataset.
    fn check(&self, head: &Snapshot) -> Result<()> {
        let wrong = |message: &str, hint: &str| Err(Error::config(&self.config.path, message, hint));
        if self.config.samples.key.is_empty() {
            return wrong(
                "`[samples].key` is not declared, so samples of the logs cannot be matched with those of the dataset",
                "declare the columns that identify a sample, as `key = [\"request_id\"]`; the dataset must have been built \
                 with them",
            );
        }
        if !head.sample_keys {
            return wrong(
                "`[samples].key` identifies samples, but the dataset was built without it and has no keys",
                "build the dataset anew",
            );
        }
        let labels = |schema: &Schema| (schema.labels.clone(), schema.weight.clone());
        if self.task == Task::Labels && labels(&head.schema) != labels(&self.config.schema) {
            return wrong(
                "its labels or its weight are not those of the dataset",
                "declare them as when the dataset was built, or build the dataset anew",
            );
        }
        Ok(())
    }

    fn writer(&self, head: &Snapshot) -> Result<DatasetWriter> {
        let schema = match self.task {
            Task::Features => with_features(self.config, &head.schema),
            Task::Labels => head.schema.clone(),
        };
        let engine = &self.options.engine;
        let options = WriterOptions {
            layout: head.layout,
            commit: Commit::Columns,
            sessions: Some(self.config.session.clone()),
            threads: engine::row_groups(engine.memory_limit, engine.threads),
            ..WriterOptions::new(head.order)
        };
        Ok(DatasetWriter::create(self.out, schema, options)?)
    }

    /// Computes the columns of the plan, and adds them to `writer`.
    async fn fill(
        &self,
        snapshot: &Snapshot,
        plan: &Plan<'_>,
        mut writer: DatasetWriter,
        summary: &mut ColumnsSummary,
    ) -> Result<DatasetWriter> {
        let Self { out, options, reporter, .. } = *self;
        let config = only(self.config, &plan.columns, self.task);
        let build = BuildOptions::new(options.engine.clone(), Commit::Append);
        let pipeline = Pipeline { config: &config, out, options: &build, reporter };
        let found = pipeline.find(Target::Compare).await?;
        let reading = pipeline.plan(found, Target::Compare, Some(snapshot)).await?;
        let mut spool = Spool::default();
        let sql = Sql { task: self.task, config: &config, columns: &plan.columns };
        let (computed, vocabularies) =
            self.compute(&pipeline, &reading, (snapshot, plan), &mut spool).await?;
        let missing = self.place(&reading, (snapshot, plan), &sql, &mut spool).await?;
        summary.samples_missing = missing;
        summary.samples_ignored = (computed + missing).saturating_sub(summary.samples);
        for (name, vocabulary) in &vocabularies {
            writer.add_vocabulary(name, vocabulary)?;
        }
        let rows = reading.context.query(&sql.filled()).await?.execute_stream().await?;
        let mut filling = Filling::new(self.task, &config, &plan.columns, rows);
        reporter.begin("writing", Some(summary.samples), "samples");
        for range in &plan.ranges {
            let sets = range.sets.iter().map(|set| (*set).clone()).collect();
            let mut columns = writer.columns(range.key, range.range, sets, &plan.columns)?;
            let mut is_changed = false;
            for row_group in range.sets.iter().flat_map(|set| &set.row_groups) {
                let (rows, differs) = filling.row_group(row_group.samples).await?;
                columns.write_row_group(rows)?;
                is_changed |= differs;
                reporter.advance(row_group.samples);
                reporter.go_on()?;
            }
            // Dropping `columns` removes its files if no label differs from the dataset.
            if is_changed {
                let (files, bytes) = writer.add_columns(columns)?;
                summary.files_written += files;
                summary.bytes_written += bytes;
            }
        }
        filling.end().await?;
        reporter.end();
        if let Some(labels) = &mut summary.labels {
            *labels = filling.changes;
        }
        Ok(writer)
    }

    /// Creates the table of the computed columns of the logs' samples. Returns the number of all samples of the logs,
    /// and the vocabularies of the columns.
    async fn compute<'c>(
        &self,
        pipeline: &Pipeline<'c>,
        reading: &Reading<'c>,
        (snapshot, plan): (&Snapshot, &Plan<'_>),
        spool: &mut Spool,
    ) -> Result<(u64, Vec<(String, Vocabulary)>)> {
        let decided = pipeline.decide(reading, Some(snapshot)).await?;
        let (clustering, decided) = decided.ok_or_else(|| reading.no_samples())?;
        let mut computing = Computing::new(&reading.context, pipeline.config, plan)?;
        let mut samples = DecodedSamples::new(|_| Ok(true), |_, samples| computing.add(samples));
        clustering.decode("computing", decided.lists, self.reporter, &mut samples).await?;
        let (samples, rows) = computing.finish();
        spool.add(&reading.context, sql::COMPUTED, rows).await?;
        let is_used = |name: &String| {
            let mut features = pipeline.config.schema.sparse_features();
            features.any(|f| f.vocabulary.as_ref() == Some(name) && plan.columns.contains(&f.name))
        };
        Ok((samples, decided.vocabularies.into_iter().filter(|(name, _)| is_used(name)).collect()))
    }

    /// Creates the table of the samples that get columns, with their indexes. Returns the number of samples among them
    /// that the logs do not have.
    async fn place(
        &self,
        reading: &Reading<'_>,
        (snapshot, plan): (&Snapshot, &Plan<'_>),
        sql: &Sql<'_>,
        spool: &mut Spool,
    ) -> Result<u64> {
        let context = &reading.context;
        let columns = reading.planned.wide.schema().as_arrow();
        let old = OldDataset::new(sql.config, self.out, snapshot.clone(), columns);
        let readers = context.copied_config().target_partitions();
        let places = old.places(sql.config, &plan.sets(), readers)?;
        context.register_table(sql::READ_PLACES, Arc::new(PlannedTable(places)))?;
        spool.table(context, sql::PLACES, &sql.places()).await?;
        spool.table(context, sql::MISSING, &sql.missing()).await?;
        let missing = counts(context, &format!("SELECT count(*) FROM {}", sql::MISSING)).await?;
        let missing = missing.first().copied().unwrap_or(0);
        if missing > 0 && !self.options.allow_missing {
            return Err(self.are_missing(context, snapshot, missing).await?);
        }
        Ok(missing)
    }

    /// Returns the error for samples of the dataset that are missing in the logs.
    async fn are_missing(
        &self,
        context: &SessionContext,
        snapshot: &Snapshot,
        missing: u64,
    ) -> Result<Error> {
        let first = counts(context, &sql::first_missing()).await?;
        let (partition, time) = (first.first().copied().unwrap_or(0), first.get(1).copied().unwrap_or(0));
        let key = usize::try_from(partition).ok().and_then(|number| snapshot.partitions.get(number));
        let place = match key.map(|partition| partition.key.to_string()) {
            Some(key) if !key.is_empty() => format!(" of the partition `{key}`"),
            _ => String::new(),
        };
        let message = format!(
            "the logs do not have {} of the dataset, as one{place} at {}; nothing was committed",
            count_of(missing, "sample"),
            shown(i64::try_from(time).unwrap_or(i64::MAX)),
        );
        let instead = match self.task {
            Task::Features => " gives them no ids, and 0 of dense features",
            Task::Labels => " lets them keep their labels",
        };
        let fault = Fault::of_file(Kind::Data, self.out, message).hint(text![
            "give all logs that the samples were built from, or choose other partitions with ",
            option("partition"),
            "; ",
            option("allow_missing"),
            instead
        ]);
        Ok(fault.into())
    }
}
