//! A page that compares the results of runs: curves, calibration, days, segments.
//!
//! All data come from the files of the runs: `metrics.jsonl`, `summary.json` of complete runs, and `follow.jsonl` of
//! runs that follow their dataset.

mod following;
mod html;
#[cfg(test)]
mod tests;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::run::Run;
use crate::{Error, Result};

/// The maximum number of points of a curve; longer curves are thinned out.
const POINTS: usize = 400;

/// The runs to compare.
#[derive(Debug)]
pub struct Report {
    runs: Vec<ReportedRun>,
}

/// The data of a run.
#[derive(Debug)]
struct ReportedRun {
    name: String,
    description: Run,
    /// The output of the training command; `None` while the run is not complete.
    summary: Option<Value>,
    /// The training metrics of each log line, by number of samples.
    training: Vec<Point>,
    /// The evaluations, by number of samples.
    evaluations: Vec<Point>,
    /// The metrics of each day, evaluated before it was trained on.
    days: Vec<(String, Value)>,
    /// The lines of `follow.jsonl`; empty if the run does not follow its dataset.
    followed: Vec<Value>,
}

/// Metrics at a point of training.
#[derive(Debug)]
struct Point {
    samples: f64,
    figures: Value,
}

impl Report {
    /// Reads the runs in these directories.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if a directory has no run, or its metrics are malformed.
    pub fn load(runs: &[PathBuf]) -> Result<Self> {
        Ok(Self { runs: runs.iter().map(|run| ReportedRun::load(run)).collect::<Result<_>>()? })
    }

    /// Returns the name, the number of evaluations and the number of days of each run.
    pub fn counts(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        self.runs.iter().map(|run| (run.name.as_str(), run.evaluations.len(), run.days.len()))
    }
}

impl ReportedRun {
    fn load(directory: &Path) -> Result<Self> {
        let description = Run::load(directory)?;
        let path = directory.join("metrics.jsonl");
        let wrong = |line: usize, message: String| {
            Error::run(
                &path,
                format!("line {}: {message}", line + 1),
                "the file is damaged; restore it from a copy",
            )
        };
        let name = directory.display().to_string();
        let summary = match fs_err::read(directory.join("summary.json")) {
            Ok(text) => Some(serde_json::from_slice(&text).map_err(std::io::Error::other)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let (training, evaluations, days) = (Vec::new(), Vec::new(), Vec::new());
        let followed = following::lines(directory)?;
        let mut run = Self { name, description, summary, training, evaluations, days, followed };
        if !path.exists() {
            return Err(Error::run(
                path,
                "it is missing, so there is nothing to report",
                "give the directory of the run (`--out`); the folder of its checkpoints has no metrics",
            ));
        }
        let mut lines = BufReader::new(fs_err::File::open(&path)?).split(b'\n').enumerate().peekable();
        while let Some((number, line)) = lines.next() {
            match serde_json::from_slice(&line?) {
                Ok(line) => run.add(line),
                // The last line may be incomplete, because a running process is writing it.
                Err(_) if lines.peek().is_none() => {}
                Err(error) => return Err(wrong(number, error.to_string())),
            }
        }
        thin_out(&mut run.training);
        Ok(run)
    }

    fn add(&mut self, mut line: Value) {
        let samples = line["samples"].as_f64().unwrap_or(0.0);
        let mut take = |part: &str| Some(line[part].take()).filter(|figures| !figures.is_null());
        if let Some(figures) = take("train") {
            self.training.push(Point { samples, figures });
        }
        if let Some(figures) = take("eval") {
            self.evaluations.push(Point { samples, figures });
        }
        if let Some(figures) = take("progressive") {
            self.days.push((line["partition"].as_str().unwrap_or_default().to_owned(), figures));
        }
    }

    /// Returns the last evaluation.
    fn evaluation(&self) -> Option<&Value> {
        self.evaluations.last().map(|point| &point.figures)
    }
}

/// Reduces the points to at most [`POINTS`], keeping the last one.
fn thin_out(points: &mut Vec<Point>) {
    let every = points.len().div_ceil(POINTS).max(1);
    let last = points.len().saturating_sub(1);
    let mut number = 0;
    points.retain(|_| {
        number += 1;
        (last + 1 - number).is_multiple_of(every)
    });
}
