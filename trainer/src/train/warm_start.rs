//! Continues training with the model of another run, on other partitions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Text, option, text};
use onefold_datasets::digest::Digest;
use onefold_datasets::{Partition, PartitionFilter, PartitionKey, Schema, Snapshot};
use onefold_sharding::{FeatureConfig, IdPolicy, TableConfig, tables_of};

use super::GrownTable;
use crate::checkpoint::CheckpointChoice;
use crate::config::Normalization;
use crate::distributed::Collectives;
use crate::normalize::{Normalizer, Normalizers};
use crate::preprocess::Preprocessing;
use crate::run::{Run, Stored, WarmStarted, absolute};
use crate::{Error, Result, TrainConfig, name_of};

/// The options for continuing with the model of another run.
#[derive(Debug, Clone)]
pub struct WarmStart {
    /// The directory of the run, or the folder or URL of its checkpoints.
    pub run: PathBuf,
    /// The checkpoint to use; the final model if `None`.
    pub checkpoint: Option<CheckpointChoice>,
    /// Whether to train only on partitions that were committed after the run's snapshot.
    pub new_partitions: bool,
}

/// The run whose model is trained further, as loaded from the disk.
#[derive(Debug)]
pub(super) struct Earlier {
    pub(super) run: Run,
    options: WarmStart,
}

impl Earlier {
    pub(super) fn load(options: &WarmStart) -> Result<Self> {
        Ok(Self { run: Run::load(&options.run)?, options: options.clone() })
    }

    fn refused(&self, message: String, hint: impl Into<Text>) -> Error {
        Error::run(&self.options.run, message, hint)
    }

    /// Checks that the model can be trained further with this configuration and dataset.
    pub(super) fn check(
        &self,
        config: &TrainConfig,
        (dataset, snapshot): (&Path, &Snapshot),
        schema: &Schema,
        features: &[FeatureConfig],
        preprocessing: Option<&Preprocessing>,
    ) -> Result<()> {
        let (earlier, path) = (&self.run.config, self.options.run.as_path());
        self.run.check_schema(schema, path)?;
        self.run.check_vocabularies(dataset, snapshot, path)?;
        let value = |value: serde_json::Result<serde_json::Value>| value.unwrap_or_default();
        let tasks = |config: &TrainConfig| {
            config.all_tasks().into_iter().map(|task| (task.label, task.loss)).collect::<Vec<_>>()
        };
        let optimizers =
            |config: &TrainConfig| (config.optimizer.tables.kind, config.optimizer.dense.state_kind());
        let same = [
            (
                "[model]",
                value(serde_json::to_value(&earlier.model)) == value(serde_json::to_value(&config.model)),
            ),
            ("[data].label`, `[data].loss` or `[[tasks]]", tasks(earlier) == tasks(config)),
            (
                "kind` in `[optimizer.tables]` or `[optimizer.dense]",
                optimizers(earlier) == optimizers(config),
            ),
        ];
        if let Some((part, _)) = same.iter().find(|(_, same)| !same) {
            return Err(self.refused(
                format!("its model has another `{part}` than `{}`", config.path().display()),
                "train further with what the model was begun with; data, learning rates, schedule and batch size may change",
            ));
        }
        let files = self.run.files(path)?;
        let same_steps = match preprocessing {
            Some(steps) => earlier.data.preprocess.is_some() && steps.is_stored(&files)?,
            None => earlier.data.preprocess.is_none(),
        };
        if !same_steps {
            let hint = "train further with the same `preprocess.toml`";
            return Err(self.refused("its model was trained with other preprocessing".to_owned(), hint));
        }
        self.check_tables(features)
    }

    /// Returns the normalization of the model's dense features; an error if `config` asks for a different one.
    pub(super) fn normalizers(&self, config: &TrainConfig, schema: &Schema) -> Result<Normalizers> {
        let known = &self.run.normalizers;
        let of = |name: &str| known.get(name).map_or(Normalization::None, Normalizer::normalization);
        for name in &schema.dense {
            if let Some(asked) = config.dense.of_feature(name).filter(|asked| *asked != of(name)) {
                return Err(self.refused(
                    format!(
                        "its model normalizes `{name}` by `{}`, and `{}` asks for `{asked}`",
                        of(name),
                        config.path().display()
                    ),
                    "leave out `normalize` under `[dense]` to continue as before, or train a new model",
                ));
            }
        }
        Ok(known.clone())
    }

    fn check_tables(&self, features: &[FeatureConfig]) -> Result<()> {
        for (old, new) in self.run.tables.iter().zip(features) {
            let rows_fit =
                if new.ids == IdPolicy::Checked { new.rows >= old.rows } else { new.rows == old.rows };
            let resized = FeatureConfig { rows: new.rows, ..old.clone() };
            if resized != *new || !rows_fit {
                return Err(self.refused(
                    format!(
                        "its table for `{}` has {}, and `train.toml` asks for {}",
                        new.feature,
                        described(old, new),
                        described(new, old)
                    ),
                    "tables of checked ids may grow, as with `rows = \"vocabulary\"`; all else stays as it is",
                ));
            }
        }
        Ok(())
    }

