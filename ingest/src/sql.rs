//! Helpers for generated SQL, and the types that can be keys.

use std::collections::BTreeSet;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::TableReference;

/// Implements the name and the signature of an SQL function whose only field is its signature.
macro_rules! function_methods {
    ($name:expr) => {
        fn name(&self) -> &str {
            $name
        }

        fn signature(&self) -> &datafusion::logical_expr::Signature {
            &self.0
        }
    };
}

pub(crate) use function_methods;

/// Quotes a name for SQL, as `"name"`.
pub(crate) fn quote(column: &str) -> String {
    format!("\"{}\"", column.replace('"', "\"\""))
}

/// Returns the names without repetitions, in the order of their first occurrences.
pub(crate) fn first_of_each(names: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.into_iter().map(Into::into).filter(|name: &String| seen.insert(name.clone())).collect()
}

/// Returns the table of a source. SQL's rules for unquoted names apply to the name of the source.
pub(crate) fn table(source: &str) -> String {
    TableReference::from(source).to_quoted_string()
}

/// Returns the quoted names as `"a", "b"`.
pub(crate) fn list<S: AsRef<str>>(columns: impl IntoIterator<Item = S>) -> String {
    columns.into_iter().map(|column| quote(column.as_ref())).collect::<Vec<_>>().join(", ")
}

/// Returns the names `prefix0, prefix1, …` of `count` generated columns.
pub(crate) fn numbered(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}{i}")).collect()
}

/// Returns the columns of the samples that a join compares, under the names of the join's keys (`__onefold_k0, …`).
pub(crate) fn our_keys(on: &[(String, String)]) -> String {
    let ours = on.iter().enumerate().map(|(i, (ours, _))| format!("{} AS __onefold_k{i}", quote(ours)));
    ours.collect::<Vec<_>>().join(", ")
}

/// Returns the keys of a join under the names of the source's columns, for a message.
pub(crate) fn shown_keys(on: &[(String, String)]) -> String {
    let shown = on.iter().enumerate().map(|(i, (_, theirs))| format!("__onefold_k{i} AS {}", quote(theirs)));
    shown.collect::<Vec<_>>().join(", ")
}

/// Returns the condition that a row `n` has the join's keys of a sample `s`.
pub(crate) fn same_keys(on: &[(String, String)]) -> String {
    equal(
        on.iter()
            .enumerate()
            .map(|(i, (ours, _))| (format!("n.__onefold_k{i}"), format!("s.{}", quote(ours)))),
    )
}

/// Returns the condition that the columns of the samples that a join compares are not null.
pub(crate) fn have_keys(on: &[(String, String)]) -> String {
    let present = on.iter().map(|(ours, _)| format!("{} IS NOT NULL", quote(ours)));
    present.collect::<Vec<_>>().join(" AND ")
}

/// Returns the kind of a key's values; keys of different kinds are never equal. Returns `None` for a type that cannot
/// be a key, such as floats, where one number can stand for several large integers.
pub(crate) fn key_kind(data_type: &DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => "text",
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            "bytes"
        }
        DataType::Boolean => "a boolean",
        DataType::Date32 | DataType::Date64 | DataType::Timestamp(..) => "a time",
        DataType::Dictionary(_, value) => return key_kind(value),
        number if is_float(number) => return None,
        integer if integer.is_integer() => "an integer",
        number if number.is_numeric() => "a number",
        _ => return None,
    })
}

/// Returns whether values are floating-point numbers.
pub(crate) fn is_float(data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => is_float(values),
        other => other.is_floating(),
    }
}

/// Returns the hint for a column with a type that cannot be a key.
pub(crate) fn key_hint(column: &str, data_type: &DataType) -> String {
    if is_float(data_type) {
        return format!(
            "if its values are whole numbers, write `whole_id({column})` in the query, as `SELECT * REPLACE \
             (whole_id({column}) AS {column}) FROM log`, or write the log with integers or texts"
        );
    }
    "a key needs integers, texts or times".to_owned()
}

/// Returns whether rows can be ordered by a column of this type.
pub(crate) fn is_sortable(data_type: &DataType) -> bool {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) => is_sortable(item.data_type()),
        other => !other.is_nested(),
    }
}

/// Combines conditions with `AND`; returns `TRUE` if there are none.
pub(crate) fn all(conditions: &[String]) -> String {
    if conditions.is_empty() { "TRUE".to_owned() } else { conditions.join(" AND ") }
}

/// Returns `a.x = b.y AND …` for pairs of expressions.
pub(crate) fn equal<A: AsRef<str>, B: AsRef<str>>(pairs: impl IntoIterator<Item = (A, B)>) -> String {
    let equal: Vec<String> =
        pairs.into_iter().map(|(a, b)| format!("{} = {}", a.as_ref(), b.as_ref())).collect();
    equal.join(" AND ")
}

/// Encloses a user's condition, so that neither operators nor a comment in it affect the SQL around it.
pub(crate) fn enclosed(condition: &str) -> String {
    format!("({condition}\n)")
}
