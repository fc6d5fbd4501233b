//! The options of a clustering, and the options of each of its steps, which follow from them.

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use onefold_datasets::{CountBudget, KeptColumn, Sessions, SparseFeature, SparseKind};

use super::convert::ColumnNames;
use super::encode::EncoderOptions;
use super::partitions::Partitions;
use super::statistics::StatisticsOptions;
use super::unfold::CutSpec;
use crate::config::{Config, TimelineConfig};
use crate::ids::FeatureIds;
use crate::problems::Problems;
use crate::sessionize::{self, SampleOrder};
use crate::times::TimeLimits;

/// Options of a clustering that are not part of the configuration.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOptions {
    pub(crate) order: SampleOrder,
    /// The memory limit for the last samples of sessions, in bytes.
    pub(crate) state_bytes: usize,
    /// The memory budget for the counts of vocabularies.
    pub(crate) budget: CountBudget,
    pub(crate) threads: usize,
    /// The number of row groups that are written at the same time.
    pub(crate) row_groups: usize,
    /// The size of a row of the query, in bytes.
    pub(crate) row_bytes: u64,
    /// Whether to observe which lists change together.
    pub(crate) observe_changes: bool,
    /// The range of allowed times, if no earlier step has checked them.
    pub(crate) time_limits: Option<TimeLimits>,
    /// The form of the ids of each feature.
    pub(crate) ids: FeatureIds,
    /// The columns that the dataset keeps in addition to the features.
    pub(crate) kept: Vec<KeptColumn>,
    /// Collects values that a sample must not have.
    pub(crate) problems: Problems,
}

/// Returns the specification of how sorted records are cut into row groups.
pub(super) fn cut_spec(config: &Config, columns: &ArrowSchema, options: &ClusterOptions) -> CutSpec {
    let lists_of =
        |timeline: &TimelineConfig| timeline.columns.iter().map(|(list, _)| list.clone()).collect();
    CutSpec {
        partitions: Partitions::of(config),
        encoded: encoder_options(config, options),
        digested: true,
        buckets: options.order.buckets,
        timelines: config.timelines.iter().map(lists_of).collect(),
        place_of_slices: sessionize::place_of_slices(config),
        numbered_by: sessionize::numbered_by(config, columns, options.order),
    }
}

/// Returns the names of the columns of the samples' query, by use.
pub(super) fn column_names(config: &Config, options: &ClusterOptions) -> ColumnNames {
    let ids = &options.ids;
    ColumnNames {
        keys: sessionize::record_columns(config),
        identity: sessionize::identity_columns(config),
        partition: config.partition_columns.clone(),
        order: config.order.clone(),
        floats: config.schema.float_columns().map(str::to_owned).collect(),
        weight: config.schema.weight.clone(),
        lists: logged_lists(config).map(|feature| (feature.name.clone(), ids.of(&feature.name))).collect(),
        positions: sessionize::position_columns(config),
        kept: options.kept.clone(),
        time: config.time.column.clone(),
        time_limits: None,
        problems: options.problems.clone(),
    }
}

/// The names of the list columns of the samples: first the lists of the log, then the lists that timelines produce.
pub(crate) fn list_names(config: &Config) -> impl Iterator<Item = &str> {
    let made = config.timelines.iter().flat_map(|timeline| &timeline.columns);
    logged_lists(config).map(|list| list.name.as_str()).chain(made.map(|(feature, _)| feature.as_str()))
}

/// The lists that are columns of the log, without the lists that timelines produce.
fn logged_lists(config: &Config) -> impl Iterator<Item = &SparseFeature> {
    config.schema.sparse_features().filter(|feature| config.timeline_of(&feature.name).is_none())
}

/// Returns the encoder options for the samples of the log.
pub(super) fn encoder_options(config: &Config, options: &ClusterOptions) -> EncoderOptions {
    let lists = logged_lists(config);
    EncoderOptions {
        floats: config.schema.float_columns().map(str::to_owned).collect(),
        lists: lists.map(|list| (list.name.clone(), list.kind == SparseKind::Sequence)).collect(),
        kept: options.kept.clone(),
        digested: logged_lists(config).count(),
        first_worker: 0,
        timelines: config.timelines.iter().map(|timeline| timeline.columns.len()).collect(),
        keyed: !config.samples.key.is_empty(),
        gap_micros: match config.session {
            Sessions::Key(_) => None,
            Sessions::Gap { gap_micros, .. } => Some(gap_micros),
        },
        chained: options.order.order.is_clustered(),
        state_bytes: options.state_bytes / options.threads.max(1),
    }
}

/// Returns the options of the statistics that are collected while the samples of the log are encoded.
pub(super) fn statistics_options(config: &Config, options: &ClusterOptions) -> StatisticsOptions {
    let place = |name: &String| config.vocabularies.keys().position(|known| known == name);
    let vocabulary_of = logged_lists(config).map(|feature| feature.vocabulary.as_ref().and_then(place));
    StatisticsOptions {
        vocabularies: config.vocabularies.keys().cloned().collect(),
        vocabulary_of: vocabulary_of.collect(),
        timelines: config.timelines.iter().map(|timeline| timeline.columns.len()).collect(),
        changes: options.observe_changes,
        values: true,
    }
}
