//! The parts of this crate that the processes of a cluster need: the encoding of operators and functions, and the
//! memory that the tasks of an executor share.

mod operators;

use std::path::Path;
use std::sync::Arc;

use datafusion::error::Result;
use datafusion::execution::object_store::ObjectStoreRegistry;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use onefold_datasets::{CountBudget, Encoders};

pub use self::operators::{
    Identify, Sent, functions, of_run, read_function, read_operator, write_function, write_operator,
};
use crate::engine::{row_groups, state_bytes};
use crate::error::external;
use crate::memory::EnginePool;
use crate::remote::IdMaps;

/// The divisor that gives the share of the memory for the last samples of sessions that counts of ids take.
const COUNTS_PART: usize = 2;

/// The resources that an executor gives to the operators that it makes.
#[derive(Debug)]
pub struct ExecutorMemory {
    /// The bytes that a task may use for the last samples of sessions if ids are not counted.
    state_bytes: usize,
    /// The byte budget of all tasks together for the counts of ids and their texts: half of the memory for the last
    /// samples of sessions. The last samples then have the other half.
    counts: CountBudget,
    /// The vocabularies in memory, shared by all tasks.
    pub(super) maps: Arc<IdMaps>,
    /// The threads that encode the row groups of all tasks.
    pub(super) encoders: Encoders,
}

impl ExecutorMemory {
    /// Divides the memory of an executor with a limit of `memory_limit` bytes and `threads` threads.
    fn new(memory_limit: u64, threads: usize) -> Result<Self> {
        let bytes = state_bytes(memory_limit);
        let encoders = Encoders::new(threads, row_groups(memory_limit, threads))
            .map_err(|error| external(error.into()))?;
        let counts = CountBudget::new((bytes / COUNTS_PART) as u64);
        Ok(Self { state_bytes: bytes / threads.max(1), counts, maps: Arc::default(), encoders })
    }

    /// Returns the bytes that a task which folds samples may use for the last samples of sessions, and the budget for
    /// the counts of ids. Counting ids halves the former.
    pub(super) fn of_fold(&self, counts_ids: bool) -> (usize, CountBudget) {
        let part = if counts_ids { self.state_bytes / COUNTS_PART } else { 0 };
        (self.state_bytes - part, self.counts.clone())
    }
}

/// Makes the runtime of an executor with a limit of `memory_limit` bytes and `threads` threads. A part of the memory is
/// for the last samples of sessions. DataFusion's operators get the rest, and spill to `work` beyond it.
///
/// # Errors
///
/// If temporary files cannot be created in `work`, or threads cannot be started.
pub fn executor_runtime(
    memory_limit: u64,
    threads: usize,
    work: &Path,
    stores: Arc<dyn ObjectStoreRegistry>,
) -> Result<(Arc<RuntimeEnv>, ExecutorMemory)> {
    let memory = ExecutorMemory::new(memory_limit, threads)?;
    let limit = usize::try_from(memory_limit).unwrap_or(usize::MAX).saturating_sub(state_bytes(memory_limit));
    let runtime = RuntimeEnvBuilder::new()
        .with_memory_pool(Arc::new(EnginePool::new(limit)))
        .with_temp_file_path(work)
        .with_max_temp_directory_size(u64::MAX)
        .with_object_store_registry(stores)
        .build_arc()?;
    Ok((runtime, memory))
}

#[cfg(test)]
mod tests {
    use onefold_datasets::VocabularyCounter;

    use super::*;

    #[test]
    fn counts_of_ids_share_half_of_the_memory_of_sessions() {
        let memory = ExecutorMemory::new(4 << 20, 4).unwrap();
        assert_eq!((memory.of_fold(false).0, memory.of_fold(true).0), (1 << 18, 1 << 17));
        let mut counters = [(); 2].map(|()| VocabularyCounter::new("item", &memory.of_fold(true).1));
        let mut counted = 0;
        while counters[counted % 2].add(counted as i64, 1).is_ok() {
            counted += 1;
        }
        // A single counter would hold about as many ids as both together.
        assert!((8_000..25_000).contains(&counted), "{counted}");
    }
}
