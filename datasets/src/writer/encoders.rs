//! The threads that encode row groups, and limits of what is written at a time.

use std::io;
use std::sync::Arc;

use futures::executor::block_on;
use onefold_storage::UploadParts;
use rayon::ThreadPool;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::unconstrained;

use crate::Result;

/// Ranges of buckets that may be ended at a time, for each row group that may be encoded at a time.
const CLOSING_PART: usize = 4;

/// Threads that decode and encode row groups, and limits of what is written at a time. All writers of a process can
/// share them.
#[derive(Debug, Clone)]
pub struct Encoders {
    pub(super) pool: Arc<ThreadPool>,
    /// One for each row group that may be decoded and encoded at a time.
    slots: Arc<Semaphore>,
    /// One for each range of buckets that may be ended at a time.
    closing: Arc<Semaphore>,
    /// The parts of files that may be sent at a time.
    pub(super) upload_parts: UploadParts,
}

impl Encoders {
    /// So many threads, which work at up to so many row groups at a time. What is written depends on neither number. A
    /// row group that is worked at takes the memory of its samples, decoded and encoded: 150 to 250 MiB with
    /// [`row_group_bytes`](super::WriterOptions::row_group_bytes) of 64 MiB. For each of these, two parts of files (at
    /// least four in all) are sent to a store at a time, and four ranges of buckets are ended, whose next parts are
    /// filled: another 48 MiB.
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

    /// Waits until another row group may be decoded and encoded, which it may until the permit is dropped.
    pub(super) fn row_group(&self) -> io::Result<OwnedSemaphorePermit> {
        wait_for(&self.slots)
    }

    /// Waits until another range of buckets may be ended. Ending one waits for nothing but threads and requests that
    /// are at work already, so every permit is dropped some time.
    pub(super) fn closing(&self) -> io::Result<OwnedSemaphorePermit> {
        wait_for(&self.closing)
    }

    /// The number of threads.
    pub(super) fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

fn wait_for(semaphore: &Arc<Semaphore>) -> io::Result<OwnedSemaphorePermit> {
    // A task of tokio may have used up its budget of polls. The semaphore would then stay pending for ever, because
    // nothing polls the task while this thread waits.
    block_on(unconstrained(Arc::clone(semaphore).acquire_owned())).map_err(io::Error::other)
}
