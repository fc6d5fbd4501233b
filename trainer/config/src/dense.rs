//! `[dense]`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// `[dense]`: what happens to dense features before the bottom MLP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseConfig {
    /// How dense features are normalized. If absent, those that the dataset has statistics of are normalized by
    /// [`Normalization::default`], and the others are left as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalize: Option<Normalization>,
    /// The same for single features.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub features: BTreeMap<String, Normalization>,
}

impl DenseConfig {
    /// Whether it is that of a configuration without `[dense]`.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// What is asked for a feature, if anything is.
    pub fn of_feature(&self, feature: &str) -> Option<Normalization> {
        self.features.get(feature).copied().or(self.normalize)
    }
}

/// How a dense feature is normalized, by statistics of the training samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalization {
    /// It is left as it is.
    None,
    /// The mean becomes 0 and the standard deviation 1.
    Standard,
    /// The same of `sign(x) ln(1 + |x|)`.
    Log1p,
    /// The share of training samples with smaller values, which is put between `-√3` and `√3`: a uniform distribution
    /// of mean 0 and standard deviation 1. Values beyond those of training go on from there.
    #[default]
    Quantile,
}

impl std::fmt::Display for Normalization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Standard => "standard",
            Self::Log1p => "log1p",
            Self::Quantile => "quantile",
        })
    }
}
