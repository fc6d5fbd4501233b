//! The summary of a training run.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{LossJump, PartitionFigures};
use crate::config::ParameterCount;
use crate::embedding::SentBytes;
use crate::evaluate::EvaluationSummary;
use crate::metrics::Figures;
use crate::trace::RankTimes;

/// The reason why training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All epochs are complete.
    Completed,
    /// The limit `max_steps` was reached.
    MaxSteps,
    /// Held-out metrics did not improve any more.
    EarlyStopping,
    /// A run that follows its dataset reached its limit, `stop_after` or `until`.
    Partitions,
    /// [`Stop`](crate::Stop) was raised. There is a checkpoint, but no model yet.
    Stopped,
}

/// The summary of a training run.
#[derive(Debug, Clone, Serialize)]
pub struct TrainSummary {
    /// The reason why training ended.
    pub ended: Ending,
    /// The step of the checkpoint from which the run was resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_from_step: Option<u64>,
    /// The training metrics: the number of samples over all epochs, the mean loss, and the metrics of the
    /// predictions made before each step, for the first task. The loss is the weighted sum of all tasks'
    /// losses.
    #[serde(flatten)]
    pub figures: Figures,
    /// The number of steps.
    pub steps: u64,
    /// The step of the written model: the last one, or with early stopping the one with the best held-out
    /// metric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_step: Option<u64>,
    /// The metrics of every task, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, Figures>,
    /// The loss of every step, for runs of up to 10,000 steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub losses: Option<Vec<f64>>,
    /// The first jump of the loss, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_jump: Option<LossJump>,
    /// The numbers of table rows, if `[embedding]` has `evict_after`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowCounts>,
    /// The dedupe factor of ids by group; 1 with deduplication off.
    pub dedupe_factor: BTreeMap<String, f64>,
    /// The number of parameters.
    pub parameters: ParameterCount,
    /// The bytes of the parameters and their optimizer state.
    pub parameter_bytes: u64,
    /// The time of this process's training loop in seconds, without evaluations and checkpoints.
    pub wall_seconds: f64,
    /// The samples of this process divided by `wall_seconds`.
    pub samples_per_second: f64,
    /// The fraction of `wall_seconds` spent waiting for batches.
    pub waiting_share: f64,
    /// The time of evaluations during training in seconds.
    pub evaluation_seconds: f64,
    /// The time of checkpoints in seconds.
    pub checkpoint_seconds: f64,
    /// The number of checkpoints that this process wrote.
    pub checkpoints: u64,
    /// The peak resident set size of the process, if the kernel reports it.
    pub peak_rss_bytes: Option<u64>,
    /// The number of ranks that trained together.
    pub ranks: u32,
    /// The bytes of ids, vectors and gradients that all ranks sent to each other, in this process's job.
    pub sent_bytes: SentBytes,
    /// The times of the ranks in all steps of this process, if there are several ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_times: Option<RankTimes>,
    /// The metrics of the written model on the evaluation partitions, if the configuration selects any.
    pub eval: Option<EvaluationSummary>,
    /// The metrics of the predictions made before each step, over this run and the earlier runs of its model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Figures>,
    /// The metrics of partitions before they were trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progressive: Option<ProgressiveSummary>,
    /// The tables with more rows than in the earlier run whose model is trained further.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub grown_tables: Vec<GrownTable>,
}

/// The numbers of rows of all tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RowCounts {
    /// The number of rows that were looked up and not evicted since.
    pub in_use: u64,
    /// The number of evictions of rows by this run.
    pub evicted: u64,
}

/// The metrics of partitions before they were trained on.
#[derive(Debug, Clone, Serialize)]
pub struct ProgressiveSummary {
    /// The metrics of all partitions together, for the first task.
    #[serde(flatten)]
    pub figures: Figures,
    /// The metrics of each partition.
    pub partitions: Vec<PartitionFigures>,
}

/// A table that has more rows than before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GrownTable {
    /// The name of the table.
    pub table: String,
    /// The previous number of rows.
    pub rows_before: u64,
    /// The current number of rows.
    pub rows: u64,
}
