//! DataFusion, set up for logs of long lists and a memory limit.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::common::config::SpillCompression;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::exchanges::SingleInputExchanges;
use crate::ids::functions;
use crate::memory::EnginePool;
use crate::probe_lists::ProbeLists;
use crate::profile::Measure;
use crate::remote::{Cluster, RunOnCluster, SessionCluster, Stores};
use crate::spilling_join::{SortedJoins, SpillingJoins};
use crate::{Config, Result, session_ids, signed_lengths};

/// Rows of a batch of narrow rows (sessions, records) at most …
const NARROW_BATCH_ROWS: usize = 4096;
/// … and fewer where a sort's share of the limit would be a few such batches: a row to so many bytes of a thread's
/// part.
const NARROW_BYTES: usize = 64 << 10;

/// What the engine may use.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Bytes that the work may hold: a quarter for the last samples of sessions, and as much for vocabularies; the rest
    /// for DataFusion's sorts, joins, aggregations and windows, which spill beyond it. Its scans and the row groups
    /// being written (64 MiB decoded each), with what is uploaded of them, come on top.
    pub memory_limit: u64,
    /// Threads of the engine and of the writer.
    pub threads: usize,
    /// Where operators spill; the system's temporary directory if `None`.
    pub spill_directory: Option<PathBuf>,
    /// Bytes that temporary files may take together; the files are compressed then. If `None`, they are not, and may
    /// take the bytes that are free where operators spill, less a margin of a tenth or 4 GiB, whichever is smaller.
    pub spill_limit: Option<u64>,
    /// The cluster that executes all plans; this process if `None`.
    pub cluster: Option<Arc<dyn Cluster>>,
}

/// The largest margin that is left free on the disk, in bytes.
const DISK_MARGIN: u64 = 4 << 30;

/// The part of the memory limit for what is kept of sessions while their samples are encoded, and as much for
/// vocabularies if there are any. The engine has the rest.
pub(crate) fn state_bytes(memory_limit: u64) -> usize {
    usize::try_from(memory_limit / 4).unwrap_or(usize::MAX)
}

/// The row groups that are written at a time: one on each thread, but fewer where the limit has no room for them.
pub(crate) fn row_groups(memory_limit: u64, threads: usize) -> usize {
    usize::try_from(memory_limit / WRITTEN_BYTES).unwrap_or(usize::MAX).clamp(1, threads.max(1))
}

/// A row group that is written gets so many bytes of the memory limit. It takes up to 250 MiB. The parts of files that
/// are filled and sent to a store meanwhile take up to 64 MiB; [`Encoders`](onefold_datasets::Encoders) limit them.
const WRITTEN_BYTES: u64 = 384 << 20;

/// On a cluster, every task holds the side of a join that has no lists where its files have at most so many bytes.
/// Otherwise both sides are split by the join's keys.
const MOST_HELD_BYTES: u64 = 64 << 20;

/// How temporary files are compressed: where their bytes are limited, with LZ4. Records hold ids of few bits, so that
/// saves a quarter of them; a build that spills much takes as long, or a little longer.
fn spill_compression(options: &EngineOptions) -> SpillCompression {
    options.spill_limit.map_or(SpillCompression::Uncompressed, |_| SpillCompression::Lz4Frame)
}

/// Bytes that temporary files may take.
fn spill_limit(options: &EngineOptions) -> u64 {
    let directory = options.spill_directory.clone().unwrap_or_else(std::env::temp_dir);
    options
        .spill_limit
        .or_else(|| free_bytes(&directory).map(|free| free - (free / 10).min(DISK_MARGIN)))
        .unwrap_or(u64::MAX)
}

