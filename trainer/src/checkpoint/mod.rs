//! A run on disk: `run.json` (configuration, schema, figures), `model.safetensors` (all parameters), and its checkpoints.

mod parameters;
mod store;
pub(crate) mod tensor_file;
mod touched;

use std::path::Path;

use onefold_datasets::{FeatureGroup, Schema, commit};
use onefold_sharding::TableConfig;
use serde::{Deserialize, Serialize};

use crate::device::Accelerator;
use crate::embedding::Shard;
use crate::model::Model;
use crate::{Error, Result, TrainConfig};

pub use self::store::CheckpointChoice;
pub(crate) use self::store::{Checkpoint, CheckpointParts, Checkpoints};
pub(crate) use self::touched::Touched;

/// The file that makes a directory a run.
pub const RUN_FILE: &str = "run.json";
/// The parameters.
pub const MODEL_FILE: &str = "model.safetensors";
/// The name of the shards among the parts that identify a run. Checkpoints hold a hash of it.
const PLAN: &str = "--plan";
/// The version this code writes; it reads 1 too, which has fewer settings.
const FORMAT_VERSION: u32 = 2;

/// `run.json`: what is needed to use the parameters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Version of this format.
    pub format_version: u32,
    /// The configuration that was trained.
    pub config: TrainConfig,
    /// The identity of the dataset that it was trained on; runs of earlier versions do not name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dataset: Option<String>,
    /// The number of the dataset's snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<u64>,
    /// The schema of the dataset that it was trained on.
    pub schema: Schema,
    /// The tables, in the schema's order of features.
    pub tables: Vec<TableConfig>,
    /// The shards of a plan for several ranks; none if every table is whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<Shard>,
    /// Steps that were taken.
    pub steps: u64,
    /// Whether training came to its end, so that the model is there.
    #[serde(default = "yes")]
    pub completed: bool,
}

/// Runs of version 1 appeared when they were complete.
fn yes() -> bool {
    true
}

impl Run {
    /// The description of a run that begins.
    pub fn new(config: &TrainConfig, schema: &Schema, tables: &[TableConfig]) -> Self {
        let (config, schema, tables) = (config.clone(), schema.clone(), tables.to_vec());
        Self {
            format_version: FORMAT_VERSION,
            config,
            dataset: None,
            snapshot: None,
            schema,
            tables,
            shards: Vec::new(),
            steps: 0,
            completed: false,
        }
    }

