//! The network of a learned cost model, which predicts from a set of items.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cost::features::AskedFeatures;
use crate::nn::Mlp;

/// The number of features of a rank in an exchange: see [`exchange_features`].
pub(crate) const EXCHANGE_FEATURES: usize = 4;
/// The indices of these features to which the time is proportional: the bytes.
pub(crate) const EXCHANGE_WORK: [usize; 3] = [0, 1, 2];

/// A network over a set of items: each item is encoded separately, the codes are summed, and a head predicts from the
/// sum.
///
/// The times of items span five orders of magnitude, which is hard for a network and easy for a product. So the code
/// of an item is multiplied by its **work**, a weighted sum of the features to which its time is proportional, and
/// the head predicts a correction that is added to the sum of the work. The network thus learns the cost per unit of
/// work, which has one order of magnitude, and a step with twice as many samples costs about twice as much even
/// outside of the measured range. Without weights, the work is 1 and the correction is the whole prediction: this is
/// NeuroShard's network.
///
/// If a set has more work than any measured set, its cost is extrapolated in proportion: the set is scaled down to
/// the largest measured work, and the prediction is scaled up again.
///
/// The constant cost of a rank's step and the requests of a rank have separate weights and are added at the end. The
/// smallest measured time per unit of work is a lower bound for predictions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetModel {
    /// The indices of features of which the encoder sees ln(1 + x).
    #[serde(default, skip_serializing_if = "Range::is_empty")]
    pub(crate) amounts: Range<usize>,
    /// The mean and standard deviation, over the training samples, of every feature as the encoder sees it.
    pub(crate) mean: Vec<f64>,
    pub(crate) deviation: Vec<f64>,
    /// The smallest and the largest value of every feature in the training samples.
    pub(crate) least: Vec<f64>,
    pub(crate) most: Vec<f64>,
    /// The number of items of the largest training set.
    pub(crate) most_items: usize,
    /// The largest measured time of a training sample, in milliseconds.
    pub(crate) most_ms: f64,
    /// The unit of the network's output, in milliseconds.
    pub(crate) scale_ms: f64,
    /// The weight of every feature in the work of an item, followed by a constant; empty if all work is 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) work: Vec<f64>,
    /// The weights of the values of [`AskedFeatures`]; empty if there are no requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) asked: Vec<f64>,
    /// The output for a rank that has no items and sends no requests.
    #[serde(default)]
    pub(crate) fixed: f64,
    /// The smallest measured output per unit of work, 0 to 1.
    #[serde(default)]
    pub(crate) least_output: f64,
    /// The largest work of a measured set; 0 if all work is 1.
    #[serde(default)]
    pub(crate) most_work: f64,
    pub(crate) encoder: Mlp,
    pub(crate) head: Mlp,
}

impl SetModel {
    /// Computes the code of one item from its features, as the last of `outputs`.
    pub(crate) fn encode(&self, features: &[f64], outputs: &mut Vec<Vec<f32>>) {
        self.encoder.forward(&self.normalise(features), outputs);
        let work = self.work(features);
        outputs.last_mut().into_iter().flatten().for_each(|code| *code *= work);
    }

    /// Returns the work of an item.
    pub(crate) fn work(&self, features: &[f64]) -> f32 {
        let Some((constant, weights)) = self.work.split_last() else { return 1.0 };
        (features.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + constant) as f32
    }

    pub(crate) fn normalise(&self, features: &[f64]) -> Vec<f32> {
        let seen = features.iter().enumerate().map(|(i, x)| seen(&self.amounts, i, *x));
        let scaled = seen.zip(&self.mean).zip(&self.deviation);
        scaled.map(|((x, mean), deviation)| ((x - mean) / deviation) as f32).collect()
    }

    /// Returns the time of a set in milliseconds, with the requests of its rank. This is the direct computation,
    /// without contributions.
    pub(crate) fn predict_ms(&self, items: &[Vec<f64>], asked: &AskedFeatures) -> f64 {
        self.ms(self.output(items), asked)
    }

    /// Returns the time for the [`output`](Self::output) of a set, in milliseconds.
    pub(crate) fn ms(&self, (output, work): (f64, f64), asked: &AskedFeatures) -> f64 {
        (output.max(self.least_output * work).max(0.0) + self.asked_work(asked) + self.fixed) * self.scale_ms
    }

    /// Returns the output of the network for a set, and the work of the set, both in units of `scale_ms`.
    pub(crate) fn output(&self, items: &[Vec<f64>]) -> (f64, f64) {
        if items.is_empty() {
            return (0.0, 0.0);
        }
        let mut outputs = Vec::new();
        let mut sum = vec![0.0f32; self.head.layers.first().map_or(0, |layer| layer.inputs)];
        let mut work = 0.0;
        for item in items {
            work += self.added_work(item);
            self.encode(item, &mut outputs);
            let code = outputs.last().map_or(&[][..], Vec::as_slice);
            sum.iter_mut().zip(code).for_each(|(sum, code)| *sum += code);
        }
        let beyond = self.beyond_measured(work);
        sum.iter_mut().for_each(|sum| *sum /= beyond as f32);
        self.head.forward(&sum, &mut outputs);
        let output = outputs.last().and_then(|output| output.first()).copied().unwrap_or_default();
        (f64::from(output) * beyond + work, work)
    }

