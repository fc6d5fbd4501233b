//! What a training run did.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{LossJump, PartitionFigures};
use crate::config::ParameterCount;
use crate::embedding::SentBytes;
use crate::evaluate::EvaluationSummary;
use crate::metrics::Figures;
use crate::trace::RankTimes;

/// Why training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All epochs are done.
    Completed,
    /// `max_steps` are done.
    MaxSteps,
    /// Held-out figures got no better.
    EarlyStopping,
    /// The partitions that a run was to follow are done.
    Partitions,
    /// [`Stop`](crate::Stop) was raised: there is a checkpoint, and no model yet.
    Stopped,
}

/// What a training run did.
#[derive(Debug, Clone, Serialize)]
pub struct TrainSummary {
    /// Why it ended.
    pub ended: Ending,
    /// The step of the checkpoint that it went on from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_from_step: Option<u64>,
    /// Samples trained on, over all epochs, the mean loss, and the figures of the predictions made before each step, of
    /// the first task. The loss is the sum of all tasks' losses, each times its weight.
    #[serde(flatten)]
    pub figures: Figures,
    /// Steps taken.
    pub steps: u64,
    /// The step of the model that was written: the last one, or with early stopping the one whose held-out figure was
    /// best.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_step: Option<u64>,
    /// Figures of every task, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, Figures>,
    /// The loss of every step, for runs of up to 10,000 steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub losses: Option<Vec<f64>>,
    /// The first place where the loss of some steps was clearly worse than that of those before, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_jump: Option<LossJump>,
    /// Rows of all tables, if `[embedding]` has `evict_after`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowCounts>,
    /// Dedupe factor by group; 1 with deduplication off.
    pub dedupe_factor: BTreeMap<String, f64>,
    /// Size of the model.
    pub parameters: ParameterCount,
    /// Bytes of the parameters and their optimizer state.
    pub parameter_bytes: u64,
    /// Time of this process's training loop, without evaluations and checkpoints.
    pub wall_seconds: f64,
    /// The samples of that time ÷ `wall_seconds`.
    pub samples_per_second: f64,
    /// The share of that time in which it waited for batches.
    pub waiting_share: f64,
    /// Time of evaluations during training.
    pub evaluation_seconds: f64,
    /// Time of checkpoints.
    pub checkpoint_seconds: f64,
    /// Checkpoints written by this process.
    pub checkpoints: u64,
    /// Largest resident set of the process, where the kernel tells.
    pub peak_rss_bytes: Option<u64>,
    /// The ranks that trained together.
    pub ranks: u32,
    /// Bytes of ids, vectors and gradients that all ranks of this process's job sent each other.
    pub sent_bytes: SentBytes,
    /// Where the ranks' time went in all steps of this process, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_times: Option<RankTimes>,
    /// Figures of the model that was written, on the evaluation partitions, if the configuration names any.
    pub eval: Option<EvaluationSummary>,
    /// Figures of the predictions made before each step, over this run and those whose model it trains further.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Figures>,
    /// Figures of partitions before they were trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progressive: Option<ProgressiveSummary>,
    /// Tables that got more rows than the model that is trained further had.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub grown_tables: Vec<GrownTable>,
}

/// Rows of all tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RowCounts {
    /// Rows that were looked up, and not evicted since.
    pub in_use: u64,
    /// Rows that this run evicted; one that was evicted twice counts twice.
    pub evicted: u64,
}

/// Figures of partitions before they were trained on.
#[derive(Debug, Clone, Serialize)]
pub struct ProgressiveSummary {
    /// Those of all partitions together, of the first task.
    #[serde(flatten)]
    pub figures: Figures,
    /// Those of each.
    pub partitions: Vec<PartitionFigures>,
}

/// A table that has more rows than before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GrownTable {
    /// Its name.
    pub table: String,
    /// Rows before.
    pub rows_before: u64,
    /// Rows now.
    pub rows: u64,
}
