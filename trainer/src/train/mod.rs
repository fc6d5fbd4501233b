//! Training: from a configuration and a dataset to a run.
//!
//! ```text
//! Prepared ─▶ RunDirectory ─▶ Training ─ step ─▶ … ─ evaluation, checkpoint ─▶ … ─▶ model.safetensors, summary.json
//! (checked,    (locked)         forward, backward,     Progress, metrics
//!  nothing                      updates, Log
//!  allocated)
//! ```

mod clock;
mod diverged;
mod early_stopping;
mod follow;
mod labels;
mod log;
mod loss_watch;
mod model_state;
mod parts;
mod progress;
mod run_directory;
mod state;
mod step;
mod summary;
#[cfg(test)]
mod tests;
mod training;
mod warm_start;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onefold_base::fault::{option, text};
use onefold_base::progress::Reporter;
use onefold_datasets::digest::Digest;
use onefold_datasets::{PartitionKey, Schema};
use onefold_ikjt::preprocess::Preprocessor;
use onefold_ikjt::{Dedupe, ReadRequest, Reader, ReaderOptions, Workers, load_snapshot};
use onefold_sharding::{FeatureConfig, Plan};
use onefold_storage::{Created, Storage};

use self::labels::{LabelReading, check_labels};
use self::parts::{Day, Progressive};
use self::run_directory::{RunDirectory, check_shared};
use self::training::Training;
use self::warm_start::Earlier;
use crate::config::BiasInit;
use crate::device::{Accelerator, check_dims};
use crate::distributed::Collectives;
use crate::embedding::{Placement, Shard};
use crate::evaluate::{Evaluation, checks, rank_of};
use crate::memory::ModelSize;
use crate::metrics::Task;
use crate::normalize::{self, Normalizers};
use crate::preprocess::Preprocessing;
use crate::processor::check_precision;
use crate::run::{RUN_FILE, Run};
use crate::stop::Stop;
use crate::{Error, Result, TrainConfig, memory, vocabularies};

pub use self::follow::Follow;
pub use self::loss_watch::LossJump;
pub use self::progress::PartitionFigures;
use self::progress::Progress;
pub use self::run_directory::Existing;
pub use self::summary::{Ending, GrownTable, ProgressiveSummary, RowCounts, TrainSummary};
pub use self::warm_start::WarmStart;

/// The options of training.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// The kind of deduplication. The losses do not depend on it, except for the order of 32-bit sums.
    pub dedupe: Dedupe,
    /// The number of threads of libtorch and of the tables; half as many threads read.
    pub threads: usize,
    /// The number of the dataset's snapshot. If `None`: the snapshot of the resumed run, or the newest one.
    pub snapshot: Option<u64>,
    /// The step after which training ends, counted over all resumptions.
    pub max_steps: Option<u64>,
    /// The plan to execute; without one, every table is whole on one rank.
    pub plan: Option<PathBuf>,
    /// The ranks that train together.
    pub collectives: Arc<dyn Collectives>,
    /// The steps, counted from 1, that the ranks trace. If `None`, several ranks trace steps 10 to 20, and one rank
    /// traces no steps.
    pub trace_steps: Option<RangeInclusive<u64>>,
    /// The number of streams of a resumed run, if its configuration does not set it.
    pub streams: Option<usize>,
    /// The treatment of an existing run.
    pub existing: Existing,
    /// The run whose model is trained further.
    pub warm_start: Option<WarmStart>,
    /// Whether to train on the partitions of one day or hour after another, evaluating on each first.
    pub progressive: bool,
    /// The options for following the dataset. If `None`, the run trains on the partitions that exist at its start.
    pub follow: Option<Follow>,
    /// The path or URL of the folder for the checkpoints and the model; the run's directory if `None`.
    pub checkpoints: Option<PathBuf>,
    /// The limit in bytes for parameters, optimizer state and the reader. The activations of a batch are not
    /// included.
    pub memory_limit: Option<u64>,
    /// The GPU to train on; the processor if `None`.
    pub device: Option<Accelerator>,
    /// The flag that ends training with a checkpoint when it is raised.
    pub stop: Stop,
}