    /// Returns the work of a set ÷ the largest measured work, at least 1.
    pub(crate) fn beyond_measured(&self, work: f64) -> f64 {
        if self.most_work > 0.0 { (work / self.most_work).max(1.0) } else { 1.0 }
    }

    /// Returns the cost of a rank's requests, in units of `scale_ms`.
    pub(crate) fn asked_work(&self, asked: &AskedFeatures) -> f64 {
        self.asked.iter().zip(asked.values()).map(|(weight, value)| weight * value).sum()
    }

    /// Returns the work that an item adds to the output of the head.
    pub(crate) fn added_work(&self, features: &[f64]) -> f64 {
        if self.work.is_empty() { 0.0 } else { f64::from(self.work(features)) }
    }

    /// Returns the features outside of the measured range, with a tolerance of a hundredth of the range.
    pub(crate) fn beyond(&self, features: &[f64]) -> Vec<usize> {
        let outside = |i: &usize| {
            let (x, least, most) = (features[*i], self.least[*i], self.most[*i]);
            let spare = 0.01 * (most - least) + 1e-9;
            x < least - spare || x > most + spare
        };
        (0..features.len().min(self.least.len())).filter(outside).collect()
    }

    pub(crate) fn fault(&self, features: usize) -> Option<String> {
        let columns = [&self.mean, &self.deviation, &self.least, &self.most];
        if columns.iter().any(|column| column.len() != features) {
            return Some(format!("its normalisation is not of {features} features"));
        }
        if self.amounts.end > features {
            return Some(format!("its amounts are not among {features} features"));
        }
        let finite = columns.iter().all(|column| column.iter().all(|x| x.is_finite()));
        if !finite || self.deviation.iter().any(|x| *x <= 0.0) || !self.scale_ms.is_finite() {
            return Some("its normalisation holds numbers that cannot be".to_owned());
        }
        if !self.work.is_empty()
            && (self.work.len() != features + 1 || self.work.iter().any(|w| !w.is_finite() || *w < 0.0))
        {
            return Some(format!("its work is not {} weights of at least 0", features + 1));
        }
        if !(self.asked.is_empty() || self.asked.len() == AskedFeatures::COUNT)
            || self
                .asked
                .iter()
                .chain([&self.fixed, &self.least_output, &self.most_work])
                .any(|w| !w.is_finite() || *w < 0.0)
        {
            return Some(format!(
                "its weights of what is asked are not {} of at least 0",
                AskedFeatures::COUNT
            ));
        }
        let code = self.head.layers.first().map_or(0, |layer| layer.inputs);
        if self.head.layers.first().is_some_and(|layer| layer.outputs % 4 != 0) {
            return Some("its head's width is no multiple of 4".to_owned());
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

/// Returns the features of each rank in an exchange, for any number of ranks: the bytes that the rank, the busiest
/// rank and the average rank send (in MB), and log2 of the number of ranks. The network predicts the time from the
/// start of the last rank; before that, a rank [waits](waiting_ms).
///
/// NeuroShard has one network per number of devices, which sees the dimension sums and start times of all devices in
/// order. These features instead do not depend on the numbering of the ranks, and one network covers every measured
/// number of ranks.
pub(crate) fn exchange_features(bytes: &[f64]) -> Vec<Vec<f64>> {
    const MB: f64 = 1e6;
    let ranks = bytes.len().max(1) as f64;
    let largest = bytes.iter().copied().fold(0.0, f64::max);
    let mean = bytes.iter().sum::<f64>() / ranks;
    bytes.iter().map(|own| vec![own / MB, largest / MB, mean / MB, ranks.log2()]).collect()
}

/// Returns the time that each rank waits for the last one, given their start times.
pub(crate) fn waiting_ms(starts: &[f64]) -> impl Iterator<Item = f64> {
    let last = starts.iter().copied().fold(0.0, f64::max);
    starts.iter().map(move |start| last - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchange_features_do_not_depend_on_the_ranks_numbers() {
        let ahead = exchange_features(&[1e6, 3e6]);
        let back = exchange_features(&[3e6, 1e6]);
        assert_eq!(ahead, [back[1].clone(), back[0].clone()]);
        assert_eq!(ahead[0], [1.0, 3.0, 2.0, 1.0]);
        assert!(ahead.iter().all(|features| features.len() == EXCHANGE_FEATURES));
        assert_eq!(waiting_ms(&[5.0, 7.0, 6.5]).collect::<Vec<_>>(), [2.0, 0.0, 0.5]);
    }
}