    /// Writes the description into `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be written.
    pub fn store(&self, directory: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self).map_err(std::io::Error::other)?;
        text.push('\n');
        Ok(commit::write_atomically(&directory.join(RUN_FILE), text.as_bytes())?)
    }

    /// Writes the model that was trained into `directory`, and says so in the description.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a file cannot be written.
    pub fn complete(&mut self, model: &Model, steps: u64, directory: &Path) -> Result<()> {
        let temporary = directory.join(format!(".{MODEL_FILE}.tmp"));
        let entries = parameters::dense(model).into_iter().chain(parameters::tables(model));
        tensor_file::write(&temporary, entries.collect())?;
        fs_err::rename(&temporary, directory.join(MODEL_FILE))?;
        commit::sync_directory(directory)?;
        (self.steps, self.completed) = (steps, true);
        self.store(directory)
    }

    /// What the parameters depend on besides the samples: a digest of configuration, schema and tables. What only says
    /// how long training goes on and what is logged does not count.
    pub(crate) fn identity(&self) -> String {
        use sha2::Digest as _;
        // Without a plan a run is the one that it was before there were any.
        let parts: Vec<_> = self
            .identifying()
            .into_iter()
            .filter(|(part, _)| *part != PLAN || !self.shards.is_empty())
            .collect();
        let text = serde_json::to_vec(&parts).unwrap_or_default();
        sha2::Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn identifying(&self) -> Vec<(&'static str, serde_json::Value)> {
        let value = |value: serde_json::Result<serde_json::Value>| value.unwrap_or_default();
        let config = &self.config;
        let mut parts = vec![
            ("[data]", value(serde_json::to_value(&config.data))),
            ("[train].batch_size", config.train.batch_size.into()),
            ("[train].seed", config.train.seed.into()),
            ("[model]", value(serde_json::to_value(&config.model))),
            ("[embedding] and [tables]", value(serde_json::to_value(&self.tables))),
            ("[optimizer]", value(serde_json::to_value(&config.optimizer))),
            ("[schedule]", value(serde_json::to_value(&config.schedule))),
            (PLAN, value(serde_json::to_value(&self.shards))),
            ("the dataset's schema", value(serde_json::to_value(&self.schema))),
        ];
        // With one task `[data]` says it all, as it did before there could be several.
        if !config.tasks.is_empty() {
            parts.push(("[[tasks]]", value(serde_json::to_value(&config.tasks))));
        }
        parts
    }

    /// Refuses to continue this run, which is in `directory`, as `other`.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] naming what differs.
    pub(crate) fn check_same(&self, other: &Self, directory: &Path) -> Result<()> {
        let differs = self.identifying().into_iter().zip(other.identifying()).find(|(a, b)| a != b);
        match differs {
            None => Ok(()),
            Some(((part, _), _)) => Err(Error::Run {
                path: directory.to_owned(),
                message: if part == PLAN {
                    "the run was begun with another value of the option `plan`, so it cannot be continued".to_owned()
                } else {
                    format!("the run was begun with another `{part}`, so it cannot be continued")
                },
                hint: "continue with the run's own `train.toml` and dataset, or begin a new run in another directory, with the option `out`"
                    .to_owned(),
            }),
        }
    }

    /// Reads a run's description.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if `directory` holds no run, or one of another version.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(RUN_FILE);
        let wrong =
            |message: String, hint: &str| Error::Run { path: path.clone(), message, hint: hint.to_owned() };
        let text = fs_err::read_to_string(&path).map_err(|error| {
            wrong(format!("not a run: {error}"), "give the directory that `onefold-train run --out` wrote")
        })?;
        let again = "train again, or use the program that wrote it";
        let run: Self = serde_json::from_str(&text).map_err(|error| wrong(error.to_string(), again))?;
        if !(1..=FORMAT_VERSION).contains(&run.format_version) {
            return Err(wrong(
                format!("format version {}, this program reads {FORMAT_VERSION}", run.format_version),
                again,
            ));
        }
        Ok(run)
    }

    /// Reads the run's model, or that of one of its checkpoints, to be used on the CPU or on `device`, and the steps that it
    /// was trained for.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if training is not complete and no checkpoint is chosen, there is no such checkpoint, or the
    /// parameters are missing, damaged, or of other shapes than the configuration's.
    pub fn load_model(
        &self,
        directory: &Path,
        checkpoint: Option<CheckpointChoice>,
        threads: usize,
        device: Option<&Accelerator>,
    ) -> Result<(Model, u64)> {
        if let Some(choice) = checkpoint {
            let checkpoint = Checkpoints::new(directory, self.identity(), 1, 1).choose(choice)?;
            let mut model = Model::of_run(self, threads, device)?;
            let rows = self.tables.iter().map(|table| table.rows);
            checkpoint.restore_model(&mut model, &mut Touched::new(rows))?;
            return Ok((model, checkpoint.progress().steps));
        }
        if !self.completed {
            return Err(Error::Run {
                path: directory.to_owned(),
                message: "training is not complete, so there is no model yet".to_owned(),
                hint:
                    "continue it with `onefold-train run --resume`, or use the option `checkpoint = latest`"
                        .to_owned(),
            });
        }
        let path = directory.join(MODEL_FILE);
        fs_err::metadata(&path)?;
        let mut model = Model::at(&self.config, &self.schema, &self.tables, threads, device)?;
        parameters::load_dense(&mut model, &path)?;
        parameters::load_weights(&mut model, &path)?;
        Ok((model, self.steps))
    }

    /// Checks that a dataset's samples can go through the model.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] naming the first difference between the schemas.
    pub fn check_schema(&self, schema: &Schema, directory: &Path) -> Result<()> {
        let (trained, given) = (&self.schema, schema);
        let groups = |schema: &Schema| schema.groups.iter().map(describe_group).collect::<Vec<_>>();
        let differs = |what: &str, trained: String, given: String| Error::Run {
            path: directory.to_owned(),
            message: format!("the model was trained on other {what}: {trained}, the dataset has {given}"),
            hint: "evaluate on a dataset that was built with the same `[features]`".to_owned(),
        };
        if trained.dense != given.dense {
            return Err(differs(
                "dense features",
                format!("{:?}", trained.dense),
                format!("{:?}", given.dense),
            ));
        }
        if trained.labels != given.labels {
            return Err(differs("labels", format!("{:?}", trained.labels), format!("{:?}", given.labels)));
        }
        if groups(trained) != groups(given) {
            return Err(differs("feature groups", groups(trained).join("; "), groups(given).join("; ")));
        }
        Ok(())
    }
}

fn describe_group(group: &FeatureGroup) -> String {
    let names: Vec<_> = group.features.iter().map(|feature| feature.name.as_str()).collect();
    format!("{} ({})", group.name, names.join(", "))
}

fn damaged(path: &Path, message: &str) -> Error {
    let hint = "the run is damaged; train again, or restore it from a copy".to_owned();
    Error::Run { path: path.to_owned(), message: message.to_owned(), hint }
}
