//! Where a dataset is read: from its storage, or by a preprocessing service that has access to it.

use std::path::Path;
use std::sync::Arc;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::Storage;

use super::files::{Chosen, Files};
use super::plan::{Counts, kept_counts, row_counts};
use super::workers::Workers;
use crate::preprocess::Sampler;
use crate::service::protocol::{Job, SampleCounts};
use crate::service::{Service, ServiceAddress};
use crate::{Error, Result};

/// The place of a dataset.
#[derive(Debug)]
pub(super) enum Place {
    Storage(Box<Storage>),
    Service(Arc<Service>),
}

impl Place {
    /// The place at `location`: a local path, the URL of an object store, or that of a service.
    pub(super) fn open(location: &Path) -> Result<Self> {
        Ok(match ServiceAddress::parse(location)? {
            Some(address) => Self::Service(Service::connect(address)?),
            None => Self::Storage(Box::new(Storage::open(location)?)),
        })
    }

    pub(super) fn snapshot(&self, number: Option<u64>) -> Result<Snapshot> {
        match self {
            Self::Storage(storage) => Ok(Snapshot::load_from(storage, number)?),
            Self::Service(service) => service.snapshot(number),
        }
    }
}

/// The snapshot `number` of the dataset at `location`, or its newest one: from its storage, or from a preprocessing
/// service.
///
/// # Errors
///
/// [`Error::Dataset`] if there is no dataset or it has no such snapshot, [`Error::Fault`] for what a service says.
pub fn load_snapshot(location: &Path, number: Option<u64>) -> Result<Snapshot> {
    Place::open(location)?.snapshot(number)
}

/// The statistics of the samples in some partitions of `snapshot`, which is one of the dataset at `location`.
///
/// # Errors
///
/// [`Error::Dataset`] if the filter chooses nothing or a manifest cannot be read, [`Error::Service`] for what a service
/// says.
pub fn load_statistics(
    location: &Path,
    snapshot: &Snapshot,
    partitions: &PartitionFilter,
) -> Result<SampleStatistics> {
    match Place::open(location)? {
        Place::Storage(storage) => Ok(snapshot.statistics_of(&storage, partitions)?),
        Place::Service(service) => service.statistics(snapshot.snapshot, partitions),
    }
}

/// Where the dataset at `location` is stored: for the URL of a service, the location that its workers read.
///
/// # Errors
///
/// [`Error::Fault`] if the service does not answer.
pub fn stored_at(location: &Path) -> Result<std::path::PathBuf> {
    Ok(match Place::open(location)? {
        Place::Storage(storage) => storage.location().to_owned(),
        Place::Service(service) => service.location().into(),
    })
}

/// Where row groups and batches come from.
#[derive(Debug)]
pub(super) enum Source {
    Storage(Arc<Files>),
    Service(Arc<Service>, Arc<Job>),
}

impl Source {
    /// By file and row group, the samples that sampling keeps in an epoch.
    pub(super) fn kept_counts(
        &self,
        chosen: &[Chosen],
        (sampler, labels): (&Sampler, &[String]),
        epoch: u64,
        workers: &Workers,
    ) -> Result<Counts> {
        match self {
            Self::Storage(files) => {
                let rows = row_counts(chosen, 0..chosen.len());
                kept_counts(files, &rows, sampler, labels, epoch, &workers.pool)
            }
            Self::Service(service, job) => {
                let kept = service.counts(job, epoch)?.kept.unwrap_or_default();
                of_service(kept, chosen.len())
            }
        }
    }
}

/// Counts that a service gave for `files` files.
fn of_service(counts: Vec<Vec<u64>>, files: usize) -> Result<Counts> {
    match counts.len() == files {
        true => Ok(counts.into_iter().enumerate().collect()),
        false => {
            let message =
                format!("it counted the samples of {} files, the snapshot has {files}", counts.len());
            Err(Error::invariant("preprocessing service", message))
        }
    }
}

/// Counts by file, in order.
pub(super) fn in_order(mut counts: Counts) -> Vec<Vec<u64>> {
    (0..counts.len()).map(|file| counts.remove(&file).unwrap_or_default()).collect()
}

/// What a service answers about a job's row groups.
pub(super) fn sample_counts(kept: Option<Counts>) -> SampleCounts {
    SampleCounts { kept: kept.map(in_order) }
}
