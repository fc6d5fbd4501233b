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

    /// Computes the code of a shard from its features, as the last of `outputs`.
    pub(crate) fn encode(&self, features: &[f64], work_ms: f64, outputs: &mut Vec<Vec<f32>>) {
        self.encoder.forward(&self.normalise(features), outputs);
        let work = (work_ms / self.scale_ms) as f32;
        outputs.last_mut().into_iter().flatten().for_each(|code| *code *= work);
    }

    /// Returns the work of a rank ÷ the largest measured work, at least 1.
    pub(crate) fn beyond_measured(&self, work_ms: f64) -> f64 {
        (work_ms / self.most_work_ms).max(1.0)
    }

    /// Returns the time of a rank's shards in milliseconds, for an output of the head.
    pub(crate) fn corrected_ms(&self, output: f64, work_ms: f64) -> f64 {
        output * self.scale_ms * self.beyond_measured(work_ms) + work_ms
    }

    /// Returns a time that is at least as long as was measured for so much work.
    pub(crate) fn bounded_ms(&self, corrected_ms: f64, work_ms: f64) -> f64 {
        corrected_ms.max(self.least_output * work_ms).max(0.0)
    }

    /// Returns the time of a rank's shards without the lower bound, and their work, both in milliseconds. This is the
    /// direct computation, without contributions. There must be at least one shard.
    pub(crate) fn predict_ms(&self, linear: &LinearModel, items: &[Vec<f64>]) -> (f64, f64) {
        let mut outputs = Vec::new();
        let mut sum = vec![0.0f32; self.head.layers.first().map_or(0, |layer| layer.inputs)];
        let mut all_work_ms = 0.0;
        for item in items {
            let work_ms = linear.work_ms(item);
            all_work_ms += work_ms;
            self.encode(item, work_ms, &mut outputs);
            let code = outputs.last().map_or(&[][..], Vec::as_slice);
            sum.iter_mut().zip(code).for_each(|(sum, code)| *sum += code);
        }
        let beyond = self.beyond_measured(all_work_ms) as f32;
        sum.iter_mut().for_each(|sum| *sum /= beyond);
        self.head.forward(&sum, &mut outputs);
        let output = outputs.last().and_then(|output| output.first()).copied().unwrap_or_default();
        (self.corrected_ms(f64::from(output), all_work_ms), all_work_ms)
    }

    /// Returns the bounded correction of a rank's time, in milliseconds; 0 without shards.
    pub(crate) fn correction_ms(&self, linear: &LinearModel, items: &[Vec<f64>]) -> f64 {
        if items.is_empty() {
            return 0.0;
        }
        let (corrected_ms, work_ms) = self.predict_ms(linear, items);
        self.bounded_ms(corrected_ms, work_ms) - work_ms
    }

    /// Returns the problem of a network that was read from a file and must have `features` features, if there is one.
    pub(crate) fn fault(&self, features: usize) -> Option<String> {
        let columns = [&self.mean, &self.deviation];
        if columns.iter().any(|column| column.len() != features) || self.amounts.end > features {
            return Some(format!("its normalisation is not of {features} features"));
        }
        let divisors = || self.deviation.iter().chain([&self.scale_ms, &self.most_work_ms]);
        let mut numbers = self.mean.iter().chain(divisors()).chain([&self.least_output]);
        if numbers.any(|x| !x.is_finite()) || divisors().any(|x| *x <= 0.0) {
            return Some("its normalisation has numbers that cannot be".to_owned());
        }
        let code = self.head.layers.first().map_or(0, |layer| layer.inputs);
        if self.head.layers.first().is_some_and(|layer| layer.outputs % 4 != 0) {
            return Some("the width of its head is not a multiple of 4".to_owned());
        }
        if self.head.layers.len() != 2 || self.head.last_relu || !self.encoder.last_relu {
            return Some("its head is not of two layers, or ReLUs are where they should not be".to_owned());
        }
        self.encoder.fault(features, code).or_else(|| self.head.fault(code, 1))
    }
}

/// Returns a feature as the encoder sees it.
pub(crate) fn seen(amounts: &Range<usize>, place: usize, value: f64) -> f64 {
    if amounts.contains(&place) { value.max(0.0).ln_1p() } else { value }
}
