//! The sums in a checkpoint besides parameters: metrics and losses, stored as tensors, because JSON would round
//! them.

use safetensors::Dtype;

use super::loss_watch::LossWatch;
use crate::Result;
use crate::checkpoint::Fault;
use crate::checkpoint::tensor_file::{Entry, TensorFile};
use crate::distributed::Collectives;
use crate::evaluate::malformed;
use crate::metrics::{MetricState, Metrics, Task, TaskMetrics};

/// The sums of a run.
#[derive(Debug)]
pub(super) struct Sums {
    /// The metrics of the earlier runs whose model this run trains further.
    pub(super) earlier: TaskMetrics,
    /// The metrics of partitions that were evaluated on before they were trained on.
    pub(super) progressive: TaskMetrics,
    /// The metrics of this run up to the last log line of training.
    pub(super) before: TaskMetrics,
    /// The metrics since the last log line.
    pub(super) window: TaskMetrics,
    /// The loss of every step, up to the number of losses in the summary.
    pub(super) losses: Vec<f64>,
    /// The sum of the samples' losses.
    pub(super) loss_sum: f64,
    /// The detector of jumps of the loss.
    pub(super) loss_watch: LossWatch,
}

/// The prefix of the metrics of a model's whole training in its file.
const LIFETIME: &str = "lifetime";

impl Sums {
    /// Creates empty sums.
    pub(super) fn new(tasks: &[Task]) -> Self {
        let metrics = || TaskMetrics::new(tasks);
        Self {
            earlier: metrics(),
            progressive: metrics(),
            before: metrics(),
            window: metrics(),
            losses: Vec::new(),
            loss_sum: 0.0,
            loss_watch: LossWatch::default(),
        }
    }

    /// Returns the metrics of a model's whole training, for its file; `run` are the metrics of this run.
    pub(super) fn lifetime(&self, run: &TaskMetrics) -> TaskMetrics {
        let mut lifetime = self.earlier.clone();
        lifetime.merge(run);
        lifetime
    }

    /// Returns entries for the result of [`lifetime`](Self::lifetime).
    pub(super) fn lifetime_entries(metrics: &TaskMetrics) -> Vec<Entry<'static>> {
        metric_entries(LIFETIME, metrics)
    }

    /// Loads the metrics of earlier runs from the file of a model or of a checkpoint's state.
    pub(super) fn take_earlier(&mut self, file: &TensorFile) -> Result<(), Fault> {
        let mut parts: Vec<String> = Vec::new();
        for (name, _) in file.infos() {
            let part = name.strip_prefix("metrics.").and_then(|name| name.split('.').next());
            // Metrics of evaluations are not training metrics.
            let part = part.filter(|part| *part != "progressive").map(str::to_owned);
            parts.extend(part.filter(|part| !parts.contains(part)));
        }
        parts.iter().try_for_each(|part| restore_metrics(file, part, &mut self.earlier))
    }

    /// Returns entries for everything, for a checkpoint. The metrics since the last log line are stored per
    /// rank, because their sums depend on the order.
    pub(super) fn entries(&self, collectives: &dyn Collectives) -> Result<Vec<Entry<'static>>> {
        let watch = self.loss_watch.to_numbers();
        let mut entries = vec![
            Entry::owned("losses", Dtype::F64, vec![self.losses.len()], &self.losses),
            Entry::owned("loss_sum", Dtype::F64, vec![1], &[self.loss_sum]),
            Entry::owned("loss_watch", Dtype::F64, vec![watch.len()], &watch),
        ];
        entries.extend(metric_entries("earlier", &self.earlier));
        entries.extend(metric_entries("progressive", &self.progressive));
        entries.extend(metric_entries("before", &self.before));
        if collectives.size() == 1 {
            entries.extend(metric_entries("window", &self.window));
            return Ok(entries);
        }
        for (rank, bytes) in collectives.gather_bytes(&self.window.to_bytes())?.iter().enumerate() {
            let mut window = self.window.emptied();
            window.merge_bytes(&mut bytes.as_slice()).ok_or_else(malformed)?;
            entries.extend(metric_entries(&window_of(rank), &window));
        }
        Ok(entries)
    }

    /// Restores the result of [`entries`](Self::entries): this rank's part, or on the lowest rank all parts if
    /// the number of ranks has changed. The error describes the damage of the file.
    pub(super) fn restore(&mut self, file: &TensorFile, collectives: &dyn Collectives) -> Result<(), Fault> {
        self.losses = file.read("losses", Dtype::F64)?;
        self.loss_sum = *file.read("loss_sum", Dtype::F64)?.first().ok_or("`loss_sum` is empty")?;
        let numbers = file.read("loss_watch", Dtype::F64)?;
        self.loss_watch = LossWatch::from_numbers(&numbers).ok_or("`loss_watch` is malformed")?;
        restore_metrics(file, "earlier", &mut self.earlier)?;
        restore_metrics(file, "progressive", &mut self.progressive)?;
        restore_metrics(file, "before", &mut self.before)?;
        let stored = |part: &str| {
            let prefix = format!("metrics.{part}.");
            file.infos().any(|(found, _)| found.starts_with(&prefix))
        };
        let ranks = (0..).take_while(|rank| stored(&window_of(*rank))).count();
        let (rank, size) = (collectives.rank() as usize, collectives.size() as usize);
        if ranks == size {
            return restore_metrics(file, &window_of(rank), &mut self.window);
        }
        for stored in (0..ranks).filter(|_| rank == 0) {
            let mut window = self.window.emptied();
            restore_metrics(file, &window_of(stored), &mut window)?;
            self.window.merge(&window);
        }
        Ok(())
    }
}

/// Returns the name of a rank's metrics since the last log line.
fn window_of(rank: usize) -> String {
    if rank == 0 { "window".to_owned() } else { format!("window-{rank}") }
}

fn metric_entries(part: &str, metrics: &TaskMetrics) -> Vec<Entry<'static>> {
    let of_task = |(task, metrics): (&str, &Metrics)| {
        let state = metrics.state();
        let (name, buckets) = (|what| format!("metrics.{part}.{task}.{what}"), state.buckets.len());
        [
            Entry::owned(name("samples"), Dtype::U64, vec![1], &[state.samples]),
            Entry::owned(name("sums"), Dtype::F64, vec![state.sums.len()], &state.sums),
            Entry::owned(name("buckets"), Dtype::U32, vec![buckets], &state.buckets),
            Entry::owned(name("weights"), Dtype::F64, vec![buckets, 2], &state.weights),
        ]
    };
    metrics.iter().flat_map(of_task).collect()
}

/// Adds the metrics in a file to empty metrics.
fn restore_metrics(file: &TensorFile, part: &str, metrics: &mut TaskMetrics) -> Result<(), Fault> {
    for (task, metrics) in metrics.iter_mut() {
        let name = |what| format!("metrics.{part}.{task}.{what}");
        let wrong = || format!("`metrics.{part}.{task}` is of another shape");
        let state = MetricState {
            samples: *file.read(&name("samples"), Dtype::U64)?.first().ok_or_else(wrong)?,
            sums: file.read(&name("sums"), Dtype::F64)?,
            buckets: file.read(&name("buckets"), Dtype::U32)?,
            weights: file.read(&name("weights"), Dtype::F64)?,
        };
        metrics.merge_state(&state).ok_or_else(wrong)?;
    }
    Ok(())
}
