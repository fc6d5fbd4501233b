//! What an executor needs of this crate: memory that all of its tasks share.

use std::path::Path;
use std::sync::Arc;

use datafusion::error::Result;
use datafusion::execution::object_store::ObjectStoreRegistry;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};

use crate::engine::state_bytes;
use crate::memory::EnginePool;

/// What an executor gives to the operators that it makes.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorMemory {
    /// Bytes that a task may take for the last samples of sessions.
    pub state_bytes: usize,
}

/// The runtime of an executor that may hold `memory_limit` bytes and has so many `threads`: a part for the last samples
/// of sessions, the rest for DataFusion's operators, which write to `work` beyond it.
///
/// # Errors
///
/// If temporary files cannot be made there.
pub fn executor_runtime(
    memory_limit: u64,
    threads: usize,
    work: &Path,
    stores: Arc<dyn ObjectStoreRegistry>,
) -> Result<(Arc<RuntimeEnv>, ExecutorMemory)> {
    let ours = state_bytes(memory_limit);
    let limit = usize::try_from(memory_limit).unwrap_or(usize::MAX).saturating_sub(ours);
    let runtime = RuntimeEnvBuilder::new()
        .with_memory_pool(Arc::new(EnginePool::new(limit)))
        .with_temp_file_path(work)
        .with_max_temp_directory_size(u64::MAX)
        .with_object_store_registry(stores)
        .build_arc()?;
    Ok((runtime, ExecutorMemory { state_bytes: ours / threads.max(1) }))
}
