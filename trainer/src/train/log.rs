//! The logs of a run: `metrics.jsonl`, which is identical for equal runs on one rank, and TensorBoard's event
//! files, which also have times and rates.

use std::collections::BTreeMap;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use serde::Serialize;

use crate::evaluate::EvaluationSummary;
use crate::metrics::Figures;
use crate::tensorboard::EventWriter;
use crate::trace::RankFigures;
use crate::{Error, Result};

/// The metrics file, with one JSON object per line.
pub(super) const METRICS_FILE: &str = "metrics.jsonl";

/// A line of `metrics.jsonl`. The kinds of lines are:
///
/// * for every step, `loss` and `grad_norm`, and `evicted_rows` when table rows are evicted;
/// * after the steps that `log_every_steps` selects, `train`, the metrics since the last such line, and on
///   several ranks `ranks`, their times and bytes;
/// * for every evaluation, `eval`, or `partition` and `progressive` if the partition is trained on next.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Line<'a> {
    pub(super) step: u64,
    /// The number of samples trained on so far.
    pub(super) samples: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) loss: Option<f64>,
    /// The L2 norm of the dense part's gradient, before clipping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grad_norm: Option<f64>,
    /// The number of table rows that were evicted after the step; only after steps with an eviction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) evicted_rows: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) train: Option<Window>,
    /// The average step since the last such line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ranks: Option<RankFigures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) eval: Option<&'a EvaluationSummary>,
    /// The partition that is evaluated on before it is trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) partition: Option<&'a str>,
    /// The metrics of that partition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) progressive: Option<&'a EvaluationSummary>,
}

/// The training metrics since the last window.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Window {
    /// The metrics of the first task.
    #[serde(flatten)]
    pub(super) figures: Figures,
    /// The metrics of every task, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) tasks: BTreeMap<String, Figures>,
    /// The learning rate of the dense part in the last step.
    pub(super) learning_rate_dense: f64,
    /// The learning rate of the tables in the last step.
    pub(super) learning_rate_tables: f64,
    /// The kernels that compute the dense part's matrix products.
    pub(super) kernels: String,
}

/// Both logs of a run.
#[derive(Debug)]
pub(super) struct Log {
    lines: BufWriter<fs_err::File>,
    bytes: u64,
    events: EventWriter,
}

impl Log {
    /// Opens the logs in `directory`. Existing lines after the first `bytes` bytes are removed, because the
    /// steps from `first_step` on are repeated.
    pub(super) fn open(directory: &Path, bytes: u64, first_step: u64) -> Result<Self> {
        let path = directory.join(METRICS_FILE);
        let mut file = fs_err::OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
        let found = file.metadata()?.len();
        if found < bytes {
            return Err(Error::run(
                path,
                format!("it has {found} bytes, and {bytes} were written when the checkpoint was"),
                "restore it from a copy, or begin a new run",
            ));
        }
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(Self { lines: BufWriter::new(file), bytes, events: EventWriter::create(directory, first_step)? })
    }

    /// Writes a line.
    pub(super) fn line(&mut self, line: &Line<'_>) -> Result<()> {
        let mut text = serde_json::to_vec(line).map_err(std::io::Error::from)?;
        text.push(b'\n');
        self.bytes += text.len() as u64;
        Ok(self.lines.write_all(&text)?)
    }

    /// Writes scalars for TensorBoard.
    pub(super) fn scalars<'a>(
        &mut self,
        step: u64,
        scalars: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<()> {
        self.events.scalars(step, scalars)?;
        self.flush()
    }

    /// Flushes both logs, so that other processes see everything.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.lines.flush()?;
        self.events.flush()
    }

    /// Writes the lines durably to the disk; returns their size in bytes.
    pub(super) fn sync(&mut self) -> Result<u64> {
        self.flush()?;
        self.lines.get_ref().sync_all()?;
        Ok(self.bytes)
    }
}

/// Returns the scalars of the first task, with tags such as `PREFIX/ne`; with several tasks also those of each
/// task, with tags such as `PREFIX/TASK/ne`.
pub(super) fn tagged_by_task(
    prefix: &str,
    first: &Figures,
    tasks: &BTreeMap<String, Figures>,
) -> Vec<(String, f64)> {
    let of_task = |(task, figures): (&String, &Figures)| tagged(&format!("{prefix}/{task}"), figures);
    tagged(prefix, first).into_iter().chain(tasks.iter().flat_map(of_task)).collect()
}

/// Returns the scalars of all defined metrics, with tags such as `PREFIX/ne`.
pub(super) fn tagged(prefix: &str, figures: &Figures) -> Vec<(String, f64)> {
    figures.named().map(|(name, value)| (format!("{prefix}/{name}"), value)).collect()
}
