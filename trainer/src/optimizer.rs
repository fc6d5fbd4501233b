//! Optimizers of the dense part. They use libtorch's fused kernels, with one call per step for all parameters.
//!
//! tch has no bindings of these kernels, so they are called through `shim.cpp`. The norm of the gradient is
//! computed here, in an order of summation that does not depend on the number of threads. On a GPU the norm
//! stays on the device, and the kernels read from the device whether to apply the step, so that the host does
//! not wait.

use rayon::prelude::*;
use tch::{Kind, Tensor};

use crate::config::{DenseOptimizerConfig, DenseOptimizerKind};
use crate::device::{Accelerator, Learned, Verdict};
use crate::model::Model;
use crate::shim::{FusedOptimizer, FusedTensors, fused_step, set_gradient};
use crate::{Result, tensors};

/// The number of gradient values that one thread processes at a time.
const CHUNK: usize = 1 << 15;

/// Updates the dense part's parameters in place. The result does not depend on the number of threads.
#[derive(Debug)]
pub struct DenseOptimizer {
    config: DenseOptimizerConfig,
    parameters: Vec<Parameter>,
    /// PyTorch's names of the state tensors of each parameter.
    state_names: &'static [&'static str],
    steps: u64,
    threads: rayon::ThreadPool,
    /// The device of the parameters; `None` for main memory.
    device: Option<Accelerator>,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    tensor: Tensor,
    /// One flat tensor per state name, with one value per value of the parameter.
    state: Vec<Tensor>,
}

/// The L2 norm of a gradient. On a device, the norm is available once all work enqueued before is done, and the
/// device decides by it whether to apply the step.
#[derive(Debug)]
pub(crate) enum Norm {
    InMemory(f64),
    OnDevice(Verdict),
}

impl Norm {
    /// Returns the norm of a gradient in main memory, or `None` for a device.
    pub(crate) fn known(&self) -> Option<f64> {
        match self {
            Self::InMemory(norm) => Some(*norm),
            Self::OnDevice(_) => None,
        }
    }

    /// Returns the norm and `logits`. For a device, the host waits once for both.
    pub(crate) fn learn(&self, logits: &Tensor) -> Learned {
        match self {
            Self::InMemory(norm) => Learned { norm: *norm, logits: tensors::to_vec(logits), outcome: None },
            Self::OnDevice(verdict) => verdict.read(logits),
        }
    }

    /// Returns whether the step may be taken, as the device has decided: `[1]`, `int`. `None` for main memory.
    pub(crate) fn permit(&self) -> Option<&Tensor> {
        match self {
            Self::InMemory(_) => None,
            Self::OnDevice(verdict) => Some(&verdict.permit),
        }
    }
}

impl DenseOptimizer {
    /// Creates an optimizer of a model's dense part, with zero state on the device of the parameters. `threads`
    /// threads compute the norms of gradients in main memory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if threads cannot be started, [`Error::Torch`](crate::Error::Torch) if the state
    /// cannot be allocated.
    pub fn of(model: &Model, config: &DenseOptimizerConfig, threads: usize) -> Result<Self> {
        let device = model.embeddings.on_device().map(|embeddings| embeddings.store.accelerator().clone());
        Self::at(device, config, model.named_dense_parameters(), threads)
    }

