//! Columns of the query, made the columns of samples: numbers, times and lists of the types that a dataset has, and
//! null and non-finite values refused.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray,
};
use datafusion::arrow::buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use datafusion::arrow::compute::{CastOptions, SortOptions, cast_with_options};
use datafusion::arrow::datatypes::{DataType, Field, Float32Type, Int64Type, Schema as ArrowSchema};
use datafusion::arrow::error::ArrowError;
use datafusion::arrow::row::{RowConverter, Rows, SortField};

use xxhash_rust::xxh3::xxh3_64;

use crate::sessionize::TIME;
use crate::{Config, Error, FeatureKind, Result};

/// Some samples, column by column.
#[derive(Debug)]
pub(super) struct Converted {
    /// The columns that the sort and the sessions need, as the query gives them.
    pub(super) keys: Vec<ArrayRef>,
    /// What identifies a session, apart from its time, as comparable bytes.
    pub(super) identity: Rows,
    /// A hash of the identity.
    pub(super) hashes: Vec<u64>,
    /// Microseconds since 1970.
    pub(super) time: ScalarBuffer<i64>,
    pub(super) floats: Vec<ScalarBuffer<f32>>,
    pub(super) positions: Vec<ScalarBuffer<i64>>,
    /// What orders samples of one time, if anything does.
    order: Option<Rows>,
    lists: Vec<(OffsetBuffer<i32>, ScalarBuffer<i64>)>,
}

impl Converted {
    /// List number `list` of a sample.
    pub(super) fn list(&self, list: usize, row: usize) -> &[i64] {
        let (offsets, ids) = &self.lists[list];
        &ids[offsets[row] as usize..offsets[row + 1] as usize]
    }

    /// What orders a sample among those of its time.
    pub(super) fn order_bytes(&self, row: usize) -> &[u8] {
        self.order.as_ref().map_or(&[], |order| order.row(row).data())
    }
}

/// Which columns of a query are what.
#[derive(Debug, Clone, Default)]
pub(super) struct ColumnNames {
    /// Columns that are passed on as they are.
    pub(super) keys: Vec<String>,
    /// Columns that identify a session.
    pub(super) identity: Vec<String>,
    /// Columns that order samples of one time.
    pub(super) order: Vec<String>,
    pub(super) floats: Vec<String>,
    pub(super) lists: Vec<String>,
    pub(super) positions: Vec<String>,
    /// The last time that samples may have, in microseconds since 1970, if that is checked here.
    pub(super) not_after: Option<i64>,
}

/// Converts batches of one query.
#[derive(Debug)]
pub(super) struct Converter {
    names: ColumnNames,
    identity: RowConverter,
    order: Option<RowConverter>,
}

impl Converter {
    /// A converter for batches with the columns of `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Column`] if a column is missing, or one that is compared cannot be.
    pub(super) fn new(names: ColumnNames, schema: &ArrowSchema) -> Result<Self> {
        let rows = |columns: &[String]| -> Result<RowConverter> {
            let fields = columns.iter().map(|name| {
                let field = schema
                    .field_with_name(name)
                    .map_err(|_| column_error(name, "it is missing", "add it to the query"))?;
                // As SQL orders them, which the sort will do: ascending, nulls last.
                let options = SortOptions { descending: false, nulls_first: false };
                Ok(SortField::new_with_options(field.data_type().clone(), options))
            });
            RowConverter::new(fields.collect::<Result<_>>()?).map_err(engine)
        };
        let order = if names.order.is_empty() { None } else { Some(rows(&names.order)?) };
        Ok(Self { identity: rows(&names.identity)?, order, names })
    }

