//! Compares a dataset with its sources: are its samples exactly those that the configuration makes of the logs?
//!
//! The logs are read, joined, sorted and unfolded as for a build, and the samples are digested in place of being written.

use std::path::Path;
use std::time::Instant;

use onefold_datasets::progress::Reporter;
use onefold_datasets::verify::ExpectedSamples;
use onefold_datasets::{Manifest, PartitionFilter, Problem};
use serde::Serialize;

use crate::decide::{decide, has_features};
use crate::engine::{EngineOptions, Joins};
use crate::reading::{self, Reading, Wanted};
use crate::samples::SkipCounts;
use crate::{Config, Error, Result, sources};

/// What comparing found.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Samples that the sources give, in the partitions that were compared.
    pub samples: u64,
    /// What is not the same, by partition.
    pub problems: Vec<Problem>,
    /// Rows that declared steps left out or filled up.
    pub skipped: SkipCounts,
    /// Time that it took.
    pub wall_seconds: f64,
}

/// Compares the samples of the dataset in `directory` that are in `partitions` with those that `config` makes of its
/// sources. The dataset's own files are taken to be as its manifest says, which `verify` checks.
///
/// # Errors
///
/// [`Error::Config`] if the dataset has other columns than the configuration, [`Error::Dataset`] if it cannot be read, and
/// otherwise as [`build`](crate::build()). That the samples differ is no error of this function.
pub fn compare(
    config: &Config,
    directory: &Path,
    partitions: &PartitionFilter,
    options: &EngineOptions,
    reporter: &dyn Reporter,
) -> Result<Comparison> {
    let started = Instant::now();
    let manifest = Manifest::load(directory)?;
    if !has_features(&manifest.schema, config) {
        return Err(Error::Config {
            path: config.path.clone(),
            message: format!("its `[features]` are not the columns of the dataset `{}`", directory.display()),
            hint: "compare the dataset with the configuration that it was built from".to_owned(),
        });
    }
    let mut comparison = reading::run(config, options.threads, reporter, async |joins| {
        Compare { config, directory, manifest: &manifest, partitions, options, joins, reporter }.run().await
    })?;
    comparison.wall_seconds = started.elapsed().as_secs_f64();
    Ok(comparison)
}

/// One run of a comparison.
struct Compare<'a> {
    config: &'a Config,
    directory: &'a Path,
    manifest: &'a Manifest,
    partitions: &'a PartitionFilter,
    options: &'a EngineOptions,
    joins: Joins,
    reporter: &'a dyn Reporter,
}

impl Compare<'_> {
    async fn run(&self) -> Result<Comparison> {
        let Self { config, manifest, partitions, .. } = *self;
        let sources = sources::find(config).await?;
        let wanted = Wanted { order: manifest.order, observe_changes: false, about_samples: None };
        let reading = Reading::plan(config, sources, self.options, self.joins, &wanted).await?;
        let mut clustering = reading.clustering(&wanted).await?;
        let folded = reading.fold(&mut clustering, self.reporter).await?;
        let old = Some((self.directory, manifest));
        let decided = decide(config, &reading.context, &folded.facts, old, &reading.budget).await?;
        let mut expected = ExpectedSamples::new(manifest, self.options.threads)?;
        let mut count = |key: &_, samples| {
            if partitions.matches(key)? {
                expected.add(key, &samples)?;
            }
            Ok(())
        };
        clustering.unfold(decided.lists, self.reporter, &mut count).await?;
        Ok(Comparison {
            samples: expected.samples(),
            problems: expected.problems(partitions)?,
            skipped: reading.planned.skipped,
            wall_seconds: 0.0,
        })
    }
}
