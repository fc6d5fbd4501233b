//! Optimizers of the dense part, fused: one pass over a parameter, its gradient and its state per step.
//!
//! libtorch's C interface has no Adagrad, and its other optimizers go through a kernel per operation. Parameters on a
//! GPU, of which a DLRM has few, are updated by libtorch's operations.

use std::borrow::Cow;

use rayon::prelude::*;
use tch::{Device, Kind, Tensor};

use crate::config::{DenseOptimizerConfig, DenseOptimizerKind};
use crate::{Result, tensors};

/// Parameters that one thread updates at a time.
const CHUNK: usize = 1 << 15;

/// Updates the dense part's parameters in place. The outcome does not depend on the number of threads.
#[derive(Debug)]
pub struct DenseOptimizer {
    config: DenseOptimizerConfig,
    parameters: Vec<Parameter>,
    /// Buffers of state, each with a value for every parameter, one parameter's after the other's.
    state: Vec<(&'static str, Vec<f32>)>,
    steps: u64,
    threads: rayon::ThreadPool,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    tensor: Tensor,
    /// Where its state begins, if that is in memory.
    start: usize,
    length: usize,
    /// Its state, if that is on a device.
    on_device: Vec<Tensor>,
}

impl DenseOptimizer {
    /// An optimizer of `parameters`, contiguous `f32` tensors, with state of zero where they are.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if threads cannot be started.
    pub fn new(
        config: &DenseOptimizerConfig,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
        threads: usize,
    ) -> Result<Self> {
        let in_memory = |tensor: &Tensor| tensor.device() == Device::Cpu;
        Self::with_state(config, parameters, threads, in_memory)
    }

    /// The same; where `in_memory` is false, a parameter's state is tensors on its device.
    fn with_state(
        config: &DenseOptimizerConfig,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
        threads: usize,
        in_memory: impl Fn(&Tensor) -> bool,
    ) -> Result<Self> {
        // PyTorch's names.
        let names: &[&'static str] = match config.kind {
            DenseOptimizerKind::Adagrad => &["sum"],
            DenseOptimizerKind::Sgd if config.momentum > 0.0 => &["momentum_buffer"],
            DenseOptimizerKind::Sgd => &[],
            DenseOptimizerKind::Adam | DenseOptimizerKind::AdamW => &["exp_avg", "exp_avg_sq"],
        };
        let mut total = 0;
        let parameters = parameters.into_iter().map(|(name, tensor)| {
            let (start, length) = (total, tensor.numel());
            let mut on_device = Vec::new();
            if in_memory(&tensor) {
                total += length;
            } else {
                on_device = names.iter().map(|_| tensor.detach().zeros_like()).collect();
            }
            Parameter { name, tensor, start, length, on_device }
        });
        let parameters = parameters.collect();
        let state = names.iter().map(|name| (*name, vec![0.0; total])).collect();
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("onefold-dense-{i}"))
            .build()
            .map_err(std::io::Error::other)?;
        Ok(Self { config: config.clone(), parameters, state, steps: 0, threads })
    }

