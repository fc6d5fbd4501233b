//! What runs came to, side by side, as a page: curves, calibration, days, segments.
//!
//! Everything comes from the files of a run: `metrics.jsonl`, `summary.json` where it is complete, and `follow.jsonl` where
//! it follows its dataset.

mod following;
mod html;
#[cfg(test)]
mod tests;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::run::Run;
use crate::{Error, Result};

/// Points of a curve; longer ones are thinned out.
const POINTS: usize = 400;

/// Runs that are compared.
#[derive(Debug)]
pub struct Report {
    runs: Vec<ReportedRun>,
}

/// What is known of a run.
#[derive(Debug)]
struct ReportedRun {
    name: String,
    description: Run,
    /// What the command printed at the end; `None` while the run goes on.
    summary: Option<Value>,
    /// Figures of training between two log lines, by samples.
    training: Vec<Point>,
    /// Evaluations, by samples.
    evaluations: Vec<Point>,
    /// Days before they were trained on.
    days: Vec<(String, Value)>,
    /// The lines of a run that follows its dataset.
    followed: Vec<Value>,
}

/// Figures at a moment of training.
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
    /// [`Error::Run`] if a directory holds no run, or its metrics are malformed.
    pub fn load(runs: &[PathBuf]) -> Result<Self> {
        Ok(Self { runs: runs.iter().map(|run| ReportedRun::load(run)).collect::<Result<_>>()? })
    }

    /// The names of the runs, and how many evaluations and days are known of each.
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
                // A run that goes on may be writing it.
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

    /// The last evaluation.
    fn evaluation(&self) -> Option<&Value> {
        self.evaluations.last().map(|point| &point.figures)
    }
}

/// Keeps so many points that a picture can show them, the last one among them.
fn thin_out(points: &mut Vec<Point>) {
    let every = points.len().div_ceil(POINTS).max(1);
    let last = points.len().saturating_sub(1);
    let mut number = 0;
    points.retain(|_| {
        number += 1;
        (last + 1 - number).is_multiple_of(every)
    });
}
