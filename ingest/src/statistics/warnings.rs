//! Warnings about suspicious values in the statistics of a build.

use onefold_base::units::format_count;

use super::{BuildStatistics, ColumnStatistics, ValueStatistics};
use crate::config::{Config, FeatureKind};

/// Returns warnings about columns without information, and labels without positives. A merge warns only about columns
/// without any value, because a few late samples may well have equal values.
pub(crate) fn warnings(config: &Config, statistics: &BuildStatistics, is_merge: bool) -> Vec<String> {
    let of_feature = |feature: &ColumnStatistics| {
        let reason = empty_reason(config, feature, statistics.samples)
            .or_else(|| constant_reason(feature).filter(|_| !is_merge && statistics.samples > 1))?;
        Some(format!("{} `{}`: {reason}", feature.kind.described(), feature.name))
    };
    statistics.features.iter().filter_map(of_feature).collect()
}

/// Returns the reason why a feature has no ids; `None` if it has ids.
fn empty_reason(config: &Config, feature: &ColumnStatistics, samples: u64) -> Option<String> {
    let ValueStatistics::List { null_share, empty_share, mean_length, .. } = feature.values else {
        return None;
    };
    let samples = format_count(samples);
    let is_of_timeline = config.timeline_of(&feature.name).is_some();
    (mean_length == 0.0).then(|| match (is_of_timeline, null_share, empty_share) {
        (true, ..) => format!(
            "the windows of all {samples} samples are empty; check that the keys of the timeline match, and that its rows are \
             older than the samples"
        ),
        (_, 1.0, _) => format!(
            "all {samples} samples have a null; check the name of the column, and casts in the query (`TRY_CAST` gives null for \
             what it cannot convert)"
        ),
        (_, _, 1.0) => format!("the lists of all {samples} samples are empty"),
        _ => format!("the lists of all {samples} samples are empty or null"),
    })
}

/// Returns the reason why a column has no information about its samples; `None` if its values differ.
fn constant_reason(feature: &ColumnStatistics) -> Option<String> {
    match (feature.kind, &feature.values) {
        (FeatureKind::Label, ValueStatistics::Number { max, .. }) if *max <= 0.0 => Some(
            "no sample is positive; check the condition that makes the label, and the keys and times of the join with events"
                .to_owned(),
        ),
        (FeatureKind::Weight, ValueStatistics::Number { max, .. }) => {
            (*max <= 0.0).then(|| "no sample has a weight above 0".to_owned())
        }
        (_, ValueStatistics::Number { min, max, .. }) => {
            (min == max).then(|| format!("all samples have the value {min}"))
        }
        (_, ValueStatistics::List { is_constant, .. }) => {
            is_constant.then(|| "all samples have the same single id".to_owned())
        }
    }
}
