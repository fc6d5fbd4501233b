//! `train.toml`: data, model, tables, optimizers, and the loop around them.
//!
//! The trainer reads it to train, the planner to know the tables. This crate does not need libtorch.
#![forbid(unsafe_code)]

mod dense;
mod error;
mod model;
mod optimizer;
mod parameters;
mod precision;
mod tables;
mod tasks;
mod training;
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use onefold_base::versioned::parse_toml;
use onefold_datasets::{PartitionFilter, SESSION_COLUMN, Snapshot, suggest};
use onefold_ikjt::preprocess::Preprocessor;
use serde::{Deserialize, Serialize};

pub use self::dense::{DenseConfig, Normalization};
pub use self::error::{Error, Result};
pub use self::model::{Interaction, ModelConfig};
pub use self::optimizer::{
    DenseOptimizerConfig, DenseOptimizerKind, OptimizerConfig, Schedule, ScheduleConfig, ScheduleKind,
    TableOptimizerConfig,
};
pub use self::parameters::ParameterCount;
pub use self::precision::Precision;
pub use self::tables::{
    DEFAULT_BATCH_SIZE, EmbeddingConfig, FeatureConfig, HASH_SALT, HASHED_ROWS, IdCount, IdPolicy, KnownIds,
    MOST_ROWS, Pooling, Rows, TableConfig, TableOverride, check_ids, check_size, resolve_tables, tables_of,
};
pub use self::tasks::{LossConfig, TaskConfig};
pub use self::training::{
    CheckpointConfig, DataConfig, EarlyStoppingConfig, EvaluationConfig, ExchangeConfig, LoopConfig,
    WatchedMetric,
};
pub use self::types::{DataType, TableOptimizer};

/// The description of a run, in its directory.
pub const RUN_FILE: &str = "run.json";
/// The version of [`RUN_FILE`] that the trainer writes, and the only one that is read.
pub const RUN_FORMAT_VERSION: u32 = 2;

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
    #[serde(default)]
    pub train: LoopConfig,
    /// What happens to dense features before the model.
    #[serde(default, skip_serializing_if = "DenseConfig::is_default")]
    pub dense: DenseConfig,
    /// The dense part of the model.
    pub model: ModelConfig,
    /// Defaults of the tables.
    #[serde(default)]
    pub embedding: EmbeddingConfig,
    /// What is different for single features and their tables.
    #[serde(default)]
    pub tables: BTreeMap<String, TableOverride>,
    /// How parameters are updated.
    #[serde(default)]
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

