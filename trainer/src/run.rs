//! A run on disk: `run.json` (configuration, schema, tables), `model.safetensors` (all parameters), and
//! checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Text, option, text};
use onefold_base::versioned::parse_json;
use onefold_datasets::digest::Digest;
use onefold_datasets::{FeatureGroup, IdEncoding, PartitionKey, Schema, Snapshot, SparseFeature};
use onefold_sharding::{FeatureConfig, TableConfig, tables_of};
use onefold_storage::{Created, Storage};
use serde::{Deserialize, Serialize};

use crate::checkpoint::tables::{self, StoredTables};
use crate::checkpoint::tensor_file::{self, Entry, TensorFile};
use crate::checkpoint::{CheckpointChoice, Checkpoints, DenseFile, dense_entries, sha256};
use crate::device::{Accelerator, check_dims, guarded};
use crate::distributed::Collectives;
use crate::embedding::{Buffer, Embeddings, Placement, Shard};
use crate::model::Model;
use crate::normalize::Normalizers;
use crate::vocabularies::{self, VocabularyIdentity};
use crate::{Error, Result, TrainConfig};

/// The file that describes a run; a directory with this file is a run.
pub const RUN_FILE: &str = crate::config::RUN_FILE;
/// The file with the model's parameters.
pub const MODEL_FILE: &str = "model.safetensors";
/// The folder with the ranks' shards while they are merged into one model.
pub(crate) const SHARDS: &str = ".shards";
/// The version of the format that this code writes, and the only version that it reads.
const FORMAT_VERSION: u32 = crate::config::RUN_FORMAT_VERSION;

/// The content of `run.json`: all information that is needed to use the parameters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The version of the file format.
    pub format_version: u32,
    /// The training configuration.
    pub config: TrainConfig,
    /// The identity of the dataset.
    pub dataset: String,
    /// The number of the dataset's snapshot.
    pub snapshot: u64,
    /// The schema of the training batches.
    pub schema: Schema,
    /// The normalization of dense features, by name; features without an entry are not normalized.
    #[serde(default, skip_serializing_if = "Normalizers::is_empty")]
    pub normalizers: Normalizers,
    /// The initial bias of each task's logit, which predicts the mean of the training labels. Absent if the run
    /// continues the model of another run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bias: Option<Vec<f32>>,
    /// The identities of the dataset's vocabularies, by name.
    pub vocabularies: BTreeMap<String, VocabularyIdentity>,
    /// The table lookups of all features, in the order of the schema.
    pub tables: Vec<FeatureConfig>,
    /// The number of streams that batches are composed of.
    pub streams: usize,
    /// The digests of the snapshot's partitions, by key. A later run compares with them to find new partitions.
    /// If the run follows its dataset, only the partitions that it was trained on or leaves out are included.
    pub partitions: BTreeMap<String, Digest>,
    /// The partitions to train on, if they differ from those that the configuration selects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train_partitions: Option<Vec<PartitionKey>>,
    /// Whether every partition is evaluated on before it is trained on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub progressive: bool,
    /// Whether the run follows its dataset. If so, `snapshot` is the snapshot that it began with.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follow: bool,
    /// The run whose model this run continues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<WarmStarted>,
    /// The number of steps, once training is complete.
    pub steps: u64,
    /// The amount of training of the model, by this run and earlier runs; zero until training is complete.
    pub trained: Trained,
    /// Whether training is complete, so that the model exists.
    pub completed: bool,
    /// The path or URL of the folder of the model and the checkpoints, if it is not the folder of this
    /// description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<PathBuf>,
}

/// The run whose model another run continues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmStarted {
    /// The directory of the run, or the folder or URL of its checkpoints.
    pub run: PathBuf,
    /// The step of the checkpoint; `None` for the final model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<u64>,
    /// The identity of the run.
    pub identity: String,
}

/// The amount of training of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trained {
    /// The number of steps over all runs.
    pub optimizer_steps: u64,
    /// The number of samples over all runs.
    pub samples: u64,
}

