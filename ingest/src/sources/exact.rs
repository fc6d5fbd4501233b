//! Converts texts of CSV and JSON to values without losing a digit.
//!
//! Readers of numbers accept `007` as 7 and `0.9` as the integer 0, and round integers that a double cannot
//! represent. So columns of these types are read as text, and each text is converted here. If a type was only
//! inferred, the text must also be the usual form of its value: then `007` is not an integer.

use std::str::FromStr;
use std::sync::Arc;

use arrow::array::timezone::Tz;
use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, GenericListArray, OffsetSizeTrait, PrimitiveArray, StringArray,
    StructArray, new_null_array,
};
use arrow::buffer::OffsetBuffer;
use arrow::compute::kernels::cast_utils::{Parser, string_to_datetime};
use arrow::compute::{cast, concat};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Date32Type, FieldRef, Float32Type, Float64Type, Int8Type, Int16Type,
    Int32Type, Int64Type, TimeUnit, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow::error::ArrowError;

use super::schema::with_types;
use crate::config::Format;

/// Doubles represent all integers up to this one exactly.
const LARGEST_EXACT: u64 = 1 << 53;
/// The number of significant digits that distinguish any two doubles.
const DOUBLE_DIGITS: usize = 17;

/// Returns `data_type` with text in place of the types that [`exact`] parses.
pub(super) fn as_text(data_type: &DataType, format: Format) -> DataType {
    with_types(data_type, &|values| match values {
        DataType::Float32 | DataType::Float64 => DataType::Utf8,
        integer if integer.is_integer() => DataType::Utf8,
        DataType::Boolean | DataType::Date32 | DataType::Timestamp(..) if format == Format::Csv => {
            DataType::Utf8
        }
        other => other.clone(),
    })
}

/// Converts a column that was read as text (with the type that [`as_text`] returns) to the type `to`. If the type
/// was `guessed`, each text must be the usual form of its value.
///
/// # Errors
///
/// The first text that is not such a value.
pub(super) fn exact(texts: &ArrayRef, to: &DataType, guessed: bool) -> Result<ArrayRef, String> {
    if texts.data_type() == to {
        return Ok(Arc::clone(texts));
    }
    match to {
        DataType::List(item) => lists::<i32>(texts, item, guessed),
        DataType::LargeList(item) => lists::<i64>(texts, item, guessed),
        DataType::Struct(fields) => {
            let texts = texts.as_struct();
            let columns = fields.iter().zip(texts.columns());
            let columns = columns.map(|(field, texts)| exact(texts, field.data_type(), guessed));
            let columns = columns.collect::<Result<Vec<_>, _>>()?;
            array(StructArray::try_new(fields.clone(), columns, texts.nulls().cloned()))
        }
        to => values(texts.as_string(), to, guessed),
    }
}

/// Converts like [`exact`], but replaces wrong values with null. Returns also the wrong values.
pub(super) fn exact_or_null(
    texts: &ArrayRef,
    to: &DataType,
    guessed: bool,
) -> Result<(ArrayRef, Vec<String>), ArrowError> {
    let (mut values, mut wrong) = (Vec::with_capacity(texts.len()), Vec::new());
    for row in 0..texts.len() {
        values.push(exact(&texts.slice(row, 1), to, guessed).unwrap_or_else(|text| {
            wrong.push(text);
            new_null_array(to, 1)
        }));
    }
    let values: Vec<&dyn Array> = values.iter().map(|values| &**values).collect();
    Ok((concat(&values)?, wrong))
}

fn lists<O: OffsetSizeTrait>(texts: &ArrayRef, item: &FieldRef, guessed: bool) -> Result<ArrayRef, String> {
    let texts = texts.as_list::<O>();
    // Convert only the items of these lists, which may be a slice of a larger array.
    let (start, end) = (texts.offsets()[0].as_usize(), texts.offsets()[texts.len()].as_usize());
    let items = exact(&texts.values().slice(start, end - start), item.data_type(), guessed)?;
    let offsets = OffsetBuffer::<O>::from_lengths(texts.offsets().lengths());
    array(GenericListArray::try_new(Arc::clone(item), offsets, items, texts.nulls().cloned()))
}

fn array(array: Result<impl Array + 'static, ArrowError>) -> Result<ArrayRef, String> {
    array.map(|array| Arc::new(array) as ArrayRef).map_err(|error| error.to_string())
}

