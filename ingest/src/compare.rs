//! Compares a dataset with its sources: whether its samples are exactly the samples that the configuration makes of the
//! logs.
//!
//! The logs are read, joined, sorted and decoded as for a build. The samples are then digested instead of being
//! written.

use std::path::Path;
use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_datasets::verify::ExpectedSamples;
use onefold_datasets::{Commit, PartitionFilter, Problem, Snapshot};
use onefold_storage::Storage;
use serde::Serialize;

use crate::cluster::DecodedSamples;
use crate::config::Config;
use crate::decide::has_features;
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::pipeline::{BuildOptions, Pipeline, Target};
use crate::samples::SkipCounts;

/// The result of a comparison.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The number of samples that the sources give in the compared partitions.
    pub samples: u64,
    /// The differences, per partition.
    pub problems: Vec<Problem>,
    /// The number of rows that the declared steps left out or filled up.
    pub skipped: SkipCounts,
    /// The duration of the comparison, in seconds.
    pub wall_seconds: f64,
}

/// Compares the samples of the dataset in `directory` that are in `partitions` with the samples that `config` makes of
/// its sources. The dataset's side comes from the digests in its snapshot; `verify` checks that the files match these.
///
/// # Errors
///
/// [`Error::Fault`] if the dataset and the configuration have different columns, [`Error::Dataset`] if the dataset
/// cannot be read, and otherwise the errors of [`build`](crate::build()). Differences are part of the result, not an
/// error.
pub async fn compare(
    config: &Config,
    directory: &Path,
    at: Option<u64>,
    partitions: &PartitionFilter,
    options: &EngineOptions,
    reporter: &dyn Reporter,
) -> Result<Comparison> {
    let started = Instant::now();
    let snapshot = Snapshot::load_at(directory, at)?;
    if !has_features(&snapshot.schema, config) {
        return Err(Error::config(
            &config.path,
            format!(
                "its `[features]` and `keep` are not the columns of the dataset `{}`",
                directory.display()
            ),
            "compare the dataset with the configuration that it was built from",
        ));
    }
    let options =
        BuildOptions { partitions: partitions.clone(), ..BuildOptions::new(options.clone(), Commit::Append) };
    let pipeline = Pipeline { config, out: directory, options: &options, reporter };
    let mut comparison = pipeline.compare(&snapshot).await?;
    comparison.wall_seconds = started.elapsed().as_secs_f64();
    Ok(comparison)
}

impl Pipeline<'_> {
    async fn compare(&self, snapshot: &Snapshot) -> Result<Comparison> {
        let Self { out, options, reporter, .. } = *self;
        let found = self.find(Target::Compare).await?;
        let reading = self.plan(found, Target::Compare, Some(snapshot)).await?;
        let choice = options.partitions.choice(&snapshot.partition_columns)?;
        let decided = self.decide(&reading, Some(snapshot)).await?;
        let (clustering, decided) = decided.ok_or_else(|| reading.no_samples())?;
        let storage = Storage::open(out).map_err(onefold_datasets::Error::from)?;
        let mut expected = ExpectedSamples::new(&storage, snapshot, options.engine.threads)?;
        let mut counted = DecodedSamples::new(
            |partition| Ok(choice.matches(partition)?),
            |partition, samples| Ok(expected.add(partition, samples)?),
        );
        clustering.decode("comparing", decided.lists, reporter, &mut counted).await?;
        Ok(Comparison {
            samples: expected.samples(),
            problems: expected.problems(&options.partitions)?,
            skipped: reading.planned.skipped,
            wall_seconds: 0.0,
        })
    }
}
