//! Trains the networks of a learned cost model on measured costs, and reports their errors.

use std::ops::Range;

use onefold_base::fault::{option, text};
use onefold_base::progress::Reporter;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::cost::features::{AskedFeatures, ShardFeatures};
use crate::cost::model_file::{Fit, ModelFile, ModelReport, Repeated};
use crate::cost::set_model::{EXCHANGE_WORK, SetModel, exchange_features, seen, waiting_ms};
use crate::costs::{COMPUTE, Costs, Direction, ExchangeRank, ExchangeSample};
use crate::nn::{Adam, Mlp};
use crate::statistics::{Linear, kendall_deviation, kendall_tau, mean_squared_error, nonnegative_fit};
use crate::{Error, Result};

/// Options of the training.
#[derive(Debug, Clone, Copy)]
pub struct PretrainOptions {
    /// The number of passes over the training samples.
    pub epochs: usize,
    /// The seed of the split, of the initial weights and of the order of samples.
    pub seed: u64,
    /// The number of folds of the cross-validation, at least 2.
    pub folds: usize,
}

impl Default for PretrainOptions {
    fn default() -> Self {
        Self { epochs: 300, seed: 1, folds: 5 }
    }
}

/// NeuroShard's layer widths: a table's features → 128 → 32, summed over tables → 64 → 1.
const ENCODER: [usize; 2] = [128, 32];
const HEAD: [usize; 2] = [64, 1];
/// Adam's initial learning rate. It falls to a hundredth along a half cosine (Loshchilov and Hutter, 2017).
const LEARNING_RATE: f32 = 1e-3;
/// The initial learning rate if the network only corrects the estimate from the work: smaller steps follow noise
/// less.
const CORRECTION_RATE: f32 = 3e-4;
/// The squared error of a sample is divided by this power of its time. The value is between 0 (absolute errors,
/// dominated by the longest sets) and 2 (relative errors, dominated by noise).
const TIME_POWER: f64 = 1.5;
/// The least time, as a part of the mean, by which a squared error is divided.
const LEAST_TIME: f64 = 0.01;
const BATCH: usize = 256;
/// The number of steps per epoch below the largest batch size: with few samples, batches are smaller.
const STEPS: usize = 16;
/// The number of samples whose gradients one task sums. It is fixed, so that the number of threads does not change
/// the order of additions.
const CHUNK: usize = 16;
/// The smallest number of samples. Errors on fewer held-out samples would be meaningless.
const MIN_SAMPLES: usize = 50;

/// Indices of the features that make up the work of an item, and the range of features of which the encoder sees
/// logarithms.
type Seen = (Vec<usize>, Range<usize>);

/// A set of items and its measured time.
struct Sample {
    /// The number of the group of samples that were measured together. A group is never split between training and
    /// test.
    group: u64,
    items: Vec<Vec<f64>>,
    asked: AskedFeatures,
    ms: f64,
    deduplicated: bool,
}

impl Sample {
    /// Returns the work of all items.
    fn work(&self, model: &SetModel) -> f64 {
        self.items.iter().map(|item| model.added_work(item)).sum()
    }
}

