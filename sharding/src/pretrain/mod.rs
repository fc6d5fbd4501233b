//! Fits a learned cost model to measured costs, and reports its errors.

mod sample;
mod training;

use onefold_base::fault::{option, text};
use onefold_base::progress::Reporter;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::cost::features::{AskedFeatures, ShardFeatures};
use crate::cost::linear::{EXCHANGE_WORK, LinearModel, exchange_features, waiting_ms};
use crate::cost::model_file::{Fit, KIND, ModelFile, ModelReport, Repeated};
use crate::cost::network::Network;
use crate::costs::{COMPUTE, Costs, Direction, ExchangeRank, ExchangeSample};
use crate::error::{Error, Result};
use crate::pretrain::sample::{Sample, boundary, importances};
use crate::pretrain::training::train_network;
use crate::statistics::{kendall_deviation, kendall_tau, mean_squared_error, nonnegative_fit};

/// Options of the training.
#[derive(Debug, Clone, Copy)]
pub struct PretrainOptions {
    /// Whether a network is trained that corrects the linear model of the computation.
    pub network: bool,
    /// The number of passes of the network over the training samples.
    pub epochs: usize,
    /// The seed of the split, of the initial weights and of the order of samples.
    pub seed: u64,
    /// The number of folds of the cross-validation, at least 2.
    pub folds: usize,
}

impl Default for PretrainOptions {
    fn default() -> Self {
        Self { network: false, epochs: 300, seed: 1, folds: 5 }
    }
}

/// The smallest number of samples. Errors on fewer held-out samples would be meaningless.
const MIN_SAMPLES: usize = 50;
/// The least work of an item, in milliseconds, so that an item without work still has a cost.
const LEAST_WORK_MS: f64 = 1e-6;

/// Fits a model to `costs`: a linear model with non-negative weights for the computation, and one for each measured
/// kind of exchange. With [`network`](PretrainOptions::network), NeuroShard's network is trained on the errors of the
/// linear model of the computation.
///
/// The training of the network is NeuroShard's (Zha et al., MLSys 2023): Adam minimises the squared error in batches,
/// and the parameters with the lowest error on a tenth of the samples are kept. Each squared error, also that of the
/// linear models, is divided by the sample's time to the power of 1.5. The reported errors come from a
/// cross-validation: every sample is predicted by models that were not fitted to it, nor to samples that were measured
/// together with it. The paper instead holds out one tenth of the samples, whose few long sets would dominate the
/// result. Afterwards the models in the file are fitted to all samples. The same costs, options and seed give the same
/// bytes on any number of threads.
///
/// # Errors
///
/// [`Error::Invalid`] if there are fewer than 50 samples or 2 folds, or too few samples or sets for the folds; if the
/// predicted order of computation could be chance; or if the network does not beat the linear model in two of three
/// metrics on held-out samples: squared error, Kendall's tau and relative error.
pub fn pretrain(costs: &Costs, options: &PretrainOptions, reporter: &dyn Reporter) -> Result<ModelFile> {
    let sample = |measured: &crate::costs::ComputeSample| Sample {
        group: measured.set,
        items: measured.shards.iter().map(ShardFeatures::encoded).collect(),
        asked: measured.asked,
        ms: measured.ms,
        deduplicated: measured.shards.iter().any(|shard| shard.dedupe_factor > 1.0),
    };
    let samples: Vec<Sample> = costs.compute.iter().map(sample).collect();
    let ((compute, network), report) = fit(COMPUTE, &samples, &ShardFeatures::work(), options, reporter)?;
    check_report(&report)?;
    let mut reports = vec![report];
    let mut exchanges = [const { None }; Direction::ALL.len()];
    let linear = PretrainOptions { network: false, ..*options };
    for (slot, direction) in exchanges.iter_mut().zip(Direction::ALL) {
        let measured = costs.exchanges.iter().filter(|sample| sample.direction == direction);
        let samples: Vec<Sample> = (0..).zip(measured).flat_map(exchange_samples).collect();
        if !samples.is_empty() {
            let ((model, _), report) = fit(direction.name(), &samples, &EXCHANGE_WORK, &linear, reporter)?;
            *slot = Some(model);
            reports.push(report);
        }
    }
    let [forward, backward, gather] = exchanges;
    Ok(ModelFile {
        format_version: KIND.version,
        machine: costs.machine.clone(),
        kernel_version: costs.kernel_version.clone(),
        reports,
        compute,
        network,
        forward,
        backward,
        gather,
    })
}

