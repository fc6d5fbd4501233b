//! `sampling`: decides which samples are kept, and corrects their weights.
//!
//! The decision depends on the sample's index in the dataset, its label and the epoch, but not on its batch or on
//! other steps. Therefore the reader drops samples before all other processing.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use onefold_datasets::digest::scramble;

use super::arguments::Arguments;
use super::problem::{Checked, Problem};
use crate::batch::{Batch, BatchParts};

/// The configuration of a `sampling` step.
#[derive(Debug, Clone)]
pub(super) struct Sampling {
    pub(super) rates: Rates,
    pub(super) seed: u64,
    /// Whether the weights of kept samples compensate for the dropped samples.
    pub(super) correct_weights: bool,
}

/// The probability with which a sample is kept.
#[derive(Debug, Clone)]
pub(super) enum Rates {
    /// One probability for all samples.
    Every(f64),
    /// A probability per value of a label; 1 for values that are not listed.
    ByLabel { label: String, keep: Vec<(f32, f64)> },
}

pub(super) fn sampling(arguments: &mut Arguments) -> Checked<Sampling> {
    let label: Option<String> = arguments.optional("label")?;
    let keep: Option<BTreeMap<String, f64>> = arguments.optional("keep")?;
    let rates = match (label, keep, arguments.optional("rate")?) {
        (None, None, Some(rate)) => Rates::Every(checked_rate("rate", rate)?),
        (Some(label), Some(keep), None) => Rates::ByLabel { label, keep: label_rates(&keep)? },
        _ => {
            let hint = "write `label = \"clicked\"` with `keep = { \"0\" = 0.1 }`, or `rate = 0.5`";
            return Err(Problem::new("neither `label` and `keep` nor `rate` alone is given", hint));
        }
    };
    let seed = arguments.optional("seed")?.unwrap_or(0);
    Ok(Sampling { rates, seed, correct_weights: arguments.optional("correct_weights")?.unwrap_or(true) })
}

fn label_rates(keep: &BTreeMap<String, f64>) -> Checked<Vec<(f32, f64)>> {
    let mut rates: Vec<(f32, f64)> = Vec::with_capacity(keep.len());
    for (text, &rate) in keep {
        let value = text.parse::<f32>().ok().filter(|value| !value.is_nan());
        let value = value.filter(|value| rates.iter().all(|(other, _)| other != value)).ok_or_else(|| {
            let message = format!("`keep`: `{text}` is not a number, or is there twice");
            Problem::new(message, "write numbers in quotation marks, as `keep = { \"0\" = 0.1 }`")
        })?;
        rates.push((value, checked_rate(&format!("keep.\"{text}\""), rate)?));
    }
    if rates.is_empty() {
        return Err(Problem::new("`keep` is empty", "give the rate of at least one value of the label"));
    }
    Ok(rates)
}

fn checked_rate(key: &str, rate: f64) -> Checked<f64> {
    if rate > 0.0 && rate <= 1.0 {
        return Ok(rate);
    }
    let hint = "a rate is above 0 and at most 1";
    Err(Problem::new(format!("`{key}` is {rate}, which is not a rate"), hint))
}

impl Rates {
    /// Returns the rate of a sample with this label. The label is ignored if all samples have the same rate.
    pub(super) fn of(&self, label: Option<f32>) -> f64 {
        match self {
            Self::Every(rate) => *rate,
            Self::ByLabel { keep, .. } => {
                keep.iter().find(|(value, _)| Some(*value) == label).map_or(1.0, |(_, rate)| *rate)
            }
        }
    }
}

/// The `sampling` steps of a pipeline.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    steps: Vec<SamplingStep>,
}

#[derive(Debug)]
struct SamplingStep {
    sampling: Sampling,
    /// The index of the label among the schema's labels, if the rate depends on a label.
    label: Option<usize>,
    draws: Draws,
}

impl Sampler {
    /// Adds a step. `label` is the index of the label that its rates depend on.
    pub(super) fn push(&mut self, sampling: Sampling, label: Option<usize>) {
        let draws = Draws::new(sampling.seed, self.steps.len() as u64);
        self.steps.push(SamplingStep { sampling, label, draws });
    }

    /// Returns whether there are no steps.
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the indices of the labels that the decisions depend on, among the schema's labels.
    pub(crate) fn labels(&self) -> impl Iterator<Item = usize> {
        self.steps.iter().filter_map(|step| step.label)
    }

