//! NeuroShard's network, as a correction of the linear part of a learned cost model.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cost::linear::LinearModel;
use crate::nn::Mlp;

/// A network over the shards of a rank: each shard is encoded separately, the codes are summed, and a head predicts
/// from the sum.
///
/// The times of shards span five orders of magnitude, which is hard for a network and easy for a product. So the code
/// of a shard is multiplied by its work, and the head predicts a correction that is added to the sum of the work. The
/// network thus learns the cost per unit of work, which has one order of magnitude.
///
/// If a rank has more work than any measured one, its cost is extrapolated in proportion: the sum is scaled down to
/// the largest measured work, and the prediction is scaled up again. The smallest measured time per unit of work is a
/// lower bound for predictions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Network {
    /// The indices of features of which the encoder sees ln(1 + x).
    pub(crate) amounts: Range<usize>,
    /// The mean and standard deviation, over the training samples, of every feature as the encoder sees it.
    pub(crate) mean: Vec<f64>,
    pub(crate) deviation: Vec<f64>,
    /// The unit of the network's output, in milliseconds.
    pub(crate) scale_ms: f64,
    /// The smallest measured time per unit of work, 0 to 1.
    pub(crate) least_output: f64,
    /// The largest work of a measured rank, in milliseconds.
    pub(crate) most_work_ms: f64,
    pub(crate) encoder: Mlp,
    pub(crate) head: Mlp,
}

impl Network {
    /// Returns the features of a shard as the encoder sees them.
    pub(crate) fn normalise(&self, features: &[f64]) -> Vec<f32> {
        let seen = features.iter().enumerate().map(|(i, x)| seen(&self.amounts, i, *x));
        let scaled = seen.zip(&self.mean).zip(&self.deviation);
        scaled.map(|((x, mean), deviation)| ((x - mean) / deviation) as f32).collect()
    }

    /// Returns the correction of the time of a rank with these shards, and the least correction that measured times
    /// allow, in milliseconds. Both are 0 without shards.
    pub(crate) fn corrections_ms(&self, linear: &LinearModel, shards: &[Vec<f64>]) -> [f64; 2] {
        if shards.is_empty() {
            return [0.0, 0.0];
        }
        let mut outputs = Vec::new();
        let mut sum = vec![0.0f32; self.head.layers.first().map_or(0, |layer| layer.inputs)];
        let mut all_work_ms = 0.0;
        for features in shards {
            let work_ms = linear.work_ms(features);
            all_work_ms += work_ms;
            self.encoder.forward(&self.normalise(features), &mut outputs);
            let (code, work) = (outputs.last().map_or(&[][..], Vec::as_slice), work_ms / self.scale_ms);
            sum.iter_mut().zip(code).for_each(|(sum, code)| *sum += code * work as f32);
        }
        let beyond = (all_work_ms / self.most_work_ms).max(1.0);
        sum.iter_mut().for_each(|sum| *sum /= beyond as f32);
        self.head.forward(&sum, &mut outputs);
        let output = outputs.last().and_then(|output| output.first()).copied().unwrap_or_default();
        [f64::from(output) * self.scale_ms * beyond, (self.least_output - 1.0) * all_work_ms]
    }

    /// Returns the correction of the time of a rank with these shards, in milliseconds.
    pub(crate) fn correction_ms(&self, linear: &LinearModel, shards: &[Vec<f64>]) -> f64 {
        let [correction_ms, least_ms] = self.corrections_ms(linear, shards);
        correction_ms.max(least_ms)
    }

    /// Returns the problem of a network that was read from a file and must have `features` features, if there is one.
    pub(crate) fn fault(&self, features: usize) -> Option<String> {
        let columns = [&self.mean, &self.deviation];
        if columns.iter().any(|column| column.len() != features) || self.amounts.end > features {
            return Some(format!("its normalisation is not of {features} features"));
        }
        let divisors = || self.deviation.iter().chain([&self.scale_ms, &self.most_work_ms]);
        let is_finite = self.mean.iter().chain(divisors()).all(|x| x.is_finite());
        if !is_finite || divisors().any(|x| *x <= 0.0) || !(0.0..=1.0).contains(&self.least_output) {
            return Some("its normalisation has numbers that cannot be".to_owned());
        }
        let code = self.head.layers.first().map_or(0, |layer| layer.inputs);
        self.encoder.fault(features, code).or_else(|| self.head.fault(code, 1))
    }
}

/// Returns a feature as the encoder sees it.
pub(crate) fn seen(amounts: &Range<usize>, place: usize, value: f64) -> f64 {
    if amounts.contains(&place) { value.max(0.0).ln_1p() } else { value }
}
