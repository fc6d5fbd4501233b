//! `train.toml`: data, model, tables, optimizers, and the loop around them.

mod optimizer;
mod sequences;
mod tasks;
mod training;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_datasets::versioned::parse_toml;
use onefold_datasets::{PartitionFilter, Schema, Snapshot, suggest};
use onefold_sharding::{
    EmbeddingConfig, FeatureConfig, TableConfig, TableOverride, check_ids, resolve_tables, tables_of,
};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

pub use self::optimizer::{DenseOptimizerConfig, DenseOptimizerKind, Schedule, ScheduleConfig, ScheduleKind};
pub use self::tasks::TaskConfig;
pub use self::training::{
    CheckpointConfig, DataConfig, EarlyStoppingConfig, EvaluationConfig, ExchangeConfig, LoopConfig,
    WatchedMetric,
};

/// The version of `train.toml` that this program reads.
const FORMAT_VERSION: u32 = 1;

/// A parsed `train.toml`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Version of this format.
    pub format_version: u32,
    /// What is trained and evaluated on.
    pub data: DataConfig,
    /// The labels that are predicted, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskConfig>,
    /// How long and from which seed.
    pub train: LoopConfig,
    /// The dense part of the model.
    pub model: ModelConfig,
    /// Defaults of the tables.
    pub embedding: EmbeddingConfig,
    /// What is different for single features and their tables.
    #[serde(default)]
    pub tables: BTreeMap<String, TableOverride>,
    /// How parameters are updated.
    pub optimizer: OptimizerConfig,
    /// How the learning rates change; not at all if absent.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// When and how the model is evaluated.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// When training ends before its last epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<EarlyStoppingConfig>,
    /// When checkpoints are written.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// How ranks exchange vectors.
    #[serde(default, skip_serializing_if = "ExchangeConfig::is_default")]
    pub exchange: ExchangeConfig,
    /// Where this was read from, for messages.
    #[serde(skip)]
    path: PathBuf,
}

/// `[model]`: a DLRM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Widths of the layers after the dense features; the last is the embedding dimension.
    pub bottom_mlp: Vec<i64>,
    /// Widths of the layers after the interaction; the last is the number of tasks.
    pub top_mlp: Vec<i64>,
    /// How vectors interact.
    pub interaction: Interaction,
    /// Cross layers of the `dcn` interaction.
    #[serde(default = "three")]
    pub dcn_num_layers: i64,
    /// Rank of their matrices.
    #[serde(default = "rank")]
    pub dcn_low_rank_dim: i64,
    /// Heads of the self-attention block that pools `attention` tables.
    #[serde(default = "two")]
    pub attention_heads: i64,
    /// Heads of the encoder block that pools `encoder` tables.
    #[serde(default = "sequences::encoder_heads", skip_serializing_if = "sequences::is_encoder_heads")]
    pub encoder_heads: i64,
    /// Width of the encoder block's hidden layer; four times the dimension if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_hidden: Option<i64>,
    /// Widths of the hidden layers of the attention unit that pools `din` tables.
    #[serde(default = "sequences::din_hidden", skip_serializing_if = "sequences::is_din_hidden")]
    pub din_hidden: Vec<i64>,
}

fn two() -> i64 {
    2
}

fn three() -> i64 {
    3
}

fn rank() -> i64 {
    512
}

/// How the bottom MLP's output and the pooled vectors interact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interaction {
    /// Dot products of all pairs (the strict lower triangle), beside the bottom MLP's output.
    Dot,
    /// Low-rank cross layers (DCN-V2, Wang et al. 2021) over all vectors side by side.
    Dcn,
}

impl Interaction {
    /// Values that the top MLP is given for a sample of `vectors` vectors of `dim`.
    pub(crate) fn width(self, vectors: i64, dim: i64, has_bottom: bool) -> i64 {
        match self {
            Self::Dot => vectors * (vectors - 1) / 2 + if has_bottom { dim } else { 0 },
            Self::Dcn => vectors * dim,
        }
    }
}

/// `[optimizer]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// For the embedding tables.
    pub tables: TableOptimizerConfig,
    /// For everything else.
    pub dense: DenseOptimizerConfig,
}

/// `[optimizer.tables]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableOptimizerConfig {
    /// The algorithm.
    pub kind: TableOptimizerKind,
    /// Learning rate.
    pub learning_rate: f32,
    /// Added to the denominator.
    #[serde(default = "tiny")]
    pub eps: f32,
    /// Decay of Adam's first moment.
    #[serde(default = "beta1")]
    pub beta1: f32,
    /// Decay of Adam's second moment.
    #[serde(default = "beta2")]
    pub beta2: f32,
    /// A table row's gradient, summed over the batch, is scaled down to this L2 norm where it is longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_row_grad_norm: Option<f32>,
}