    /// Creates an optimizer of `parameters`, contiguous `f32` tensors in main memory or on `device`.
    fn at(
        device: Option<Accelerator>,
        config: &DenseOptimizerConfig,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
        threads: usize,
    ) -> Result<Self> {
        let state_names: &'static [&'static str] = match config.kind {
            DenseOptimizerKind::Adagrad => &["sum"],
            DenseOptimizerKind::Sgd if config.momentum > 0.0 => &["momentum_buffer"],
            DenseOptimizerKind::Sgd => &[],
            DenseOptimizerKind::Adam | DenseOptimizerKind::AdamW => &["exp_avg", "exp_avg_sq"],
        };
        let parameter = |(name, tensor): (String, Tensor)| -> Result<Parameter> {
            let (length, options) = (tensor.numel() as i64, (Kind::Float, tensor.device()));
            let zeros = |_: &&str| -> Result<Tensor> { Ok(Tensor::f_zeros([length], options)?) };
            let state = state_names.iter().map(zeros).collect::<Result<Vec<_>>>()?;
            Ok(Parameter { name, tensor, state })
        };
        let parameters = parameters.into_iter().map(parameter).collect::<Result<Vec<_>>>()?;
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("onefold-dense-{i}"))
            .build()
            .map_err(std::io::Error::other)?;
        Ok(Self { config: config.clone(), parameters, state_names, steps: 0, threads, device })
    }

    /// Returns the number of steps so far, which Adam's bias correction depends on.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the state for a checkpoint: name of the parameter, name of the state, and values, in the order
    /// of the parameters.
    pub fn state(&self) -> impl Iterator<Item = (&str, &'static str, Vec<f32>)> {
        self.parameters.iter().flat_map(move |parameter| {
            let state = self.state_names.iter().zip(&parameter.state);
            state.map(move |(name, values)| (parameter.name.as_str(), *name, tensors::to_vec(values)))
        })
    }

    /// Restores the state after `steps` steps. `fill` is called with the names that [`state`](Self::state)
    /// returns and the values to fill in.
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
            for (name, state) in self.state_names.iter().zip(&mut parameter.state) {
                let mut values = vec![0.0; state.numel()];
                fill(&parameter.name, name, &mut values)?;
                state.copy_(&Tensor::from_slice(&values));
            }
        }
        Ok(())
    }

    /// Applies the gradients that `backward` computed to the parameters, if they are finite, and removes them.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub fn apply(&mut self, learning_rate: f64) -> Result<()> {
        let norm = self.judge(None, None)?;
        self.step(learning_rate, &norm)
    }

    /// Returns the L2 norm of the gradient that `backward` computed, over all parameters. A device computes it
    /// asynchronously, and applies the next step only if the norm, `loss`, and `others`, the sum of squares of the
    /// other gradients (a double, `[1]`), are finite. The tensors are on the device.
    pub(crate) fn judge(&self, loss: Option<&Tensor>, others: Option<&Tensor>) -> Result<Norm> {
        let gradients = self.parameters.iter().filter_map(Parameter::gradient).collect::<Vec<_>>();
        let Some(device) = &self.device else {
            // SAFETY: the backward pass that wrote the gradients is over.
            let chunks =
                gradients.iter().flat_map(|gradient| unsafe { tensors::as_slice(gradient) }.chunks(CHUNK));
            let chunks: Vec<&[f32]> = chunks.collect();
            let squares: Vec<f64> = self
                .threads
                .install(|| chunks.par_iter().with_max_len(1).map(|chunk| sum_of_squares(chunk)).collect());
            return Ok(Norm::InMemory(squares.iter().sum::<f64>().sqrt()));
        };
        // One kernel concatenates the gradients, and one kernel sums their squares.
        let all = if gradients.is_empty() { Vec::new() } else { vec![Tensor::f_cat(&gradients, 0)?] };
        let squares = device.sum_of_squares(&all)?;
        Ok(Norm::OnDevice(device.judge(loss, &squares, others, self.config.max_grad_norm)?))
    }

    /// Takes a step with rate `learning_rate` and the gradients that `backward` computed, whose norm is `norm`,
    /// and removes the gradients. Scales a gradient with a norm above `max_grad_norm` as
    /// `torch.nn.utils.clip_grad_norm_` does. If a device decides against the step, nothing changes.
    ///
    /// The algorithms equal those of `torch.optim`, with PyTorch's defaults for all settings that the
    /// configuration lacks.
    pub(crate) fn step(&mut self, learning_rate: f64, norm: &Norm) -> Result<()> {
        self.steps += 1;
        let mut own = FusedTensors::default();
        for parameter in &self.parameters {
            let Some(gradient) = parameter.gradient() else { continue };
            own.parameters.push(parameter.tensor.detach().view(-1));
            own.gradients.push(gradient);
            for (states, state) in own.states.iter_mut().zip(&parameter.state) {
                states.push(state.shallow_clone());
            }
        }
        let optimizer = FusedOptimizer::new(&self.config, learning_rate);
        match norm {
            Norm::InMemory(norm) => {
                let divisor = self.config.max_grad_norm.map(|max| (norm + 1e-6) / max);
                let divisor = divisor.filter(|divisor| *divisor > 1.0).map(|d| Tensor::from(d as f32));
                fused_step(&optimizer, self.steps, &own, divisor.as_ref(), None)?;
            }
            Norm::OnDevice(verdict) => {
                fused_step(&optimizer, self.steps, &own, Some(&verdict.divisor), Some(&verdict.refused))?;
            }
        }
        // Without a stored gradient, libtorch stores the next one directly instead of adding it to zeros.
        self.parameters.iter().for_each(|parameter| set_gradient(&parameter.tensor, None));
        Ok(())
    }
}

