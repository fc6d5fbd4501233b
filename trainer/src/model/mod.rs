//! The DLRM: bottom MLP, pooled embeddings, interaction by dot products (Naumov et al. 2019) or cross layers, top MLP.

mod attention;
mod block;
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
mod passed;
mod profile;
mod projection;
mod sequences;
#[cfg(test)]
pub(crate) mod tests;

use std::cell::{OnceCell, RefCell};

use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use tch::{Device, Tensor, nn};

use self::compute::Compute;
use self::cross::CrossNet;
pub use self::forward::{Forward, Input};
use self::mlp::Mlp;
use self::normalize::NormalizationLayer;
use self::on_device::Recordings;
pub use self::profile::{Profile, Stage};
use self::projection::Projections;
use self::sequences::Blocks;
use crate::config::{HUBER_DELTA, Interaction, Loss};
use crate::device::guarded;
use crate::embedding::Embeddings;
use crate::metrics::Task;
use crate::normalize::Normalizers;
use crate::shim::allow_tf32;
use crate::{Precision, Result, TrainConfig, tensors};

/// A DLRM: the dense part's parameters, and the embedding tables.
#[derive(Debug)]
pub struct Model {
    variables: nn::VarStore,
    /// The common dimension, of all vectors that interact.
    dim: i64,
    dense_features: i64,
    /// The normalization of dense features; `None` if they stay unchanged.
    normalization: Option<NormalizationLayer>,
    bottom: Option<Mlp>,
    blocks: Blocks,
    projections: Projections,
    crosses: Option<CrossNet>,
    top: Mlp,
    /// The task of each logit, and the weight of its loss.
    tasks: Vec<(Task, f64)>,
    compute: Compute,
    /// On a device: the indices of the interaction's products (the strict lower triangle) among all products of a
    /// sample.
    triangle: OnceCell<Tensor>,
    /// On a device: the recorded graphs of the dense part.
    recordings: RefCell<Recordings>,
    /// The embedding tables.
    pub embeddings: Embeddings,
    /// The time of each stage.
    pub profile: Profile,
}

