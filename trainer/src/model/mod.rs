//! The DLRM: bottom MLP, pooled embeddings, interaction by dot products (Naumov et al. 2019) or cross layers, top MLP.

mod attention;
mod compute;
mod cross;
mod din;
mod encoder;
mod forward;
mod interact;
mod linear;
mod lists;
mod mlp;
mod normalize;
mod on_device;
mod padded;
mod profile;
#[cfg(test)]
mod pytorch;
mod sequences;
#[cfg(test)]
pub(crate) mod tests;

use std::cell::{OnceCell, RefCell};

use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use tch::{Device, Tensor, nn};

use self::compute::Compute;
pub(crate) use self::compute::arithmetic_of;
use self::cross::CrossNet;
pub use self::forward::{Forward, Input};
use self::mlp::Mlp;
use self::normalize::NormalizationLayer;
use self::on_device::Recordings;
pub use self::profile::{Profile, Stage};
use self::sequences::Blocks;
use crate::config::Interaction;
use crate::device::guarded;
use crate::embedding::Embeddings;
use crate::metrics::{Loss, Task};
use crate::normalize::Normalizers;
use crate::shim::allow_tf32;
use crate::{Precision, Result, TrainConfig, tensors};

/// A DLRM: the dense part's parameters, and the embedding tables.
#[derive(Debug)]
pub struct Model {
    variables: nn::VarStore,
    dense_features: i64,
    /// `None` if dense features stay as they are.
    normalization: Option<NormalizationLayer>,
    bottom: Option<Mlp>,
    blocks: Blocks,
    crosses: Option<CrossNet>,
    top: Mlp,
    /// What each logit predicts, and the weight of its loss.
    tasks: Vec<(Task, f64)>,
    compute: Compute,
    /// On a device: which of all products of a sample's vectors are the interaction's.
    triangle: OnceCell<Tensor>,
    /// On a device: the dense parts of steps as graphs.
    recordings: RefCell<Recordings>,
    /// The tables.
    pub embeddings: Embeddings,
    /// The time that each stage takes.
    pub profile: Profile,
}

impl Model {
    /// A model around given tables; the dense part has initial parameters from the configuration's seed, the same on
    /// every rank. It is where the tables are: on the CPU, or on their device.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) if the schema lacks a label.
    pub fn new(config: &TrainConfig, schema: &Schema, embeddings: Embeddings) -> Result<Self> {
        let features = embeddings.features();
        let weights = config.all_tasks().into_iter().map(|task| task.weight);
        let tasks = Task::of(config, schema)?.into_iter().zip(weights).collect();
        let variables = nn::VarStore::new(Device::Cpu);
        let root = variables.root();
        let dim = config.embedding.dim as i64;
        let dense = schema.dense.len() as i64;
        let vectors = features.len() as i64 + i64::from(dense > 0);
        let width = config.model.interaction.width(vectors, dim, dense > 0);
        let compute = Compute::new(config.train.precision, embeddings.threads());
        let (bottom, blocks, crosses, top) = tensors::seeded(config.train.seed as i64, || {
            let (path, widths) = (&root / "bottom", &config.model.bottom_mlp);
            let bottom = (dense > 0).then(|| Mlp::new(&path, dense, widths, true, &compute));
            let blocks = Blocks::new(&root, &config.model, features, dim, &compute);
            let crosses = (config.model.interaction == Interaction::Dcn).then(|| {
                let (layers, rank) = (config.model.dcn_num_layers, config.model.dcn_low_rank_dim);
                CrossNet::new(&(&root / "cross"), width, layers, rank, &compute)
            });
            let top = Mlp::new(&(&root / "top"), width, &config.model.top_mlp, false, &compute);
            (bottom, blocks, crosses, top)
        });
        let (triangle, profile) = (OnceCell::new(), Profile::default());
        let mut model = Self {
            variables,
            dense_features: dense,
            normalization: None,
            bottom,
            blocks,
            crosses,
            top,
            tasks,
            compute,
            triangle,
            recordings: RefCell::default(),
            embeddings,
            profile,
        };
        if let Some(embeddings) = model.embeddings.on_device() {
            let device = embeddings.store.accelerator().torch();
            guarded(device, || {
                allow_tf32(config.train.precision == Precision::Tf32);
                model.variables.set_device(device);
                Ok(())
            })?;
        }
        Ok(model)
    }

    /// The same model, before its first step, whose logits begin around these, one for each task.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if there is another number of logits than of tasks.
    pub(crate) fn starting_at(self, logits: &[f32]) -> Result<Self> {
        if let Some(bias) = self.top.last_bias() {
            let logits = Tensor::f_from_slice(logits)?;
            tch::no_grad(|| bias.shallow_clone().f_copy_(&logits))?;
        }
        Ok(self)
    }

    /// The same model, which normalizes the dense features of `schema` first.
    #[must_use]
    pub fn normalized_by(self, schema: &Schema, normalizers: &Normalizers) -> Self {
        let device = self.embeddings.on_device().map(|_| self.device());
        let normalization = NormalizationLayer::new(&schema.dense, normalizers, device);
        Self { normalization, ..self }
    }

