//! Evaluation of a model on held-out samples.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use onefold_base::fault::{option, text};
use onefold_base::progress::Reporter;
use onefold_datasets::{PartitionFilter, Schema, hash_id};
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_ikjt::{Batch, Checks, Dedupe, Rank, ReadRequest, Reader, ReaderOptions, Workers, load_snapshot};
use onefold_sharding::{FeatureConfig, IdPolicy};
use serde::Serialize;

use crate::checkpoint::CheckpointChoice;
use crate::config::EvaluationConfig;
use crate::device::Accelerator;
use crate::distributed::Collectives;
use crate::embedding::Placement;
use crate::infer::infer;
use crate::memory::ModelSize;
use crate::metrics::{
    ExactScores, Figures, GroupedScores, Ranking, Segment, SegmentMetrics, Task, TaskMetrics,
};
use crate::model::Model;
use crate::preprocess::Preprocessing;
use crate::run::Run;
use crate::stop::Stop;
use crate::{Error, Result, TrainConfig, memory};

/// Metrics by segment and task.
type BySegment = BTreeMap<Segment, BTreeMap<String, Figures>>;

/// The metrics of an evaluation.
#[derive(Debug, Clone, Serialize)]
pub struct EvaluationSummary {
    /// The metrics of the model's first task.
    #[serde(flatten)]
    pub figures: Figures,
    /// The number of steps that the model was trained for, if it was read from a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// The metrics of every task, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, Figures>,
    /// The metrics of segments, by feature, segment and task.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub segments: BTreeMap<String, BySegment>,
    /// The duration of the evaluation. It is not logged, so that equal runs have equal logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall_seconds: Option<f64>,
    /// The throughput: `samples / wall_seconds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<f64>,
}

impl EvaluationSummary {
    /// Returns the metrics of the task with this label, or of the first task if there is no such task.
    pub(crate) fn of_task(&self, task: Option<&str>) -> &Figures {
        task.and_then(|task| self.tasks.get(task)).unwrap_or(&self.figures)
    }

    /// Returns the summary without times, which differ between equal runs.
    pub(crate) fn without_times(&self) -> Self {
        Self { wall_seconds: None, samples_per_second: None, ..self.clone() }
    }
}

/// The options of an evaluation.
#[derive(Debug, Clone)]
pub struct EvaluateOptions {
    /// The kind of deduplication. The metrics do not depend on it, except for the order of 32-bit sums.
    pub dedupe: Dedupe,
    /// The number of threads of libtorch and of the tables; half as many threads read.
    pub threads: usize,
    /// The checkpoint to evaluate; the final model if `None`.
    pub checkpoint: Option<CheckpointChoice>,
    /// The GPU; the processor computes if `None`.
    pub device: Option<Accelerator>,
    /// The ranks that evaluate together.
    pub collectives: Arc<dyn Collectives>,
    /// The number of the dataset's snapshot; the newest one if `None`.
    pub snapshot: Option<u64>,
    /// The partitions to evaluate on. If `None`: `[data].eval` of the run's configuration, or all partitions if that
    /// is not set.
    pub partitions: Option<PartitionFilter>,
}

/// Evaluates the run at `run`, a path or a URL, on `dataset`. Every rank must call it.
///
/// # Errors
///
/// [`Error::ReportedElsewhere`] if another rank has the error; [`Error::Run`] if the run is missing, incomplete
/// or damaged, lacks the checkpoint, or was trained with another schema; [`Error::Read`] for damaged data;
/// [`Error::Fault`] for a prediction that is not finite.
pub fn evaluate(
    run: &Path,
    dataset: &Path,
    options: &EvaluateOptions,
    reporter: &dyn Reporter,
) -> Result<EvaluationSummary> {
    let opened = options.collectives.agree_on(|| open(run, dataset, options, |_| Ok(Vec::new())))?;
    opened.check_ranks(options)?;
    let (model, steps) = opened.load_model(run, options)?;
    let Opened { run, reader, tasks, .. } = opened;
    let evaluation = Evaluation { config: &run.config.evaluation, tasks };
    // Only an evaluation during training can be stopped.
    let summary = evaluation.run(&model, &reader, &Stop::new(), reporter)?;
    let summary = summary.map(|of_all| EvaluationSummary { steps: Some(steps), ..of_all.summary });
    summary.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::Interrupted).into())
}

