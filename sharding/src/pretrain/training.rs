//! Trains the network of a learned cost model.

use onefold_base::progress::Reporter;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::cost::features::ShardFeatures;
use crate::cost::linear::LinearModel;
use crate::cost::network::{Network, seen};
use crate::nn::{Adam, Mlp};
use crate::pretrain::sample::{Sample, boundary, importances};

/// NeuroShard's layer widths: a table's features → 128 → 32, summed over tables → 64 → 1.
const ENCODER: [usize; 2] = [128, 32];
const HEAD: [usize; 2] = [64, 1];
/// Adam's initial learning rate. It falls to a hundredth along a half cosine (Loshchilov and Hutter, 2017). The
/// network only corrects the linear model, and small steps follow noise less.
const LEARNING_RATE: f32 = 3e-4;
const BATCH: usize = 256;
/// The number of steps per epoch below the largest batch size: with few samples, batches are smaller.
const STEPS: usize = 16;
/// The number of samples whose gradients one task sums. It is fixed, so that the number of threads does not change
/// the order of additions.
const CHUNK: usize = 16;

/// Trains a network that corrects `linear`, on all samples except the first tenth, which selects the best epoch.
pub(super) fn train_network(
    linear: &LinearModel,
    samples: &[&Sample],
    epochs: usize,
    rng: &mut ChaCha8Rng,
    reporter: &dyn Reporter,
) -> Network {
    let tenth = boundary(samples, 1, 10);
    // If there are only a few large sets, only the last set is used for training.
    let last = (1..samples.len()).rev().find(|at| samples[*at].group != samples[*at - 1].group);
    let first = if tenth < samples.len() { tenth } else { last.unwrap_or(0) };
    let mut network = untrained(&samples[first..], linear, rng);
    let mut validation: Vec<Normalised> = samples
        .iter()
        .zip(importances(samples))
        .map(|(sample, importance)| Normalised::of(sample, linear, &network, importance))
        .collect();
    let train = validation.split_off(first);
    let parameters = network.encoder.parameters().chain(network.head.parameters()).count();
    let mut adam = Adam::new(LEARNING_RATE, parameters);
    let mut best = (loss(&network, &validation), network.encoder.clone(), network.head.clone());
    let mut indices: Vec<usize> = (0..train.len()).collect();
    for epoch in 0..epochs {
        let along = (std::f32::consts::PI * epoch as f32 / epochs as f32).cos();
        adam.learning_rate = LEARNING_RATE * (0.01 + 0.99 * (1.0 + along) / 2.0);
        indices.shuffle(rng);
        for batch in indices.chunks((train.len() / STEPS).clamp(CHUNK, BATCH)) {
            step(&mut adam, &mut network, &train, batch);
        }
        let error = loss(&network, &validation);
        if error < best.0 {
            best = (error, network.encoder.clone(), network.head.clone());
        }
        reporter.advance(1);
    }
    (network.encoder, network.head) = (best.1, best.2);
    network
}

/// Returns a network with random weights, normalised by the samples.
fn untrained(samples: &[&Sample], linear: &LinearModel, rng: &mut ChaCha8Rng) -> Network {
    let amounts = &ShardFeatures::amounts();
    let items = || samples.iter().flat_map(|sample| &sample.items);
    let width = ShardFeatures::names().len();
    let count = items().count().max(1) as f64;
    let normal = |i: usize| items().map(move |item| seen(amounts, i, item[i]));
    let mean: Vec<f64> = (0..width).map(|i| normal(i).sum::<f64>() / count).collect();
    let deviation = |i: usize| {
        let deviation = (normal(i).map(|x| (x - mean[i]).powi(2)).sum::<f64>() / count).sqrt();
        // A feature that is constant carries no information, so any scale is fine.
        if deviation > 1e-12 * mean[i].abs() { deviation } else { 1.0 }
    };
    let mean_ms = samples.iter().map(|sample| sample.ms).sum::<f64>() / samples.len().max(1) as f64;
    let squares = samples.iter().map(|sample| (sample.ms - mean_ms).powi(2)).sum::<f64>();
    let scale_ms = (squares / samples.len().max(1) as f64).sqrt();
    let encoder = Mlp::new(&[width, ENCODER[0], ENCODER[1]], true, rng);
    let mut head = Mlp::new(&[ENCODER[1], HEAD[0], HEAD[1]], false, rng);
    if let Some(last) = head.layers.last_mut() {
        // At the start of the training, the prediction is that of the linear model.
        last.weights.fill(0.0);
        last.bias.fill(0.0);
    }
    let work_ms = samples.iter().map(|sample| work_ms(sample, linear));
    Network {
        amounts: amounts.clone(),
        deviation: (0..width).map(deviation).collect(),
        mean,
        scale_ms: if scale_ms > 0.0 { scale_ms } else { 1.0 },
        least_output: least_output(samples, linear),
        most_work_ms: work_ms.fold(f64::MIN_POSITIVE, f64::max),
        encoder,
        head,
    }
}

