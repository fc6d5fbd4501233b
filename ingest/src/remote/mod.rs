//! Executes queries on a cluster instead of in this process.
//!
//! ```text
//! SQL ─▶ DataFusion's plan ─▶ checked exchanges ─▶ OnCluster ─▶ Cluster ─▶ rows
//!                             exchange               the last rule    (ingest/cluster)
//! ```
//!
//! A session with a [`Cluster`] plans queries like any other session. The last rule of its optimizer, `run_on_cluster`,
//! wraps the plan of a query in an `OnCluster`, which executes it on the cluster. The code that collects the rows of a
//! query therefore does not depend on where it runs.
//!
//! The module `executor` encodes the operators of this crate for the cluster: as a text and, for the part that
//! DataFusion can encode, a plan.

mod exchange;
mod id_maps;
mod stores;
mod work;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_optimizer::enforce_sorting::{PlanWithCorrespondingSort, ensure_sorting};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{ExecutionPlan, Partitioning, PlanProperties, displayable};
use datafusion::prelude::SessionConfig;
use futures::TryStreamExt;

pub(crate) use self::exchange::{ReceivedExec, SentExec, checked_exchange, value_of_each};
pub(crate) use self::id_maps::{IdMapFile, IdMaps, LoadedIdMap};
pub use self::stores::Stores;
pub(crate) use self::work::{
    ROW_GROUP_BYTES, WorkFile, WorkRowsExec, WorkRowsSpec, WrittenRows, properties, unwritten, write_rows,
};

use crate::operator::{operator_methods, plan_properties, shown_as};
use crate::planned::PlannedExec;

/// Processes on several machines that execute plans together.
#[async_trait]
pub trait Cluster: fmt::Debug + Send + Sync {
    /// Returns the number of output partitions of each exchange in a plan.
    fn partitions(&self) -> usize;

    /// Returns the folder for rows that several queries share: a path that all machines have, or a URL.
    fn work_folder(&self) -> &Path;

    /// Executes a plan, and returns the rows of its partitions, one partition after another. Dropping the rows cancels
    /// the job.
    ///
    /// # Errors
    ///
    /// If the plan cannot be sent, or fails.
    async fn execute(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &SessionConfig,
    ) -> Result<SendableRecordBatchStream>;
}

/// The cluster of a session, as an extension of the session's configuration.
#[derive(Debug)]
pub(crate) struct SessionCluster(pub(crate) Arc<dyn Cluster>);

/// Returns the cluster of a session, if it has one.
pub(crate) fn cluster_of(config: &SessionConfig) -> Option<Arc<dyn Cluster>> {
    config.get_extension::<SessionCluster>().map(|cluster| Arc::clone(&cluster.0))
}

/// Makes a plan run on a cluster. This must be the last rule.
pub(crate) fn run_on_cluster(
    plan: Arc<dyn ExecutionPlan>,
    cluster: &Arc<dyn Cluster>,
) -> Result<Arc<dyn ExecutionPlan>> {
    Ok(Arc::new(OnCluster::new(Arc::clone(cluster), sorted_again(check_exchanges(plan)?)?)))
}

/// Adds checks to each exchange of a plan. Replaces exchanges that keep an order by exchanges without order and a sort,
/// because a cluster keeps no order.
fn check_exchanges(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let check = |plan: Arc<dyn ExecutionPlan>| {
        if let Some(planned) = plan.downcast_ref::<PlannedExec>() {
            // The exchanges of this plan already have checks.
            return Ok(Transformed::yes(Arc::clone(&planned.plan)));
        }
        if let Some(merge) = plan.downcast_ref::<SortPreservingMergeExec>() {
            let gathered: Arc<dyn ExecutionPlan> =
                Arc::new(CoalescePartitionsExec::new(Arc::clone(merge.input())));
            let sorted = SortExec::new(merge.expr().clone(), checked_exchange(&gathered)?);
            return Ok(
                Transformed::yes(Arc::new(sorted.with_fetch(merge.fetch())) as Arc<dyn ExecutionPlan>),
            );
        }
        if let Some(exchange) = plan.downcast_ref::<RepartitionExec>() {
            if exchange.preserve_order() {
                return datafusion::common::not_impl_err!("an exchange that keeps an order, on a cluster");
            }
            if !matches!(exchange.partitioning(), Partitioning::Hash(..)) {
                // Redistributing rows to other machines without a key has no benefit.
                return Ok(Transformed::yes(Arc::clone(exchange.input())));
            }
            return Ok(Transformed::yes(checked_exchange(&plan)?));
        }
        if let Some(gathered) = plan.downcast_ref::<CoalescePartitionsExec>() {
            let received = checked_exchange(&plan)?;
            return Ok(Transformed::yes(match gathered.fetch() {
                Some(_) => Arc::new(GlobalLimitExec::new(received, 0, gathered.fetch())),
                None => received,
            }));
        }
        Ok(Transformed::no(plan))
    };
    plan.transform_up(check).data()
}

/// Sorts the inputs of operators that need an order which the inputs no longer have. The planner may sort by any column
/// that always equals the wanted one, but this equality is unknown after an exchange between machines.
fn sorted_again(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let plan = PlanWithCorrespondingSort::new_default(plan);
    Ok(plan.transform_up(ensure_sorting).data()?.plan)
}