fn values(texts: &StringArray, to: &DataType, guessed: bool) -> Result<ArrayRef, String> {
    match to {
        DataType::Int8 => integers::<Int8Type>(texts, guessed),
        DataType::Int16 => integers::<Int16Type>(texts, guessed),
        DataType::Int32 => integers::<Int32Type>(texts, guessed),
        DataType::Int64 => integers::<Int64Type>(texts, guessed),
        DataType::UInt8 => integers::<UInt8Type>(texts, guessed),
        DataType::UInt16 => integers::<UInt16Type>(texts, guessed),
        DataType::UInt32 => integers::<UInt32Type>(texts, guessed),
        DataType::UInt64 => integers::<UInt64Type>(texts, guessed),
        DataType::Float32 => each::<Float32Type>(texts, |text| {
            text.parse().ok().filter(|value: &f32| value.is_finite() || !has_digits(text))
        }),
        DataType::Float64 => each::<Float64Type>(texts, |text| double(text, guessed)),
        DataType::Boolean => {
            let value = |text: &str| match text {
                text if text.eq_ignore_ascii_case("true") => Ok(Some(true)),
                text if text.eq_ignore_ascii_case("false") => Ok(Some(false)),
                text => Err(text.to_owned()),
            };
            let values = texts.iter().map(|text| text.map_or(Ok(None), value));
            Ok(Arc::new(values.collect::<Result<BooleanArray, String>>()?))
        }
        DataType::Date32 => each::<Date32Type>(texts, Date32Type::parse),
        DataType::Timestamp(unit, zone) => times(texts, to, *unit, zone.as_deref(), guessed),
        other => Err(format!("(a text read as {other})")),
    }
}

/// Applies `value` to each text. The first text for which it returns `None` is an error.
fn each<T: ArrowPrimitiveType>(
    texts: &StringArray,
    value: impl Fn(&str) -> Option<T::Native>,
) -> Result<ArrayRef, String> {
    let values = texts.iter().map(|text| match text {
        None => Ok(None),
        Some(text) => value(text).map(Some).ok_or_else(|| text.to_owned()),
    });
    Ok(Arc::new(values.collect::<Result<PrimitiveArray<T>, String>>()?))
}

fn integers<T: ArrowPrimitiveType>(texts: &StringArray, guessed: bool) -> Result<ArrayRef, String>
where
    T::Native: FromStr,
{
    each::<T>(texts, |text| if guessed && !is_plain_integer(text) { None } else { text.parse().ok() })
}

/// Whether an integer is written without a plus sign and without leading zeros.
fn is_plain_integer(text: &str) -> bool {
    text == "0" || !text.strip_prefix('-').unwrap_or(text).starts_with(['0', '+'])
}

fn double(text: &str, guessed: bool) -> Option<f64> {
    let value: f64 = text.parse().ok()?;
    let loses = has_digits(text) && (!value.is_finite() || (guessed && !is_plain_double(text)));
    (!loses).then_some(value)
}

fn has_digits(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit())
}

/// Whether the double that is parsed from `text` keeps all of its digits. An integer may be an id, so each of its
/// digits counts.
fn is_plain_double(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, ""));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.starts_with('+') || (whole.len() > 1 && whole.starts_with('0')) {
        return false;
    }
    let fraction = fraction.trim_end_matches('0');
    if exponent.is_empty() && fraction.is_empty() {
        return whole.parse().is_ok_and(|whole: u64| whole <= LARGEST_EXACT);
    }
    let digits = match whole.trim_start_matches('0') {
        "" => fraction.trim_start_matches('0').len(),
        whole => whole.len() + fraction.len(),
    };
    digits <= DOUBLE_DIGITS
}

fn times(
    texts: &StringArray,
    to: &DataType,
    unit: TimeUnit,
    zone: Option<&str>,
    guessed: bool,
) -> Result<ArrayRef, String> {
    let default: Tz = zone.unwrap_or("+00:00").parse().map_err(|error: ArrowError| error.to_string())?;
    let counts = each::<Int64Type>(texts, |text| {
        // A time without an offset is local, in a time zone that only the configuration can define.
        if guessed && has_offset(text) != zone.is_some() {
            return None;
        }
        let time = string_to_datetime(&default, text).ok()?;
        match unit {
            TimeUnit::Second => Some(time.timestamp()),
            TimeUnit::Millisecond => Some(time.timestamp_millis()),
            TimeUnit::Microsecond => Some(time.timestamp_micros()),
            TimeUnit::Nanosecond => time.timestamp_nanos_opt(),
        }
    })?;
    cast(&counts, to).map_err(|error| error.to_string())
}

