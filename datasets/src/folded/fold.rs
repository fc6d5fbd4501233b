//! From lists to what changed.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, ListArray, RecordBatch};
use arrow::buffer::{BooleanBuffer, NullBuffer};
use arrow::datatypes::{DataType, SchemaRef};

use crate::conform::conform;
use crate::lists::{Lists, expand, list_array, no_lists, same_list};
use crate::{Result, Schema, overlap};

/// Folds samples batch by batch. Between batches it keeps each feature's list of the last sample, and nothing else.
#[derive(Debug)]
pub struct Folder {
    rows: SchemaRef,
    folded: SchemaRef,
    /// One for every column of `rows`.
    columns: Vec<ColumnFolder>,
}

impl Folder {
    /// A folder for the columns of `schema`, at the start of a row group.
    pub fn new(schema: &Schema) -> Self {
        let (rows, folded) = (schema.to_arrow(), schema.to_folded_arrow());
        Self { rows, folded, columns: ColumnFolder::of_schema(schema) }
    }

    /// The columns of what [`fold`](Self::fold) gives: [`Schema::to_folded_arrow`].
    pub fn folded_schema(&self) -> &SchemaRef {
        &self.folded
    }

    /// Starts a row group: its first sample is stored whole, whatever came before.
    pub fn start_row_group(&mut self) {
        self.columns.iter_mut().for_each(ColumnFolder::start_row_group);
    }

    /// The next samples of the row group, folded: columns of [`Schema::to_arrow`] in, where a `ListView` may stand for
    /// a `List`; as many rows of [`Schema::to_folded_arrow`] out.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if `rows` has other columns or nulls, or more ids in a column than
    /// 32-bit offsets address; in the first case the row group can go on as if this had not been called.
    pub fn fold(&mut self, rows: &RecordBatch) -> Result<RecordBatch> {
        let rows = conform(rows, &self.rows)?;
        let mut folded = Vec::with_capacity(self.folded.fields().len());
        for ((field, column), fold) in self.rows.fields().iter().zip(rows.columns()).zip(&mut self.columns) {
            match (&fold, column.data_type()) {
                (ColumnFolder::Unchanged, DataType::ListView(_)) => {
                    folded.push(expand(field.name(), column)?)
                }
                _ => folded.extend(fold.fold(field.name(), column)?),
            }
        }
        Ok(RecordBatch::try_new(Arc::clone(&self.folded), folded)?)
    }
}

/// How a column is folded; what folds has the list of the last sample, `None` where a row group starts.
#[derive(Debug)]
pub(crate) enum ColumnFolder {
    /// It stays as it is.
    Unchanged,
    /// A list where it changes, null elsewhere.
    List(Option<Vec<i64>>),
    /// The ids appended, and the list's length where it changes.
    Window(Option<Vec<i64>>),
}

impl ColumnFolder {
    /// One for every column of [`Schema::to_arrow`], at the start of a row group.
    pub(crate) fn of_schema(schema: &Schema) -> Vec<Self> {
        let lists = schema.groups.iter().flat_map(|group| {
            group.features.iter().map(|feature| match group.deduplicated {
                true if group.folds_to_window(feature) => Self::Window(None),
                true => Self::List(None),
                false => Self::Unchanged,
            })
        });
        let numbers = schema.to_arrow().fields().len() - schema.sparse_features().count();
        let mut columns = Vec::new();
        columns.resize_with(numbers, || Self::Unchanged);
        columns.extend(lists);
        columns
    }

    fn start_row_group(&mut self) {
        if let Self::List(last) | Self::Window(last) = self {
            *last = None;
        }
    }

    /// The next rows of the column `name` as its columns in the `folded` layout, of which a window has two.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if a column to fold holds no lists, or too many ids.
    pub(crate) fn fold(&mut self, name: &str, column: &ArrayRef) -> Result<Vec<ArrayRef>> {
        let lists = || Lists::of(column).ok_or_else(|| no_lists(name, column));
        match self {
            Self::Unchanged => Ok(vec![Arc::clone(column)]),
            Self::List(last) => Ok(vec![fold_lists(name, lists()?, last)?]),
            Self::Window(last) => Ok(fold_windows(name, lists()?, last)?.into()),
        }
    }
}

/// A list where it changes, null elsewhere.
fn fold_lists(name: &str, lists: Lists, last: &mut Option<Vec<i64>>) -> Result<ArrayRef> {
    let kept = Kept::of(lists, last, |_, _| 0);
    let changed = NullBuffer::new(kept.changed.clone());
    Ok(Arc::new(kept.into_lists(name, lists, Some(changed))?))
}

/// The items appended, and the length where the list changes.
fn fold_windows(name: &str, lists: Lists, last: &mut Option<Vec<i64>>) -> Result<[ArrayRef; 2]> {
    let kept = Kept::of(lists, last, overlap);
    let lengths = (0..lists.len()).map(|row| lists.size(row) as i32).collect::<Vec<i32>>();
    let lengths = Int32Array::try_new(lengths.into(), Some(NullBuffer::new(kept.changed.clone())))?;
    Ok([Arc::new(kept.into_lists(name, lists, None)?), Arc::new(lengths)])
}

/// What is stored of every list of a batch: its last ids.
struct Kept {
    /// Whether the list differs from the one before.
    changed: BooleanBuffer,
    /// How many of its ids are stored.
    stored: Vec<usize>,
}

impl Kept {
    /// Compares every list with the one before, which for the first is `last`, and leaves the last list there.
    /// `overlap` tells how many ids of a changed list are not stored.
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

    /// The stored ends of `lists`, which are the lists that this was made of.
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
    use arrow::array::{Array, AsArray};
    use arrow::datatypes::{Int32Type, Int64Type};

    use super::super::samples::{rows, schema};
    use super::*;

    #[test]
    fn only_what_changed_is_kept_and_every_feature_for_itself() {
        let samples = [
            ([vec![7], vec![1, 1], vec![1, 2, 3], vec![5]]),
            ([vec![7], vec![1, 1], vec![2, 3, 4], vec![5]]),
            ([vec![8], vec![1, 1], vec![2, 3, 4], vec![5]]),
            ([vec![8], vec![1, 1], vec![4], vec![5]]),
            ([vec![8], vec![], vec![4, 3, 2], vec![]]),
        ];
        let folded = Folder::new(&schema()).fold(&rows(&samples)).unwrap();
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

    #[test]
    fn columns_that_are_not_the_schemas_are_refused_and_change_nothing() {
        let sample = [vec![7], vec![1], vec![1, 2], vec![5]];
        let mut folder = Folder::new(&schema());
        folder.fold(&rows(std::slice::from_ref(&sample))).unwrap();
        let lacking = rows(&[[vec![9], vec![9], vec![9], vec![9]]]).project(&[0, 1, 2, 3]).unwrap();
        let error = folder.fold(&lacking).unwrap_err().to_string();
        assert!(error.contains("column `tags`: it is missing"), "{error}");
        let folded = folder.fold(&rows(&[sample])).unwrap();
        assert!(folded.column_by_name("city").unwrap().is_null(0));
    }
}
