//! How far training is: the part of a checkpoint that people may want to read.

use std::collections::BTreeMap;

use onefold_ikjt::Position;
use serde::{Deserialize, Serialize};

use super::early_stopping::EarlyStopping;
use super::follow::Followed;

/// Where training stands between two steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Progress {
    /// Steps taken.
    pub(crate) steps: u64,
    /// Samples trained on.
    pub(crate) samples: u64,
    /// Samples that the model was trained on by the runs before this one.
    pub(crate) samples_before: u64,
    /// Steps of the dense part's optimizer, those of the runs before this one included.
    pub(crate) optimizer_steps: u64,
    /// The partition that is trained on, counted from 0, where they are trained on one by one.
    pub(crate) partition: usize,
    /// Which partitions a run that follows its dataset has come to.
    #[serde(default, skip_serializing_if = "Followed::is_nothing")]
    pub(crate) followed: Followed,
    /// The partitions that were evaluated on before they were trained on.
    pub(crate) progressive: Vec<PartitionFigures>,
    /// Where the reader stands: the next batch comes from here.
    pub(crate) position: Position,
    /// The part of `metrics.jsonl` that was written before; what follows is written again.
    pub(crate) metrics_bytes: u64,
    /// Whether the evaluation after the last step is still to be done.
    pub(crate) evaluation_due: bool,
    /// The step after which the model was last evaluated.
    pub(crate) evaluated_at: Option<u64>,
    /// What early stopping has seen.
    pub(crate) early_stopping: EarlyStopping,
    /// Whether it ended training.
    pub(crate) stopped_early: bool,
    /// Ids of samples and of rows, by group.
    pub(crate) values: BTreeMap<String, (u64, u64)>,
    /// Rows of tables that were evicted.
    pub(crate) evicted_rows: u64,
    /// How batches were deduplicated, and the threads: another choice sums in another order.
    pub(crate) dedupe: String,
    /// See `dedupe`.
    pub(crate) threads: usize,
}

/// Figures of a partition before it was trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionFigures {
    /// The partition's key, or the time that those of several have in common.
    pub partition: String,
    /// Steps that this run had taken.
    pub steps: u64,
    /// Samples of the partition.
    pub samples: u64,
    /// Mean loss.
    pub loss: Option<f64>,
    /// Binary: normalized entropy.
    pub ne: Option<f64>,
    /// Binary: area under the ROC curve.
    pub auc: Option<f64>,
    /// Binary: sum of the predictions divided by that of the labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
    /// Numbers and counts: root of the mean squared error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rmse: Option<f64>,
}

impl Progress {
    /// Before the first step.
    pub(crate) fn new(position: Position, dedupe: String, threads: usize) -> Self {
        Self {
            steps: 0,
            samples: 0,
            samples_before: 0,
            optimizer_steps: 0,
            partition: 0,
            followed: Followed::default(),
            progressive: Vec::new(),
            position,
            metrics_bytes: 0,
            evaluation_due: false,
            evaluated_at: None,
            early_stopping: EarlyStopping::default(),
            stopped_early: false,
            values: BTreeMap::new(),
            evicted_rows: 0,
            dedupe,
            threads,
        }
    }

    /// Dedupe factor by group.
    pub(crate) fn dedupe_factor(&self) -> BTreeMap<String, f64> {
        let factor = |(name, (samples, rows)): (&String, &(u64, u64))| {
            (name.clone(), if *rows == 0 { 1.0 } else { *samples as f64 / *rows as f64 })
        };
        self.values.iter().map(factor).collect()
    }
}
