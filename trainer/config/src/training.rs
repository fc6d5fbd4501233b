//! The sections `[data]`, `[train]`, `[evaluation]`, `[early_stopping]`, `[checkpoint]` and `[exchange]`.

use std::path::PathBuf;
use std::time::Duration;

use onefold_base::units::parse_duration_micros;
use onefold_datasets::{PartitionFilter, Schema, Snapshot, delay_label, parse_time};
use onefold_ikjt::Shuffle;
use serde::{Deserialize, Serialize};

use super::{DEFAULT_BATCH_SIZE, DataType, Error, Loss, Precision, Result, TrainConfig};

/// The `[data]` section.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The partitions to train on, such as `split=train` or `city="Paris, TX"`. If empty: all partitions that
    /// `eval` does not select, or all partitions with `allow_overlap`.
    #[serde(default)]
    pub train: String,
    /// The partitions to evaluate on; no evaluation if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<String>,
    /// Whether a partition may be used for both training and evaluation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_overlap: bool,
    /// The predicted label; absent if there are `[[tasks]]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The loss function, if there are no `[[tasks]]`.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub loss: Loss,
    /// The time as of which labels are trained on, such as `2026-03-02T00:00:00Z`: labels that were final only later
    /// are 0, and partitions with later samples are left out. Evaluations use the labels of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels_as_of: Option<String>,
    /// The age of the labels to train on, such as `3d`: partitions are left out if a sample is younger than this at
    /// `labels_as_of` or, if that is absent, at the time of the dataset's newest sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_age: Option<String>,
    /// The path of a `preprocess.toml` that is applied to every batch, relative to this file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess: Option<PathBuf>,
    /// Shuffling of the training samples by blocks of sessions, different in every epoch; file order if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shuffle: Option<Shuffle>,
    /// The number of streams that a batch is composed of, at most the number of the dataset's buckets; the
    /// number of ranks if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<usize>,
}

impl DataConfig {
    /// Returns whether training uses all partitions that `eval` does not select.
    pub fn trains_on_rest(&self) -> bool {
        self.eval.is_some() && self.train.is_empty() && !self.allow_overlap
    }

    /// Returns `labels_as_of` in microseconds since 1970.
    pub fn labels_as_of(&self) -> Option<i64> {
        self.labels_as_of.as_ref().and_then(|time| parse_time(time).ok())
    }

    /// Returns the latest time that samples of training partitions may have, in microseconds since 1970; `None` if any
    /// time is allowed.
    pub fn latest_time(&self, snapshot: &Snapshot) -> Option<i64> {
        let age = self.label_age.as_ref().and_then(|age| parse_duration_micros(age).ok());
        let newest = || snapshot.partitions.iter().filter_map(|partition| partition.last_time).max();
        match self.labels_as_of() {
            Some(time) => Some(time.saturating_sub(age.unwrap_or(0))),
            None => age.and_then(|age| Some(newest()?.saturating_sub(age))),
        }
    }
}

impl TrainConfig {
    /// Returns the partitions that `filter` selects and whose labels are old enough for `[data].labels_as_of` and
    /// `label_age`.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the filter does not fit the snapshot, [`Error::Fault`] if it selects partitions, but none
    /// of them is old enough.
    pub(super) fn old_enough(&self, snapshot: &Snapshot, filter: PartitionFilter) -> Result<PartitionFilter> {
        let Some(latest) = self.data.latest_time(snapshot) else { return Ok(filter) };
        let chosen = snapshot.matching(&filter)?;
        let is_old = |time: Option<i64>| time.is_none_or(|time| time <= latest);
        let old = chosen.iter().filter(|partition| is_old(partition.last_time));
        let old: Vec<_> = old.map(|partition| partition.key.clone()).collect();
        match old.is_empty() && !chosen.is_empty() {
            false => Ok(PartitionFilter::of_keys(old)),
            true => Err(Error::config(
                &self.path,
                "every partition that `[data]` selects has samples that are too young for its `labels_as_of` or \
                 `label_age`",
                "wait for later samples, choose a later time or a shorter age, or divide the dataset by day or hour with \
                 `by` under `[partition]` of `dataset.toml`",
            )),
        }
    }

