//! Metrics of every task of a model.

use onefold_datasets::Schema;
use onefold_ikjt::Batch;

use super::{BinaryMetrics, Figures, Loss, MetricState, RegressionMetrics};
use crate::Result;
use crate::config::TrainConfig;

/// A label that the model predicts.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The label's name.
    pub name: String,
    /// Its column among the batch's labels.
    pub column: usize,
    /// What an error costs.
    pub loss: Loss,
}

impl Task {
    /// The tasks of a model, whose columns are those of the labels of `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for a label that the schema does not have.
    pub fn of(config: &TrainConfig, schema: &Schema) -> Result<Vec<Self>> {
        let tasks = config.tasks_of(schema)?.into_iter();
        Ok(tasks.map(|(task, column)| Self { name: task.label, column, loss: task.loss.into() }).collect())
    }
}

/// Metrics of one task.
#[derive(Debug, Clone)]
pub enum Metrics {
    /// Of labels from 0 to 1.
    Binary(BinaryMetrics),
    /// Of numbers and counts.
    Regression(RegressionMetrics),
}

impl Metrics {
    /// Metrics of no samples.
    pub fn new(loss: Loss) -> Self {
        Self::of(loss, BinaryMetrics::new)
    }

    fn of(loss: Loss, binary: impl FnOnce() -> BinaryMetrics) -> Self {
        match loss {
            Loss::BinaryCrossEntropy => Self::Binary(binary()),
            Loss::SquaredError | Loss::Huber { .. } | Loss::Poisson => {
                Self::Regression(RegressionMetrics::new(loss))
            }
        }
    }

    /// Metrics of the same kind, of no samples.
    fn emptied(&self) -> Self {
        match self {
            Self::Binary(metrics) => Self::Binary(metrics.emptied()),
            Self::Regression(metrics) => Self::Regression(metrics.emptied()),
        }
    }

    fn add(&mut self, logit: f32, label: f32, weight: f32) {
        match self {
            Self::Binary(metrics) => metrics.add(logit, label, weight),
            Self::Regression(metrics) => metrics.add(logit, label, weight),
        }
    }

    /// Adds the samples of `other`, which is of the same task.
    fn merge(&mut self, other: &Self) {
        match (self, other) {
            (Self::Binary(own), Self::Binary(other)) => own.merge(other),
            (Self::Regression(own), Self::Regression(other)) => own.merge(other),
            _ => unreachable!("a task has one loss"),
        }
    }

    /// All figures.
    pub fn figures(&self) -> Figures {
        match self {
            Self::Binary(metrics) => metrics.figures(),
            Self::Regression(metrics) => metrics.figures(),
        }
    }

    /// All figures, and up to so many bins of [calibration](BinaryMetrics::calibration_bins).
    pub fn figures_with_bins(&self, bins: usize) -> Figures {
        let calibration_bins = match self {
            Self::Binary(metrics) if bins > 0 => metrics.calibration_bins(bins),
            Self::Binary(_) | Self::Regression(_) => Vec::new(),
        };
        Figures { calibration_bins, ..self.figures() }
    }

    /// The figure that says most, as the progress line shows it.
    pub(crate) fn headline(&self) -> (&'static str, Option<f64>) {
        match self {
            Self::Binary(metrics) => ("ne", metrics.ne()),
            Self::Regression(metrics) => ("rmse", metrics.figures().rmse),
        }
    }

    /// The sums, for a checkpoint.
    pub(crate) fn state(&self) -> MetricState {
        match self {
            Self::Binary(metrics) => metrics.state(),
            Self::Regression(metrics) => metrics.state(),
        }
    }

    /// Adds the samples of metrics that were made as these were; `None` if they were not.
    pub(crate) fn merge_state(&mut self, state: &MetricState) -> Option<()> {
        match self {
            Self::Binary(metrics) => metrics.merge_state(state),
            Self::Regression(metrics) => metrics.merge_state(state),
        }
    }
}

/// [`Metrics`] of every task.
#[derive(Debug, Clone)]
pub struct TaskMetrics {
    tasks: Vec<(Task, Metrics)>,
}

impl TaskMetrics {
    /// Metrics of no samples.
    pub fn new(tasks: &[Task]) -> Self {
        Self { tasks: tasks.iter().map(|task| (task.clone(), Metrics::new(task.loss))).collect() }
    }

    /// The same in an eighth of the memory, with coarser AUCs.
    pub fn small(tasks: &[Task]) -> Self {
        Self {
            tasks: tasks
                .iter()
                .map(|task| (task.clone(), Metrics::of(task.loss, BinaryMetrics::small)))
                .collect(),
        }
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
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Metrics)> {
        self.tasks.iter().map(|(task, metrics)| (task.name.as_str(), metrics))
    }

    /// The same, to be restored.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Metrics)> {
        self.tasks.iter_mut().map(|(task, metrics)| (task.name.as_str(), metrics))
    }

    /// Figures of the first task, which are those of the model where it has one.
    pub fn first(&self) -> Figures {
        self.tasks.first().map_or_else(Figures::default, |(_, metrics)| metrics.figures())
    }
}
