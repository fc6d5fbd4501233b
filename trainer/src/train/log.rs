//! What a run leaves to be plotted: `metrics.jsonl`, which is equal for equal runs of one rank, and TensorBoard's event
//! files, which have times and rates too.

use std::collections::BTreeMap;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use serde::Serialize;

use crate::evaluate::EvaluationSummary;
use crate::metrics::Figures;
use crate::tensorboard::EventWriter;
use crate::trace::RankFigures;
use crate::{Error, Result};

/// The file of the figures, one JSON object a line.
pub(super) const METRICS_FILE: &str = "metrics.jsonl";

/// A line of `metrics.jsonl`: of every step `loss` and `grad_norm`, and `evicted_rows` where
/// rows of tables are evicted; after the steps that `log_every_steps` chooses one with `train`, the
/// figures since the one before, and on several ranks with `ranks`, their times and bytes; of every evaluation one with
/// `eval`, or with `partition` and `progressive`, where the partition is trained on next.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Line<'a> {
    pub(super) step: u64,
    /// Samples trained on so far.
    pub(super) samples: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) loss: Option<f64>,
    /// L2 norm of the dense part's gradient, before clipping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grad_norm: Option<f64>,
    /// Rows of tables that were evicted after the step, if any rows could be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) evicted_rows: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) train: Option<Window>,
    /// A step on average since the one before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ranks: Option<RankFigures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) eval: Option<&'a EvaluationSummary>,
    /// The partition that is evaluated on before it is trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) partition: Option<&'a str>,
    /// Its figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) progressive: Option<&'a EvaluationSummary>,
}

/// Training since the window before.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Window {
    /// Those of the first task.
    #[serde(flatten)]
    pub(super) figures: Figures,
    /// Those of every task, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) tasks: BTreeMap<String, Figures>,
    /// Learning rate of the dense part in the last step.
    pub(super) learning_rate_dense: f64,
    /// Learning rate of the tables in the last step.
    pub(super) learning_rate_tables: f64,
    /// What computes the products of the dense part.
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
    /// Starts the logs in `directory`, after `bytes` of the lines that are there; what follows them is cut off, because
    /// the steps from `first_step` on are taken again.
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

    /// Adds scalars to TensorBoard's.
    pub(super) fn scalars<'a>(
        &mut self,
        step: u64,
        scalars: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<()> {
        self.events.scalars(step, scalars)?;
        self.flush()
    }

    /// Makes everything visible to others.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.lines.flush()?;
        self.events.flush()
    }

    /// Puts the lines on the disk; gives their bytes.
    pub(super) fn sync(&mut self) -> Result<u64> {
        self.flush()?;
        self.lines.get_ref().sync_all()?;
        Ok(self.bytes)
    }
}

/// The scalars of the first task's figures, tagged `PREFIX/ne` and so on, and where there are several tasks those of
/// each, tagged `PREFIX/TASK/ne`.
pub(super) fn tagged_by_task(
    prefix: &str,
    first: &Figures,
    tasks: &BTreeMap<String, Figures>,
) -> Vec<(String, f64)> {
    let of_task = |(task, figures): (&String, &Figures)| tagged(&format!("{prefix}/{task}"), figures);
    tagged(prefix, first).into_iter().chain(tasks.iter().flat_map(of_task)).collect()
}

/// The scalars of figures, tagged `PREFIX/ne` and so on; those that cannot be computed are left out.
pub(super) fn tagged(prefix: &str, figures: &Figures) -> Vec<(String, f64)> {
    figures.named().map(|(name, value)| (format!("{prefix}/{name}"), value)).collect()
}
