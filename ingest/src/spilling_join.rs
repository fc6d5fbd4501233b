//! A hash join that becomes a sort-merge join if the side that it holds does not fit into memory.
//!
//! DataFusion's hash join holds one input in memory and fails if that does not fit. A [`SpillingJoin`] replaces it. It
//! reads the held side before any row of the other side. If the held side fits, the hash join runs over it. Otherwise
//! both sides are sorted by the join's keys, which can spill, and merged. The sort begins with the rows that were
//! already read, so no row is read twice.
//!
//! ```text
//! it fits:            hash join (rows read, other side)
//! it does not fit:    merge join (sort (exchange (rows read, then the rest)), sort (exchange (other side)))
//! ```

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryReservation, UnboundedMemoryPool,
};
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::expressions::Column;
use datafusion::physical_plan::joins::{HashJoinExec, PartitionMode, SortMergeJoinExec};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, Distribution, ExecutionPlan, ExecutionPlanProperties,
    InputDistributionRequirements, Partitioning, PlanProperties,
};
use datafusion::prelude::SessionConfig;
use futures::{StreamExt, TryStreamExt};
use onefold_base::sync::locked;
use tokio::sync::OnceCell;

use crate::exchanges::exchange_of;
use crate::late_lists::LateLists;
use crate::operator::{operator_methods, shown_as};

/// The divisor for the memory that each sort of a sort-merge join reserves for merging, relative to other sorts of a
/// query. Many of these sorts run at the same time.
const MERGE_PART: usize = 4;
/// The divisor of the memory that gives the bytes that a join may hold. A join cannot spill the rows that it holds, and
/// sorts need the rest.
const MOST_HELD_PART: usize = 2;

/// The number of joins of a session that were sorted; an extension of the session's configuration.
#[derive(Debug, Default)]
pub(crate) struct SortedJoins(AtomicU64);

impl SortedJoins {
    /// Returns the number of joins that were sorted so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Replaces hash joins by [`SpillingJoin`]s. Must run after all rules that look for hash joins.
pub(crate) fn spilling_joins(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    plan.transform_up(|plan| {
        let Some(join) = plan.downcast_ref::<HashJoinExec>() else { return Ok(Transformed::no(plan)) };
        // A merge join supports neither the null handling of `NOT IN` nor a limit.
        if join.null_aware || join.fetch().is_some() || *join.partition_mode() == PartitionMode::Auto {
            return Ok(Transformed::no(plan));
        }
        Ok(Transformed::yes(Arc::new(SpillingJoin::new(plan))))
    })
    .data()
}

/// A hash join that can spill, see the module.
#[derive(Debug)]
pub(crate) struct SpillingJoin(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The hash join with its inputs.
    plan: Arc<dyn ExecutionPlan>,
    /// The running joins: one for all partitions if they share the held side, otherwise one per partition.
    running: Vec<OnceCell<Result<Running, Arc<DataFusionError>>>>,
}

/// A join that runs.
#[derive(Debug)]
struct Running {
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    /// The lists that bypass the join.
    late: Option<Arc<LateLists>>,
    /// The memory that a hash join holds, released after its last row.
    reservation: Option<Arc<MemoryReservation>>,
}

impl SpillingJoin {
    /// Makes the spilling join of a plan that is a hash join.
    pub(crate) fn new(plan: Arc<dyn ExecutionPlan>) -> Self {
        let shared = hash_join(&plan).is_ok_and(|join| *join.partition_mode() == PartitionMode::CollectLeft);
        let cells = if shared { 1 } else { plan.output_partitioning().partition_count() };
        Self(Arc::new(Inner { plan, running: (0..cells).map(|_| OnceCell::new()).collect() }))
    }