impl Model {
    /// Creates a model with the given tables. The dense part has initial parameters from the configuration's seed,
    /// which are the same on every rank. It is on the same device as the tables.
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
        let compute = Compute::new(config.train.precision);
        let (bottom, blocks, projections, crosses, top) = tensors::seeded(config.train.seed as i64, || {
            let (path, widths) = (&root / "bottom", &config.model.bottom_mlp);
            let bottom = (dense > 0).then(|| Mlp::new(&path, dense, widths, true, &compute));
            let blocks = Blocks::new(&root, &config.model, features, dim, &compute);
            let projections = Projections::new(&(&root / "projection"), embeddings.tables(), dim, &compute);
            let crosses = (config.model.interaction == Interaction::Dcn).then(|| {
                let (layers, rank) = (config.model.dcn_num_layers, config.model.dcn_low_rank_dim);
                CrossNet::new(&(&root / "cross"), width, layers, rank, &compute)
            });
            let top = Mlp::new(&(&root / "top"), width, &config.model.top_mlp, false, &compute);
            (bottom, blocks, projections, crosses, top)
        });
        let (triangle, profile) = (OnceCell::new(), Profile::default());
        let mut model = Self {
            variables,
            dim,
            dense_features: dense,
            normalization: None,
            bottom,
            blocks,
            projections,
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

    /// Returns this model, which has taken no step yet, with the bias of its last layer set to `logits`, one per
    /// task.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if the number of logits differs from the number of tasks.
    pub(crate) fn starting_at(self, logits: &[f32]) -> Result<Self> {
        if let Some(bias) = self.top.last_bias() {
            let logits = Tensor::f_from_slice(logits)?;
            tch::no_grad(|| bias.shallow_clone().f_copy_(&logits))?;
        }
        Ok(self)
    }

    /// Returns this model with a normalization of the dense features of `schema`.
    #[must_use]
    pub fn normalized_by(self, schema: &Schema, normalizers: &Normalizers) -> Self {
        let device = self.embeddings.on_device().map(|_| self.device());
        let normalization = NormalizationLayer::new(&schema.dense, normalizers, device);
        Self { normalization, ..self }
    }

    /// Returns the normalized dense features of a batch in host memory, `[B, F]`.
    fn dense_of(&self, batch: &Batch) -> Tensor {
        // A batch without samples does not know its number of dense features.
        let shape = [batch.size() as i64, self.dense_features];
        match &self.normalization {
            Some(normalization) => tensors::from_f32(&normalization.normalized(batch.dense()), &shape),
            None => tensors::from_f32(batch.dense(), &shape),
        }
    }

    /// Returns the parameters of the dense part, which have gradients after `backward`.
    pub fn dense_parameters(&self) -> Vec<Tensor> {
        self.variables.trainable_variables()
    }

    /// Returns the parameters of the dense part by name.
    pub fn named_dense_parameters(&self) -> std::collections::BTreeMap<String, Tensor> {
        self.variables.variables().into_iter().collect()
    }

    /// Returns a description of the products of the dense part, for logs: the device, the instructions and the
    /// precision.
    pub fn kernels(&self) -> String {
        let records = self.embeddings.on_device().is_some_and(|own| own.store.accelerator().records());
        let graphs = if records { ", graphs" } else { "" };
        format!("{}{graphs}", self.compute.name(self.device()))
    }

    /// Returns the device of the model.
    pub fn device(&self) -> Device {
        self.variables.device()
    }

    /// Returns this rank's part of the loss of a forward pass of `batch`: the sum of the tasks' losses, each times
    /// the task's weight. A task's loss is the sum over its samples, multiplied by the samples' weights if there
    /// are any, divided by `weight`. `weight` is the sum of the sample weights of the global batch, or its number
    /// of samples.
    pub fn loss(&self, forward: &Forward, batch: &Batch, weight: f64) -> Tensor {
        let divide = |sum: Tensor, of_task: f64| sum * (of_task / divisor(weight));
        // The labels of a batch on a device were copied with the batch. To copy them now, the host would wait for
        // all enqueued work.
        if let Some((labels, weights)) = forward.passed.labels() {
            return self.loss_of(&forward.logits, labels, weights, divide);
        }
        let (size, device) = (batch.size() as i64, self.device());
        // A batch without samples does not know its number of labels.
        let width = match self.tasks.iter().map(|(task, _)| task.column + 1).max() {
            Some(width) if size == 0 => width,
            _ => batch.label_width(),
        };
        let labels = tensors::from_f32(batch.labels(), &[size, width as i64]).to_device(device);
        let weights = batch.weights().map(|weights| tensors::from_f32(weights, &[size]).to_device(device));
        self.loss_of(&forward.logits, &labels, weights.as_ref(), divide)
    }

    /// Returns the loss of logits, `[B, tasks]`, given all labels, `[B, labels]`. `divide` computes a task's loss
    /// from the sum over its samples and the task's weight.
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

    /// Returns the logits, `[B, tasks]`, given the input of the cross layers or the top MLP.
    fn logits_of(&self, input: &Tensor) -> Tensor {
        match &self.crosses {
            None => self.top.forward(input),
            Some(crosses) => self.top.forward(&crosses.forward(input)),
        }
    }

    /// Returns the sum of the weights of a batch's samples, or their number if they have no weights.
    pub fn weight(batch: &Batch) -> f64 {
        let sum = |weights: &[f32]| weights.iter().map(|weight| f64::from(*weight)).sum();
        batch.weights().map_or(batch.size() as f64, |weights| sum(weights))
    }
}

/// Returns the divisor of losses for a total sample weight of `weight`, which may be zero.
fn divisor(weight: f64) -> f64 {
    weight.max(f64::from(f32::MIN_POSITIVE))
}

/// Returns the sum of the losses of all samples, each times the sample's weight.
fn loss_of_samples(loss: Loss, logits: &Tensor, labels: &Tensor, weights: Option<&Tensor>) -> Tensor {
    let each = tch::Reduction::None;
    let losses = match loss {
        Loss::Bce => {
            let sum = tch::Reduction::Sum;
            return logits.binary_cross_entropy_with_logits(labels, weights, None::<&Tensor>, sum);
        }
        Loss::Mse => logits.mse_loss(labels, each),
        Loss::Huber => logits.huber_loss(labels, each, HUBER_DELTA),
        Loss::Poisson => logits.poisson_nll_loss(labels, true, false, 1e-8, each),
    };
    let losses = weights.map_or_else(|| losses.shallow_clone(), |weights| &losses * weights);
    losses.sum(tch::Kind::Float)
}
