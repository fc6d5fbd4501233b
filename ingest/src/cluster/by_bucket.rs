//! Divides rows by bucket and sorts them: each partition of the result contains whole ranges of buckets.
//!
//! ```text
//! records, in no order ─▶ bucket ─▶ exchange by bucket ─▶ sort, for each partition
//! ```
//!
//! In one process, a separate thread sorts and writes each partition; on a cluster, a task does.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::{DataFusionError, Result as EngineResult};
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::MemoryLimit;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{BinaryExpr, CaseExpr, Column, lit};
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::windows::BoundedWindowAggExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, Partitioning};
use datafusion::prelude::SessionContext;
use onefold_datasets::Buckets;
use onefold_sql::Query as _;

use super::fold::DIGEST;
use crate::config::Config;
use crate::error::{Result, bug};
use crate::exchanges::exchange_of;
use crate::planned::{PlannedExec, PlannedTable};
use crate::profile::measured;
use crate::remote::{OnCluster, checked_exchange, value_of_each};
use crate::sessionize::{self, BUCKET, SampleOrder};

/// The table of the rows that a query of [`over_partitions`] reads.
pub(super) const ROWS: &str = "__onefold_exchanged";
/// The least memory per parallel sort, in bytes. It limits the number of sorts.
const SORT_BYTES: usize = 64 << 20;

/// Records, and the queries over [`ROWS`] that compute their buckets before the exchange and sort them after it.
pub(super) struct ExchangedRecords {
    pub(super) records: Arc<dyn ExecutionPlan>,
    pub(super) with_buckets: String,
    pub(super) ordered: String,
}

/// The exchange that moves rows to the partitions of their buckets.
#[derive(Debug, Clone, Copy)]
pub(super) enum BucketExchange {
    /// An exchange within this process, to this number of partitions.
    Here(usize, Buckets),
    /// An exchange between machines, to this number of partitions. Its result is checked.
    Checked(usize, Buckets),
}

impl ExchangedRecords {
    /// Plans the query `records`, which returns records with their sessions. The sort orders samples with equal times
    /// by the column `first`, then by the order columns of the configuration.
    pub(super) async fn with_sessions(
        config: &Config,
        context: &SessionContext,
        order: SampleOrder,
        records: &str,
        first: Option<&str>,
    ) -> Result<Self> {
        Ok(Self {
            records: OnCluster::inner(context.query(records).await?.create_physical_plan().await?),
            with_buckets: sessionize::with_known_buckets(order.buckets.number, ROWS),
            ordered: sessionize::sorted(config, order, ROWS, first, &DIGEST),
        })
    }

    /// Plans the exchange by bucket and the sort of the records.
    pub(super) async fn sorted(
        self,
        context: &SessionContext,
        exchange: BucketExchange,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let context = for_one_partition(context);
        let records = over_partitions(&context, &self.with_buckets, self.records).await?;
        over_partitions(&context, &self.ordered, exchange.of(records)?).await
    }
}

/// Plans the exchange of the slices of a timeline by bucket, like that of the records, and their sort.
pub(super) async fn slices_in_order(
    config: &Config,
    context: &SessionContext,
    slices: Arc<dyn ExecutionPlan>,
    exchange: BucketExchange,
) -> Result<Arc<dyn ExecutionPlan>> {
    let ordered = sessionize::slices_in_order(config, ROWS);
    over_partitions(&for_one_partition(context), &ordered, exchange.of(slices)?).await
}

impl BucketExchange {
    /// The exchange within this process. The number of partitions is limited by the threads, by the ranges of
    /// buckets, and by the memory, which must suffice for a sort per partition.
    pub(super) fn here(context: &SessionContext, threads: usize, buckets: Buckets) -> Self {
        let sorts = match context.runtime_env().memory_pool.memory_limit() {
            MemoryLimit::Finite(bytes) => bytes / SORT_BYTES,
            _ => usize::MAX,
        };
        Self::Here(threads.min(buckets.ranges() as usize).min(sorts).max(1), buckets)
    }

    /// Plans the exchange of rows by their [`BUCKET`]. All rows of a range of buckets go to the same partition, in
    /// every plan with the same arguments.
    fn of(self, rows: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        let column = rows.schema().index_of(BUCKET).map_err(DataFusionError::from)?;
        Ok(match self {
            Self::Here(1, _) if rows.output_partitioning().partition_count() == 1 => rows,
            Self::Here(1, _) => Arc::new(CoalescePartitionsExec::new(rows)),
            Self::Here(partitions, buckets) => exchange_of(rows, by_range(column, buckets, partitions)?)?,
            Self::Checked(partitions, buckets) => {
                let exchange = RepartitionExec::try_new(rows, by_range(column, buckets, partitions)?)?;
                checked_exchange(&(Arc::new(exchange) as _))?
            }
        })
    }
}