    /// Returns the hash join that this replaces.
    pub(crate) fn hash_join(&self) -> Result<&HashJoinExec> {
        hash_join(&self.0.plan)
    }
}

impl Inner {
    /// Runs partition `partition` of the join. The first partition that runs decides how to join.
    async fn start(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let join = hash_join(&self.plan)?;
        let shared = *join.partition_mode() == PartitionMode::CollectLeft;
        let part = if shared { None } else { Some(partition) };
        let decide = async || decide(join, part, &context).await.map_err(Arc::new);
        let running = match self.running[part.unwrap_or(0)].get_or_init(decide).await {
            Ok(running) => running,
            Err(error) => return Err(DataFusionError::Shared(Arc::clone(error))),
        };
        let partition = if shared { partition } else { 0 };
        let mut rows = running.plan.execute(partition, Arc::clone(&running.context))?;
        if let Some(late) = &running.late {
            rows = late.restore(partition, rows);
        }
        let reservation = running.reservation.clone();
        let held = rows.inspect(move |_| {
            let _ = &reservation;
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.plan.schema(), held)))
    }
}

fn hash_join(plan: &Arc<dyn ExecutionPlan>) -> Result<&HashJoinExec> {
    plan.downcast_ref::<HashJoinExec>()
        .ok_or_else(|| DataFusionError::Internal("the plan is not a hash join".to_owned()))
}

/// Reads the side that the join holds, or partition `part` of it, and decides how to join it with the other side.
async fn decide(join: &HashJoinExec, part: Option<usize>, context: &Arc<TaskContext>) -> Result<Running> {
    let rows = join.left().execute(part.unwrap_or(0), Arc::clone(context))?;
    let held = Held::read(rows, context).await?;
    let other = OtherSide::new(join.right(), part, context);
    if held.rest.is_none() {
        return hashed(join, held, other, context);
    }
    if let Some(sorted) = context.session_config().get_extension::<SortedJoins>() {
        sorted.0.fetch_add(1, Ordering::Relaxed);
    }
    tracing::info!("a join would hold more than fits into memory, so its inputs are sorted");
    let plan = sorted(join, held, Arc::new(other))?;
    Ok(Running { plan, context: with_small_merges(context), late: None, reservation: None })
}

impl DisplayAs for SpillingJoin {
    fn fmt_as(&self, form: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpillingJoin: ")?;
        self.hash_join().map_or(Ok(()), |join| join.fmt_as(form, f))
    }
}

impl ExecutionPlan for SpillingJoin {
    fn name(&self) -> &str {
        "SpillingJoin"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.0.plan.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.0.plan.children()
    }

    /// A machine that executes some partitions of the join needs all rows of a shared held side.
    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let held =
            match self.hash_join().is_ok_and(|join| *join.partition_mode() == PartitionMode::CollectLeft) {
                true => Distribution::SinglePartition,
                false => Distribution::UnspecifiedDistribution,
            };
        InputDistributionRequirements::new(vec![held, Distribution::UnspecifiedDistribution])
    }

    fn apply_expressions(
        &self,
        visit: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.0.plan.apply_expressions(visit)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let join = self.hash_join()?.builder().with_new_children(children)?.build_exec()?;
        Ok(Arc::new(Self::new(join)))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let inner = Arc::clone(&self.0);
        let rows = futures::stream::once(async move { inner.start(partition, context).await }).try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), rows)))
    }
}

/// The rows of the held side.
struct Held {
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
    /// The bytes of the batches, and of a hash table over them.
    reservation: MemoryReservation,
    /// The rows that have not been read, because they do not fit.
    rest: Option<SendableRecordBatchStream>,
}

impl Held {
    /// Reads `rows` as long as they and their hash table fit into memory.
    async fn read(mut rows: SendableRecordBatchStream, context: &TaskContext) -> Result<Self> {
        let reservation = MemoryConsumer::new("SpillingJoin").register(context.memory_pool());
        let most = match context.memory_pool().memory_limit() {
            MemoryLimit::Finite(bytes) => bytes / MOST_HELD_PART,
            _ => usize::MAX,
        };
        let mut held = Self { schema: rows.schema(), batches: Vec::new(), reservation, rest: None };
        let mut counter = RecordBatchMemoryCounter::new();
        let (mut bytes, mut count) = (0, 0);
        while let Some(batch) = rows.next().await.transpose()? {
            bytes += counter.count_batch(&batch);
            count += batch.num_rows();
            held.batches.push(batch);
            // The hash join copies all batches into one.
            let needed = 2 * bytes + hash_table_bytes(count);
            if needed > most || held.reservation.try_resize(needed).is_err() {
                held.rest = Some(rows);
                return Ok(held);
            }
        }
        held.reservation.resize(bytes + hash_table_bytes(count));
        Ok(held)
    }

