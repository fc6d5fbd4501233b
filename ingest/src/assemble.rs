//! From the rows of the ordered query to rows of a dataset: partitions named, columns converted, null and non-finite
//! values refused.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray,
};
use datafusion::arrow::buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use datafusion::arrow::compute::{CastOptions, cast_with_options};
use datafusion::arrow::datatypes::{
    DataType, Field, Float32Type, Int64Type, Schema as ArrowSchema, SchemaRef,
};
use datafusion::arrow::error::ArrowError;
use datafusion::arrow::temporal_conversions::timestamp_us_to_datetime;
use onefold_datasets::PartitionKey;

use crate::sessionize::{self, SESSION, START, TIME};
use crate::{Config, Error, FeatureKind, PartitionBy, Result};

/// Checks that every column of the query has a type that its kind allows.
///
/// # Errors
///
/// [`Error::Column`] for the first one that has not.
pub fn check_types(config: &Config, columns: &ArrowSchema) -> Result<()> {
    for (name, kind) in config.feature_columns() {
        let Ok(field) = columns.field_with_name(name) else { continue };
        let data_type = field.data_type();
        let (fits, wanted) = match kind {
            FeatureKind::Label | FeatureKind::Weight | FeatureKind::Dense => {
                (data_type.is_numeric() || *data_type == DataType::Boolean, "a number or boolean")
            }
            FeatureKind::Sparse => {
                (data_type.is_integer() || is_id_list(data_type), "an integer or a list of integers")
            }
            FeatureKind::Sequence => (is_id_list(data_type), "a list of integers"),
        };
        if !fits {
            return Err(Error::Column {
                column: name.to_owned(),
                message: format!(
                    "`[features]` makes it {kind:?}, which needs {wanted}, but its type is {data_type}"
                ),
                hint: "convert the column in the query with `CAST`, or correct its `kind`".to_owned(),
            });
        }
    }
    Ok(())
}

fn is_id_list(data_type: &DataType) -> bool {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            item.data_type().is_integer()
        }
        _ => false,
    }
}

/// Turns the batches of the ordered query, in order, into batches of a dataset.
#[derive(Debug)]
pub struct Assembler<'a> {
    config: &'a Config,
    schema: SchemaRef,
}

impl<'a> Assembler<'a> {
    /// An assembler for the query of [`sessionize::ordered_samples`].
    pub fn new(config: &'a Config) -> Self {
        Self { config, schema: config.schema.to_arrow() }
    }

    /// Converts the next rows; gives runs of rows of one partition.
    ///
    /// # Errors
    ///
    /// [`Error::Column`] for a null or non-finite value where none may be, or an id beyond 64 bits.
    pub fn assemble(&self, rows: &RecordBatch) -> Result<Vec<(PartitionKey, RecordBatch)>> {
        if rows.num_rows() == 0 {
            return Ok(Vec::new());
        }
        let time = required(rows, TIME, &self.config.time)?;
        for name in self.config.session_columns() {
            required(rows, name, name)?;
        }
        let keys = self.partition_keys(rows)?;
        let sessions = required(rows, SESSION, "session")?;
        let time = TimestampMicrosecondArray::new(time.as_primitive::<Int64Type>().values().clone(), None);
        let mut columns: Vec<ArrayRef> = vec![Arc::clone(sessions), Arc::new(time)];
        for (name, kind) in self.config.feature_columns() {
            let column = column(rows, name)?;
            columns.push(match kind {
                FeatureKind::Label | FeatureKind::Weight | FeatureKind::Dense => float_column(name, column)?,
                FeatureKind::Sparse | FeatureKind::Sequence => list_column(name, column)?,
            });
        }
        let batch = RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(engine)?;
        let mut runs = Vec::new();
        let mut start = 0;
        for run in keys.chunk_by(|a, b| a == b) {
            runs.push((run[0].clone(), batch.slice(start, run.len())));
            start += run.len();
        }
        Ok(runs)
    }