    /// Checks that the labels of all tasks are known as of an earlier time, if `[data].labels_as_of` needs that.
    pub(super) fn check_delays(&self, schema: &Schema) -> Result<()> {
        let delay = |label: &str| schema.labels.contains(&delay_label(label));
        let tasks = self.all_tasks();
        let Some(task) = tasks.iter().find(|task| self.data.labels_as_of.is_some() && !delay(&task.label))
        else {
            return Ok(());
        };
        Err(Error::config(
            &self.path,
            format!(
                "`[data].labels_as_of` is given, but the dataset does not have the delay of `{}`",
                task.label
            ),
            format!(
                "build the dataset anew with `delay = true` for this label under `[join.labels]`, and `{}` as a label",
                delay_label(&task.label)
            ),
        ))
    }
}

/// The `[train]` section.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoopConfig {
    /// The number of samples per global batch.
    pub batch_size: usize,
    /// The number of passes over the training partitions.
    pub epochs: u32,
    /// The seed of all initial parameters.
    pub seed: u64,
    /// The number of steps over which the logged NE, AUC and calibration of training are computed. If absent,
    /// it grows from 1 in the first steps to 20 after step 200, so that a run of 20 or more steps has at least
    /// 20 points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_every_steps: Option<u64>,
    /// The precision of the matrix products of the dense part. Parameters, gradients, optimizer, norms, loss
    /// and metrics always use 32-bit floats.
    #[serde(skip_serializing_if = "crate::is_default")]
    pub precision: Precision,
}

impl Default for LoopConfig {
    fn default() -> Self {
        Self {
            batch_size: DEFAULT_BATCH_SIZE as usize,
            epochs: 1,
            seed: 1,
            log_every_steps: None,
            precision: Precision::default(),
        }
    }
}

impl LoopConfig {
    /// Returns whether the training metrics are logged after `step`, counted from 1. The answer depends only on
    /// the step, so that a resumed run logs the same steps.
    pub fn logs_at(&self, step: u64) -> bool {
        let every = self.log_every_steps.unwrap_or(match step {
            0..=20 => 1,
            21..=40 => 2,
            41..=100 => 5,
            101..=200 => 10,
            _ => 20,
        });
        step > 0 && step.is_multiple_of(every)
    }
}

/// The `[evaluation]` section.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// The number of steps between evaluations; if absent, only the evaluation at the end takes place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Sparse features whose ids divide the samples into segments; metrics are also computed per segment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<String>,
    /// The maximum number of segments of a feature; the samples of further ids are counted as `other`.
    pub max_segments: usize,
    /// The column that identifies samples that were shown together: a kept column, `session_id`, or a sparse
    /// feature with one id per sample. Ranking metrics are means over these groups; without it, there are no
    /// ranking metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The cutoffs K of nDCG@K and hit rate@K.
    pub top: Vec<usize>,
    /// The number of calibration bins.
    pub calibration_bins: usize,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self {
            every_steps: None,
            segments: Vec::new(),
            max_segments: 100,
            group: None,
            top: vec![5, 10],
            calibration_bins: 10,
        }
    }
}

impl EvaluationConfig {
    /// Returns the kept column that batches must carry for the groups, or `None` if there are no groups or a
    /// sparse feature identifies them.
    pub fn kept_column(&self, schema: &Schema) -> Option<String> {
        let is_feature = |name: &&String| schema.sparse_features().any(|feature| feature.name == **name);
        self.group.as_ref().filter(|name| !is_feature(name)).cloned()
    }
}

/// The `[early_stopping]` section: training ends when the evaluation metric stops improving.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// The watched metric.
    #[serde(default)]
    pub metric: WatchedMetric,
    /// The label of the watched task; the first task if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// The number of consecutive evaluations without an improvement after which training ends, at least 1.
    pub patience: u32,
    /// The margin by which a value must exceed the best one so far to count as an improvement.
    #[serde(default)]
    pub min_delta: f64,
}

/// The metrics that early stopping can watch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchedMetric {
    /// Normalized entropy; lower is better.
    #[default]
    Ne,
    /// Mean binary cross-entropy; lower is better.
    Loss,
    /// Area under the ROC curve; higher is better.
    Auc,
}

