//! SQL functions that return the length of a list, or a position in it, as a signed integer.
//!
//! DataFusion's functions return `UInt64`. `cardinality(x) + 1` is then a decimal, which functions of integers such as
//! `range` reject. With `BIGINT` the sum is an integer, and the length of any list fits.

use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::Result;
use datafusion::execution::FunctionRegistry;
use datafusion::logical_expr::{
    ColumnarValue, Documentation, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
};
use datafusion::prelude::SessionContext;

/// The functions to replace. All of them return `UInt64`.
const FUNCTIONS: [&str; 4] = ["array_length", "array_ndims", "array_position", "cardinality"];

/// Replaces the functions of `context`.
pub(crate) fn register(context: &SessionContext) -> Result<()> {
    for name in FUNCTIONS {
        let unsigned = context.udf(name)?;
        context.register_udf(ScalarUDF::new_from_impl(Signed { unsigned }));
    }
    Ok(())
}

/// A function with a signed result.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Signed {
    unsigned: Arc<ScalarUDF>,
}

impl ScalarUDFImpl for Signed {
    fn name(&self) -> &str {
        self.unsigned.name()
    }

    fn aliases(&self) -> &[String] {
        self.unsigned.aliases()
    }

    fn signature(&self) -> &Signature {
        self.unsigned.signature()
    }

    fn coerce_types(&self, arguments: &[DataType]) -> Result<Vec<DataType>> {
        self.unsigned.coerce_types(arguments)
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Int64)
    }

    fn invoke_with_args(&self, mut args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let name = args.return_field.name().clone();
        args.return_field = Arc::new(Field::new(name, DataType::UInt64, true));
        self.unsigned.invoke_with_args(args)?.cast_to(&DataType::Int64, None)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.unsigned.documentation()
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::util::pretty::pretty_format_batches;
    use onefold_sql::Query as _;

    use super::*;

    #[test]
    fn lengths_add_up_as_integers() {
        let context = SessionContext::new();
        register(&context).unwrap();
        let query = "SELECT range(1, cardinality(x) + 1) AS a, generate_series(1, array_length(x) - 1) AS b, \
                     list_length(x) * 2 AS c, array_position(x, 7) - 3 AS d, array_ndims(x) AS e \
                     FROM (VALUES ([5, 7]), ([7]), (NULL)) AS lists(x)";
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let batches =
            runtime.block_on(async { context.query(query).await.unwrap().collect().await.unwrap() });
        let types: Vec<String> =
            batches[0].schema().fields().iter().map(|field| field.data_type().to_string()).collect();
        assert_eq!(types[2..], ["Int64", "Int64", "Int64"], "{types:?}");
        let expected = "\
+--------+-----+---+----+---+
| a      | b   | c | d  | e |
+--------+-----+---+----+---+
| [1, 2] | [1] | 4 | -1 | 1 |
| [1]    | []  | 2 | -2 | 1 |
|        |     |   |    |   |
+--------+-----+---+----+---+";
        assert_eq!(pretty_format_batches(&batches).unwrap().to_string(), expected);
    }
}
