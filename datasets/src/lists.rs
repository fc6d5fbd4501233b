//! Columns of lists of ids in either of Arrow's forms: `List`, whose ids stand one list after the other, and
//! `ListView`, whose lists are slices that may overlap or repeat.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, ListArray, ListViewArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, FieldRef, Int64Type};

use crate::{Error, Result, schema};

/// The lists of a column without nulls.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lists<'a> {
    /// The ids, and where each list starts and the last one ends.
    List(&'a [i64], &'a [i32]),
    /// The ids, and where each list starts and how many ids it has.
    View(&'a [i64], &'a [i32], &'a [i32]),
}

impl<'a> Lists<'a> {
    /// The lists of `column`; `None` if it is of another type.
    pub(crate) fn of(column: &'a ArrayRef) -> Option<Self> {
        match column.data_type() {
            DataType::List(_) => {
                let lists = column.as_list::<i32>();
                Some(Self::List(lists.values().as_primitive_opt::<Int64Type>()?.values(), lists.offsets()))
            }
            DataType::ListView(_) => {
                let lists = column.as_list_view::<i32>();
                let ids = lists.values().as_primitive_opt::<Int64Type>()?.values();
                Some(Self::View(ids, lists.offsets(), lists.sizes()))
            }
            _ => None,
        }
    }

    /// The lists of `columns`, one column after the other.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if one of them holds no lists of ids.
    pub(crate) fn all(columns: &'a [ArrayRef], name: &str) -> Result<Vec<Self>> {
        columns.iter().map(|column| Self::of(column).ok_or_else(|| no_lists(name, column))).collect()
    }

    /// How many lists there are.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::List(_, bounds) => bounds.len() - 1,
            Self::View(_, starts, _) => starts.len(),
        }
    }

    /// The ids of the list `row`.
    pub(crate) fn size(self, row: usize) -> usize {
        match self {
            Self::List(_, bounds) => (bounds[row + 1] - bounds[row]) as usize,
            Self::View(_, _, sizes) => sizes[row] as usize,
        }
    }

    /// The list `row`.
    pub(crate) fn get(self, row: usize) -> &'a [i64] {
        match self {
            Self::List(ids, bounds) => &ids[bounds[row] as usize..bounds[row + 1] as usize],
            Self::View(ids, starts, sizes) => &ids[starts[row] as usize..][..sizes[row] as usize],
        }
    }

    /// All lists.
    pub(crate) fn iter(self) -> impl Iterator<Item = &'a [i64]> {
        (0..self.len()).map(move |row| self.get(row))
    }
}

/// Whether two lists have the same ids. Views of the same slice need not be compared.
pub(crate) fn same_list(a: &[i64], b: &[i64]) -> bool {
    std::ptr::eq(a, b) || a == b
}

/// The lists of these lengths, one after the other in `ids`.
///
/// # Errors
///
/// [`Error::Fault`] if there are more ids than 32-bit offsets address.
pub(crate) fn list_array(
    name: &str,
    lengths: impl IntoIterator<Item = usize>,
    ids: Vec<i64>,
    nulls: Option<NullBuffer>,
) -> Result<ListArray> {
    if i32::try_from(ids.len()).is_err() {
        return Err(Error::column(
            name,
            format!("its lists have {} ids together, 32-bit offsets address 2,147,483,647", ids.len()),
            "write smaller batches, or make row groups smaller",
        ));
    }
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(ListArray::try_new(schema::item_field(), offsets, Arc::new(Int64Array::new(ids.into(), None)), nulls)?)
}

/// `column`, of `List`s or `ListView`s, with other values and this field of the lists' items. The lists have no nulls.
///
/// # Errors
///
/// The errors of `values`, and Arrow's error if the values do not have the type of the field.
pub(crate) fn with_values(
    column: &ArrayRef,
    item: &FieldRef,
    values: impl FnOnce(&ArrayRef) -> Result<ArrayRef>,
) -> Result<ArrayRef> {
    if let Some(lists) = column.as_list_opt::<i32>() {
        let values = values(lists.values())?;
        return Ok(Arc::new(ListArray::try_new(Arc::clone(item), lists.offsets().clone(), values, None)?));
    }
    let lists = column.as_list_view::<i32>();
    let (offsets, sizes) = (lists.offsets().clone(), lists.sizes().clone());
    Ok(Arc::new(ListViewArray::try_new(Arc::clone(item), offsets, sizes, values(lists.values())?, None)?))
}

pub(crate) fn no_lists(name: &str, column: &ArrayRef) -> Error {
    Error::column(
        name,
        format!("it has type {}", column.data_type()),
        "sparse features are `List<Int64>` or `ListView<Int64>`",
    )
}