/// Whether a time such as `2024-06-01T12:00:00.5+02:00` ends with an offset or a time zone.
fn has_offset(text: &str) -> bool {
    let rest = text.get(19..).unwrap_or_default();
    let rest =
        rest.strip_prefix('.').map_or(rest, |rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    !rest.trim().is_empty()
}

#[cfg(test)]
mod tests {
    use arrow::array::{ListBuilder, StringBuilder};
    use proptest::prelude::*;

    use super::*;

    /// Converts a text and formats the value as text; `None` if the text is refused.
    fn value(text: &str, to: &str, guessed: bool) -> Option<String> {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some(text), None]));
        match exact(&texts, &to.parse().unwrap(), guessed) {
            Ok(values) => {
                assert!(values.is_null(1));
                Some(arrow::util::display::array_value_to_string(&values, 0).unwrap())
            }
            Err(wrong) => {
                assert_eq!(wrong, text);
                None
            }
        }
    }

    #[test]
    fn guessed_integers_are_what_their_texts_say() {
        for text in ["0", "7", "-7", "9223372036854775807", "-9223372036854775808"] {
            assert_eq!(value(text, "Int64", true).as_deref(), Some(text));
        }
        for text in ["007", "00", "-0", "+7", "7.0", "7e2", "9223372036854775808", "", " 7", "x", "-"] {
            assert_eq!(value(text, "Int64", true), None, "{text}");
        }
        // The configuration may allow zeros and signs, but fractions are never cut off.
        assert_eq!(value("007", "Int64", false).as_deref(), Some("7"));
        assert_eq!(value("+7", "Int32", false).as_deref(), Some("7"));
        assert_eq!(value("0.9", "Int64", false), None);
        assert_eq!(value("300", "UInt8", false), None);
    }

    #[test]
    fn guessed_doubles_keep_all_digits() {
        for text in ["0.5", "-1.25", ".5", "1e5", "0.1", "0.12345678901234567", "NaN", "inf", "-inf", "1.10"]
        {
            assert!(value(text, "Float64", true).is_some(), "{text}");
        }
        assert!(value("3.141592653589793000000", "Float64", true).is_some());
        assert!(value("9007199254740992", "Float64", true).is_some());
        for text in ["007.5", "+1.5", "9007199254740993", "4873214862074861313", "0.123456789012345678", "x"]
        {
            assert!(value(text, "Float64", true).is_none(), "{text}");
        }
        assert!(value("007.5", "Float64", false).is_some());
        for guessed in [true, false] {
            assert_eq!(value("1e400", "Float64", guessed), None);
            assert_eq!(value("1e50", "Float32", guessed), None);
        }
    }

    #[test]
    fn wrong_values_of_rows_are_null() {
        let texts: ArrayRef =
            Arc::new(StringArray::from(vec![Some("1"), Some("x"), None, Some("007"), Some("4")]));
        let (values, wrong) = exact_or_null(&texts, &DataType::Int64, true).unwrap();
        let values: Vec<_> = values.as_primitive::<Int64Type>().iter().collect();
        assert_eq!(values, [Some(1), None, None, None, Some(4)]);
        assert_eq!(wrong, ["x", "007"]);
        let mut lists = ListBuilder::new(StringBuilder::new());
        lists.append_value([Some("1"), Some("2")]);
        lists.append_value([Some("3.5")]);
        lists.append_value([Some("4")]);
        let lists: ArrayRef = Arc::new(lists.finish());
        let (values, wrong) = exact_or_null(&lists, &"List(Int64)".parse().unwrap(), true).unwrap();
        assert_eq!((values.null_count(), wrong), (1, vec!["3.5".to_owned()]));
        assert_eq!(values.as_list::<i32>().value(2).as_primitive::<Int64Type>().values(), &[4]);
    }

    #[test]
    fn times_with_and_without_an_offset_are_not_mixed() {
        let (local, instant) = ("Timestamp(µs)", "Timestamp(µs, \"UTC\")");
        for text in ["2024-06-01T12:00:00", "2024-06-01 12:00:00.123456", "2024-06-01"] {
            assert!(value(text, local, true).is_some(), "{text}");
            assert!(value(text, instant, true).is_none(), "{text}");
        }
        for text in ["2024-06-01T12:00:00Z", "2024-06-01T14:00:00.5+02:00", "2024-06-01 12:00:00 UTC"] {
            assert!(value(text, local, true).is_none(), "{text}");
            assert!(value(text, instant, true).unwrap().starts_with("2024-06-01T12:00:00"), "{text}");
        }
        assert!(value("9999-12-31T00:00:00", local, true).is_some());
        assert!(value("9999-12-31T00:00:00", "Timestamp(ns)", true).is_none());
        assert!(value("soon", local, false).is_none());
    }

    proptest! {
        /// If a text is accepted as an integer, the integer is formatted as the same text.
        #[test]
        fn a_guessed_integer_is_written_as_its_text(text in "[-+0-9.e]{1,20}") {
            if let Some(value) = value(&text, "Int64", true) {
                prop_assert_eq!(value, text);
            }
        }

        /// Parsing a formatted double returns the same double.
        #[test]
        fn written_doubles_are_read_again(number in prop::num::f64::NORMAL) {
            prop_assert_eq!(double(&format!("{number:e}"), true), Some(number));
        }
    }
}
