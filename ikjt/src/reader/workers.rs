//! The threads and the memory limit that the readers of a process share.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, Weak};

use onefold_base::sync::locked;
use onefold_storage::Storage;

use super::budget::Budget;
use super::known::KnownFiles;
use crate::cache::Cache;
use crate::error::{Error, Result};

/// The footers of all files take at most the memory limit divided by this number, and one footer of each dataset.
const FOOTERS_SHARE: u64 = 16;

/// The default memory limit of readers: 1 GiB.
pub const DEFAULT_MEMORY_LIMIT: u64 = 1 << 30;

/// The threads that decode, deduplicate and preprocess, and a limit on the memory for row groups and batches. All
/// readers of a process can share one instance; a clone shares both the threads and the limit.
///
/// If several epochs are read at the same time, each one reads ahead within its share of the memory. An epoch always
/// gets the memory that it needs to proceed (two row groups per stream and a batch), even if other epochs hold the
/// rest. Only in this case can the total exceed the limit.
#[derive(Debug, Clone)]
pub struct Workers {
    pub(super) pool: Arc<rayon::ThreadPool>,
    pub(super) budget: Arc<Budget>,
    pub(super) cache: Option<Arc<Cache>>,
    known: Arc<Mutex<KnownDatasets>>,
    /// The bytes of the footers of all known files.
    footer_bytes: Arc<AtomicUsize>,
}

/// The known files of datasets, by location and identity of the dataset.
type KnownDatasets = HashMap<(String, String), Weak<KnownFiles>>;

impl Workers {
    /// Starts `threads` threads, and sets a limit of `memory_limit` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for 0 threads, [`Error::Io`] if threads cannot be started.
    pub fn new(threads: usize, memory_limit: u64) -> Result<Self> {
        if threads == 0 {
            return Err(Error::options("cannot read with 0 threads", "take at least 1"));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("onefold-read-{i}"))
            // The receiver of the task's result notices the panic.
            .panic_handler(|_| ())
            .build()
            .map_err(std::io::Error::other)?;
        let (pool, budget) = (Arc::new(pool), Budget::within(memory_limit));
        Ok(Self { pool, budget, cache: None, known: Arc::default(), footer_bytes: Arc::default() })
    }

    /// Returns the same threads with a separate memory limit.
    pub fn with_memory_limit(&self, memory_limit: u64) -> Self {
        Self { budget: Budget::within(memory_limit), ..self.clone() }
    }

    /// Returns the same workers with a cache, so that a column that one reader decodes is not decoded again by
    /// others.
    pub fn with_cache(&self, cache: &Arc<Cache>) -> Self {
        Self { cache: Some(Arc::clone(cache)), ..self.clone() }
    }

    /// Returns the known files of a dataset. They are kept as long as a reader uses them.
    pub(super) fn known_files(&self, storage: &Storage, dataset: &str) -> Arc<KnownFiles> {
        let mut known = locked(&self.known);
        known.retain(|_, files| files.strong_count() > 0);
        let key = (storage.location().display().to_string(), dataset.to_owned());
        let limit = self.memory_limit() / FOOTERS_SHARE;
        let new = || Arc::new(KnownFiles::new(limit, &self.footer_bytes));
        let files = known.get(&key).and_then(Weak::upgrade).unwrap_or_else(new);
        known.insert(key, Arc::downgrade(&files));
        files
    }

    /// Returns the number of threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Returns the limit on memory, in bytes.
    pub fn memory_limit(&self) -> u64 {
        self.budget.limit()
    }
}
