//! Checks a configuration and its logs as a build does, but writes nothing, and reports all problems at once.

use std::path::Path;
use std::time::Instant;

use onefold_base::fault::{Fault, Kind};
use onefold_base::progress::Reporter;
use onefold_datasets::Commit;
use serde::Serialize;

use crate::config::Config;
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::pipeline::{BuildOptions, Pipeline, Target};
use crate::row_counts::RowCounts;
use crate::samples::SkipCounts;

/// The result of [`check`].
#[derive(Debug, Clone, Serialize)]
pub struct Checked {
    /// All problems. A build fails if there are any.
    pub problems: Vec<FoundProblem>,
    /// The number of rows of `[samples]`: how many a build would write, and how many it would leave out for each
    /// reason; `None` if there are problems.
    pub rows: Option<RowCounts>,
    /// The number of rows that the declared steps left out or filled up; `None` if there are problems.
    pub skipped: Option<SkipCounts>,
    /// The duration of the check, in seconds.
    pub wall_seconds: f64,
}

/// A problem of a configuration or of its logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FoundProblem {
    /// The place of the problem, the number of rows that have it, and an example.
    pub message: String,
    /// The ways to solve the problem, each a sentence without a full stop.
    pub fixes: Vec<String>,
}

impl From<&Fault> for FoundProblem {
    fn from(fault: &Fault) -> Self {
        let fixes = fault.hints.iter().map(ToString::to_string).collect();
        Self { message: fault.message.to_string(), fixes }
    }
}

/// Reads everything that a build of `config` reads, once, and returns all problems.
///
/// # Errors
///
/// [`Error::Io`], [`Error::Spill`] and [`Error::Dataset`] for failures that are not problems of the configuration or
/// its logs, and [`Error::Fault`] if the run was stopped.
pub async fn check(config: &Config, options: &EngineOptions, reporter: &dyn Reporter) -> Result<Checked> {
    let started = Instant::now();
    let options = BuildOptions::new(options.clone(), Commit::Create);
    let pipeline = Pipeline { config, out: Path::new(""), options: &options, reporter };
    let checked = match pipeline.check().await {
        Ok((rows, skipped)) => {
            Checked { problems: Vec::new(), rows: Some(rows), skipped: Some(skipped), wall_seconds: 0.0 }
        }
        Err(Error::Problems(faults)) => Checked::of_problems(&faults),
        Err(Error::Fault(fault)) if fault.kind != Kind::Stopped => Checked::of_problems(&[fault]),
        Err(error) => return Err(error),
    };
    Ok(Checked { wall_seconds: started.elapsed().as_secs_f64(), ..checked })
}

impl Checked {
    fn of_problems(faults: &[Fault]) -> Self {
        let problems = faults.iter().map(FoundProblem::from).collect();
        Self { problems, rows: None, skipped: None, wall_seconds: 0.0 }
    }
}

impl Pipeline<'_> {
    async fn check(&self) -> Result<(RowCounts, SkipCounts)> {
        let reading = self.plan(self.find(Target::Partitions).await?, Target::Partitions, None).await?;
        let mut clustering = reading.clustering().await?;
        let samples = reading.fold(&mut clustering, self.reporter).await?.map(|totals| totals.samples);
        let samples = samples.ok_or_else(|| reading.no_samples())?;
        Ok((reading.row_counts(samples, 0)?, reading.planned.skipped.clone()))
    }
}