fn exchange_samples((group, measured): (u64, &ExchangeSample)) -> Vec<Sample> {
    let bytes: Vec<f64> = measured.ranks.iter().map(|rank| rank.bytes).collect();
    let starts: Vec<f64> = measured.ranks.iter().map(|rank| rank.start_ms).collect();
    let features = exchange_features(&bytes).into_iter().zip(waiting_ms(&starts));
    let samples = features.zip(&measured.ranks);
    // The time that remains after subtracting the waiting time is at least the time of a message.
    const LEAST_MS: f64 = 0.01;
    let sample = |((features, waiting), rank): ((Vec<f64>, f64), &ExchangeRank)| Sample {
        group,
        items: vec![features],
        asked: AskedFeatures::default(),
        ms: (rank.ms - waiting).max(LEAST_MS),
        deduplicated: false,
    };
    samples.map(sample).collect()
}

/// Compares a second measurement of the same ranks with the first one in `costs`. The result shows the measurement
/// noise, and no model can be more accurate. Returns `None` if no set of tables is in both.
pub fn repeatability(costs: &Costs, again: &Costs) -> Option<Repeated> {
    fn sets(costs: &Costs) -> impl Iterator<Item = &[crate::costs::ComputeSample]> {
        costs.compute.chunk_by(|a, b| a.set == b.set)
    }
    fn plan(set: &[crate::costs::ComputeSample]) -> impl Iterator<Item = (&[ShardFeatures], AskedFeatures)> {
        set.iter().map(|rank| (rank.shards.as_slice(), rank.asked))
    }
    let mut pairs = Vec::new();
    for set in sets(again) {
        if let Some(first) = sets(costs).find(|first| plan(first).eq(plan(set))) {
            pairs.extend(first.iter().zip(set).map(|(first, second)| (first.ms, second.ms)));
        }
    }
    let (first, second): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
    (!first.is_empty()).then(|| Repeated { samples: first.len(), fit: Fit::of(&first, &second) })
}

/// Rejects a model of the computation whose predicted order could be chance, and a network that does not beat the
/// linear model in two of three metrics: squared error, Kendall's tau and relative error.
fn check_report(report: &ModelReport) -> Result<()> {
    let (name, test) = (&report.model, report.test);
    let chance = 4.0 * kendall_deviation(report.test_samples);
    if test.kendall_tau < chance {
        return Err(Error::invalid(
            format!(
                "the {name} model learned nothing: Kendall's tau of its predictions is {:.3}, and chance gives up to \
                 {chance:.3}",
                test.kendall_tau
            ),
            "check what was measured, and measure more samples",
        ));
    }
    let Some(linear) = report.linear else { return Ok(()) };
    let better = [
        test.mse < linear.mse,
        test.kendall_tau > linear.kendall_tau,
        test.relative_error < linear.relative_error,
    ];
    if better.iter().filter(|better| **better).count() >= 2 {
        return Ok(());
    }
    Err(Error::invalid(
        format!(
            "the network does not beat the linear model: its test MSE is {:.4e} ms² (tau {:.3}, relative error \
             {:.1} %), that of the linear model {:.4e} ms² (tau {:.3}, {:.1} %)",
            test.mse,
            test.kendall_tau,
            100.0 * test.relative_error,
            linear.mse,
            linear.kendall_tau,
            100.0 * linear.relative_error
        ),
        text![
            "leave ",
            option("network"),
            " out, measure more samples, or train longer with ",
            option("epochs")
        ],
    ))
}