/// The `[checkpoint]` section.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The number of steps between checkpoints; none by steps if absent. A checkpoint is always written when
    /// training ends, also when a signal ends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The maximum age of the last checkpoint in minutes, after which a new one is written; 0 disables
    /// checkpoints by time.
    pub every_minutes: f64,
    /// The number of newest checkpoints that are kept, in addition to checkpoints that these need.
    pub keep: usize,
    /// One checkpoint in `full_every` contains the whole tables; the others contain the rows that were looked
    /// up since the last one with whole tables.
    pub full_every: u64,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: None, every_minutes: 30.0, keep: 3, full_every: 1 }
    }
}

impl CheckpointConfig {
    /// Returns the time between checkpoints by time, or `None` if these are disabled.
    pub fn interval(&self) -> Option<Duration> {
        let seconds = 60.0 * self.every_minutes;
        (seconds > 0.0).then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

/// Rejects invalid settings of these sections.
pub(super) fn check(config: &super::TrainConfig) -> Result<(), (String, &'static str)> {
    let train = &config.train;
    if train.batch_size == 0 || train.epochs == 0 || train.log_every_steps == Some(0) {
        return Err((
            "`[train]` has a batch size, number of epochs or `log_every_steps` of zero".to_owned(),
            "all must be at least 1",
        ));
    }
    if config.data.shuffle.is_some_and(|shuffle| shuffle.row_groups == 0) {
        return Err((
            "`[data].shuffle` has `row_groups = 0`".to_owned(),
            "mix at least one row group's sessions",
        ));
    }
    let time = config.data.labels_as_of.as_ref().map(|time| ("labels_as_of", parse_time(time)));
    let age = config.data.label_age.as_ref().map(|age| ("label_age", parse_duration_micros(age)));
    if let Some((key, Err(message))) = [time, age].into_iter().flatten().find(|(_, value)| value.is_err()) {
        return Err((format!("`[data].{key}`: {message}"), "correct it, or leave it out"));
    }
    let zeros = [
        ("[evaluation].every_steps", config.evaluation.every_steps == Some(0)),
        ("[evaluation].max_segments", config.evaluation.max_segments == 0),
        ("[evaluation].top", config.evaluation.top.contains(&0)),
        ("[embedding].evict_after", config.embedding.evict_after == Some(0)),
        ("[checkpoint].every_steps", config.checkpoint.every_steps == Some(0)),
        ("[checkpoint].keep", config.checkpoint.keep == 0),
        ("[checkpoint].full_every", config.checkpoint.full_every == 0),
    ];
    if let Some((key, _)) = zeros.iter().find(|(_, zero)| *zero) {
        return Err((format!("`{key}` is 0"), "give at least 1, or leave it out"));
    }
    let minutes = config.checkpoint.every_minutes;
    if !minutes.is_finite() || minutes < 0.0 {
        return Err((
            format!("`[checkpoint].every_minutes` is {minutes}"),
            "give minutes, or 0 for no checkpoints by time",
        ));
    }
    let evaluated = config.data.eval.is_some();
    if !evaluated && config.evaluation.every_steps.is_some() {
        return Err((
            "`[evaluation].every_steps` is given, but `[data].eval` is not".to_owned(),
            "say with `[data].eval` which partitions are held out",
        ));
    }
    match &config.early_stopping {
        Some(stopping)
            if stopping.patience == 0 || stopping.min_delta.is_nan() || stopping.min_delta < 0.0 =>
        {
            Err((
                format!(
                    "`[early_stopping]` has a patience of {} and a `min_delta` of {}",
                    stopping.patience, stopping.min_delta
                ),
                "give a patience of at least 1, and a `min_delta` of at least 0",
            ))
        }
        Some(_) if config.evaluation.every_steps.is_none() => Err((
            "`[early_stopping]` is given, but `[evaluation].every_steps` is not".to_owned(),
            "say after how many steps the model is evaluated",
        )),
        _ => Ok(()),
    }
}

/// The `[exchange]` section.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExchangeConfig {
    /// The type of embedding vectors and their gradients when ranks exchange them, rounded to nearest. Sums are
    /// computed in single precision.
    pub dtype: DataType,
}
