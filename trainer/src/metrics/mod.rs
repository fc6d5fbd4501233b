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

use bytemuck::{Pod, cast_slice, pod_read_unaligned};
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
    /// Encodes the state: samples, number of sums, number of buckets, sums, buckets, weights.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let lengths = [self.samples, self.sums.len() as u64, self.buckets.len() as u64];
        [
            cast_slice::<_, u8>(&lengths),
            cast_slice(&self.sums),
            cast_slice(&self.buckets),
            cast_slice(&self.weights),
        ]
        .concat()
    }

    /// Decodes a state from the front of `bytes`; returns `None` if it is malformed.
    pub(super) fn from_bytes(bytes: &mut &[u8]) -> Option<Self> {
        fn take<T: Pod>(bytes: &mut &[u8], count: u64) -> Option<Vec<T>> {
            let length = usize::try_from(count).ok()?.checked_mul(size_of::<T>())?;
            let (values, rest) = bytes.split_at_checked(length)?;
            *bytes = rest;
            Some(values.chunks_exact(size_of::<T>()).map(pod_read_unaligned).collect())
        }
        let [samples, sums, buckets]: [u64; 3] = take::<u64>(bytes, 3)?.try_into().ok()?;
        let (sums, weights) = (take(bytes, sums)?, buckets.checked_mul(2)?);
        Some(Self { samples, sums, buckets: take(bytes, buckets)?, weights: take(bytes, weights)? })
    }
}