    /// Returns all rows, beginning with those that were read. Memory is released as they are taken.
    fn into_rows(self) -> SendableRecordBatchStream {
        let Self { schema, batches, reservation, rest } = self;
        // The consumer needs memory before the last batch is released.
        let share = reservation.size() / 2 / batches.len().max(1);
        reservation.resize(share * batches.len());
        let first = futures::stream::iter(batches).map(move |batch| {
            reservation.shrink(share);
            Ok(batch)
        });
        let rest = futures::stream::iter(rest).flatten();
        Box::pin(RecordBatchStreamAdapter::new(schema, first.chain(rest)))
    }
}

/// Estimates the bytes of DataFusion's hash table over this number of rows: buckets of 13 bytes, and 8 bytes per row
/// for chains.
fn hash_table_bytes(rows: usize) -> usize {
    (rows * 8 / 7).next_power_of_two() * 13 + 8 * rows
}

/// Makes the hash join over the held rows.
fn hashed(
    join: &HashJoinExec,
    held: Held,
    mut other: OtherSide,
    context: &Arc<TaskContext>,
) -> Result<Running> {
    let Held { schema, batches, reservation, .. } = held;
    // A hash join with an empty held side does not read the other side.
    let some = batches.iter().any(|batch| batch.num_rows() > 0);
    let partitions = other.properties.partitioning.partition_count();
    let late = if some { LateLists::of(join, partitions).map(Arc::new) } else { None };
    let rows = futures::stream::iter(batches.into_iter().map(Ok));
    let held = once(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))?;
    // A dynamic filter that the joins of other partitions share would be complete too early, so the join is reset.
    let mut builder = match join.partition_mode() {
        PartitionMode::CollectLeft => join.builder(),
        _ => join.builder().reset_state().with_partition_mode(PartitionMode::CollectLeft),
    };
    if let Some(late) = &late {
        builder = late.computing(builder);
        other = other.hiding(late);
    }
    let plan = builder.with_new_children(vec![held, Arc::new(other)])?.recompute_properties().build_exec()?;
    // The memory of the join is reserved already, so the join gets a pool without a limit. No other operator uses that
    // pool.
    let runtime = RuntimeEnv {
        memory_pool: Arc::new(UnboundedMemoryPool::default()),
        ..RuntimeEnv::clone(&context.runtime_env())
    };
    let context = in_context(context, context.session_config().clone(), Arc::new(runtime));
    Ok(Running { plan, context, late, reservation: Some(Arc::new(reservation)) })
}

/// Makes the merge join, with the partitioning and the order that the hash join promises.
fn sorted(join: &HashJoinExec, held: Held, other: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let (held_keys, other_keys): (Vec<_>, Vec<_>) = join.on().iter().cloned().unzip();
    let partitions = other.output_partitioning().partition_count();
    let sort = |input: Arc<dyn ExecutionPlan>, keys: Vec<Arc<dyn PhysicalExpr>>| -> Result<_> {
        let input = match partitions {
            1 => input,
            _ => exchange_of(input, Partitioning::Hash(keys.clone(), partitions))?,
        };
        let order = keys.into_iter().map(|key| PhysicalSortExpr::new(key, SortOptions::default()));
        Ok(in_order(input, LexOrdering::new(order)))
    };
    let held = sort(once(held.into_rows())?, held_keys)?;
    let other = sort(other, other_keys)?;
    let (on, options) = (join.on().to_vec(), vec![SortOptions::default(); join.on().len()]);
    let merged = SortMergeJoinExec::try_new(
        held,
        other,
        on,
        join.filter().cloned(),
        *join.join_type(),
        options,
        join.null_equality(),
    )?;
    let mut plan: Arc<dyn ExecutionPlan> = Arc::new(merged);
    if let Some(columns) = &join.projection {
        let schema = plan.schema();
        let columns = columns.iter().map(|i| {
            let name = schema.field(*i).name();
            (Arc::new(Column::new(name, *i)) as Arc<dyn PhysicalExpr>, name.clone())
        });
        plan = Arc::new(ProjectionExec::try_new(columns.collect::<Vec<_>>(), plan)?);
    }
    // A join of one partition of each side keeps its partition.
    let is_whole = *join.partition_mode() == PartitionMode::CollectLeft;
    let promised = join.properties().output_partitioning();
    if is_whole
        && !matches!(promised, Partitioning::UnknownPartitioning(_) | Partitioning::RoundRobinBatch(_))
    {
        plan = exchange_of(plan, promised.clone())?;
    }
    Ok(in_order(plan, join.properties().output_ordering().cloned()))
}