    /// Returns the partitions of `snapshot` to train on: all partitions that `filter` selects, or with
    /// `new_partitions` only the selected partitions that are new or changed since the run's snapshot.
    pub(super) fn partitions(&self, snapshot: &Snapshot, filter: PartitionFilter) -> Result<PartitionFilter> {
        if !self.options.new_partitions {
            return Ok(filter);
        }
        let known = self.known(snapshot)?;
        let chosen = snapshot.select(&filter).map_err(onefold_ikjt::Error::from)?;
        let is_new =
            |partition: &&&Partition| known.get(&partition.key.to_string()) != Some(&partition.digest);
        let keys: Vec<PartitionKey> =
            chosen.iter().filter(is_new).map(|partition| partition.key.clone()).collect();
        if keys.is_empty() {
            return Err(self.refused(
                format!(
                    "no partition for training was committed after its snapshot {}; the dataset is at {}",
                    self.run.snapshot, snapshot.snapshot
                ),
                "append the new samples first (`onefold-ingest append`)",
            ));
        }
        Ok(PartitionFilter::of_keys(keys))
    }

    /// Returns the digests of the earlier run's partitions, by key, if `new_partitions` is set; otherwise an
    /// empty map.
    pub(super) fn known(&self, snapshot: &Snapshot) -> Result<BTreeMap<String, Digest>> {
        if !self.options.new_partitions {
            return Ok(BTreeMap::new());
        }
        if self.run.dataset != snapshot.dataset {
            return Err(self.refused(
                "it was trained on another dataset, so which partitions are new is not known".to_owned(),
                text!["name the partitions under `[data]` in place of ", option("new_partitions")],
            ));
        }
        Ok(self.run.partitions.clone())
    }

    /// Returns the location of the run, and the files of its model. Every rank must call it.
    pub(super) fn stored(&self, collectives: &dyn Collectives) -> Result<(&Path, Stored)> {
        let location = self.options.run.as_path();
        Ok((location, self.run.stored(location, self.options.checkpoint, collectives)?))
    }

    /// Returns the tables with more rows than in the earlier run.
    pub(super) fn grown(&self, features: &[FeatureConfig]) -> Vec<GrownTable> {
        let (before, now) = (tables_of(&self.run.tables).0, tables_of(features).0);
        let grown = before.iter().zip(&now).filter(|(before, now)| before.rows < now.rows);
        let table = |(before, now): (&TableConfig, &TableConfig)| GrownTable {
            table: now.name.clone(),
            rows_before: before.rows,
            rows: now.rows,
        };
        grown.map(table).collect()
    }

    /// Returns the description of the earlier run that the new run stores. Every rank must call it.
    pub(super) fn describe(&self, collectives: &dyn Collectives) -> Result<WarmStarted> {
        let run = absolute(&self.options.run)?;
        let step = |choice| self.run.checkpoint_step(&self.options.run, choice, collectives);
        let checkpoint = self.options.checkpoint.map(step).transpose()?;
        Ok(WarmStarted { run, checkpoint, identity: self.run.identity() })
    }
}

/// Describes the table lookup `own`: rows, dimension and ids, and every other setting in which it differs from `other`.
fn described(own: &FeatureConfig, other: &FeatureConfig) -> String {
    let FeatureConfig { rows, dim, ids, .. } = own;
    let others = |config: &FeatureConfig| {
        let target =
            config.target.as_ref().map_or_else(String::new, |target| format!(" with the target `{target}`"));
        [
            format!("weights of type {}", name_of(&config.dtype)),
            format!("pooling by {}{target}", name_of(&config.pooling)),
            format!("the name `{}`", config.table_name()),
        ]
    };
    let different = others(own).into_iter().zip(others(other)).filter(|(own, other)| own != other);
    let parts = [format!("{rows} rows of {dim} values"), format!("{} ids", name_of(ids))].into_iter();
    parts.chain(different.map(|(own, _)| own)).collect::<Vec<_>>().join(", ")
}

/// Returns the digests of the partitions of a snapshot, by key, with which later runs detect new and changed
/// partitions. Partitions with samples after the time `latest`, in microseconds since 1970, are left out.
pub(super) fn digests(snapshot: &Snapshot, latest: Option<i64>) -> BTreeMap<String, Digest> {
    let is_young = |time: i64| latest.is_some_and(|latest| time > latest);
    let old = snapshot.partitions.iter().filter(|partition| !partition.last_time.is_some_and(is_young));
    old.map(|partition| (partition.key.to_string(), partition.digest)).collect()
}
