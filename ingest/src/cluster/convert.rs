//! Converts the columns of the query to columns of samples: numbers, times and lists of the types of a dataset.
//! Null and non-finite values are refused.

use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, Float32Array, Int64Array, ListArray, RecordBatch};
use datafusion::arrow::buffer::{OffsetBuffer, ScalarBuffer};
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::datatypes::{
    DataType, Field, FieldRef, Float32Type, Int64Type, Schema as ArrowSchema,
};
use datafusion::arrow::row::{RowConverter, Rows, SortField};

use onefold_datasets::KeptColumn;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::columns::{cast, check_partition_values, column, required};
use super::counts::{ColumnCounts, ListCounts, NumberCounts, union};
use super::kept::KeptArray;
use crate::config::Config;
use crate::error::{Error, Result, arrow_bug};
use crate::ids::{IdForm, item_type, list_ids, scalar_ids, wrong_list_type, wrong_number_type};
use crate::problems::{Problems, WrongRows};
use crate::sessionize::TIME;
use crate::times::{TimeLimits, shown};

/// A batch of samples, column by column.
#[derive(Debug)]
pub(super) struct Converted {
    /// The columns that the sort and the sessions need, unchanged from the query.
    pub(super) keys: Vec<ArrayRef>,
    /// The columns that identify a session, without its time, as comparable bytes.
    pub(super) identity: Rows,
    /// The times in microseconds since 1970.
    pub(super) time: ScalarBuffer<i64>,
    pub(super) floats: Vec<ScalarBuffer<f32>>,
    pub(super) positions: Vec<ScalarBuffer<i64>>,
    pub(super) kept: Vec<KeptArray>,
    /// The columns that order samples with equal times, as comparable bytes, if there are any.
    order: Option<Rows>,
    lists: Vec<(OffsetBuffer<i32>, ScalarBuffer<i64>)>,
    /// Counts of all columns.
    pub(super) counts: ColumnCounts,
}

impl Converted {
    /// Returns list number `list` of a sample; empty if there is no such list column.
    pub(super) fn list(&self, list: usize, row: usize) -> &[i64] {
        let Some((offsets, ids)) = self.lists.get(list) else { return &[] };
        &ids[offsets[row] as usize..offsets[row + 1] as usize]
    }

    /// Assigns rows to `workers` workers by a hash of the session's identity, and returns the rows of each worker.
    pub(super) fn rows_by_worker(&self, workers: usize) -> Vec<Vec<u32>> {
        let mut rows = vec![Vec::with_capacity(self.time.len() / workers + 1); workers];
        for (row, identity) in (0..).zip(self.identity.iter()) {
            let hash = u128::from(xxh3_64(identity.as_ref()));
            rows[((hash * workers as u128) >> 64) as usize].push(row);
        }
        rows
    }

    /// Returns the bytes that order a sample among samples with the same time.
    pub(super) fn order_bytes(&self, row: usize) -> &[u8] {
        self.order.as_ref().map_or(&[], |order| order.row(row).data())
    }
}

/// The names of the columns of a query, by use.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct ColumnNames {
    /// Columns that are passed on unchanged.
    pub(super) keys: Vec<String>,
    /// Columns that identify a session.
    pub(super) identity: Vec<String>,
    /// Columns whose values name partitions.
    pub(super) partition: Vec<String>,
    /// Columns that order samples with equal times.
    pub(super) order: Vec<String>,
    pub(super) floats: Vec<String>,
    /// The one of the columns of floats that has the weights of samples, if one does.
    pub(super) weight: Option<String>,
    /// Columns of ids, and the form to which the ids are converted.
    pub(super) lists: Vec<(String, IdForm)>,
    pub(super) positions: Vec<String>,
    /// Columns that the dataset keeps in addition to the features.
    pub(super) kept: Vec<KeptColumn>,
    /// The column of the configuration from which times are made, for messages.
    pub(super) time: String,
    /// The range of allowed times, if it is checked here.
    pub(super) time_limits: Option<TimeLimits>,
    /// Collects values that a sample must not have. On another machine, the first such value is an error.
    #[serde(skip)]
    pub(super) problems: Problems,
}

/// Converts batches of one query.
#[derive(Debug)]
pub(super) struct Converter {
    names: ColumnNames,
    identity: RowConverter,
    order: Option<RowConverter>,
}

