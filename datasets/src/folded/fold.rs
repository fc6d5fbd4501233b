//! Folding: reduces lists to their changes.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, ListArray};
use arrow::buffer::{BooleanBuffer, NullBuffer};

use crate::lists::{Lists, list_array, no_lists, same_list};
use crate::{Result, Schema, overlap};

/// The way in which a file stores a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fold {
    /// Stores a value or a list for each sample.
    Unchanged,
    /// Stores a list where it changes, and null elsewhere.
    List,
    /// Stores the appended ids, and the length of the list where the list changes.
    Window,
}

impl Fold {
    /// Returns one element per column of [`Schema::to_arrow`], for the `folded` layout.
    pub(crate) fn of_schema(schema: &Schema) -> Vec<Self> {
        let lists = schema.grouped_features().map(|(group, feature)| match group.deduplicated {
            true if group.folds_to_window(feature) => Self::Window,
            true => Self::List,
            false => Self::Unchanged,
        });
        let numbers = schema.to_arrow().fields().len() - schema.sparse_features().count();
        std::iter::repeat_n(Self::Unchanged, numbers).chain(lists).collect()
    }

    /// Returns the number of file columns that store the column.
    pub(crate) fn fields(self) -> usize {
        match self {
            Self::Unchanged | Self::List => 1,
            Self::Window => 2,
        }
    }

    /// Converts the next rows of the column `name` to the columns that store it. `last` is the list of the
    /// preceding sample, or `None` at the start of a row group. It is set to the list of the last row.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if a folded column does not contain lists of ids, or contains
    /// too many ids.
    pub(crate) fn fold(
        self,
        name: &str,
        column: &ArrayRef,
        last: &mut Option<Vec<i64>>,
    ) -> Result<Vec<ArrayRef>> {
        let lists = || Lists::of(column).ok_or_else(|| no_lists(name, column));
        match self {
            Self::Unchanged => Ok(vec![Arc::clone(column)]),
            Self::List => Ok(vec![fold_lists(name, lists()?, last)?]),
            Self::Window => Ok(fold_windows(name, lists()?, last)?.into()),
        }
    }
}

/// Keeps a list where it changes; other rows are null.
fn fold_lists(name: &str, lists: Lists, last: &mut Option<Vec<i64>>) -> Result<ArrayRef> {
    let kept = Kept::of(lists, last, |_, _| 0);
    let changed = NullBuffer::new(kept.changed.clone());
    Ok(Arc::new(kept.into_lists(name, lists, Some(changed))?))
}

/// Returns the appended ids, and the lengths where the list changes.
fn fold_windows(name: &str, lists: Lists, last: &mut Option<Vec<i64>>) -> Result<[ArrayRef; 2]> {
    let kept = Kept::of(lists, last, overlap);
    let lengths = (0..lists.len()).map(|row| lists.size(row) as i32).collect::<Vec<i32>>();
    let lengths = Int32Array::try_new(lengths.into(), Some(NullBuffer::new(kept.changed.clone())))?;
    Ok([Arc::new(kept.into_lists(name, lists, None)?), Arc::new(lengths)])
}

/// The stored part of each list of a batch: its last ids.
struct Kept {
    /// Whether the list differs from the preceding list.
    changed: BooleanBuffer,
    /// The number of ids that are stored of each list.
    stored: Vec<usize>,
}

impl Kept {
    /// Compares each list with the preceding one (the first list with `last`), and sets `last` to the last
    /// list. `overlap` returns the number of ids at the start of a changed list that are not stored.
    fn of(lists: Lists, last: &mut Option<Vec<i64>>, overlap: impl Fn(&[i64], &[i64]) -> usize) -> Self {
        let mut stored = Vec::with_capacity(lists.len());
        let mut previous = last.as_deref();
        let changed = BooleanBuffer::collect_bool(lists.len(), |row| {
            let list = lists.get(row);
            let changed = !previous.is_some_and(|previous| same_list(previous, list));
            let known = match previous {
                Some(previous) if changed => overlap(previous, list),
                Some(same) => same.len(),
                None => 0,
            };
            stored.push(list.len() - known);
            previous = Some(list);
            changed
        });
        *last = previous.map(<[i64]>::to_vec);
        Self { changed, stored }
    }

    /// Returns the stored ends of `lists`, which must be the lists from which `self` was computed.
    fn into_lists(self, name: &str, lists: Lists, nulls: Option<NullBuffer>) -> Result<ListArray> {
        let mut ids: Vec<i64> = Vec::with_capacity(self.stored.iter().sum());
        for (list, stored) in lists.iter().zip(&self.stored) {
            ids.extend_from_slice(&list[list.len() - stored..]);
        }
        list_array(name, self.stored, ids, nulls)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::{Int32Type, Int64Type};

    use super::super::samples::{rows, schema};
    use super::super::tests::Folder;

    #[test]
    fn lists_are_stored_where_they_change_feature_by_feature() {
        let samples = [
            ([vec![7], vec![1, 1], vec![1, 2, 3], vec![5]]),
            ([vec![7], vec![1, 1], vec![2, 3, 4], vec![5]]),
            ([vec![8], vec![1, 1], vec![2, 3, 4], vec![5]]),
            ([vec![8], vec![1, 1], vec![4], vec![5]]),
            ([vec![8], vec![], vec![4, 3, 2], vec![]]),
        ];
        let folded = Folder::new().fold(&rows(&samples));
        let lists = |name: &str| {
            let lists = folded.column_by_name(name).unwrap().as_list::<i32>().iter();
            lists
                .map(|list| list.map(|ids| ids.as_primitive::<Int64Type>().values().to_vec()))
                .collect::<Vec<_>>()
        };
        assert_eq!(lists("city"), [Some(vec![7]), None, Some(vec![8]), None, None]);
        assert_eq!(lists("tags"), [Some(vec![1, 1]), None, None, None, Some(vec![])]);
        let appended = [vec![1, 2, 3], vec![4], vec![], vec![], vec![3, 2]].map(Some);
        assert_eq!(lists("history"), appended);
        let lengths = folded.column_by_name("history.length").unwrap().as_primitive::<Int32Type>();
        assert_eq!(lengths.iter().collect::<Vec<_>>(), [Some(3), Some(3), None, Some(1), Some(3)]);
        assert_eq!(lists("item"), [vec![5], vec![5], vec![5], vec![5], vec![]].map(Some));
        assert_eq!(folded.schema_ref(), &schema().to_folded_arrow());
    }
}
