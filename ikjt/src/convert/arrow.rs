//! Batches to Arrow record batches and back.
//!
//! | column | type | what |
//! |---|---|---|
//! | a feature's name | `ListView<Int64>` | the lists of a group without an inverse index |
//! | a feature's name | `Dictionary<Int32, ListView<Int64>>` | the distinct rows of a group; its keys are the inverse index |
//! | name + `.weights` | the same of `Float32` | a feature's weights, with the feature's offsets, sizes and keys |
//! | `dense`, `labels` | `FixedSizeList<Float32>[D]` | absent if D, or the number of samples, is 0 |
//! | `weights` | `Float32` | sample weights, if there are any |
//! | `timestamps` | `Timestamp(µs, "UTC")` | sample times, if there are any |
//! | a kept column's name | `Int64` or `Utf8`, nullable | its values |
//!
//! A feature's field names its group in its metadata, and that of a kept column says so there. No buffer is copied in either direction, the inverse index of
//! a group is one buffer in all its columns, and rows that overlap go on overlapping: list views may.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, DictionaryArray, FixedSizeListArray, Float32Array, GenericListArray,
    GenericListViewArray, Int32Array, Int64Array, ListViewArray, OffsetSizeTrait, RecordBatch,
    RecordBatchOptions, TimestampMicrosecondArray,
};
use arrow::buffer::ScalarBuffer;
use arrow::datatypes::{
    DataType, Field, FieldRef, Float32Type, Int32Type, Int64Type, Schema, TimeUnit, TimestampMicrosecondType,
};
use arrow::error::ArrowError;

use crate::{Batch, BatchParts, Error, Feature, Group, KeptValues, Result};

/// The key under which the metadata of a feature's field name its group.
pub const GROUP_KEY: &str = "onefold.group";
/// The key in the metadata of a kept column's field.
pub const KEPT_KEY: &str = "onefold.kept";
const DENSE: &str = "dense";
const LABELS: &str = "labels";
/// The column of sample weights.
pub(crate) const WEIGHTS: &str = "weights";
const TIMESTAMPS: &str = "timestamps";
/// What follows a feature's name in the name of the column of its weights.
pub(crate) const WEIGHTS_SUFFIX: &str = ".weights";

impl Batch {
    /// The batch as a record batch of one row per sample, without a copy of any buffer.
    ///
    /// Features are columns of `ListView<Int64>`, or `Dictionary<Int32, ListView<Int64>>` where the group has an
    /// inverse index, and name their group in the field's metadata under [`GROUP_KEY`]; weights follow in a column
    /// `<name>.weights` of `Float32`. `dense` and `labels` are fixed-size lists of `Float32`, `weights` are `Float32`
    /// and `timestamps` are `Timestamp(Microsecond, "UTC")`; kept columns are as they are, with [`KEPT_KEY`] in their
    /// fields' metadata. What a batch does not have is left out.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if two columns would have the same name.
    pub fn to_record_batch(&self) -> Result<RecordBatch> {
        let mut columns = Columns::default();
        for (name, matrix, width) in
            [(DENSE, self.dense(), self.dense_width()), (LABELS, self.labels(), self.label_width())]
        {
            if width > 0 {
                columns.push(name, matrix_column(name, matrix, width)?, None)?;
            }
        }
        if let Some(weights) = self.weights() {
            columns.push(WEIGHTS, Arc::new(Float32Array::new(weights.clone(), None)), None)?;
        }
        if let Some(timestamps) = self.timestamps() {
            let timestamps = TimestampMicrosecondArray::new(timestamps.clone(), None).with_timezone("UTC");
            columns.push(TIMESTAMPS, Arc::new(timestamps), None)?;
        }
        for column in self.kept() {
            columns.push_kept(column)?;
        }
        for group in self.groups() {
            for feature in group.features() {
                let ids = Arc::new(Int64Array::new(feature.values().clone(), None));
                columns.push(feature.name(), list_column(group, feature, ids)?, Some(group.name()))?;
                if let Some(weights) = feature.weights() {
                    let name = format!("{}{WEIGHTS_SUFFIX}", feature.name());
                    let weights = Arc::new(Float32Array::new(weights.clone(), None));
                    columns.push(&name, list_column(group, feature, weights)?, Some(group.name()))?;
                }
            }
        }
        columns.finish(self.size())
    }