impl Converter {
    /// Creates a converter of batches with the columns of `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a column is missing, or if an identity or order column has a type that cannot be
    /// compared.
    pub(super) fn new(names: ColumnNames, schema: &ArrowSchema) -> Result<Self> {
        let rows = |columns: &[String]| -> Result<RowConverter> {
            let fields = columns.iter().map(|name| {
                let field = schema
                    .field_with_name(name)
                    .map_err(|_| Error::column(name, "it is missing", "add it to the query"))?;
                // The order of the engine's sort: ascending, nulls last.
                let options = SortOptions { descending: false, nulls_first: false };
                Ok(SortField::new_with_options(field.data_type().clone(), options))
            });
            RowConverter::new(fields.collect::<Result<_>>()?).map_err(arrow_bug)
        };
        let order = if names.order.is_empty() { None } else { Some(rows(&names.order)?) };
        Ok(Self { identity: rows(&names.identity)?, order, names })
    }

    /// Converts the samples of a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a null or non-finite value that is not allowed, or an id that does not fit into 64
    /// bits.
    pub(super) fn convert(&self, batch: &RecordBatch) -> Result<Converted> {
        let columns = |names: &[String]| -> Result<Vec<ArrayRef>> {
            names.iter().map(|name| column(batch, name).map(Arc::clone)).collect()
        };
        let ColumnNames { time, problems, .. } = &self.names;
        for name in &self.names.identity {
            required(batch, name, name, problems)?;
        }
        for name in &self.names.partition {
            check_partition_values(name, column(batch, name)?, problems)?;
        }
        let time = required(batch, TIME, time, problems)?.as_primitive::<Int64Type>();
        self.check_times(time)?;
        let time = time.values();
        let identity = self.identity.convert_columns(&columns(&self.names.identity)?).map_err(arrow_bug)?;
        let order = match &self.order {
            Some(rows) => Some(rows.convert_columns(&columns(&self.names.order)?).map_err(arrow_bug)?),
            None => None,
        };
        let mut counts = ColumnCounts { samples: time.len() as u64, ..ColumnCounts::default() };
        counts.times = time.iter().fold(None, |range, time| union(range, Some((*time, *time))));
        let mut floats = Vec::with_capacity(self.names.floats.len());
        for name in &self.names.floats {
            let column = float_column(name, column(batch, name)?, problems)?;
            let values = column.as_primitive::<Float32Type>().values();
            if self.names.weight.as_ref() == Some(name) {
                check_weights(name, values, problems)?;
            }
            counts.numbers.push(NumberCounts::of(values));
            floats.push(values.clone());
        }
        let mut lists = Vec::with_capacity(self.names.lists.len());
        for (name, form) in &self.names.lists {
            let column = column(batch, name)?;
            let list = list_column(name, column, form, problems);
            let list = problems.or(name, list, || ListArray::new_null(id_field(), column.len()))?;
            let (_, offsets, ids, _) = list.into_parts();
            counts.lists.push(ListCounts::of(column.logical_null_count(), &offsets));
            lists.push((offsets, ids.as_primitive::<Int64Type>().values().clone()));
        }
        let position = |name: &String| -> Result<_> {
            Ok(required(batch, name, name, problems)?.as_primitive::<Int64Type>().values().clone())
        };
        let positions = self.names.positions.iter().map(position);
        let kept = self.names.kept.iter().map(|kept| {
            let column = column(batch, &kept.name)?;
            let values = KeptArray::convert(kept, column);
            problems.or(&kept.name, values, || KeptArray::missing(kept, column.len()))
        });
        Ok(Converted {
            keys: columns(&self.names.keys)?,
            identity,
            time: time.clone(),
            floats,
            positions: positions.collect::<Result<_>>()?,
            kept: kept.collect::<Result<_>>()?,
            order,
            lists,
            counts,
        })
    }

    fn check_times(&self, times: &Int64Array) -> Result<()> {
        let Some(limits) = self.names.time_limits else { return Ok(()) };
        let place = format!("column `{}`", self.names.time);
        let refused = |side: &str, limit: i64, key: &str, policy: &str, is_outside: &dyn Fn(i64) -> bool| {
            let mut outside = times.iter().flatten().filter(|time| is_outside(*time));
            let Some(first) = outside.next() else { return Ok(()) };
            let what = format!("samples have a time {side} {}, the first {}", shown(limit), shown(first));
            let hint = format!(
                "check the unit of the time column and the clocks; if such times are right, allow them with \
                 `[checks].{key}`; or leave such rows out with `[checks]` and `{policy} = \"skip\"`"
            );
            let wrong = WrongRows { place: &place, kind: policy, what: &what, hint: &hint };
            self.names.problems.count(&wrong, "", 1 + outside.count() as u64)
        };
        let (first, last) = (limits.not_before, limits.not_after);
        refused("before", first, "not_before", "past", &|time| time < first)?;
        refused("in the future, after", last, "not_after", "future", &|time| time > last)
    }
}

