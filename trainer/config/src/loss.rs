//! The setting `loss` of `[data]` or of an entry of `[[tasks]]`, and the predictions that follow from logits.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The loss of a task, equal to PyTorch's function of the given name without reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// `binary_cross_entropy_with_logits`, for labels from 0 to 1: the logit belongs to the probability that the
    /// label is 1.
    #[default]
    Bce,
    /// `mse_loss`, for any labels: the logit is the prediction.
    Mse,
    /// `huber_loss` (Huber 1964), for any labels: quadratic up to an error of [`HUBER_DELTA`], then linear; the
    /// logit is the prediction.
    Huber,
    /// `poisson_nll_loss` with `log_input`, for labels of at least 0, such as counts: the logit is the logarithm of
    /// the expected count.
    Poisson,
}

/// The error at which [`Loss::Huber`] becomes linear.
pub const HUBER_DELTA: f64 = 1.0;

impl Loss {
    /// Returns the range of valid labels.
    pub fn labels(self) -> RangeInclusive<f32> {
        match self {
            Self::Bce => 0.0..=1.0,
            Self::Mse | Self::Huber => f32::MIN..=f32::MAX,
            Self::Poisson => 0.0..=f32::MAX,
        }
    }

    /// Returns whether labels can express the relevance of a sample, because they are never negative.
    pub fn ranks(self) -> bool {
        *self.labels().start() >= 0.0
    }

    /// Returns the prediction for a logit: a probability, a number, or a count.
    pub fn prediction(self, logit: f32) -> f64 {
        let logit = f64::from(logit);
        match self {
            Self::Bce => 1.0 / (1.0 + (-logit).exp()),
            Self::Mse | Self::Huber => logit,
            Self::Poisson => logit.exp(),
        }
    }

    /// Returns the logit that predicts `mean`, the mean label of `samples` samples. If the mean has no finite
    /// logit, for example because all labels are 0, computes it as if half a sample had a different label.
    pub fn logit_of(self, mean: f64, samples: u64) -> f32 {
        let least = 0.5 / (samples + 1) as f64;
        let logit = match self {
            Self::Bce => {
                let mean = mean.clamp(least, 1.0 - least);
                (mean / (1.0 - mean)).ln()
            }
            Self::Mse | Self::Huber => mean,
            Self::Poisson => mean.max(least).ln(),
        };
        logit as f32
    }

    /// Returns the loss of one sample.
    pub fn of_sample(self, logit: f32, label: f32) -> f64 {
        let (logit, label) = (f64::from(logit), f64::from(label));
        let error = (logit - label).abs();
        match self {
            Self::Bce => logit.max(0.0) - logit * label + (-logit.abs()).exp().ln_1p(),
            Self::Mse => error * error,
            Self::Huber if error <= HUBER_DELTA => error * error / 2.0,
            Self::Huber => HUBER_DELTA * (error - HUBER_DELTA / 2.0),
            Self::Poisson => logit.exp() - label * logit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_has_a_logit() {
        for mean in [0.006, 0.5, 0.9] {
            for loss in [Loss::Bce, Loss::Mse, Loss::Huber, Loss::Poisson] {
                let found = loss.prediction(loss.logit_of(mean, 1000));
                assert!((found - mean).abs() < 1e-6, "{loss:?}: {found}, not {mean}");
            }
        }
        for (mean, expected) in [(0.0, 0.5 / 11.0), (1.0, 10.5 / 11.0)] {
            let found = Loss::Bce.prediction(Loss::Bce.logit_of(mean, 10));
            assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
        }
        assert!(Loss::Poisson.logit_of(0.0, 10).is_finite());
    }

    /// The expected values are from torch 2.11: the functions in `torch.nn.functional` named above, with
    /// `reduction="none"`, in double precision.
    #[test]
    fn losses_are_those_of_pytorch() {
        let cases = [
            (Loss::Bce, 0.75, 0.25, 0.949_371_006_114_899_9),
            (Loss::Bce, -40.0, 1.0, 40.0),
            (Loss::Mse, 2.5, -1.0, 12.25),
            (Loss::Huber, 2.5, 1.5, 0.5),
            (Loss::Huber, 2.5, -1.0, 3.0),
            (Loss::Poisson, 0.5, 3.0, 0.148_721_270_700_128_15),
        ];
        for (loss, logit, label, expected) in cases {
            let found = loss.of_sample(logit, label);
            assert!((found - expected).abs() < 1e-12, "{loss:?}: {found}, expected {expected}");
        }
    }
}