    /// The normalized dense features of a batch in memory, `[B, F]`.
    fn dense_of(&self, batch: &Batch) -> Tensor {
        // Of no samples a batch does not know its dense features.
        let shape = [batch.size() as i64, self.dense_features];
        match &self.normalization {
            Some(normalization) => tensors::from_f32(&normalization.normalized(batch.dense()), &shape),
            None => tensors::from_f32(batch.dense(), &shape),
        }
    }

    /// The parameters of the dense part, with gradients after `backward`.
    pub fn dense_parameters(&self) -> Vec<Tensor> {
        self.variables.trainable_variables()
    }

    /// The parameters of the dense part by name.
    pub fn named_dense_parameters(&self) -> std::collections::BTreeMap<String, Tensor> {
        self.variables.variables().into_iter().collect()
    }

    /// What computes the products of the dense part, for logs: where that is, its instructions and its precision.
    pub fn kernels(&self) -> String {
        let records = self.embeddings.on_device().is_some_and(|own| own.store.accelerator().records());
        let graphs = if records { ", graphs" } else { "" };
        format!("{}{graphs}", self.compute.name(self.device()))
    }

    /// Where the model is.
    pub fn device(&self) -> Device {
        self.variables.device()
    }

    /// This rank's part of the loss of a forward pass of `batch`: the tasks' losses, each times its weight, summed. A
    /// task's loss is that of its samples, weighted by the samples' weights where there are any, and divided by
    /// `weight`: the sum of the weights of the global batch, or its samples.
    pub fn loss(&self, forward: &Forward, batch: &Batch, weight: f64) -> Tensor {
        let divide = |sum: Tensor, of_task: f64| sum * (of_task / divisor(weight));
        // Those of a batch on a device came with it; to copy them now, the host would wait for all that is enqueued.
        if let Some((labels, weights)) = forward.passed.labels() {
            return self.loss_of(&forward.logits, labels, weights, divide);
        }
        let (size, device) = (batch.size() as i64, self.device());
        // Of no samples a batch does not know how many labels they have.
        let width = match self.tasks.iter().map(|(task, _)| task.column + 1).max() {
            Some(width) if size == 0 => width,
            _ => batch.label_width(),
        };
        let labels = tensors::from_f32(batch.labels(), &[size, width as i64]).to_device(device);
        let weights = batch.weights().map(|weights| tensors::from_f32(weights, &[size]).to_device(device));
        self.loss_of(&forward.logits, &labels, weights.as_ref(), divide)
    }

    /// The same of logits, `[B, tasks]`, and all labels, `[B, labels]`; `divide` has a task's loss from the sum over its
    /// samples and the task's weight.
    fn loss_of(
        &self,
        logits: &Tensor,
        labels: &Tensor,
        weights: Option<&Tensor>,
        divide: impl Fn(Tensor, f64) -> Tensor,
    ) -> Tensor {
        let losses = self.tasks.iter().enumerate().map(|(column, (task, of_task))| {
            let (logits, labels) = (logits.select(1, column as i64), labels.select(1, task.column as i64));
            divide(loss_of_samples(task.loss, &logits, &labels, weights), *of_task)
        });
        losses.reduce(|a, b| a + b).expect("a model has a task")
    }

    /// `[B, tasks]` from what goes into the cross layers or the top MLP.
    fn logits_of(&self, input: &Tensor) -> Tensor {
        match &self.crosses {
            None => self.top.forward(input),
            Some(crosses) => self.top.forward(&crosses.forward(input)),
        }
    }

    /// The sum of the weights of a batch's samples: their number, where they have no weights.
    pub fn weight(batch: &Batch) -> f64 {
        let sum = |weights: &[f32]| weights.iter().map(|weight| f64::from(*weight)).sum();
        batch.weights().map_or(batch.size() as f64, |weights| sum(weights))
    }
}

/// What losses are divided by, where samples weigh `weight` together: all of them may weigh nothing.
fn divisor(weight: f64) -> f64 {
    weight.max(f64::from(f32::MIN_POSITIVE))
}

/// The sum of the losses of all samples, each times its weight.
fn loss_of_samples(loss: Loss, logits: &Tensor, labels: &Tensor, weights: Option<&Tensor>) -> Tensor {
    let each = tch::Reduction::None;
    let losses = match loss {
        Loss::BinaryCrossEntropy => {
            let sum = tch::Reduction::Sum;
            return logits.binary_cross_entropy_with_logits(labels, weights, None::<&Tensor>, sum);
        }
        Loss::SquaredError => logits.mse_loss(labels, each),
        Loss::Huber { delta } => logits.huber_loss(labels, each, delta),
        Loss::Poisson => logits.poisson_nll_loss(labels, true, false, 1e-8, each),
    };
    let losses = weights.map_or_else(|| losses.shallow_clone(), |weights| &losses * weights);
    losses.sum(tch::Kind::Float)
}
