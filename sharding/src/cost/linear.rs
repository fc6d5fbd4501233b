//! The linear part of a learned cost model, which predicts the time of a set of items.

use serde::{Deserialize, Serialize};

use crate::cost::features::AskedFeatures;

/// The number of features of a rank in an exchange: see [`exchange_features`].
pub(crate) const EXCHANGE_FEATURES: usize = 4;
/// The indices of these features to which the time is proportional: the bytes.
pub(crate) const EXCHANGE_WORK: [usize; 3] = [0, 1, 2];

/// A linear model with non-negative weights of the time of a set of items, such as the shards of a rank.
///
/// The **work** of an item is a weighted sum of the features to which its time is proportional. The time of a set is
/// the sum of its items' work, the requests of its rank, and a constant. So a step with twice as many samples costs
/// about twice as much, even outside of the measured range.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinearModel {
    /// The smallest and the largest value of every feature in the measured samples.
    pub(crate) least: Vec<f64>,
    pub(crate) most: Vec<f64>,
    /// The number of items of the largest measured set.
    pub(crate) most_items: usize,
    /// The longest measured time of a set, in milliseconds.
    pub(crate) most_ms: f64,
    /// Milliseconds per unit of every feature of an item, followed by the milliseconds of an item.
    pub(crate) work: Vec<f64>,
    /// Milliseconds per unit of the values of [`AskedFeatures`].
    pub(crate) asked: Vec<f64>,
    /// The time of a rank that has no items and sends no requests, in milliseconds.
    pub(crate) fixed: f64,
}

impl LinearModel {
    /// Returns the work of an item, in milliseconds.
    pub(crate) fn work_ms(&self, features: &[f64]) -> f64 {
        let Some((constant, weights)) = self.work.split_last() else { return 0.0 };
        features.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() + constant
    }

    /// Returns the time of a rank's requests, in milliseconds.
    pub(crate) fn asked_ms(&self, asked: &AskedFeatures) -> f64 {
        self.asked.iter().zip(asked.values()).map(|(weight, value)| weight * value).sum()
    }

    /// Returns the time of a set with the requests of its rank, in milliseconds.
    pub(crate) fn predict_ms(&self, items: &[Vec<f64>], asked: &AskedFeatures) -> f64 {
        items.iter().map(|item| self.work_ms(item)).sum::<f64>() + self.asked_ms(asked) + self.fixed
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

    /// Returns the problem of a model that was read from a file and must have `features` features, if there is one.
    pub(crate) fn fault(&self, features: usize) -> Option<String> {
        let range = [&self.least, &self.most];
        if range.iter().any(|values| values.len() != features || values.iter().any(|x| !x.is_finite())) {
            return Some(format!("its measured range is not of {features} features"));
        }
        let is_weight = |weight: &f64| weight.is_finite() && *weight >= 0.0;
        if self.work.len() != features + 1 || !self.work.iter().all(is_weight) {
            return Some(format!("its work is not {} weights of at least 0", features + 1));
        }
        if self.asked.len() != AskedFeatures::COUNT || !self.asked.iter().chain([&self.fixed]).all(is_weight)
        {
            let count = AskedFeatures::COUNT;
            return Some(format!("its weights of requests are not {count} numbers of at least 0"));
        }
        None
    }
}

/// Returns the features of each rank in an exchange, for any number of ranks: the bytes that the rank, the busiest
/// rank and the average rank send (in MB), and log2 of the number of ranks. A model predicts the time from the start
/// of the last rank; before that, a rank [waits](waiting_ms).
///
/// NeuroShard has one network per number of devices, which sees the dimension sums and start times of all devices in
/// order. These features instead do not depend on the numbering of the ranks, and one model covers every measured
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