    /// The partition of every row.
    fn partition_keys(&self, rows: &RecordBatch) -> Result<Vec<PartitionKey>> {
        let mut texts = Vec::new();
        for name in &self.config.partition_columns {
            let text = cast(name, required(rows, name, name)?, &DataType::Utf8)?;
            texts.push((name, text));
        }
        let starts = required(rows, START, &self.config.time)?;
        let starts = starts.as_primitive::<Int64Type>().values();
        (0..rows.num_rows())
            .map(|row| {
                let given = texts
                    .iter()
                    .map(|(name, text)| ((*name).clone(), text.as_string::<i32>().value(row).to_owned()));
                let mut key: Vec<_> = given.collect();
                if let Some(by) = self.config.partition_by {
                    key.extend(date_and_hour(starts[row], by)?);
                }
                Ok(PartitionKey::new(key))
            })
            .collect()
    }
}

/// The `date` (and `hour`) columns of the partition of a session that starts at `micros`.
fn date_and_hour(micros: i64, by: PartitionBy) -> Result<Vec<(String, String)>> {
    let bucket = micros.div_euclid(sessionize::bucket_micros(by)) * sessionize::bucket_micros(by);
    let time = timestamp_us_to_datetime(bucket).ok_or_else(|| {
        let message = format!("the time {micros} (microseconds since 1970) is not a date");
        column_error("time", &message, "check the unit of the time column")
    })?;
    let mut columns = vec![("date".to_owned(), time.format("%Y-%m-%d").to_string())];
    if by == PartitionBy::Hour {
        columns.push(("hour".to_owned(), time.format("%H").to_string()));
    }
    Ok(columns)
}

fn column<'b>(rows: &'b RecordBatch, name: &str) -> Result<&'b ArrayRef> {
    rows.column_by_name(name).ok_or_else(|| column_error(name, "it is missing", "add it to the query"))
}

/// A column that may not be null; `shown` is what the configuration calls it.
fn required<'b>(rows: &'b RecordBatch, name: &str, shown: &str) -> Result<&'b ArrayRef> {
    let column = column(rows, name)?;
    match column.null_count() {
        0 => Ok(column),
        nulls => {
            let message =
                format!("{nulls} of {} samples have no value, and a session needs one", rows.num_rows());
            Err(column_error(shown, &message, "leave such rows out with `WHERE … IS NOT NULL` in the query"))
        }
    }
}

/// A label, weight or dense feature as finite `f32`s.
fn float_column(name: &str, column: &ArrayRef) -> Result<ArrayRef> {
    let floats = cast(name, column, &DataType::Float32)?;
    let hint = format!("give a value in the query, as `COALESCE({name}, 0)`, or leave the rows out");
    if floats.null_count() > 0 {
        let message = format!("{} of {} samples have no value", floats.null_count(), floats.len());
        return Err(column_error(name, &message, &hint));
    }
    let wild =
        floats.as_primitive::<Float32Type>().values().iter().filter(|value| !value.is_finite()).count();
    if wild > 0 {
        let message =
            format!("{wild} of {} samples have a value that is not a finite 32-bit number", floats.len());
        return Err(column_error(name, &message, &hint));
    }
    Ok(floats)
}

/// A sparse or sequence feature as lists of `i64`; a missing list or id is an empty list.
fn list_column(name: &str, column: &ArrayRef) -> Result<ArrayRef> {
    let item = Arc::new(Field::new("element", DataType::Int64, false));
    if column.data_type().is_integer() {
        let ids = cast(name, column, &DataType::Int64)?;
        let ids = ids.as_primitive::<Int64Type>();
        let lengths = (0..ids.len()).map(|row| usize::from(ids.is_valid(row)));
        let present: ScalarBuffer<i64> = ids.iter().flatten().collect();
        let lists = ListArray::try_new(
            item,
            OffsetBuffer::from_lengths(lengths),
            Arc::new(Int64Array::new(present, None)),
            None,
        );
        return Ok(Arc::new(lists.map_err(engine)?));
    }
    let nullable = Arc::new(Field::new("element", DataType::Int64, true));
    let lists = cast(name, column, &DataType::List(nullable))?;
    let lists = without_null_lists(lists.as_list::<i32>());
    let (start, end) = (lists.offsets()[0] as usize, lists.offsets()[lists.len()] as usize);
    let ids = lists.values().slice(start, end - start);
    if ids.null_count() > 0 {
        let message = format!("its lists hold {} nulls", ids.null_count());
        return Err(column_error(
            name,
            &message,
            "remove them in the query, as with `array_remove_all(…, NULL)`",
        ));
    }
    let ids = Int64Array::new(ids.as_primitive::<Int64Type>().values().clone(), None);
    let lengths = lists.offsets().windows(2).map(|pair| (pair[1] - pair[0]) as usize);
    let lists = ListArray::try_new(item, OffsetBuffer::from_lengths(lengths), Arc::new(ids), None);
    Ok(Arc::new(lists.map_err(engine)?))
}