/// Partitions rows by the range of their bucket, an integer `column`. The numbers of ranges per partition differ by
/// at most one.
///
/// The engine partitions rows by a hash. Hashes of the ranges would leave some partitions empty and give others
/// several ranges. So each partition has a value whose hash selects it, and each range uses the value of its
/// partition.
fn by_range(column: usize, buckets: Buckets, partitions: usize) -> Result<Partitioning> {
    let values = value_of_each(partitions)?;
    let count = i64::try_from(partitions).map_err(|_| bug("there are too many partitions"))?;
    let bucket = Arc::new(Column::new(BUCKET, column));
    let range = Arc::new(BinaryExpr::new(bucket, Operator::Divide, lit(i64::from(buckets.in_range))));
    let partition = Arc::new(BinaryExpr::new(range, Operator::Modulo, lit(count)));
    let cases = (0..count).zip(values).map(|(partition, value)| (lit(partition), lit(value))).collect();
    let value = CaseExpr::try_new(Some(partition), cases, None)?;
    Ok(Partitioning::Hash(vec![Arc::new(value)], partitions))
}

/// Returns a copy of the session `context` that plans for one partition in this process.
fn for_one_partition(context: &SessionContext) -> SessionContext {
    let config =
        context.copied_config().with_target_partitions(1).with_create_default_catalog_and_schema(false);
    let state = SessionStateBuilder::new_from_existing(context.state())
        .with_config(config)
        .with_physical_optimizer_rules(PhysicalOptimizer::new().rules)
        .build();
    SessionContext::new_with_state(state)
}

/// Plans the query `sql` over [`ROWS`] and applies the plan to each partition of `input`.
async fn over_partitions(
    context: &SessionContext,
    sql: &str,
    input: Arc<dyn ExecutionPlan>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let table = PlannedTable(Arc::new(EmptyExec::new(input.schema())));
    context.register_table(ROWS, Arc::new(table))?;
    let plan = context.query(sql).await?.create_physical_plan().await;
    context.deregister_table(ROWS)?;
    let apply = |plan: Arc<dyn ExecutionPlan>| -> EngineResult<Transformed<Arc<dyn ExecutionPlan>>> {
        let applied: Arc<dyn ExecutionPlan> = if plan.is::<PlannedExec>() {
            Arc::clone(&input)
        } else if let Some(sort) = plan.downcast_ref::<SortExec>() {
            let sorted = SortExec::new(sort.expr().clone(), Arc::clone(sort.input()));
            Arc::new(sorted.with_fetch(sort.fetch()).with_preserve_partitioning(true))
        } else if let Some(window) = plan.downcast_ref::<BoundedWindowAggExec>() {
            let (exprs, order) = (window.window_expr().to_vec(), window.input_order_mode.clone());
            Arc::new(BoundedWindowAggExec::try_new(exprs, Arc::clone(window.input()), order, true)?)
        } else {
            return Ok(Transformed::no(plan));
        };
        Ok(Transformed::yes(applied))
    };
    Ok(measured(plan?.transform_up(apply).data()?)?)
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{Int64Array, RecordBatch};
    use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema};
    use datafusion::physical_plan::metrics::Time;
    use datafusion::physical_plan::repartition::BatchPartitioner;

    use super::*;

    #[test]
    fn partitions_have_equally_many_ranges() {
        let cases =
            [(1, 1, 1), (2, 2, 1), (3, 7, 1), (4, 2, 1), (64, 64, 1), (96, 256, 1), (3, 4, 16), (2, 5, 13)];
        for (partitions, ranges, in_range) in cases {
            let divided = Buckets { number: ranges * in_range, in_range };
            let buckets = i64::from(divided.number);
            let schema = Arc::new(ArrowSchema::new(vec![Field::new(BUCKET, DataType::Int64, false)]));
            let rows = Int64Array::from_iter_values((0..buckets).chain(0..buckets));
            let rows = RecordBatch::try_new(schema, vec![Arc::new(rows)]).unwrap();
            let mut found = vec![0; partitions];
            let by_range = by_range(0, divided, partitions).unwrap();
            let mut partitioner = BatchPartitioner::try_new(by_range, Time::new(), 0, 1).unwrap();
            let count = |partition: usize, rows: RecordBatch| {
                found[partition] += rows.num_rows() as i64;
                Ok(())
            };
            partitioner.partition(rows, count).unwrap();
            let expected: Vec<i64> = (0..partitions as i64)
                .map(|partition| {
                    let is_there =
                        |bucket: &i64| bucket / i64::from(in_range) % partitions as i64 == partition;
                    2 * (0..buckets).filter(is_there).count() as i64
                })
                .collect();
            assert_eq!(found, expected, "{partitions} partitions of {divided:?}");
        }
    }
}
