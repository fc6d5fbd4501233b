//! Metrics of a task that predicts a number or a count.

use super::{Figures, Loss, MetricState};

/// Streaming metrics of a task that predicts a number or a count.
///
/// **RMSE** and **MAE** are errors of the predictions, which are expected counts for a Poisson loss. **R²** is
/// 1 minus the squared error divided by the squared error of always predicting the mean label. **Deviance** is
/// the mean Poisson deviance. **Calibration** is the sum of the predictions divided by the sum of the labels,
/// if labels are never negative.
#[derive(Debug, Clone, PartialEq)]
pub struct RegressionMetrics {
    loss: Loss,
    samples: u64,
    sums: Sums,
}

/// Sums over samples, weighted by the samples' weights: weight, loss, label, squared label, prediction, absolute
/// error, squared error, deviance.
type Sums = [f64; 8];

impl RegressionMetrics {
    /// Creates metrics without samples.
    pub fn new(loss: Loss) -> Self {
        Self { loss, samples: 0, sums: Sums::default() }
    }

    /// Returns metrics of the same kind without samples.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.loss)
    }

    /// Adds a sample with a logit, a label and a weight.
    pub fn add(&mut self, logit: f32, label: f32, weight: f32) {
        let (loss, prediction) = (self.loss.of_sample(logit, label), self.loss.prediction(logit));
        let (label, weight) = (f64::from(label), f64::from(weight));
        let error = prediction - label;
        let deviance = match self.loss {
            // y ln(y / p) is 0 if y is 0; the logarithm of p is the logit.
            Loss::Poisson if label > 0.0 => 2.0 * (label * (label.ln() - f64::from(logit)) + error),
            Loss::Poisson => 2.0 * error,
            _ => 0.0,
        };
        self.samples += 1;
        self.add_sums([
            weight,
            weight * loss,
            weight * label,
            weight * label * label,
            weight * prediction,
            weight * error.abs(),
            weight * error * error,
            weight * deviance,
        ]);
    }

    fn add_sums(&mut self, sums: Sums) {
        self.sums.iter_mut().zip(sums).for_each(|(sum, value)| *sum += value);
    }

    /// Adds the samples of `other`, which must have the same loss.
    pub fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        self.add_sums(other.sums);
    }

    /// Returns all metrics.
    pub fn figures(&self) -> Figures {
        let [weight, loss, label, squared_label, prediction, absolute_error, squared_error, deviance] =
            self.sums;
        let any = self.samples > 0 && weight > 0.0;
        let mean = |sum: f64| any.then(|| sum / weight);
        let spread = squared_label - label * label / weight.max(f64::MIN_POSITIVE);
        Figures {
            samples: self.samples,
            loss: mean(loss),
            mean_label: mean(label),
            rmse: mean(squared_error).map(f64::sqrt),
            mae: mean(absolute_error),
            // If all labels are equal, rounding errors leave a variance of about this size.
            r2: (any && spread > 1e-12 * squared_label).then(|| 1.0 - squared_error / spread),
            deviance: mean(deviance).filter(|_| self.loss == Loss::Poisson),
            calibration: (self.loss.ranks() && label > 0.0).then(|| prediction / label),
            ..Figures::default()
        }
    }

    /// Returns the sums, for a checkpoint.
    pub(crate) fn state(&self) -> MetricState {
        MetricState {
            samples: self.samples,
            sums: self.sums.to_vec(),
            buckets: Vec::new(),
            weights: Vec::new(),
        }
    }

    /// Adds the samples of a stored state; returns `None` if it does not fit these metrics.
    pub(crate) fn merge_state(&mut self, state: &MetricState) -> Option<()> {
        let sums = state.sums.as_slice().try_into().ok()?;
        self.merge(&Self { loss: self.loss, samples: state.samples, sums });
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(loss: Loss, samples: &[(f32, f32, f32)]) -> RegressionMetrics {
        let mut metrics = RegressionMetrics::new(loss);
        samples.iter().for_each(|(logit, label, weight)| metrics.add(*logit, *label, *weight));
        metrics
    }

    #[track_caller]
    fn close(found: Option<f64>, expected: f64) {
        let found = found.unwrap();
        assert!((found - expected).abs() < 1e-9 * (1.0 + expected.abs()), "{found}, expected {expected}");
    }

    /// The expected values are from scikit-learn 1.7:
    /// `root_mean_squared_error([1, 2, 4, -3], [1.5, 2, 3, 1], sample_weight=[1, 2, 1, 1])`, and with the same
    /// arguments `mean_absolute_error` and `r2_score`.
    #[test]
    fn figures_are_those_of_scikit_learn() {
        let samples = [(1.5, 1.0, 1.0), (2.0, 2.0, 2.0), (3.0, 4.0, 1.0), (1.0, -3.0, 1.0)];
        let figures = metrics(Loss::Mse, &samples).figures();
        assert_eq!((figures.samples, figures.ne, figures.auc, figures.calibration), (4, None, None, None));
        close(figures.rmse, (17.25_f64 / 5.0).sqrt());
        close(figures.mae, 5.5 / 5.0);
        close(figures.r2, 1.0 - 17.25 / (34.0 - 36.0 / 5.0));
        close(figures.loss, 17.25 / 5.0);
        close(figures.mean_label, 6.0 / 5.0);
    }

    /// The expected value is from scikit-learn 1.7: `mean_poisson_deviance([0, 1, 3], exp([-1, 0, 1]))`.
    #[test]
    fn counts_have_a_deviance_and_a_calibration() {
        let figures = metrics(Loss::Poisson, &[(-1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 3.0, 1.0)]).figures();
        let (less, e) = ((-1.0_f64).exp(), 1.0_f64.exp());
        close(figures.deviance, 2.0 * (less + 3.0 * (3.0 / e).ln() - (3.0 - e)) / 3.0);
        close(figures.calibration, (less + 1.0 + e) / 4.0);
        close(figures.loss, (less + 1.0 + (e - 3.0)) / 3.0);
    }

    #[test]
    fn equal_labels_have_no_r2_and_nothing_has_no_figure() {
        let figures = metrics(Loss::Mse, &[(1.0, 0.1, 1.0), (2.0, 0.1, 3.0)]).figures();
        assert_eq!((figures.r2, figures.rmse.is_some()), (None, true));
        let figures = metrics(Loss::Huber, &[]).figures();
        assert_eq!((figures.loss, figures.rmse, figures.mae), (None, None, None));
    }

    #[test]
    fn parts_merge_to_the_whole() {
        let samples = [(1.5, 1.0, 1.0), (2.0, 2.0, 2.0), (3.0, 4.0, 1.0)];
        let mut merged = metrics(Loss::Mse, &samples[..1]);
        merged.merge_state(&metrics(Loss::Mse, &samples[1..]).state()).unwrap();
        assert_eq!(merged, metrics(Loss::Mse, &samples));
        assert!(merged.merge_state(&MetricState { sums: vec![0.0; 4], ..merged.state() }).is_none());
    }
}
