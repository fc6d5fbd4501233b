//! Statistics of samples.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{DenseStatistics, Schema};

/// Statistics of a whole dataset.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// Partitions.
    pub partitions: u64,
    /// Data files.
    pub files: u64,
    /// All samples.
    pub samples: u64,
    /// All sessions.
    pub sessions: u64,
    /// Size of all data files.
    pub bytes_on_disk: u64,
    /// Statistics by sparse feature.
    pub features: BTreeMap<String, FeatureStatistics>,
}

/// Statistics of a sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureStatistics {
    /// Ids over all samples, as if every sample carried its list.
    pub values: u64,
    /// The smallest id, if there is any.
    pub min_id: Option<i64>,
    /// The largest id, if there is any.
    pub max_id: Option<i64>,
    /// The length of the longest list.
    pub max_length: u64,
}

/// Statistics of some samples, by feature.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SampleStatistics {
    /// By sparse feature.
    pub features: BTreeMap<String, FeatureStatistics>,
    /// By dense feature.
    pub dense: BTreeMap<String, DenseStatistics>,
}

/// Statistics of the samples of a row group.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowGroupStatistics {
    /// By sparse feature, in the order of the schema.
    pub(crate) features: Vec<FeatureStatistics>,
    /// By dense feature, in the order of the schema.
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
    /// No samples of `schema`.
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