impl Parameter {
    /// Returns the flattened gradient, if there is one. Tensors of a fused step must have equal strides.
    fn gradient(&self) -> Option<Tensor> {
        let gradient = self.tensor.grad();
        gradient.defined().then(|| gradient.contiguous().view(-1))
    }
}

/// Sums squares in eight accumulators, which the processor computes in parallel; the order of summation is
/// fixed.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::host::emulated;

    fn config(kind: DenseOptimizerKind) -> DenseOptimizerConfig {
        DenseOptimizerConfig::new(kind, 0.1)
    }

    /// Returns the parameters after three steps with the loss `(p * p).sum() + p[0] * p[1]`.
    fn three_steps(config: &DenseOptimizerConfig, device: Option<Accelerator>) -> Vec<f32> {
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0, 0.5]).set_requires_grad(true);
        let parameters = [("p".to_owned(), parameter.shallow_clone())];
        let mut optimizer = DenseOptimizer::at(device, config, parameters, 1).unwrap();
        for _ in 0..3 {
            let loss = (&parameter * &parameter).sum(tch::Kind::Float) + parameter.get(0) * parameter.get(1);
            loss.backward();
            let norm = optimizer.judge(None, None).unwrap();
            optimizer.step(config.learning_rate, &norm).unwrap();
        }
        Vec::try_from(parameter.detach()).unwrap()
    }

    /// The expected values are from torch 2.11: `p = torch.tensor([1., -2., .5], requires_grad=True)`, the
    /// given optimizer, then three times `o.zero_grad(); ((p * p).sum() + p[0] * p[1]).backward(); o.step()`.
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
            for device in [None, Some(emulated())] {
                for (found, expected) in three_steps(&config, device).iter().zip(expected) {
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
        let expected = values.iter().map(|value| 4.0 * f64::from(value * value)).sum::<f64>().sqrt();
        let norm = |device| {
            let parameters = parameters.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
            let config = config(DenseOptimizerKind::Sgd);
            DenseOptimizer::at(device, &config, parameters, 1).unwrap().judge(None, None).unwrap()
        };
        let (in_memory, on_device) = (norm(None).known().unwrap(), norm(Some(emulated())));
        let on_device = on_device.learn(&Tensor::from_slice::<f32>(&[]));
        for norm in [in_memory, on_device.norm] {
            assert!((norm / expected - 1.0).abs() < 1e-12, "{norm} {expected}");
        }
    }

    #[test]
    fn threads_change_nothing() {
        let config = config(DenseOptimizerKind::Adam);
        let before = tch::get_num_threads();
        let run = |threads: usize| {
            tch::set_num_threads(threads as i32);
            let values: Vec<f32> =
                (0..3 * CHUNK as i32 + 7).map(|i| (i % 1000) as f32 / 500.0 - 1.0).collect();
            let parameter = Tensor::from_slice(&values).set_requires_grad(true);
            let mut optimizer =
                DenseOptimizer::at(None, &config, [("p".to_owned(), parameter.shallow_clone())], threads)
                    .unwrap();
            for _ in 0..2 {
                (&parameter * &parameter * &parameter).sum(tch::Kind::Float).backward();
                let norm = optimizer.judge(None, None).unwrap();
                optimizer.step(0.1, &norm).unwrap();
            }
            Vec::<f32>::try_from(parameter.detach()).unwrap()
        };
        let results = [1, 3].map(run);
        tch::set_num_threads(before);
        assert!(results[0] == results[1]);
    }

    #[test]
    fn a_restored_optimizer_continues_as_the_original() {
        restored_goes_on_as_before(None);
        restored_goes_on_as_before(Some(emulated()));
    }

    fn restored_goes_on_as_before(device: Option<Accelerator>) {
        let config = config(DenseOptimizerKind::Adam);
        let step = |parameter: &Tensor, optimizer: &mut DenseOptimizer| {
            (parameter * parameter).sum(tch::Kind::Float).backward();
            let norm = optimizer.judge(None, None).unwrap();
            optimizer.step(0.1, &norm).unwrap();
        };
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0]).set_requires_grad(true);
        let named = |tensor: &Tensor| [("p".to_owned(), tensor.shallow_clone())];
        let new = |tensor| DenseOptimizer::at(device.clone(), &config, named(tensor), 1).unwrap();
        let mut optimizer = new(&parameter);
        step(&parameter, &mut optimizer);
        let copy = parameter.detach().copy().set_requires_grad(true);
        let mut resumed = new(&copy);
        let state: Vec<_> = optimizer.state().map(|(_, name, values)| (name, values)).collect();
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

    /// Tests values that are not finite in a gradient, in the loss, or in the gradients of other parameters.
    #[test]
    fn a_device_takes_no_step_that_may_not_be_taken() {
        let numbers = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let cases = (0..3).flat_map(|place| numbers.map(|number| (place, number)));
        for (place, wrong) in cases.chain([(3, 1.0)]) {
            let number = |own| if own == place { wrong } else { 1.0 };
            let parameter = Tensor::from_slice(&[1.0_f32, -2.0]).set_requires_grad(true);
            (&parameter * Tensor::from_slice(&[0.5, number(0)])).sum(tch::Kind::Float).backward();
            let named = [("p".to_owned(), parameter.shallow_clone())];
            let config = config(DenseOptimizerKind::Adagrad);
            let mut optimizer = DenseOptimizer::at(Some(emulated()), &config, named, 1).unwrap();
            let (loss, squares) = (Tensor::from(number(1)), Tensor::from_slice(&[f64::from(number(2))]));
            let norm = optimizer.judge(Some(&loss), Some(&squares)).unwrap();
            optimizer.step(0.1, &norm).unwrap();
            let learned = norm.learn(&Tensor::from_slice(&[0.25_f32]));
            let (loss, others_are_finite) = learned.outcome.unwrap();
            let state = optimizer.state().flat_map(|(_, _, values)| values).collect::<Vec<_>>();
            let weights = Vec::<f32>::try_from(parameter.detach()).unwrap();
            let finite = [learned.norm.is_finite(), loss.is_finite(), others_are_finite];
            assert_eq!(finite, [0, 1, 2].map(|own| own != place), "{place} {wrong}");
            assert_eq!(learned.logits, [0.25]);
            if place < 3 {
                assert_eq!((weights, state), (vec![1.0, -2.0], vec![0.0; 2]), "{place} {wrong}");
            } else {
                assert!(weights[0] < 1.0 && weights[1] < -2.0 && state == [0.25, 1.0]);
                assert!(!parameter.grad().defined());
            }
        }
    }
}