impl TrainConfig {
    /// Reads a `train.toml`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be read, [`Error::Fault`], with line or key, if it is not TOML, has an unknown
    /// key, another version, or values that no model can have.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &fs_err::read_to_string(path)?)
    }

    /// Parses the text of a `train.toml` that is (or would be) at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`], as [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let wrong = |message: String, hint: &str| Error::config(path, message, hint);
        let mut config: Self =
            parse_toml(text, FORMAT_VERSION, "`docs/src/reference/train-toml.md` lists all keys")
                .map_err(|(message, hint)| wrong(message, &hint))?;
        config.path = path.to_owned();
        config.embedding = config.embedding.with_dim(&config.model.bottom_mlp);
        config.check().map_err(|(message, hint)| wrong(message, hint))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (String, &'static str)> {
        tasks::check(self)?;
        model::check(self)?;
        training::check(self)?;
        self.optimizer.tables.check()?;
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

    /// The partitions of a snapshot to train on: those that `train` chooses. If it is empty, `eval` is given, and no
    /// partition may be in both, they are those that `eval` does not choose, as far as there are some.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if a filter cannot be parsed, or does not fit the snapshot.
    pub fn train_partitions(&self, snapshot: &Snapshot) -> Result<PartitionFilter> {
        let train = PartitionFilter::parse(&self.data.train)?;
        let eval = self.eval_partitions()?.filter(|_| self.data.train.is_empty() && !self.data.allow_overlap);
        let Some(eval) = eval else { return Ok(train) };
        let held_out: BTreeSet<_> =
            snapshot.matching(&eval)?.into_iter().map(|partition| &partition.key).collect();
        let keys = snapshot.partitions.iter().map(|partition| &partition.key);
        let others: Vec<_> = keys.filter(|key| !held_out.contains(key)).cloned().collect();
        // Later checks refuse an `eval` that chooses all partitions or none, with a better message.
        let divides = !held_out.is_empty() && !others.is_empty();
        Ok(if divides { PartitionFilter::of_keys(others) } else { train })
    }

    /// The partitions to evaluate on, if the configuration names any.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the filter cannot be parsed.
    pub fn eval_partitions(&self) -> Result<Option<PartitionFilter>> {
        Ok(self.data.eval.as_deref().map(PartitionFilter::parse).transpose()?)
    }

    /// Checks the configuration against a dataset, whose batches go through `preprocessor` if there is one, and gives
    /// what their features look up, in the order of the batches' schema. `earlier` are those of the model that goes on,
    /// if one does. Allocates nothing. The ids that the dataset is known to hold are checked against the tables, but not
    /// those of features that preprocessing changes or makes; the reader checks them all.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset lacks a label, a segment's feature or any sparse feature, or has too few features
    /// for the interaction; [`Error::Tables`]
    /// for tables that cannot be, name no feature, or are too small for the dataset's ids; [`Error::Dataset`] for
    /// filters that choose nothing.
    pub fn tables(
        &self,
        snapshot: &Snapshot,
        preprocessor: Option<&Preprocessor>,
        earlier: &[FeatureConfig],
    ) -> Result<Vec<FeatureConfig>> {
        let schema = preprocessor.map_or(&snapshot.schema, Preprocessor::schema);
        let wrong = |message: String, hint: String| Error::config(&self.path, message, hint);
        self.tasks_of(schema)?;
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
        if let Some(group) = &self.evaluation.group {
            let kept = || snapshot.schema.kept_names().chain(std::iter::once(SESSION_COLUMN));
            if names().chain(kept()).all(|known| known != group) {
                return Err(wrong(
                    format!(
                        "`[evaluation].group` is `{group}`, which is neither a kept column nor a sparse feature"
                    ),
                    suggest(group, names().chain(kept())),
                ));
            }
        }
        snapshot.select(&self.train_partitions(snapshot)?)?;
        if let Some(eval) = self.eval_partitions()? {
            snapshot.select(&eval)?;
        }
        let tables = self.features(snapshot, preprocessor, earlier)?;
        if let Some(table) = tables.iter().find(|table| u32::try_from(table.rows).is_err()) {
            return Err(wrong(
                format!("`[tables.{}]` has {} rows", table.feature, table.rows),
                format!("this trainer holds tables of up to {} rows; hash the ids into fewer", u32::MAX),
            ));
        }
        let has_bottom = !schema.dense.is_empty();
        let vectors = tables.len() as i64 + i64::from(has_bottom);
        if self.model.interaction.width(vectors, self.embedding.dim as i64, has_bottom) == 0 {
            return Err(wrong(
                "`[model].interaction` is `dot`, which multiplies pairs of vectors, but the dataset has one sparse feature \
                 and no dense one"
                    .to_owned(),
                "set `interaction = \"dcn\"` there, or add a feature to the dataset".to_owned(),
            ));
        }
        Ok(tables)
    }

    /// What the features of batches of the dataset look up, in the order of the batches' schema; as
    /// [`tables`](Self::tables), for whoever does not train.
    ///
    /// # Errors
    ///
    /// [`Error::Tables`] for tables that cannot be, name no feature, or are too small for the dataset's ids.
    pub fn features(
        &self,
        snapshot: &Snapshot,
        preprocessor: Option<&Preprocessor>,
        earlier: &[FeatureConfig],
    ) -> Result<Vec<FeatureConfig>> {
        let refused = |source| Error::Tables { path: self.path.clone(), source };
        let schema = preprocessor.map_or(&snapshot.schema, Preprocessor::schema);
        let mut counts = KnownIds::of_snapshot(snapshot).counts;
        let mut statistics = snapshot.statistics.features.clone();
        // Nothing is known of ids that preprocessing gives.
        if let Some(preprocessor) = preprocessor {
            let unchanged = preprocessor.unchanged_sparse();
            counts.retain(|name, _| unchanged.contains(name));
            statistics.retain(|name, _| unchanged.contains(name));
        }
        let rows = earlier.iter().map(|table| (table.feature.clone(), table.rows)).collect();
        let known = KnownIds { counts, rows };
        let tables = resolve_tables(&self.embedding, &self.tables, schema, &known).map_err(refused)?;
        check_ids(&tables, &statistics).map_err(refused)?;
        Ok(tables)
    }
}

#[cfg(test)]
mod tests;
