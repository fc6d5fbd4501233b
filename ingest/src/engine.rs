//! DataFusion, set up for logs of long lists and a memory limit.

use std::path::PathBuf;
use std::sync::Arc;

use datafusion::execution::SessionStateBuilder;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::ids::functions;
use crate::memory::EnginePool;
use crate::probe_lists::physical_rules;
use crate::{Config, Result, session_ids, signed_lengths};

/// Bytes that a batch between two of the engine's operators should have. One row of a log can hold thousands of ids, so
/// the rows of a batch follow from their width.
const BATCH_BYTES: u64 = 1 << 20;
/// Rows of a batch of narrow rows (sessions, records) at most …
const NARROW_BATCH_ROWS: usize = 4096;
/// … and fewer where a sort's share of the limit would be a few such batches: a row to so many bytes of a thread's part.
const NARROW_BYTES: usize = 16 << 10;

/// What the engine may use.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Bytes that the work may hold: a quarter for the last samples of sessions, and as much for vocabularies; the rest for
    /// DataFusion's sorts, joins, aggregations and windows, which spill beyond it. Its scans and the row groups
    /// being written (64 MiB decoded each) come on top.
    pub memory_limit: u64,
    /// Threads of the engine and of the writer.
    pub threads: usize,
    /// Where operators spill; the system's temporary directory if `None`.
    pub spill_directory: Option<PathBuf>,
}

/// How inputs are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Joins {
    /// One side is held in memory.
    Hash,
    /// Both sides are sorted, and spill.
    Sorted,
}

/// Rows of a batch of rows of `row_bytes` bytes.
pub(crate) fn batch_rows(row_bytes: u64) -> usize {
    (BATCH_BYTES / row_bytes.max(1)).clamp(16, 8192) as usize
}

/// The part of the memory limit for what is kept of sessions while their samples are folded, and as much for vocabularies
/// if there are any. The engine has the rest.
pub(crate) fn state_bytes(memory_limit: u64) -> usize {
    usize::try_from(memory_limit / 4).unwrap_or(usize::MAX)
}

/// An engine that keeps its part of the memory limit and spills beyond it.
pub(crate) fn context(config: &Config, options: &EngineOptions, joins: Joins) -> Result<SessionContext> {
    let parts = if config.vocabularies.is_empty() { 1 } else { 2 };
    let ours = parts * state_bytes(options.memory_limit);
    let limit = usize::try_from(options.memory_limit).unwrap_or(usize::MAX).saturating_sub(ours);
    let mut runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(EnginePool::new(limit)));
    if let Some(directory) = &options.spill_directory {
        runtime = runtime.with_temp_file_path(directory);
    }
    let runtime: Arc<RuntimeEnv> = runtime.build_arc()?;
    // What every sort sets aside for merging its runs: DataFusion's 10 MiB, less where that would use up the limit. Joins
    // of sorted inputs have several sorts at work on every thread.
    let sorts = match joins {
        Joins::Hash => 8,
        Joins::Sorted => 32,
    };
    let threads = options.threads.max(1);
    let merge_bytes = (limit / (sorts * threads)).min(10 << 20);
    let mut session = SessionConfig::new()
        .with_target_partitions(threads)
        .with_batch_size((limit / (threads * NARROW_BYTES)).clamp(64, NARROW_BATCH_ROWS))
        .with_sort_spill_reservation_bytes(merge_bytes)
        // One last sort, not one a thread and a merge of them: the sorts would use up the limit before the merge asks
        // for its share, which cannot spill.
        .with_repartition_sorts(false)
        // DataFusion 55 takes a float column whose statistics show one value for constant, and loses its NaNs.
        .with_collect_statistics(false)
        .with_information_schema(false);
    session.options_mut().optimizer.prefer_hash_join = joins == Joins::Hash;
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(session)
        .with_runtime_env(runtime)
        .with_physical_optimizer_rules(physical_rules())
        .build();
    let context = SessionContext::new_with_state(state);
    signed_lengths::register(&context)?;
    context.register_udf(session_ids::function());
    functions::register(&context);
    Ok(context)
}
