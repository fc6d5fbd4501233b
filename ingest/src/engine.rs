//! Configures DataFusion for logs with long lists and a memory limit.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::common::config::SpillCompression;
use datafusion::config::ConfigOptions;
use datafusion::error::Result as EngineResult;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::error::Result;
use crate::exchanges::single_input_exchanges;
use crate::ids::functions;
use crate::memory::EnginePool;
use crate::probe_lists::probe_lists;
use crate::profile::measured;
use crate::remote::{Cluster, SessionCluster, Stores, run_on_cluster};
use crate::spilling_join::{SortedJoins, spilling_joins};
use crate::{session_ids, signed_lengths};

/// The largest number of rows of a batch of narrow rows (sessions, records).
const NARROW_BATCH_ROWS: usize = 4096;
/// The bytes of a thread's memory per row of such a batch. Batches are smaller than [`NARROW_BATCH_ROWS`] if a sort's
/// share of the limit is only a few batches.
const NARROW_BYTES: usize = 64 << 10;

/// The resources that the engine may use.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// The memory limit in bytes. A quarter is for the last samples of sessions, and another quarter for vocabularies
    /// if there are any. The rest is for DataFusion's sorts, joins, aggregations and windows, which spill when they
    /// reach it. Memory of scans and of row groups that are being written (64 MiB decoded each) and uploaded comes on
    /// top.
    pub memory_limit: u64,
    /// The number of threads of the engine and of the writer.
    pub threads: usize,
    /// The folder for spill files; the system's temporary directory if `None`.
    pub spill_directory: Option<PathBuf>,
    /// The limit for the total size of temporary files, in bytes; with a limit the files are compressed. If `None`,
    /// they are not compressed and may take the free space of the spill folder's disk, less a tenth of it or 4 GiB,
    /// whichever is smaller.
    pub spill_limit: Option<u64>,
    /// The cluster that executes all plans; `None` for this process.
    pub cluster: Option<Arc<dyn Cluster>>,
}

/// The largest margin of free disk space that spilling leaves, in bytes.
const DISK_MARGIN: u64 = 4 << 30;

/// Returns the bytes of the memory limit for the state of sessions while their samples are encoded. Vocabularies, if
/// there are any, get the same amount. The engine gets the rest.
pub(crate) fn state_bytes(memory_limit: u64) -> usize {
    usize::try_from(memory_limit / 4).unwrap_or(usize::MAX)
}

/// Returns the number of row groups to write at the same time: one per thread, or fewer if the memory limit is small.
pub(crate) fn row_groups(memory_limit: u64, threads: usize) -> usize {
    usize::try_from(memory_limit / WRITTEN_BYTES).unwrap_or(usize::MAX).clamp(1, threads.max(1))
}

/// The bytes of the memory limit that a row group gets while it is written. It takes up to 250 MiB. The file parts that
/// are filled and uploaded at the same time take up to 64 MiB; [`Encoders`](onefold_datasets::Encoders) limits them.
const WRITTEN_BYTES: u64 = 384 << 20;

/// The file size up to which every task of a cluster holds the side of a join without lists, in bytes. Above it, both
/// sides are split by the join's keys.
const MOST_HELD_BYTES: u64 = 64 << 20;

/// Returns the compression of temporary files: LZ4 if their size is limited, otherwise none. Records hold ids of few
/// bits, so LZ4 saves a quarter of the bytes. A build that spills much takes the same time or slightly longer.
fn spill_compression(options: &EngineOptions) -> SpillCompression {
    options.spill_limit.map_or(SpillCompression::Uncompressed, |_| SpillCompression::Lz4Frame)
}

/// Returns the limit for the size of temporary files, in bytes.
fn spill_limit(options: &EngineOptions) -> u64 {
    let directory = options.spill_directory.clone().unwrap_or_else(std::env::temp_dir);
    options
        .spill_limit
        .or_else(|| free_bytes(&directory).map(|free| free - (free / 10).min(DISK_MARGIN)))
        .unwrap_or(u64::MAX)
}