/// Sorts each partition of `input` if `order` is given.
fn in_order(input: Arc<dyn ExecutionPlan>, order: Option<LexOrdering>) -> Arc<dyn ExecutionPlan> {
    match order {
        Some(order) => Arc::new(SortExec::new(order, input).with_preserve_partitioning(true)),
        None => input,
    }
}

/// Returns `context` with smaller reservations for the merges of sorts.
fn with_small_merges(context: &Arc<TaskContext>) -> Arc<TaskContext> {
    let config = context.session_config().clone();
    let bytes = config.options().execution.sort_spill_reservation_bytes / MERGE_PART;
    in_context(context, config.with_sort_spill_reservation_bytes(bytes), context.runtime_env())
}

pub(crate) fn in_context(
    context: &TaskContext,
    config: SessionConfig,
    runtime: Arc<RuntimeEnv>,
) -> Arc<TaskContext> {
    Arc::new(TaskContext::new(
        context.task_id(),
        context.session_id(),
        config,
        context.scalar_functions().clone(),
        context.higher_order_functions().clone(),
        context.aggregate_functions().clone(),
        context.window_functions().clone(),
        runtime,
    ))
}

/// Makes a plan from rows that can be read once.
pub(crate) fn once(rows: SendableRecordBatchStream) -> Result<Arc<dyn ExecutionPlan>> {
    once_each(&rows.schema(), vec![rows])
}

/// Makes a plan from rows that can be read once, with a partition per stream.
pub(crate) fn once_each(
    schema: &SchemaRef,
    partitions: Vec<SendableRecordBatchStream>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let once = |rows| -> Arc<dyn PartitionStream> {
        Arc::new(Once { schema: Arc::clone(schema), rows: Mutex::new(Some(rows)) })
    };
    let partitions = partitions.into_iter().map(once).collect();
    Ok(Arc::new(StreamingTableExec::try_new(Arc::clone(schema), partitions, None, [], false, None)?))
}

struct Once {
    schema: SchemaRef,
    rows: Mutex<Option<SendableRecordBatchStream>>,
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl PartitionStream for Once {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        locked(&self.rows).take().unwrap_or_else(|| {
            let error = DataFusionError::Internal("rows that are there once are read twice".to_owned());
            let schema = Arc::clone(&self.schema);
            Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::iter([Err(error)])))
        })
    }
}

/// The other side of a join, or one partition of it, with the task context of the join.
#[derive(Debug)]
struct OtherSide {
    input: Arc<dyn ExecutionPlan>,
    part: Option<usize>,
    context: Arc<TaskContext>,
    /// The lists to remove from its rows.
    late: Option<Arc<LateLists>>,
    properties: Arc<PlanProperties>,
}

impl OtherSide {
    fn new(input: &Arc<dyn ExecutionPlan>, part: Option<usize>, context: &Arc<TaskContext>) -> Self {
        let mut properties = Arc::clone(input.properties());
        if part.is_some() {
            let one =
                PlanProperties::clone(&properties).with_partitioning(Partitioning::UnknownPartitioning(1));
            properties = Arc::new(one);
        }
        Self { input: Arc::clone(input), part, context: Arc::clone(context), late: None, properties }
    }

    /// Returns this side without lists.
    fn hiding(self, late: &Arc<LateLists>) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&late.seen)),
            self.properties.partitioning.clone(),
            self.properties.emission_type,
            self.properties.boundedness,
        );
        Self { late: Some(Arc::clone(late)), properties: Arc::new(properties), ..self }
    }
}

shown_as!(OtherSide, |operator| ": partition={:?}", operator.part);

