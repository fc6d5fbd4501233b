//! SQL functions for ids: `hash_id`, `whole_id`, `split_ids`, `split_part_each`, and the functions that timelines use.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, ListArray, ListBuilder, StringArray, StringBuilder,
};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Field, Float64Type, Int64Type};
use datafusion::common::{DataFusionError, Result, ScalarValue, exec_err, plan_err};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use datafusion::prelude::SessionContext;
use serde::{Deserialize, Serialize};

use super::values::item_type;
use super::{IdForm, IdType, list_ids, scalar_ids};
use crate::error::{Error, external};
use crate::sql::function_methods;

/// Registers the functions with `context`.
pub(crate) fn register(context: &SessionContext) {
    context.register_udf(ScalarUDF::from(HashId(Signature::any(1, Volatility::Immutable))));
    context.register_udf(ScalarUDF::from(WholeId(Signature::any(1, Volatility::Immutable))));
    context.register_udf(ScalarUDF::from(SplitIds(Signature::any(2, Volatility::Immutable))));
    context.register_udf(ScalarUDF::from(SplitPartEach(Signature::any(3, Volatility::Immutable))));
}

/// Returns the name of the function that makes ids from column number `column` of timeline number `timeline`.
pub(crate) fn timeline_function_name(timeline: usize, column: usize) -> String {
    format!("__onefold_ids{timeline}_{column}")
}

/// Returns this function. It returns the id (BIGINT) of a value of the source's column `shown`.
pub(crate) fn timeline_function(timeline: usize, column: usize, shown: &str, form: IdForm) -> ScalarUDF {
    ScalarUDF::from(TimelineIds {
        name: timeline_function_name(timeline, column),
        shown: shown.to_owned(),
        form,
        signature: of_one_value(),
    })
}

/// Encodes a function of a timeline for other machines; returns `None` for other functions.
pub(crate) fn write_timeline_function(function: &ScalarUDF) -> Result<Option<Vec<u8>>> {
    let Some(ids) = function.inner().downcast_ref::<TimelineIds>() else { return Ok(None) };
    serde_json::to_vec(ids).map(Some).map_err(|error| DataFusionError::External(error.into()))
}

/// Decodes a function of a timeline.
///
/// # Errors
///
/// If the bytes do not describe such a function.
pub(crate) fn read_timeline_function(sent: &[u8]) -> Result<ScalarUDF> {
    let ids: TimelineIds =
        serde_json::from_slice(sent).map_err(|error| DataFusionError::External(error.into()))?;
    Ok(ScalarUDF::from(ids))
}

/// `hash_id(x)`: the hash of an id, or of each id of a list.
#[derive(Debug, PartialEq, Eq, Hash)]
struct HashId(Signature);

/// `whole_id(x)`: the exact integer value of a number, or of each number of a list.
#[derive(Debug, PartialEq, Eq, Hash)]
struct WholeId(Signature);

/// `split_ids(text, separator)`: the trimmed texts between separators, without empty texts.
#[derive(Debug, PartialEq, Eq, Hash)]
struct SplitIds(Signature);

/// `split_part_each(texts, separator, n)`: part number `n` of each text of a list.
#[derive(Debug, PartialEq, Eq, Hash)]
struct SplitPartEach(Signature);

/// Makes ids from a column of a timeline. Each such function has a unique name, which identifies it.
#[derive(Serialize, Deserialize)]
struct TimelineIds {
    name: String,
    shown: String,
    form: IdForm,
    #[serde(skip, default = "of_one_value")]
    signature: Signature,
}

fn of_one_value() -> Signature {
    Signature::any(1, Volatility::Immutable)
}

impl ScalarUDFImpl for HashId {
    function_methods!("hash_id");

