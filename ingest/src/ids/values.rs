//! Converts columns of ids of any type to columns of `i64`.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, ListArray, UInt32Array, UInt64Array, new_empty_array,
};
use datafusion::arrow::buffer::{NullBuffer, OffsetBuffer};
use datafusion::arrow::compute::{CastOptions, cast_with_options, take};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, UInt64Type};
use onefold_datasets::{CountBudget, TextIds, hash_id};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result, arrow_bug};

/// The conversion of the ids of a feature.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) enum IdForm {
    /// Integers stay as they are; booleans become 0 and 1.
    #[default]
    Integers,
    /// All ids become hashes.
    Hashes,
    /// Texts become numbers, which the [`TextIds`] assign. They are in the memory of this process: a receiver of this
    /// value has no texts and no memory for them before it calls [`with_texts`](Self::with_texts).
    Texts(#[serde(serialize_with = "name_of", deserialize_with = "named")] Arc<TextIds>),
    /// Texts become hashes, and the texts are not stored. If no two texts have the same hash, the hashes equal the
    /// numbers that [`TextIds`] assigns.
    TextHashes,
}

impl IdForm {
    /// Returns the texts if texts become numbers.
    pub(crate) fn texts(&self) -> Option<&Arc<TextIds>> {
        match self {
            Self::Texts(texts) => Some(texts),
            Self::Integers | Self::Hashes | Self::TextHashes => None,
        }
    }

    /// Uses the texts of the same vocabulary in `all`. If there are none, adds an empty collection whose memory comes
    /// from `budget`.
    pub(crate) fn with_texts(&mut self, all: &mut BTreeMap<String, Arc<TextIds>>, budget: &CountBudget) {
        if let Self::Texts(texts) = self {
            let name = texts.name().to_owned();
            let shared = all.entry(name).or_insert_with_key(|name| Arc::new(TextIds::new(name, budget)));
            *texts = Arc::clone(shared);
        }
    }
}

fn name_of<S: Serializer>(texts: &Arc<TextIds>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(texts.name())
}

fn named<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Arc<TextIds>, D::Error> {
    let name = String::deserialize(deserializer)?;
    Ok(Arc::new(TextIds::new(&name, &CountBudget::new(0))))
}

/// The types of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdType {
    /// An integer that fits into a signed 64-bit integer.
    Integer,
    /// An unsigned 64-bit integer.
    Unsigned,
    Boolean,
    Text,
    Binary,
}

impl IdType {
    /// Returns the type of single ids, or `None` if such values are not ids.
    pub(crate) fn of(data_type: &DataType) -> Option<Self> {
        Some(match data_type {
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Self::Text,
            DataType::Binary
            | DataType::LargeBinary
            | DataType::BinaryView
            | DataType::FixedSizeBinary(_) => Self::Binary,
            DataType::Boolean => Self::Boolean,
            DataType::UInt64 => Self::Unsigned,
            DataType::Dictionary(_, values) => return Self::of(values),
            DataType::RunEndEncoded(_, values) => return Self::of(values.data_type()),
            integer if integer.is_integer() => Self::Integer,
            _ => return None,
        })
    }

    /// Returns the type of the ids in lists of this type, or `None` if it is not a list of ids.
    pub(crate) fn of_items(data_type: &DataType) -> Option<Self> {
        Self::of(item_type(data_type)?)
    }

    /// Returns the type of the ids in a column of single ids or lists of ids.
    pub(crate) fn of_column(data_type: &DataType) -> Option<Self> {
        Self::of(data_type).or_else(|| Self::of_items(data_type))
    }
}

/// Returns the type of the items of lists.
pub(crate) fn item_type(data_type: &DataType) -> Option<&DataType> {
    match data_type {
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::ListView(item)
        | DataType::LargeListView(item) => Some(item.data_type()),
        _ => None,
    }
}

