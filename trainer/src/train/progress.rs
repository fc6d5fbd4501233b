//! The progress of training, stored as JSON in checkpoints.

use std::collections::BTreeMap;

use onefold_ikjt::Position;
use serde::{Deserialize, Serialize};

use super::early_stopping::EarlyStopping;
use super::follow::Followed;

/// The state of training between two steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Progress {
    /// The number of steps.
    pub(crate) steps: u64,
    /// The number of training samples.
    pub(crate) samples: u64,
    /// The number of samples that earlier runs trained the model on.
    pub(crate) samples_before: u64,
    /// The number of steps of the dense part's optimizer, including the steps of earlier runs.
    pub(crate) optimizer_steps: u64,
    /// The index of the current part, if the run trains on one day after another or follows its dataset; otherwise 0.
    pub(crate) partition: usize,
    /// The progress of a run through the partitions of the dataset that it follows.
    #[serde(default, skip_serializing_if = "Followed::is_nothing")]
    pub(crate) followed: Followed,
    /// The metrics of partitions that were evaluated on before they were trained on.
    pub(crate) progressive: Vec<PartitionFigures>,
    /// The position of the reader, from which the next batch comes.
    pub(crate) position: Position,
    /// The valid bytes of `metrics.jsonl`; a resumed run repeats the lines after them.
    pub(crate) metrics_bytes: u64,
    /// Whether the evaluation after the last step has not taken place yet.
    pub(crate) evaluation_due: bool,
    /// The step of the last evaluation.
    pub(crate) evaluated_at: Option<u64>,
    /// The state of early stopping.
    pub(crate) early_stopping: EarlyStopping,
    /// Whether early stopping ended training.
    pub(crate) stopped_early: bool,
    /// The numbers of ids in samples and in distinct rows, by group.
    pub(crate) values: BTreeMap<String, (u64, u64)>,
    /// The number of evicted table rows.
    pub(crate) evicted_rows: u64,
    /// The kind of deduplication. If it or `threads` changes, sums are computed in a different order.
    pub(crate) dedupe: String,
    /// The number of threads; see `dedupe`.
    pub(crate) threads: usize,
}

/// The metrics of a partition before it was trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionFigures {
    /// The key of the partition, or the common time of several partitions.
    pub partition: String,
    /// The number of steps that this run had taken.
    pub steps: u64,
    /// The number of samples in the partition.
    pub samples: u64,
    /// The mean loss.
    pub loss: Option<f64>,
    /// Binary tasks: the normalized entropy.
    pub ne: Option<f64>,
    /// Binary tasks: the area under the ROC curve.
    pub auc: Option<f64>,
    /// Binary tasks: the sum of the predictions divided by the sum of the labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
    /// Tasks that predict numbers or counts: the root mean squared error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rmse: Option<f64>,
}

impl Progress {
    /// Returns the state before the first step.
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

    /// Returns the dedupe factor of ids by group.
    pub(crate) fn dedupe_factor(&self) -> BTreeMap<String, f64> {
        let factor = |(name, (samples, rows)): (&String, &(u64, u64))| {
            (name.clone(), if *rows == 0 { 1.0 } else { *samples as f64 / *rows as f64 })
        };
        self.values.iter().map(factor).collect()
    }
}
