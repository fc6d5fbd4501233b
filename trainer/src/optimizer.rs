//! Optimizers of the dense part, fused: one pass over a parameter, its gradient and its state per step.
//!
//! libtorch's C interface has no Adagrad, and its other optimizers go through a kernel per operation. On a GPU the pass
//! is a kernel of ours, and the gradient's norm stays there: nothing waits for it before the step is enqueued.

use std::borrow::Cow;

use onefold_kernels::simd::{Lanes, dispatched};
use rayon::prelude::*;
use tch::{Kind, Tensor};

use crate::config::{DenseOptimizerConfig, DenseOptimizerKind};
use crate::device::{Accelerator, DenseRule, DenseUpdate, Learned, Verdict};
use crate::model::Model;
use crate::shim::set_gradient;
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
    /// Where the parameters are, if not in memory.
    flat: Option<Flat>,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    tensor: Tensor,
    /// Where its state begins; on a device, where all of it begins in [`Flat`].
    start: usize,
    length: usize,
}

/// The parameters on a device, one after the other, each from a multiple of [`ALIGNMENT`] on: a step on all of them is one
/// kernel.
#[derive(Debug)]
struct Flat {
    device: Accelerator,
    /// The parameters share its memory.
    weights: Tensor,
    /// As long each.
    state: Vec<Tensor>,
    /// Zeros, for what is between gradients.
    gap: Tensor,
}

/// Values that a parameter on a device begins at a multiple of: products of matrices that stand on 256 bytes are faster.
const ALIGNMENT: usize = 64;

/// The L2 norm of a gradient. A device has found it when all that was enqueued before is done, and decides by it whether
/// a step is taken.
#[derive(Debug)]
pub struct Norm(Found);

#[derive(Debug)]
enum Found {
    InMemory(f64),
    /// With the gradients of [`Flat::gradients`].
    OnDevice(Verdict, Vec<(usize, Tensor)>),
}

/// What has to be finite for a step on a device to be taken, beside the dense gradient.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Conditions<'a> {
    /// The loss, on the device.
    pub(crate) loss: Option<&'a Tensor>,
    /// The sum of the squares of other gradients, `[1]`, a double on the device.
    pub(crate) squares: Option<&'a Tensor>,
}

impl Norm {
    /// The norm of a gradient in memory.
    pub fn known(&self) -> Option<f64> {
        match &self.0 {
            Found::InMemory(norm) => Some(*norm),
            Found::OnDevice(..) => None,
        }
    }

    /// The norm and `logits`, for which the host waits if they are on a device, once for all.
    pub(crate) fn learn(&self, logits: &Tensor) -> Learned {
        match &self.0 {
            Found::InMemory(norm) => Learned { norm: *norm, logits: tensors::to_vec(logits), outcome: None },
            Found::OnDevice(verdict, _) => verdict.read(logits),
        }
    }

    /// What a device decides.
    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        match &self.0 {
            Found::InMemory(_) => None,
            Found::OnDevice(verdict, _) => Some(verdict),
        }
    }
}

impl DenseOptimizer {
    /// An optimizer of a model's dense part, with state of zero where the parameters are; `threads` update those in
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if threads cannot be started.
    pub fn of(model: &Model, config: &DenseOptimizerConfig, threads: usize) -> Result<Self> {
        let device = model.embeddings.on_device().map(|embeddings| embeddings.store.accelerator().clone());
        Self::at(device, config, model.named_dense_parameters(), threads)
    }

