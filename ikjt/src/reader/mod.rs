//! From a dataset to batches: row groups decoded ahead in parallel, batches of exact size, deduplicated.
//!
//! Memory is bounded by the options alone: at most `threads + 1` decoded row groups (the writer makes them 64
//! MiB), the samples of less than one batch left over from the last one, and `2 × threads` finished batches.

mod convert;
mod decode;
mod pipeline;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onefold_datasets::console::available_threads;
use onefold_datasets::{FeatureGroup, Manifest, PartitionFilter, Schema, suggest};

pub use pipeline::Batches;

use crate::{Error, Result};

/// Whether rows are deduplicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dedupe {
    /// Every sample carries its lists: plain KJTs.
    Off,
    /// Every distinct row of a deduplicated group once per batch: IKJTs.
    Exact,
}

/// How a dataset is read.
#[derive(Debug, Clone)]
pub struct ReaderOptions {
    /// Samples per batch; the last batch of an epoch may have fewer.
    pub batch_size: usize,
    /// Whether rows are deduplicated.
    pub dedupe: Dedupe,
    /// Threads that decode and deduplicate. The batches do not depend on it.
    pub threads: usize,
    /// Which partitions are read.
    pub partitions: PartitionFilter,
    /// Which sparse features are read; all if `None`. Others cost no I/O.
    pub features: Option<Vec<String>>,
}

impl ReaderOptions {
    /// Everything, deduplicated exactly, with all of the machine's threads.
    pub fn new(batch_size: usize) -> Self {
        Self {
            batch_size,
            dedupe: Dedupe::Exact,
            threads: available_threads(),
            partitions: PartitionFilter::default(),
            features: None,
        }
    }
}

/// A dataset opened for reading. Each call of [`batches`](Self::batches) is one epoch.
#[derive(Debug)]
pub struct Reader {
    directory: PathBuf,
    manifest: Manifest,
    schema: Schema,
    options: ReaderOptions,
    verified: Arc<decode::Verified>,
}

impl Reader {
    /// Opens the dataset in `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if there is none or the filter chooses nothing, [`Error::Options`] for a batch size
    /// or thread count of zero or a feature that the dataset does not have.
    pub fn open(directory: &Path, options: ReaderOptions) -> Result<Self> {
        let manifest = Manifest::load(directory)?;
        manifest.select(&options.partitions)?;
        if options.batch_size == 0 || options.threads == 0 || i32::try_from(options.batch_size).is_err() {
            return Err(Error::Options {
                message: format!(
                    "cannot read batches of {} with {} threads",
                    options.batch_size, options.threads
                ),
                hint: "both must be at least 1, and a batch must have fewer than 2^31 samples".to_owned(),
            });
        }
        let schema = project(&manifest.schema, options.features.as_deref())?;
        Ok(Self { directory: directory.to_owned(), manifest, schema, options, verified: Arc::default() })
    }

    /// The dataset's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The schema of the batches: the dataset's, less the features that are not read.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The number of samples in the chosen partitions.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`], as [`open`](Self::open).
    pub fn samples(&self) -> Result<u64> {
        let chosen = self.manifest.select(&self.options.partitions)?;
        Ok(chosen.iter().map(|partition| partition.samples).sum())
    }

    /// The batches of one epoch, in the dataset's order. Every file is checked against the manifest's checksum the
    /// first time it is read.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if threads cannot be started. What is wrong with files comes from the iterator, which
    /// ends after an error.
    pub fn batches(&self) -> Result<Batches> {
        Batches::start(&self.directory, &self.manifest, &self.schema, &self.options, &self.verified)
    }
}

/// `schema` with only the sparse features `wanted`.
fn project(schema: &Schema, wanted: Option<&[String]>) -> Result<Schema> {
    let Some(wanted) = wanted else { return Ok(schema.clone()) };
    for name in wanted {
        if !schema.sparse_features().any(|feature| feature.name == *name) {
            return Err(Error::Options {
                message: format!("the dataset has no sparse feature `{name}`"),
                hint: suggest(name, schema.sparse_features().map(|feature| feature.name.as_str())),
            });
        }
    }
    let keep = |group: &FeatureGroup| {
        let features: Vec<_> = group.features.iter().filter(|f| wanted.contains(&f.name)).cloned().collect();
        (!features.is_empty()).then(|| FeatureGroup { features, ..group.clone() })
    };
    Ok(Schema { groups: schema.groups.iter().filter_map(keep).collect(), ..schema.clone() })
}
