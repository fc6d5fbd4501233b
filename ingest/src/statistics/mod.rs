//! Statistics of the samples that a build reads, per feature, and warnings about suspicious values.
//!
//! Numbers, nulls and empty lists are counted when columns are converted, batch by batch. Ids are counted where a list
//! changes, so that repeated lists cost nothing. All counts are exact except the numbers of distinct ids.

mod warnings;

use onefold_datasets::IdEncoding;
use serde::Serialize;

use crate::cluster::{ListCounts, NumberCounts, SampleStatistics, list_names};
use crate::config::{Config, FeatureKind};
use crate::times::shown;

pub(crate) use self::warnings::warnings;

/// Statistics of the samples that a build read, including samples of partitions that it does not write.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct BuildStatistics {
    /// The number of samples.
    pub samples: u64,
    /// The time of the first sample, in UTC; `None` if samples have no times.
    pub first_time: Option<String>,
    /// The time of the last sample, in UTC; `None` if samples have no times.
    pub last_time: Option<String>,
    /// The feature columns, in the dataset's order.
    pub features: Vec<ColumnStatistics>,
}

/// Statistics of a feature column.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnStatistics {
    /// The name of the column.
    pub name: String,
    /// The kind of the column.
    pub kind: FeatureKind,
    /// The statistics of its values.
    #[serde(flatten)]
    pub values: ValueStatistics,
}

/// Statistics of the values of a feature column.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ValueStatistics {
    /// A label, weight or dense feature, which is never null.
    Number {
        /// The smallest value.
        min: f32,
        /// The largest value.
        max: f32,
        /// The fraction of the samples with a value above 0.
        positive_share: f64,
    },
    /// A sparse or sequence feature.
    List {
        /// The fraction of the samples with a null list or a null single id. Their lists are empty in the dataset.
        null_share: f64,
        /// The fraction of the samples with a list that is empty but not null.
        empty_share: f64,
        /// The mean number of ids per sample.
        mean_length: f64,
        /// An estimate of the number of distinct ids, with a standard error of 1.6 %.
        distinct_ids: u64,
        /// Whether all samples have the same single id.
        is_constant: bool,
        /// The smallest id; `None` if there are no ids, or ids are texts or hashes.
        #[serde(skip_serializing_if = "Option::is_none")]
        min_id: Option<i64>,
        /// The largest id; `None` if there are no ids, or ids are texts or hashes.
        #[serde(skip_serializing_if = "Option::is_none")]
        max_id: Option<i64>,
        /// With `ids = "hash"`, the expected number of pairs of distinct ids with equal hashes.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_collisions: Option<f64>,
    },
}

impl BuildStatistics {
    /// Makes the statistics from counts. `is_integer` returns whether a feature's ids are the integers of the log.
    pub(crate) fn new(
        config: &Config,
        counted: &SampleStatistics,
        is_integer: &dyn Fn(&str) -> bool,
    ) -> Self {
        let columns = &counted.columns;
        let feature = |(name, kind): (&str, FeatureKind)| {
            let values = match config.schema.float_columns().position(|known| known == name) {
                Some(number) => ValueStatistics::number(columns.numbers.get(number)?, columns.samples),
                None => {
                    let feature = config.schema.sparse_features().find(|feature| feature.name == name)?;
                    let list = list_names(config).position(|known| known == name)?;
                    ValueStatistics::list(counted, list, feature.ids, is_integer(name))
                }
            };
            Some(ColumnStatistics { name: name.to_owned(), kind, values })
        };
        let times = columns.times.filter(|_| !config.samples.by_rows);
        Self {
            samples: columns.samples,
            first_time: times.map(|(first, _)| shown(first)),
            last_time: times.map(|(_, last)| shown(last)),
            features: config.feature_columns().filter_map(feature).collect(),
        }
    }
}

impl ValueStatistics {
    fn number(counts: &NumberCounts, samples: u64) -> Self {
        Self::Number { min: counts.min, max: counts.max, positive_share: share(counts.positive, samples) }
    }

    fn list(counted: &SampleStatistics, list: usize, ids: Option<IdEncoding>, is_integer: bool) -> Self {
        let samples = counted.columns.samples;
        let ListCounts { null, empty } = counted.list_counts(list);
        let all_ids = counted.values.get(list).map_or(0, |[ids, _]| *ids);
        let (range, distinct) = match counted.ids.get(list) {
            Some(ids) => (ids.range, ids.distinct()),
            None => (None, 0),
        };
        let shown_range = range.filter(|_| is_integer);
        let pairs = |n: f64| n * (n - 1.0).max(0.0) / 2.0;
        Self::List {
            null_share: share(null, samples),
            empty_share: share(empty, samples),
            mean_length: share(all_ids, samples),
            distinct_ids: distinct,
            is_constant: null + empty == 0
                && all_ids == samples
                && range.is_some_and(|(min, max)| min == max),
            min_id: shown_range.map(|(min, _)| min),
            max_id: shown_range.map(|(_, max)| max),
            // Each pair of distinct ids collides with probability 2^-63.
            expected_collisions: (ids == Some(IdEncoding::Hash))
                .then(|| pairs(distinct as f64) / 2_f64.powi(63)),
        }
    }
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}