    /// An optimizer of `parameters`, contiguous `f32` tensors, which are in memory or on this device.
    fn at(
        device: Option<Accelerator>,
        config: &DenseOptimizerConfig,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
        threads: usize,
    ) -> Result<Self> {
        // PyTorch's names.
        let names: &[&'static str] = match config.kind {
            DenseOptimizerKind::Adagrad => &["sum"],
            DenseOptimizerKind::Sgd if config.momentum > 0.0 => &["momentum_buffer"],
            DenseOptimizerKind::Sgd => &[],
            DenseOptimizerKind::Adam | DenseOptimizerKind::AdamW => &["exp_avg", "exp_avg_sq"],
        };
        let alignment = if device.is_some() { ALIGNMENT } else { 1 };
        let mut total = 0;
        let parameters = parameters.into_iter().map(|(name, tensor)| {
            let (start, length) = (total, tensor.numel());
            total += length.next_multiple_of(alignment);
            Parameter { name, tensor, start, length }
        });
        let mut parameters = parameters.collect::<Vec<_>>();
        let flat = device.map(|device| Flat::new(device, &mut parameters, total, names.len())).transpose()?;
        let in_memory = if flat.is_none() { total } else { 0 };
        let state = names.iter().map(|name| (*name, vec![0.0; in_memory])).collect();
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("onefold-dense-{i}"))
            .build()
            .map_err(std::io::Error::other)?;
        Ok(Self { config: config.clone(), parameters, state, steps: 0, threads, flat })
    }

    /// Steps taken so far, which Adam's bias correction depends on.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The state for a checkpoint: the name of a parameter, the name of its state, and the values, in the parameter's
    /// order.
    pub fn state(&self) -> impl Iterator<Item = (&str, &'static str, Cow<'_, [f32]>)> {
        let of_parameter = |parameter: &'_ Parameter, i: usize| match &self.flat {
            Some(flat) => Cow::Owned(tensors::to_vec(&parameter.part_of(&flat.state[i]))),
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
                match &self.flat {
                    Some(flat) => {
                        let mut host = vec![0.0; parameter.length];
                        fill(&parameter.name, name, &mut host)?;
                        let mut values = parameter.part_of(&flat.state[i]);
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

    /// The L2 norm of the gradient that `backward` left, over all parameters. On a device it is found when all that was
    /// enqueued is done, and the step is taken if it is a finite number.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub fn gradient_norm(&self) -> Result<Norm> {
        self.judge(Conditions::default())
    }

    /// The same; on a device the step is taken if the conditions hold as well.
    pub(crate) fn judge(&self, conditions: Conditions<'_>) -> Result<Norm> {
        let Some(flat) = &self.flat else {
            let gradients = self.parameters.iter().filter_map(Parameter::gradient).collect::<Vec<_>>();
            // SAFETY: the backward pass that wrote the gradients is over.
            let chunks =
                gradients.iter().flat_map(|gradient| unsafe { tensors::as_slice(gradient) }.chunks(CHUNK));
            let chunks: Vec<&[f32]> = chunks.collect();
            let squares: Vec<f64> = self
                .threads
                .install(|| chunks.par_iter().with_max_len(1).map(|chunk| sum_of_squares(chunk)).collect());
            return Ok(Norm(Found::InMemory(squares.iter().sum::<f64>().sqrt())));
        };
        let gradients = flat.gradients(&self.parameters)?;
        let all = gradients.iter().map(|(_, gradient)| gradient.shallow_clone()).collect::<Vec<_>>();
        let squares = flat.device.sum_of_squares(&all)?;
        let Conditions { loss, squares: others } = conditions;
        let verdict = flat.device.judge(loss, &squares, others, self.config.max_grad_norm)?;
        Ok(Norm(Found::OnDevice(verdict, gradients)))
    }

    /// One step at `learning_rate` with the gradients that `backward` left and whose norm is `norm`; afterwards there are
    /// none. A gradient longer than `max_grad_norm` is scaled as by `torch.nn.utils.clip_grad_norm_`. A device
    /// that finds that the step may not be taken leaves everything as it is.
    ///
    /// The algorithms are those of `torch.optim` with defaults for all that the configuration does not have.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    ///
    /// # Panics
    ///
    /// If the norm is one of elsewhere.
    pub fn step(&mut self, learning_rate: f64, norm: &Norm) -> Result<()> {
        self.steps += 1;
        let update = DenseUpdate::new(&self.config, learning_rate, self.steps);
        match (&self.flat, &norm.0) {
            (Some(flat), Found::OnDevice(verdict, gradients)) => {
                gradients.iter().try_for_each(|(start, own)| flat.step(&update, *start, own, verdict))?;
            }
            (None, Found::InMemory(norm)) => self.step_in_memory(update, *norm),
            _ => panic!("the norm of a gradient that is elsewhere"),
        }
        // The next gradient takes this one's place, and is not added to zeros.
        self.parameters.iter().for_each(|parameter| set_gradient(&parameter.tensor, None));
        Ok(())
    }

    fn step_in_memory(&mut self, update: DenseUpdate, norm: f64) {
        let scale = self.config.max_grad_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0)) as f32;
        let Self { parameters, state, threads, .. } = self;
        let gradients: Vec<Option<Tensor>> = parameters.iter().map(Parameter::gradient).collect();
        let mut state = state.iter_mut().map(|(_, values)| &mut values[..]);
        let mut state = [state.next().unwrap_or_default(), state.next().unwrap_or_default()];
        let mut jobs = Vec::new();
        for (parameter, gradient) in parameters.iter_mut().zip(&gradients) {
            // Without state there is nothing to split.
            let own = state.each_mut().map(|rest| {
                let length = parameter.length.min(rest.len());
                rest.split_off_mut(..length).unwrap_or_default()
            });
            let Some(gradient) = gradient else { continue };
            // SAFETY: the update is given the weights, the gradient, whose storage is another one, and vectors of
            // ours. Whoever else has a handle of the parameter, as the model does, computes before a step or after
            // it, on this thread.
            let (weights, gradient) =
                unsafe { (tensors::as_mut_slice(&mut parameter.tensor), tensors::as_slice(gradient)) };
            let [first, second] = own;
            let mut states = [first.chunks_mut(CHUNK), second.chunks_mut(CHUNK)];
            for (weights, gradient) in weights.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK)) {
                let state = states.each_mut().map(|chunks| chunks.next().unwrap_or_default());
                jobs.push((weights, gradient, state));
            }
        }
        let update = |(weights, gradient, state)| apply(update, weights, gradient, scale, state);
        threads.install(|| jobs.into_par_iter().with_max_len(1).for_each(update));
    }
}

