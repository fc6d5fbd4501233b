//! The SQL function that replaces a column that cannot be read from some files: it is an error if the query reads
//! it.

use std::sync::Arc;

use arrow::array::NullArray;
use arrow::datatypes::DataType;
use datafusion::common::ScalarValue;
use datafusion::common::tree_node::{TreeNode as _, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::{
    ColumnarValue, Expr, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility, lit,
};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::DataFrame;
use onefold_base::fault::Fault;

use crate::config::RESERVED;
use crate::error::external;
use crate::problems::Problems;

/// The function to register with the engine: `__onefold_refused(fault)`.
pub(crate) fn function() -> ScalarUDF {
    // The function is volatile. Otherwise the planner would evaluate it although no query reads the column.
    function_of(Problems::default())
}

fn function_of(problems: Problems) -> ScalarUDF {
    let (name, signature) = (format!("{RESERVED}refused"), Signature::any(1, Volatility::Volatile));
    ScalarUDF::from(RefusedColumn { name, signature, problems })
}

/// Returns an expression for a column that fails with `fault` if it has rows. If problems are collected, it adds
/// the fault to them and is null.
pub(super) fn refused_column(fault: Fault, problems: &Problems) -> Expr {
    let fault = serde_json::to_string(&fault).unwrap_or_default();
    function_of(problems.clone()).call(vec![lit(ScalarValue::from(fault))])
}

/// Plans a query, and reports columns that it reads although they cannot be read from some files. This happens before
/// the query runs, because a value of another file may fail first.
///
/// # Errors
///
/// The engine's errors from planning, and the first such column unless problems are collected.
pub(crate) async fn planned(
    query: DataFrame,
    problems: &Problems,
) -> crate::error::Result<Arc<dyn ExecutionPlan>> {
    let mut faults = Vec::new();
    let (state, query) = query.into_parts();
    let query = state.optimize(&query)?;
    query.apply_with_subqueries(|node| {
        node.apply_expressions(|expression| {
            expression.apply(|part| {
                faults.extend(fault_of(part));
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    faults.into_iter().try_for_each(|fault| problems.report(fault.into()))?;
    Ok(state.query_planner().create_physical_plan(&query, &state).await?)
}

/// Returns the fault in a call of the function.
fn fault_of(part: &Expr) -> Option<Fault> {
    let Expr::ScalarFunction(call) = part else { return None };
    let Some(Expr::Literal(fault, _)) = call.args.first() else { return None };
    let is_refused = call.name().strip_prefix(RESERVED) == Some("refused");
    serde_json::from_str(fault.try_as_str().flatten().filter(|_| is_refused)?).ok()
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct RefusedColumn {
    name: String,
    signature: Signature,
    problems: Problems,
}

impl ScalarUDFImpl for RefusedColumn {
    fn name(&self) -> &str {
        &self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Null)
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        if arguments.number_rows == 0 {
            return Ok(ColumnarValue::Array(Arc::new(NullArray::new(0))));
        }
        let fault = match arguments.args.first() {
            Some(ColumnarValue::Scalar(fault)) => fault.try_as_str().flatten().unwrap_or_default().to_owned(),
            _ => String::new(),
        };
        let fault: Fault =
            serde_json::from_str(&fault).map_err(|error| DataFusionError::External(error.into()))?;
        self.problems.report(fault.into()).map_err(external)?;
        Ok(ColumnarValue::Array(Arc::new(NullArray::new(arguments.number_rows))))
    }
}
