//! The training configuration `train.toml`: data, model, tables, optimizers and training loop.
//!
//! The trainer reads it for training, the planner reads it for the sizes of the tables. This crate does not
//! need libtorch.
#![forbid(unsafe_code)]

mod dense;
mod error;
mod loss;
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
pub use self::loss::{HUBER_DELTA, Loss};
pub use self::model::{BiasInit, Interaction, ModelConfig};
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
pub use self::tasks::TaskConfig;
pub use self::training::{
    CheckpointConfig, DataConfig, EarlyStoppingConfig, EvaluationConfig, ExchangeConfig, LoopConfig,
    WatchedMetric,
};
pub use self::types::{DataType, TableOptimizer};

/// Returns whether a setting has its default value; such settings are not stored.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns the name of a setting's value, as in the file.
pub fn name_of(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The name of the file in a run's directory that describes the run.
pub const RUN_FILE: &str = "run.json";
/// The version of [`RUN_FILE`] that the trainer writes; other versions cannot be read.
pub const RUN_FORMAT_VERSION: u32 = 2;

/// The version of `train.toml` that this program reads.
const FORMAT_VERSION: u32 = 1;

/// A parsed `train.toml`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The version of the file format.
    pub format_version: u32,
    /// The dataset's partitions and labels for training and evaluation.
    pub data: DataConfig,
    /// The predicted labels, if there is more than one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskConfig>,
    /// Batch size, number of epochs and seed.
    #[serde(default)]
    pub train: LoopConfig,
    /// Normalization of dense features.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dense: DenseConfig,
    /// The dense part of the model.
    pub model: ModelConfig,
    /// Defaults for all embedding tables.
    #[serde(default)]
    pub embedding: EmbeddingConfig,
    /// Settings of individual features and their tables, by feature name; these override `embedding`.
    #[serde(default)]
    pub tables: BTreeMap<String, TableOverride>,
    /// The optimizers.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// The learning-rate schedules; the rates are constant if absent.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// Frequency and metrics of the evaluation.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// Early stopping; disabled if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<EarlyStoppingConfig>,
    /// Frequency and number of checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// The exchange of embedding vectors between ranks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub exchange: ExchangeConfig,
    /// The path of this file, for messages.
    #[serde(skip)]
    path: PathBuf,
}

