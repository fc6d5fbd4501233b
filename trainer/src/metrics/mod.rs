//! Metrics of a model's tasks: streaming ones in constant memory, and those of rankings.

mod area;
mod binary;
mod exact;
mod groups;
mod loss;
mod ranking;
mod regression;
mod scores;
mod segments;
mod tasks;

use serde::Serialize;

pub use self::binary::BinaryMetrics;
pub(crate) use self::exact::ExactScores;
pub(crate) use self::groups::GroupedScores;
pub use self::loss::Loss;
pub use self::ranking::Ranking;
use self::ranking::RankingSums;
pub use self::regression::RegressionMetrics;
pub use self::segments::{Segment, SegmentMetrics};
pub use self::tasks::{Metrics, Task, TaskMetrics};

/// The figures of a task, as they are logged. Those that the task's loss does not have are `None`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Figures {
    /// Samples.
    pub samples: u64,
    /// Mean loss; of a binary task, cross-entropy in nats.
    pub loss: Option<f64>,
    /// Binary: normalized entropy.
    pub ne: Option<f64>,
    /// Binary: area under the ROC curve.
    pub auc: Option<f64>,
    /// The most that `auc` can differ from the exact value.
    pub auc_error: Option<f64>,
    /// Binary: the mean label.
    pub base_rate: Option<f64>,
    /// Sum of the predictions ÷ sum of the labels.
    pub calibration: Option<f64>,
    /// Numbers and counts: the mean label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_label: Option<f64>,
    /// Numbers and counts: root of the mean squared error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rmse: Option<f64>,
    /// Numbers and counts: mean absolute error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mae: Option<f64>,
    /// Numbers and counts: the share of the labels' variance that the predictions explain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r2: Option<f64>,
    /// Counts: mean Poisson deviance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deviance: Option<f64>,
    /// Binary, of evaluations: predictions and labels from low predictions to high ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calibration_bins: Vec<CalibrationBin>,
    /// Of evaluations with a `group`: how well its samples are ranked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranking: Option<Ranking>,
}

impl Figures {
    /// All figures by name that are numbers, but for the number of samples.
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

/// Samples whose predictions are close to each other.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct CalibrationBin {
    /// Sum of the samples' weights; their number, where they have none.
    pub weight: f64,
    /// Mean prediction.
    pub prediction: f64,
    /// Mean label.
    pub label: f64,
}

impl CalibrationBin {
    /// Means, where prediction and label are sums.
    fn of_sums(self) -> Self {
        let Self { weight, prediction, label } = self;
        Self { weight, prediction: prediction / weight, label: label / weight }
    }
}

/// The sums of a task's metrics, for a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MetricState {
    pub(crate) samples: u64,
    /// Of a binary task: weight, weight of the positive samples, predictions, entropy in bits.
    pub(crate) sums: Vec<f64>,
    pub(crate) buckets: Vec<u32>,
    /// Of negative and positive samples, by bucket.
    pub(crate) weights: Vec<f64>,
}

impl MetricState {
    /// The state as it is sent: samples, the number of sums, sums, the number of buckets, buckets, weights.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.samples.to_le_bytes().to_vec();
        bytes.extend((self.sums.len() as u64).to_le_bytes());
        bytes.extend(self.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes.extend((self.buckets.len() as u64).to_le_bytes());
        bytes.extend(self.buckets.iter().flat_map(|bucket| bucket.to_le_bytes()));
        bytes.extend(self.weights.iter().flat_map(|weight| weight.to_le_bytes()));
        bytes
    }

    /// Reads a state from the front of `bytes`; `None` if it is malformed.
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