    fn return_type(&self, arguments: &[DataType]) -> Result<DataType> {
        match arguments {
            [data_type] if *data_type == DataType::Null || IdType::of(data_type).is_some() => {
                Ok(DataType::Int64)
            }
            [data_type] if IdType::of_items(data_type).is_some() => Ok(DataType::List(id_item())),
            _ => plan_err!(
                "`hash_id` takes a text, an integer, a boolean or a binary value, or a list of them, not {}",
                shown_types(arguments)
            ),
        }
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [values] = arrays(&arguments)?;
        let ids: ArrayRef = match values.data_type() {
            DataType::Null => cast(&values, &DataType::Int64)?,
            list if item_type(list).is_some() => {
                Arc::new(list_ids("hash_id", &values, &IdForm::Hashes).map_err(external)?)
            }
            _ => Arc::new(scalar_ids("hash_id", &values, &IdForm::Hashes).map_err(external)?),
        };
        // The cast gives the list items the field name of the declared return type.
        result(&arguments, cast(&ids, arguments.return_type())?)
    }
}

impl ScalarUDFImpl for WholeId {
    function_methods!("whole_id");

    fn return_type(&self, arguments: &[DataType]) -> Result<DataType> {
        match arguments {
            [number] if number.is_null() || is_number(number) => Ok(DataType::Int64),
            [list] if item_type(list).is_some_and(is_number) => Ok(DataType::List(id_item())),
            _ => plan_err!("`whole_id` takes a number or a list of numbers, not {}", shown_types(arguments)),
        }
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [numbers] = arrays(&arguments)?;
        let ids: ArrayRef = match item_type(numbers.data_type()) {
            Some(item) => {
                let lists =
                    cast(&numbers, &DataType::List(Arc::new(Field::new_list_field(item.clone(), true))))?;
                let lists = lists.as_list::<i32>();
                let ids = Arc::new(whole_ids(lists.values())?);
                let (offsets, nulls) = (lists.offsets().clone(), lists.nulls().cloned());
                Arc::new(ListArray::try_new(id_item(), offsets, ids, nulls)?)
            }
            None => Arc::new(whole_ids(&numbers)?),
        };
        result(&arguments, ids)
    }
}

fn is_number(data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => is_number(values),
        number => number.is_integer() || number.is_floating(),
    }
}

/// Returns the exact integer values of numbers.
fn whole_ids(numbers: &ArrayRef) -> Result<Int64Array> {
    let largest = match numbers.data_type() {
        DataType::Dictionary(_, values) => return whole_ids(&cast(numbers, values)?),
        DataType::Float16 => 1_u64 << 11,
        DataType::Float32 => 1 << 24,
        DataType::Float64 => 1 << 53,
        DataType::Null => return Ok(Int64Array::new_null(numbers.len())),
        // Integers that do not fit into 64 bits are an error.
        _ => return scalar_ids("whole_id", numbers, &IdForm::Integers).map_err(external),
    };
    let doubles = cast(numbers, &DataType::Float64)?;
    let id = |number: Option<f64>| match number {
        Some(number) if number.fract() == 0.0 && number.abs() <= largest as f64 => Ok(Some(number as i64)),
        None => Ok(None),
        Some(number) => Err(external(Error::data(
            "`whole_id`",
            format!("{number} is not a whole number that its type {} holds exactly", numbers.data_type()),
            "write the log with integers or texts, or leave the row out in the query; if different numbers may become \
             one id, use `CAST(x AS BIGINT)`",
        ))),
    };
    doubles.as_primitive::<Float64Type>().iter().map(id).collect()
}

impl ScalarUDFImpl for SplitIds {
    function_methods!("split_ids");

    fn return_type(&self, arguments: &[DataType]) -> Result<DataType> {
        if arguments.len() == 2 && arguments.iter().all(is_text) {
            return Ok(DataType::List(text_item()));
        }
        plan_err!("`split_ids` takes a text and a separator, not {}", shown_types(arguments))
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [texts, separators] = arrays(&arguments)?;
        let (texts, separators) = (strings(&texts)?, strings(&separators)?);
        let mut lists = ListBuilder::new(StringBuilder::new()).with_field(text_item());
        for (text, separator) in texts.iter().zip(separators.iter()) {
            let (Some(text), Some(separator)) = (text, separator) else {
                lists.append_null();
                continue;
            };
            if separator.is_empty() {
                return exec_err!(
                    "the separator of `split_ids` is empty; write it, as in `split_ids(items, '|')`"
                );
            }
            let ids = text.split(separator).map(str::trim).filter(|id| !id.is_empty());
            ids.for_each(|id| lists.values().append_value(id));
            lists.append(true);
        }
        result(&arguments, Arc::new(lists.finish()))
    }
}

