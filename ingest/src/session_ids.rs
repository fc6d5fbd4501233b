//! The SQL function that computes session ids, see [`onefold_datasets::session_id`].

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, Int64Array};
use datafusion::arrow::datatypes::DataType;
use datafusion::error::Result;
use datafusion::logical_expr::{ColumnarValue, ScalarUDF, Volatility, create_udf};
use onefold_datasets::session_id;

/// The name of the function in SQL.
pub(crate) const SESSION_ID: &str = "__onefold_session_id";

/// Returns the function. Its arguments are two texts, the identity and the instance of a session, and its result is the
/// session's id.
pub(crate) fn function() -> ScalarUDF {
    let text = DataType::Utf8;
    create_udf(
        SESSION_ID,
        vec![text.clone(), text],
        DataType::Int64,
        Volatility::Immutable,
        Arc::new(|arguments: &[ColumnarValue]| -> Result<ColumnarValue> {
            let columns = ColumnarValue::values_to_arrays(arguments)?;
            let (identities, instances) = (columns[0].as_string::<i32>(), columns[1].as_string::<i32>());
            let ids: Int64Array = identities
                .iter()
                .zip(instances)
                .map(|(identity, instance)| Some(session_id(identity?, instance?)))
                .collect();
            Ok(ColumnarValue::Array(Arc::new(ids) as ArrayRef))
        }),
    )
}
