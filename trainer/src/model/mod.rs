//! The DLRM: bottom MLP, pooled embeddings, interaction by dot products (Naumov et al. 2019) or cross layers, top MLP.

mod attention;
mod cross;
mod forward;
mod mlp;
mod on_device;
mod profile;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;

use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use onefold_sharding::{Pooling, TableConfig};
use tch::{Device, Kind, Tensor, nn};

use self::attention::SelfAttention;
use self::cross::CrossNet;
pub use self::forward::Forward;
use self::mlp::Mlp;
pub use self::profile::{Profile, Stage};
use crate::config::{Interaction, TableOptimizerConfig};
use crate::embedding::{Embeddings, LocalEmbeddings, LookupGradients, Steps};
use crate::metrics::BinaryMetrics;
use crate::{Error, Result, TrainConfig, tensors};

/// A DLRM: the dense part's parameters, and the embedding tables.
#[derive(Debug)]
pub struct Model {
    variables: nn::VarStore,
    bottom: Option<Mlp>,
    attention: Option<SelfAttention>,
    crosses: Option<CrossNet>,
    top: Mlp,
    label: usize,
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
    /// [`Error::Config`] as [`TrainConfig::tables`] found them, [`Error::Io`] if threads cannot be started.
    pub fn new(
        config: &TrainConfig,
        schema: &Schema,
        tables: &[TableConfig],
        threads: usize,
    ) -> Result<Self> {
        let embeddings = LocalEmbeddings::new(tables, &config.optimizer.tables, config.train.seed, threads)?;
        Self::with_embeddings(config, schema, Box::new(embeddings))
    }

    /// A model around given tables; the dense part has initial parameters.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the schema lacks the label.
    pub fn with_embeddings(
        config: &TrainConfig,
        schema: &Schema,
        embeddings: Box<dyn Embeddings>,
    ) -> Result<Self> {
        let tables = embeddings.configs();
        let label = schema.labels.iter().position(|label| *label == config.data.label).ok_or_else(|| {
            Error::Config {
                path: "train.toml".into(),
                message: format!(
                    "`[data].label` is `{}`, which is no label of the dataset",
                    config.data.label
                ),
                hint: "name one of the dataset's labels".to_owned(),
            }
        })?;
        // libtorch's initialisers draw from its global generator.
        tch::manual_seed(config.train.seed as i64);
        let variables = nn::VarStore::new(Device::Cpu);
        let root = variables.root();
        let dim = config.embedding.dim as i64;
        let dense = schema.dense.len() as i64;
        let bottom =
            (dense > 0).then(|| Mlp::new(&(&root / "bottom"), dense, &config.model.bottom_mlp, true));
        let attends = tables.iter().any(|table| table.pooling == Pooling::Attention);
        let attention =
            attends.then(|| SelfAttention::new(&(&root / "attention"), dim, config.model.attention_heads));
        let vectors = tables.len() as i64 + i64::from(dense > 0);
        let width = config.model.interaction.width(vectors, dim, dense > 0);
        let crosses = (config.model.interaction == Interaction::Dcn).then(|| {
            let (layers, rank) = (config.model.dcn_num_layers, config.model.dcn_low_rank_dim);
            CrossNet::new(&(&root / "cross"), width, layers, rank)
        });
        let top = Mlp::new(&(&root / "top"), width, &config.model.top_mlp, false);
        let (steps, profile) = (Steps::default(), Profile::default());
        let triangle = OnceCell::new();
        Ok(Self { variables, bottom, attention, crosses, top, label, triangle, embeddings, steps, profile })
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

    /// The label of every sample, `[B]`.
    pub fn labels(&self, batch: &Batch) -> Tensor {
        let labels: Vec<f32> = self.label_values(batch).collect();
        tensors::from_f32(&labels, &[batch.size() as i64]).to_device(self.device())
    }

    /// The same as numbers.
    pub fn label_values<'a>(&self, batch: &'a Batch) -> impl Iterator<Item = f32> + use<'a> {
        batch.labels().iter().skip(self.label).step_by(batch.label_width().max(1)).copied()
    }

    /// Adds the predictions of a batch to `metrics`.
    pub fn add_predictions(&self, metrics: &mut BinaryMetrics, batch: &Batch, logits: &Tensor) {
        let logits = logits.detach().to_device(Device::Cpu).contiguous();
        let weights = batch.weights();
        for (i, (logit, label)) in tensors::as_slice(&logits).iter().zip(self.label_values(batch)).enumerate()
        {
            metrics.add(*logit, label, weights.map_or(1.0, |weights| weights[i]));
        }
    }

    /// Updates the tables with what [`backward`](Self::backward) gave for `forward`.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if the model is on a device, and that fails.
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

    /// The mean binary cross-entropy of logits, weighted by the samples' weights where there are any.
    pub fn loss(&self, logits: &Tensor, batch: &Batch) -> Tensor {
        let labels = self.labels(batch);
        match batch.weights() {
            None => {
                logits.binary_cross_entropy_with_logits::<Tensor>(&labels, None, None, tch::Reduction::Mean)
            }
            Some(weights) => {
                let weights = tensors::from_f32(weights, &[batch.size() as i64]).to_device(self.device());
                let sum = logits.binary_cross_entropy_with_logits(
                    &labels,
                    Some(&weights),
                    None,
                    tch::Reduction::Sum,
                );
                sum / weights.sum(Kind::Float).clamp_min(f64::from(f32::MIN_POSITIVE))
            }
        }
    }
}