impl ScalarUDFImpl for SplitPartEach {
    function_methods!("split_part_each");

    fn return_type(&self, arguments: &[DataType]) -> Result<DataType> {
        match arguments {
            [list, separator, number]
                if (*list == DataType::Null || item_type(list).is_some_and(is_text))
                    && is_text(separator)
                    && (number.is_integer() || number.is_null()) =>
            {
                Ok(DataType::List(text_item()))
            }
            _ => plan_err!(
                "`split_part_each` takes a list of texts, a separator and the number of a part, not {}",
                shown_types(arguments)
            ),
        }
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [lists, separators, numbers] = arrays(&arguments)?;
        let lists = cast(&lists, &DataType::List(text_item()))?;
        let (lists, separators) = (lists.as_list::<i32>(), strings(&separators)?);
        let numbers = cast(&numbers, &DataType::Int64)?;
        let numbers = numbers.as_primitive::<Int64Type>();
        let mut parts = ListBuilder::new(StringBuilder::new()).with_field(text_item());
        for row in 0..lists.len() {
            if lists.is_null(row) || separators.is_null(row) || numbers.is_null(row) {
                parts.append_null();
                continue;
            }
            let (separator, number) = (separators.value(row), numbers.value(row));
            if separator.is_empty() || number == 0 {
                return exec_err!(
                    "`split_part_each` needs a separator and the number of a part, counted from 1, or from -1 at the end"
                );
            }
            for text in lists.value(row).as_string::<i32>() {
                parts.values().append_option(text.and_then(|text| part(text, separator, number)));
            }
            parts.append(true);
        }
        result(&arguments, Arc::new(parts.finish()))
    }
}

/// Returns part `number` of `text`. Parts are numbered from 1 at the beginning, or from -1 at the end.
fn part<'t>(text: &'t str, separator: &str, number: i64) -> Option<&'t str> {
    let at = usize::try_from(number.unsigned_abs() - 1).ok()?;
    if number > 0 { text.split(separator).nth(at) } else { text.rsplit(separator).nth(at) }
}

impl ScalarUDFImpl for TimelineIds {
    fn name(&self) -> &str {
        &self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Int64)
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [values] = arrays(&arguments)?;
        let ids = scalar_ids(&self.shown, &values, &self.form).map_err(external)?;
        result(&arguments, Arc::new(ids))
    }
}

impl PartialEq for TimelineIds {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for TimelineIds {}

impl Hash for TimelineIds {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for TimelineIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimelineIds").field("name", &self.name).finish_non_exhaustive()
    }
}

fn id_item() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Int64, true))
}

fn text_item() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Utf8, true))
}

/// Returns whether a function accepts this type as a text. A literal `NULL` is accepted too.
fn is_text(data_type: &DataType) -> bool {
    data_type.is_null() || IdType::of(data_type) == Some(IdType::Text)
}

/// Returns the arguments as arrays of equal lengths.
fn arrays<const N: usize>(arguments: &ScalarFunctionArgs) -> Result<[ArrayRef; N]> {
    let arrays = ColumnarValue::values_to_arrays(&arguments.args)?;
    arrays.try_into().map_err(|arrays: Vec<ArrayRef>| {
        DataFusionError::Internal(format!("{} arguments in place of {N}", arrays.len()))
    })
}

/// Returns the result of a call: a scalar if all arguments are scalars, as the engine expects.
fn result(arguments: &ScalarFunctionArgs, values: ArrayRef) -> Result<ColumnarValue> {
    if arguments.args.iter().all(|argument| matches!(argument, ColumnarValue::Scalar(_))) {
        return Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&values, 0)?));
    }
    Ok(ColumnarValue::Array(values))
}

fn strings(texts: &ArrayRef) -> Result<StringArray> {
    Ok(cast(texts, &DataType::Utf8)?.as_string::<i32>().clone())
}

fn shown_types(arguments: &[DataType]) -> String {
    arguments.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