impl Run {
    /// Returns the description of a new run. Information about the dataset's content is still empty.
    pub fn new(config: &TrainConfig, schema: &Schema, tables: &[FeatureConfig]) -> Self {
        let (config, schema, tables) = (config.clone(), schema.clone(), tables.to_vec());
        Self {
            format_version: FORMAT_VERSION,
            config,
            dataset: String::new(),
            snapshot: 0,
            vocabularies: BTreeMap::new(),
            schema,
            normalizers: Normalizers::new(),
            output_bias: None,
            tables,
            streams: 0,
            partitions: BTreeMap::new(),
            train_partitions: None,
            progressive: false,
            follow: false,
            warm_start: None,
            steps: 0,
            trained: Trained::default(),
            completed: false,
            checkpoints: None,
        }
    }

    /// Returns the bytes of `run.json`.
    fn to_json(&self) -> Result<Vec<u8>> {
        let mut text = serde_json::to_string_pretty(self).map_err(std::io::Error::other)?;
        text.push('\n');
        Ok(text.into_bytes())
    }

    /// Writes the description to `directory`, and to the folder of the checkpoints if that is a different
    /// folder.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if it cannot be written.
    pub fn store(&self, directory: &Path) -> Result<()> {
        if self.checkpoints.is_some() {
            self.files(directory)?.replace(RUN_FILE, self.beside_checkpoints().to_json()?)?;
        }
        Ok(Storage::open(directory)?.replace(RUN_FILE, self.to_json()?)?)
    }

    /// Writes the description to `files`, the folder of the checkpoints, unless a description exists there.
    pub(crate) fn create_in(&self, files: &Storage) -> Result<Created> {
        Ok(files.create(RUN_FILE, self.beside_checkpoints().to_json()?)?)
    }

    /// Returns the description for the folder of the checkpoints.
    fn beside_checkpoints(&self) -> Self {
        Self { checkpoints: None, ..self.clone() }
    }

    /// Returns the storage of the model and the checkpoints of a run whose description is at `location`.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] for a URL of an unsupported store.
    pub(crate) fn files(&self, location: &Path) -> Result<Storage> {
        Ok(Storage::open(self.checkpoints.as_deref().unwrap_or(location))?)
    }

    /// Writes the trained model, with `state`, to the folder of the checkpoints, and then marks the description
    /// in `directory` as complete. Every rank must call it. A rank that has all tables as a whole writes them
    /// directly. Otherwise the lowest rank merges the shards of all ranks, a few rows at a time, so that no
    /// process needs memory for all tables.
    pub(crate) fn complete(
        &mut self,
        model: &Model,
        state: Vec<Entry<'_>>,
        (steps, trained): (u64, Trained),
        directory: &Path,
    ) -> Result<()> {
        let (embeddings, collectives) = (&model.embeddings, model.embeddings.collectives());
        let (rank, files) = (collectives.rank(), self.files(directory)?);
        let mut entries = dense_entries(model);
        entries.extend(state);
        let is_whole = |shard: &Shard| shard.is_whole(&embeddings.tables()[shard.table]);
        if collectives.size() == 1 && embeddings.shards().iter().all(is_whole) {
            entries.extend(tables::entries(embeddings));
            tensor_file::write(&files, MODEL_FILE, entries)?;
            return self.mark_complete(&files, (steps, trained), directory);
        }
        let path = |rank: u32| format!("{SHARDS}/{rank}.safetensors");
        collectives.agree_on(|| tensor_file::write(&files, &path(rank), tables::entries(embeddings)))?;
        collectives.agree_on(|| {
            if rank != 0 {
                return Ok(());
            }
            let (tables, _) = tables_of(&self.tables);
            let shards: Vec<String> = (0..collectives.size()).map(path).collect();
            let stored = StoredTables::open(&files, &shards, &[])?;
            let mut entries = entries;
            for config in &tables {
                for buffer in self.buffers(config) {
                    let name = format!("tables.{}.{}", config.name, buffer.name);
                    entries.push(stored.whole(name, &config.name, config.rows, config.dim, buffer));
                }
            }
            tensor_file::write(&files, MODEL_FILE, entries)?;
            self.mark_complete(&files, (steps, trained), directory)
        })
    }