impl TableOptimizerConfig {
    /// An algorithm with defaults for all that is not given.
    pub fn new(kind: TableOptimizerKind, learning_rate: f32) -> Self {
        let (eps, beta1, beta2) = (tiny(), beta1(), beta2());
        Self { kind, learning_rate, eps, beta1, beta2, max_row_grad_norm: None }
    }
}

/// Algorithms for tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableOptimizerKind {
    /// One accumulator per row: the mean of the squared gradient.
    RowWiseAdagrad,
    /// One accumulator per weight (Duchi et al. 2011).
    Adagrad,
    /// Plain stochastic gradient descent.
    Sgd,
    /// Two moments per weight (Kingma and Ba 2015), which only rows of the batch move.
    Adam,
}

fn tiny() -> f32 {
    1e-8
}

fn beta1() -> f32 {
    0.9
}

fn beta2() -> f32 {
    0.999
}

impl TrainConfig {
    /// Reads a `train.toml`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be read, [`Error::Config`], with line or key, if it is not TOML, has an unknown
    /// key, another version, or values that no model can have.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &fs_err::read_to_string(path)?)
    }

    /// Parses the text of a `train.toml` that is (or would be) at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`], as [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let wrong = |message: String, hint: &str| Error::Config {
            path: path.to_owned(),
            message,
            hint: hint.to_owned(),
        };
        let mut config: Self = parse_toml(text, FORMAT_VERSION, "the README shows a whole `train.toml`")
            .map_err(|(message, hint)| wrong(message, &hint))?;
        config.path = path.to_owned();
        config.check().map_err(|(message, hint)| wrong(message, hint))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (String, &'static str)> {
        let (model, dim) = (&self.model, self.embedding.dim);
        let positive = |widths: &[i64]| !widths.is_empty() && widths.iter().all(|width| *width > 0);
        if !positive(&model.bottom_mlp)
            || model.bottom_mlp.last().and_then(|w| u64::try_from(*w).ok()) != Some(dim)
        {
            let message =
                format!("`[model].bottom_mlp` is {:?}, but `[embedding].dim` is {dim}", model.bottom_mlp);
            return Err((
                message,
                "all widths must be positive, and the last must be the embedding dimension",
            ));
        }
        tasks::check(self)?;
        sequences::check(self)?;
        if model.interaction == Interaction::Dcn && (model.dcn_num_layers < 1 || model.dcn_low_rank_dim < 1) {
            let message = format!(
                "`[model].dcn_num_layers` is {}, `dcn_low_rank_dim` is {}",
                model.dcn_num_layers, model.dcn_low_rank_dim
            );
            return Err((message, "both must be at least 1"));
        }
        training::check(self)?;
        let tables = &self.optimizer.tables;
        if [tables.learning_rate, tables.eps].iter().any(|value| !value.is_finite() || *value < 0.0) {
            let message = format!(
                "`[optimizer.tables]` has a learning rate of {} and an eps of {}",
                tables.learning_rate, tables.eps
            );
            return Err((message, "neither may be negative or infinite"));
        }
        let betas = [tables.beta1, tables.beta2];
        if betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
            let message = format!("`[optimizer.tables]` has beta1 and beta2 {betas:?}");
            return Err((message, "both must be at least 0 and below 1"));
        }
        if let Some(norm) = tables.max_row_grad_norm.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
            let message = format!("`[optimizer.tables].max_row_grad_norm` is {norm}");
            return Err((message, "give a positive norm, or leave it out"));
        }
        self.optimizer.dense.check()?;
        self.schedule.dense.check("dense")?;
        self.schedule.tables.check("tables")
    }

    /// The directory to which the configuration's paths are relative.
    pub fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Where this was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The partitions to train on.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the filter cannot be parsed.
    pub fn train_partitions(&self) -> Result<PartitionFilter> {
        Ok(PartitionFilter::parse(&self.data.train)?)
    }

    /// The partitions to evaluate on, if the configuration names any.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the filter cannot be parsed.
    pub fn eval_partitions(&self) -> Result<Option<PartitionFilter>> {
        Ok(self.data.eval.as_deref().map(PartitionFilter::parse).transpose()?)
    }

    /// Checks the configuration against a dataset, whose batches have `schema`, and gives what its features look up, in
    /// schema order. Allocates nothing. The ids that the dataset is known to hold are checked against the tables unless
    /// batches are preprocessed; the reader checks them all.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the dataset lacks a label, a segment's feature or any sparse feature; [`Error::Sharding`]
    /// for tables that cannot be, name no feature, or are too small for the dataset's ids; [`Error::Dataset`] for
    /// filters that choose nothing.
    pub fn tables(&self, snapshot: &Snapshot, schema: &Schema) -> Result<Vec<FeatureConfig>> {
        let wrong = |message: String, hint: String| Error::Config { path: self.path.clone(), message, hint };
        self.check_labels(schema)?;
        if schema.groups.is_empty() {
            return Err(wrong(
                "the dataset has no sparse feature, so there is nothing to embed".to_owned(),
                "declare one of `kind = \"sparse\"` in `dataset.toml` and build the dataset again".to_owned(),
            ));
        }
        let names = || schema.sparse_features().map(|feature| feature.name.as_str());
        if let Some(name) = self.evaluation.segments.iter().find(|name| names().all(|known| known != *name)) {
            return Err(wrong(
                format!("`[evaluation].segments` has `{name}`, which is no sparse feature"),
                suggest(name, names()),
            ));
        }
        snapshot.select(&self.train_partitions()?)?;
        if let Some(eval) = self.eval_partitions()? {
            snapshot.select(&eval)?;
        }
        let refused = |source| Error::Sharding { path: self.path.clone(), source };
        let tables = resolve_tables(&self.embedding, &self.tables, schema).map_err(refused)?;
        if self.data.preprocess.is_none() {
            check_ids(&tables, &snapshot.statistics.features).map_err(refused)?;
        }
        if let Some(table) = tables.iter().find(|table| u32::try_from(table.rows).is_err()) {
            return Err(wrong(
                format!("`[tables.{}]` has {} rows", table.feature, table.rows),
                format!("this trainer holds tables of up to {} rows; hash the ids into fewer", u32::MAX),
            ));
        }
        Ok(tables)
    }

    /// Parameters of the model with these sparse features and this number of dense ones.
    pub fn parameters(&self, features: &[FeatureConfig], dense_features: usize) -> ParameterCount {
        let dim = self.embedding.dim as i64;
        let (bottom, dense_vectors) = match dense_features as i64 {
            0 => (0, 0),
            width => (mlp_parameters(width, &self.model.bottom_mlp), 1),
        };
        let vectors = features.len() as i64 + dense_vectors;
        let crosses = match self.model.interaction {
            Interaction::Dot => 0,
            Interaction::Dcn => {
                self.model.dcn_num_layers * (2 * self.model.dcn_low_rank_dim + 1) * vectors * dim
            }
        };
        let width = self.model.interaction.width(vectors, dim, dense_vectors > 0);
        let top = mlp_parameters(width, &self.model.top_mlp);
        let blocks = self.model.block_parameters(features, dim);
        let count = ParameterCount {
            dense: (bottom + top + blocks + crosses) as u64,
            embedding: 0,
            table_bytes: 0,
            table_state: 0,
            dense_state: self.optimizer.dense.state_values(),
        };
        count.with_tables(self, &tables_of(features).0)
    }
}