    /// Returns which of `samples` consecutive samples are kept in an epoch, as indices. The first sample has index
    /// `first` in the dataset, and `label(i, sample)` returns label `i` of a sample.
    pub(crate) fn keep(
        &self,
        epoch: u64,
        first: u64,
        samples: usize,
        label: impl Fn(usize, usize) -> f32,
    ) -> Vec<u32> {
        let steps = self.steps.iter().map(|step| (step, step.draws.of_epoch(epoch)));
        let steps: Vec<_> = steps.collect();
        let stays = |sample: &u32| {
            let sample = *sample as usize;
            steps.iter().all(|(step, draws)| {
                let rate = step.sampling.rates.of(step.label.map(|i| label(i, sample)));
                draws.draw(first.wrapping_add(sample as u64)) < rate
            })
        };
        // A row group has fewer than 2^31 samples.
        (0..samples as u32).filter(stays).collect()
    }

    /// Returns the indices of the samples of `batch` that are kept in an epoch, and a batch of these samples with
    /// corrected weights. `first` is the index of the batch's first sample in the dataset.
    pub(crate) fn run(&self, batch: &Batch, epoch: u64, first: u64) -> (Vec<u32>, Batch) {
        let width = batch.label_width();
        let sampled = self.keep(epoch, first, batch.size(), |i, sample| batch.labels()[sample * width + i]);
        let mut batch = batch.take(&sampled);
        if self.steps.iter().any(|step| step.sampling.correct_weights) {
            let weights = (0..sampled.len()).map(|sample| self.weight(&batch, sample)).collect();
            batch = Batch::trusted(BatchParts { weights: Some(weights), ..batch.into_parts() });
        }
        (sampled, batch)
    }

    fn weight(&self, batch: &Batch, sample: usize) -> f32 {
        let weight = batch.weights().map_or(1.0, |weights| weights[sample]);
        let corrected = self.steps.iter().filter(|step| step.sampling.correct_weights);
        corrected.fold(weight, |weight, step| {
            let label = step.label.map(|i| batch.labels()[sample * batch.label_width() + i]);
            (f64::from(weight) / step.sampling.rates.of(label)) as f32
        })
    }
}

/// Describes the sampling decisions. Samplers with equal descriptions keep the same samples.
impl std::fmt::Display for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (number, SamplingStep { sampling, .. }) in self.steps.iter().enumerate() {
            let rates = match &sampling.rates {
                Rates::Every(rate) => format!("rate {rate}"),
                Rates::ByLabel { label, keep } => {
                    keep.iter().fold(format!("rates by {label}"), |mut text, (value, rate)| {
                        let _ = write!(text, " {value}:{rate}");
                        text
                    })
                }
            };
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{rates} seed {}", sampling.seed)?;
        }
        Ok(())
    }
}

/// The random numbers of one sampling step: a number in `0..1` for every epoch and sample of the dataset.
///
/// The generator is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
/// 2014), which allows random access to its sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draws {
    state: u64,
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Draws {
    /// Creates the numbers of the sampling step with index `number`. Steps with the same seed draw different numbers.
    pub(super) fn new(seed: u64, number: u64) -> Self {
        Self { state: scramble(seed ^ scramble(number.wrapping_add(GOLDEN))) }
    }

    /// Returns the numbers of one epoch.
    pub(super) fn of_epoch(self, epoch: u64) -> Self {
        Self { state: scramble(self.state ^ scramble(epoch.wrapping_add(GOLDEN))) }
    }

    /// Returns the number of the sample with index `ordinal` in the dataset.
    pub(super) fn draw(&self, ordinal: u64) -> f64 {
        let bits = scramble(self.state.wrapping_add(ordinal.wrapping_add(1).wrapping_mul(GOLDEN)));
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers are the first outputs of Vigna's `splitmix64.c` from state 1234567.
    #[test]
    fn agrees_with_splitmix64() {
        let draws = Draws { state: 1_234_567 };
        let expected = [6_457_827_717_110_365_317_u64, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        for (ordinal, bits) in expected.into_iter().enumerate() {
            assert_eq!(draws.draw(ordinal as u64), (bits >> 11) as f64 / 9_007_199_254_740_992.0);
        }
    }

    #[test]
    fn samples_are_kept_at_the_rate_and_steps_draw_independently() {
        let samples = 100_000_u64;
        let (first, second) = (Draws::new(5, 0), Draws::new(5, 1));
        let count = |keep: &dyn Fn(u64) -> bool| (0..samples).filter(|i| keep(*i)).count() as f64;
        // The tolerance is five standard deviations.
        let expect = |found: f64, rate: f64| {
            let n = samples as f64;
            assert!((found - n * rate).abs() < 5.0 * (n * rate * (1.0 - rate)).sqrt(), "{found} at {rate}");
        };
        expect(count(&|i| first.draw(i) < 0.1), 0.1);
        expect(count(&|i| first.draw(i) < 0.5 && second.draw(i) < 0.5), 0.25);
        assert_eq!(count(&|i| first.draw(i) < 1.0), samples as f64);
    }
}
