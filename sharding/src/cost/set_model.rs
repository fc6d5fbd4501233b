//! The networks of a learned cost model: a network over a set of items.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cost::features::AskedFeatures;
use crate::nn::Mlp;

/// Features of a rank in an exchange: see [`exchange_features`].
pub(crate) const EXCHANGE_FEATURES: usize = 4;
/// Those of them that the time grows with in proportion: bytes.
pub(crate) const EXCHANGE_WORK: [usize; 3] = [0, 1, 2];

/// A network over a set of items: each is encoded alone, the codes are summed, and a head predicts from the sum.
///
/// Items' times span five orders of magnitude, which is hard for a network and easy for a product: an item's code is
/// multiplied by its **work**, a weighted sum of what its time grows with in proportion, and the head predicts what is
/// to be added to the sum of the work. The network then learns the cost per unit of work, a number of one order of
/// magnitude, and a step of twice as many samples costs about twice as much even where none was measured. Without
/// weights the work is 1 and nothing is added to it: NeuroShard's network.
///
/// A set of more work than was measured is taken to cost in proportion: as a set of the most work that was, of the same
/// kind, times how much more it is.
///
/// What a step costs a rank without items, and what a rank does to ask for other vectors, have weights of their own and
/// are added at the end. Of what was measured, the least time per unit of work is kept: a set is never predicted to
/// take less.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetModel {
    /// The places of features of which the encoder sees ln(1 + x).
    #[serde(default, skip_serializing_if = "Range::is_empty")]
    pub(crate) amounts: Range<usize>,
    /// Mean and standard deviation of every feature as the encoder sees it, over the training samples.
    pub(crate) mean: Vec<f64>,
    pub(crate) deviation: Vec<f64>,
    /// The smallest and the largest value of every feature.
    pub(crate) least: Vec<f64>,
    pub(crate) most: Vec<f64>,
    /// Items of the largest training set.
    pub(crate) most_items: usize,
    /// The largest measured time of a training sample.
    pub(crate) most_ms: f64,
    /// The network's output is in this many milliseconds.
    pub(crate) scale_ms: f64,
    /// Weight of every feature in an item's work, and what is added; empty if all work is 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) work: Vec<f64>,
    /// Weights of the numbers of [`AskedFeatures`]; empty if nothing is asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) asked: Vec<f64>,
    /// The output for a rank that has no items and asks for nothing.
    #[serde(default)]
    pub(crate) fixed: f64,
    /// The least output per unit of work that was measured, 0 to 1.
    #[serde(default)]
    pub(crate) least_output: f64,
    /// The most work of a set that was measured; 0 if all work is 1.
    #[serde(default)]
    pub(crate) most_work: f64,
    pub(crate) encoder: Mlp,
    pub(crate) head: Mlp,
}

impl SetModel {
    /// The code of one item from its features: the last of `outputs`.
    pub(crate) fn encode(&self, features: &[f64], outputs: &mut Vec<Vec<f32>>) {
        self.encoder.forward(&self.normalise(features), outputs);
        let work = self.work(features);
        outputs.last_mut().into_iter().flatten().for_each(|code| *code *= work);
    }

    /// How much there is to do for an item.
    pub(crate) fn work(&self, features: &[f64]) -> f32 {
        let Some((constant, weights)) = self.work.split_last() else { return 1.0 };
        (features.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + constant) as f32
    }

    pub(crate) fn normalise(&self, features: &[f64]) -> Vec<f32> {
        let seen = features.iter().enumerate().map(|(i, x)| seen(&self.amounts, i, *x));
        let scaled = seen.zip(&self.mean).zip(&self.deviation);
        scaled.map(|((x, mean), deviation)| ((x - mean) / deviation) as f32).collect()
    }

    /// The time of a set, by the plain definition, with what its rank asks for.
    pub(crate) fn predict_ms(&self, items: &[Vec<f64>], asked: &AskedFeatures) -> f64 {
        self.ms(self.output(items), asked)
    }

    /// The same of what [`output`](Self::output) gives for the set.
    pub(crate) fn ms(&self, (output, work): (f64, f64), asked: &AskedFeatures) -> f64 {
        (output.max(self.least_output * work).max(0.0) + self.asked_work(asked) + self.fixed) * self.scale_ms
    }

    /// What the network says of a set, and the set's work; both in units of the scale.
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

    /// How much more a set's work is than the most that was measured, at least 1.
    pub(crate) fn beyond_measured(&self, work: f64) -> f64 {
        if self.most_work > 0.0 { (work / self.most_work).max(1.0) } else { 1.0 }
    }

    /// What is added for what a rank asks for.
    pub(crate) fn asked_work(&self, asked: &AskedFeatures) -> f64 {
        self.asked.iter().zip(asked.values()).map(|(weight, value)| weight * value).sum()
    }

    /// What an item adds to its set's time besides what the head says.
    pub(crate) fn added_work(&self, features: &[f64]) -> f64 {
        if self.work.is_empty() { 0.0 } else { f64::from(self.work(features)) }
    }

    /// Features outside of what was measured, with a hundredth of the range to spare.
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

/// A feature as the encoder sees it.
pub(crate) fn seen(amounts: &Range<usize>, place: usize, value: f64) -> f64 {
    if amounts.contains(&place) { value.max(0.0).ln_1p() } else { value }
}

/// What a network sees of a rank's part in an exchange, the same for any number of ranks: what it sends, what the
/// rank that sends most and the average rank send (MB), and log2 of the ranks. It predicts the time from when the last
/// rank begins; before that, a rank [waits](waiting_ms).
///
/// NeuroShard has a network per number of devices, which sees all of their dimension sums in order, and their starts;
/// this one does not change when ranks are numbered differently, and serves every number that was measured.
pub(crate) fn exchange_features(bytes: &[f64]) -> Vec<Vec<f64>> {
    const MB: f64 = 1e6;
    let ranks = bytes.len().max(1) as f64;
    let largest = bytes.iter().copied().fold(0.0, f64::max);
    let mean = bytes.iter().sum::<f64>() / ranks;
    bytes.iter().map(|own| vec![own / MB, largest / MB, mean / MB, ranks.log2()]).collect()
}

/// How long each rank waits for the last one, of those that begin at these times.
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
