//! Metrics of every task of a model.

use onefold_datasets::Schema;
use onefold_ikjt::Batch;

use super::{BinaryMetrics, Figures, MetricState};

/// A label that the model predicts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The label's name.
    pub name: String,
    /// Its column among the batch's labels.
    pub column: usize,
}

impl Task {
    /// The tasks of these labels; labels that the schema does not have are left out.
    pub fn of(schema: &Schema, labels: &[&str]) -> Vec<Self> {
        let task = |name: &&str| {
            let column = schema.labels.iter().position(|label| label == name)?;
            Some(Self { name: (*name).to_owned(), column })
        };
        labels.iter().filter_map(task).collect()
    }
}

/// [`BinaryMetrics`] of every task.
#[derive(Debug, Clone)]
pub struct TaskMetrics {
    tasks: Vec<(Task, BinaryMetrics)>,
}

impl TaskMetrics {
    /// Metrics of no samples.
    pub fn new(tasks: &[Task]) -> Self {
        Self { tasks: tasks.iter().map(|task| (task.clone(), BinaryMetrics::new())).collect() }
    }

    /// The same in an eighth of the memory, with coarser AUCs.
    pub fn small(tasks: &[Task]) -> Self {
        Self { tasks: tasks.iter().map(|task| (task.clone(), BinaryMetrics::small())).collect() }
    }

    /// Metrics of the same tasks, of no samples.
    pub(crate) fn emptied(&self) -> Self {
        let tasks = self.tasks.iter().map(|(task, metrics)| (task.clone(), metrics.emptied()));
        Self { tasks: tasks.collect() }
    }

    /// Adds all samples of a batch. `logits` are `[B, tasks]`, row-major.
    pub fn add(&mut self, batch: &Batch, logits: &[f32]) {
        (0..batch.size()).for_each(|sample| self.add_sample(batch, logits, sample));
    }

    /// Adds one sample of a batch.
    pub fn add_sample(&mut self, batch: &Batch, logits: &[f32], sample: usize) {
        let (tasks, labels) = (self.tasks.len(), batch.label_width());
        let weight = batch.weights().map_or(1.0, |weights| weights[sample]);
        for (i, (task, metrics)) in self.tasks.iter_mut().enumerate() {
            metrics.add(logits[sample * tasks + i], batch.labels()[sample * labels + task.column], weight);
        }
    }

    /// Adds the samples of `other`, which was made as this was.
    pub fn merge(&mut self, other: &Self) {
        for ((_, metrics), (_, other)) in self.tasks.iter_mut().zip(&other.tasks) {
            metrics.merge(other);
        }
    }

    /// The metrics for another rank's [`merge_bytes`](Self::merge_bytes).
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.tasks.iter().flat_map(|(_, metrics)| metrics.state().to_bytes()).collect()
    }

    /// Adds the samples of metrics that were made as these were, from the front of `bytes`; `None` if they are
    /// malformed.
    pub(crate) fn merge_bytes(&mut self, bytes: &mut &[u8]) -> Option<()> {
        for (_, metrics) in &mut self.tasks {
            metrics.merge_state(&MetricState::from_bytes(bytes)?)?;
        }
        Some(())
    }

    /// Metrics and names of the tasks, in the configuration's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &BinaryMetrics)> {
        self.tasks.iter().map(|(task, metrics)| (task.name.as_str(), metrics))
    }

    /// The same, to be restored.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut BinaryMetrics)> {
        self.tasks.iter_mut().map(|(task, metrics)| (task.name.as_str(), metrics))
    }

    /// Figures of the first task, which are those of the model where it has one.
    pub fn first(&self) -> Figures {
        self.tasks.first().map_or_else(|| BinaryMetrics::new().figures(), |(_, metrics)| metrics.figures())
    }
}