impl ExecutionPlan for OtherSide {
    operator_methods!("OtherSide", |operator| vec![&operator.input]);

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match &children[..] {
            [input] => {
                let other = Self::new(input, self.part, &self.context);
                Ok(Arc::new(match &self.late {
                    Some(late) => other.hiding(late),
                    None => other,
                }))
            }
            _ => Err(DataFusionError::Internal("the other side of a join is one plan".to_owned())),
        }
    }

    fn execute(&self, partition: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let rows = self.input.execute(self.part.unwrap_or(partition), Arc::clone(&self.context))?;
        Ok(match &self.late {
            Some(late) => late.hide(partition, rows),
            None => rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::AsArray;
    use datafusion::arrow::datatypes::Int64Type;
    use datafusion::execution::SessionStateBuilder;
    use datafusion::execution::runtime_env::RuntimeEnvBuilder;
    use datafusion::prelude::SessionContext;
    use onefold_sql::Query as _;

    use super::*;
    use crate::engine::physical_rules;
    use crate::memory::EnginePool;

    /// Runs a query over two tables of `rows` rows with a memory limit. Returns its count and sums, and the number of
    /// joins that were sorted.
    fn run(join: &str, rows: i64, limit: usize, held_whole: bool) -> (Vec<i64>, u64) {
        let runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(EnginePool::new(limit)));
        let sorted = Arc::new(SortedJoins::default());
        let mut config = SessionConfig::new()
            .with_target_partitions(3)
            .with_batch_size(512)
            .with_sort_spill_reservation_bytes(limit / 32)
            .with_extension(Arc::clone(&sorted));
        let threshold = if held_whole { usize::MAX } else { 0 };
        config.options_mut().optimizer.hash_join_single_partition_threshold = threshold;
        config.options_mut().optimizer.hash_join_single_partition_threshold_rows = threshold;
        let state = SessionStateBuilder::new()
            .with_default_features()
            .with_config(config)
            .with_runtime_env(runtime.build_arc().unwrap())
            .with_physical_optimizer_rules(physical_rules(None));
        let context = SessionContext::new_with_state(state.build());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
        runtime.block_on(async {
            for (name, factor) in [("a", 2), ("b", 3)] {
                let table = format!(
                    "CREATE VIEW {name} AS SELECT value * {factor} AS k, value AS {name} FROM generate_series(1, {rows})"
                );
                context.query(&table).await.unwrap().collect().await.unwrap();
            }
            let sql = format!("SELECT count(*), coalesce(sum(a), 0), coalesce(sum(b), 0) FROM ({join})");
            let frame = context.query(&sql).await.unwrap();
            let plan = frame.clone().create_physical_plan().await.unwrap();
            let mut joins = 0;
            let _ = plan.transform_up(|plan| {
                joins += usize::from(plan.is::<SpillingJoin>());
                Ok(Transformed::no(plan))
            });
            assert_eq!(joins, 1, "{join}: the plan has no join to test");
            let batch = &frame.collect().await.unwrap()[0];
            let number = |column: &dyn datafusion::arrow::array::Array| column.as_primitive::<Int64Type>().value(0);
            (batch.columns().iter().map(|column| number(column)).collect(), sorted.count())
        })
    }

    #[test]
    fn joins_give_the_same_rows_in_any_memory() {
        for join in [
            "SELECT a, b FROM a JOIN b ON a.k = b.k",
            "SELECT a, b FROM a LEFT JOIN b ON a.k = b.k",
            "SELECT a, b FROM a RIGHT JOIN b ON a.k = b.k AND a > 100",
            "SELECT a, b FROM a FULL JOIN b ON a.k = b.k",
            "SELECT a, 1 AS b FROM a WHERE EXISTS (SELECT 1 FROM b WHERE a.k = b.k AND b > 7)",
            "SELECT a, 1 AS b FROM a WHERE NOT EXISTS (SELECT 1 FROM b WHERE a.k = b.k)",
        ] {
            for held_whole in [false, true] {
                let (expected, none) = run(join, 240_000, 1 << 30, held_whole);
                assert_eq!(none, 0, "{join}: it fits");
                let (rows, sorted) = run(join, 240_000, 8 << 20, held_whole);
                assert!(sorted > 0, "{join}: it does not fit");
                assert_eq!(rows, expected, "{join}");
            }
        }
    }
}
