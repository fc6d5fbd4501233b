//! Runs a configuration: builds a committed dataset from raw logs.

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
    Snapshot, TableVersion, WriterOptions, Written, unless_removed,
};
use onefold_storage::Storage;
use serde::Serialize;

pub use self::parts::{Part, commit_parts, write_part};

use crate::cluster::{Clustering, Lacks, WriteSpec, WrittenSamples};
use crate::config::Config;
use crate::decide::{OutputPlan, extended, keeps_features};
use crate::error::{Error, Result};
use crate::groups::GroupSummary;
use crate::merge::{Merge, MergeSummary};
use crate::pipeline::{BuildOptions, Groups, Pipeline, Target};
use crate::problems::Problems;
use crate::profile::staged;
use crate::reading::Reading;
use crate::row_counts::RowCounts;
use crate::samples::SkipCounts;
use crate::sources::Source;
use crate::statistics::{self, BuildStatistics};
use crate::{engine, sources};

/// The result of a build.
#[derive(Debug, Clone, Serialize)]
pub struct BuildSummary {
    /// The number of samples in all partitions of the dataset, including partitions that existed before.
    pub samples: u64,
    /// The number of sessions of these samples.
    pub sessions: u64,
    /// `samples / sessions`.
    pub samples_per_session: f64,
    /// The number of partitions of the dataset.
    pub partitions: u64,
    /// The number of partitions that this build wrote.
    pub partitions_written: usize,
    /// The number of samples that this build wrote.
    pub samples_written: u64,
    /// The number of the dataset's newest snapshot.
    pub snapshot: u64,
    /// Whether this build committed a snapshot; `false` if the dataset already had these samples.
    pub changed: bool,
    /// The number of buckets that divide the dataset's sessions. They can be read as at most this number of streams.
    pub buckets: u32,
    /// The result of a merge: either the build was a merge, or an append merged samples into earlier partitions. `None`
    /// for other builds.
    #[serde(flatten)]
    pub merged: Option<MergeSummary>,
    /// The number of samples that were not written, because their partitions were not selected.
    pub samples_of_other_partitions: u64,
    /// The number of these samples whose own time lies in a partition that was written, per partition in which their
    /// session started.
    pub samples_of_earlier_sessions: BTreeMap<String, u64>,
    /// The number of data files of the dataset.
    pub files: u64,
    /// The total size of the data files, in bytes.
    pub bytes_on_disk: u64,
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// The fraction of the sessions that the build took; 1 for all of them.
    pub share: f64,
    /// The number of rows of `[samples]`: how many were written, and how many were left out for each reason.
    pub rows: RowCounts,
    /// The number of rows that the declared steps left out or filled up.
    pub skipped: SkipCounts,
    /// The number of CSV rows that were left out, because they have fewer or more values than there are columns.
    pub ragged_rows_skipped: u64,
    /// The feature groups that were found in the data, with reasons; empty if the configuration defines the groups.
    pub groups: Vec<GroupSummary>,
    /// The number of ids of each vocabulary.
    pub vocabularies: BTreeMap<String, u64>,
    /// The number of sessions that the partition columns cut into several, because their samples have different values
    /// in these columns.
    pub cut_sessions: u64,
    /// The statistics of the samples that were read, per feature.
    pub statistics: BuildStatistics,
    /// Warnings about suspicious values in the samples.
    pub warnings: Vec<String>,
    /// The total number of rows of the sources; `None` unless all source files are Parquet files, which store it.
    pub source_rows: Option<u64>,
    /// The total size of the source files, in bytes.
    pub source_bytes: u64,
    /// The versions of the Delta Lake tables that were read, by source.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub table_versions: BTreeMap<String, TableVersion>,
    /// Whether a join sorted its inputs, because the side to be held in memory did not fit.
    pub sorted_joins: bool,
    /// The time from the start to the commit, in seconds.
    pub wall_seconds: f64,
    /// `samples_written / wall_seconds`.
    pub samples_per_second: f64,
    /// The largest resident set of the process, in bytes, if the kernel reports it.
    pub peak_rss_bytes: Option<u64>,
}

