//! Metrics of a binary task: normalized entropy, AUC, log loss, calibration.

use super::area::Area;
use super::scores::Scores;
use super::{CalibrationBin, Figures, Loss, MetricState};

/// The bound to which TorchRec clamps predictions.
const ETA: f64 = 1e-12;
/// The number of mantissa bits of a logit that select its AUC bucket.
const SCORE_BITS: u32 = 11;
/// The number of mantissa bits for segments; it is smaller because there are many segments.
const SEGMENT_SCORE_BITS: u32 = 8;

/// Streaming metrics of a binary task.
///
/// **NE** is defined as in TorchRec: the cross-entropy of the predictions divided by the cross-entropy of
/// always predicting the mean label, with predictions clamped to `[1e-12, 1 - 1e-12]`, in double precision. A
/// value below 1 is better than predicting the base rate. **AUC** is the probability that a positive sample has
/// a higher logit than a negative one, with ties counting half. Logits are counted in buckets with a relative
/// width of at most 1/2,048, which take 32 KiB for every power of two that occurs; a positive and a negative
/// sample in one bucket count as a tie. Half the fraction of such pairs is the **AUC's error**, an upper bound
/// of the difference from the exact value. **Calibration** is the sum of the predictions divided by the sum of
/// the labels.
#[derive(Debug, Clone)]
pub struct BinaryMetrics {
    samples: u64,
    weight: f64,
    positive: f64,
    predicted: f64,
    entropy: f64,
    scores: Scores,
}

impl Default for BinaryMetrics {
    fn default() -> Self {
        Self::with_bits(SCORE_BITS)
    }
}

impl BinaryMetrics {
    /// Creates metrics without samples.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates metrics without samples that need an eighth of the memory: buckets of logits have a relative
    /// width of up to 1/256.
    pub fn small() -> Self {
        Self::with_bits(SEGMENT_SCORE_BITS)
    }

    /// Returns metrics of the same kind without samples.
    pub(crate) fn emptied(&self) -> Self {
        Self::with_bits(self.scores.bits)
    }

    fn with_bits(bits: u32) -> Self {
        let scores = Scores::new(bits);
        Self { samples: 0, weight: 0.0, positive: 0.0, predicted: 0.0, entropy: 0.0, scores }
    }

    /// Adds a sample with a logit, a label (0 to 1) and a weight.
    pub fn add(&mut self, logit: f32, label: f32, weight: f32) {
        let (label, weight) = (f64::from(label), f64::from(weight));
        let prediction = (1.0 / (1.0 + (-f64::from(logit)).exp())).clamp(ETA, 1.0 - ETA);
        self.samples += 1;
        self.weight += weight;
        self.positive += weight * label;
        self.predicted += weight * prediction;
        self.entropy -= weight * (label * prediction.log2() + (1.0 - label) * (1.0 - prediction).log2());
        self.scores.add(logit, weight * (1.0 - label), weight * label);
    }

