//! Computes the normalization of dense features from their statistics.

use std::collections::BTreeMap;
use std::path::Path;

use onefold_datasets::{DENSE_QUANTILES, DenseStatistics, PartitionFilter, Schema, Snapshot};
use onefold_ikjt::load_statistics;
use onefold_ikjt::preprocess::Preprocessor;
use serde::{Deserialize, Serialize};

use crate::config::Normalization;
use crate::{Error, Result, TrainConfig};

/// The normalization of a dense feature. Its numbers are single-precision, like the model's; JSON stores them
/// exactly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "normalize", deny_unknown_fields)]
pub enum Normalizer {
    /// `(x - mean) / deviation`.
    Standard {
        /// The mean of the training samples.
        mean: f32,
        /// The standard deviation of the training samples; 1 if all are equal.
        deviation: f32,
    },
    /// `(sign(x) ln(1 + |x|) - mean) / deviation`.
    Log1p {
        /// The mean of the logarithms.
        mean: f32,
        /// The standard deviation of the logarithms; 1 if all are equal.
        deviation: f32,
    },
    /// `√3 (2 F(x) - 1)`, where F interpolates linearly between the quantiles, from 0 to 1. Where several
    /// quantiles are equal, F is the middle of their range. Outside the range of the quantiles, F continues
    /// linearly with slope `1 / (max - min)`, and is clamped to -1 and 2, so that values outside the training
    /// range remain distinguishable.
    Quantile {
        /// The quantiles 0, 1/16, … 1, in ascending order.
        quantiles: [f32; DENSE_QUANTILES],
    },
}

/// The normalizations of a model's dense features, by name; features without an entry are not normalized.
pub type Normalizers = BTreeMap<String, Normalizer>;

impl Normalizer {
    /// Creates a normalizer from the statistics of the training samples; `None` if the feature is not
    /// normalized.
    fn fit(normalization: Normalization, statistics: &DenseStatistics) -> Option<Self> {
        let deviation = |variance: f64| if variance > 0.0 { variance.sqrt() as f32 } else { 1.0 };
        match normalization {
            Normalization::None => None,
            Normalization::Standard => {
                let (mean, deviation) = (statistics.mean() as f32, deviation(statistics.variance()));
                Some(Self::Standard { mean, deviation })
            }
            Normalization::Log1p => {
                let (mean, deviation) = (statistics.log_mean() as f32, deviation(statistics.log_variance()));
                Some(Self::Log1p { mean, deviation })
            }
            Normalization::Quantile => Some(Self::Quantile { quantiles: statistics.quantiles() }),
        }
    }

    /// Returns the normalized value of the feature; NaN for NaN.
    pub fn apply(&self, x: f32) -> f32 {
        match self {
            Self::Standard { mean, deviation } => (x - mean) * (1.0 / deviation),
            Self::Log1p { mean, deviation } => (x.abs().ln_1p().copysign(x) - mean) * (1.0 / deviation),
            Self::Quantile { .. } if x.is_nan() => x,
            Self::Quantile { quantiles } => {
                let pieces = (DENSE_QUANTILES - 1) as f32;
                let below = quantiles.partition_point(|quantile| *quantile < x);
                let equal = quantiles[below..].partition_point(|quantile| *quantile == x);
                let place = if equal > 0 {
                    // The middle of the quantiles that equal this value.
                    below as f32 + (equal - 1) as f32 / 2.0
                } else if let (Some(last), Some(next)) = (below.checked_sub(1), quantiles.get(below)) {
                    let from = quantiles[last];
                    last as f32 + (x - from) / (next - from)
                } else {
                    let (min, max) = (quantiles[0], quantiles[DENSE_QUANTILES - 1]);
                    let (inside, outside) = if below == 0 { (0.0, x - min) } else { (pieces, x - max) };
                    let range = max - min;
                    inside + if range > 0.0 { pieces * (outside / range).clamp(-1.0, 1.0) } else { 0.0 }
                };
                3.0_f32.sqrt() * (2.0 * place / pieces - 1.0)
            }
        }
    }

    /// Returns the kind of normalization.
    pub fn normalization(&self) -> Normalization {
        match self {
            Self::Standard { .. } => Normalization::Standard,
            Self::Log1p { .. } => Normalization::Log1p,
            Self::Quantile { .. } => Normalization::Quantile,
        }
    }
}

/// Creates the normalizers that `config` asks for, from the statistics of the samples in `partitions` of
/// `dataset`. `schema` is the schema of the batches, after the steps of `preprocessor`.
///
/// # Errors
///
/// [`Error::Fault`] if a normalization is configured for a feature that preprocessing creates or changes; [`Error::Read`] if the statistics cannot be read.
pub(crate) fn fit(
    config: &TrainConfig,
    (dataset, snapshot, partitions): (&Path, &Snapshot, &PartitionFilter),
    schema: &Schema,
    preprocessor: Option<&Preprocessor>,
) -> Result<Normalizers> {
    let statistics = load_statistics(dataset, snapshot, partitions)?;
    let unchanged = preprocessor.map_or_else(|| schema.dense.clone(), Preprocessor::unchanged_dense);
    let mut normalizers = Normalizers::new();
    for name in &schema.dense {
        let asked = config.dense.of_feature(name).filter(|asked| *asked != Normalization::None);
        let known = statistics.dense.get(name).filter(|_| unchanged.contains(name));
        if let (Some(asked), None) = (asked, known) {
            return Err(Error::config(
                config.path(),
                format!(
                    "`{name}` cannot be normalized by `{asked}`, because a step of the preprocessing makes or changes it"
                ),
                format!(
                    "normalize it by steps (`clamp`, `log1p`, `boxcox`): `{name} = \"none\"` under `[dense.features]`"
                ),
            ));
        }
        let chosen = config.dense.of_feature(name).unwrap_or_default();
        let values = known.filter(|statistics| statistics.finite() > 0);
        let normalizer = values.and_then(|statistics| Normalizer::fit(chosen, statistics));
        normalizers.extend(normalizer.map(|normalizer| (name.clone(), normalizer)));
    }
    Ok(normalizers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_have_a_deviation_of_one() {
        let fit =
            |normalization, values: &[f32]| Normalizer::fit(normalization, &DenseStatistics::of([values]));
        let standard = |deviation| Some(Normalizer::Standard { mean: 4.0, deviation });
        assert_eq!(fit(Normalization::Standard, &[4.0; 3]), standard(1.0));
        assert_eq!(fit(Normalization::Standard, &[2.0, 6.0]), standard(2.0));
        let mean = 4.0_f64.ln_1p() as f32;
        assert_eq!(fit(Normalization::Log1p, &[4.0; 3]), Some(Normalizer::Log1p { mean, deviation: 1.0 }));
        assert_eq!(fit(Normalization::None, &[4.0; 3]), None);
        let quantile = fit(Normalization::Quantile, &[4.0; 3]).unwrap();
        assert_eq!(quantile.normalization(), Normalization::Quantile);
        let json = serde_json::to_string(&quantile).unwrap();
        assert!(json.starts_with(r#"{"normalize":"quantile","quantiles":[4.0,"#), "{json}");
        assert_eq!(serde_json::from_str::<Normalizer>(&json).unwrap(), quantile);
    }
}