/// An opened run, and a reader of the dataset that its model is applied to.
pub(crate) struct Opened {
    pub(crate) run: Run,
    pub(crate) reader: Reader,
    pub(crate) tasks: Vec<Task>,
    /// The number of samples in the selected partitions.
    pub(crate) samples: u64,
}

impl Opened {
    /// Checks that all ranks were started for the same model and data.
    pub(crate) fn check_ranks(&self, options: &EvaluateOptions) -> Result<()> {
        let snapshot = self.reader.snapshot();
        options.collectives.check_same(&[
            (text!["the run"], self.run.digest()?),
            (text![option("checkpoint")], format!("{:?}", options.checkpoint)),
            (text!["the dataset"], snapshot.dataset.clone()),
            (text!["the snapshot"], snapshot.snapshot.to_string()),
            (text![option("partitions")], format!("{:?}", options.partitions)),
            (text![option("dedupe")], format!("{:?}", options.dedupe)),
        ])
    }

    /// Loads the run's model; returns it with the number of steps that it was trained for. Every rank must call
    /// it.
    pub(crate) fn load_model(&self, location: &Path, options: &EvaluateOptions) -> Result<(Model, u64)> {
        tch::set_num_threads(i32::try_from(options.threads).unwrap_or(i32::MAX));
        let placement = Placement::even(&self.run.tables, Arc::clone(&options.collectives));
        let device = options.device.as_ref();
        // The check is about main memory, which a model on a GPU does not use.
        if device.is_none() {
            let Run { config, tables, schema, .. } = &self.run;
            let parameters = config.parameters(tables, schema.dense.len());
            let size = ModelSize::within(config, parameters, tables, &placement, None)?;
            memory::check_machine(size.model_bytes, &*options.collectives, memory::available())?;
        }
        self.run.load_model(location, options.checkpoint, &placement, options.threads, device)
    }
}

/// Opens a run, and a reader of the dataset that its model is applied to. The batches carry the columns that
/// `keep` selects from the dataset's schema, and the column that identifies groups.
pub(crate) fn open(
    run: &Path,
    dataset: &Path,
    options: &EvaluateOptions,
    keep: impl FnOnce(&Schema) -> Result<Vec<String>>,
) -> Result<Opened> {
    let description = Run::load(run)?;
    let config = &description.config;
    let partitions = match &options.partitions {
        Some(filter) => filter.clone(),
        None => config.eval_partitions()?.unwrap_or_default(),
    };
    let snapshot = load_snapshot(dataset, options.snapshot)?;
    let preprocessing = Preprocessing::of_run(config, &description.files(run)?)?;
    description.check_schema(&Preprocessing::schema(preprocessing.as_ref(), &snapshot.schema)?, run)?;
    description.check_vocabularies(dataset, &snapshot, run)?;
    let ranks = options.collectives.size() as usize;
    let samples = snapshot.chosen_samples(&partitions).map_err(onefold_ikjt::Error::from)?;
    let mut kept = keep(&snapshot.schema)?;
    let group = config.evaluation.kept_column(&description.schema);
    kept.extend(group.filter(|name| !kept.contains(name)));
    let reader = ReaderOptions {
        dedupe: options.dedupe,
        snapshot: Some(snapshot.snapshot),
        partitions,
        preprocess: preprocessing.as_ref().map(Preprocessing::of_evaluation),
        kept,
        // A batch has at least one sample per rank.
        ..ReaderOptions::new(config.train.batch_size.max(ranks))
    };
    let checks = checks(config, &description.tables);
    let request = ReadRequest { options: reader, checks, rank: rank_of(&*options.collectives) };
    let workers = Workers::new(options.threads.div_ceil(2), DEFAULT_MEMORY_LIMIT)?;
    let reader = Reader::open(dataset, request, &workers)?;
    let tasks = Task::of(config, &description.schema)?;
    Ok(Opened { run: description, reader, tasks, samples })
}

/// Returns this process's position among the ranks that read together.
pub(crate) fn rank_of(collectives: &dyn Collectives) -> Rank {
    Rank { rank: collectives.rank() as usize, world_size: collectives.size() as usize }
}