    /// Adds the samples of `other`, which must have the same bucket width.
    pub fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        self.weight += other.weight;
        self.positive += other.positive;
        self.predicted += other.predicted;
        self.entropy += other.entropy;
        self.scores.merge(&other.scores);
    }

    /// Returns all metrics.
    pub fn figures(&self) -> Figures {
        let (auc, auc_error) = self.auc().unzip();
        let mean = |sum: f64| (self.weight > 0.0).then(|| sum / self.weight);
        Figures {
            samples: self.samples,
            loss: mean(self.entropy * std::f64::consts::LN_2),
            ne: self.ne(),
            auc,
            auc_error,
            base_rate: mean(self.positive),
            calibration: (self.positive > 0.0).then(|| self.predicted / self.positive),
            ..Figures::default()
        }
    }

    /// Returns the sums, for a checkpoint.
    pub(crate) fn state(&self) -> MetricState {
        let (buckets, weights): (Vec<u32>, Vec<[f64; 2]>) = self.scores.buckets().unzip();
        MetricState {
            samples: self.samples,
            sums: vec![self.weight, self.positive, self.predicted, self.entropy],
            buckets,
            weights: weights.concat(),
        }
    }

    /// Adds the samples of a stored state; returns `None` if it does not fit these metrics.
    pub(crate) fn merge_state(&mut self, state: &MetricState) -> Option<()> {
        let [weight, positive, predicted, entropy] = state.sums.as_slice().try_into().ok()?;
        let scores = self.scores.like(&state.buckets, &state.weights)?;
        self.merge(&Self { samples: state.samples, weight, positive, predicted, entropy, scores });
        Some(())
    }

    /// Returns the normalized entropy; `None` unless there are both positive and negative samples. With one
    /// class, the mean label predicts perfectly, so the divisor is 0. (TorchRec divides by the entropy of its
    /// clamp instead, which gives values with 10 digits.)
    pub fn ne(&self) -> Option<f64> {
        let negative = self.weight - self.positive;
        (self.positive > 0.0 && negative > 0.0).then(|| {
            let rate = (self.positive / self.weight).clamp(ETA, 1.0 - ETA);
            self.entropy / -(self.positive * rate.log2() + negative * (1.0 - rate).log2())
        })
    }

    /// Returns the area under the ROC curve, and an upper bound of its difference from the exact value; `None`
    /// unless there are both positive and negative samples.
    pub fn auc(&self) -> Option<(f64, f64)> {
        let negative = self.weight - self.positive;
        if self.positive <= 0.0 || negative <= 0.0 {
            return None;
        }
        let Area { won, ties, .. } = Area::of(self.scores.buckets().map(|(_, weights)| weights));
        let pairs = self.positive * negative;
        // Each tied pair counts half, but its exact contribution is 0, half or 1.
        Some((won / pairs, ties / 2.0 / pairs))
    }

    /// Divides the samples, sorted by prediction, into up to `bins` bins of equal weight, and returns the mean
    /// prediction and the mean label of each. Samples in one bucket of logits stay together, and are assigned
    /// the prediction in its middle.
    pub fn calibration_bins(&self, bins: usize) -> Vec<CalibrationBin> {
        let (mut all, mut open, mut before) = (Vec::new(), CalibrationBin::default(), 0.0);
        for (bucket, [negatives, positives]) in self.scores.buckets() {
            let weight = negatives + positives;
            open.weight += weight;
            open.prediction += weight * Loss::Bce.prediction(self.scores.middle(bucket));
            open.label += positives;
            let due = (all.len() + 1) as f64 / bins as f64 * self.weight;
            if before + open.weight >= due - 1e-9 * self.weight {
                before += open.weight;
                all.push(std::mem::take(&mut open).of_sums());
            }
        }
        all.extend((open.weight > 0.0).then(|| open.of_sums()));
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn metrics(samples: &[(f32, bool)]) -> BinaryMetrics {
        let mut metrics = BinaryMetrics::new();
        for (logit, label) in samples {
            metrics.add(*logit, f32::from(u8::from(*label)), 1.0);
        }
        metrics
    }

    #[test]
    fn agrees_with_the_definition_on_a_small_case() {
        // Predictions 1/2, 1/2, 0.731…, 0.268…; labels 1, 0, 1, 0.
        let metrics = metrics(&[(0.0, true), (0.0, false), (1.0, true), (-1.0, false)]);
        let entropy = 2.0 + 2.0 * -(1.0 / (1.0 + (-1.0_f64).exp())).log2();
        assert!((metrics.ne().unwrap() - entropy / 4.0).abs() < 1e-9);
        assert!((metrics.figures().loss.unwrap() - entropy / 4.0 * 2.0_f64.ln()).abs() < 1e-9);
        // There are 2 × 2 pairs: three are in order, and one is a tie.
        let figures = metrics.figures();
        assert!((figures.auc.unwrap() - 3.5 / 4.0).abs() < 1e-12);
        assert!((figures.auc_error.unwrap() - 0.5 / 4.0).abs() < 1e-12);
        // The predictions sum to 2, and so do the labels.
        assert!((figures.calibration.unwrap() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn weights_count_as_samples_do() {
        let (mut weighted, mut repeated) = (BinaryMetrics::new(), BinaryMetrics::new());
        for (logit, label, times) in [(0.5, 1.0, 3_u8), (-0.25, 0.0, 2), (0.1, 0.0, 1), (-1.0, 1.0, 2)] {
            weighted.add(logit, label, f32::from(times));
            (0..times).for_each(|_| repeated.add(logit, label, 1.0));
        }
        let (weighted, repeated) = (weighted.figures(), repeated.figures());
        assert_eq!((weighted.samples, repeated.samples), (4, 8));
        let pairs = [
            (weighted.loss, repeated.loss),
            (weighted.ne, repeated.ne),
            (weighted.auc, repeated.auc),
            (weighted.calibration, repeated.calibration),
        ];
        assert!(pairs.iter().all(|(a, b)| (a.unwrap() - b.unwrap()).abs() < 1e-12), "{pairs:?}");
    }

    #[test]
    fn calibration_is_told_by_bins_of_equal_weight() {
        // In the lower half, labels equal the predicted probabilities; in the upper half, they are 0.
        let mut metrics = BinaryMetrics::new();
        for i in 0..1_000 {
            let probability = (i as f32 + 0.5) / 1_000.0;
            let label = if i < 500 { probability } else { 0.0 };
            metrics.add((probability / (1.0 - probability)).ln(), label, 2.0);
        }
        let bins = metrics.calibration_bins(4);
        let close = |a: f64, b: f64| (a - b).abs() < 2e-3;
        assert_eq!(bins.len(), 4);
        assert!(bins.iter().all(|bin| (bin.weight - 500.0).abs() < 10.0), "{bins:?}");
        let predictions: Vec<f64> = bins.iter().map(|bin| bin.prediction).collect();
        let expected = [0.125, 0.375, 0.625, 0.875];
        assert!(predictions.iter().zip(expected).all(|(a, b)| close(*a, b)), "{bins:?}");
        assert!(close(bins[0].label, 0.125) && close(bins[1].label, 0.375), "{bins:?}");
        assert!(bins[2].label < 2e-3 && bins[3].label == 0.0, "{bins:?}");
        // Equal predictions stay together, and every bin has samples.
        assert_eq!(self::metrics(&[(0.5, true), (0.5, false)]).calibration_bins(10).len(), 1);
        assert!(BinaryMetrics::new().calibration_bins(10).is_empty());
    }

    #[test]
    fn one_class_has_neither_ne_nor_auc() {
        for samples in [&[][..], &[(0.3, true)], &[(0.3, false), (-1.0, false)]] {
            let figures = metrics(samples).figures();
            assert_eq!((figures.ne, figures.auc, figures.auc_error), (None, None, None), "{samples:?}");
            assert_eq!(figures.loss.is_some(), !samples.is_empty());
        }
        let both = metrics(&[(0.3, true), (0.1, false)]).figures();
        assert!(both.ne.is_some() && both.auc.is_some());
    }

    proptest! {
        #[test]
        fn parts_merge_to_the_whole_and_survive_a_checkpoint(
            samples in prop::collection::vec((-40.0_f32..40.0, any::<bool>()), 0..100), cut in 0_usize..100
        ) {
            let cut = cut.min(samples.len());
            let mut merged = metrics(&samples[..cut]);
            merged.merge(&metrics(&samples[cut..]));
            let whole = metrics(&samples);
            prop_assert_eq!(merged.samples, whole.samples);
            prop_assert_eq!(merged.auc(), whole.auc());
            prop_assert!((merged.entropy - whole.entropy).abs() < 1e-9 * (1.0 + whole.entropy));
            let mut restored = BinaryMetrics::new();
            restored.merge_state(&whole.state()).unwrap();
            prop_assert_eq!(restored.state(), whole.state());
            prop_assert_eq!(restored.figures(), whole.figures());
        }

        #[test]
        fn auc_differs_from_the_exact_one_by_its_error_at_most(
            samples in prop::collection::vec(((-4.0_f32..4.0).prop_map(round), any::<bool>()), 2..200)
        ) {
            let figures = metrics(&samples).figures();
            prop_assume!(figures.auc.is_some());
            let difference = (figures.auc.unwrap() - exact_auc(&samples)).abs();
            prop_assert!(difference <= figures.auc_error.unwrap() + 1e-9);
        }
    }

    /// Rounds some of the logits, so that some are equal, some share a bucket, and some do neither.
    fn round(logit: f32) -> f32 {
        if logit > 2.0 { (logit * 4.0).round() / 4.0 } else { logit / 64.0 - 1.5 }
    }

    /// Computes the AUC by its definition, over all pairs.
    fn exact_auc(samples: &[(f32, bool)]) -> f64 {
        let of = |label| samples.iter().filter(move |sample| sample.1 == label).map(|sample| sample.0);
        let (mut won, mut pairs) = (0.0, 0.0);
        for positive in of(true) {
            for negative in of(false) {
                won +=
                    if positive > negative { 1.0 } else { f64::from(u8::from(positive == negative)) / 2.0 };
                pairs += 1.0;
            }
        }
        won / pairs
    }

    #[test]
    fn the_error_of_the_auc_is_that_of_logits_close_together() {
        // Rare positives, with all logits in six buckets, as from a model that has learned little more than the
        // base rate.
        let samples: Vec<(f32, bool)> =
            (0..3_000).map(|i| (-3.905 + 5e-3 * i as f32 / 3_000.0, i % 40 == 39)).collect();
        let figures = metrics(&samples).figures();
        let (auc, error) = (figures.auc.unwrap(), figures.auc_error.unwrap());
        let difference = (auc - exact_auc(&samples)).abs();
        assert!(difference > 1e-4 && difference <= error, "{difference} {error}");
        assert!((0.05..0.15).contains(&error), "{error}");
        // The bound is reached if the classes are separated within one bucket.
        let within = [(1.0, false), (1.0001, true)];
        let figures = metrics(&within).figures();
        assert_eq!((exact_auc(&within), figures.auc, figures.auc_error), (1.0, Some(0.5), Some(0.5)));
        // The bound is 0 if no bucket has both classes.
        assert_eq!(metrics(&[(1.0, false), (1.1, true), (-2.0, false)]).figures().auc_error, Some(0.0));
    }
}