impl Parameter {
    /// Its gradient, if it has one.
    fn gradient(&self) -> Option<Tensor> {
        let gradient = self.tensor.grad();
        gradient.defined().then(|| gradient.contiguous())
    }

    /// Its part of one of [`Flat`]'s tensors, in its shape.
    fn part_of(&self, flat: &Tensor) -> Tensor {
        flat.narrow(0, self.start as i64, self.length as i64).view(self.tensor.size().as_slice())
    }
}

impl Flat {
    /// Moves the parameters into one tensor of `total` values, beside `states` tensors of zeros.
    fn new(device: Accelerator, parameters: &mut [Parameter], total: usize, states: usize) -> Result<Self> {
        let zeros = |length: usize| device.zeros(&[length as i64], Kind::Float);
        let flat = Self {
            weights: zeros(total)?,
            state: (0..states).map(|_| zeros(total)).collect::<Result<_>>()?,
            gap: zeros(ALIGNMENT)?,
            device,
        };
        tch::no_grad(|| {
            for parameter in parameters {
                let mut place = parameter.part_of(&flat.weights);
                place.copy_(&parameter.tensor);
                // The model's handles of the parameter lead to the same tensor.
                parameter.tensor.set_data(&place);
            }
        });
        Ok(flat)
    }

    /// The gradients, with the same gaps as the parameters, and where each run of them begins: what has no gradient ends
    /// a run.
    fn gradients(&self, parameters: &[Parameter]) -> Result<Vec<(usize, Tensor)>> {
        let mut runs: Vec<(usize, Vec<Tensor>)> = Vec::new();
        let mut is_run = false;
        for parameter in parameters {
            let gradient = parameter.gradient();
            if let Some(gradient) = &gradient {
                if !is_run {
                    runs.push((parameter.start, Vec::new()));
                }
                let gap = (parameter.length.next_multiple_of(ALIGNMENT) - parameter.length) as i64;
                let (_, run) = runs.last_mut().expect("a run was begun");
                run.push(gradient.view(-1));
                run.extend((gap > 0).then(|| self.gap.narrow(0, 0, gap)));
            }
            is_run = gradient.is_some();
        }
        runs.into_iter().map(|(start, run)| Ok((start, Tensor::f_cat(&run, 0)?))).collect()
    }

