//! The pipeline of everything that reads samples.
//!
//! ```text
//! plan ─▶ fold ─▶ decide ─▶ write ─▶ commit
//! ```
//!
//! Commands differ by their [`Target`]. A build and an append run all steps. A merge folds the late samples, and then
//! writes them together with those of the ranges of buckets that change. A part of a dataset is written and committed later. A
//! comparison digests the samples in place of writing them.

use std::path::Path;

use clap::ValueEnum;
use onefold_base::progress::Reporter;
use onefold_datasets::{Commit, Layout, Order, PartitionFilter, Snapshot};

use crate::cluster::Clustering;
use crate::decide::{OutputPlan, decide, vocabulary_kinds};
use crate::engine::EngineOptions;
use crate::problems::Problems;
use crate::reading::{Reading, ReadingOptions, buckets_of_ranges};
use crate::sources::{self, Source};
use crate::{Config, Result};

/// How a dataset is built.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// How sparse features are stored. If `None`, as in the dataset that is appended to, or [`Layout::Folded`] in a new
    /// one.
    pub layout: Option<Layout>,
    /// The order of the samples within a partition. If `None`, that of the dataset that is appended to, or
    /// [`Order::Session`] in a new one.
    pub order: Option<Order>,
    /// Where feature groups come from.
    pub groups: Groups,
    /// Columns that stand first in the files, those that jobs read most.
    pub column_order: Vec<String>,
    /// Threads, memory and disk space that the build may use.
    pub engine: EngineOptions,
    /// How a dataset that exists already is changed.
    pub commit: Commit,
    /// Take whole sessions, chosen by the hash of what identifies them, until about so many samples are expected; all
    /// if `None`. What is built then stands for the share of the sessions that
    /// [`BuildSummary::share`](crate::BuildSummary::share) says.
    pub about_samples: Option<u64>,
    /// The number of ranges of buckets of a new dataset, each of which has files of its own; that of the configuration,
    /// or by its size, if `None`. There are at least 64 buckets, so that as many ranks can read the dataset, but for
    /// samples in arrival order.
    pub buckets: Option<u32>,
    /// Partitions that are written; samples of others are left out and counted.
    pub partitions: PartitionFilter,
}

/// Where feature groups come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Groups {
    /// Those that `[features]` puts into one group
    Given,
    /// Those that change together in the data and repeat often enough; the groups in `[features]` are ignored
    Auto,
}

impl BuildOptions {
    /// The options of a build of all samples as the configuration says, with `engine`.
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
    /// They are partitions of a dataset.
    Partitions,
    /// They are merged into the partitions of a dataset.
    Merge,
    /// The samples of one range of buckets are written, to be committed later.
    Part { range: u32, ranges: u32 },
    /// They are compared with those of a dataset.
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
    /// The layout and the order of the options, or of the dataset that has the snapshot `old`.
    pub(crate) fn layout_and_order(&self, old: Option<&Snapshot>) -> (Layout, Order) {
        let layout = self.options.layout.or(old.map(|old| old.layout)).unwrap_or(Layout::Folded);
        (layout, self.options.order.or(old.map(|old| old.order)).unwrap_or(Order::Session))
    }

    /// Plans the samples of the sources that were [found](Self::find) for a target, a dataset that is new or has the
    /// snapshot `old`.
    ///
    /// # Errors
    ///
    /// As [`Reading::plan`], and [`Error::Dataset`](crate::Error::Dataset) if the dataset's vocabularies cannot be read.
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
        let reading = Reading::plan(config, (sources, problems.clone()), &options.engine, wanted).await;
        reading.map_err(|error| problems.and(error))
    }

    /// Finds the files of the sources. Problems are collected, and reported when all samples have been folded; on a
    /// cluster, which reports none to this process, the first one ends the run.
    ///
    /// # Errors
    ///
    /// As [`sources::find`].
    pub(crate) async fn find(&self) -> Result<(Vec<Source>, Problems)> {
        let problems = match self.options.engine.cluster {
            None => Problems::collected(),
            Some(_) => Problems::default(),
        };
        Ok((sources::find(self.config, &problems).await?, problems))
    }

    /// The same, where the first problem ends the run.
    ///
    /// # Errors
    ///
    /// As [`sources::find`].
    pub(crate) async fn find_strictly(&self) -> Result<(Vec<Source>, Problems)> {
        let problems = Problems::default();
        Ok((sources::find(self.config, &problems).await?, problems))
    }

    /// Folds all samples, and decides on groups and vocabularies; those of the snapshot `known` are kept. Gives `None`
    /// if there are no samples.
    ///
    /// On a cluster, where folding takes a job of its own, samples are folded on the way if nothing is to be learned of
    /// them first.
    ///
    /// # Errors
    ///
    /// As [`Reading::fold`] and [`decide`].
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
