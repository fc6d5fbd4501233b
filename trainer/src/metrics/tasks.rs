//! Metrics of all tasks of a model.

use onefold_datasets::Schema;
use onefold_ikjt::Batch;

use super::{BinaryMetrics, Figures, Loss, MetricState, RegressionMetrics};
use crate::Result;
use crate::config::TrainConfig;

/// A label that the model predicts.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The name of the label.
    pub name: String,
    /// The column of the label in batches.
    pub column: usize,
    /// The loss function.
    pub loss: Loss,
}

impl Task {
    /// Returns the tasks of a model, with the columns of their labels in `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) if the schema lacks a label.
    pub fn of(config: &TrainConfig, schema: &Schema) -> Result<Vec<Self>> {
        let tasks = config.tasks_of(schema)?.into_iter();
        Ok(tasks.map(|(task, column)| Self { name: task.label, column, loss: task.loss }).collect())
    }
}

/// The metrics of one task.
#[derive(Debug, Clone)]
pub enum Metrics {
    /// Metrics for labels from 0 to 1.
    Binary(BinaryMetrics),
    /// Metrics for numbers and counts.
    Regression(RegressionMetrics),
}

impl Metrics {
    /// Creates metrics without samples.
    pub fn new(loss: Loss) -> Self {
        Self::of(loss, BinaryMetrics::new)
    }

    fn of(loss: Loss, binary: impl FnOnce() -> BinaryMetrics) -> Self {
        match loss {
            Loss::Bce => Self::Binary(binary()),
            Loss::Mse | Loss::Huber | Loss::Poisson => Self::Regression(RegressionMetrics::new(loss)),
        }
    }

    /// Returns metrics of the same kind without samples.
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

    /// Adds the samples of `other`, which must belong to the same task.
    fn merge(&mut self, other: &Self) {
        match (self, other) {
            (Self::Binary(own), Self::Binary(other)) => own.merge(other),
            (Self::Regression(own), Self::Regression(other)) => own.merge(other),
            _ => unreachable!("a task has one loss"),
        }
    }

    /// Returns all metrics.
    pub fn figures(&self) -> Figures {
        match self {
            Self::Binary(metrics) => metrics.figures(),
            Self::Regression(metrics) => metrics.figures(),
        }
    }

    /// Returns all metrics, with up to `bins` bins of [calibration](BinaryMetrics::calibration_bins).
    pub fn figures_with_bins(&self, bins: usize) -> Figures {
        let calibration_bins = match self {
            Self::Binary(metrics) if bins > 0 => metrics.calibration_bins(bins),
            Self::Binary(_) | Self::Regression(_) => Vec::new(),
        };
        Figures { calibration_bins, ..self.figures() }
    }

    /// Returns the name and value of the metric that the progress line shows.
    pub(crate) fn headline(&self) -> (&'static str, Option<f64>) {
        match self {
            Self::Binary(metrics) => ("ne", metrics.ne()),
            Self::Regression(metrics) => ("rmse", metrics.figures().rmse),
        }
    }

    /// Returns the sums, for a checkpoint.
    pub(crate) fn state(&self) -> MetricState {
        match self {
            Self::Binary(metrics) => metrics.state(),
            Self::Regression(metrics) => metrics.state(),
        }
    }

    /// Adds the samples of a stored state; returns `None` if it does not fit these metrics.
    pub(crate) fn merge_state(&mut self, state: &MetricState) -> Option<()> {
        match self {
            Self::Binary(metrics) => metrics.merge_state(state),
            Self::Regression(metrics) => metrics.merge_state(state),
        }
    }
}

/// The [`Metrics`] of every task.
#[derive(Debug, Clone)]
pub struct TaskMetrics {
    tasks: Vec<(Task, Metrics)>,
}

impl TaskMetrics {
    /// Creates metrics without samples.
    pub fn new(tasks: &[Task]) -> Self {
        Self { tasks: tasks.iter().map(|task| (task.clone(), Metrics::new(task.loss))).collect() }
    }

    /// Creates metrics that need an eighth of the memory, with less exact AUCs.
    pub fn small(tasks: &[Task]) -> Self {
        Self {
            tasks: tasks
                .iter()
                .map(|task| (task.clone(), Metrics::of(task.loss, BinaryMetrics::small)))
                .collect(),
        }
    }

    /// Returns metrics of the same tasks without samples.
    pub(crate) fn emptied(&self) -> Self {
        let tasks = self.tasks.iter().map(|(task, metrics)| (task.clone(), metrics.emptied()));
        Self { tasks: tasks.collect() }
    }

    /// Adds all samples of a batch. `logits` has the shape `[B, tasks]`, row-major.
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

    /// Adds the samples of `other`, which must have the same tasks and bucket widths.
    pub fn merge(&mut self, other: &Self) {
        for ((_, metrics), (_, other)) in self.tasks.iter_mut().zip(&other.tasks) {
            metrics.merge(other);
        }
    }

    /// Encodes the metrics for [`merge_bytes`](Self::merge_bytes) on another rank.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.tasks.iter().flat_map(|(_, metrics)| metrics.state().to_bytes()).collect()
    }

    /// Adds the samples of encoded metrics from the front of `bytes`; returns `None` if they are malformed.
    pub(crate) fn merge_bytes(&mut self, bytes: &mut &[u8]) -> Option<()> {
        for (_, metrics) in &mut self.tasks {
            metrics.merge_state(&MetricState::from_bytes(bytes)?)?;
        }
        Some(())
    }

    /// Returns the name and metrics of each task, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Metrics)> {
        self.tasks.iter().map(|(task, metrics)| (task.name.as_str(), metrics))
    }

    /// Returns the name and metrics of each task, for restoring them.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Metrics)> {
        self.tasks.iter_mut().map(|(task, metrics)| (task.name.as_str(), metrics))
    }

    /// Returns the metrics of the first task, which represent the model.
    pub fn first(&self) -> Figures {
        self.tasks.first().map_or_else(Figures::default, |(_, metrics)| metrics.figures())
    }
}
