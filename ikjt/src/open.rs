//! Opens datasets: at a path, at the URL of an object store, or through a preprocessing service.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::Storage;

use crate::error::Result;
use crate::reader::{Location, ReadRequest, Reader, Source, Workers};

impl Reader {
    /// Opens the dataset at `location`: a local path, the URL of an object store, or the URL of a preprocessing
    /// service, such as `grpc://HOST:PORT/s3://bucket/dataset`. The reader keeps the snapshot that it opened, so
    /// later commits do not affect it. `request` may be just [`ReaderOptions`](crate::ReaderOptions).
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there is no dataset or the filter selects nothing,
    /// [`Error::Fault`](crate::Error::Fault) for an error that a service reports, for options that do not suit the
    /// dataset (an unknown feature or kept column, more streams than buckets) and for a pipeline that does not match the
    /// dataset.
    pub fn open(location: &Path, request: impl Into<ReadRequest>, workers: &Workers) -> Result<Self> {
        Self::of_location(locate(location)?, request.into(), workers)
    }

    /// Does the same as [`open`](Self::open), for a dataset that `source` reads.
    ///
    /// # Errors
    ///
    /// See [`open`](Self::open).
    pub fn of_source(
        source: Arc<dyn Source>,
        request: impl Into<ReadRequest>,
        workers: &Workers,
    ) -> Result<Self> {
        Self::of_location(Location::Source(source), request.into(), workers)
    }
}

/// Returns the snapshot `number` of the dataset at `location`, or its newest one. Reads it from storage or asks a
/// preprocessing service.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if there is no dataset or no such snapshot,
/// [`Error::Fault`](crate::Error::Fault) for an error that a service reports.
pub fn load_snapshot(location: &Path, number: Option<u64>) -> Result<Snapshot> {
    locate(location)?.snapshot(number)
}

/// Returns the statistics of the samples in some partitions of `snapshot`, which must be a snapshot of the dataset at
/// `location`.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if the filter selects nothing or a manifest cannot be read,
/// [`Error::Fault`](crate::Error::Fault) for an error that a service reports.
pub fn load_statistics(
    location: &Path,
    snapshot: &Snapshot,
    partitions: &PartitionFilter,
) -> Result<SampleStatistics> {
    match locate(location)? {
        Location::Storage(storage) => Ok(snapshot.statistics_of(&storage, partitions)?),
        Location::Source(source) => source.statistics(snapshot.snapshot, partitions),
    }
}

/// Returns the location at which the dataset is stored. For the URL of a service, this is the location that its
/// workers read.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the service does not answer.
pub fn stored_at(location: &Path) -> Result<PathBuf> {
    Ok(match locate(location)? {
        Location::Storage(storage) => storage.location().to_owned(),
        Location::Source(source) => source.location().into(),
    })
}

fn locate(location: &Path) -> Result<Location> {
    Ok(match connect(location)? {
        Some(source) => Location::Source(source),
        None => Location::Storage(Box::new(Storage::open(location)?)),
    })
}

/// Connects to the service at a location. Returns `None` if it is not the location of a service.
#[cfg(feature = "service")]
fn connect(location: &Path) -> Result<Option<Arc<dyn Source>>> {
    crate::service::connect(location)
}

/// Returns an error for the location of a service.
#[cfg(not(feature = "service"))]
fn connect(location: &Path) -> Result<Option<Arc<dyn Source>>> {
    let text = location.to_string_lossy();
    match text.starts_with("grpc://") || text.starts_with("grpcs://") {
        false => Ok(None),
        true => Err(crate::error::Error::options(
            format!("`{text}` is a dataset of a preprocessing service, which this program cannot read"),
            "give the location where the dataset is stored",
        )),
    }
}