/// Converts single ids of the column `name`. Nulls stay null.
///
/// # Errors
///
/// [`Error::Fault`] for an integer that must stay an integer and needs more than 63 bits, bytes that must be a text and
/// are not UTF-8, and a type that is not a type of ids; [`Error::Dataset`] if the texts exceed their memory budget.
pub(crate) fn scalar_ids(name: &str, column: &ArrayRef, form: &IdForm) -> Result<Int64Array> {
    let column = &decoded(name, column)?;
    match form {
        IdForm::Integers => integers(name, column),
        IdForm::Hashes => from_bytes(name, column, |bytes| Ok(hash_id(bytes))),
        IdForm::Texts(texts) => from_bytes(name, column, |bytes| Ok(texts.number(text_of(name, bytes)?)?)),
        IdForm::TextHashes => from_bytes(name, column, |bytes| Ok(hash_id(text_of(name, bytes)?.as_bytes()))),
    }
}

/// Returns the bytes of an id as a text.
fn text_of<'b>(name: &str, bytes: &'b [u8]) -> Result<&'b str> {
    std::str::from_utf8(bytes).map_err(|_| {
        let message = format!("the bytes `{}` are not a UTF-8 text", bytes.escape_ascii());
        let hint = format!(
            "a vocabulary keeps ids as texts: write `encode({name}, 'hex')` in the query, or `ids = \"hash\"` in \
             place of the vocabulary"
        );
        Error::column(name, message, hint)
    })
}

/// Converts lists of ids of the column `name`. Null lists and null ids stay null.
pub(crate) fn list_ids(name: &str, column: &ArrayRef, form: &IdForm) -> Result<ListArray> {
    let item = item_type(column.data_type()).ok_or_else(|| no_ids(name, column.data_type()))?;
    let field = Arc::new(Field::new("element", item.clone(), true));
    let lists = cast(name, column, &DataType::List(field))?;
    let lists = lists.as_list::<i32>();
    let (items, lengths) = present_items(lists).map_err(arrow_bug)?;
    let ids = scalar_ids(name, &items, form)?;
    let field = Arc::new(Field::new("element", DataType::Int64, true));
    let offsets = OffsetBuffer::from_lengths(lengths);
    ListArray::try_new(field, offsets, Arc::new(ids), lists.nulls().cloned()).map_err(arrow_bug)
}

/// Returns the items of lists that are not null, and the lengths of all lists (0 for null lists). The offsets of a null
/// list may enclose items, which do not belong to it.
fn present_items(lists: &ListArray) -> Result<(ArrayRef, Vec<usize>), datafusion::arrow::error::ArrowError> {
    let bounds = lists.offsets().windows(2);
    let lengths = bounds
        .clone()
        .enumerate()
        .map(|(row, bounds)| if lists.is_null(row) { 0 } else { (bounds[1] - bounds[0]) as usize });
    let lengths: Vec<usize> = lengths.collect();
    let (start, end) = (lists.offsets()[0] as usize, lists.offsets()[lists.len()] as usize);
    if lengths.iter().sum::<usize>() == end - start {
        return Ok((lists.values().slice(start, end - start), lengths));
    }
    let items = bounds.zip(&lengths).flat_map(|(bounds, length)| {
        let start = bounds[0] as u32;
        start..start + *length as u32
    });
    Ok((take(lists.values(), &UInt32Array::from_iter_values(items), None)?, lengths))
}

/// Returns `column` without dictionary or run-length encoding.
fn decoded(name: &str, column: &ArrayRef) -> Result<ArrayRef> {
    match column.data_type() {
        DataType::Dictionary(_, values) => cast(name, column, values),
        DataType::RunEndEncoded(_, values) => cast(name, column, values.data_type()),
        _ => Ok(Arc::clone(column)),
    }
}