    /// Converts the samples of a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Column`] for a null or non-finite value where none may be, or an id beyond 64 bits.
    pub(super) fn convert(&self, batch: &RecordBatch) -> Result<Converted> {
        let columns = |names: &[String]| -> Result<Vec<ArrayRef>> {
            names.iter().map(|name| column(batch, name).map(Arc::clone)).collect()
        };
        for name in &self.names.identity {
            required(batch, name, name)?;
        }
        let time = required(batch, TIME, "time")?.as_primitive::<Int64Type>().values();
        self.check_times(time)?;
        let identity = self.identity.convert_columns(&columns(&self.names.identity)?).map_err(engine)?;
        let order = match &self.order {
            Some(rows) => Some(rows.convert_columns(&columns(&self.names.order)?).map_err(engine)?),
            None => None,
        };
        let floats = self.names.floats.iter().map(|name| {
            let floats = float_column(name, column(batch, name)?)?;
            Ok(floats.as_primitive::<Float32Type>().values().clone())
        });
        let lists = self.names.lists.iter().map(|name| {
            let lists = list_column(name, column(batch, name)?)?;
            Ok((lists.offsets().clone(), lists.values().as_primitive::<Int64Type>().values().clone()))
        });
        let positions = self
            .names
            .positions
            .iter()
            .map(|name| Ok(required(batch, name, name)?.as_primitive::<Int64Type>().values().clone()));
        Ok(Converted {
            keys: columns(&self.names.keys)?,
            hashes: identity.iter().map(|row| xxh3_64(row.as_ref())).collect(),
            identity,
            time: time.clone(),
            floats: floats.collect::<Result<_>>()?,
            positions: positions.collect::<Result<_>>()?,
            order,
            lists: lists.collect::<Result<_>>()?,
        })
    }

    fn check_times(&self, times: &[i64]) -> Result<()> {
        let Some(last) = self.names.not_after else { return Ok(()) };
        let late = times.iter().filter(|time| **time > last).count();
        let Some(first) = times.iter().find(|time| **time > last) else { return Ok(()) };
        let shown = TimestampMicrosecondArray::from(vec![*first]).value_as_datetime(0);
        let shown = shown.map_or_else(|| format!("{first} µs"), |time| time.to_string());
        let message =
            format!("{late} of {} samples have a time in the future, the first {shown}", times.len());
        let hint = "check the unit of the time column (microseconds since 1970) and the clocks; set `[checks].not_after`, or \
                    skip such rows with `[checks]` and `future = \"skip\"`";
        Err(column_error("time", &message, hint))
    }
}

/// Checks that every column of the query has a type that its kind allows.
///
/// # Errors
///
/// [`Error::Column`] for the first one that has not.
pub(crate) fn check_types(config: &Config, columns: &ArrowSchema) -> Result<()> {
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

pub(super) fn column<'b>(rows: &'b RecordBatch, name: &str) -> Result<&'b ArrayRef> {
    rows.column_by_name(name).ok_or_else(|| column_error(name, "it is missing", "add it to the query"))
}

/// A column that may not be null; `shown` is what the configuration calls it.
pub(super) fn required<'b>(rows: &'b RecordBatch, name: &str, shown: &str) -> Result<&'b ArrayRef> {
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
fn list_column(name: &str, column: &ArrayRef) -> Result<ListArray> {
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
        return lists.map_err(engine);
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
    ListArray::try_new(item, OffsetBuffer::from_lengths(lengths), Arc::new(ids), None).map_err(engine)
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
pub(super) fn cast(name: &str, column: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(column, to, &options).map_err(|error| {
        let message = format!("a value does not fit {to}: {error}");
        column_error(name, &message, "convert the column in the query with `CAST`")
    })
}

pub(super) fn column_error(column: &str, message: &str, hint: &str) -> Error {
    Error::Column { column: column.to_owned(), message: message.to_owned(), hint: hint.to_owned() }
}

/// An Arrow error on columns that were just made to fit: ours, not the user's.
pub(super) fn engine(error: ArrowError) -> Error {
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

    fn ids(lists: &ListArray) -> Vec<Vec<i64>> {
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
}
