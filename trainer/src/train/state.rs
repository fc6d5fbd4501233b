//! The sums that a checkpoint holds besides parameters: metrics and losses, as tensors, because JSON would round them.

use safetensors::Dtype;

use crate::Result;
use crate::checkpoint::tensor_file::{Entry, TensorFile};
use crate::metrics::{BinaryMetrics, MetricState, TaskMetrics};

/// The sums of a run.
#[derive(Debug)]
pub(super) struct Sums {
    /// Metrics of the run up to the last log line of training.
    pub(super) before: TaskMetrics,
    /// Metrics since.
    pub(super) window: TaskMetrics,
    /// The loss of every step, as many as the summary gives.
    pub(super) losses: Vec<f64>,
    /// Sum of the samples' losses.
    pub(super) loss_sum: f64,
}

impl Sums {
    /// Everything, for a checkpoint.
    pub(super) fn entries(&self) -> Vec<Entry<'static>> {
        let mut entries = vec![
            Entry::owned("losses", Dtype::F64, vec![self.losses.len()], &self.losses),
            Entry::owned("loss_sum", Dtype::F64, vec![1], &[self.loss_sum]),
        ];
        for (part, metrics) in [("before", &self.before), ("window", &self.window)] {
            for (task, metrics) in metrics.iter() {
                let state = metrics.state();
                let (name, buckets) = (|what| format!("metrics.{part}.{task}.{what}"), state.buckets.len());
                entries.extend([
                    Entry::owned(name("samples"), Dtype::U64, vec![1], &[state.samples]),
                    Entry::owned(name("sums"), Dtype::F64, vec![4], &state.sums),
                    Entry::owned(name("buckets"), Dtype::U32, vec![buckets], &state.buckets),
                    Entry::owned(name("weights"), Dtype::F64, vec![buckets, 2], &state.weights),
                ]);
            }
        }
        entries
    }

    /// Puts back what [`entries`](Self::entries) gave. The error says what is wrong with the file.
    pub(super) fn restore(&mut self, file: &mut TensorFile) -> Result<(), String> {
        self.losses = file.read("losses", Dtype::F64)?;
        self.loss_sum = *file.read("loss_sum", Dtype::F64)?.first().ok_or("`loss_sum` is empty")?;
        for (part, metrics) in [("before", &mut self.before), ("window", &mut self.window)] {
            for (task, metrics) in metrics.iter_mut() {
                let name = |what| format!("metrics.{part}.{task}.{what}");
                let wrong = || format!("`metrics.{part}.{task}` is of another shape");
                let state = MetricState {
                    samples: *file.read(&name("samples"), Dtype::U64)?.first().ok_or_else(wrong)?,
                    sums: file.read(&name("sums"), Dtype::F64)?.try_into().map_err(|_| wrong())?,
                    buckets: file.read(&name("buckets"), Dtype::U32)?,
                    weights: file.read(&name("weights"), Dtype::F64)?,
                };
                *metrics = BinaryMetrics::from_state(&state).ok_or_else(wrong)?;
            }
        }
        Ok(())
    }
}