/// A run that can begin: all checks that need no allocations have succeeded.
#[derive(Debug)]
pub struct Prepared<'a> {
    config: &'a TrainConfig,
    dataset: PathBuf,
    options: &'a TrainOptions,
    preprocessing: Option<Preprocessing>,
    reader: Arc<Reader>,
    /// The partitions by day, if each day is trained on separately.
    progressive: Option<Progressive>,
    held_out: Option<Reader>,
    earlier: Option<Earlier>,
    /// The partitions to train on, if they differ from those that the configuration selects.
    partitions: Option<Vec<PartitionKey>>,
    /// The digests of the partitions that a run following its dataset does not train on, by key.
    known: BTreeMap<String, Digest>,
    schema: Schema,
    features: Vec<FeatureConfig>,
    normalizers: Normalizers,
    /// The request for the labels that initialize a new model; `None` for a model that is trained further.
    labels: Option<LabelReading>,
    placement: Placement,
    size: ModelSize,
}

/// Checks that the number of streams fits the number of ranks, the dataset's buckets and the batch size.
fn check_streams(config: &TrainConfig, options: &TrainOptions, buckets: u32) -> Result<()> {
    let ranks = options.collectives.size() as usize;
    let streams = config.data.streams.or(options.streams).unwrap_or(ranks.min(buckets as usize));
    let batch = config.train.batch_size;
    let wrong = |message: String, hint: String| Err(Error::config(config.path(), message, hint));
    if streams > buckets as usize {
        return wrong(
            format!("the dataset's {buckets} buckets cannot be divided into {streams} streams"),
            format!(
                "set `streams` under `[data]` to at most {buckets}, or build the dataset with as many buckets \
                 (`onefold-ingest build --buckets {streams}`)"
            ),
        );
    }
    for (parts, name) in [(streams, "streams"), (ranks, "ranks")] {
        if batch < parts {
            return wrong(
                format!("a batch of {batch} samples cannot be divided among {parts} {name}"),
                format!("set `batch_size` under `[train]` to at least {parts}"),
            );
        }
    }
    Ok(())
}

/// Returns the placement of the tables: from the plan, or every table whole on one rank.
fn placement(config: &TrainConfig, options: &TrainOptions, features: &[FeatureConfig]) -> Result<Placement> {
    let collectives = Arc::clone(&options.collectives);
    let mut placement = Placement::even(features, collectives);
    placement.dtype = config.exchange.dtype;
    let Some(path) = &options.plan else { return Ok(placement) };
    let sharding = |source| Error::Sharding { path: path.clone(), source };
    let plan = Plan::load(path).map_err(sharding)?;
    let ranks = options.collectives.size();
    if plan.topology.ranks != ranks {
        let of = |ranks: u32| format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" });
        return Err(Error::config(
            path,
            format!("the plan is for {}, and the job has {}", of(plan.topology.ranks), of(ranks)),
            format!(
                "make a plan for {}, with the topology that `onefold-shard topology --ranks {ranks} --memory SIZE --out FILE` \
                 writes, or start as many ranks as the plan is for (`onefold-train launch --ranks {} -- run …`)",
                of(ranks),
                plan.topology.ranks
            ),
        ));
    }
    placement.shards = Shard::of_plan(&plan, features).map_err(sharding)?;
    Ok(placement)
}