/// Trains a model on `costs`: one network for the computation, and one for each measured kind of exchange.
///
/// The method is NeuroShard's (Zha et al., MLSys 2023): Adam minimises the squared error in batches, and the
/// parameters with the lowest error on a tenth of the samples are kept. Here each squared error is divided by the
/// sample's time to the power of 1.5. The reported errors come from a cross-validation: every sample is predicted by
/// networks that were not trained on it, nor on samples that were measured together with it. The paper instead holds
/// out one tenth of the samples, whose few long sets would dominate the result. Afterwards the networks in the file
/// are trained on all samples. The same costs, options and seed give the same bytes on any number of threads.
///
/// # Errors
///
/// [`Error::Invalid`] if there are fewer than 50 samples or 2 folds, or too few samples or sets for the folds; if the
/// predicted order of computation could be chance; or if a network does not beat a linear regression on the same
/// features in two of three metrics on held-out samples (one of three for an exchange): squared error, Kendall's tau
/// and relative error.
pub fn pretrain(costs: &Costs, options: &PretrainOptions, reporter: &dyn Reporter) -> Result<ModelFile> {
    let sample = |measured: &crate::ComputeSample| Sample {
        group: measured.set,
        items: measured.shards.iter().map(ShardFeatures::encoded).collect(),
        asked: measured.asked,
        ms: measured.ms,
        deduplicated: measured.shards.iter().any(|shard| shard.dedupe_factor > 1.0),
    };
    let samples: Vec<Sample> = costs.compute.iter().map(sample).collect();
    let seen = (ShardFeatures::work(), ShardFeatures::amounts());
    let (compute, report) = train(COMPUTE, &samples, &seen, options, reporter)?;
    let mut reports = vec![report];
    let mut exchanges = [const { None }; Direction::ALL.len()];
    for (slot, direction) in exchanges.iter_mut().zip(Direction::ALL) {
        let measured = costs.exchanges.iter().filter(|sample| sample.direction == direction);
        let samples: Vec<Sample> = (0..).zip(measured).flat_map(exchange_samples).collect();
        if !samples.is_empty() {
            let (model, report) =
                train(direction.name(), &samples, &(EXCHANGE_WORK.to_vec(), 0..0), options, reporter)?;
            *slot = Some(model);
            reports.push(report);
        }
    }
    let measured = (costs.machine.clone(), costs.kernel_version.clone());
    Ok(ModelFile::new(measured, reports, compute, exchanges))
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
    fn sets(costs: &Costs) -> impl Iterator<Item = &[crate::ComputeSample]> {
        costs.compute.chunk_by(|a, b| a.set == b.set)
    }
    fn plan(set: &[crate::ComputeSample]) -> impl Iterator<Item = (&[ShardFeatures], AskedFeatures)> {
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

/// Calls [`fit`], and rejects models that are not useful: a computation model whose predicted order could be chance,
/// and any model that does not beat a linear regression in two of three metrics (one of three for an exchange):
/// squared error, Kendall's tau and relative error.
fn train(
    name: &str,
    samples: &[Sample],
    seen: &Seen,
    options: &PretrainOptions,
    reporter: &dyn Reporter,
) -> Result<(SetModel, ModelReport)> {
    let (model, report) = fit(name, samples, seen, options, reporter)?;
    let (test, linear) = (report.test, report.linear);
    let chance = 4.0 * kendall_deviation(samples.len());
    if name == COMPUTE && test.kendall_tau < chance {
        return Err(Error::invalid(
            format!(
                "the {name} model learned nothing: Kendall's tau of what it predicts is {:.3}, and chance gives up to \
                 {chance:.3}",
                test.kendall_tau
            ),
            "check what was measured, and measure more samples",
        ));
    }
    let better = [
        test.mse < linear.mse,
        test.kendall_tau > linear.kendall_tau,
        test.relative_error < linear.relative_error,
    ];
    // The time of an exchange may simply be linear in its bytes, as the regression assumes.
    let needed = if name == COMPUTE { 2 } else { 1 };
    if better.iter().filter(|better| **better).count() >= needed {
        return Ok((model, report));
    }
    Err(Error::invalid(
        format!(
            "the {name} model does not beat a line: its test MSE is {:.4e} ms² (tau {:.3}, relative error {:.1} %), the \
             line's {:.4e} ms² (tau {:.3}, {:.1} %)",
            test.mse,
            test.kendall_tau,
            100.0 * test.relative_error,
            linear.mse,
            linear.kendall_tau,
            100.0 * linear.relative_error
        ),
        text!["measure more samples, or train longer with ", option("epochs")],
    ))
}

/// Runs the cross-validation, and then trains on all samples.
fn fit(
    name: &str,
    samples: &[Sample],
    seen: &Seen,
    options: &PretrainOptions,
    reporter: &dyn Reporter,
) -> Result<(SetModel, ModelReport)> {
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
    reporter.begin(&format!("Training {name}"), Some((options.epochs * (folds + 1)) as u64), "epochs");
    let [mut network, mut line] = [const { Vec::new() }; 2];
    for fold in 0..folds {
        let part = boundary(&order, fold, folds)..boundary(&order, fold + 1, folds);
        let others = [&order[..part.start], &order[part.end..]].concat();
        if others.chunk_by(|a, b| a.group == b.group).nth(1).is_none() {
            let message =
                format!("too few sets of samples for the {name} model were measured for {folds} folds");
            return Err(Error::invalid(message, "measure more sets, or choose fewer folds"));
        }
        let (model, train) = train_on(&others, seen, options, &mut rng, reporter);
        let test = &order[part];
        network.extend(test.iter().map(|sample| model.predict_ms(&sample.items, &sample.asked)));
        line.extend(linear_predictions(train, test, &model));
    }
    let (model, train) = train_on(&order, seen, options, &mut rng, reporter);
    reporter.end();
    let deduplicated: Vec<bool> = order.iter().map(|sample| sample.deduplicated).collect();
    let all = vec![true; order.len()];
    let report = ModelReport {
        model: name.to_owned(),
        train_samples: train.len(),
        folds,
        test_samples: order.len(),
        test: measure(&order, &network, &all),
        linear: measure(&order, &line, &all),
        deduplicated: deduplicated
            .contains(&true)
            .then(|| [&network, &line].map(|predicted| measure(&order, predicted, &deduplicated))),
        repeated: None,
    };
    Ok((model, report))
}

/// Returns the start of part `part` of `parts` approximately equal parts. No part starts within a group.
fn boundary(samples: &[&Sample], part: usize, parts: usize) -> usize {
    let begins = |at: &usize| *at == 0 || samples[*at].group != samples[*at - 1].group;
    (samples.len() * part / parts..samples.len()).find(begins).unwrap_or(samples.len())
}

/// Trains a network on all samples except the first tenth, which selects the best epoch. Returns the network and its
/// training samples.
fn train_on<'a, 's>(
    samples: &'a [&'s Sample],
    seen: &Seen,
    options: &PretrainOptions,
    rng: &mut ChaCha8Rng,
    reporter: &dyn Reporter,
) -> (SetModel, &'a [&'s Sample]) {
    let tenth = boundary(samples, 1, 10);
    // If there are only a few large sets, only the last set is used for training.
    let last = (1..samples.len()).rev().find(|at| samples[*at].group != samples[*at - 1].group);
    let (validation, train) = samples.split_at(if tenth < samples.len() { tenth } else { last.unwrap_or(0) });
    let mut model = untrained(train, seen, rng);
    let mean_ms = mean_ms(train);
    let inputs = |chosen: &[&Sample]| -> Vec<Normalised> {
        chosen.iter().map(|sample| Normalised::of(sample, &model, mean_ms)).collect()
    };
    let (train_inputs, validation_inputs) = (inputs(train), inputs(validation));
    let mut training = Training::new(&model);
    let first_rate = if model.work.is_empty() { LEARNING_RATE } else { CORRECTION_RATE };
    let mut best = (loss(&model, &validation_inputs), model.encoder.clone(), model.head.clone());
    let mut indices: Vec<usize> = (0..train_inputs.len()).collect();
    for epoch in 0..options.epochs {
        let along = (std::f32::consts::PI * epoch as f32 / options.epochs as f32).cos();
        training.set_rate(first_rate * (0.01 + 0.99 * (1.0 + along) / 2.0));
        indices.shuffle(rng);
        for batch in indices.chunks((train.len() / STEPS).clamp(CHUNK, BATCH)) {
            training.step(&mut model, &train_inputs, batch);
        }
        let error = loss(&model, &validation_inputs);
        if error < best.0 {
            best = (error, model.encoder.clone(), model.head.clone());
        }
        reporter.advance(1);
    }
    (model.encoder, model.head) = (best.1, best.2);
    model.least_output = least_output(&model, train);
    if !model.work.is_empty() {
        model.most_work = train.iter().map(|sample| sample.work(&model)).fold(0.0, f64::max);
    }
    (model, train)
}

