//! Opens datasets: at a path, at the URL of an object store, or by a preprocessing service.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::Storage;

use crate::reader::{Location, Source};
use crate::{ReadRequest, Reader, Result, Workers};

impl Reader {
    /// Opens the dataset at `location`: a local path, the URL of an object store, or that of a preprocessing service, as
    /// `grpc://HOST:PORT/s3://bucket/dataset`. Later commits do not change what the reader reads. `request` may be
    /// [`ReaderOptions`](crate::ReaderOptions) alone.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there is no dataset or the filter chooses nothing,
    /// [`Error::Fault`](crate::Error::Fault) for the answer of a service, for options that cannot work (whole batches
    /// larger than what is to be read, a feature or kept column that the dataset does not have, more streams than
    /// buckets) and for a pipeline that does not fit the dataset.
    pub fn open(location: &Path, request: impl Into<ReadRequest>, workers: &Workers) -> Result<Self> {
        Self::of_location(locate(location)?, request.into(), workers)
    }

    /// As [`open`](Self::open), for a dataset that `source` reads.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn of_source(
        source: Arc<dyn Source>,
        request: impl Into<ReadRequest>,
        workers: &Workers,
    ) -> Result<Self> {
        Self::of_location(Location::Source(source), request.into(), workers)
    }
}

/// The snapshot `number` of the dataset at `location`, or its newest one: from its storage, or from a preprocessing
/// service.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if there is no dataset or it has no such snapshot,
/// [`Error::Fault`](crate::Error::Fault) for what a service says.
pub fn load_snapshot(location: &Path, number: Option<u64>) -> Result<Snapshot> {
    locate(location)?.snapshot(number)
}

/// The statistics of the samples in some partitions of `snapshot`, which is one of the dataset at `location`.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if the filter chooses nothing or a manifest cannot be read,
/// [`Error::Fault`](crate::Error::Fault) for what a service says.
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

/// Where the dataset at `location` is stored: for the URL of a service, the location that its workers read.
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

/// The service of a location; `None` if it is not that of a service.
#[cfg(feature = "service")]
fn connect(location: &Path) -> Result<Option<Arc<dyn Source>>> {
    crate::service::connect(location)
}

/// Refuses the location of a service.
#[cfg(not(feature = "service"))]
fn connect(location: &Path) -> Result<Option<Arc<dyn Source>>> {
    let text = location.to_string_lossy();
    match text.starts_with("grpc://") || text.starts_with("grpcs://") {
        false => Ok(None),
        true => Err(crate::Error::options(
            format!("`{text}` is a dataset of a preprocessing service, which this program cannot read"),
            "give the location where the dataset is stored",
        )),
    }
}
