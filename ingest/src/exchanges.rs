//! An optimizer rule for DataFusion: each exchange between threads reads from one input.
//!
//! An exchange (`RepartitionExec`) without free memory writes batches to disk. In DataFusion 55.2 it can then deadlock
//! if two of its inputs write at the same time (apache/datafusion#24883): its reader waits at the end of the older of
//! two open files for a batch that is in the newer one. With one input there is only one open file. This rule therefore
//! gives each partition of an input its own exchange, and concatenates the rows that the exchanges send to each output
//! partition.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::union::InterleaveExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties};

use crate::operator::{operator_methods, shown_as};
use crate::planned::PlannedExec;

/// Gives each input of an exchange its own exchange. Must run after the rules that add exchanges.
pub(crate) fn single_input_exchanges(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    plan.transform_up(|plan| {
        let Some(exchange) = plan.downcast_ref::<RepartitionExec>() else {
            return Ok(Transformed::no(plan));
        };
        // An exchange that keeps an order already has a file for each pair of input and output.
        let inputs = exchange.input().output_partitioning().partition_count();
        if exchange.preserve_order() || inputs < 2 {
            return Ok(Transformed::no(plan));
        }
        Ok(Transformed::yes(exchange_of(Arc::clone(exchange.input()), exchange.partitioning().clone())?))
    })
    .data()
}

/// Returns a plan that exchanges the rows of `input`, with one exchange per input partition.
pub(crate) fn exchange_of(
    input: Arc<dyn ExecutionPlan>,
    partitioning: Partitioning,
) -> Result<Arc<dyn ExecutionPlan>> {
    let parts = input.output_partitioning().partition_count();
    if parts < 2 {
        return Ok(Arc::new(RepartitionExec::try_new(input, partitioning)?));
    }
    if !matches!(partitioning, Partitioning::Hash(..)) {
        let merged = Arc::new(CoalescePartitionsExec::new(input));
        return Ok(Arc::new(RepartitionExec::try_new(merged, partitioning)?));
    }
    Ok(Arc::new(ExchangeExec::new(input, partitioning)?))
}

/// An exchange per partition of its input, side by side.
#[derive(Debug)]
struct ExchangeExec {
    input: Arc<dyn ExecutionPlan>,
    exchanges: InterleaveExec,
    properties: Arc<PlanProperties>,
}

impl ExchangeExec {
    fn new(input: Arc<dyn ExecutionPlan>, partitioning: Partitioning) -> Result<Self> {
        // A rule that rewrote the plan in each part would copy the plan, but the partitions of one plan may share what
        // they read.
        let exchange = |part| -> Result<Arc<dyn ExecutionPlan>> {
            let part = Arc::new(PlannedExec::of_part(Arc::clone(&input), part));
            Ok(Arc::new(RepartitionExec::try_new(part, partitioning.clone())?))
        };
        let parts = 0..input.output_partitioning().partition_count();
        let exchanges = InterleaveExec::try_new(parts.map(exchange).collect::<Result<_>>()?)?;
        // The properties of one exchange over the whole input retain more facts about the rows, such as equal columns.
        let whole = RepartitionExec::try_new(Arc::clone(&input), partitioning)?;
        Ok(Self { input, exchanges, properties: Arc::clone(whole.properties()) })
    }
}

shown_as!(ExchangeExec, |operator| ": {}", operator.properties.partitioning);

impl ExecutionPlan for ExchangeExec {
    operator_methods!("ExchangeExec", |operator| vec![&operator.input], |input| exchange_of(
        input,
        operator.properties.partitioning.clone()
    ));

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        self.exchanges.execute(partition, context)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use datafusion::arrow::array::AsArray;
    use datafusion::arrow::datatypes::Int64Type;
    use datafusion::execution::SessionStateBuilder;
    use datafusion::execution::runtime_env::RuntimeEnvBuilder;
    use datafusion::physical_plan::displayable;
    use datafusion::prelude::{SessionConfig, SessionContext};
    use onefold_sql::Query as _;

    use super::*;
    use crate::engine::physical_rules;
    use crate::memory::EnginePool;

    /// A query with two levels of grouping. It makes two exchanges, which spill; with several inputs this can deadlock.
    /// The numbers come in an order that the engine does not know, because exchanges that keep an order do not spill.
    const NESTED: &str = "SELECT sum(c), count(*) FROM (SELECT g, count(a) AS c FROM (SELECT DISTINCT a % 1000 AS g, a \
                          FROM (SELECT value * 7919 % 200000 AS a FROM generate_series(0, 199999))) GROUP BY g)";

    #[test]
    fn exchanges_that_spill_end() {
        let runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(EnginePool::new(16 << 20)));
        let state = SessionStateBuilder::new()
            .with_default_features()
            .with_config(
                SessionConfig::new().with_target_partitions(4).with_sort_spill_reservation_bytes(1 << 14),
            )
            .with_runtime_env(runtime.build_arc().unwrap())
            .with_physical_optimizer_rules(physical_rules(None));
        let context = SessionContext::new_with_state(state.build());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
        runtime.block_on(async {
            let plan = context.query(NESTED).await.unwrap().create_physical_plan().await.unwrap();
            let mut exchanges = 0;
            let _ = Arc::clone(&plan).transform_up(|plan| {
                exchanges += u32::from(plan.is::<ExchangeExec>());
                if let Some(exchange) = plan.downcast_ref::<RepartitionExec>() {
                    let inputs = exchange.input().output_partitioning().partition_count();
                    assert!(inputs == 1 || exchange.preserve_order(), "{}", displayable(&*plan).indent(true));
                }
                Ok(Transformed::no(plan))
            });
            assert!(
                exchanges > 1,
                "the query no longer has exchanges of several inputs, so this tests nothing"
            );
            let rows = datafusion::physical_plan::collect(plan, context.task_ctx());
            // The limit only ends a run that deadlocks.
            let rows = tokio::time::timeout(Duration::from_secs(300), rows)
                .await
                .expect("the exchanges hang")
                .unwrap();
            let number = |column: usize| rows[0].column(column).as_primitive::<Int64Type>().value(0);
            assert_eq!((number(0), number(1)), (200_000, 1000));
        });
    }
}
