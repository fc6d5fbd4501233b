//! Compares a dataset with its sources: whether its samples are exactly those that the configuration makes of the logs.
//!
//! The logs are read, joined, sorted and decoded as for a build, and the samples are digested in place of being
//! written.

use std::path::Path;
use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_datasets::verify::ExpectedSamples;
use onefold_datasets::{Commit, Decode, PartitionChoice, PartitionFilter, PartitionKey, Problem, Snapshot};
use onefold_storage::Storage;
use serde::Serialize;

use crate::cluster::{Portions, RowGroups};
use crate::decide::has_features;
use crate::engine::EngineOptions;
use crate::pipeline::{BuildOptions, Pipeline, Target};
use crate::samples::SkipCounts;
use crate::{Config, Error, Result};

/// What comparing found.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Samples that the sources give, in the partitions that were compared.
    pub samples: u64,
    /// The differences, by partition.
    pub problems: Vec<Problem>,
    /// Rows that declared steps left out or filled up.
    pub skipped: SkipCounts,
    /// Time that it took.
    pub wall_seconds: f64,
}

/// Compares the samples of the dataset in `directory` that are in `partitions` with those that `config` makes of its
/// sources. The dataset's own files are taken to be as its snapshot says, which `verify` checks.
///
/// # Errors
///
/// [`Error::Fault`] if the dataset has other columns than the configuration, [`Error::Dataset`] if it cannot be read,
/// and otherwise as [`build`](crate::build()). Samples that differ are part of the result, not an error.
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

/// Counts the samples of the partitions that are compared.
struct Counting<'a> {
    expected: ExpectedSamples<'a>,
    choice: &'a PartitionChoice<'a>,
    partition: PartitionKey,
    portions: Portions,
}

impl RowGroups for Counting<'_> {
    fn wants(&mut self, partition: &PartitionKey) -> Result<bool> {
        Ok(self.choice.matches(partition)?)
    }

    fn leave_out(&mut self, _: &PartitionKey, _: &[i64]) -> Result<()> {
        Ok(())
    }

    fn enter(&mut self, partition: &PartitionKey, _: u32) -> Result<()> {
        (self.partition, self.portions) = (partition.clone(), Portions::default());
        Ok(())
    }

    fn push(&mut self, session: i64, _: i64, bytes: usize) -> Result<bool> {
        Ok(self.portions.push(session, bytes))
    }

    fn write_row_group(&mut self, decode: Decode) -> Result<()> {
        for samples in decode().map_err(onefold_datasets::Error::Decoding)? {
            self.expected.add(&self.partition, &samples)?;
        }
        Ok(())
    }
}

impl Pipeline<'_> {
    async fn compare(&self, snapshot: &Snapshot) -> Result<Comparison> {
        let Self { out, options, reporter, .. } = *self;
        let reading = self.plan(self.find_strictly().await?, Target::Compare, Some(snapshot)).await?;
        let choice = options.partitions.choice(&snapshot.partition_columns)?;
        let decided = self.decide(&reading, Some(snapshot)).await?;
        let (clustering, decided) = decided.ok_or_else(|| reading.no_samples())?;
        let storage = Storage::open(out).map_err(onefold_datasets::Error::from)?;
        let mut counting = Counting {
            expected: ExpectedSamples::new(&storage, snapshot, options.engine.threads)?,
            choice: &choice,
            partition: PartitionKey::default(),
            portions: Portions::default(),
        };
        clustering.decode("comparing", decided.lists, reporter, &mut counting).await?;
        let expected = counting.expected;
        Ok(Comparison {
            samples: expected.samples(),
            problems: expected.problems(&options.partitions)?,
            skipped: reading.planned.skipped,
            wall_seconds: 0.0,
        })
    }
}