/// Checks that every column of the query has a type that is allowed for its use.
///
/// # Errors
///
/// [`Error::Fault`] for columns with a wrong type. Each error names the type and has a hint.
pub(crate) fn check_types(config: &Config, columns: &ArrowSchema, problems: &Problems) -> Result<()> {
    let mut all_fit = true;
    for (name, kind) in config.feature_columns() {
        let Ok(field) = columns.field_with_name(name) else { continue };
        let data_type = field.data_type();
        let feature = config.schema.sparse_features().find(|feature| feature.name == name);
        let wrong = match feature {
            None => wrong_number_type(name, data_type),
            Some(feature) => wrong_list_type(kind, feature, name, data_type),
        };
        if let Some((message, hint)) = wrong {
            let message = format!("`[features]` makes it a {} of a column {message}", kind.described());
            problems.report(Error::column(name, message, hint))?;
            all_fit = false;
        }
    }
    // Values of a column with a wrong type cannot be read, so stop here.
    if all_fit { Ok(()) } else { problems.check() }
}

/// Converts a label, weight or dense feature to finite `f32` values.
fn float_column(name: &str, column: &ArrayRef, problems: &Problems) -> Result<ArrayRef> {
    let floats = cast(name, column, &DataType::Float32)?;
    let place = format!("column `{name}`");
    if floats.null_count() > 0 {
        let hint = format!("give a value in the query, as `COALESCE({name}, 0)`, or leave the rows out");
        let wrong = WrongRows { place: &place, kind: "null", what: "samples have no value", hint: &hint };
        problems.count(&wrong, "", floats.null_count() as u64)?;
    }
    let values = floats.as_primitive::<Float32Type>();
    let not_finite = values.values().iter().filter(|value| !value.is_finite()).count();
    if not_finite == 0 {
        return Ok(floats);
    }
    let what = "samples have a value that is not a finite 32-bit number";
    let hint = format!(
        "give another value in the query, as `CASE WHEN abs({name}) < 1e38 THEN {name} ELSE 0 END`, or leave the rows out"
    );
    let wrong = WrongRows { place: &place, kind: "not finite", what, hint: &hint };
    problems.count(&wrong, "", not_finite as u64)?;
    // The totals of the samples are JSON, which has finite numbers only.
    let finite: Float32Array = values.unary(|value| if value.is_finite() { value } else { 0.0 });
    Ok(Arc::new(finite))
}

/// Refuses negative weights of samples, with which the mean of a loss has no meaning.
fn check_weights(name: &str, weights: &[f32], problems: &Problems) -> Result<()> {
    let negative = weights.iter().filter(|weight| **weight < 0.0).count();
    if negative == 0 {
        return Ok(());
    }
    let place = format!("column `{name}`");
    let hint = format!("give another weight in the query, as `greatest({name}, 0)`, or leave the rows out");
    let wrong =
        WrongRows { place: &place, kind: "negative", what: "samples have a negative weight", hint: &hint };
    problems.count(&wrong, "", negative as u64)
}

fn id_field() -> FieldRef {
    Arc::new(Field::new("element", DataType::Int64, false))
}

