//! Access to the columns of a batch by name.

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::{CastOptions, cast_with_options};
use datafusion::arrow::datatypes::DataType;
use onefold_datasets::PartitionKey;

use crate::error::{Error, Result};
use crate::problems::{Problems, WrongRows};

/// Returns the column `name` of a batch.
pub(super) fn column<'b>(rows: &'b RecordBatch, name: &str) -> Result<&'b ArrayRef> {
    rows.column_by_name(name).ok_or_else(|| Error::column(name, "it is missing", "add it to the query"))
}

/// Returns the column `name` of a batch, and counts its nulls as problems. `shown` is the name of the column in the
/// configuration.
pub(super) fn required<'b>(
    rows: &'b RecordBatch,
    name: &str,
    shown: &str,
    problems: &Problems,
) -> Result<&'b ArrayRef> {
    let column = column(rows, name)?;
    // A column without a type, as of `NULL AS user`, has no null buffer.
    let nulls = column.logical_null_count();
    if nulls > 0 {
        let wrong = WrongRows {
            place: &format!("column `{shown}`"),
            kind: "null",
            what: "samples have no value, and a session needs one",
            hint: "leave such rows out with `WHERE … IS NOT NULL` in the query",
        };
        problems.count(&wrong, "", nulls as u64)?;
    }
    Ok(column)
}

/// Counts the values of the partition column `name` as problems whose folders would have too long a name. Only texts
/// can be so long.
pub(super) fn check_partition_values(name: &str, column: &ArrayRef, problems: &Problems) -> Result<()> {
    let texts = match column.data_type() {
        DataType::Dictionary(_, values) => &**values,
        other => other,
    };
    if !texts.is_string() {
        return Ok(());
    }
    let most = PartitionKey::LONGEST_FOLDER_NAME;
    // The encoding of a byte has up to three bytes, so short values need not be encoded.
    let shortest = (most - 1).saturating_sub(3 * name.len()) / 3;
    let is_long = |text: &&str| text.len() > shortest && PartitionKey::folder_name_bytes(name, text) > most;
    let found = match column.as_string_view_opt() {
        Some(texts) => first_and_count(texts.iter().flatten().filter(is_long)),
        None => {
            let texts = cast(name, column, &DataType::Utf8)?;
            first_and_count(texts.as_string::<i32>().iter().flatten().filter(is_long))
        }
    };
    let Some((first, rows)) = found else { return Ok(()) };
    let what = format!(
        "samples have a value that is too long for the name of a folder: `{first}` takes {} bytes of {most}",
        PartitionKey::folder_name_bytes(name, &first)
    );
    let wrong = WrongRows {
        place: &format!("column `{name}`"),
        kind: "long",
        what: &what,
        hint: "partition by shorter values, as by `md5(…)` of them in the query, or leave such rows out",
    };
    problems.count(&wrong, "", rows)
}

/// Returns the first text and the number of all texts, or `None` if there are none.
fn first_and_count<'a>(mut texts: impl Iterator<Item = &'a str>) -> Option<(String, u64)> {
    let first = texts.next()?.to_owned();
    Some((first, 1 + texts.count() as u64))
}

/// Casts a column to the type `to`. A value that does not fit the type is an error.
pub(super) fn cast(name: &str, column: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(column, to, &options).map_err(|error| {
        let message = format!("a value does not fit {to}: {error}");
        Error::column(name, message, "convert the column in the query with `CAST`")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::arrow::array::NullArray;

    use super::*;

    #[test]
    fn a_column_without_a_type_has_no_values() {
        let nulls: ArrayRef = Arc::new(NullArray::new(2));
        let rows = RecordBatch::try_from_iter_with_nullable([("user", nulls, true)]).unwrap();
        let error = required(&rows, "user", "user", &Problems::default()).unwrap_err().to_string();
        assert!(error.contains("column `user`: 2 samples have no value"), "{error}");
    }
}