    /// The batch that a record batch holds, without a copy where the columns are as
    /// [`to_record_batch`](Self::to_record_batch) writes them.
    ///
    /// Record batches of other origin are read too: lists may be `List`, `LargeList` or `LargeListView`, whose offsets
    /// are converted, also within dictionaries; a feature without [`GROUP_KEY`] is a group of its own; `labels`
    /// may be one column of `Float32`. Features of one group must have equal keys, not the same buffer. A column with
    /// [`KEPT_KEY`] in its metadata is a kept one.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`], which names the column, for a null, a type that is none of these, two columns of one
    /// name, keys that differ within a group or are no row, offsets and sizes that leave the values or do not
    /// fit 32 bits, and weights whose lists differ from the feature's.
    pub fn from_record_batch(rows: &RecordBatch) -> Result<Self> {
        let mut parts = BatchParts {
            size: rows.num_rows(),
            dense: vec![].into(),
            labels: vec![].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: vec![],
        };
        let mut features = Features::default();
        let mut names = HashSet::new();
        for (field, column) in rows.schema_ref().fields().iter().zip(rows.columns()) {
            if !names.insert(field.name()) {
                return Err(wrong(field.name(), "the name is used twice"));
            }
            if field.metadata().contains_key(KEPT_KEY) {
                parts.kept.push(KeptValues::new(field.name().as_str(), Arc::clone(column)));
                continue;
            }
            if column.null_count() > 0 {
                return Err(null(field.name(), column));
            }
            match (field.name().as_str(), column.data_type()) {
                (DENSE, DataType::FixedSizeList(..)) => parts.dense = matrix(field, column)?,
                (LABELS, DataType::FixedSizeList(..)) => parts.labels = matrix(field, column)?,
                (LABELS, DataType::Float32) => {
                    parts.labels = column.as_primitive::<Float32Type>().values().clone();
                }
                (WEIGHTS, DataType::Float32) => {
                    parts.weights = Some(column.as_primitive::<Float32Type>().values().clone());
                }
                (TIMESTAMPS, DataType::Timestamp(TimeUnit::Microsecond, _)) => {
                    let times = column.as_primitive::<TimestampMicrosecondType>().values().clone();
                    parts.timestamps = Some(times);
                }
                _ => features.push(field, column)?,
            }
        }
        parts.groups = features.finish()?;
        Self::try_new(parts)
    }
}

fn wrong(column: &str, message: impl std::fmt::Display) -> Error {
    Error::invariant(format!("column `{column}`"), message)
}

/// What Arrow itself refuses; it cannot refuse what has our invariants.
fn refused(column: &str) -> impl Fn(ArrowError) -> Error {
    move |error| wrong(column, error.to_string())
}

fn null(column: &str, array: &dyn Array) -> Error {
    let place = (0..array.len()).find(|&i| array.is_null(i)).unwrap_or(0);
    wrong(column, format!("entry {place} is null\n  hint: a missing list is an empty list, not a null"))
}

/// Columns of a record batch to be.
#[derive(Default)]
struct Columns {
    fields: Vec<Field>,
    arrays: Vec<ArrayRef>,
    names: HashSet<String>,
}

impl Columns {
    fn push(&mut self, name: &str, array: ArrayRef, group: Option<&str>) -> Result<()> {
        if !self.names.insert(name.to_owned()) {
            return Err(wrong(name, "the name is used twice"));
        }
        let metadata = group.map(|group| (GROUP_KEY.to_owned(), group.to_owned()));
        let field = Field::new(name, array.data_type().clone(), false);
        self.fields.push(field.with_metadata(metadata.into_iter().collect()));
        self.arrays.push(array);
        Ok(())
    }

    fn push_kept(&mut self, column: &KeptValues) -> Result<()> {
        if !self.names.insert(column.name.to_string()) {
            return Err(wrong(&column.name, "the name is used twice"));
        }
        let metadata = HashMap::from([(KEPT_KEY.to_owned(), String::new())]);
        let field = Field::new(&*column.name, column.values.data_type().clone(), true);
        self.fields.push(field.with_metadata(metadata));
        self.arrays.push(Arc::clone(&column.values));
        Ok(())
    }

    fn finish(self, rows: usize) -> Result<RecordBatch> {
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(Arc::new(Schema::new(self.fields)), self.arrays, &options)
            .map_err(|error| Error::invariant("record batch", error.to_string()))
    }
}

fn item(data_type: DataType) -> FieldRef {
    Arc::new(Field::new("item", data_type, false))
}

