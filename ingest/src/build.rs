//! Runs a configuration: raw logs to a committed dataset.

mod merge;
mod parts;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_base::units::count_of;
use onefold_datasets::{
    Commit, DatasetWriter, KeptColumn, KeptKind, Layout, Order, PartitionFilter, PartitionKey, Schema,
    Snapshot, WriterOptions, Written,
};
use serde::Serialize;

pub use self::parts::{Part, commit_parts, write_part};

use crate::cluster::{Clustering, LeftOut, WriteSpec, WrittenSamples};
use crate::decide::{GroupSummary, OutputPlan, extended, has_features, keeps_features};
use crate::engine;
use crate::merge::MergeSummary;
use crate::pipeline::{BuildOptions, Groups, Pipeline, Target};
use crate::profile::staged;
use crate::reading::Reading;
use crate::row_counts::RowCounts;
use crate::samples::SkipCounts;
use crate::statistics::{self, BuildStatistics};
use crate::{Config, Error, Result, sources};

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
    pub partitions: u64,
    /// Partitions that this build wrote.
    pub partitions_written: usize,
    /// Samples that this build wrote.
    pub samples_written: u64,
    /// The number of the dataset's snapshot.
    pub snapshot: u64,
    /// Whether this build committed a snapshot; `false` if the dataset had these samples already.
    pub changed: bool,
    /// The number of buckets that the dataset's sessions are divided into, which is also the most ranks that can read it.
    pub buckets: u32,
    /// What a merge did: one that was asked for, or that of an append into earlier partitions; `None` for other builds.
    #[serde(flatten)]
    pub merged: Option<MergeSummary>,
    /// Samples of partitions that were not to be written.
    pub samples_of_other_partitions: u64,
    /// Of these, the samples whose own time lies in a partition that was written, by the partition in which their
    /// session started.
    pub samples_of_earlier_sessions: BTreeMap<String, u64>,
    /// Files of the dataset.
    pub files: u64,
    /// Size of the data files.
    pub bytes_on_disk: u64,
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// The share of the sessions that was taken.
    pub share: f64,
    /// The rows of `[samples]`: those that were written, and the others by reason.
    pub rows: RowCounts,
    /// Rows that declared steps left out or filled up.
    pub skipped: SkipCounts,
    /// Rows of CSV files that were left out, because they have fewer or more values than there are columns.
    pub ragged_rows_skipped: u64,
    /// The groups that were found, and why; empty if they were given.
    pub groups: Vec<GroupSummary>,
    /// Ids of each vocabulary.
    pub vocabularies: BTreeMap<String, u64>,
    /// Sessions that the partition columns cut into several, because their samples have different values of them.
    pub cut_sessions: u64,
    /// Statistics of the samples that were read, feature by feature.
    pub statistics: BuildStatistics,
    /// What looks wrong in the samples.
    pub warnings: Vec<String>,
    /// Rows of the sources, all together; Parquet files say, others do not.
    pub source_rows: Option<u64>,
    /// Bytes of the sources' files.
    pub source_bytes: u64,
    /// Whether a join was sorted, because the side that it would hold did not fit into memory.
    pub sorted_joins: bool,
    /// Time from start to commit.
    pub wall_seconds: f64,
    /// `samples_written / wall_seconds`.
    pub samples_per_second: f64,
    /// Largest resident set of the process, where the kernel tells.
    pub peak_rss_bytes: Option<u64>,
}

impl BuildSummary {
    /// The summary of a run that then merged samples into the partitions in which their sessions began.
    fn with_merged(self, merge: Self) -> Self {
        let added = merge.merged.map_or(0, |merged| merged.samples_added);
        let mut rows = self.rows;
        rows.write_later(added);
        Self {
            samples: merge.samples,
            sessions: merge.sessions,
            samples_per_session: merge.samples_per_session,
            partitions: merge.partitions,
            partitions_written: self.partitions_written + merge.partitions_written,
            samples_written: self.samples_written + added,
            snapshot: merge.snapshot,
            changed: self.changed || merge.changed,
            merged: merge.merged,
            samples_of_other_partitions: self.samples_of_other_partitions.saturating_sub(added),
            files: merge.files,
            bytes_on_disk: merge.bytes_on_disk,
            rows,
            vocabularies: merge.vocabularies,
            ..self
        }
    }
}