impl<'a> Prepared<'a> {
    /// Checks that the model of `config` can be trained on `dataset`.
    ///
    /// # Errors
    ///
    /// The errors of [`TrainConfig::tables`]; [`Error::Sharding`] for a plan that cannot be executed here;
    /// [`Error::Read`] for a dataset or preprocessing that cannot be read; [`Error::Fault`] for a model beyond
    /// the memory limit.
    pub fn new(config: &'a TrainConfig, dataset: &Path, options: &'a TrainOptions) -> Result<Self> {
        let follow = options.follow.as_ref();
        let begun = follow.and_then(|follow| follow.begun.as_ref());
        follow.map_or(Ok(()), |_| config.check_follow())?;
        let snapshot = load_snapshot(dataset, options.snapshot)?;
        let snapshot = begun.map(|begun| follow::as_begun(&snapshot, begun.snapshot)).unwrap_or(snapshot);
        let preprocessing = Preprocessing::of(config)?;
        let preprocessor = Preprocessing::preprocessor(preprocessing.as_ref(), &snapshot.schema)?;
        let schema = preprocessor.as_ref().map_or(&snapshot.schema, Preprocessor::schema).clone();
        let earlier = options.warm_start.as_ref().map(Earlier::load).transpose()?;
        let before = begun.or(earlier.as_ref().map(|earlier| &earlier.run));
        let before = before.map_or(&[][..], |before| &before.tables);
        let features = config.tables(&snapshot, preprocessor.as_ref(), before)?;
        begun.map_or(Ok(()), |begun| follow::check_rows(config, &begun.tables, &features))?;
        if let Some(earlier) = &earlier {
            let data = (dataset, &snapshot);
            earlier.check(config, data, &schema, &features, preprocessing.as_ref())?;
        }
        let parameters = config.parameters(&features, schema.dense.len());
        check_streams(config, options, snapshot.buckets)?;
        let torch_device = options.device.as_ref().map_or(tch::Device::Cpu, Accelerator::torch);
        check_precision(config, torch_device)?;
        options.device.as_ref().map_or(Ok(()), |device| check_dims(config, &features, device))?;
        let placement = placement(config, options, &features)?;
        let size = ModelSize::within(config, parameters, &features, &placement, options.memory_limit)?;
        // A run that follows its dataset evaluates on each partition before training on it, so it has no
        // held-out samples.
        let eval = config.eval_partitions()?.filter(|_| follow.is_none());
        let common = ReaderOptions {
            dedupe: options.dedupe,
            streams: config.data.streams.or(options.streams),
            // A commit between this point and the opening of the readers must not change the training data.
            snapshot: Some(snapshot.snapshot),
            preprocess: preprocessing.as_ref().map(|steps| steps.config.clone()),
            // Features that are added while the dataset is followed are not read.
            features: follow
                .map(|_| snapshot.schema.sparse_features().map(|feature| feature.name.clone()).collect()),
            ..ReaderOptions::new(config.train.batch_size)
        };
        let checks = checks(config, &features);
        let common = ReadRequest { options: common, checks, rank: rank_of(&*options.collectives) };
        let kept = config.evaluation.kept_column(&schema).into_iter().collect();
        let of_evaluation = preprocessing.as_ref().map(Preprocessing::of_evaluation);
        let evaluation =
            common.clone().with(|options| ReaderOptions { kept, preprocess: of_evaluation, ..options });
        let filter = config.train_partitions(&snapshot)?;
        let new_only = options.warm_start.as_ref().is_some_and(|warm_start| warm_start.new_partitions);
        let partitions = match &earlier {
            Some(earlier) if follow.is_none() => earlier.partitions(&snapshot, filter)?,
            _ => filter,
        };
        let known = follow.map(|follow| follow::known_partitions(follow, earlier.as_ref(), &snapshot));
        let known = known.transpose()?.unwrap_or_default();
        let chosen = snapshot.select(&partitions).map_err(onefold_ikjt::Error::from)?;
        let keys: Vec<PartitionKey> = chosen.into_iter().map(|partition| partition.key.clone()).collect();
        if eval.is_some() && config.data.trains_on_rest() && options.collectives.rank() == 0 {
            let (chosen, all) = (keys.len(), snapshot.partitions.len());
            tracing::info!(
                "training on {chosen} of {all} partitions: none that `eval` under `[data]` chooses"
            );
        }
        let by_day = options.progressive || follow.is_some();
        let new = keys.iter().filter(|key| !known.contains_key(&key.to_string())).cloned();
        let days = by_day.then(|| Day::of_partitions(new));
        follow.map_or(Ok(()), |follow| follow::check_until(config, follow, &keys))?;
        // A model that is evaluated on later days must not be normalized with their statistics.
        let first_day = days.as_ref().and_then(|days| days.first()).map(Day::filter);
        let seen = (dataset, &snapshot, first_day.as_ref().unwrap_or(&partitions));
        let normalizers = match (begun, &earlier) {
            (Some(begun), _) => follow::normalizers(begun, config)?,
            (None, Some(earlier)) => earlier.normalizers(config, &schema)?,
            (None, None) => normalize::fit(config, seen, &schema, preprocessor.as_ref())?,
        };
        let (shuffle, labels_as_of) = (config.data.shuffle, config.data.labels_as_of());
        let training = common.with(|options| ReaderOptions { partitions, shuffle, labels_as_of, ..options });
        // Training batches remain in memory while the model is evaluated.
        let evaluates = eval.is_some() || by_day;
        let memory_limit = if evaluates { size.reader_bytes / 2 } else { size.reader_bytes };
        let workers = Workers::new(options.threads.div_ceil(2), memory_limit)?;
        let reader = Arc::new(Reader::open(dataset, training.clone(), &workers)?);
        let labels = earlier.is_none().then(|| {
            let partitions = first_day.unwrap_or_else(|| training.options.partitions.clone());
            LabelReading::new(&training, partitions, preprocessing.as_ref(), &workers)
        });
        let progressive = days.map(|days| Progressive {
            days,
            training: (training, workers.clone()),
            evaluation: (evaluation.clone(), workers.with_memory_limit(memory_limit)),
        });
        let held_out = match eval {
            None => None,
            Some(partitions) => {
                let request = evaluation.with(|options| ReaderOptions { partitions, ..options });
                let workers = workers.with_memory_limit(memory_limit);
                check_labels(dataset, &request, &workers)?;
                Some(Reader::open(dataset, request, &workers)?)
            }
        };
        Ok(Self {
            config,
            dataset: dataset.to_owned(),
            options,
            preprocessing,
            reader,
            progressive,
            held_out,
            earlier,
            partitions: (new_only && follow.is_none()).then_some(keys),
            known,
            schema,
            features,
            normalizers,
            labels,
            placement,
            size,
        })
    }