fn matrix_column(name: &str, matrix: &ScalarBuffer<f32>, width: usize) -> Result<ArrayRef> {
    let width = i32::try_from(width).map_err(|_| wrong(name, format!("{width} values a sample")))?;
    let values = Arc::new(Float32Array::new(matrix.clone(), None));
    let lists = FixedSizeListArray::try_new(item(DataType::Float32), width, values, None);
    Ok(Arc::new(lists.map_err(refused(name))?))
}

/// The rows of a feature with these items, under the inverse index of its group.
fn list_column(group: &Group, feature: &Feature, items: ArrayRef) -> Result<ArrayRef> {
    let (offsets, sizes) = (feature.offsets().clone(), feature.sizes().clone());
    let lists = ListViewArray::try_new(item(items.data_type().clone()), offsets, sizes, items, None);
    let lists = Arc::new(lists.map_err(refused(feature.name()))?);
    let Some(inverse) = group.inverse() else { return Ok(lists) };
    let keys = Int32Array::new(inverse.clone(), None);
    let dictionary = DictionaryArray::<Int32Type>::try_new(keys, lists);
    Ok(Arc::new(dictionary.map_err(refused(feature.name()))?))
}

fn matrix(field: &Field, column: &ArrayRef) -> Result<ScalarBuffer<f32>> {
    let values = column.as_fixed_size_list().values();
    if values.null_count() > 0 {
        return Err(null(field.name(), values));
    }
    match values.as_primitive_opt::<Float32Type>() {
        Some(values) => Ok(values.values().clone()),
        None => Err(wrong(field.name(), format!("lists of {}, expected Float32", values.data_type()))),
    }
}

/// A column of lists, whichever type it has.
struct Lists {
    inverse: Option<ScalarBuffer<i32>>,
    offsets: ScalarBuffer<i32>,
    sizes: ScalarBuffer<i32>,
    items: ArrayRef,
}

impl Lists {
    fn try_new(name: &str, column: &ArrayRef) -> Result<Self> {
        let (inverse, lists) = match column.as_dictionary_opt::<Int32Type>() {
            None => (None, column),
            Some(dictionary) => (Some(dictionary.keys().values().clone()), dictionary.values()),
        };
        if lists.null_count() > 0 {
            return Err(null(name, lists));
        }
        let (offsets, sizes, items) = match lists.data_type() {
            DataType::ListView(_) => {
                let lists = lists.as_list_view::<i32>();
                (lists.offsets().clone(), lists.sizes().clone(), lists.values())
            }
            DataType::LargeListView(_) => large_view(name, lists.as_list_view::<i64>())?,
            DataType::List(_) => one_after_the_other(name, lists.as_list::<i32>())?,
            DataType::LargeList(_) => one_after_the_other(name, lists.as_list::<i64>())?,
            other => {
                let message = format!(
                    "its type is {other}, expected lists of Int64\n  hint: `dense` and `labels` are fixed-size lists \
                     of Float32, `weights` Float32, `timestamps` Timestamp(µs)"
                );
                return Err(wrong(name, message));
            }
        };
        if items.null_count() > 0 {
            return Err(null(name, items));
        }
        Ok(Self { inverse, offsets, sizes, items: Arc::clone(items) })
    }

    /// Whether two columns have the same lists, but for the items.
    fn is_parallel(&self, other: &Self) -> bool {
        self.offsets == other.offsets
            && self.sizes == other.sizes
            && same_inverse(self.inverse.as_ref(), other.inverse.as_ref())
    }
}

/// Offsets, sizes and items of lists.
type Parts<'a> = (ScalarBuffer<i32>, ScalarBuffer<i32>, &'a ArrayRef);

/// An offset or size as 32 bits.
fn small<O: OffsetSizeTrait>(name: &str, row: usize, number: O) -> Result<i32> {
    let number = number.to_i64().unwrap_or(i64::MAX);
    i32::try_from(number).map_err(|_| {
        wrong(name, format!("list {row} has offset or size {number}, which 32 bits cannot hold"))
    })
}

fn large_view<'a>(name: &str, lists: &'a GenericListViewArray<i64>) -> Result<Parts<'a>> {
    let convert = |numbers: &[i64]| -> Result<Vec<i32>> {
        numbers.iter().enumerate().map(|(row, &number)| small(name, row, number)).collect()
    };
    Ok((convert(lists.offsets())?.into(), convert(lists.sizes())?.into(), lists.values()))
}

