//! The threads that encode row groups, and the limits of concurrent work.

use std::io;
use std::sync::Arc;

use futures::executor::block_on;
use onefold_storage::UploadParts;
use rayon::ThreadPool;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::unconstrained;

use crate::Result;

/// The number of ranges of buckets that may be closed at a time, per row group that may be encoded at a time.
const CLOSING_PART: usize = 4;

/// Threads that decode and encode row groups, and the limits of concurrent work. All writers of a process can
/// share them.
#[derive(Debug, Clone)]
pub struct Encoders {
    pub(super) pool: Arc<ThreadPool>,
    /// Has one permit for each row group that may be decoded and encoded at a time.
    slots: Arc<Semaphore>,
    /// Has one permit for each range of buckets that may be closed at a time.
    closing: Arc<Semaphore>,
    /// Limits the parts of files that are uploaded at a time.
    pub(super) upload_parts: UploadParts,
}

impl Encoders {
    /// Creates `threads` threads that work on up to `row_groups` row groups at a time. The output depends on
    /// neither number. A row group in work takes the memory of its decoded and encoded samples: 150 to 250
    /// MiB if [`row_group_bytes`](super::WriterOptions::row_group_bytes) is 64 MiB. In addition, for each row
    /// group, two parts of files are uploaded at a time (at least four in total), and four ranges of buckets
    /// with one partly filled part each are closed: another 48 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if threads cannot be started.
    pub fn new(threads: usize, row_groups: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1));
        let pool = pool.thread_name(|i| format!("onefold-write-{i}")).build();
        let row_groups = row_groups.clamp(1, threads.max(1));
        Ok(Self {
            pool: Arc::new(pool.map_err(io::Error::other)?),
            slots: Arc::new(Semaphore::new(row_groups)),
            closing: Arc::new(Semaphore::new(CLOSING_PART * row_groups)),
            upload_parts: UploadParts::of_writers(row_groups),
        })
    }

    /// Waits until another row group may be decoded and encoded. The right lasts until the permit is dropped.
    pub(super) fn row_group(&self) -> io::Result<OwnedSemaphorePermit> {
        wait_for(&self.slots)
    }

    /// Waits until another range of buckets may be closed. Closing a range waits only for threads and
    /// requests that already run, so each permit is dropped eventually.
    pub(super) fn closing(&self) -> io::Result<OwnedSemaphorePermit> {
        wait_for(&self.closing)
    }

    /// Returns the number of threads.
    pub(super) fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

fn wait_for(semaphore: &Arc<Semaphore>) -> io::Result<OwnedSemaphorePermit> {
    // The caller may be a tokio task that has used up its poll budget. Without `unconstrained`, the semaphore
    // would then stay pending forever, because nothing polls the task while this thread waits.
    block_on(unconstrained(Arc::clone(semaphore).acquire_owned())).map_err(io::Error::other)
}
