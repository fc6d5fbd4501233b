//! The threads that encode row groups.

use std::sync::Arc;

use rayon::ThreadPool;
use tokio::sync::Semaphore;

use crate::Result;

/// Threads that decode and encode row groups. All writers of a process can share them.
#[derive(Debug, Clone)]
pub struct Encoders {
    pub(super) pool: Arc<ThreadPool>,
    /// One for each row group that may be decoded and encoded at a time.
    pub(super) slots: Arc<Semaphore>,
}

impl Encoders {
    /// So many threads, which work at up to so many row groups at a time. What is written depends on neither number. A
    /// row group that is worked at takes the memory of its samples, decoded and encoded: 150 to 250 MiB with
    /// [`row_group_bytes`](super::WriterOptions::row_group_bytes) of 64 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if threads cannot be started.
    pub fn new(threads: usize, row_groups: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1));
        let pool = pool.thread_name(|i| format!("onefold-write-{i}")).build();
        Ok(Self {
            pool: Arc::new(pool.map_err(std::io::Error::other)?),
            slots: Arc::new(Semaphore::new(row_groups.clamp(1, threads.max(1)))),
        })
    }

    /// The number of threads.
    pub(super) fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}