    /// Steps taken so far, which Adam's bias correction depends on.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The state for a checkpoint: the name of a parameter, the name of its state, and the values, in the parameter's
    /// order.
    pub fn state(&self) -> impl Iterator<Item = (&str, &'static str, Cow<'_, [f32]>)> {
        let of_parameter = |parameter: &'_ Parameter, i: usize| match parameter.on_device.get(i) {
            Some(values) => Cow::Owned(tensors::to_vec(values)),
            None => Cow::Borrowed(&self.state[i].1[parameter.start..parameter.start + parameter.length]),
        };
        self.parameters.iter().flat_map(move |parameter| {
            let states = self.state.iter().enumerate();
            states.map(move |(i, (name, _))| (parameter.name.as_str(), *name, of_parameter(parameter, i)))
        })
    }

    /// Continues after `steps` steps: `fill` gets what [`state`](Self::state) gives, to write to.
    ///
    /// # Errors
    ///
    /// The first error of `fill`.
    pub fn restore(
        &mut self,
        steps: u64,
        mut fill: impl FnMut(&str, &'static str, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.steps = steps;
        for parameter in &mut self.parameters {
            for (i, (name, values)) in self.state.iter_mut().enumerate() {
                match parameter.on_device.get_mut(i) {
                    Some(values) => {
                        let mut host = vec![0.0; parameter.length];
                        fill(&parameter.name, name, &mut host)?;
                        values.copy_(&tensors::from_f32(&host, &values.size()));
                    }
                    None => {
                        let range = parameter.start..parameter.start + parameter.length;
                        fill(&parameter.name, name, &mut values[range])?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The L2 norm of the gradient that `backward` left, over all parameters.
    pub fn gradient_norm(&self) -> f64 {
        let squares = |parameter: &Parameter| {
            let gradient = parameter.tensor.grad();
            if !gradient.defined() {
                return 0.0;
            }
            let gradient = gradient.contiguous();
            // SAFETY: the backward pass that wrote the gradient is over.
            unsafe { tensors::as_slice(&gradient) }.chunks(CHUNK).map(sum_of_squares).sum()
        };
        let (in_memory, on_device): (Vec<_>, Vec<_>) =
            self.parameters.iter().partition(|parameter| parameter.tensor.device() == Device::Cpu);
        let gradients = on_device.iter().map(|parameter| parameter.tensor.grad()).filter(Tensor::defined);
        let sums: Vec<Tensor> = gradients.map(|gradient| gradient.square().sum(Kind::Double)).collect();
        // One number comes back from the device.
        let on_device =
            if sums.is_empty() { 0.0 } else { Tensor::stack(&sums, 0).sum(Kind::Double).double_value(&[]) };
        (in_memory.into_iter().map(squares).sum::<f64>() + on_device).sqrt()
    }

    /// One step at `learning_rate` with the gradients that `backward` left and whose norm is `norm`; they are zero
    /// afterwards. A gradient longer than `max_grad_norm` is scaled as by `torch.nn.utils.clip_grad_norm_`.
    ///
    /// The algorithms are those of `torch.optim` with defaults for all that the configuration does not have.
    pub fn step(&mut self, learning_rate: f64, norm: f64) {
        self.steps += 1;
        let scale = self.config.max_grad_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0)) as f32;
        let update = Update::new(&self.config, learning_rate, scale, self.steps);
        let Self { parameters, state, threads, .. } = self;
        for parameter in parameters {
            let mut gradient = parameter.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            if !parameter.on_device.is_empty() || parameter.tensor.device() != Device::Cpu {
                tch::no_grad(|| {
                    update.apply_on_device(&mut parameter.tensor, &gradient, &mut parameter.on_device);
                    let _ = gradient.zero_();
                });
                continue;
            }
            let range = parameter.start..parameter.start + parameter.length;
            let mut state = state.iter_mut().map(|(_, values)| &mut values[range.clone()]);
            let state = [state.next().unwrap_or_default(), state.next().unwrap_or_default()];
            let values = gradient.contiguous();
            // SAFETY: `update` is given the weights, the gradient, whose storage is another one, and vectors of
            // ours. Whoever else has a handle of the parameter, as the model does, computes before a step or after
            // it, on this thread.
            let (weights, values) =
                unsafe { (tensors::as_mut_slice(&mut parameter.tensor), tensors::as_slice(&values)) };
            threads.install(|| update.apply(weights, values, state));
            let _ = tch::no_grad(|| gradient.zero_());
        }
    }
}

/// In eight sums, which the processor forms at once; their order is fixed.
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut sums = [0.0_f64; 8];
    let blocks = values.chunks_exact(8);
    let rest: f64 = blocks.remainder().iter().map(|value| f64::from(*value).powi(2)).sum();
    for block in blocks {
        for (sum, value) in sums.iter_mut().zip(block) {
            *sum += f64::from(*value).powi(2);
        }
    }
    rest + sums.iter().sum::<f64>()
}

/// One step's algorithm, with all numbers that do not depend on the parameter.
#[derive(Debug, Clone, Copy)]
struct Update {
    algorithm: Algorithm,
    /// Factor on the gradient.
    scale: f32,
    /// L2 penalty that is added to the gradient.
    penalty: f32,
}

#[derive(Debug, Clone, Copy)]
enum Algorithm {
    Adagrad { rate: f32, eps: f32 },
    Sgd { rate: f32 },
    Momentum { rate: f32, momentum: f32 },
    Adam { keep: f32, rate: f32, new: [f32; 2], beta2: f32, correction: f32, eps: f32 },
}

impl Update {
    fn new(config: &DenseOptimizerConfig, rate: f64, scale: f32, steps: u64) -> Self {
        let eps = config.eps as f32;
        let decoupled = config.kind == DenseOptimizerKind::AdamW;
        let algorithm = match config.kind {
            DenseOptimizerKind::Adagrad => Algorithm::Adagrad { rate: rate as f32, eps },
            DenseOptimizerKind::Sgd if config.momentum > 0.0 => {
                Algorithm::Momentum { rate: rate as f32, momentum: config.momentum as f32 }
            }
            DenseOptimizerKind::Sgd => Algorithm::Sgd { rate: rate as f32 },
            DenseOptimizerKind::Adam | DenseOptimizerKind::AdamW => {
                let correct = |beta: f64| 1.0 - beta.powf(steps as f64);
                Algorithm::Adam {
                    keep: if decoupled { (1.0 - rate * config.weight_decay) as f32 } else { 1.0 },
                    rate: (rate / correct(config.betas[0])) as f32,
                    // In double precision first: 1 - 0.999 has three digits less.
                    new: config.betas.map(|beta| (1.0 - beta) as f32),
                    beta2: config.betas[1] as f32,
                    correction: correct(config.betas[1]).sqrt() as f32,
                    eps,
                }
            }
        };
        Self { algorithm, scale, penalty: if decoupled { 0.0 } else { config.weight_decay as f32 } }
    }

    /// Updates one parameter by libtorch's operations, as [`apply`](Self::apply).
    fn apply_on_device(self, weights: &mut Tensor, gradient: &Tensor, state: &mut [Tensor]) {
        let number = f64::from;
        let mut gradient = gradient * number(self.scale);
        if self.penalty != 0.0 {
            gradient += &*weights * number(self.penalty);
        }
        match (self.algorithm, state) {
            (Algorithm::Sgd { rate }, _) => *weights -= gradient * number(rate),
            (Algorithm::Momentum { rate, momentum }, [buffer, ..]) => {
                *buffer *= number(momentum);
                *buffer += gradient;
                *weights -= &*buffer * number(rate);
            }
            (Algorithm::Adagrad { rate, eps }, [sums, ..]) => {
                *sums += gradient.square();
                *weights -= gradient * number(rate) / (sums.sqrt() + number(eps));
            }
            (Algorithm::Adam { keep, rate, new, beta2, correction, eps }, [means, squares]) => {
                *means += (&gradient - &*means) * number(new[0]);
                *squares *= number(beta2);
                *squares += gradient.square() * number(new[1]);
                *weights *= number(keep);
                *weights -= &*means * number(rate) / (squares.sqrt() / number(correction) + number(eps));
            }
            (algorithm, state) => unreachable!("{algorithm:?} with {} tensors of state", state.len()),
        }
    }

    /// Updates one parameter; slices of state that the algorithm does not have are empty.
    fn apply(self, weights: &mut [f32], gradient: &[f32], [first, second]: [&mut [f32]; 2]) {
        let Self { algorithm, scale, penalty } = self;
        let chunks = weights.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
        let penalised = move |w: f32, g: f32| scale * g + penalty * w;
        match algorithm {
            Algorithm::Sgd { rate } => chunks.for_each(|(weights, gradient)| {
                for (w, g) in weights.iter_mut().zip(gradient) {
                    *w -= rate * penalised(*w, *g);
                }
            }),
            Algorithm::Momentum { rate, momentum } => {
                chunks.zip(first.par_chunks_mut(CHUNK)).for_each(|((weights, gradient), buffer)| {
                    for ((w, g), b) in weights.iter_mut().zip(gradient).zip(buffer) {
                        *b = momentum * *b + penalised(*w, *g);
                        *w -= rate * *b;
                    }
                });
            }
            Algorithm::Adagrad { rate, eps } => {
                chunks.zip(first.par_chunks_mut(CHUNK)).for_each(|((weights, gradient), sums)| {
                    for ((w, g), sum) in weights.iter_mut().zip(gradient).zip(sums) {
                        let g = penalised(*w, *g);
                        *sum += g * g;
                        *w -= rate * g / (sum.sqrt() + eps);
                    }
                });
            }
            Algorithm::Adam { keep, rate, new, beta2, correction, eps } => {
                let state = first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK));
                chunks.zip(state).for_each(|((weights, gradient), (means, squares))| {
                    let state = means.iter_mut().zip(squares);
                    for ((w, g), (mean, square)) in weights.iter_mut().zip(gradient).zip(state) {
                        let g = penalised(*w, *g);
                        *mean += new[0] * (g - *mean);
                        *square = beta2 * *square + new[1] * g * g;
                        *w = keep * *w - rate * *mean / (square.sqrt() / correction + eps);
                    }
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(kind: DenseOptimizerKind) -> DenseOptimizerConfig {
        DenseOptimizerConfig::new(kind, 0.1)
    }

    /// The parameters after three steps with the loss `(p * p).sum() + p[0] * p[1]`.
    fn three_steps(config: &DenseOptimizerConfig, in_memory: bool) -> Vec<f32> {
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0, 0.5]).set_requires_grad(true);
        let parameters = [("p".to_owned(), parameter.shallow_clone())];
        let mut optimizer = DenseOptimizer::with_state(config, parameters, 1, |_| in_memory).unwrap();
        for _ in 0..3 {
            let loss = (&parameter * &parameter).sum(tch::Kind::Float) + parameter.get(0) * parameter.get(1);
            loss.backward();
            let norm = optimizer.gradient_norm();
            optimizer.step(config.learning_rate, norm);
        }
        Vec::try_from(parameter.detach()).unwrap()
    }

    /// Reference, torch 2.11: `p = torch.tensor([1., -2., .5], requires_grad=True)`, the optimizer named, then three
    /// times `o.zero_grad(); ((p * p).sum() + p[0] * p[1]).backward(); o.step()`.
    #[test]
    fn every_algorithm_equals_pytorch() {
        let sgd = config(DenseOptimizerKind::Sgd);
        let adam = config(DenseOptimizerKind::Adam);
        let cases: [(DenseOptimizerConfig, [f32; 3]); 7] = [
            // Adagrad([p], lr=0.1, eps=1e-8)
            (config(DenseOptimizerKind::Adagrad), [0.930_277_05, -1.775_910_3, 0.290_899_2]),
            // SGD([p], lr=0.1)
            (sgd.clone(), [0.922, -1.265, 0.256]),
            // SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01)
            (
                DenseOptimizerConfig { momentum: 0.9, weight_decay: 0.01, ..sgd.clone() },
                [0.862_484_75, -0.581_488_6, 0.029_097_11],
            ),
            // Adam([p], lr=0.1, eps=1e-8)
            (adam.clone(), [0.845_330_7, -1.700_748_8, 0.204_871_25]),
            // Adam([p], lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01)
            (
                DenseOptimizerConfig { betas: [0.8, 0.95], eps: 1e-6, weight_decay: 0.01, ..adam },
                [0.937_135_04, -1.701_065_7, 0.206_350_54],
            ),
            // AdamW([p], lr=0.1, eps=1e-8, weight_decay=0.01)
            (
                DenseOptimizerConfig { weight_decay: 0.01, ..config(DenseOptimizerKind::AdamW) },
                [0.842_433_8, -1.695_070_7, 0.203_712_4],
            ),
            // SGD([p], lr=0.1), with torch.nn.utils.clip_grad_norm_([p], 0.5) before each step
            (
                DenseOptimizerConfig { max_grad_norm: Some(0.5), ..sgd },
                [0.997_651_76, -1.857_725_4, 0.452_579_5],
            ),
        ];
        for (config, expected) in cases {
            for in_memory in [true, false] {
                for (found, expected) in three_steps(&config, in_memory).iter().zip(expected) {
                    assert!((found - expected).abs() < 2e-6, "{config:?}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn the_norm_is_that_of_all_gradients() {
        let values: Vec<f32> = (0..100_003).map(|i| (i % 17) as f32 - 8.0).collect();
        let parameters = [&values[..40_001], &values[40_001..]].map(|values| {
            let parameter = Tensor::from_slice(values).set_requires_grad(true);
            ("p".to_owned(), parameter)
        });
        (&parameters[0].1 * &parameters[0].1).sum(tch::Kind::Float).backward();
        (&parameters[1].1 * &parameters[1].1).sum(tch::Kind::Float).backward();
        let optimizer = DenseOptimizer::new(&config(DenseOptimizerKind::Sgd), parameters, 1).unwrap();
        let expected = values.iter().map(|value| 4.0 * f64::from(value * value)).sum::<f64>().sqrt();
        assert!((optimizer.gradient_norm() / expected - 1.0).abs() < 1e-12);
    }

    #[test]
    fn threads_change_nothing() {
        let config = config(DenseOptimizerKind::Adam);
        let run = |threads| {
            let values: Vec<f32> =
                (0..3 * CHUNK as i32 + 7).map(|i| (i % 1000) as f32 / 500.0 - 1.0).collect();
            let parameter = Tensor::from_slice(&values).set_requires_grad(true);
            let mut optimizer =
                DenseOptimizer::new(&config, [("p".to_owned(), parameter.shallow_clone())], threads).unwrap();
            for _ in 0..2 {
                (&parameter * &parameter * &parameter).sum(tch::Kind::Float).backward();
                let norm = optimizer.gradient_norm();
                optimizer.step(0.1, norm);
            }
            Vec::<f32>::try_from(parameter.detach()).unwrap()
        };
        assert!(run(1) == run(3));
    }

    #[test]
    fn what_is_restored_goes_on_as_before() {
        restored_goes_on_as_before(true);
        restored_goes_on_as_before(false);
    }

    fn restored_goes_on_as_before(in_memory: bool) {
        let config = config(DenseOptimizerKind::Adam);
        let step = |parameter: &Tensor, optimizer: &mut DenseOptimizer| {
            (parameter * parameter).sum(tch::Kind::Float).backward();
            optimizer.step(0.1, optimizer.gradient_norm());
        };
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0]).set_requires_grad(true);
        let named = |tensor: &Tensor| [("p".to_owned(), tensor.shallow_clone())];
        let new = |tensor| DenseOptimizer::with_state(&config, named(tensor), 1, |_| in_memory).unwrap();
        let mut optimizer = new(&parameter);
        step(&parameter, &mut optimizer);
        let copy = parameter.detach().copy().set_requires_grad(true);
        let mut resumed = new(&copy);
        let state: Vec<_> = optimizer.state().map(|(_, name, values)| (name, values.to_vec())).collect();
        let mut state = state.into_iter();
        let fill = |_: &str, name: &'static str, values: &mut [f32]| {
            let (stored, from) = state.next().unwrap();
            assert_eq!(stored, name);
            values.copy_from_slice(&from);
            Ok(())
        };
        resumed.restore(optimizer.steps(), fill).unwrap();
        step(&parameter, &mut optimizer);
        step(&copy, &mut resumed);
        assert_eq!(
            Vec::<f32>::try_from(parameter.detach()).unwrap(),
            Vec::<f32>::try_from(copy.detach()).unwrap()
        );
    }
}
