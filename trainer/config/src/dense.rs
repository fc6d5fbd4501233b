//! The `[dense]` section of `train.toml`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The `[dense]` section: preprocessing of dense features before the bottom MLP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseConfig {
    /// The normalization of all dense features. If absent, features with statistics in the dataset use
    /// [`Normalization::default`], and the other features are not normalized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalize: Option<Normalization>,
    /// The normalization of individual features, by name; takes precedence over `normalize`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub features: BTreeMap<String, Normalization>,
}

impl DenseConfig {
    /// Returns the normalization that is configured for a feature, or `None` if neither `features` nor
    /// `normalize` sets one.
    pub fn of_feature(&self, feature: &str) -> Option<Normalization> {
        self.features.get(feature).copied().or(self.normalize)
    }
}

/// The normalization of a dense feature, based on statistics of the training samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalization {
    /// No normalization.
    None,
    /// Shifts and scales to mean 0 and standard deviation 1.
    Standard,
    /// Applies `sign(x) ln(1 + |x|)`, then shifts and scales the result to mean 0 and standard deviation 1.
    Log1p,
    /// Replaces a value by the fraction of training samples with smaller values, scaled to `[-√3, √3]`: a
    /// uniform distribution with mean 0 and standard deviation 1. Values outside the training range are
    /// extrapolated.
    #[default]
    Quantile,
}

impl std::fmt::Display for Normalization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&crate::name_of(self))
    }
}
