//! The DLRM: bottom MLP, pooled embeddings, interaction by dot products (Naumov et al. 2019) or cross layers, top MLP.

mod attention;
mod cross;
mod din;
mod encoder;
mod forward;
mod interact;
mod levels;
mod linear;
mod lists;
mod mlp;
mod on_device;
mod padded;
mod profile;
#[cfg(test)]
mod pytorch;
mod sequences;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;

use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use onefold_sharding::TableConfig;
use tch::{Device, Kind, Tensor, nn};

use self::cross::CrossNet;
pub use self::forward::Forward;
use self::mlp::Mlp;
pub use self::profile::{Profile, Stage};
use self::sequences::Blocks;
use crate::checkpoint::Run;
use crate::config::{Interaction, TableOptimizerConfig};
use crate::device::{Accelerator, failed};
use crate::embedding::{Embeddings, LocalEmbeddings, LookupGradients, ShardedEmbeddings, Steps, Table};
use crate::metrics::Task;
use crate::{Result, TrainConfig, tensors};

/// A DLRM: the dense part's parameters, and the embedding tables.
#[derive(Debug)]
pub struct Model {
    variables: nn::VarStore,
    bottom: Option<Mlp>,
    blocks: Blocks,
    crosses: Option<CrossNet>,
    top: Mlp,
    /// What each logit predicts, and the weight of its loss.
    tasks: Vec<(Task, f64)>,
    /// On a device: which of all products of a sample's vectors are the interaction's.
    triangle: OnceCell<Tensor>,
    /// The tables.
    pub embeddings: Box<dyn Embeddings>,
    /// Which steps run once per distinct row; all, unless their gains are to be shown, and always all on a device.
    pub steps: Steps,
    /// The time that each stage takes.
    pub profile: Profile,
}

impl Model {
    /// A model with initial parameters from the configuration's seed.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) as [`TrainConfig::tables`] found them, [`Error::Io`](crate::Error::Io) if threads cannot be started.
    pub fn new(
        config: &TrainConfig,
        schema: &Schema,
        tables: &[TableConfig],
        threads: usize,
    ) -> Result<Self> {
        let embeddings = LocalEmbeddings::new(tables, &config.optimizer.tables, config.train.seed, threads)?;
        Self::with_embeddings(config, schema, Box::new(embeddings))
    }