/// A plan that is executed on a cluster: an operator without inputs.
#[derive(Debug)]
pub(crate) struct OnCluster {
    cluster: Arc<dyn Cluster>,
    plan: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl OnCluster {
    /// Makes an operator that executes `plan` on `cluster`.
    pub(crate) fn new(cluster: Arc<dyn Cluster>, plan: Arc<dyn ExecutionPlan>) -> Self {
        let properties = plan_properties(&plan.schema(), 1);
        Self { cluster, plan, properties }
    }

    /// Returns the plan that `plan` executes on a cluster, or `plan` itself if it is not executed on a cluster.
    pub(crate) fn inner(plan: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
        plan.downcast_ref::<Self>()
            .map_or_else(|| Arc::clone(&plan), |on_cluster| Arc::clone(&on_cluster.plan))
    }
}

shown_as!(OnCluster, |operator| ": {}", displayable(operator.plan.as_ref()).one_line());

impl ExecutionPlan for OnCluster {
    operator_methods!("OnCluster");

    fn execute(&self, _: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let schema = self.plan.schema();
        // Rows that leave the cluster pass through an exchange too.
        let sent: Arc<dyn ExecutionPlan> = Arc::new(SentExec::to_one(Arc::clone(&self.plan))?);
        tracing::debug!("on the cluster:\n{}", displayable(sent.as_ref()).indent(false));
        let cluster = Arc::clone(&self.cluster);
        let received = Arc::clone(&schema);
        let rows = futures::stream::once(async move {
            let rows = cluster.execute(sent, context.session_config()).await?;
            ReceivedExec::check(rows, received)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows.try_flatten())))
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::AsArray;
    use datafusion::arrow::datatypes::{Int64Type, UInt64Type};
    use datafusion::execution::SessionStateBuilder;
    use datafusion::physical_plan::{collect, execute_stream};
    use datafusion::prelude::SessionContext;
    use onefold_sql::Query as _;

    use super::*;
    use crate::engine::physical_rules;
    use crate::planned::PlannedTable;

    /// A cluster that executes plans in this process.
    #[derive(Debug)]
    struct Here;

    #[async_trait]
    impl Cluster for Here {
        fn partitions(&self) -> usize {
            4
        }

        fn work_folder(&self) -> &Path {
            Path::new("")
        }

        async fn execute(
            &self,
            plan: Arc<dyn ExecutionPlan>,
            _: &SessionConfig,
        ) -> Result<SendableRecordBatchStream> {
            execute_stream(plan, Arc::default())
        }
    }

    /// Returns a session that executes its plans on a cluster.
    fn on_cluster() -> SessionContext {
        let cluster: Arc<dyn Cluster> = Arc::new(Here);
        let state = SessionStateBuilder::new()
            .with_default_features()
            .with_config(SessionConfig::new().with_target_partitions(4))
            .with_physical_optimizer_rules(physical_rules(Some(&cluster)))
            .build();
        SessionContext::new_with_state(state)
    }

    #[test]
    fn plans_that_are_tables_become_parts_of_the_plan() {
        let context = on_cluster();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let rows = "SELECT value AS a, count(*) AS n FROM generate_series(1, 100) GROUP BY value";
            let plan = context.query(rows).await.unwrap().create_physical_plan().await.unwrap();
            context.register_table("planned", Arc::new(PlannedTable(OnCluster::inner(plan)))).unwrap();
            let query = context.query("SELECT CAST(sum(n) AS BIGINT) AS s FROM planned").await.unwrap();
            let plan = query.create_physical_plan().await.unwrap();
            let shown = displayable(OnCluster::inner(Arc::clone(&plan)).as_ref()).indent(false).to_string();
            // One exchange of the table, by value, and one exchange of the sum.
            assert!(!shown.contains("PlannedExec") && shown.matches("SentExec").count() == 2, "{shown}");
            let rows = collect(plan, context.task_ctx()).await.unwrap();
            assert_eq!(rows[0].column(0).as_primitive::<Int64Type>().values(), &[100]);
        });
    }

    #[test]
    fn windows_behind_exchanges_have_their_order() {
        let context = on_cluster();
        // The planner may sort by `b` instead of `a`.
        let sql = "SELECT row_number() OVER (PARTITION BY c, a ORDER BY t, b) AS n FROM \
                   (SELECT value % 7 AS a, value % 7 AS b, value % 2 AS c, value AS t FROM generate_series(0, 139))";
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let rows = runtime.block_on(async {
            let plan = context.query(sql).await.unwrap().create_physical_plan().await.unwrap();
            assert!(plan.is::<OnCluster>());
            collect(plan, context.task_ctx()).await.unwrap()
        });
        let numbers = rows.iter().flat_map(|batch| batch.column(0).as_primitive::<UInt64Type>().values());
        let mut numbers: Vec<u64> = numbers.copied().collect();
        numbers.sort_unstable();
        let expected: Vec<u64> = (1..=10).flat_map(|number| [number; 14]).collect();
        assert_eq!(numbers, expected);
    }
}