impl BuildSummary {
    /// Returns the summary of an append that was followed by a merge into the partitions in which sessions began
    /// earlier.
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

/// Builds the dataset of `config` at `out`, a local path or a URL. Nothing of the dataset is visible before it is
/// complete.
///
/// An append to a dataset with sample keys also adds samples to earlier partitions, if sessions that began there have
/// samples in the partitions that it writes. This merge is a second commit.
///
/// # Errors
///
/// [`Error::Fault`] for an error that is found before or during the query, for a query without samples, or if an
/// operator that cannot spill exceeds the memory limit; [`Error::Spill`] if an operator cannot write its spill files;
/// [`Error::Dataset`] if `out` must not be replaced or cannot be written. After any error `out` is unchanged.
pub async fn build(
    config: &Config,
    out: &Path,
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<BuildSummary> {
    let started = Instant::now();
    let added = Pipeline { config, out, options, reporter }.only_added()?;
    let config = added.as_ref().unwrap_or(config);
    let pipeline = Pipeline { config, out, options, reporter };
    let mut summary = staged("plan and commit", pipeline.build()).await?;
    let earlier = pipeline.earlier_partitions(&summary)?;
    if !earlier.is_empty() {
        summary
            .samples_of_earlier_sessions
            .retain(|began, _| earlier.iter().all(|key| key.to_string() != *began));
        let partitions = PartitionFilter::of_keys(earlier);
        let options = BuildOptions { commit: Commit::Merge, partitions, ..options.clone() };
        // The tables may have newer versions by now.
        let config = config.at_versions(&summary.table_versions);
        let merge = Pipeline { config: &config, out, options: &options, reporter };
        summary = summary.with_merged(staged("plan and commit", merge.build()).await?);
    }
    summary.wall_seconds = started.elapsed().as_secs_f64();
    summary.samples_per_second = summary.samples_written as f64 / summary.wall_seconds;
    summary.peak_rss_bytes = peak_rss_bytes();
    Ok(summary)
}

impl Pipeline<'_> {
    /// Returns the configuration with which an append or a merge reads what its tables gained since the versions that
    /// the dataset has; `None` if it has no tables, or this is neither. A replacement needs all rows of its partitions.
    fn only_added(&self) -> Result<Option<Config>> {
        if !self.config.has_tables() || self.options.commit == Commit::Replace {
            return Ok(None);
        }
        let old = self.old_snapshot()?;
        old.map(|old| self.config.since_versions(&old.table_versions)).transpose()
    }

    async fn build(&self) -> Result<BuildSummary> {
        let Self { out, options, .. } = *self;
        let target = if options.commit == Commit::Merge { Target::Merge } else { Target::Partitions };
        let found = self.find(target).await?;
        // Check before any work whether a dataset may exist at `out`.
        let old = self.old_snapshot()?;
        let Some(number) = old.as_ref().map(|old| old.snapshot) else {
            return self.build_with(found, None).await;
        };
        let built = self.build_with(found, old).await;
        unless_removed(&Storage::open(out)?, number, built)
    }

    /// Builds from the `found` sources. `old` is the head of the newest snapshot of the dataset to append to.
    async fn build_with(
        &self,
        found: (Vec<Source>, Problems),
        mut old: Option<Snapshot>,
    ) -> Result<BuildSummary> {
        let Self { config, out, options, .. } = *self;
        if let Some(old) = &old {
            self.check_keys(old)?;
        }
        let (layout, order) = self.layout_and_order(old.as_ref());
        let mut writer = self.writer(layout, order, &self.first_schema(old.as_ref()))?;
        let merges = options.commit == Commit::Merge && old.is_some();
        if merges {
            // The merge starts from the snapshot that the commit is compared with, so later commits of other writers
            // are not lost.
            let base = Snapshot::load_at(out, writer.appended_to().map(|old| old.snapshot))?;
            crate::merge::check(config, &base)?;
            old = Some(base);
        }
        let target = if merges { Target::Merge } else { Target::Partitions };
        let reading = self.plan(found, target, old.as_ref()).await?;
        // This refuses unsuitable columns before any work.
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
        // Records that pass through other machines are digested again when they are decoded.
        let digested = !expects || reading.is_on_cluster();
        let lacks = merge.as_ref().map(Merge::lacks).unwrap_or_default();
        let written = self.write(clustering, (&reading, &decided), &mut writer, (digested, lacks)).await?;
        if !merges {
            reading.check_count(written.as_ref().map_or(0, |written| written.samples), None)?;
        }
        // A merge may have no samples to add.
        let written = written.filter(|written| written.samples > 0 || merges);
        let written = written.ok_or_else(|| reading.no_samples())?;
        if expects {
            writer.expect(written.samples, written.digest);
        }
        let rows = match &merge {
            Some(merge) => Self::merged_rows(&reading, &merge.summary, written.left_out.samples),
            None => reading.row_counts(written.samples, written.left_out.samples)?,
        };
        let merged = merge.as_ref().map(|merge| merge.summary);
        self.commit((reading, decided), writer, written, (rows, merged)).await
    }

    /// Returns the partitions of the dataset in which sessions began that continue in the partitions which an append
    /// wrote. Returns none if samples have no keys, because existing samples could then not be recognized.
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

    /// Returns the schema as far as it is known before the samples are planned. Groups and the types of kept columns
    /// come from the snapshot `old` if the dataset has the columns of the configuration.
    fn first_schema(&self, old: Option<&Snapshot>) -> Schema {
        let Self { config, options, .. } = *self;
        let known = |name: &String| old?.schema.kept.iter().find(|column| column.name == *name).cloned();
        let unknown = |name: &String| KeptColumn { name: name.clone(), kind: KeptKind::Integer };
        let kept = config.keep.iter().map(|name| known(name).unwrap_or_else(|| unknown(name)));
        let schema = Schema { kept: kept.collect(), ..config.schema.clone() };
        match old.filter(|old| options.groups == Groups::Auto && keeps_features(&old.schema, config)) {
            Some(old) => extended(&old.schema, &schema),
            None => schema,
        }
    }

    /// Returns whether the written samples have the digest of the samples that were read. This is not the case if only
    /// some partitions are written, vocabularies replace ids, or timelines make lists.
    fn writes_the_samples_as_read(&self) -> bool {
        let (config, filter) = (self.config, &self.options.partitions);
        config.vocabularies.is_empty() && config.timelines.is_empty() && *filter == PartitionFilter::default()
    }

    /// Loads the head of the newest snapshot of the dataset to append to, if there is one.
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

    /// Returns `writer` if it has this schema, otherwise a new writer with the schema. Nothing has been written yet.
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

    /// Writes the samples, and adds their ranges of buckets to `writer`. `digested` says whether samples are digested
    /// when they are decoded, `lacks` lists what the files lack. Returns `None` if nothing is known about any samples.
    async fn write(
        &self,
        clustering: Clustering<'_>,
        (reading, decided): (&Reading<'_>, &OutputPlan),
        writer: &mut DatasetWriter,
        (digested, lacks): (bool, Lacks),
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
            lacks,
            cut: clustering.cut(digested),
        };
        let mut add = |range| Ok(writer.add(range)?);
        let written = clustering.write(spec, decided.lists.clone(), self.reporter, &mut add).await?;
        sources::count_skipped(&reading.sources).await?;
        Ok(written)
    }

    /// Commits the ranges that were added to `writer`. They contain the samples `written`. Returns the summary, without
    /// the duration.
    async fn commit(
        &self,
        (reading, decided): (Reading<'_>, OutputPlan),
        mut writer: DatasetWriter,
        WrittenSamples { statistics, left_out, .. }: WrittenSamples,
        (rows, merged): (RowCounts, Option<MergeSummary>),
    ) -> Result<BuildSummary> {
        let is_merge = self.options.commit == Commit::Merge && writer.appended_to().is_some();
        let (samples, partitions) = writer.added();
        if samples == 0 && !is_merge {
            let hint = format!("no sample is of a partition that `{}` chooses", self.options.partitions);
            return Err(Error::no_samples(&self.config.path, hint));
        }
        // This is the last step before the commit that can fail.
        let cut_sessions = reading.cut_sessions().await?;
        let is_integer = |feature: &str| reading.ids.are_integers(feature);
        let observed = BuildStatistics::new(self.config, &statistics, &is_integer);
        if self.config.reads_added_files() {
            writer.write_only_new();
        }
        let table_versions = sources::table_versions(&reading.sources);
        // The next append must read samples again that are left out.
        if left_out.samples == 0 {
            writer.set_table_versions(table_versions.clone());
        }
        let Written { snapshot, changed, .. } = writer.finish()?;
        let statistics = snapshot.statistics;
        let vocabularies = snapshot.vocabularies.into_iter().map(|(name, file)| (name, file.entries));
        Ok(BuildSummary {
            samples: statistics.samples,
            sessions: statistics.sessions,
            samples_per_session: statistics.samples as f64 / statistics.sessions.max(1) as f64,
            partitions: statistics.partitions,
            snapshot: snapshot.snapshot,
            changed,
            buckets: snapshot.buckets,
            merged: merged.or_else(|| self.merged_into_nothing(samples)),
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
            rows,
            ragged_rows_skipped: sources::ragged_rows_skipped(&reading.sources),
            groups: decided.groups,
            vocabularies: vocabularies.collect(),
            cut_sessions,
            table_versions,
            warnings: self.warnings(&observed, cut_sessions, statistics.samples),
            statistics: observed,
            sorted_joins: engine::sorted_joins(&reading.context),
            skipped: reading.planned.skipped,
            wall_seconds: 0.0,
            samples_per_second: 0.0,
            peak_rss_bytes: None,
        })
    }

    /// Returns warnings about suspicious values in the samples, and about ids that may be counted in too few of the
    /// dataset's `samples`.
    fn warnings(&self, statistics: &BuildStatistics, cut_sessions: u64, samples: u64) -> Vec<String> {
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
        let mut limited = self.config.vocabularies.iter().filter(|(_, vocabulary)| vocabulary.min_count > 1);
        if let Some((name, _)) = limited.next().filter(|_| statistics.samples < samples) {
            warnings.push(format!(
                "vocabulary `{name}`: `min_count` counts ids in the {} that were read, not in the {} of the dataset, so ids \
                 that are rare in each append stay 0; let the sources name the earlier logs, too, and choose the partitions \
                 to write by a filter",
                count_of(statistics.samples, "sample"),
                count_of(samples, "sample")
            ));
        }
        warnings
    }
}