/// Builds the dataset of `config` at `out`, a local path or a URL. Nothing of it is visible before it is complete.
///
/// An append to a dataset whose samples have keys also adds samples to earlier partitions, if sessions that began there
/// have samples in the partitions that it writes. That is a commit of its own.
///
/// # Errors
///
/// [`Error::Fault`] for an error that is found before or while the query runs, if it gives no sample, or if an operator
/// that cannot spill needs more than the limit; [`Error::Spill`] if one that can cannot write; [`Error::Dataset`] if
/// `out` may not be or cannot be written. After any error `out` is as it was.
pub async fn build(
    config: &Config,
    out: &Path,
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<BuildSummary> {
    let started = Instant::now();
    let pipeline = Pipeline { config, out, options, reporter };
    let mut summary = staged("plan and commit", pipeline.build()).await?;
    let earlier = pipeline.earlier_partitions(&summary)?;
    if !earlier.is_empty() {
        summary
            .samples_of_earlier_sessions
            .retain(|began, _| earlier.iter().all(|key| key.to_string() != *began));
        let partitions = PartitionFilter::of_keys(earlier);
        let options = BuildOptions { commit: Commit::Merge, partitions, ..options.clone() };
        let merge = Pipeline { config, out, options: &options, reporter };
        summary = summary.with_merged(staged("plan and commit", merge.build()).await?);
    }
    summary.wall_seconds = started.elapsed().as_secs_f64();
    summary.samples_per_second = summary.samples_written as f64 / summary.wall_seconds;
    summary.peak_rss_bytes = peak_rss_bytes();
    Ok(summary)
}

impl Pipeline<'_> {
    async fn build(&self) -> Result<BuildSummary> {
        let Self { config, out, options, .. } = *self;
        // A merge folds late samples in its own way, and ends with the first problem.
        let found = match options.commit {
            Commit::Merge => self.find_strictly().await?,
            _ => self.find().await?,
        };
        // Before any work: whether there may be a dataset at all.
        let mut old = self.old_snapshot()?;
        if let Some(old) = &old {
            self.check_keys(old)?;
        }
        let (layout, order) = self.layout_and_order(old.as_ref());
        let mut writer = self.writer(layout, order, &self.first_schema(old.as_ref()))?;
        let merges = options.commit == Commit::Merge && old.is_some();
        if merges {
            // The snapshot that the commit will be compared with: what was committed meanwhile is not lost.
            let base = Snapshot::load_at(out, writer.appended_to().map(|old| old.snapshot))?;
            crate::merge::check(config, &base)?;
            old = Some(base);
        }
        let target = if merges { Target::Merge } else { Target::Partitions };
        let reading = self.plan(found, target, old.as_ref()).await?;
        // Refuses what does not fit before any work.
        writer.set_partition_columns(reading.partition_columns())?;
        let choice = options.partitions.choice(writer.partition_columns())?;
        let (mut writer, clustering, decided, merge) = match &old {
            Some(old) if merges => self.merge(&reading, old, &choice, writer).await?,
            _ => {
                let decided = self.decide(&reading, writer.appended_to()).await?;
                let (clustering, decided) = decided.ok_or_else(|| reading.no_samples())?;
                let mut writer = self.with_schema(writer, &decided.schema)?;
                writer.set_buckets(reading.buckets())?;
                (writer, clustering, decided, None)
            }
        };
        let expects = !merges && self.writes_the_samples_as_read();
        // Records that pass through other machines are digested when they are decoded, too.
        let digested = !expects || reading.is_on_cluster();
        let written = self.write(clustering, (&reading, &decided), &mut writer, digested).await?;
        if !merges {
            reading.check_count(written.as_ref().map_or(0, |written| written.samples), None)?;
        }
        // A merge may have nothing to add.
        let written = written.filter(|written| written.samples > 0 || merges);
        let written = written.ok_or_else(|| reading.no_samples())?;
        if expects {
            writer.expect(written.samples, written.digest);
        }
        let rows = match &merge {
            Some(merge) => Self::merged_rows(&reading, &merge.summary(), written.left_out.samples),
            None => reading.row_counts(written.samples, written.left_out.samples)?,
        };
        let output = self.commit(&reading, writer, written).await?;
        let merged = merge.map(|merge| merge.summary());
        let merged = merged.or_else(|| self.merged_into_nothing(output.samples));
        Ok(BuildSummary { merged, rows, ..self.summary(output, &decided, reading) })
    }

    /// The partitions of the dataset in which sessions began that have samples in the partitions which an append wrote.
    /// None if samples have no keys: those that are there could not be told from the others.
    fn earlier_partitions(&self, summary: &BuildSummary) -> Result<Vec<PartitionKey>> {
        let began = &summary.samples_of_earlier_sessions;
        let appends = matches!(self.options.commit, Commit::Append | Commit::Replace);
        if !appends || began.is_empty() || self.config.samples.key.is_empty() {
            return Ok(Vec::new());
        }
        let snapshot = Snapshot::load(self.out)?;
        let keys = snapshot.partitions.into_iter().map(|partition| partition.key);
        Ok(keys.filter(|key| snapshot.sample_keys && began.contains_key(&key.to_string())).collect())
    }

    /// The schema as far as it is known before the samples are planned: groups and the types of kept columns are those
    /// of the dataset that has the snapshot `old`, where it has the configuration's columns.
    fn first_schema(&self, old: Option<&Snapshot>) -> Schema {
        let Self { config, options, .. } = *self;
        if let Some(old) = old
            && options.groups == Groups::Auto
            && has_features(&old.schema, config)
        {
            return old.schema.clone();
        }
        let known = |name: &String| old?.schema.kept.iter().find(|column| column.name == *name).cloned();
        let unknown = |name: &String| KeptColumn { name: name.clone(), kind: KeptKind::Integer };
        let kept = config.keep.iter().map(|name| known(name).unwrap_or_else(|| unknown(name)));
        let schema = Schema { kept: kept.collect(), ..config.schema.clone() };
        match old.filter(|old| options.groups == Groups::Auto && keeps_features(&old.schema, config)) {
            Some(old) => extended(&old.schema, &schema),
            None => schema,
        }
    }

    /// Whether what is written has the digest of what was read: the same samples, and neither ids that vocabularies
    /// change nor lists that timelines make.
    fn writes_the_samples_as_read(&self) -> bool {
        let (config, filter) = (self.config, &self.options.partitions);
        config.vocabularies.is_empty() && config.timelines.is_empty() && *filter == PartitionFilter::default()
    }

    /// The head of the newest snapshot of the dataset that will be appended to, if there is one.
    fn old_snapshot(&self) -> Result<Option<Snapshot>> {
        if !self.options.commit.keeps_others() {
            return Ok(None);
        }
        match Snapshot::load_head(self.out) {
            Ok(old) => Ok(Some(old)),
            Err(onefold_datasets::Error::NotADataset(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn writer(&self, layout: Layout, order: Order, schema: &Schema) -> Result<DatasetWriter> {
        let options = WriterOptions {
            layout,
            commit: self.options.commit,
            sample_keys: !self.config.samples.key.is_empty(),
            column_order: self.options.column_order.clone(),
            sessions: Some(self.config.session.clone()),
            ..WriterOptions::new(order)
        };
        Ok(DatasetWriter::create(self.out, schema.clone(), options)?)
    }

    /// `writer`, or one for the schema if that is another one. Nothing is written yet.
    fn with_schema(&self, writer: DatasetWriter, schema: &Schema) -> Result<DatasetWriter> {
        if writer.schema() == schema {
            return Ok(writer);
        }
        let (layout, order) = (writer.options().layout, writer.options().order);
        let columns = writer.partition_columns().to_vec();
        drop(writer);
        let mut writer = self.writer(layout, order, schema)?;
        writer.set_partition_columns(columns)?;
        Ok(writer)
    }

    /// Writes the samples, and adds their ranges of buckets to `writer`. Samples are `digested` when they are decoded
    /// unless the writer knows which it has to expect. Gives `None` if nothing is known of any samples.
    async fn write(
        &self,
        clustering: Clustering<'_>,
        (reading, decided): (&Reading<'_>, &OutputPlan),
        writer: &mut DatasetWriter,
        digested: bool,
    ) -> Result<Option<WrittenSamples>> {
        for (name, vocabulary) in &decided.vocabularies {
            writer.add_vocabulary(name, vocabulary)?;
        }
        let spec = WriteSpec {
            location: self.out.to_owned(),
            schema: writer.schema().clone(),
            options: writer.options().clone(),
            filter: self.options.partitions.clone(),
            partition_columns: writer.partition_columns().to_vec(),
            cut: clustering.cut(digested),
        };
        let mut add = |range| Ok(writer.add(range)?);
        let written = clustering.write(spec, decided.lists.clone(), self.reporter, &mut add).await?;
        sources::count_skipped(&reading.context, &reading.sources).await?;
        Ok(written)
    }

    /// Commits the ranges that were added to `writer`, which have the samples `written`.
    async fn commit(
        &self,
        reading: &Reading<'_>,
        writer: DatasetWriter,
        WrittenSamples { statistics, left_out, .. }: WrittenSamples,
    ) -> Result<Output> {
        let is_merge = self.options.commit == Commit::Merge && writer.appended_to().is_some();
        let (samples, partitions) = writer.added();
        if samples == 0 && !is_merge {
            let hint = format!("no sample is of a partition that `{}` chooses", self.options.partitions);
            return Err(Error::no_samples(&self.config.path, hint));
        }
        // The last thing that can fail before the commit.
        let cut_sessions = reading.cut_sessions().await?;
        let is_integer = |feature: &str| reading.ids.are_integers(feature);
        let statistics = BuildStatistics::new(self.config, &statistics, &is_integer);
        let written = writer.finish()?;
        Ok(Output { written, samples, partitions, left_out, statistics, cut_sessions })
    }

    /// What looks wrong in the samples.
    fn warnings(&self, statistics: &BuildStatistics, cut_sessions: u64) -> Vec<String> {
        let mut warnings =
            statistics::warnings(self.config, statistics, self.options.commit == Commit::Merge);
        if cut_sessions > 0 {
            let columns = self.config.partition_columns.join("`, `");
            warnings.push(format!(
                "the partition columns `{columns}` cut {} into one session per value, because a session lies in one partition; \
                 give the samples of a session one value in the query, or partition by other columns",
                count_of(cut_sessions, "session")
            ));
        }
        warnings
    }

    fn summary(&self, output: Output, decided: &OutputPlan, reading: Reading<'_>) -> BuildSummary {
        let Output { written, samples, partitions, left_out, statistics: observed, cut_sessions } = output;
        let snapshot = &written.snapshot;
        let statistics = &snapshot.statistics;
        let entries =
            |(name, file): (&String, &onefold_datasets::VocabularyFile)| (name.clone(), file.entries);
        BuildSummary {
            samples: statistics.samples,
            sessions: statistics.sessions,
            samples_per_session: statistics.samples as f64 / statistics.sessions.max(1) as f64,
            partitions: statistics.partitions,
            snapshot: snapshot.snapshot,
            changed: written.changed,
            buckets: snapshot.buckets,
            merged: None,
            partitions_written: partitions,
            samples_written: samples,
            samples_of_other_partitions: left_out.samples,
            samples_of_earlier_sessions: left_out.tails,
            files: statistics.files,
            bytes_on_disk: statistics.bytes_on_disk,
            layout: snapshot.layout,
            order: snapshot.order,
            share: reading.share,
            source_rows: sources::total_rows(&reading.sources),
            source_bytes: sources::total_bytes(&reading.sources),
            rows: RowCounts::default(),
            skipped: reading.planned.skipped,
            ragged_rows_skipped: sources::ragged_rows_skipped(&reading.sources),
            groups: decided.groups.clone(),
            vocabularies: snapshot.vocabularies.iter().map(entries).collect(),
            cut_sessions,
            warnings: self.warnings(&observed, cut_sessions),
            statistics: observed,
            sorted_joins: engine::sorted_joins(&reading.context),
            wall_seconds: 0.0,
            samples_per_second: 0.0,
            peak_rss_bytes: None,
        }
    }
}

/// What a build committed, and what was observed on the way.
struct Output {
    written: Written,
    /// The samples that were written, and the number of their partitions.
    samples: u64,
    partitions: usize,
    left_out: LeftOut,
    statistics: BuildStatistics,
    cut_sessions: u64,
}
