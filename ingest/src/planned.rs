//! Makes plans available as tables, so that a query can read the rows of an existing plan.
//!
//! Optimizer rules do not change such a plan. If the query is executed on a cluster, the plan becomes a part of the
//! query's plan after all other rules have been applied.

use std::sync::Arc;

use async_trait::async_trait;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::Session;
use datafusion::datasource::{TableProvider, TableType};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties, displayable};

use crate::operator::{operator_methods, plan_properties, shown_as};

/// A table with the rows of a plan.
#[derive(Debug)]
pub(crate) struct PlannedTable(pub(crate) Arc<dyn ExecutionPlan>);

#[async_trait]
impl TableProvider for PlannedTable {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn table_type(&self) -> TableType {
        TableType::Temporary
    }

    async fn scan(
        &self,
        _: &dyn Session,
        projection: Option<&Vec<usize>>,
        _: &[Expr],
        _: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let rows: Arc<dyn ExecutionPlan> = Arc::new(PlannedExec::new(Arc::clone(&self.0)));
        let Some(projection) = projection else { return Ok(rows) };
        let schema = self.schema();
        let columns = projection.iter().map(|place| {
            let name = schema.field(*place).name();
            (Arc::new(Column::new(name, *place)) as Arc<dyn PhysicalExpr>, name.clone())
        });
        Ok(Arc::new(ProjectionExec::try_new(columns.collect::<Vec<_>>(), rows)?))
    }
}

/// The rows of a plan, or of one of its partitions, that optimizer rules must not change: an operator without inputs.
#[derive(Debug)]
pub(crate) struct PlannedExec {
    pub(crate) plan: Arc<dyn ExecutionPlan>,
    /// The only partition that is read; all if `None`.
    part: Option<usize>,
    properties: Arc<PlanProperties>,
}

impl PlannedExec {
    fn new(plan: Arc<dyn ExecutionPlan>) -> Self {
        let properties = plan_properties(&plan.schema(), plan.output_partitioning().partition_count());
        Self { plan, part: None, properties }
    }

    /// Makes an operator that reads partition `part` of a plan.
    pub(crate) fn of_part(plan: Arc<dyn ExecutionPlan>, part: usize) -> Self {
        let properties = plan_properties(&plan.schema(), 1);
        Self { plan, part: Some(part), properties }
    }
}

shown_as!(PlannedExec, |operator| ": {}", displayable(operator.plan.as_ref()).one_line());

impl ExecutionPlan for PlannedExec {
    operator_methods!("PlannedExec");

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        self.plan.execute(self.part.unwrap_or(partition), context)
    }
}
