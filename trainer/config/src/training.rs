//! `[data]`, `[train]`, `[evaluation]`, `[early_stopping]` and `[checkpoint]`.

use std::path::PathBuf;
use std::time::Duration;

use onefold_datasets::Schema;
use onefold_ikjt::Shuffle;
use serde::{Deserialize, Serialize};

use super::{DEFAULT_BATCH_SIZE, DataType, LossConfig, Precision};

/// `[data]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Partitions to train on, as `split=train` or `city="Paris, TX"`; if empty, all but those of `eval`, or all with
    /// `allow_overlap`.
    #[serde(default)]
    pub train: String,
    /// Partitions to evaluate on; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<String>,
    /// Whether partitions may be both trained and evaluated on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_overlap: bool,
    /// The label that is predicted; absent if there are `[[tasks]]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// What an error costs, if there are no `[[tasks]]`.
    #[serde(default, skip_serializing_if = "LossConfig::is_default")]
    pub loss: LossConfig,
    /// A `preprocess.toml` that every batch goes through, relative to this file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess: Option<PathBuf>,
    /// Shuffling of the training samples by session blocks, anew in every epoch; file order if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shuffle: Option<Shuffle>,
    /// Streams that a batch is put together from, as many as ranks if absent: at most as many as the dataset has buckets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<usize>,
}

/// `[train]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoopConfig {
    /// Samples per batch.
    pub batch_size: usize,
    /// Passes over the training partitions.
    pub epochs: u32,
    /// Seed of all initial parameters.
    pub seed: u64,
    /// Steps over which the logged NE, AUC and calibration of training are taken. If absent, one step at first and 20
    /// from step 200 on, so that a run of 20 steps or more has at least 20 points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_every_steps: Option<u64>,
    /// What the dense part's products are computed with. Parameters, their gradients, the optimizer, norms, the loss and
    /// the metrics are of 32-bit floats whichever it is.
    #[serde(skip_serializing_if = "Precision::is_default")]
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
    /// Whether the figures of training are logged after `step`, counted from 1. It depends on nothing else, so that a
    /// run that goes on logs the same steps.
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

/// `[evaluation]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationConfig {
    /// Evaluates after every so many steps, and at the end; only at the end if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Sparse features by whose id the figures are told apart too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<String>,
    /// Segments of a feature; samples of those that come later count as `other`.
    #[serde(default = "max_segments")]
    pub max_segments: usize,
    /// What samples that were shown together have in common: a kept column, `session_id`, or a sparse feature of one id.
    /// Figures of rankings are means over such groups; absent, there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How many of the first samples of a group nDCG and the hit rate look at.
    #[serde(default = "top")]
    pub top: Vec<usize>,
    /// Bins of calibration.
    #[serde(default = "calibration_bins")]
    pub calibration_bins: usize,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self {
            every_steps: None,
            segments: Vec::new(),
            max_segments: max_segments(),
            group: None,
            top: top(),
            calibration_bins: calibration_bins(),
        }
    }
}

impl EvaluationConfig {
    /// The column that batches must carry for the groups; `None` where a sparse feature tells them.
    pub fn kept_column(&self, schema: &Schema) -> Option<String> {
        let is_feature = |name: &&String| schema.sparse_features().any(|feature| feature.name == **name);
        self.group.as_ref().filter(|name| !is_feature(name)).cloned()
    }
}

fn top() -> Vec<usize> {
    vec![5, 10]
}

fn calibration_bins() -> usize {
    10
}

fn max_segments() -> usize {
    100
}

/// `[early_stopping]`: training ends when evaluation has not got better for a while.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// The figure that is watched.
    #[serde(default)]
    pub metric: WatchedMetric,
    /// The task whose figure it is, by its label; the first one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Evaluations in a row without an improvement that end training, at least 1.
    pub patience: u32,
    /// By how much the figure must be better than the best so far to count as an improvement.
    #[serde(default)]
    pub min_delta: f64,
}

/// Figures that early stopping can watch.
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

/// `[checkpoint]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// A checkpoint after every so many steps. There is always one where training ends, also by a signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// A checkpoint where the last one is so many minutes old; 0 for none by time.
    #[serde(default = "every_minutes")]
    pub every_minutes: f64,
    /// Checkpoints that are kept, the newest ones, and what they need.
    #[serde(default = "keep")]
    pub keep: usize,
    /// Every so many checkpoints one holds the tables whole; those between hold the rows that were looked up since.
    #[serde(default = "full_every")]
    pub full_every: u64,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: None, every_minutes: every_minutes(), keep: keep(), full_every: full_every() }
    }
}

impl CheckpointConfig {
    /// The time between checkpoints by time; `None` if there are none.
    pub fn interval(&self) -> Option<Duration> {
        let seconds = 60.0 * self.every_minutes;
        (seconds > 0.0).then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

fn every_minutes() -> f64 {
    30.0
}

fn keep() -> usize {
    3
}

fn full_every() -> u64 {
    1
}

/// Refuses numbers with which no run can go on.
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

/// `[exchange]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExchangeConfig {
    /// The type in which ranks send each other vectors and their gradients, rounded to the nearest numbers. Sums stay
    /// in single precision.
    #[serde(default)]
    pub dtype: DataType,
}

impl ExchangeConfig {
    /// Whether it is that of a configuration without `[exchange]`.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
