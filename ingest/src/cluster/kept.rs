//! Columns that the dataset keeps in addition to the features: integers and texts, with nulls.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, Int64Builder, StringArray, StringBuilder,
};
use datafusion::arrow::datatypes::{DataType, Int64Type, Schema as ArrowSchema, UInt64Type};
use onefold_datasets::digest::ColumnSeed;
use onefold_datasets::{KeptColumn, KeptKind};

use super::columns::cast;
use crate::config::Config;
use crate::error::{Error, Result};

/// Returns the kept columns of `config` with their types in the schema `columns` of the samples. Columns that the
/// samples do not have are left out, because another check reports them.
///
/// # Errors
///
/// [`Error::Fault`] if a column contains neither integers nor texts.
pub(crate) fn kept_columns(config: &Config, columns: &ArrowSchema) -> Result<Vec<KeptColumn>> {
    let mut kept = Vec::with_capacity(config.keep.len());
    for name in &config.keep {
        let Ok(field) = columns.field_with_name(name) else { continue };
        let kind = kind(field.data_type()).ok_or_else(|| {
            Error::column(
                name,
                format!(
                    "`keep` has it, but only integers and texts are kept, and its type is {}",
                    field.data_type()
                ),
                format!("convert it in the query, as `CAST({name} AS VARCHAR)` or `CAST({name} AS BIGINT)`"),
            )
        })?;
        kept.push(KeptColumn { name: name.clone(), kind });
    }
    Ok(kept)
}

/// Returns how values of this type are kept; `None` if they cannot be kept.
fn kind(data_type: &DataType) -> Option<KeptKind> {
    match data_type {
        DataType::Dictionary(_, values) => kind(values),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(KeptKind::Text),
        integer if integer.is_integer() => Some(KeptKind::Integer),
        _ => None,
    }
}

/// The values of a kept column of a batch of samples.
#[derive(Debug)]
pub(super) enum KeptArray {
    Integers(Int64Array),
    Texts(StringArray),
}

/// A value of a kept column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptValue<'a> {
    Integer(i64),
    Text(&'a str),
}

/// A builder of a kept column.
#[derive(Debug)]
pub(super) enum KeptBuilder {
    Integers(Int64Builder),
    Texts(StringBuilder),
}

impl KeptArray {
    /// Converts a column of the query.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if an unsigned number does not fit into 63 bits.
    pub(super) fn convert(kept: &KeptColumn, column: &ArrayRef) -> Result<Self> {
        let name = &kept.name;
        if kept.kind == KeptKind::Text {
            return Ok(Self::Texts(cast(name, column, &DataType::Utf8)?.as_string::<i32>().clone()));
        }
        let column = match column.data_type() {
            DataType::Dictionary(_, values) => cast(name, column, values)?,
            _ => Arc::clone(column),
        };
        if let Some(numbers) = column.as_primitive_opt::<UInt64Type>()
            && let Some(large) = numbers.iter().flatten().find(|number| i64::try_from(*number).is_err())
        {
            let message = format!("`keep` has it, but its value {large} does not fit into 63 bits");
            let hint = format!("keep it as text: write `CAST({name} AS VARCHAR)` in the query");
            return Err(Error::column(name, message, hint));
        }
        let integers = cast(name, &column, &DataType::Int64)?;
        Ok(Self::Integers(integers.as_primitive::<Int64Type>().clone()))
    }

    /// Returns the missing values of `rows` samples.
    pub(super) fn missing(kept: &KeptColumn, rows: usize) -> Self {
        match kept.kind {
            KeptKind::Integer => Self::Integers(Int64Array::new_null(rows)),
            KeptKind::Text => Self::Texts(StringArray::new_null(rows)),
        }
    }

    /// Returns the value of a sample; `None` for a null.
    pub(super) fn value(&self, row: usize) -> Option<KeptValue<'_>> {
        match self {
            Self::Integers(integers) => {
                integers.is_valid(row).then(|| KeptValue::Integer(integers.value(row)))
            }
            Self::Texts(texts) => texts.is_valid(row).then(|| KeptValue::Text(texts.value(row))),
        }
    }
}

impl KeptValue<'_> {
    /// The approximate size of the value, in units of 8 bytes (the size of an id).
    pub(super) fn ids(self) -> usize {
        match self {
            Self::Integer(_) => 1,
            Self::Text(text) => 1 + text.len() / 8,
        }
    }

    /// Returns the part of the value in its sample's digest.
    pub(super) fn part(self, seed: ColumnSeed) -> u128 {
        match self {
            Self::Integer(integer) => seed.integer(integer),
            Self::Text(text) => seed.bytes(text.as_bytes()),
        }
    }
}

impl KeptBuilder {
    pub(super) fn new(kind: KeptKind) -> Self {
        match kind {
            KeptKind::Integer => Self::Integers(Int64Builder::new()),
            KeptKind::Text => Self::Texts(StringBuilder::new()),
        }
    }

    /// Appends a value of the column's kind, or a null.
    pub(super) fn push(&mut self, value: Option<KeptValue<'_>>) {
        match (self, value) {
            (Self::Integers(integers), Some(KeptValue::Integer(integer))) => integers.append_value(integer),
            (Self::Texts(texts), Some(KeptValue::Text(text))) => texts.append_value(text),
            (Self::Integers(integers), _) => integers.append_null(),
            (Self::Texts(texts), _) => texts.append_null(),
        }
    }

    pub(super) fn finish(mut self) -> ArrayRef {
        match &mut self {
            Self::Integers(integers) => Arc::new(integers.finish()),
            Self::Texts(texts) => Arc::new(texts.finish()),
        }
    }
}
