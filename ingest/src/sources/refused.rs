//! The SQL function in place of a column that cannot be read from some files: an error if anybody reads it.

use std::sync::Arc;

use arrow::array::NullArray;
use arrow::datatypes::DataType;
use datafusion::common::ScalarValue;
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::{
    ColumnarValue, Expr, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility, lit,
};
use onefold_base::fault::Fault;

use crate::config::RESERVED;
use crate::error::external;
use crate::problems::Problems;

/// The function, to be registered with the engine: `__onefold_refused(fault)`.
pub(crate) fn function() -> ScalarUDF {
    // Volatile, or the planner would call it, though no query reads the column.
    function_of(Problems::default())
}

fn function_of(problems: Problems) -> ScalarUDF {
    let (name, signature) = (format!("{RESERVED}refused"), Signature::any(1, Volatility::Volatile));
    ScalarUDF::from(RefusedColumn { name, signature, problems })
}

/// A column that is this error if it has rows; where problems are collected, one of them, and null.
pub(super) fn refused_column(fault: Fault, problems: &Problems) -> Expr {
    let fault = serde_json::to_string(&fault).unwrap_or_default();
    function_of(problems.clone()).call(vec![lit(ScalarValue::from(fault))])
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
