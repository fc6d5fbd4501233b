//! Statistics of samples.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{DenseStatistics, Schema};

/// The statistics of a whole dataset.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// The number of partitions.
    pub partitions: u64,
    /// The number of data files.
    pub files: u64,
    /// The number of samples.
    pub samples: u64,
    /// The number of sessions.
    pub sessions: u64,
    /// The size of all data files in bytes.
    pub bytes_on_disk: u64,
    /// The statistics of each sparse feature, by name.
    pub features: BTreeMap<String, FeatureStatistics>,
}

/// The statistics of a sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureStatistics {
    /// The number of ids over all samples if every sample had its own copy of its list.
    pub values: u64,
    /// The smallest id, if there is any.
    pub min_id: Option<i64>,
    /// The largest id, if there is any.
    pub max_id: Option<i64>,
    /// The number of ids in the longest list.
    pub max_length: u64,
}

/// The statistics of some samples, by feature.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SampleStatistics {
    /// The statistics of sparse features, by name.
    pub features: BTreeMap<String, FeatureStatistics>,
    /// The statistics of dense features, by name.
    pub dense: BTreeMap<String, DenseStatistics>,
}

/// The statistics of the samples of a row group.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowGroupStatistics {
    /// One element per sparse feature, in schema order.
    pub(crate) features: Vec<FeatureStatistics>,
    /// One element per dense feature, in schema order.
    pub(crate) dense: Vec<DenseStatistics>,
}

impl FeatureStatistics {
    /// Adds the statistics of other samples.
    pub fn merge(&mut self, other: &Self) {
        let least = |a: Option<i64>, b: Option<i64>| a.into_iter().chain(b).min();
        self.values = self.values.saturating_add(other.values);
        self.min_id = least(self.min_id, other.min_id);
        self.max_id = self.max_id.max(other.max_id);
        self.max_length = self.max_length.max(other.max_length);
    }

    /// Returns whether the ids and lengths of other samples are between those of these samples.
    pub(super) fn contains_ends(&self, other: &Self) -> bool {
        let mut both = *self;
        both.merge(other);
        both == Self { values: both.values, ..*self }
    }
}

impl RowGroupStatistics {
    /// Adds the statistics of other samples.
    pub(crate) fn merge(&mut self, other: Self) {
        self.features.resize(self.features.len().max(other.features.len()), FeatureStatistics::default());
        self.features.iter_mut().zip(&other.features).for_each(|(all, next)| all.merge(next));
        self.dense.resize(self.dense.len().max(other.dense.len()), DenseStatistics::default());
        self.dense.iter_mut().zip(&other.dense).for_each(|(all, next)| all.merge(next));
    }
}

impl SampleStatistics {
    /// Creates the statistics of zero samples with `schema`.
    pub(crate) fn none(schema: &Schema) -> Self {
        let features =
            schema.sparse_features().map(|feature| (feature.name.clone(), FeatureStatistics::default()));
        let dense = schema.dense.iter().map(|name| (name.clone(), DenseStatistics::default()));
        Self { features: features.collect(), dense: dense.collect() }
    }

    /// Adds the statistics of other samples.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (name, feature) in &other.features {
            self.features.entry(name.clone()).or_default().merge(feature);
        }
        for (name, dense) in &other.dense {
            self.dense.entry(name.clone()).or_default().merge(dense);
        }
    }
}
