//! Measured sets of items, and their weights in a fit.

use crate::cost::features::AskedFeatures;

/// The squared error of a sample is divided by this power of its time. The value is between 0 (absolute errors,
/// dominated by the longest sets) and 2 (relative errors, dominated by noise).
const TIME_POWER: f64 = 1.5;
/// The least time, as a part of the mean, by which a squared error is divided.
const LEAST_TIME: f64 = 0.01;

/// A set of items and its measured time.
pub(super) struct Sample {
    /// The number of the group of samples that were measured together. A group is never split between training and
    /// test.
    pub(super) group: u64,
    pub(super) items: Vec<Vec<f64>>,
    pub(super) asked: AskedFeatures,
    pub(super) ms: f64,
    pub(super) deduplicated: bool,
}

/// Returns the start of part `part` of `parts` approximately equal parts. No part starts within a group.
pub(super) fn boundary(samples: &[&Sample], part: usize, parts: usize) -> usize {
    let begins = |at: &usize| *at == 0 || samples[*at].group != samples[*at - 1].group;
    (samples.len() * part / parts..samples.len()).find(begins).unwrap_or(samples.len())
}

/// Returns the weights of the samples' squared errors.
pub(super) fn importances(samples: &[&Sample]) -> Vec<f64> {
    let mean_ms = samples.iter().map(|sample| sample.ms).sum::<f64>() / samples.len().max(1) as f64;
    samples.iter().map(|sample| 1.0 / (sample.ms / mean_ms).max(LEAST_TIME).powf(TIME_POWER)).collect()
}