    /// The same with tables that are divided as those of a run are.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn of_run(run: &Run, threads: usize, device: Option<&Accelerator>) -> Result<Self> {
        let Run { config, schema, tables, shards, .. } = run;
        if shards.is_empty() {
            return Self::at(config, schema, tables, threads, device);
        }
        if let Some(device) = device {
            let message = "the run divides its tables into the shards of simulated ranks";
            return Err(failed(
                device.torch(),
                message,
                "use the option `device = cpu`, or train without the option `simulate_ranks`",
            ));
        }
        // One after the other, as a whole table is only there until it is cut.
        let (optimizer, seed) = (&config.optimizer.tables, config.train.seed);
        let tables = tables.iter().enumerate().map(|(i, table)| Table::initial(table, optimizer, seed, i));
        let embeddings = ShardedEmbeddings::new(tables, shards.clone(), threads)?;
        Self::with_embeddings(config, schema, Box::new(embeddings))
    }

    /// A model around given tables; the dense part has initial parameters.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) if the schema lacks a label.
    pub fn with_embeddings(
        config: &TrainConfig,
        schema: &Schema,
        embeddings: Box<dyn Embeddings>,
    ) -> Result<Self> {
        let tables = embeddings.configs();
        let tasks = config.check_labels(schema)?;
        let variables = nn::VarStore::new(Device::Cpu);
        let root = variables.root();
        let dim = config.embedding.dim as i64;
        let dense = schema.dense.len() as i64;
        let vectors = tables.len() as i64 + i64::from(dense > 0);
        let width = config.model.interaction.width(vectors, dim, dense > 0);
        let (bottom, blocks, crosses, top) = tensors::seeded(config.train.seed as i64, || {
            let bottom =
                (dense > 0).then(|| Mlp::new(&(&root / "bottom"), dense, &config.model.bottom_mlp, true));
            let blocks = Blocks::new(&root, &config.model, tables, dim);
            let crosses = (config.model.interaction == Interaction::Dcn).then(|| {
                let (layers, rank) = (config.model.dcn_num_layers, config.model.dcn_low_rank_dim);
                CrossNet::new(&(&root / "cross"), width, layers, rank)
            });
            let top = Mlp::new(&(&root / "top"), width, &config.model.top_mlp, false);
            (bottom, blocks, crosses, top)
        });
        let (steps, profile) = (Steps::default(), Profile::default());
        let triangle = OnceCell::new();
        Ok(Self { variables, bottom, blocks, crosses, top, tasks, triangle, embeddings, steps, profile })
    }

    /// The parameters of the dense part, with gradients after `backward`.
    pub fn dense_parameters(&self) -> Vec<Tensor> {
        self.variables.trainable_variables()
    }

    /// The parameters of the dense part by name.
    pub fn named_dense_parameters(&self) -> std::collections::BTreeMap<String, Tensor> {
        self.variables.variables().into_iter().collect()
    }

    /// Where the model is.
    pub fn device(&self) -> Device {
        self.variables.device()
    }

    /// The label of every sample and task, `[B, tasks]`.
    pub fn labels(&self, batch: &Batch) -> Tensor {
        let (all, width) = (batch.labels(), batch.label_width());
        let of_sample = |sample| self.tasks.iter().map(move |(task, _)| all[sample * width + task.column]);
        let labels: Vec<f32> = (0..batch.size()).flat_map(of_sample).collect();
        tensors::from_f32(&labels, &[batch.size() as i64, self.tasks.len() as i64]).to_device(self.device())
    }

    /// Updates the tables with what [`backward`](Self::backward) gave for `forward`.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the model is on a device, and that fails.
    pub fn update(
        &mut self,
        forward: &Forward,
        gradients: &[LookupGradients],
        optimizer: &TableOptimizerConfig,
    ) -> Result<()> {
        if let Some(device) = self.embeddings.on_device_mut() {
            return device.apply(&forward.lookups, gradients, optimizer);
        }
        self.embeddings.update(&forward.lookups, gradients, optimizer);
        Ok(())
    }

    /// The tasks' losses, each times its weight, summed. A task's loss is the mean binary cross-entropy of its logits over the
    /// batch, weighted by the samples' weights where there are any.
    pub fn loss(&self, logits: &Tensor, batch: &Batch) -> Tensor {
        let labels = self.labels(batch);
        let weights = batch
            .weights()
            .map(|weights| tensors::from_f32(weights, &[batch.size() as i64]).to_device(self.device()));
        let losses = self.tasks.iter().enumerate().map(|(column, (_, weight))| {
            let (logits, labels) = (logits.select(1, column as i64), labels.select(1, column as i64));
            let loss = cross_entropy(&logits, &labels, weights.as_ref());
            // A weight of 1 leaves every bit of the gradient as it is.
            if *weight == 1.0 { loss } else { loss * *weight }
        });
        losses.reduce(|a, b| a + b).expect("a model has a task")
    }
}

/// Mean binary cross-entropy, `[]`, of logits `[B]`, weighted by `weights` `[B]` if there are any.
fn cross_entropy(logits: &Tensor, labels: &Tensor, weights: Option<&Tensor>) -> Tensor {
    let reduced = |weights: Option<&Tensor>, reduction| {
        logits.binary_cross_entropy_with_logits(labels, weights, None, reduction)
    };
    match weights {
        None => reduced(None, tch::Reduction::Mean),
        Some(weights) => {
            let sum = weights.sum(Kind::Float).clamp_min(f64::from(f32::MIN_POSITIVE));
            reduced(Some(weights), tch::Reduction::Sum) / sum
        }
    }
}