/// Returns the checks of the reader: the ids of features with checked ids, and the range of the labels of each
/// task. The reader's errors name the place in the dataset.
pub(crate) fn checks(config: &TrainConfig, features: &[FeatureConfig]) -> Checks {
    let checked = features.iter().filter(|feature| feature.ids == IdPolicy::Checked);
    Checks {
        table_rows: checked.map(|config| (config.feature.clone(), config.rows)).collect(),
        label_ranges: config.all_tasks().into_iter().map(|task| (task.label, task.loss.labels())).collect(),
        ..Checks::default()
    }
}

/// The settings of an evaluation, and the tasks of the model.
#[derive(Debug)]
pub(crate) struct Evaluation<'a> {
    pub(crate) config: &'a EvaluationConfig,
    pub(crate) tasks: Vec<Task>,
}

impl Evaluation<'_> {
    /// Evaluates a model on all samples of `reader`; returns `None` if it was stopped.
    pub(crate) fn run(
        &self,
        model: &Model,
        reader: &Reader,
        stop: &Stop,
        reporter: &dyn Reporter,
    ) -> Result<Option<Evaluated>> {
        reporter.begin("evaluating", Some(reader.samples()), "samples");
        let started = Instant::now();
        let mut observed = Observed::new(self);
        let collectives = model.embeddings.collectives();
        let finished = infer(model, reader, &self.tasks, stop, reporter, |batch, logits| {
            collectives.agree_on(|| observed.add(batch, logits))?;
            Ok(())
        })?;
        if !finished {
            return Ok(None);
        }
        let (mut summary, metrics) = observed.summary(&**collectives)?;
        let wall_seconds = started.elapsed().as_secs_f64();
        summary.samples_per_second = Some(summary.figures.samples as f64 / wall_seconds);
        summary.wall_seconds = Some(wall_seconds);
        Ok(Some(Evaluated { summary, metrics }))
    }
}

/// The result of an evaluation.
#[derive(Debug)]
pub(crate) struct Evaluated {
    pub(crate) summary: EvaluationSummary,
    /// The merged metrics of all ranks.
    pub(crate) metrics: TaskMetrics,
}

/// The accumulated metrics of an evaluation on one rank.
struct Observed<'a> {
    config: &'a EvaluationConfig,
    tasks: &'a [Task],
    all: TaskMetrics,
    segments: Vec<SegmentMetrics>,
    exact: ExactScores,
    /// The scores by group; `None` if no group is configured.
    grouped: Option<GroupedScores>,
}

impl<'a> Observed<'a> {
    fn new(evaluation: &'a Evaluation<'_>) -> Self {
        let (config, tasks) = (evaluation.config, evaluation.tasks.as_slice());
        let segments = config.segments.iter();
        let grouped = config.group.as_ref().map(|_| GroupedScores::new(tasks, config.segments.len()));
        Self {
            config,
            tasks,
            all: TaskMetrics::new(tasks),
            segments: segments.map(|name| SegmentMetrics::new(name, tasks, config.max_segments)).collect(),
            exact: ExactScores::new(tasks),
            grouped,
        }
    }

    /// Adds a batch and its logits, `[B, tasks]`.
    fn add(&mut self, batch: &Batch, logits: &[f32]) -> Result<()> {
        self.all.add(batch, logits);
        let of_feature = |name: &String| Segment::of_samples(batch, name).unwrap_or_default();
        let segments: Vec<Vec<Segment>> = self.config.segments.iter().map(of_feature).collect();
        for (metrics, segments) in self.segments.iter_mut().zip(&segments) {
            metrics.add(batch, segments, logits);
        }
        let tasks = self.tasks;
        let score = |sample: usize, task: usize| {
            let label = batch.labels()[sample * batch.label_width() + tasks[task].column];
            (logits[sample * tasks.len() + task], label)
        };
        for sample in 0..batch.size() {
            let weight = batch.weights().map_or(1.0, |weights| weights[sample]);
            self.exact.add(|task| {
                let (score, label) = score(sample, task);
                [score, label, weight]
            });
        }
        let (Some(grouped), Some(group)) = (&mut self.grouped, &self.config.group) else { return Ok(()) };
        for (sample, group) in group_of_samples(batch, group).into_iter().enumerate() {
            let segments = segments.iter().map(|segments| segments[sample]);
            grouped.add(group, segments, |task| score(sample, task))?;
        }
        Ok(())
    }