    /// Removes the shards from `files`, and marks the description in `directory` as that of a complete run.
    fn mark_complete(
        &mut self,
        files: &Storage,
        (steps, trained): (u64, Trained),
        directory: &Path,
    ) -> Result<()> {
        files.remove_folder(SHARDS, None)?;
        (self.steps, self.trained, self.completed) = (steps, trained, true);
        self.store(directory)
    }

    /// Returns the buffers of a table in a model file.
    fn buffers(&self, config: &TableConfig) -> Vec<Buffer> {
        crate::embedding::whole_buffers(
            config,
            &self.config.optimizer.tables,
            self.config.embedding.evict_after.is_some(),
        )
    }

    /// Returns a digest of everything, except the samples, that the parameters depend on: configuration, schema
    /// and tables. It excludes settings for the length of training and for logging.
    pub(crate) fn identity(&self) -> String {
        sha256(&serde_json::to_vec(&self.identifying()).unwrap_or_default())
    }

    /// Returns a digest of the whole description, which does not depend on its location.
    pub(crate) fn digest(&self) -> Result<String> {
        Ok(sha256(&self.beside_checkpoints().to_json()?))
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
            ("the dataset's schema", value(serde_json::to_value(&self.schema))),
        ];
        // With one task, `[data]` describes it completely, as in versions without `[[tasks]]`.
        if !config.tasks.is_empty() {
            parts.push(("[[tasks]]", value(serde_json::to_value(&config.tasks))));
        }
        if !self.normalizers.is_empty() {
            parts.push(("[dense]", value(serde_json::to_value(&self.normalizers))));
        }
        if let Some(steps) = config.embedding.evict_after {
            parts.push(("[embedding].evict_after", steps.into()));
        }
        if let Some(earlier) = &self.warm_start {
            // The identity does not depend on the current location of that run.
            parts.push(("--warm-start", serde_json::json!([earlier.identity, earlier.checkpoint])));
        }
        if let Some(keys) = &self.train_partitions {
            parts.push(("--new-partitions", value(serde_json::to_value(keys))));
        }
        if self.progressive {
            parts.push(("--progressive", true.into()));
        }
        if self.follow {
            parts.push(("command", "follow".into()));
        }
        parts
    }

    /// Checks that this run, which is in `directory`, can be continued as `other`.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] that names the difference.
    pub(crate) fn check_same(&self, other: &Self, directory: &Path) -> Result<()> {
        let (own, others) = (self.identifying(), other.identifying());
        // A part that only one of the runs has is also a difference.
        let differs = own.iter().find(|part| !others.contains(part));
        match differs.or_else(|| others.iter().find(|part| !own.contains(part))) {
            None => Ok(()),
            Some((part, _)) => Err(Error::not_continued(
                directory,
                text!["the run was begun with another ", described(part), ", so it cannot be continued"],
                "continue with the run's own `train.toml` and dataset",
            )),
        }
    }

    /// Loads the description of the run at `location`, a path or a URL.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if there is no run, or a run of another version; [`Error::Dataset`] if the store cannot
    /// be read.
    pub fn load(location: &Path) -> Result<Self> {
        let storage = Storage::open(location)?;
        Self::find(&storage)?.ok_or_else(|| {
            Error::run(
                storage.shown(RUN_FILE),
                "not a run: it is missing",
                "give the directory that `onefold-train run --out` wrote, or the folder of its checkpoints",
            )
        })
    }

    /// Loads the description of the run in `storage`, if there is one.
    pub(crate) fn find(storage: &Storage) -> Result<Option<Self>> {
        let Some(text) = storage.read(RUN_FILE)? else { return Ok(None) };
        let hint = "train again, or use the program that wrote it";
        let wrong = |message: String| Error::run(storage.shown(RUN_FILE), message, hint);
        parse_json(&text, FORMAT_VERSION).map(Some).map_err(wrong)
    }

    /// Opens the files of the model of the run at `location`, or of one of its checkpoints. Every rank must
    /// call it.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if training is not complete and no checkpoint is chosen, there is no such checkpoint, or
    /// a file is missing or damaged; an error of another rank.
    pub(crate) fn stored(
        &self,
        location: &Path,
        checkpoint: Option<CheckpointChoice>,
        collectives: &dyn Collectives,
    ) -> Result<Stored> {
        let files = self.files(location)?;
        if let Some(choice) = checkpoint {
            let checkpoints = Checkpoints::<Taken>::new(files, self.identity(), 1, 1);
            let checkpoint = checkpoints.choose(choice, collectives)?;
            let Taken { steps, optimizer_steps, samples_before, samples } = *checkpoint.progress();
            let trained = Trained { optimizer_steps, samples: samples_before + samples };
            let (dense, tables) = (checkpoint.dense()?, checkpoint.tables()?);
            return Ok(Stored { dense, tables, metrics: checkpoint.state()?, steps, trained });
        }
        if !self.completed {
            return collectives.agree(Err(Error::run(
                location,
                "training is not complete, so there is no model yet",
                text![
                    "continue it with `onefold-train run --resume`, or use ",
                    option("checkpoint").set_to("latest")
                ],
            )));
        }
        collectives.agree_on(|| {
            let tables = StoredTables::open(&files, &[MODEL_FILE.to_owned()], &[])?;
            let (dense, metrics) = (DenseFile::open(&files, MODEL_FILE)?, tables::open(&files, MODEL_FILE)?);
            Ok(Stored { dense, tables, metrics, steps: self.steps, trained: self.trained })
        })
    }

    /// Returns the step of a chosen checkpoint. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if there is no such checkpoint, or it is damaged.
    pub(crate) fn checkpoint_step(
        &self,
        location: &Path,
        choice: CheckpointChoice,
        collectives: &dyn Collectives,
    ) -> Result<u64> {
        let checkpoints = Checkpoints::<Taken>::new(self.files(location)?, self.identity(), 1, 1);
        Ok(checkpoints.choose(choice, collectives)?.progress().steps)
    }

    /// Loads the run's model, or one of its checkpoints, for inference: on the CPU, divided by `placement`, or
    /// on `device`. Returns it with the number of steps that it was trained for. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if training is not complete and no checkpoint is chosen, there is no such checkpoint, or
    /// the parameters are missing, damaged or have unexpected shapes; an error of another rank.
    pub fn load_model(
        &self,
        location: &Path,
        checkpoint: Option<CheckpointChoice>,
        placement: &Placement,
        threads: usize,
        device: Option<&Accelerator>,
    ) -> Result<(Model, u64)> {
        let collectives = &placement.collectives;
        let stored = self.stored(location, checkpoint, &**collectives)?;
        let model = collectives.agree_on(|| {
            let mut model = self.initial_model(placement, threads, device)?;
            stored.dense.restore(&model)?;
            // The optimizer state is not loaded, because only training needs it.
            stored.tables.restore(&mut model.embeddings, 1)?;
            Ok(model)
        })?;
        Ok((model, stored.steps))
    }

    /// Creates the model as it is before its first step.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if threads cannot be started; [`Error::Fault`] if the device or the machine has too little
    /// memory.
    pub(crate) fn initial_model(
        &self,
        placement: &Placement,
        threads: usize,
        device: Option<&Accelerator>,
    ) -> Result<Model> {
        let (optimizer, seed) = (&self.config.optimizer.tables, self.config.train.seed);
        let embeddings = match device {
            None => Embeddings::new(&self.tables, placement, optimizer, seed, threads)?,
            Some(device) => {
                check_dims(&self.config, &self.tables, device)?;
                Embeddings::on_accelerator(device, &self.tables, placement, optimizer, seed, threads)?
            }
        };
        let evicts = self.config.embedding.evict_after.is_some();
        let embeddings = if evicts { embeddings.storing_usage() } else { embeddings };
        let place = device.map_or(tch::Device::Cpu, Accelerator::torch);
        let model = guarded(place, || {
            let model = Model::new(&self.config, &self.schema, embeddings)?;
            self.output_bias.iter().try_fold(model, |model, bias| model.starting_at(bias))
        })?;
        Ok(model.normalized_by(&self.schema, &self.normalizers))
    }

    /// Checks that the model accepts batches with this schema.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] that names the first difference between the schemas.
    pub fn check_schema(&self, schema: &Schema, directory: &Path) -> Result<()> {
        let (trained, given) = (&self.schema, schema);
        let groups = |schema: &Schema| schema.groups.iter().map(describe_group).collect::<Vec<_>>();
        let differs = |what: &str, trained: String, given: String| {
            Error::run(
                directory,
                format!("the model was trained on other {what}: {trained}, the dataset has {given}"),
                "give a dataset that was built with the same `[features]`, or train a new model",
            )
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
        for (trained, given) in trained.sparse_features().zip(given.sparse_features()) {
            if (&trained.vocabulary, trained.ids) != (&given.vocabulary, given.ids) {
                let what = format!("ids of `{}`", given.name);
                return Err(differs(&what, describe_ids(trained), describe_ids(given)));
            }
        }
        Ok(())
    }

    /// Checks that the ids of `dataset` have the meanings that they had when the model was trained.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] that names the changed vocabulary; [`Error::Dataset`] if a vocabulary cannot be read.
    pub(crate) fn check_vocabularies(
        &self,
        dataset: &Path,
        snapshot: &Snapshot,
        directory: &Path,
    ) -> Result<()> {
        vocabularies::check_continued(&self.vocabularies, dataset, snapshot, directory)
    }
}