/// Runs the cross-validation, and then fits the model to all samples. `work` are the indices of the features to which
/// the time of an item is proportional.
fn fit(
    name: &str,
    samples: &[Sample],
    work: &[usize],
    options: &PretrainOptions,
    reporter: &dyn Reporter,
) -> Result<((LinearModel, Option<Network>), ModelReport)> {
    let folds = options.folds;
    if samples.len() < MIN_SAMPLES {
        let message = format!("there are {} samples for the {name} model", samples.len());
        return Err(Error::invalid(message, format!("measure at least {MIN_SAMPLES}")));
    }
    if !(2..=samples.len() / 10).contains(&folds) {
        let message = format!("{} samples cannot be cut into {folds} folds", samples.len());
        return Err(Error::invalid(message, "choose from 2 folds to a tenth of the samples"));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
    let mut groups: Vec<&[Sample]> = samples.chunk_by(|a, b| a.group == b.group).collect();
    groups.shuffle(&mut rng);
    let order: Vec<&Sample> = groups.into_iter().flatten().collect();
    let epochs = options.network.then_some(options.epochs * (folds + 1));
    reporter.begin(&format!("Training {name}"), epochs.map(|epochs| epochs as u64), "epochs");
    let mut fit_to = |samples: &[&Sample]| {
        let linear = fit_linear(samples, work);
        let network =
            options.network.then(|| train_network(&linear, samples, options.epochs, &mut rng, reporter));
        (linear, network)
    };
    let [mut predicted, mut by_linear] = [const { Vec::new() }; 2];
    for fold in 0..folds {
        let part = boundary(&order, fold, folds)..boundary(&order, fold + 1, folds);
        let others = [&order[..part.start], &order[part.end..]].concat();
        if others.chunk_by(|a, b| a.group == b.group).nth(1).is_none() {
            let message =
                format!("too few sets of samples for the {name} model were measured for {folds} folds");
            return Err(Error::invalid(message, "measure more sets, or choose fewer folds"));
        }
        let (linear, network) = fit_to(&others);
        for sample in &order[part] {
            let linear_ms = linear.predict_ms(&sample.items, &sample.asked);
            let correction_ms = network.as_ref().map(|network| network.correction_ms(&linear, &sample.items));
            by_linear.push(linear_ms);
            predicted.push(linear_ms + correction_ms.unwrap_or(0.0));
        }
    }
    let models = fit_to(&order);
    reporter.end();
    let deduplicated: Vec<bool> = order.iter().map(|sample| sample.deduplicated).collect();
    let all = vec![true; order.len()];
    let report = ModelReport {
        model: name.to_owned(),
        train_samples: order.len(),
        folds,
        test_samples: order.len(),
        test: measure(&order, &predicted, &all),
        linear: options.network.then(|| measure(&order, &by_linear, &all)),
        deduplicated: deduplicated.contains(&true).then(|| measure(&order, &predicted, &deduplicated)),
        repeated: None,
    };
    Ok((models, report))
}

/// Fits the time of samples by non-negative least squares. `work` are the indices of the features that make up the
/// work of an item.
fn fit_linear(samples: &[&Sample], work: &[usize]) -> LinearModel {
    let row = |sample: &&Sample| -> Vec<f64> {
        let sum = |i: &usize| sample.items.iter().map(|item| item[*i]).sum::<f64>();
        let count = sample.items.len() as f64;
        work.iter().map(sum).chain([count]).chain(sample.asked.values()).chain([1.0]).collect()
    };
    let rows: Vec<Vec<f64>> = samples.iter().map(row).collect();
    let times: Vec<f64> = samples.iter().map(|sample| sample.ms).collect();
    let mut found = nonnegative_fit(&rows, &times, &importances(samples));
    let fixed = found.pop().unwrap_or_default();
    let asked = found.split_off(work.len() + 1);
    let items = || samples.iter().flat_map(|sample| &sample.items);
    let width = items().next().map_or(0, Vec::len);
    let mut weights = vec![0.0; width + 1];
    for (i, weight) in work.iter().chain([&width]).zip(found) {
        weights[*i] = weight;
    }
    weights[width] = weights[width].max(LEAST_WORK_MS);
    LinearModel {
        least: (0..width).map(|i| items().map(|item| item[i]).fold(f64::INFINITY, f64::min)).collect(),
        most: (0..width).map(|i| items().map(|item| item[i]).fold(f64::NEG_INFINITY, f64::max)).collect(),
        most_items: samples.iter().map(|sample| sample.items.len()).max().unwrap_or(0),
        most_ms: times.into_iter().fold(0.0, f64::max),
        work: weights,
        asked,
        fixed,
    }
}

/// Returns the errors of the chosen samples.
fn measure(test: &[&Sample], predicted: &[f64], chosen: &[bool]) -> Fit {
    let pairs = test.iter().zip(predicted).zip(chosen).filter(|(_, chosen)| **chosen);
    let (predicted, measured): (Vec<f64>, Vec<f64>) =
        pairs.map(|((sample, predicted), _)| (*predicted, sample.ms)).unzip();
    Fit::of(&predicted, &measured)
}

impl Fit {
    fn of(predicted: &[f64], measured: &[f64]) -> Self {
        let relative = predicted.iter().zip(measured).map(|(p, m)| (p - m).abs() / m.max(1e-9));
        Self {
            mse: mean_squared_error(predicted, measured),
            kendall_tau: kendall_tau(predicted, measured),
            relative_error: relative.sum::<f64>() / measured.len().max(1) as f64,
        }
    }
}
