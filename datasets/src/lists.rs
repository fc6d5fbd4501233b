//! Columns of id lists in either of Arrow's two forms: `List`, in which consecutive lists are contiguous, and
//! `ListView`, in which lists are slices of the values that may overlap or repeat.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, ListArray, ListViewArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, FieldRef, Int64Type};

use crate::{Error, Result, schema};

/// The lists of a column without nulls.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lists<'a> {
    /// The ids and the offsets: one more than there are lists.
    List(&'a [i64], &'a [i32]),
    /// The ids, and the offset and size of each list.
    View(&'a [i64], &'a [i32], &'a [i32]),
}

impl<'a> Lists<'a> {
    /// Returns the lists of `column`, or `None` if its type is not a list of `Int64`.
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

    /// Returns the lists of each of `columns`, which are batches of the column `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if one of them does not hold lists of ids.
    pub(crate) fn all(columns: &'a [ArrayRef], name: &str) -> Result<Vec<Self>> {
        columns.iter().map(|column| Self::of(column).ok_or_else(|| no_lists(name, column))).collect()
    }

    /// Returns the number of lists.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::List(_, bounds) => bounds.len() - 1,
            Self::View(_, starts, _) => starts.len(),
        }
    }

    /// Returns the number of ids in list `row`.
    pub(crate) fn size(self, row: usize) -> usize {
        match self {
            Self::List(_, bounds) => (bounds[row + 1] - bounds[row]) as usize,
            Self::View(_, _, sizes) => sizes[row] as usize,
        }
    }

    /// Returns the ids of list `row`.
    pub(crate) fn get(self, row: usize) -> &'a [i64] {
        match self {
            Self::List(ids, bounds) => &ids[bounds[row] as usize..bounds[row + 1] as usize],
            Self::View(ids, starts, sizes) => &ids[starts[row] as usize..][..sizes[row] as usize],
        }
    }

    /// Returns all lists in order.
    pub(crate) fn iter(self) -> impl Iterator<Item = &'a [i64]> {
        (0..self.len()).map(move |row| self.get(row))
    }
}

/// Returns whether two lists have the same ids. Two views of the same slice are equal without a comparison of
/// ids.
pub(crate) fn same_list(a: &[i64], b: &[i64]) -> bool {
    std::ptr::eq(a, b) || a == b
}

/// Builds a list array from consecutive lists with these lengths in `ids`.
///
/// # Errors
///
/// [`Error::Fault`] if there are more ids than 32-bit offsets can address.
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

/// Returns a copy of `column`, a `List` or `ListView` without nulls, with other values and `item` as the
/// field of the list items.
///
/// # Errors
///
/// Returns the errors of `values`, and an Arrow error if the new values do not have the type of `item`.
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