/// Parameters of linear layers of these widths on an input of width `input`.
fn mlp_parameters(input: i64, widths: &[i64]) -> i64 {
    let inputs = std::iter::once(&input).chain(widths);
    inputs.zip(widths).map(|(from, to)| (from + 1) * to).sum()
}

/// How large a model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ParameterCount {
    /// Parameters of the MLPs, the cross layers and the blocks that pool sequences.
    pub dense: u64,
    /// Parameters of the tables.
    pub embedding: u64,
    /// Bytes of the tables' parameters.
    #[serde(skip)]
    table_bytes: u64,
    /// Values of the tables' optimizer state.
    #[serde(skip)]
    table_state: u64,
    /// Values of optimizer state per dense parameter.
    #[serde(skip)]
    dense_state: u64,
}

impl ParameterCount {
    /// The same dense part with other tables, or with shards of them.
    pub(crate) fn with_tables(self, config: &TrainConfig, tables: &[TableConfig]) -> Self {
        let state = |table: &TableConfig| match config.optimizer.tables.kind {
            TableOptimizerKind::RowWiseAdagrad => table.rows,
            TableOptimizerKind::Adagrad => table.rows * table.dim,
            TableOptimizerKind::Sgd => 0,
            TableOptimizerKind::Adam => 2 * table.rows * table.dim,
        };
        Self {
            embedding: tables.iter().map(|table| table.rows * table.dim).sum(),
            table_bytes: tables.iter().map(|table| table.rows * table.dim * table.dtype.bytes()).sum(),
            table_state: tables.iter().map(state).sum(),
            ..self
        }
    }