/// Returns the absolute form of a location, a path or a URL, which runs store.
///
/// # Errors
///
/// The errors of [`onefold_storage::absolute`].
pub fn absolute(location: &Path) -> Result<PathBuf> {
    Ok(onefold_storage::absolute(location)?)
}

/// Describes a part of [`Run::identifying`] for a message: a key, an option, or words. The names themselves are part of
/// the identities of runs that exist.
fn described(part: &str) -> Text {
    match part {
        "the dataset's schema" => "schema of the dataset".into(),
        "[embedding] and [tables]" => "`[embedding]` or `[tables]`".into(),
        "command" => "command".into(),
        key => match key.strip_prefix("--") {
            Some(flag) => option(&flag.replace('-', "_")).into(),
            None => format!("`{key}`").into(),
        },
    }
}

fn describe_group(group: &FeatureGroup) -> String {
    let names: Vec<_> = group.features.iter().map(|feature| feature.name.as_str()).collect();
    format!("{} ({})", group.name, names.join(", "))
}

fn describe_ids(feature: &SparseFeature) -> String {
    match (&feature.vocabulary, feature.ids) {
        (Some(name), _) => format!("those of the vocabulary `{name}`"),
        (None, Some(IdEncoding::Hash)) => "hashes".to_owned(),
        (None, None) => "those of the logs".to_owned(),
    }
}

/// The part of a checkpoint's progress that all programs read.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Taken {
    steps: u64,
    optimizer_steps: u64,
    samples_before: u64,
    samples: u64,
}

/// The files of a stored model.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) dense: DenseFile,
    pub(crate) tables: StoredTables,
    /// The file with the sums of metrics.
    pub(crate) metrics: TensorFile,
    /// The number of steps of the run.
    pub(crate) steps: u64,
    /// The amount of training by the run and by earlier runs.
    pub(crate) trained: Trained,
}