/// Predicts the test samples with a linear regression whose errors have the same weights as those of the network. Its
/// features are the sums of the items' features, the number of items, and the requests.
fn linear_predictions(train: &[&Sample], test: &[&Sample], model: &SetModel) -> Vec<f64> {
    let features = |sample: &Sample| {
        let mut sums = vec![0.0; model.mean.len() + 1];
        // Requests are counted in millions. The unit does not affect a linear regression, except numerically.
        sums.extend(sample.asked.values().map(|value| value / 1e6));
        for item in &sample.items {
            // Scales the features to similar magnitudes.
            let scaled = item.iter().zip(&model.most).map(|(x, most)| x / most.max(1e-9));
            sums.iter_mut().zip(scaled).for_each(|(sum, x)| *sum += x);
        }
        sums[model.mean.len()] = sample.items.len() as f64;
        sums
    };
    let rows: Vec<Vec<f64>> = train.iter().map(|sample| features(sample)).collect();
    let targets: Vec<f64> = train.iter().map(|sample| sample.ms).collect();
    let line = Linear::fit(&rows, &targets, &importances(train));
    test.iter().map(|sample| line.predict(&features(sample))).collect()
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

/// Returns the weight of a sample's squared error.
fn importance(ms: f64, mean_ms: f64) -> f64 {
    1.0 / (ms / mean_ms).max(LEAST_TIME).powf(TIME_POWER)
}

fn importances(samples: &[&Sample]) -> Vec<f64> {
    let mean_ms = mean_ms(samples);
    samples.iter().map(|sample| importance(sample.ms, mean_ms)).collect()
}

fn mean_ms(samples: &[&Sample]) -> f64 {
    samples.iter().map(|sample| sample.ms).sum::<f64>() / samples.len().max(1) as f64
}

/// Returns a model with random weights, normalised by the training samples.
fn untrained(train: &[&Sample], (work, amounts): &Seen, rng: &mut ChaCha8Rng) -> SetModel {
    let items = || train.iter().flat_map(|sample| &sample.items);
    let width = items().next().map_or(0, Vec::len);
    let count = items().count().max(1) as f64;
    let column = |i: usize| items().map(move |item| item[i]);
    let normal = |i: usize| column(i).map(move |x| seen(amounts, i, x));
    let mean: Vec<f64> = (0..width).map(|i| normal(i).sum::<f64>() / count).collect();
    let deviation = |i: usize| {
        let deviation = (normal(i).map(|x| (x - mean[i]).powi(2)).sum::<f64>() / count).sqrt();
        // A feature that is constant carries no information, so any scale is fine.
        if deviation > 1e-12 * mean[i].abs() { deviation } else { 1.0 }
    };
    let times = || train.iter().map(|sample| sample.ms);
    let mean_ms = mean_ms(train);
    let scale_ms = (times().map(|ms| (ms - mean_ms).powi(2)).sum::<f64>() / train.len() as f64).sqrt();
    let widths = |first: usize, rest: [usize; 2]| [first, rest[0], rest[1]];
    let scale_ms = if scale_ms > 0.0 { scale_ms } else { 1.0 };
    let mut head = Mlp::new(&widths(ENCODER[1], HEAD), false, rng);
    if let (false, Some(last)) = (work.is_empty(), head.layers.last_mut()) {
        // At the start of the training, the prediction is the work alone.
        last.weights.fill(0.0);
        last.bias.fill(0.0);
    }
    let (work, asked, fixed) = match work.is_empty() {
        true => Default::default(),
        false => work_weights(train, work, width, scale_ms),
    };
    SetModel {
        amounts: amounts.clone(),
        work,
        asked,
        fixed,
        least_output: 0.0,
        most_work: 0.0,
        deviation: (0..width).map(deviation).collect(),
        least: (0..width).map(|i| column(i).fold(f64::INFINITY, f64::min)).collect(),
        most: (0..width).map(|i| column(i).fold(f64::NEG_INFINITY, f64::max)).collect(),
        most_items: train.iter().map(|sample| sample.items.len()).max().unwrap_or(0),
        most_ms: times().fold(0.0, f64::max),
        scale_ms,
        encoder: Mlp::new(&widths(width, ENCODER), true, rng),
        head,
        mean,
    }
}

/// Fits the time of samples, in units of `scale_ms`, by non-negative least squares. Returns the weights of the items'
/// features in the work, the weights of the requests, and the constant cost of a rank's step.
fn work_weights(train: &[&Sample], work: &[usize], width: usize, scale_ms: f64) -> (Vec<f64>, Vec<f64>, f64) {
    let row = |sample: &&Sample| -> Vec<f64> {
        let sum = |i: &usize| sample.items.iter().map(|item| item[*i]).sum::<f64>();
        let count = sample.items.len() as f64;
        work.iter().map(sum).chain([count]).chain(sample.asked.values()).chain([1.0]).collect()
    };
    let rows: Vec<Vec<f64>> = train.iter().map(row).collect();
    let targets: Vec<f64> = train.iter().map(|sample| sample.ms / scale_ms).collect();
    let mut found = nonnegative_fit(&rows, &targets, &importances(train));
    let fixed = found.pop().unwrap_or_default();
    let asked = found.split_off(work.len() + 1);
    let mut weights = vec![0.0; width + 1];
    for (i, weight) in work.iter().chain([&width]).zip(found) {
        weights[*i] = weight;
    }
    // An item without work must still be able to have a cost.
    weights[width] = weights[width].max(1e-6);
    (weights, asked, fixed)
}

/// Returns the least output per unit of work among the samples whose own shards account for most of the work. The
/// lowest 2 % are ignored, because they may be measurement errors.
fn least_output(model: &SetModel, train: &[&Sample]) -> f64 {
    let of_sample = |sample: &&Sample| {
        let work = sample.work(model);
        let others = model.asked_work(&sample.asked) + model.fixed;
        (work > others).then(|| (sample.ms / model.scale_ms - others) / work)
    };
    let mut outputs: Vec<f64> = train.iter().filter_map(of_sample).collect();
    outputs.sort_by(f64::total_cmp);
    outputs.get(outputs.len() / 50).map_or(0.0, |least| least.clamp(0.0, 1.0))
}

/// A sample in the form that the network takes.
struct Normalised {
    items: Vec<Vec<f32>>,
    /// The work of every item.
    work: Vec<f32>,
    /// The number that is added to the head's output.
    added: f32,
    target: f32,
    importance: f32,
}

impl Normalised {
    fn of(sample: &Sample, model: &SetModel, mean_ms: f64) -> Self {
        Self {
            items: sample.items.iter().map(|item| model.normalise(item)).collect(),
            work: sample.items.iter().map(|item| model.work(item)).collect(),
            added: sample.items.iter().map(|item| model.added_work(item) as f32).sum::<f32>()
                + (model.asked_work(&sample.asked) + model.fixed) as f32,
            target: (sample.ms / model.scale_ms) as f32,
            importance: importance(sample.ms, mean_ms) as f32,
        }
    }
}

/// The output of the network for a sample, and the outputs of all layers.
struct Run {
    output: f32,
    sum: Vec<f32>,
    /// The outputs of every encoder layer, for every item.
    codes: Vec<Vec<Vec<f32>>>,
    head: Vec<Vec<f32>>,
}

fn run(model: &SetModel, sample: &Normalised) -> Run {
    let mut codes = Vec::with_capacity(sample.items.len());
    let mut sum = vec![0.0f32; ENCODER[1]];
    for (item, work) in sample.items.iter().zip(&sample.work) {
        let mut outputs = Vec::new();
        model.encoder.forward(item, &mut outputs);
        let code = outputs.last().map_or(&[][..], Vec::as_slice);
        sum.iter_mut().zip(code).for_each(|(sum, code)| *sum += code * work);
        codes.push(outputs);
    }
    let mut head = Vec::new();
    if !sample.items.is_empty() {
        model.head.forward(&sum, &mut head);
    }
    let output = head.last().and_then(|output| output.first()).copied().unwrap_or_default();
    Run { output: output + sample.added, sum, codes, head }
}

fn loss(model: &SetModel, samples: &[Normalised]) -> f64 {
    let errors: Vec<f64> = samples
        .par_iter()
        .map(|sample| {
            let error = f64::from(run(model, sample).output - sample.target);
            f64::from(sample.importance) * error * error
        })
        .collect();
    errors.iter().sum::<f64>() / samples.len().max(1) as f64
}

/// The optimizers of the two networks of a model.
struct Training {
    encoder: Adam,
    head: Adam,
}

impl Training {
    fn set_rate(&mut self, rate: f32) {
        self.encoder.learning_rate = rate;
        self.head.learning_rate = rate;
    }

    fn new(model: &SetModel) -> Self {
        let adam = |mlp: &Mlp| Adam::new(LEARNING_RATE, mlp.parameters().count());
        Self { encoder: adam(&model.encoder), head: adam(&model.head) }
    }

    /// Runs one step of Adam on the weighted mean squared error of a batch.
    fn step(&mut self, model: &mut SetModel, samples: &[Normalised], batch: &[usize]) {
        let gradients: Vec<(Mlp, Mlp)> = batch
            .par_chunks(CHUNK)
            .map(|chunk| {
                let mut encoder = Mlp::zeros_like(&model.encoder);
                let mut head = Mlp::zeros_like(&model.head);
                for &i in chunk {
                    backward(model, &samples[i], batch.len(), &mut encoder, &mut head);
                }
                (encoder, head)
            })
            .collect();
        let mut encoder = Mlp::zeros_like(&model.encoder);
        let mut head = Mlp::zeros_like(&model.head);
        for (part_encoder, part_head) in &gradients {
            encoder.parameters_mut().zip(part_encoder.parameters()).for_each(|(sum, part)| *sum += part);
            head.parameters_mut().zip(part_head.parameters()).for_each(|(sum, part)| *sum += part);
        }
        self.encoder.step(model.encoder.parameters_mut(), encoder.parameters());
        self.head.step(model.head.parameters_mut(), head.parameters());
    }
}

fn backward(model: &SetModel, sample: &Normalised, batch: usize, encoder: &mut Mlp, head: &mut Mlp) {
    let done = run(model, sample);
    if sample.items.is_empty() {
        return;
    }
    let gradient = 2.0 * sample.importance * (done.output - sample.target) / batch as f32;
    let sum_gradient = model.head.backward(&done.sum, &done.head, vec![gradient], head);
    for ((item, work), outputs) in sample.items.iter().zip(&sample.work).zip(&done.codes) {
        let code_gradient = sum_gradient.iter().map(|gradient| gradient * work).collect();
        model.encoder.backward(item, outputs, code_gradient, encoder);
    }
}