/// Returns the work of a sample's items.
fn work_ms(sample: &Sample, linear: &LinearModel) -> f64 {
    sample.items.iter().map(|item| linear.work_ms(item)).sum()
}

/// Returns the least time per unit of work among the samples whose own shards account for most of the work. The
/// lowest 2 % are ignored, because they may be measurement errors.
fn least_output(samples: &[&Sample], linear: &LinearModel) -> f64 {
    let of_sample = |sample: &&Sample| {
        let work = work_ms(sample, linear);
        let others = linear.asked_ms(&sample.asked) + linear.fixed;
        (work > others).then(|| (sample.ms - others) / work)
    };
    let mut outputs: Vec<f64> = samples.iter().filter_map(of_sample).collect();
    outputs.sort_by(f64::total_cmp);
    outputs.get(outputs.len() / 50).map_or(0.0, |least| least.clamp(0.0, 1.0))
}

/// A sample in the form that the network takes. Times and work are in units of the network's `scale_ms`.
struct Normalised {
    items: Vec<Vec<f32>>,
    /// The work of every item.
    work: Vec<f32>,
    /// The correction of the linear model that the network should predict.
    target: f32,
    importance: f32,
}

impl Normalised {
    fn of(sample: &Sample, linear: &LinearModel, network: &Network, importance: f64) -> Self {
        let error_ms = sample.ms - linear.predict_ms(&sample.items, &sample.asked);
        Self {
            items: sample.items.iter().map(|item| network.normalise(item)).collect(),
            work: sample.items.iter().map(|item| (linear.work_ms(item) / network.scale_ms) as f32).collect(),
            target: (error_ms / network.scale_ms) as f32,
            importance: importance as f32,
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

fn run(network: &Network, sample: &Normalised) -> Run {
    let mut codes = Vec::with_capacity(sample.items.len());
    let mut sum = vec![0.0f32; ENCODER[1]];
    for (item, work) in sample.items.iter().zip(&sample.work) {
        let mut outputs = Vec::new();
        network.encoder.forward(item, &mut outputs);
        let code = outputs.last().map_or(&[][..], Vec::as_slice);
        sum.iter_mut().zip(code).for_each(|(sum, code)| *sum += code * work);
        codes.push(outputs);
    }
    let mut head = Vec::new();
    if !sample.items.is_empty() {
        network.head.forward(&sum, &mut head);
    }
    let output = head.last().and_then(|output| output.first()).copied().unwrap_or_default();
    Run { output, sum, codes, head }
}

fn loss(network: &Network, samples: &[Normalised]) -> f64 {
    let errors: Vec<f64> = samples
        .par_iter()
        .map(|sample| {
            let error = f64::from(run(network, sample).output - sample.target);
            f64::from(sample.importance) * error * error
        })
        .collect();
    errors.iter().sum::<f64>() / samples.len().max(1) as f64
}

/// Runs one step of Adam on the weighted mean squared error of a batch.
fn step(adam: &mut Adam, network: &mut Network, samples: &[Normalised], batch: &[usize]) {
    let zeros = || [Mlp::zeros_like(&network.encoder), Mlp::zeros_like(&network.head)];
    let of_chunk = |chunk: &[usize]| {
        let [mut encoder, mut head] = zeros();
        for &i in chunk {
            backward(network, &samples[i], batch.len(), &mut encoder, &mut head);
        }
        [encoder, head]
    };
    let parts: Vec<[Mlp; 2]> = batch.par_chunks(CHUNK).map(of_chunk).collect();
    let mut sums = zeros();
    for (sum, part) in parts.iter().flat_map(|part| (0..2).zip(part)) {
        sums[sum].parameters_mut().zip(part.parameters()).for_each(|(sum, part)| *sum += part);
    }
    let Network { encoder, head, .. } = network;
    let parameters = encoder.parameters_mut().chain(head.parameters_mut());
    adam.step(parameters, sums.iter().flat_map(Mlp::parameters));
}

fn backward(network: &Network, sample: &Normalised, batch: usize, encoder: &mut Mlp, head: &mut Mlp) {
    let done = run(network, sample);
    if sample.items.is_empty() {
        return;
    }
    let gradient = 2.0 * sample.importance * (done.output - sample.target) / batch as f32;
    let sum_gradient = network.head.backward(&done.sum, &done.head, vec![gradient], head);
    for ((item, work), outputs) in sample.items.iter().zip(&sample.work).zip(&done.codes) {
        let code_gradient = sum_gradient.iter().map(|gradient| gradient * work).collect();
        network.encoder.backward(item, outputs, code_gradient, encoder);
    }
}
