//! The source of a dataset: its storage, or another process that has access to it.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::Storage;
use xxhash_rust::xxh3::xxh3_64;

use super::options::ReaderOptions;
use super::position::Rank;
use crate::batch::PackedBatch;
use crate::error::Result;

/// Other processes that read a dataset and make its batches: a preprocessing service.
///
/// # Errors
///
/// Every method returns [`Error::Fault`](crate::Error::Fault) for an error that these processes report, or if none
/// answers.
pub trait Source: Debug + Send + Sync {
    /// Returns the dataset's location from the view of these processes.
    fn location(&self) -> &str;

    /// Returns snapshot `number` of the dataset, or its newest one.
    fn snapshot(&self, number: Option<u64>) -> Result<Snapshot>;

    /// Returns the statistics of the samples in some partitions of snapshot `number`.
    fn statistics(&self, number: u64, partitions: &PartitionFilter) -> Result<SampleStatistics>;

    /// Returns the number of samples that sampling keeps in an epoch, for each part of a row group that a stream
    /// reads, `[streams][parts]` in the order of the files.
    fn sample_counts(&self, asked: &Asked, epoch: u64) -> Result<Vec<Vec<u64>>>;

    /// Passes the batches of some steps to `deliver`, each one once and in order. Ends early if `deliver` returns
    /// `None`, or if the caller `is_gone`, which is also checked between batches.
    fn batches(
        &self,
        asked: &Asked,
        wanted: Wanted,
        deliver: &mut Deliver<'_>,
        is_gone: &IsGone<'_>,
    ) -> Result<()>;
}

/// A request to a [`Source`]: everything that determines the bytes of batches.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The [identity](crate::Reader::identity) of the dataset and of the snapshot's files.
    pub identity: String,
    /// The options, with the numbers of the snapshot and of the streams filled in.
    pub options: ReaderOptions,
    /// The rank whose part of every step is requested.
    pub rank: Rank,
}

/// The requested batches.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The epoch, or 0 if all epochs have the same batches, so that equal batches have one name.
    pub epoch: u64,
    /// The epoch that the caller reads.
    pub pass: u64,
    /// The steps of the epoch.
    pub steps: Range<u64>,
    /// The recommended number of steps that are computed together. At the ends of such a block, row groups are
    /// decoded of which only a part is needed.
    pub block_steps: u64,
    /// The first steps of runs of row groups, each with a name of the run. The name is equal in all requests that
    /// read these row groups.
    pub row_groups: Vec<(u64, String)>,
    /// The approximate size of a batch in bytes.
    pub batch_bytes: u64,
    /// The memory limit, in bytes, of batches that are being transferred to this process.
    pub memory: u64,
}

/// A callback that takes a batch, and returns how long the caller has waited for batches so far, or `None` if the
/// caller is gone.
pub type Deliver<'a> = dyn FnMut(PackedBatch) -> Option<Duration> + Send + 'a;

/// A callback that returns whether the caller takes no more batches.
pub type IsGone<'a> = dyn Fn() -> bool + 'a;

/// The location of a dataset: storage, or a service.
#[derive(Debug)]
pub(crate) enum Location {
    Storage(Box<Storage>),
    Source(Arc<dyn Source>),
}

/// Returns a text that is equal for snapshots of the same samples, at whatever location their dataset is.
pub(super) fn identity(snapshot: &Snapshot) -> String {
    // A copy of a dataset has its identity, so another commit may have given it the same number.
    let content = serde_json::to_vec(&(&snapshot.schema, &snapshot.manifests)).unwrap_or_default();
    format!("{}/{}/{:016x}", snapshot.dataset, snapshot.snapshot, xxh3_64(&content))
}

impl Location {
    pub(crate) fn snapshot(&self, number: Option<u64>) -> Result<Snapshot> {
        match self {
            Self::Storage(storage) => Ok(Snapshot::load_from(storage, number)?),
            Self::Source(source) => source.snapshot(number),
        }
    }
}
