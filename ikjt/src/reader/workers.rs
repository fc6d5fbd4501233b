//! The threads and the memory that the readers of a process share.

use std::sync::Arc;

use onefold_datasets::process::available_threads;

use super::budget::Budget;
use crate::{Error, Result};

/// The memory limit of [`Workers::of_machine`]: 1 GiB.
pub const DEFAULT_MEMORY_LIMIT: u64 = 1 << 30;

/// The threads that decode, deduplicate and preprocess, and a limit on the memory for row groups and batches: one for
/// all readers of a process, however many there are. A clone shares both.
///
/// Where several epochs are read at once, each reads ahead within its share of the memory. An epoch always gets what it
/// needs to go on, two row groups and a batch of each, even where the others hold the rest: only then can the sum be
/// above the limit.
#[derive(Debug, Clone)]
pub struct Workers {
    pub(super) pool: Arc<rayon::ThreadPool>,
    pub(super) budget: Arc<Budget>,
}

impl Workers {
    /// So many threads, and at most so many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] for no threads, [`Error::Io`] if threads cannot be started.
    pub fn new(threads: usize, memory_limit: u64) -> Result<Self> {
        if threads == 0 {
            return Err(Error::Options {
                message: "cannot read with 0 threads".to_owned(),
                hint: "take at least 1".to_owned(),
            });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("onefold-read-{i}"))
            // Whoever waits for what the task was to send finds out.
            .panic_handler(|_| ())
            .build()
            .map_err(std::io::Error::other)?;
        Ok(Self { pool: Arc::new(pool), budget: Budget::within(memory_limit) })
    }

    /// All of the machine's threads and [`DEFAULT_MEMORY_LIMIT`].
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if threads cannot be started.
    pub fn of_machine() -> Result<Self> {
        Self::new(available_threads(), DEFAULT_MEMORY_LIMIT)
    }

    /// The same threads with another limit on memory of its own.
    pub fn with_memory_limit(&self, memory_limit: u64) -> Self {
        Self { pool: Arc::clone(&self.pool), budget: Budget::within(memory_limit) }
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// The limit on memory, in bytes.
    pub fn memory_limit(&self) -> u64 {
        self.budget.limit()
    }
}
