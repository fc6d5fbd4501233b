//! Where a dataset is read: from its storage, or by another process that has access to it.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::Storage;

use super::options::ReaderOptions;
use super::position::Rank;
use crate::{PackedBatch, Result};

/// Other processes that read a dataset, and make its batches: a preprocessing service.
///
/// # Errors
///
/// Every method fails with [`Error::Fault`](crate::Error::Fault) for what these processes say, or if none answers.
pub trait Source: Debug + Send + Sync {
    /// The dataset's location, as these processes read it.
    fn location(&self) -> &str;

    /// Snapshot `number` of the dataset, or its newest one.
    fn snapshot(&self, number: Option<u64>) -> Result<Snapshot>;

    /// The statistics of the samples in some partitions of snapshot `number`.
    fn statistics(&self, number: u64, partitions: &PartitionFilter) -> Result<SampleStatistics>;

    /// By stream, the samples that sampling leaves in an epoch of each part of a row group that the stream reads, in the
    /// order of the files.
    fn sample_counts(&self, asked: &Asked, epoch: u64) -> Result<Vec<Vec<u64>>>;

    /// Gives the batches of some steps to `deliver`, each once and in order; ends early if it takes no more, or once the
    /// caller `is_gone`: that is known before a batch comes.
    fn batches(
        &self,
        asked: &Asked,
        wanted: Wanted,
        deliver: &mut Deliver<'_>,
        is_gone: &IsGone<'_>,
    ) -> Result<()>;
}

/// A request to a [`Source`]: everything that decides which bytes batches have.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The identity of the dataset, which is another one when a dataset is built anew at the same place.
    pub identity: String,
    /// The options, with a number of the snapshot and of streams.
    pub options: ReaderOptions,
    /// The rank whose part of every step is asked for.
    pub rank: Rank,
}

/// Which batches are asked for.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The epoch; 0 if all epochs have the same batches, so that equal batches have one name.
    pub epoch: u64,
    /// The epoch that the caller is in.
    pub pass: u64,
    /// The steps of the epoch.
    pub steps: Range<u64>,
    /// Steps that are best computed together: at the ends of such a block, row groups are decoded of which only a part is
    /// needed.
    pub block_steps: u64,
    /// The steps from which on a few row groups are read, and a name for these that every request has for them.
    pub row_groups: Vec<(u64, String)>,
    /// About what a batch takes.
    pub batch_bytes: u64,
    /// Bytes that batches on their way may take here.
    pub memory: u64,
}

/// Takes a batch, and says how long the caller has waited for batches; `None` if the caller is gone.
pub type Deliver<'a> = dyn FnMut(PackedBatch) -> Option<Duration> + Send + 'a;

/// Whether the caller takes no more batches.
pub type IsGone<'a> = dyn Fn() -> bool + 'a;

/// Where a dataset is.
#[derive(Debug)]
pub(crate) enum Location {
    Storage(Box<Storage>),
    Source(Arc<dyn Source>),
}

impl Location {
    pub(crate) fn snapshot(&self, number: Option<u64>) -> Result<Snapshot> {
        match self {
            Self::Storage(storage) => Ok(Snapshot::load_from(storage, number)?),
            Self::Source(source) => source.snapshot(number),
        }
    }
}