/// Converts integers and booleans to `i64`.
fn integers(name: &str, column: &ArrayRef) -> Result<Int64Array> {
    if let Some(unsigned) = column.as_primitive_opt::<UInt64Type>()
        && let Some(large) = unsigned.iter().flatten().find(|id| i64::try_from(*id).is_err())
    {
        let message = format!("the id {large} does not fit into 63 bits");
        return Err(Error::column(name, message, OPTIONS));
    }
    if !matches!(IdType::of(column.data_type()), Some(IdType::Integer | IdType::Unsigned | IdType::Boolean)) {
        return Err(no_ids(name, column.data_type()));
    }
    Ok(cast(name, column, &DataType::Int64)?.as_primitive::<Int64Type>().clone())
}

/// The hint for ids that must be converted.
pub(crate) const OPTIONS: &str = "write `ids = \"hash\"` at the feature for 63-bit hashes, or `vocabulary = \"frequency\"` \
                                  for numbers by frequency, which keeps the original ids in the dataset";

/// Makes ids from the bytes that represent each value, as [`onefold_datasets::hash_id`] defines them.
fn from_bytes(name: &str, column: &ArrayRef, mut id: impl FnMut(&[u8]) -> Result<i64>) -> Result<Int64Array> {
    let nulls = column.nulls();
    match column.data_type() {
        DataType::Utf8 => numbers(bytes(column.as_string::<i32>().iter()), nulls, id),
        DataType::LargeUtf8 => numbers(bytes(column.as_string::<i64>().iter()), nulls, id),
        DataType::Utf8View => numbers(bytes(column.as_string_view().iter()), nulls, id),
        DataType::Binary => numbers(column.as_binary::<i32>().iter(), nulls, id),
        DataType::LargeBinary => numbers(column.as_binary::<i64>().iter(), nulls, id),
        DataType::BinaryView => numbers(column.as_binary_view().iter(), nulls, id),
        DataType::FixedSizeBinary(_) => numbers(column.as_fixed_size_binary().iter(), nulls, id),
        DataType::Boolean => {
            let text = |value: bool| if value { "true" } else { "false" };
            numbers(bytes(column.as_boolean().iter().map(|value| value.map(text))), nulls, id)
        }
        DataType::UInt64 => {
            let values: &UInt64Array = column.as_primitive();
            let id = |value: u64| id(itoa::Buffer::new().format(value).as_bytes());
            numbers(values.iter(), nulls, id)
        }
        integer if integer.is_integer() => {
            let values = cast(name, column, &DataType::Int64)?;
            let values = values.as_primitive::<Int64Type>();
            let id = |value: i64| id(itoa::Buffer::new().format(value).as_bytes());
            numbers(values.iter(), nulls, id)
        }
        other => Err(no_ids(name, other)),
    }
}

fn bytes<'a>(texts: impl Iterator<Item = Option<&'a str>>) -> impl Iterator<Item = Option<&'a [u8]>> {
    texts.map(|text| text.map(str::as_bytes))
}

/// Returns the id of each value; null where the value is null.
fn numbers<T>(
    values: impl Iterator<Item = Option<T>>,
    nulls: Option<&NullBuffer>,
    mut id: impl FnMut(T) -> Result<i64>,
) -> Result<Int64Array> {
    let ids = values.map(|value| value.map_or(Ok(0), &mut id)).collect::<Result<Vec<i64>>>()?;
    Ok(Int64Array::new(ids.into(), nulls.cloned()))
}

/// Casts a column; fails on values that do not fit.
fn cast(name: &str, column: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
    if column.is_empty() {
        return Ok(new_empty_array(to));
    }
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(column, to, &options).map_err(|error| {
        let message = format!("its type {} cannot be read as {to}: {error}", column.data_type());
        Error::column(name, message, "convert the column in the query with `CAST`")
    })
}

fn no_ids(name: &str, data_type: &DataType) -> Error {
    Error::column(
        name,
        format!("its type is {data_type}, which is not a type of ids"),
        "ids are integers, texts, booleans or binary values, or lists of them",
    )
}