    /// Returns the size of the model.
    pub fn size(&self) -> &ModelSize {
        &self.size
    }

    /// Returns the schema of the batches, after preprocessing.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Trains the model, and writes the run to `out`: during training `run.json`, `train.toml`,
    /// `metrics.jsonl`, event files for TensorBoard and `checkpoints`, and at the end `model.safetensors` and
    /// `summary.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a model that exceeds the machine's memory, unless a memory limit is given, and if a
    /// loss is not finite; [`Error::Dataset`] if `out` exists and may not be used; [`Error::Run`] if the run
    /// there cannot be resumed; [`Error::Read`] for damaged data.
    ///
    /// After an error before the first step, `out` is restored to its previous state, unless it contains the
    /// batch with which the model diverged. A run that has taken steps is kept. If only the evaluation at the
    /// end fails, the model is written before the error is returned.
    pub fn train(self, out: &Path, reporter: &dyn Reporter) -> Result<TrainSummary> {
        let collectives = Arc::clone(&self.options.collectives);
        let mut run = Run::new(self.config, &self.schema, &self.features);
        let snapshot = self.reader.snapshot();
        run.dataset = snapshot.dataset.clone();
        run.snapshot = snapshot.snapshot;
        run.streams = self.reader.position(0).streams;
        run.checkpoints = self.options.checkpoints.clone();
        run.follow = self.options.follow.is_some();
        run.partitions = match (run.follow, self.config.data.latest_time(snapshot)) {
            (true, _) => self.known.clone(),
            (false, latest) => warm_start::digests(snapshot, latest),
        };
        run.train_partitions = self.partitions.clone();
        run.progressive = self.options.progressive;
        run.normalizers = self.normalizers.clone();
        self.check_ranks(out)?;
        let describe = |earlier: &Earlier| earlier.describe(&*collectives);
        run.warm_start = self.earlier.as_ref().map(describe).transpose()?;
        // An explicit limit has been checked already, and the check is about main memory, which a model on a
        // GPU does not use.
        if self.options.memory_limit.is_none() && self.options.device.is_none() {
            memory::check_machine(self.size.model_bytes, &*collectives, memory::available())?;
        }
        let mut directory = collectives.agree_on(|| self.take_directory(&mut run, out))?;
        let trained = self.train_in(directory.as_mut(), run, out, reporter);
        if trained.is_err() {
            directory.into_iter().for_each(RunDirectory::give_back);
        }
        trained
    }