    /// Bytes of the parameters and their optimizer state.
    pub fn bytes(&self) -> u64 {
        4 * ((1 + self.dense_state) * self.dense + self.table_state) + self.table_bytes
    }
}

#[cfg(test)]
mod tests {
    use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
    use onefold_sharding::Pooling;

    use super::*;

    pub(crate) const WHOLE: &str = r#"
format_version = 1
[data]
train = "split=train"
eval = "split=holdout"
label = "label"
[train]
batch_size = 128
epochs = 1
seed = 1
[model]
bottom_mlp = [8, 4]
top_mlp = [8, 1]
interaction = "dot"
[embedding]
dim = 4
rows = 100
[tables.history]
pooling = "mean"
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.02
[optimizer.dense]
kind = "sgd"
learning_rate = 0.1
"#;

    fn refused(from: &str, to: &str) -> String {
        assert!(WHOLE.contains(from));
        TrainConfig::parse(Path::new("train.toml"), &WHOLE.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn every_mistake_names_its_place() {
        TrainConfig::parse(Path::new("train.toml"), WHOLE).unwrap();
        assert!(refused("format_version = 1", "format_version = 3").contains("`format_version` is 3"));
        assert!(
            refused("[8, 4]", "[8, 5]")
                .contains("`[model].bottom_mlp` is [8, 5], but `[embedding].dim` is 4")
        );
        assert!(refused("[8, 1]", "[]").contains("`[model].top_mlp` is []"));
        assert!(
            refused("interaction = \"dot\"", "interaction = \"dot\"\nattention_heads = 3")
                .contains("attention_heads")
        );
        let block = |key: &str| refused("interaction = \"dot\"", &format!("interaction = \"dot\"\n{key}"));
        assert!(block("encoder_heads = 0").contains("`[model].encoder_heads` is 0, `[embedding].dim` is 4"));
        assert!(block("encoder_hidden = 0").contains("`[model].encoder_hidden` is 0"));
        assert!(block("din_hidden = []").contains("`[model].din_hidden` is []"));
        assert!(block("din_hidden = [8, -1]").contains("`[model].din_hidden` is [8, -1]"));
        assert!(refused("interaction = \"dot\"", "interaction = \"cross\"").contains("interaction"));
        let dcn = "interaction = \"dcn\"\ndcn_low_rank_dim = 0";
        assert!(refused("interaction = \"dot\"", dcn).contains("`dcn_low_rank_dim` is 0"));
        assert!(refused("epochs = 1", "epochs = 0").contains("`[train]`"));
        assert!(
            refused("learning_rate = 0.1", "learning_rate = -1.0")
                .contains("`[optimizer.dense].learning_rate`")
        );
        assert!(
            refused("learning_rate = 0.02", "learning_rate = -1.0")
                .contains("`[optimizer.tables]` has a learning")
        );
        assert!(
            refused("learning_rate = 0.02", "learning_rate = 0.02\nmax_row_grad_norm = 0.0")
                .contains("`[optimizer.tables].max_row_grad_norm` is 0")
        );
        assert!(refused("rows = 100", "rows = 100\ndtype = \"fp8\"").contains("unknown variant `fp8`"));
        let more = |text: &str| refused("[model]", &format!("{text}\n[model]"));
        assert!(more("[evaluation]\nevery_steps = 0").contains("`[evaluation].every_steps` is 0"));
        assert!(more("[checkpoint]\nkeep = 0").contains("`[checkpoint].keep` is 0"));
        assert!(more("[early_stopping]\npatience = 2").contains("`[evaluation].every_steps` is not"));
        assert!(more("[schedule.dense]\nkind = \"cosine\"").contains("`decay_steps` is not given"));
        assert!(more("[schedule.tables]\ngamma = 2.0").contains("`[schedule.tables].gamma` is 2"));
        assert!(
            refused("kind = \"sgd\"", "kind = \"adam\"\nmomentum = 0.9").contains("only `kind = \"sgd\"`")
        );
        assert!(refused("kind = \"sgd\"", "kind = \"adam\"\nbetas = [0.9, 1.0]").contains("betas"));
        assert!(refused("epochs = 1", "epochs = 1\nepoch = 2").contains("unknown field `epoch`"));
    }

    #[test]
    fn tasks_are_checked() {
        const TASKS: &str =
            "[[tasks]]\nlabel = \"click\"\n[[tasks]]\nlabel = \"like\"\nweight = 0.5\n[train]";
        let with = |text: &str| WHOLE.replace("label = \"label\"\n", "").replace("[train]", text);
        let parse = |text: &str| TrainConfig::parse(Path::new("train.toml"), text);
        let two = with(TASKS).replace("[8, 1]", "[8, 2]");
        let config = parse(&two).unwrap();
        let task = |label: &str, weight| TaskConfig { label: label.into(), weight };
        assert_eq!(config.all_tasks(), [task("click", 1.0), task("like", 0.5)]);
        assert_eq!(parse(WHOLE).unwrap().all_tasks(), [task("label", 1.0)]);
        // What a run stores is the same configuration.
        assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap().all_tasks(), config.all_tasks());
        let refused = |text: &str| parse(text).unwrap_err().to_string();
        assert!(refused(&with("[train]")).contains("`[data].label` is missing"));
        assert!(
            refused(&with(TASKS)).contains("`[model].top_mlp` is [8, 1], but there are 2 tasks\n  hint: ")
        );
        assert!(refused(&two.replace("like", "click")).contains("has the label `click` twice"));
        assert!(refused(&two.replace("0.5", "0.0")).contains("has the weight 0 for `like`"));
        let both = two.replace("[data]", "[data]\nlabel = \"click\"");
        assert!(refused(&both).contains("`[data].label` and `[[tasks]]` are both given"));
        let stopping =
            "[evaluation]\nevery_steps = 5\n[early_stopping]\npatience = 1\ntask = \"TASK\"\n[model]";
        let watching = |task: &str| two.replace("[model]", &stopping.replace("TASK", task));
        assert!(parse(&watching("like")).is_ok());
        assert!(refused(&watching("share")).contains("`[early_stopping].task` is `share`"));
        let schema = |labels: &[&str]| Schema {
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            weight: None,
            dense: Vec::new(),
            groups: Vec::new(),
        };
        let found = config.check_labels(&schema(&["like", "view", "click"])).unwrap();
        let columns: Vec<_> = found.iter().map(|(task, weight)| (task.column, *weight)).collect();
        assert_eq!(columns, [(2, 1.0), (0, 0.5)]);
        let unknown = config.check_labels(&schema(&["clicks", "like"])).unwrap_err().to_string();
        assert!(unknown.contains("`[[tasks]]` has the label `click`, which is no label"), "{unknown}");
        assert!(unknown.contains("did you mean `clicks`?"), "{unknown}");
    }

    #[test]
    fn parameters_are_counted() {
        let config = TrainConfig::parse(Path::new("train.toml"), WHOLE).unwrap();
        let table = |pooling| FeatureConfig {
            feature: "x".into(),
            table: None,
            rows: 100,
            dim: 4,
            pooling,
            target: None,
            ids: onefold_sharding::IdPolicy::Checked,
            dtype: onefold_sharding::DataType::Fp32,
        };
        let other = |pooling| FeatureConfig { feature: "y".into(), ..table(pooling) };
        // Bottom 3-8-4: 32 + 36; two tables and the bottom vector: top (4 + 3)-8-1: 64 + 9.
        let count = config.parameters(&[table(Pooling::Sum), other(Pooling::Mean)], 3);
        assert_eq!((count.dense, count.embedding), (32 + 36 + 64 + 9, 800));
        // A shared table is there once; every feature has a vector.
        let shared = FeatureConfig { table: Some("x".into()), ..other(Pooling::Mean) };
        let count_of_shared = config.parameters(&[table(Pooling::Sum), shared], 3);
        assert_eq!((count_of_shared.dense, count_of_shared.embedding), (32 + 36 + 64 + 9, 400));
        assert_eq!(count.bytes(), 4 * (141 + 800 + 200));
        let narrow = FeatureConfig { dtype: onefold_sharding::DataType::Bf16, ..table(Pooling::Sum) };
        let count = config.parameters(&[narrow, other(Pooling::Mean)], 3);
        assert_eq!((count.embedding, count.bytes()), (800, 4 * (141 + 400 + 200) + 2 * 400));
        let mut adam = config.clone();
        adam.optimizer.tables.kind = TableOptimizerKind::Adam;
        assert_eq!(adam.parameters(&[table(Pooling::Sum)], 3).bytes(), 4 * (125 + 400 + 800));
        // Two layers of 12 x 3, 3 x 12 and 12; top 12-8-1: 104 + 9.
        let mut dcn = config.clone();
        dcn.model.interaction = Interaction::Dcn;
        (dcn.model.dcn_num_layers, dcn.model.dcn_low_rank_dim) = (2, 3);
        let count = dcn.parameters(&[table(Pooling::Sum), other(Pooling::Mean)], 3);
        assert_eq!(count.dense, 32 + 36 + 2 * 84 + 104 + 9);
        // Attention 4-12 and 4-4; no dense features: top 1-8-1.
        let count = config.parameters(&[table(Pooling::Attention), table(Pooling::Mean)], 0);
        assert_eq!(count.dense, 60 + 20 + 16 + 9);
        // Two norms of 2 x 4, attention as above, 4-16-4.
        let count = config.parameters(&[table(Pooling::Encoder), table(Pooling::Mean)], 0);
        assert_eq!(count.dense, 16 + 80 + 80 + 68 + 16 + 9);
        // 16-5-1.
        let mut din = config.clone();
        din.model.din_hidden = vec![5];
        let count = din.parameters(&[table(Pooling::Din), table(Pooling::Mean)], 0);
        assert_eq!(count.dense, 85 + 6 + 16 + 9);
    }

    #[test]
    fn the_configuration_of_sequences_and_tasks_parses() {
        let text = include_str!("../configs/rm1-sequences-tasks.toml");
        let config = TrainConfig::parse(Path::new("rm1-sequences-tasks.toml"), text).unwrap();
        let feature = |name: String, kind| SparseFeature::new(name, kind);
        let group = |name: &str, kind, features: std::ops::Range<u32>| FeatureGroup {
            name: name.into(),
            deduplicated: true,
            features: features.map(|i| feature(format!("{name}_{i:02}"), kind)).collect(),
        };
        let schema = Schema {
            labels: vec!["label".into(), "liked".into()],
            weight: None,
            dense: Vec::new(),
            groups: vec![
                group("user", SparseKind::Sparse, 0..24),
                group("sequence", SparseKind::Sequence, 0..6),
                group("item", SparseKind::Sparse, 0..12),
            ],
        };
        assert_eq!(config.check_labels(&schema).unwrap().len(), 2);
        let tables = resolve_tables(&config.embedding, &config.tables, &schema).unwrap();
        let targets: Vec<_> = tables.iter().filter_map(|table| table.target.as_deref()).collect();
        assert_eq!(targets, ["item_00", "item_00", "item_01"]);
        // 13-512-256-64, 42 vectors and the bottom one in pairs, 64 beside them.
        let (bottom, width) = (14 * 512 + 513 * 256 + 257 * 64, 64 + 43 * 42 / 2);
        let top = (width + 1) * 512 + 513 * 256 + 257 * 2;
        let din = 257 * 80 + 81 * 40 + 41;
        let encoder = 4 * 64 + 65 * 192 + 65 * 64 + 65 * 256 + 257 * 64;
        assert_eq!(config.parameters(&tables, 13).dense, bottom + top + din + encoder);
    }

    /// Parameters as the benchmark's description implies: 204,184,588 rows of 128, and 16.04 million in the dense part.
    #[test]
    fn the_mlperf_configuration_has_the_benchmarks_size() {
        let text = include_str!("../configs/mlperf-dlrm-dcnv2.toml");
        let config = TrainConfig::parse(Path::new("mlperf-dlrm-dcnv2.toml"), text).unwrap();
        let feature = |i| SparseFeature::new(format!("cat_{i}"), SparseKind::Sparse);
        let features = (0..26).map(feature).collect();
        let group = FeatureGroup { name: "ungrouped".into(), deduplicated: false, features };
        let schema =
            Schema { labels: vec!["label".into()], weight: None, dense: Vec::new(), groups: vec![group] };
        let tables = resolve_tables(&config.embedding, &config.tables, &schema).unwrap();
        let count = config.parameters(&tables, 13);
        assert_eq!(count.embedding, 204_184_588 * 128);
        let bottom = 14 * 512 + 513 * 256 + 257 * 128;
        let top = 3457 * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257;
        let cross = 3 * (3456 * 512 + 512 * 3456 + 3456);
        assert_eq!(count.dense, bottom + top + cross);
        assert_eq!(count.dense / 10_000, 1_604);
    }
}