/// Bytes that are free on the disk of `directory`, or of the nearest of its parents that exists; `None` if the system
/// does not say.
#[cfg(unix)]
fn free_bytes(directory: &Path) -> Option<u64> {
    let directory = std::path::absolute(directory).ok()?;
    let there = directory.ancestors().find(|directory| directory.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// DataFusion's rules and ours: [`ProbeLists`] right after the rule that chooses the sides of joins, and at the end,
/// but before the last check, those that replace what the others made. Plans that a cluster executes have no exchanges
/// between threads.
pub(crate) fn physical_rules(
    cluster: Option<&Arc<dyn Cluster>>,
) -> Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> {
    let mut rules = PhysicalOptimizer::new().rules;
    let sides = rules.iter().position(|rule| rule.name() == "join_selection").map_or(0, |place| place + 1);
    rules.insert(sides, Arc::new(ProbeLists { held_bytes: cluster.map(|_| MOST_HELD_BYTES) }));
    let end = rules.len() - 1;
    match cluster {
        Some(cluster) => rules.insert(end, Arc::new(RunOnCluster(Arc::clone(cluster)))),
        None => rules.insert(end, Arc::new(SingleInputExchanges)),
    }
    rules.insert(end, Arc::new(SpillingJoins));
    if cluster.is_none() {
        rules.push(Arc::new(Measure));
    }
    rules
}

/// An engine that keeps its part of the memory limit and spills beyond it.
pub(crate) fn context(config: &Config, options: &EngineOptions) -> Result<SessionContext> {
    let parts = if config.vocabularies.is_empty() { 1 } else { 2 };
    let ours = parts * state_bytes(options.memory_limit);
    let limit = usize::try_from(options.memory_limit).unwrap_or(usize::MAX).saturating_sub(ours);
    let mut runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(EnginePool::new(limit)));
    if let Some(directory) = &options.spill_directory {
        runtime = runtime.with_temp_file_path(directory);
    }
    if options.cluster.is_some() {
        runtime = runtime.with_object_store_registry(Arc::new(Stores::default()));
    }
    let runtime: Arc<RuntimeEnv> = runtime.with_max_temp_directory_size(spill_limit(options)).build_arc()?;
    // What every sort sets aside for merging its runs: DataFusion's 10 MiB, less where that would use up the limit.
    let threads = options.threads.max(1);
    let partitions = options.cluster.as_ref().map_or(threads, |cluster| cluster.partitions().max(1));
    let merge_bytes = (limit / (8 * threads)).min(10 << 20);
    let mut session = SessionConfig::new()
        .with_target_partitions(partitions)
        .with_batch_size((limit / (threads * NARROW_BYTES)).clamp(64, NARROW_BATCH_ROWS))
        .with_sort_spill_reservation_bytes(merge_bytes)
        // One last sort, not one a thread and a merge of them: the sorts would use up the limit before the merge asks
        // for its share, which cannot spill.
        .with_repartition_sorts(false)
        // DataFusion 55 takes a float column whose statistics show one value for constant, and loses its NaNs.
        .with_collect_statistics(false)
        .with_information_schema(false)
        .with_extension(Arc::new(SortedJoins::default()));
    session.options_mut().execution.spill_compression = spill_compression(options);
    if let Some(cluster) = &options.cluster {
        session = session.with_extension(Arc::new(SessionCluster(Arc::clone(cluster))));
    }
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(session)
        .with_runtime_env(runtime)
        .with_physical_optimizer_rules(physical_rules(options.cluster.as_ref()))
        .build();
    let context = SessionContext::new_with_state(state);
    signed_lengths::register(&context)?;
    context.register_udf(session_ids::function());
    functions::register(&context);
    Ok(context)
}

/// Whether a join of `context` was sorted so far, because the side that it would hold did not fit into memory.
pub(crate) fn sorted_joins(context: &SessionContext) -> bool {
    context.copied_config().get_extension::<SortedJoins>().is_some_and(|sorted| sorted.count() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use onefold_sql::Query as _;

    fn options(spill_directory: Option<PathBuf>, spill_limit: Option<u64>) -> EngineOptions {
        EngineOptions { memory_limit: 8 << 20, threads: 2, spill_directory, spill_limit, cluster: None }
    }

    /// Sorts more than fits into the memory limit.
    fn sort(options: &EngineOptions) -> Result<usize> {
        let text = "format_version = 1\n[sources]\nlog = \"x\"\n[samples]\nquery = \"\"\n[session]\nkey = [\"user\"]\n\
                    time = \"time\"\n[features]\nitem = { kind = \"label\" }\nx = { kind = \"dense\" }\n";
        let config = Config::parse(Path::new("dataset.toml"), text).unwrap();
        let context = context(&config, options)?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let sql =
            "SELECT value, md5(CAST(value AS VARCHAR)) AS text FROM generate_series(1, 300000) ORDER BY text";
        runtime.block_on(async {
            let rows = context.query(sql).await?.collect().await?;
            Ok(rows.iter().map(|batch| batch.num_rows()).sum())
        })
    }

    #[test]
    fn row_groups_are_written_within_the_limit() {
        assert_eq!(row_groups(64 << 20, 2), 1);
        assert_eq!(row_groups(512 << 20, 2), 1);
        assert_eq!(row_groups(4 << 30, 2), 2);
        assert_eq!(row_groups(4 << 30, 64), 10);
        assert_eq!(row_groups(u64::MAX, 0), 1);
    }

    #[test]
    fn spilling_ends_at_its_limit_with_a_clear_error() {
        let error = sort(&options(None, Some(1 << 20))).unwrap_err();
        assert!(matches!(&error, Error::Spill(_)), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("limit of 1024.0 KB") && text.contains("hint: raise the option `spill_limit`"),
            "{text}"
        );
    }

    #[test]
    fn sorts_spill_with_and_without_compression() {
        // Both spill: a limit of one byte is reached.
        assert!(sort(&options(None, Some(1))).is_err());
        for (limit, expected) in
            [(None, SpillCompression::Uncompressed), (Some(1 << 30), SpillCompression::Lz4Frame)]
        {
            assert_eq!(spill_compression(&options(None, limit)), expected);
            assert_eq!(sort(&options(None, limit)).unwrap(), 300_000);
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_spill_limit_follows_the_free_space_of_the_disk() {
        let there = tempfile::tempdir().unwrap();
        let limit = spill_limit(&options(Some(there.path().join("not/made/yet")), None));
        let free = free_bytes(there.path()).unwrap();
        // Others may write meanwhile.
        assert!(limit < free + (1 << 30) && limit > free / 2, "{limit} of {free}");
        assert_eq!(spill_limit(&options(None, Some(7))), 7);
    }
}