    /// One step of the parameters from `start` on, as many as there are gradients.
    fn step(&self, update: &DenseUpdate, start: usize, gradient: &Tensor, verdict: &Verdict) -> Result<()> {
        let part = |flat: &Tensor| flat.narrow(0, start as i64, gradient.numel() as i64);
        let state = self.state.iter().map(part).collect::<Vec<_>>();
        self.device.dense_update(update, &part(&self.weights), gradient, &state, verdict)
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

impl DenseUpdate {
    /// One step's rule, with all numbers that do not depend on the parameter.
    fn new(config: &DenseOptimizerConfig, rate: f64, steps: u64) -> Self {
        let eps = config.eps as f32;
        let decoupled = config.kind == DenseOptimizerKind::AdamW;
        let penalty = if decoupled { 0.0 } else { config.weight_decay as f32 };
        let plain = |rule| Self { rule, rate: rate as f32, penalty };
        match config.kind {
            DenseOptimizerKind::Adagrad => plain(DenseRule::Adagrad { eps }),
            DenseOptimizerKind::Sgd if config.momentum > 0.0 => {
                plain(DenseRule::Momentum { momentum: config.momentum as f32 })
            }
            DenseOptimizerKind::Sgd => plain(DenseRule::Sgd),
            DenseOptimizerKind::Adam | DenseOptimizerKind::AdamW => {
                let correct = |beta: f64| 1.0 - beta.powf(steps as f64);
                let rule = DenseRule::Adam {
                    keep: if decoupled { (1.0 - rate * config.weight_decay) as f32 } else { 1.0 },
                    // In double precision first: 1 - 0.999 has three digits less.
                    new: config.betas.map(|beta| (1.0 - beta) as f32),
                    beta2: config.betas[1] as f32,
                    correction: correct(config.betas[1]).sqrt() as f32,
                    eps,
                };
                Self { rule, rate: (rate / correct(config.betas[0])) as f32, penalty }
            }
        }
    }
}

dispatched! {
    /// Updates some weights, whose gradient is taken times `scale`; slices of state that the rule does not have are
    /// empty.
    fn apply(
        update: DenseUpdate, weights: &mut [f32], gradient: &[f32], scale: f32, state: [&mut [f32]; 2],
    ) = wide apply_with
}

/// The loops are compiled for the processor's vectors, whose operations are those on numbers.
#[inline(always)]
#[allow(clippy::extra_unused_type_parameters, reason = "`dispatched!` calls it with a type of vectors")]
fn apply_with<L: Lanes<N>, const N: usize>(
    DenseUpdate { rule, rate, penalty }: DenseUpdate,
    weights: &mut [f32],
    gradient: &[f32],
    scale: f32,
    [first, second]: [&mut [f32]; 2],
) {
    let penalised = move |w: f32, g: f32| scale * g + penalty * w;
    let pairs = weights.iter_mut().zip(gradient);
    match rule {
        DenseRule::Sgd => {
            for (w, g) in pairs {
                *w -= rate * penalised(*w, *g);
            }
        }
        DenseRule::Momentum { momentum } => {
            for ((w, g), b) in pairs.zip(first) {
                *b = momentum * *b + penalised(*w, *g);
                *w -= rate * *b;
            }
        }
        DenseRule::Adagrad { eps } => {
            for ((w, g), sum) in pairs.zip(first) {
                let g = penalised(*w, *g);
                *sum += g * g;
                *w -= rate * g / (sum.sqrt() + eps);
            }
        }
        DenseRule::Adam { keep, new, beta2, correction, eps } => {
            for ((w, g), (mean, square)) in pairs.zip(first.iter_mut().zip(second)) {
                let g = penalised(*w, *g);
                *mean += new[0] * (g - *mean);
                *square = beta2 * *square + new[1] * g * g;
                *w = keep * *w - rate * *mean / (square.sqrt() / correction + eps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::emulated;

    fn config(kind: DenseOptimizerKind) -> DenseOptimizerConfig {
        DenseOptimizerConfig::new(kind, 0.1)
    }

    /// The parameters after three steps with the loss `(p * p).sum() + p[0] * p[1]`.
    fn three_steps(config: &DenseOptimizerConfig, device: Option<Accelerator>) -> Vec<f32> {
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0, 0.5]).set_requires_grad(true);
        let parameters = [("p".to_owned(), parameter.shallow_clone())];
        let mut optimizer = DenseOptimizer::at(device, config, parameters, 1).unwrap();
        for _ in 0..3 {
            let loss = (&parameter * &parameter).sum(tch::Kind::Float) + parameter.get(0) * parameter.get(1);
            loss.backward();
            let norm = optimizer.gradient_norm().unwrap();
            optimizer.step(config.learning_rate, &norm).unwrap();
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
            DenseOptimizer::at(device, &config, parameters, 1).unwrap().gradient_norm().unwrap()
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
        let run = |threads| {
            let values: Vec<f32> =
                (0..3 * CHUNK as i32 + 7).map(|i| (i % 1000) as f32 / 500.0 - 1.0).collect();
            let parameter = Tensor::from_slice(&values).set_requires_grad(true);
            let mut optimizer =
                DenseOptimizer::at(None, &config, [("p".to_owned(), parameter.shallow_clone())], threads)
                    .unwrap();
            for _ in 0..2 {
                (&parameter * &parameter * &parameter).sum(tch::Kind::Float).backward();
                let norm = optimizer.gradient_norm().unwrap();
                optimizer.step(0.1, &norm).unwrap();
            }
            Vec::<f32>::try_from(parameter.detach()).unwrap()
        };
        assert!(run(1) == run(3));
    }

    #[test]
    fn what_is_restored_goes_on_as_before() {
        restored_goes_on_as_before(None);
        restored_goes_on_as_before(Some(emulated()));
    }

    fn restored_goes_on_as_before(device: Option<Accelerator>) {
        let config = config(DenseOptimizerKind::Adam);
        let step = |parameter: &Tensor, optimizer: &mut DenseOptimizer| {
            (parameter * parameter).sum(tch::Kind::Float).backward();
            let norm = optimizer.gradient_norm().unwrap();
            optimizer.step(0.1, &norm).unwrap();
        };
        let parameter = Tensor::from_slice(&[1.0_f32, -2.0]).set_requires_grad(true);
        let named = |tensor: &Tensor| [("p".to_owned(), tensor.shallow_clone())];
        let new = |tensor| DenseOptimizer::at(device.clone(), &config, named(tensor), 1).unwrap();
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

    /// What is no finite number: a gradient, the loss, or a gradient of other parameters.
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
            let conditions = Conditions { loss: Some(&loss), squares: Some(&squares) };
            let norm = optimizer.judge(conditions).unwrap();
            optimizer.step(0.1, &norm).unwrap();
            let learned = norm.learn(&Tensor::from_slice(&[0.25_f32]));
            let (loss, others_are_finite) = learned.outcome.unwrap();
            let state = optimizer.state().flat_map(|(_, _, values)| values.to_vec()).collect::<Vec<_>>();
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