    /// Returns the metrics of all ranks together. Every rank must call it.
    fn summary(mut self, collectives: &dyn Collectives) -> Result<(EvaluationSummary, TaskMetrics)> {
        let all = merged(&self.all, self.tasks, collectives)?;
        for segment in &mut self.segments {
            let of_ranks = collectives.gather_bytes(&segment.to_bytes())?;
            *segment = SegmentMetrics::new(segment.feature(), self.tasks, self.config.max_segments);
            of_ranks.iter().try_for_each(|bytes| segment.merge_bytes(bytes)).ok_or_else(malformed)?;
        }
        let bins = self.config.calibration_bins;
        let mut figures: Vec<(&str, Figures)> =
            all.iter().map(|(name, metrics)| (name, metrics.figures_with_bins(bins))).collect();
        self.exact.refine(&mut figures, collectives)?;
        let mut segments: BTreeMap<String, BySegment> =
            self.segments.iter().map(|s| (s.feature().to_owned(), s.figures(bins))).collect();
        if let Some(grouped) = self.grouped.take() {
            let kept: Vec<_> = self.segments.iter().map(SegmentMetrics::kept).collect();
            let rankings = grouped.figures(&self.config.top, &kept, collectives)?;
            let of_all = rankings.all.into_iter();
            of_all.for_each(|(task, ranking)| figures[task].1.ranking = Some(ranking));
            for (feature, found) in self.segments.iter().zip(rankings.segments) {
                add_rankings(segments.get_mut(feature.feature()), found, self.tasks);
            }
        }
        let first = figures.first().map(|(_, figures)| figures.clone()).unwrap_or_default();
        let several = figures.len() > 1;
        let by_task = figures.into_iter().map(|(name, figures)| (name.to_owned(), figures));
        let summary = EvaluationSummary {
            figures: first,
            steps: None,
            tasks: if several { by_task.collect() } else { BTreeMap::new() },
            segments,
            wall_seconds: None,
            samples_per_second: None,
        };
        Ok((summary, all))
    }
}

/// Adds ranking metrics to the other metrics of segments.
fn add_rankings(
    segments: Option<&mut BySegment>,
    rankings: BTreeMap<Segment, BTreeMap<usize, Ranking>>,
    tasks: &[Task],
) {
    let Some(segments) = segments else { return };
    for (segment, by_task) in rankings {
        for (task, ranking) in by_task {
            let figures = segments.get_mut(&segment).and_then(|found| found.get_mut(&tasks[task].name));
            if let Some(figures) = figures {
                figures.ranking = Some(ranking);
            }
        }
    }
}

/// Returns the group of every sample, from a kept column of the batch or from a sparse feature. The group is
/// `None` if the column is null or the feature does not have exactly one id.
fn group_of_samples(batch: &Batch, name: &str) -> Vec<Option<u64>> {
    if let Some(column) = batch.kept().iter().find(|column| *column.name == *name) {
        return match column.values.as_string_opt::<i32>() {
            Some(texts) => texts.iter().map(|text| Some(hash_id(text?.as_bytes()) as u64)).collect(),
            None => column.values.as_primitive::<Int64Type>().iter().map(|id| Some(id? as u64)).collect(),
        };
    }
    let segments = Segment::of_samples(batch, name).unwrap_or_default();
    let group = |segment| match segment {
        Segment::Id(id) => Some(id as u64),
        Segment::Empty | Segment::Several | Segment::Other => None,
    };
    segments.into_iter().map(group).collect()
}

/// Returns the merged metrics of all ranks, which are the same on every rank.
pub(crate) fn merged(
    own: &TaskMetrics,
    tasks: &[Task],
    collectives: &dyn Collectives,
) -> Result<TaskMetrics> {
    if collectives.size() == 1 {
        return Ok(own.clone());
    }
    let mut merged = TaskMetrics::new(tasks);
    for bytes in collectives.gather_bytes(&own.to_bytes())? {
        merged.merge_bytes(&mut bytes.as_slice()).ok_or_else(malformed)?;
    }
    Ok(merged)
}

/// Returns the error for metrics of a rank that cannot be decoded.
pub(crate) fn malformed() -> Error {
    Error::collective("gather_bytes", "the metrics of a rank are malformed")
}

/// Returns the metrics of every task, or an empty map if there is only one task.
pub(crate) fn by_task(metrics: &TaskMetrics) -> BTreeMap<String, Figures> {
    let tasks: BTreeMap<_, _> =
        metrics.iter().map(|(name, metrics)| (name.to_owned(), metrics.figures())).collect();
    if tasks.len() > 1 { tasks } else { BTreeMap::new() }
}
