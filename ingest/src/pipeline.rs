//! The pipeline of all commands that read samples.
//!
//! ```text
//! plan ─▶ fold ─▶ decide ─▶ write ─▶ commit
//! ```
//!
//! The commands differ in their [`Target`]. A build and an append run all steps. A merge folds the late samples, and
//! then writes them together with the existing samples of the ranges of buckets that change. A part of a dataset is
//! written, and committed later by another program. A comparison digests the samples instead of writing them.

use std::path::Path;

use clap::ValueEnum;
use onefold_base::progress::Reporter;
use onefold_datasets::{Commit, Layout, Order, PartitionFilter, Snapshot};

use crate::cluster::Clustering;
use crate::config::Config;
use crate::decide::{OutputPlan, decide, vocabulary_kinds};
use crate::engine::EngineOptions;
use crate::error::Result;
use crate::problems::Problems;
use crate::reading::{Reading, ReadingOptions, buckets_of_ranges};
use crate::sources::{self, Source};

/// The options of a build.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The layout of sparse features. If `None`, the layout of the dataset that is appended to, or [`Layout::Folded`]
    /// for a new dataset.
    pub layout: Option<Layout>,
    /// The order of the samples within a partition. If `None`, the order of the dataset that is appended to, or
    /// [`Order::Session`] for a new dataset.
    pub order: Option<Order>,
    /// The source of the feature groups.
    pub groups: Groups,
    /// The columns that come first in the data files, usually those that jobs read most.
    pub column_order: Vec<String>,
    /// The threads, memory and disk space that the build may use.
    pub engine: EngineOptions,
    /// How an existing dataset is changed.
    pub commit: Commit,
    /// The approximate number of samples to take, in whole sessions chosen by the hash of their identity; all samples
    /// if `None`. [`BuildSummary::share`](crate::BuildSummary::share) reports the fraction of the sessions.
    pub about_samples: Option<u64>,
    /// The number of ranges of buckets of a new dataset. Each range has its own files. If `None`, the configuration or
    /// the size of the dataset determines it. There are at least 64 buckets, so that at least 64 ranks can read the
    /// dataset, except for samples in arrival order.
    pub buckets: Option<u32>,
    /// The partitions to write. Samples of other partitions are left out and counted.
    pub partitions: PartitionFilter,
}

/// Where feature groups come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Groups {
    /// The features that `[features]` puts into one group
    Given,
    /// Features that change together in the data and repeat often enough; the groups in `[features]` are ignored
    Auto,
}

impl BuildOptions {
    /// Returns the options of a build of all samples with the settings of the configuration and `engine`.
    pub fn new(engine: EngineOptions, commit: Commit) -> Self {
        Self {
            layout: None,
            order: None,
            groups: Groups::Given,
            column_order: Vec::new(),
            engine,
            commit,
            about_samples: None,
            buckets: None,
            partitions: PartitionFilter::default(),
        }
    }
}

/// The use of the samples that a pipeline reads.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    /// The samples are written as partitions of a dataset.
    Partitions,
    /// The samples are merged into partitions of a dataset.
    Merge,
    /// The samples of one range of buckets are written, and committed later.
    Part { range: u32, ranges: u32 },
    /// The samples are compared with the samples of a dataset.
    Compare,
}

/// One run of a configuration, for the dataset at `out`.
pub(crate) struct Pipeline<'a> {
    pub(crate) config: &'a Config,
    pub(crate) out: &'a Path,
    pub(crate) options: &'a BuildOptions,
    pub(crate) reporter: &'a dyn Reporter,
}

impl<'a> Pipeline<'a> {
    /// Returns the layout and the order: those of the options, or else those of the dataset with the snapshot `old`.
    pub(crate) fn layout_and_order(&self, old: Option<&Snapshot>) -> (Layout, Order) {
        let layout = self.options.layout.or(old.map(|old| old.layout)).unwrap_or(Layout::Folded);
        (layout, self.options.order.or(old.map(|old| old.order)).unwrap_or(Order::Session))
    }

    /// Plans the samples of sources that [`find`](Self::find) returned, for a target. `old` is the snapshot of an
    /// existing dataset.
    ///
    /// # Errors
    ///
    /// The errors of [`Reading::plan`], and [`Error::Dataset`](crate::Error::Dataset) if the dataset's vocabularies
    /// cannot be read.
    pub(crate) async fn plan(
        &self,
        (sources, problems): (Vec<Source>, Problems),
        target: Target,
        old: Option<&Snapshot>,
    ) -> Result<Reading<'a>> {
        let Self { config, options, .. } = *self;
        let part = match target {
            Target::Part { range, ranges } => Some((range, ranges)),
            _ => None,
        };
        let order = self.layout_and_order(old).1;
        let ranges = part.map(|(_, ranges)| ranges).or(options.buckets).or(config.buckets);
        let new = ranges.map(|ranges| buckets_of_ranges(order, ranges));
        let wanted = ReadingOptions {
            order,
            buckets: old.map(Snapshot::division).or(new),
            observe_changes: matches!(target, Target::Partitions) && options.groups == Groups::Auto,
            only_range: part.map(|(range, _)| range),
            about_samples: options.about_samples.filter(|_| part.is_none()),
            vocabularies: old.map(|old| vocabulary_kinds(self.out, old)).transpose()?.unwrap_or_default(),
        };
        let without_rows = sources::without_rows(&sources);
        let reading = Reading::plan(config, (sources, problems.clone()), &options.engine, wanted).await;
        reading.map_err(|error| problems.and(error.explained(without_rows)))
    }

    /// Finds the files of the sources for a target. Problems are collected, and reported after all samples have been
    /// folded. The first problem ends a comparison, a merge, which folds late samples with its own code, and a run on a
    /// cluster, which reports no problems to this process.
    pub(crate) async fn find(&self, target: Target) -> Result<(Vec<Source>, Problems)> {
        let problems = match (target, &self.options.engine.cluster) {
            (Target::Partitions | Target::Part { .. }, None) => Problems::collected(),
            _ => Problems::default(),
        };
        Ok((sources::find(self.config, &problems).await?, problems))
    }

    /// Folds all samples, and decides on groups and vocabularies. Groups and vocabularies of the snapshot `known` are
    /// kept. Returns `None` if there are no samples.
    ///
    /// On a cluster, folding needs a separate job. If nothing is to be learned from the samples first, they are folded
    /// later, while they are written.
    pub(crate) async fn decide(
        &self,
        reading: &Reading<'a>,
        known: Option<&Snapshot>,
    ) -> Result<Option<(Clustering<'a>, OutputPlan)>> {
        let config = self.config;
        let mut clustering = reading.clustering().await?;
        let all_is_given = config.vocabularies.is_empty() && self.options.groups == Groups::Given;
        if all_is_given && reading.is_on_cluster() {
            return Ok(Some((clustering, OutputPlan::as_configured(config, &reading.kept))));
        }
        let Some(totals) = reading.fold(&mut clustering, self.reporter).await? else { return Ok(None) };
        let known = known.map(|known| (self.out, known));
        let decided = decide(config, reading, &mut totals.statistics, known).await?;
        Ok(Some((clustering, decided)))
    }
}
