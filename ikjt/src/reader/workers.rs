//! The threads and the memory that the readers of a process share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use onefold_base::process::available_threads;
use onefold_storage::Storage;

use super::budget::Budget;
use super::file::KnownFiles;
use crate::cache::Cache;
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
    pub(super) cache: Option<Arc<Cache>>,
    known: Arc<Mutex<KnownDatasets>>,
}

/// What is known of files, by the location and the identity of their dataset.
type KnownDatasets = HashMap<(String, String), Weak<KnownFiles>>;

impl Workers {
    /// So many threads, and at most so many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for no threads, [`Error::Io`] if threads cannot be started.
    pub fn new(threads: usize, memory_limit: u64) -> Result<Self> {
        if threads == 0 {
            return Err(Error::options("cannot read with 0 threads", "take at least 1"));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("onefold-read-{i}"))
            // Whoever waits for what the task was to send finds out.
            .panic_handler(|_| ())
            .build()
            .map_err(std::io::Error::other)?;
        let (pool, budget) = (Arc::new(pool), Budget::within(memory_limit));
        Ok(Self { pool, budget, cache: None, known: Arc::default() })
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
        Self { budget: Budget::within(memory_limit), ..self.clone() }
    }

    /// The same with a cache: what one reader decodes others need not decode again.
    pub fn with_cache(&self, cache: &Arc<Cache>) -> Self {
        Self { cache: Some(Arc::clone(cache)), ..self.clone() }
    }

    /// What is known of a dataset's files, as long as some reader reads them.
    pub(super) fn known_files(&self, storage: &Storage, dataset: &str) -> Arc<KnownFiles> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, files| files.strong_count() > 0);
        let key = (storage.location().display().to_string(), dataset.to_owned());
        let files = known.get(&key).and_then(Weak::upgrade).unwrap_or_default();
        known.insert(key, Arc::downgrade(&files));
        files
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