impl TrainConfig {
    /// Reads a `train.toml`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be read; [`Error::Fault`], with the line or key, if it is not valid
    /// TOML, has an unknown key or another format version, or has invalid values.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &fs_err::read_to_string(path)?)
    }

    /// Parses the text of a `train.toml`. `path` is used for relative paths and messages; the file need not
    /// exist.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`], as for [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let wrong = |message: String, hint: &str| Error::config(path, message, hint);
        let mut config: Self =
            parse_toml(text, FORMAT_VERSION, "the manual's page `train.toml` lists all keys")
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

    /// Checks that the configuration is suitable for following a dataset.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if it has several epochs, `labels_as_of` or early stopping.
    pub fn check_follow(&self) -> Result<()> {
        let wrong = |message: String, hint: &str| Err(Error::config(&self.path, message, hint));
        let epochs = self.train.epochs;
        if epochs != 1 {
            let message =
                format!("`[train].epochs` is {epochs}, and a run that follows trains on each partition once");
            return wrong(message, "set `epochs = 1` under `[train]`");
        }
        if self.data.labels_as_of.is_some() {
            let message =
                "`[data].labels_as_of` is one time, and a run that follows trains on later and later samples";
            let hint = "give the age from which labels are final, as `label_age = \"3d\"`, in place of `labels_as_of`";
            return wrong(message.to_owned(), hint);
        }
        if self.early_stopping.is_some() {
            let message = "a run that follows has no held-out samples for `[early_stopping]`: it evaluates on each \
                           partition before it trains on it";
            return wrong(message.to_owned(), "leave out `[early_stopping]`");
        }
        Ok(())
    }

    /// Returns the directory that the paths in the configuration are relative to.
    pub fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Returns the path of the configuration file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the partitions of a snapshot to train on: the partitions that `[data].train` selects. If `train`
    /// is empty, `eval` is given and `allow_overlap` is not set, these are all partitions that `eval` does not
    /// select. Partitions that are too young for `labels_as_of` and `label_age` are left out.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if a filter cannot be parsed or does not fit the snapshot, [`Error::Fault`] if all selected
    /// partitions are too young.
    pub fn train_partitions(&self, snapshot: &Snapshot) -> Result<PartitionFilter> {
        let train = PartitionFilter::parse(&self.data.train)?;
        let eval = self.eval_partitions()?.filter(|_| self.data.trains_on_rest());
        let Some(eval) = eval else { return self.old_enough(snapshot, train) };
        let held_out: BTreeSet<_> =
            snapshot.matching(&eval)?.into_iter().map(|partition| &partition.key).collect();
        let keys = snapshot.partitions.iter().map(|partition| &partition.key);
        let others: Vec<_> = keys.filter(|key| !held_out.contains(key)).cloned().collect();
        // Later checks reject an `eval` that selects all partitions or no partition, with a better message.
        let divides = !held_out.is_empty() && !others.is_empty();
        self.old_enough(snapshot, if divides { PartitionFilter::of_keys(others) } else { train })
    }

    /// Returns the partitions to evaluate on, or `None` if `[data].eval` is absent.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the filter cannot be parsed.
    pub fn eval_partitions(&self) -> Result<Option<PartitionFilter>> {
        Ok(self.data.eval.as_deref().map(PartitionFilter::parse).transpose()?)
    }

    /// Checks the configuration against a dataset and returns the table lookups of all sparse features, in the
    /// order of the schema of the batches. `preprocessor` is the preprocessing of the batches, if any;
    /// `earlier` has the features of the model whose training continues, or is empty. Allocates no tables.
    ///
    /// The ids in the dataset's statistics are checked against the tables, except for features that
    /// preprocessing changes or creates; the reader checks all ids.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset lacks a label, the feature of a segment or any sparse feature, or has
    /// too few features for the interaction, or if a partition is both trained and evaluated on; [`Error::Tables`] if tables are invalid, name an unknown feature
    /// or are too small for the dataset's ids; [`Error::Dataset`] if a filter selects no partition.
    pub fn tables(
        &self,
        snapshot: &Snapshot,
        preprocessor: Option<&Preprocessor>,
        earlier: &[FeatureConfig],
    ) -> Result<Vec<FeatureConfig>> {
        let schema = preprocessor.map_or(&snapshot.schema, Preprocessor::schema);
        let wrong = |message: String, hint: String| Error::config(&self.path, message, hint);
        self.tasks_of(schema)?;
        self.check_delays(schema)?;
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
        let dense = || schema.dense.iter().map(String::as_str);
        if let Some(name) = self.dense.features.keys().find(|name| dense().all(|known| known != *name)) {
            return Err(wrong(
                format!("`[dense.features]` has `{name}`, which is no dense feature"),
                suggest(name, dense()),
            ));
        }
        self.check_partitions(snapshot)?;
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

    /// Checks that `train` and `eval` under `[data]` select partitions of a snapshot, and no partition both, unless
    /// the configuration allows it.
    fn check_partitions(&self, snapshot: &Snapshot) -> Result<()> {
        let train = snapshot.select(&self.train_partitions(snapshot)?)?;
        let Some(eval) = self.eval_partitions()? else { return Ok(()) };
        let eval: BTreeSet<_> = snapshot.select(&eval)?.into_iter().map(|partition| &partition.key).collect();
        let both = train.into_iter().find(|partition| eval.contains(&partition.key));
        let Some(both) = both.filter(|_| !self.data.allow_overlap) else { return Ok(()) };
        let message = match both.key.to_string() {
            whole if whole.is_empty() => "the whole dataset is both trained and evaluated on".to_owned(),
            key => format!("the partition `{key}` is both trained and evaluated on"),
        };
        let hint = "let `train` and `eval` under `[data]` choose different partitions, as `split=train` and \
                    `split=holdout`, or set `allow_overlap = true` there";
        Err(Error::config(&self.path, message, hint))
    }

    /// Returns the table lookups of all sparse features, in the order of the schema of the batches. Unlike
    /// [`tables`](Self::tables), does not check the settings that only training needs.
    ///
    /// # Errors
    ///
    /// [`Error::Tables`] if tables are invalid, name an unknown feature or are too small for the dataset's ids.
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
        // Preprocessing may change ids, so statistics hold only for features that it leaves unchanged.
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