/// Makes null lists empty. What a null list's offsets span is not part of it.
fn without_null_lists(lists: &ListArray) -> ListArray {
    let Some(nulls) = lists.nulls().filter(|nulls| nulls.null_count() > 0) else { return lists.clone() };
    let values = lists.values().as_primitive::<Int64Type>();
    let mut ids = Vec::new();
    let mut valid = Vec::new();
    let mut lengths = Vec::with_capacity(lists.len());
    for (row, bounds) in lists.offsets().windows(2).enumerate() {
        let length = if nulls.is_valid(row) { bounds[1] - bounds[0] } else { 0 };
        for i in bounds[0] as usize..(bounds[0] + length) as usize {
            ids.push(values.value(i));
            valid.push(values.is_valid(i));
        }
        lengths.push(length as usize);
    }
    let ids = Int64Array::new(ids.into(), Some(NullBuffer::from(valid)));
    let item = Arc::new(Field::new("element", DataType::Int64, true));
    ListArray::new(item, OffsetBuffer::from_lengths(lengths), Arc::new(ids), None)
}

/// A cast that refuses what does not fit.
fn cast(name: &str, column: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(column, to, &options).map_err(|error| {
        let message = format!("a value does not fit {to}: {error}");
        column_error(name, &message, "convert the column in the query with `CAST`")
    })
}

fn column_error(column: &str, message: &str, hint: &str) -> Error {
    Error::Column { column: column.to_owned(), message: message.to_owned(), hint: hint.to_owned() }
}

/// An Arrow error on columns that were just made to fit: ours, not the user's.
fn engine(error: ArrowError) -> Error {
    Error::Engine {
        message: error.to_string(),
        hint: "this is a bug in Onefold; please report it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{Float64Array, LargeListArray, UInt64Array};
    use datafusion::arrow::datatypes::Int32Type;

    use super::*;

    fn ids(lists: &ArrayRef) -> Vec<Vec<i64>> {
        let lists = lists.as_list::<i32>();
        lists.iter().map(|list| list.unwrap().as_primitive::<Int64Type>().values().to_vec()).collect()
    }

    #[test]
    fn scalars_and_missing_lists_become_lists() {
        let scalar: ArrayRef = Arc::new(Int64Array::from(vec![Some(7), None, Some(9)]));
        assert_eq!(ids(&list_column("x", &scalar).unwrap()), [vec![7], vec![], vec![9]]);
        let lists = LargeListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), Some(2)]),
            None,
            Some(vec![]),
        ]);
        let lists: ArrayRef = Arc::new(lists);
        assert_eq!(ids(&list_column("x", &lists).unwrap()), [vec![1, 2], vec![], vec![]]);
        assert_eq!(ids(&list_column("x", &lists.slice(1, 2)).unwrap()), [vec![], vec![]] as [Vec<i64>; 2]);
    }

    #[test]
    fn what_cannot_be_trained_on_is_refused() {
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), None])]);
        let error = list_column("history", &(Arc::new(lists) as ArrayRef)).unwrap_err().to_string();
        assert!(error.contains("column `history`: its lists hold 1 nulls"), "{error}");
        let huge: ArrayRef = Arc::new(UInt64Array::from(vec![u64::MAX]));
        assert!(list_column("x", &huge).unwrap_err().to_string().contains("does not fit Int64"));
        let wild: ArrayRef = Arc::new(Float64Array::from(vec![1.0, f64::NAN, 1e300]));
        assert!(float_column("age", &wild).unwrap_err().to_string().contains("2 of 3 samples"));
        let missing: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), None]));
        assert!(float_column("age", &missing).unwrap_err().to_string().contains("COALESCE(age, 0)"));
    }

    #[test]
    fn partitions_are_named_by_the_session_start() {
        let key = |micros, by| PartitionKey::new(date_and_hour(micros, by).unwrap()).to_string();
        assert_eq!(key(0, PartitionBy::Hour), "date=1970-01-01/hour=00");
        assert_eq!(key(-1, PartitionBy::Hour), "date=1969-12-31/hour=23");
        assert_eq!(key(1_684_703_210_000_000, PartitionBy::Day), "date=2023-05-21");
    }
}