/// Converts a sparse or sequence feature to lists of `i64` without nulls. A null list, or a null in a column of
/// single ids, becomes an empty list.
fn list_column(name: &str, column: &ArrayRef, form: &IdForm, problems: &Problems) -> Result<ListArray> {
    let item = id_field();
    if item_type(column.data_type()).is_none() {
        let ids = scalar_ids(name, column, form)?;
        let lengths = (0..ids.len()).map(|row| usize::from(ids.is_valid(row)));
        let offsets = OffsetBuffer::from_lengths(lengths);
        let present: ScalarBuffer<i64> = ids.iter().flatten().collect();
        return ListArray::try_new(item, offsets, Arc::new(Int64Array::new(present, None)), None)
            .map_err(arrow_bug);
    }
    // Null lists have length 0.
    let (_, offsets, ids, _) = list_ids(name, column, form)?.into_parts();
    if ids.null_count() > 0 {
        let place = format!("column `{name}`");
        let hint = format!("remove them in the query: `array_compact({name})`");
        let wrong =
            WrongRows { place: &place, kind: "null", what: "items of its lists are null", hint: &hint };
        problems.count(&wrong, "", ids.null_count() as u64)?;
    }
    let ids = Int64Array::new(ids.as_primitive::<Int64Type>().values().clone(), None);
    ListArray::try_new(item, offsets, Arc::new(ids), None).map_err(arrow_bug)
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{Float64Array, LargeListArray, UInt64Array};
    use datafusion::arrow::datatypes::Int32Type;
    use onefold_datasets::KeptKind;

    use super::*;

    fn ids(lists: &ListArray) -> Vec<Vec<i64>> {
        lists.iter().map(|list| list.unwrap().as_primitive::<Int64Type>().values().to_vec()).collect()
    }

    fn integers(name: &str, column: &ArrayRef) -> Result<ListArray> {
        list_column(name, column, &IdForm::Integers, &Problems::default())
    }

    #[test]
    fn scalars_and_missing_lists_become_lists() {
        let scalar: ArrayRef = Arc::new(Int64Array::from(vec![Some(7), None, Some(9)]));
        assert_eq!(ids(&integers("x", &scalar).unwrap()), [vec![7], vec![], vec![9]]);
        let lists = LargeListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), Some(2)]),
            None,
            Some(vec![]),
        ]);
        let lists: ArrayRef = Arc::new(lists);
        assert_eq!(ids(&integers("x", &lists).unwrap()), [vec![1, 2], vec![], vec![]]);
        assert_eq!(ids(&integers("x", &lists.slice(1, 2)).unwrap()), [vec![], vec![]] as [Vec<i64>; 2]);
    }

    #[test]
    fn items_behind_a_null_list_do_not_belong_to_it() {
        let field = Arc::new(Field::new("item", DataType::UInt64, true));
        let items: ArrayRef = Arc::new(UInt64Array::from(vec![Some(1), Some(u64::MAX), None, Some(4)]));
        let nulls = Some(vec![true, false, true].into());
        let lists = ListArray::new(field, OffsetBuffer::from_lengths([1, 2, 1]), items, nulls);
        let lists: ArrayRef = Arc::new(lists);
        assert_eq!(ids(&integers("x", &lists).unwrap()), [vec![1], vec![], vec![4]]);
    }

    #[test]
    fn wrong_values_of_all_columns_are_found_together() {
        let huge: ArrayRef = Arc::new(UInt64Array::from(vec![u64::MAX]));
        let times: ArrayRef = Arc::new(Int64Array::from(vec![0]));
        let columns = [(TIME, &times), ("a", &huge), ("b", &huge), ("c", &huge)];
        let rows = columns.map(|(name, column)| (name, Arc::clone(column)));
        let rows = RecordBatch::try_from_iter(rows).unwrap();
        let problems = Problems::collected();
        let names = ColumnNames {
            identity: vec![TIME.to_owned()],
            lists: ["a", "b"].map(|name| (name.to_owned(), IdForm::Integers)).to_vec(),
            kept: vec![KeptColumn { name: "c".to_owned(), kind: KeptKind::Integer }],
            problems: problems.clone(),
            ..ColumnNames::default()
        };
        let converter = Converter::new(names, &rows.schema()).unwrap();
        for _ in 0..2 {
            converter.convert(&rows).unwrap();
        }
        let found = problems.check().unwrap_err().to_string();
        for part in
            ["there are 3 problems", "column `a`: the id", "column `b`: the id", "column `c`: `keep` has it"]
        {
            assert!(found.contains(part), "{found}");
        }
    }

    #[test]
    fn values_that_no_sample_can_have_are_refused() {
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), None])]);
        let error = integers("history", &(Arc::new(lists) as ArrayRef)).unwrap_err().to_string();
        assert!(error.contains("column `history`: 1 items of its lists are null"), "{error}");
        assert!(error.contains("`array_compact(history)`"), "{error}");
        let huge: ArrayRef = Arc::new(UInt64Array::from(vec![1, u64::MAX]));
        let error = integers("x", &huge).unwrap_err().to_string();
        assert!(error.contains("the id 18446744073709551615 does not fit into 63 bits\n  hint: "), "{error}");
        assert!(
            error.contains("`ids = \"hash\"`") && error.contains("`vocabulary = \"frequency\"`"),
            "{error}"
        );
        let wild: ArrayRef = Arc::new(Float64Array::from(vec![1.0, f64::NAN, 1e300]));
        let strict = Problems::default();
        assert!(
            float_column("age", &wild, &strict).unwrap_err().to_string().contains("2 samples have a value")
        );
        let error = check_weights("importance", &[1.0, -0.5, 0.0], &strict).unwrap_err().to_string();
        assert!(error.contains("`importance`: 1 samples have a negative weight"), "{error}");
        check_weights("importance", &[0.0, 2.5], &strict).unwrap();
        let missing: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), None]));
        let error = float_column("age", &missing, &strict).unwrap_err().to_string();
        assert!(error.contains("COALESCE(age, 0)"), "{error}");
        let collected = Problems::collected();
        float_column("age", &missing, &collected).unwrap();
        let finite = float_column("age", &wild, &collected).unwrap();
        assert_eq!(finite.as_primitive::<Float32Type>().values(), &[1.0, 0.0, 0.0]);
        let all = collected.check().unwrap_err().to_string();
        assert!(all.contains("1 samples have no value") && all.contains("2 samples have a value"), "{all}");
    }
}
