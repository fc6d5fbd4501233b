//! Metrics of a model's tasks: streaming metrics in constant memory, and ranking metrics.

mod area;
mod binary;
mod exact;
mod groups;
mod ranking;
mod regression;
mod scores;
mod segments;
mod tasks;

use serde::Serialize;

pub use self::binary::BinaryMetrics;
pub(crate) use self::exact::ExactScores;
pub(crate) use self::groups::GroupedScores;
pub use self::ranking::Ranking;
use self::ranking::RankingSums;
pub use self::regression::RegressionMetrics;
pub use self::segments::{Segment, SegmentMetrics};
pub use self::tasks::{Metrics, Task, TaskMetrics};
pub use crate::config::Loss;

/// The metrics of a task, as they are logged. Metrics that are not defined for the task's loss are `None`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Figures {
    /// The number of samples.
    pub samples: u64,
    /// The mean loss; cross-entropy in nats for a binary task.
    pub loss: Option<f64>,
    /// Binary tasks: the normalized entropy.
    pub ne: Option<f64>,
    /// Binary tasks: the area under the ROC curve.
    pub auc: Option<f64>,
    /// Binary tasks: an upper bound of the difference between `auc` and the exact value.
    pub auc_error: Option<f64>,
    /// Binary tasks: the mean label.
    pub base_rate: Option<f64>,
    /// The sum of the predictions divided by the sum of the labels.
    pub calibration: Option<f64>,
    /// Numbers and counts: the mean label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_label: Option<f64>,
    /// Numbers and counts: the root mean squared error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rmse: Option<f64>,
    /// Numbers and counts: the mean absolute error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mae: Option<f64>,
    /// Numbers and counts: the fraction of the labels' variance that the predictions explain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r2: Option<f64>,
    /// Counts: the mean Poisson deviance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deviance: Option<f64>,
    /// Binary tasks, only in evaluations: predictions and labels by bins, from low to high predictions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calibration_bins: Vec<CalibrationBin>,
    /// Ranking metrics, only in evaluations with a `group`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranking: Option<Ranking>,
}

impl Figures {
    /// Returns the name and value of all numeric metrics, except the number of samples.
    pub fn named(&self) -> impl Iterator<Item = (&str, f64)> {
        let all = [
            ("loss", self.loss),
            ("ne", self.ne),
            ("auc", self.auc),
            ("auc_error", self.auc_error),
            ("base_rate", self.base_rate),
            ("calibration", self.calibration),
            ("mean_label", self.mean_label),
            ("rmse", self.rmse),
            ("mae", self.mae),
            ("r2", self.r2),
            ("deviance", self.deviance),
        ];
        let ranking = self.ranking.iter().flat_map(|ranking| &ranking.figures);
        let ranking = ranking.map(|(name, value)| (name.as_str(), *value));
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).chain(ranking)
    }
}

/// A bin of samples with similar predictions.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct CalibrationBin {
    /// The sum of the samples' weights; their number if there are no weights.
    pub weight: f64,
    /// The mean prediction.
    pub prediction: f64,
    /// The mean label.
    pub label: f64,
}

impl CalibrationBin {
    /// Converts sums of predictions and labels to means.
    fn of_sums(self) -> Self {
        let Self { weight, prediction, label } = self;
        Self { weight, prediction: prediction / weight, label: label / weight }
    }
}

/// The sums of a task's metrics, for a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MetricState {
    pub(crate) samples: u64,
    /// For a binary task: weight, weight of the positive samples, sum of predictions, entropy in bits.
    pub(crate) sums: Vec<f64>,
    pub(crate) buckets: Vec<u32>,
    /// The weights of negative and positive samples, by bucket.
    pub(crate) weights: Vec<f64>,
}

impl MetricState {
    /// Encodes the state: samples, number of sums, sums, number of buckets, buckets, weights.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.samples.to_le_bytes().to_vec();
        bytes.extend((self.sums.len() as u64).to_le_bytes());
        bytes.extend(self.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes.extend((self.buckets.len() as u64).to_le_bytes());
        bytes.extend(self.buckets.iter().flat_map(|bucket| bucket.to_le_bytes()));
        bytes.extend(self.weights.iter().flat_map(|weight| weight.to_le_bytes()));
        bytes
    }

    /// Decodes a state from the front of `bytes`; returns `None` if it is malformed.
    pub(super) fn from_bytes(bytes: &mut &[u8]) -> Option<Self> {
        fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
            let (value, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(*value)
        }
        let samples = u64::from_le_bytes(take(bytes)?);
        let count = |bytes: &mut &[u8], size| {
            let count = usize::try_from(u64::from_le_bytes(take(bytes)?)).ok()?;
            (count <= bytes.len() / size).then_some(count)
        };
        let sums = count(bytes, size_of::<f64>())?;
        let sums = (0..sums).map(|_| take(bytes).map(f64::from_le_bytes)).collect::<Option<_>>()?;
        let count = count(bytes, size_of::<u32>())?;
        let buckets = (0..count).map(|_| take(bytes).map(u32::from_le_bytes)).collect::<Option<_>>()?;
        let weights = (0..2 * count).map(|_| take(bytes).map(f64::from_le_bytes)).collect::<Option<_>>()?;
        Some(Self { samples, sums, buckets, weights })
    }
}