/// Returns the free bytes on the disk of `directory` or of its nearest existing parent; `None` if the system does not
/// report them.
fn free_bytes(directory: &Path) -> Option<u64> {
    let directory = std::path::absolute(directory).ok()?;
    let there = directory.ancestors().find(|directory| directory.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Returns DataFusion's optimizer rules with ours: [`probe_lists`] follows the rule that chooses the sides of joins, and
/// the rules that replace operators come before the last check. Plans for a cluster have no exchanges between threads.
pub(crate) fn physical_rules(
    cluster: Option<&Arc<dyn Cluster>>,
) -> Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> {
    let mut rules = PhysicalOptimizer::new().rules;
    let sides = rules.iter().position(|rule| rule.name() == "join_selection").map_or(0, |place| place + 1);
    let held_bytes = cluster.map(|_| MOST_HELD_BYTES);
    rules.insert(sides, rule("probe_lists", move |plan| probe_lists(plan, held_bytes)));
    let end = rules.len() - 1;
    rules.insert(end, rule("spilling_joins", spilling_joins));
    if let Some(cluster) = cluster.cloned() {
        rules.insert(end + 1, rule("run_on_cluster", move |plan| run_on_cluster(plan, &cluster)));
    } else {
        rules.insert(end + 1, rule("single_input_exchanges", single_input_exchanges));
        rules.push(rule("measured", measured));
    }
    rules
}

/// A function that changes plans, as an optimizer rule.
struct Rule<F> {
    name: &'static str,
    change: F,
}

impl<F> fmt::Debug for Rule<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl<F: Fn(Arc<dyn ExecutionPlan>) -> EngineResult<Arc<dyn ExecutionPlan>> + 'static> PhysicalOptimizerRule
    for Rule<F>
{
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> EngineResult<Arc<dyn ExecutionPlan>> {
        (self.change)(plan)
    }

    fn name(&self) -> &str {
        self.name
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Makes an optimizer rule of a function that changes plans but not their schema.
fn rule(
    name: &'static str,
    change: impl Fn(Arc<dyn ExecutionPlan>) -> EngineResult<Arc<dyn ExecutionPlan>> + Send + Sync + 'static,
) -> Arc<dyn PhysicalOptimizerRule + Send + Sync> {
    Arc::new(Rule { name, change })
}

/// Makes an engine that keeps within its part of the memory limit and spills when it reaches it.
pub(crate) fn context(options: &EngineOptions, has_vocabularies: bool) -> Result<SessionContext> {
    let ours = (1 + usize::from(has_vocabularies)) * state_bytes(options.memory_limit);
    let limit = usize::try_from(options.memory_limit).unwrap_or(usize::MAX).saturating_sub(ours);
    let mut runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(EnginePool::new(limit)));
    if let Some(directory) = &options.spill_directory {
        runtime = runtime.with_temp_file_path(directory);
    }
    if options.cluster.is_some() {
        runtime = runtime.with_object_store_registry(Arc::new(Stores::default()));
    }
    let runtime: Arc<RuntimeEnv> = runtime.with_max_temp_directory_size(spill_limit(options)).build_arc()?;
    // The memory that each sort reserves for merging its runs: DataFusion's default of 10 MiB, or less if that would
    // use up the limit.
    let threads = options.threads.max(1);
    let partitions = options.cluster.as_ref().map_or(threads, |cluster| cluster.partitions().max(1));
    let merge_bytes = (limit / (8 * threads)).min(10 << 20);
    let mut session = SessionConfig::new()
        .with_target_partitions(partitions)
        .with_batch_size((limit / (threads * NARROW_BYTES)).clamp(64, NARROW_BATCH_ROWS))
        .with_sort_spill_reservation_bytes(merge_bytes)
        // Use one final sort instead of a sort per thread and a merge. The sorts would use up the limit before the
        // merge requests its share, and the merge cannot spill.
        .with_repartition_sorts(false)
        // If the statistics of a float column show one value, DataFusion 55 treats the column as constant and loses its
        // NaNs.
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

/// Returns whether a join of `context` has sorted its inputs, because the side to be held in memory did not fit.
pub(crate) fn sorted_joins(context: &SessionContext) -> bool {
    context.copied_config().get_extension::<SortedJoins>().is_some_and(|sorted| sorted.count() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use onefold_sql::Query as _;

    fn options(spill_directory: Option<PathBuf>, spill_limit: Option<u64>) -> EngineOptions {
        EngineOptions { memory_limit: 8 << 20, threads: 2, spill_directory, spill_limit, cluster: None }
    }

    /// Sorts more rows than fit into the memory limit, and returns their number.
    fn sort(options: &EngineOptions) -> Result<usize> {
        let context = context(options, false)?;
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
        // Both configurations spill: a limit of one byte is exceeded.
        assert!(sort(&options(None, Some(1))).is_err());
        for (limit, expected) in
            [(None, SpillCompression::Uncompressed), (Some(1 << 30), SpillCompression::Lz4Frame)]
        {
            assert_eq!(spill_compression(&options(None, limit)), expected);
            assert_eq!(sort(&options(None, limit)).unwrap(), 300_000);
        }
    }

    #[test]
    fn the_spill_limit_follows_the_free_space_of_the_disk() {
        let there = tempfile::tempdir().unwrap();
        let limit = spill_limit(&options(Some(there.path().join("not/made/yet")), None));
        let free = free_bytes(there.path()).unwrap();
        // Other processes may write to the disk at the same time.
        assert!(limit < free + (1 << 30) && limit > free / 2, "{limit} of {free}");
        assert_eq!(spill_limit(&options(None, Some(7))), 7);
    }
}