fn one_after_the_other<'a, O: OffsetSizeTrait>(
    name: &str,
    lists: &'a GenericListArray<O>,
) -> Result<Parts<'a>> {
    let ends = lists.offsets().iter().enumerate().map(|(row, &end)| small(name, row, end));
    let ends: ScalarBuffer<i32> = ends.collect::<Result<Vec<_>>>()?.into();
    let sizes: ScalarBuffer<i32> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
    Ok((ends.slice(0, sizes.len()), sizes, lists.values()))
}

fn same_inverse(a: Option<&ScalarBuffer<i32>>, b: Option<&ScalarBuffer<i32>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => a.ptr_eq(b) || a == b,
        _ => false,
    }
}

/// The list columns of a record batch.
#[derive(Default)]
struct Features {
    /// In the order of the columns: name, group, lists.
    ids: Vec<(String, String, Lists)>,
    /// By feature name.
    weights: HashMap<String, Lists>,
}

impl Features {
    fn push(&mut self, field: &Field, column: &ArrayRef) -> Result<()> {
        let name = field.name();
        let lists = Lists::try_new(name, column)?;
        match (lists.items.data_type(), name.strip_suffix(WEIGHTS_SUFFIX)) {
            (DataType::Int64, _) => {
                let group = field.metadata().get(GROUP_KEY).unwrap_or(name).clone();
                self.ids.push((name.clone(), group, lists));
            }
            (DataType::Float32, Some(feature)) => {
                self.weights.insert(feature.to_owned(), lists);
            }
            (other, _) => {
                let message =
                    format!("lists of {other}, expected Int64 for ids or, in `<name>.weights`, Float32");
                return Err(wrong(name, message));
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<Group>> {
        let mut groups: Vec<(String, Option<ScalarBuffer<i32>>, Vec<Feature>)> = Vec::new();
        for (name, group, lists) in self.ids {
            let weights = self.weights.remove(&name);
            if let Some(weights) = &weights
                && !weights.is_parallel(&lists)
            {
                return Err(wrong(
                    &format!("{name}{WEIGHTS_SUFFIX}"),
                    format!("its lists are not where `{name}` has them"),
                ));
            }
            let weights = weights.map(|weights| weights.items.as_primitive::<Float32Type>().values().clone());
            let ids = lists.items.as_primitive::<Int64Type>().values().clone();
            let feature = Feature::try_new(name.as_str(), ids, weights, lists.offsets, lists.sizes)?;
            match groups.iter_mut().find(|(known, ..)| *known == group) {
                None => groups.push((group, lists.inverse, vec![feature])),
                Some((_, inverse, features)) if same_inverse(inverse.as_ref(), lists.inverse.as_ref()) => {
                    features.push(feature);
                }
                Some((group, _, features)) => {
                    let first = features[0].name();
                    let message =
                        format!("its keys differ from those of `{first}`, which is in group `{group}` too");
                    return Err(wrong(&name, message));
                }
            }
        }
        if let Some(name) = self.weights.keys().min() {
            let message = format!("there is no feature `{name}` that these could be the weights of");
            return Err(wrong(&format!("{name}{WEIGHTS_SUFFIX}"), message));
        }
        groups.into_iter().map(|(name, inverse, features)| Group::try_new(name, inverse, features)).collect()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{LargeListArray, ListArray};
    use arrow::buffer::{NullBuffer, OffsetBuffer};
    use arrow::compute::{cast, concat_batches};
    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::{batches, samples};

    proptest! {
        #[test]
        fn a_batch_comes_back_as_it_went_without_a_copy(batch in batches()) {
            let rows = batch.to_record_batch().unwrap();
            prop_assert_eq!(rows.num_rows(), batch.size());
            let back = Batch::from_record_batch(&rows).unwrap();
            prop_assert_eq!(&back, &batch);
            prop_assert_eq!(back.dense().as_ptr(), batch.dense().as_ptr());
            for (back, group) in back.groups().iter().zip(batch.groups()) {
                prop_assert_eq!(back.inverse().map(|i| i.as_ptr()), group.inverse().map(|i| i.as_ptr()));
                for (back, feature) in back.features().iter().zip(group.features()) {
                    prop_assert_eq!(back.values().as_ptr(), feature.values().as_ptr());
                    prop_assert_eq!(back.offsets().as_ptr(), feature.offsets().as_ptr());
                    prop_assert_eq!(back.sizes().as_ptr(), feature.sizes().as_ptr());
                    prop_assert_eq!(back.weights().map(|w| w.as_ptr()), feature.weights().map(|w| w.as_ptr()));
                }
            }
        }

        #[test]
        fn slices_of_record_batches_are_slices_of_batches(batch in batches(), ends in any::<(usize, usize)>()) {
            let (a, b) = (ends.0 % (batch.size() + 1), ends.1 % (batch.size() + 1));
            let (a, b) = (a.min(b), a.max(b));
            prop_assume!(a < b);
            let rows = batch.to_record_batch().unwrap().slice(a, b - a);
            prop_assert_eq!(samples(&Batch::from_record_batch(&rows).unwrap()), samples(&batch.slice(a..b)));
        }

        #[test]
        fn what_arrow_reads_in_the_columns_is_what_samples_have(batch in batches()) {
            // Arrow expands dictionaries and copies list views by its own code.
            let rows = batch.to_record_batch().unwrap();
            for group in batch.groups() {
                for feature in group.features() {
                    let column = rows.column_by_name(feature.name()).unwrap();
                    let plain = match column.as_any_dictionary_opt() {
                        None => Arc::clone(column),
                        Some(dictionary) => arrow::compute::take(dictionary.values(), dictionary.keys(), None).unwrap(),
                    };
                    for i in 0..batch.size() {
                        let list = plain.as_list_view::<i32>().value(i);
                        prop_assert_eq!(&list.as_primitive::<Int64Type>().values()[..], feature.row(group.row_of(i)));
                    }
                }
            }
        }
    }

    fn rows(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
            .unwrap()
    }

    fn refusal(columns: Vec<(&str, ArrayRef)>) -> String {
        Batch::from_record_batch(&rows(columns)).unwrap_err().to_string()
    }

    fn lists() -> ListArray {
        ListArray::from_iter_primitive::<Int64Type, _, _>(
            [vec![1], vec![2, 3], vec![]].map(|row| Some(row.into_iter().map(Some))),
        )
    }

    fn dictionary(keys: Vec<i32>, lists: ArrayRef) -> ArrayRef {
        Arc::new(DictionaryArray::<Int32Type>::try_new(keys.into(), lists).unwrap())
    }

    #[test]
    fn lists_of_every_type_are_read() {
        let list: ArrayRef = Arc::new(lists());
        let large = cast(&list, &DataType::LargeList(item(DataType::Int64))).unwrap();
        let large_view = cast(&list, &DataType::LargeListView(item(DataType::Int64))).unwrap();
        let view = cast(&list, &DataType::ListView(item(DataType::Int64))).unwrap();
        let keyed = dictionary(
            vec![2, 0, 1],
            Arc::new(LargeListArray::new(
                item(DataType::Int64),
                OffsetBuffer::new(vec![0_i64, 2, 2, 3].into()),
                Arc::new(Int64Array::from(vec![2, 3, 1])),
                None,
            )),
        );
        let labels: ArrayRef = Arc::new(Float32Array::from(vec![1.0, 0.0, 1.0]));
        let columns =
            vec![("a", list), ("b", large), ("c", large_view), ("d", view), ("e", keyed), ("labels", labels)];
        let batch = Batch::from_record_batch(&rows(columns)).unwrap();
        assert_eq!((batch.size(), batch.label_width(), batch.groups().len()), (3, 1, 5));
        for group in batch.expand().groups() {
            assert_eq!(
                group.features()[0],
                Feature::from_rows(group.name(), &[vec![1], vec![2, 3], vec![]]).unwrap()
            );
        }
    }

    #[test]
    fn dictionaries_of_one_group_need_equal_keys_only() {
        let in_group = |name: &str, array: &ArrayRef| {
            let metadata = HashMap::from([(GROUP_KEY.to_owned(), "user".to_owned())]);
            Field::new(name, array.data_type().clone(), true).with_metadata(metadata)
        };
        let read = |keys: Vec<i32>| {
            let (a, b) = (dictionary(vec![0, 0, 1], Arc::new(lists())), dictionary(keys, Arc::new(lists())));
            let schema = Schema::new(vec![in_group("a", &a), in_group("b", &b)]);
            Batch::from_record_batch(&RecordBatch::try_new(Arc::new(schema), vec![a, b]).unwrap())
        };
        assert_eq!(read(vec![0, 0, 1]).unwrap().groups().len(), 1);
        assert_eq!(
            read(vec![0, 1, 1]).unwrap_err().to_string(),
            "column `b`: its keys differ from those of `a`, which is in group `user` too"
        );
    }

    #[test]
    fn nulls_are_refused_wherever_they_are() {
        let list = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1)]), None]);
        assert_eq!(
            refusal(vec![("x", Arc::new(list.clone()))]),
            "column `x`: entry 1 is null\n  hint: a missing list is an empty list, not a null"
        );
        assert!(refusal(vec![("x", dictionary(vec![0], Arc::new(list)))]).contains("entry 1 is null"));
        let id = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), None])]);
        assert!(refusal(vec![("x", Arc::new(id))]).contains("entry 1 is null"));
        let keys = Int32Array::from(vec![Some(0), None]);
        let keyed = DictionaryArray::<Int32Type>::try_new(keys, Arc::new(lists())).unwrap();
        assert!(refusal(vec![("x", Arc::new(keyed))]).contains("entry 1 is null"));
        let weights = Float32Array::new(vec![1.0, 2.0].into(), Some(NullBuffer::from(vec![true, false])));
        assert!(refusal(vec![("weights", Arc::new(weights))]).contains("entry 1 is null"));
    }

    #[test]
    fn what_is_no_batch_is_refused() {
        let text: ArrayRef = Arc::new(arrow::array::StringArray::from(vec!["a"]));
        assert!(
            refusal(vec![("x", Arc::clone(&text))])
                .starts_with("column `x`: its type is Utf8, expected lists")
        );
        assert!(refusal(vec![("dense", text)]).starts_with("column `dense`: its type is Utf8"));
        let short = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1)])]);
        assert!(
            refusal(vec![("x", Arc::new(short))]).starts_with("column `x`: lists of Int32, expected Int64")
        );
        let floats = |rows: Vec<Vec<f32>>| -> ArrayRef {
            Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(
                rows.into_iter().map(|row| Some(row.into_iter().map(Some))),
            ))
        };
        assert!(refusal(vec![("x.weights", floats(vec![vec![1.0]]))]).contains("no feature `x`"));
        let uneven = vec![("x", Arc::new(lists()) as ArrayRef), ("x.weights", floats(vec![vec![1.0]; 3]))];
        assert_eq!(refusal(uneven), "column `x.weights`: its lists are not where `x` has them");
        let view = |offsets: Vec<i32>, items: ArrayRef| -> ArrayRef {
            let sizes = vec![1; offsets.len()].into();
            let field = item(items.data_type().clone());
            Arc::new(ListViewArray::new(field, offsets.into(), sizes, items, None))
        };
        let ids = view(vec![0, 1], Arc::new(Int64Array::from(vec![1, 2])));
        let crossed = view(vec![1, 0], Arc::new(Float32Array::from(vec![1.0, 2.0])));
        let crossed = refusal(vec![("x", ids), ("x.weights", crossed)]);
        assert_eq!(crossed, "column `x.weights`: its lists are not where `x` has them");
        assert_eq!(
            small("x", 3, 1_i64 << 31).unwrap_err().to_string(),
            "column `x`: list 3 has offset or size 2147483648, which 32 bits cannot hold"
        );
    }

    #[test]
    fn names_that_collide_are_refused() {
        let feature = Feature::from_rows("dense", &[[1]]).unwrap();
        let batch = Batch::try_new(BatchParts {
            size: 1,
            dense: vec![1.0].into(),
            labels: vec![].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: vec![Group::try_new("g", None, vec![feature]).unwrap()],
        });
        let refused = batch.unwrap().to_record_batch().unwrap_err().to_string();
        assert_eq!(refused, "column `dense`: the name is used twice");
    }

    #[test]
    fn arrow_concatenates_what_it_was_given() {
        let feature = Feature::from_rows("x", &[[1], [2]]).unwrap();
        let batch = Batch::try_new(BatchParts {
            size: 2,
            dense: vec![1.0, 2.0].into(),
            labels: vec![0.0, 1.0].into(),
            weights: None,
            timestamps: Some(vec![3, 4].into()),
            kept: Vec::new(),
            groups: vec![Group::try_new("g", None, vec![feature]).unwrap()],
        });
        let batch = batch.unwrap();
        let rows = batch.to_record_batch().unwrap();
        let twice = concat_batches(rows.schema_ref(), [&rows, &rows]).unwrap();
        let expected = Batch::concat(&[(&batch, 0..2), (&batch, 0..2)]).unwrap();
        assert_eq!(Batch::from_record_batch(&twice).unwrap(), expected);
    }
}