    /// Trains the run that begins or resumes in `out`; `directory` is its directory on the lowest rank.
    fn train_in(
        &self,
        mut directory: Option<&mut RunDirectory>,
        mut run: Run,
        out: &Path,
        reporter: &dyn Reporter,
    ) -> Result<TrainSummary> {
        let collectives = &*self.options.collectives;
        run.output_bias = collectives.of_lowest(|| Ok(run.output_bias.clone()))?;
        check_shared(&collectives.agree(run.files(out))?, collectives)?;
        tch::set_num_threads(i32::try_from(self.options.threads).unwrap_or(i32::MAX));
        let evaluation =
            Evaluation { config: &self.config.evaluation, tasks: Task::of(self.config, &self.schema)? };
        let mut training = Training::new(self, &evaluation, &run, out)?;
        let outcome = training.run(self.reader.samples(), self.held_out.as_ref(), reporter);
        run.partitions = training.known_partitions().unwrap_or(run.partitions);
        if training.has_begun() || outcome.is_err() && diverged::is_saved(out) {
            directory.iter_mut().for_each(|directory| directory.keep());
        }
        let mut ended = outcome?;
        let (mut eval, mut failed) = (None, None);
        if ended != Ending::Stopped
            && let Some(held_out) = &self.held_out
        {
            match training.final_evaluation(held_out, reporter) {
                Ok(None) => ended = Ending::Stopped,
                Ok(figures) => {
                    eval = match training.put_back_best()? {
                        true => Some(training.best_evaluation(held_out, reporter)?),
                        false => figures,
                    };
                }
                // The model is written nevertheless, unless ranks are lost.
                Err(error) if error.is_agreed() => {
                    training.put_back_best()?;
                    failed = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        let mut summary = training.summary(ended, self.size.parameters, eval)?;
        if let Some(earlier) = &self.earlier {
            summary.grown_tables = earlier.grown(&self.features);
        }
        if ended != Ending::Stopped {
            let (trained, state) = training.to_complete()?;
            run.complete(training.model(), state, (training.model_step(), trained), out)?;
            let complete = |directory: &mut RunDirectory| {
                let json = serde_json::to_string_pretty(&summary).map_err(std::io::Error::other)?;
                fs_err::write(out.join("summary.json"), json + "\n")?;
                directory.complete()
            };
            collectives.agree_on(|| directory.map_or(Ok(()), complete))?;
        }
        failed.map_or(Ok(summary), Err)
    }

    /// Checks that all ranks were started for the same run.
    fn check_ranks(&self, out: &Path) -> Result<()> {
        let options = self.options;
        let snapshot = self.reader.snapshot();
        let config = toml::to_string(self.config).map_err(std::io::Error::other)?;
        let plan = options.plan.as_ref().map(fs_err::read_to_string).transpose()?;
        options.collectives.check_same(&[
            (text!["the configuration"], config),
            (text!["the dataset"], snapshot.dataset.clone()),
            (text!["the snapshot"], snapshot.snapshot.to_string()),
            (text![option("dedupe")], format!("{:?}", options.dedupe)),
            (text![option("plan")], plan.unwrap_or_default()),
            (text![option("out")], out.display().to_string()),
            (text![option("checkpoints")], format!("{:?}", options.checkpoints)),
            (text![option("existing").set_to("resume")], (options.existing == Existing::Resume).to_string()),
            (
                text![option("existing").set_to("overwrite")],
                (options.existing == Existing::Overwrite).to_string(),
            ),
            (text![option("warm_start")], format!("{:?}", options.warm_start)),
            (text![option("progressive")], options.progressive.to_string()),
            (text!["what is followed"], format!("{:?}", options.follow.as_ref().map(Follow::asked))),
            (text![option("max_steps")], format!("{:?}", options.max_steps)),
            (text![option("trace_steps")], format!("{:?}", options.trace_steps)),
        ])
    }

    /// Locks the run's directory and writes the initial files of a new run. Only the lowest rank does so, for
    /// all ranks.
    fn take_directory(&self, run: &mut Run, out: &Path) -> Result<Option<RunDirectory>> {
        if self.options.collectives.rank() != 0 {
            return Ok(None);
        }
        let mut directory = RunDirectory::create(out, self.options.existing)?;
        match self.describe_in(&mut directory, run, out) {
            Ok(()) => Ok(Some(directory)),
            Err(error) => {
                directory.give_back();
                Err(error)
            }
        }
    }

    /// Writes the description of a run that begins or resumes in `directory`, which is at `out`.
    fn describe_in(&self, directory: &mut RunDirectory, run: &mut Run, out: &Path) -> Result<()> {
        let begun = self.begun(run, directory)?;
        // A resumed run has the same dataset and snapshot, so the vocabularies need not be read again.
        run.vocabularies = match &begun {
            Some(begun) => begun.vocabularies.clone(),
            None => vocabularies::of_snapshot(&self.dataset, self.reader.snapshot())?,
        };
        match begun {
            // An existing model remains usable until it is replaced.
            Some(begun) => {
                (run.completed, run.steps, run.trained) = (begun.completed, begun.steps, begun.trained);
                run.output_bias = begun.output_bias;
                // The description of a run that follows its dataset keeps the snapshot that the run began with.
                if run.follow {
                    (run.snapshot, run.partitions) = (begun.snapshot, begun.partitions);
                }
            }
            None => {
                let tasks = Task::of(self.config, &self.schema)?;
                let logits = self.labels.as_ref().map(|labels| labels.logits(&self.dataset, &tasks));
                // The labels are read in any case, because an invalid one must be reported before the first step.
                let is_prior = self.config.model.output_bias_init == BiasInit::Prior;
                run.output_bias = logits.transpose()?.flatten().filter(|_| is_prior);
                self.begin(run, directory)?;
            }
        }
        let text = toml::to_string(self.config).map_err(std::io::Error::other)?;
        fs_err::write(out.join("train.toml"), text)?;
        run.store(out)
    }

    /// Returns the existing run to resume, if there is one, after checking that it is the same as `run`.
    fn begun(&self, run: &Run, directory: &RunDirectory) -> Result<Option<Run>> {
        let (path, files) = (directory.path.as_path(), run.files(&directory.path)?);
        let elsewhere = run.checkpoints.is_some();
        let here = directory.resumed.then(|| Run::load(path)).transpose()?;
        if let Some(here) = here.as_ref().filter(|here| here.checkpoints != run.checkpoints) {
            let place = here.checkpoints.as_deref().unwrap_or(path).display();
            let message = format!("the run's checkpoints are in `{place}`");
            let instead = text!["continue it without ", option("checkpoints")];
            return Err(Error::not_continued(path, message, instead));
        }
        let begun = if elsewhere { Run::find(&files)? } else { here };
        let Some(begun) = begun else {
            // This also detects a bucket that does not exist.
            if elsewhere && !files.entries("")?.is_empty() {
                return Err(onefold_storage::Error::exists(
                    files.location(),
                    text![
                        format!("it holds no `{RUN_FILE}`, so it is not the folder of a run; "),
                        "give another one with ",
                        option("checkpoints")
                    ],
                )
                .into());
            }
            return Ok(None);
        };
        if elsewhere && self.options.existing != Existing::Resume {
            return Err(onefold_storage::Error::exists(
                files.location(),
                text![
                    "give another folder with ",
                    option("checkpoints"),
                    ", or continue the run that is there with ",
                    option("existing").set_to("resume")
                ],
            )
            .into());
        }
        self.check_begun(&begun, run, &files)?;
        Ok(Some(begun))
    }

    /// Checks that `begun` is the same run as `run`.
    fn check_begun(&self, begun: &Run, run: &Run, files: &Storage) -> Result<()> {
        let path = files.location();
        // A run that follows its dataset reads many snapshots; any other run must be resumed on the same one.
        let same_snapshot = run.follow || begun.snapshot == run.snapshot;
        if begun.dataset != run.dataset || !same_snapshot {
            let of = |run: &Run| format!("snapshot {} of the dataset {}", run.snapshot, run.dataset);
            let message =
                format!("the run was begun on {}, so it cannot be continued on {}", of(begun), of(run));
            let instead = "continue with the run's own dataset and snapshot";
            return Err(Error::not_continued(path, message, instead));
        }
        begun.check_same(run, path)?;
        if let Some(steps) = &self.preprocessing
            && !steps.is_stored(files)?
        {
            let message = "the run was begun with other preprocessing, so it cannot be continued";
            let instead = "continue with the same `preprocess.toml`";
            return Err(Error::not_continued(path, message, instead));
        }
        Ok(())
    }

    /// Writes the initial files of a new run, except for the description in its directory.
    fn begin(&self, run: &Run, directory: &mut RunDirectory) -> Result<()> {
        let files = run.files(&directory.path)?;
        if run.checkpoints.is_some() {
            // If several jobs begin here at once, only one of them creates this file.
            if run.create_in(&files)? == Created::Exists {
                return Err(onefold_storage::Error::exists(
                    files.location(),
                    text![
                        "another job has begun a run there; give another folder with ",
                        option("checkpoints")
                    ],
                )
                .into());
            }
            directory.begins_in(files.clone());
        }
        if let Some(steps) = &self.preprocessing {
            steps.store(&files)?;
        }
        Ok(())
    }
}
