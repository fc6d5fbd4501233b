//! From lists to what changed.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int32Array, Int64Array, ListArray, RecordBatch};
use arrow::buffer::{BooleanBuffer, NullBuffer, OffsetBuffer};
use arrow::datatypes::{Int64Type, SchemaRef};

use crate::conform::conform;
use crate::{Result, Schema, overlap, schema};

/// Folds samples batch by batch. Between batches it keeps each feature's list of the last sample, and nothing else.
#[derive(Debug)]
pub struct Folder {
    rows: SchemaRef,
    folded: SchemaRef,
    /// One for every column of `rows`.
    columns: Vec<Column>,
}

/// How a column is folded; what folds has the list of the last sample, `None` where a row group starts.
#[derive(Debug)]
enum Column {
    Unchanged,
    List(Option<Vec<i64>>),
    Window(Option<Vec<i64>>),
}

impl Folder {
    /// A folder for the columns of `schema`, at the start of a row group.
    pub fn new(schema: &Schema) -> Self {
        let rows = schema.to_arrow();
        let lists = schema.groups.iter().flat_map(|group| {
            group.features.iter().map(|feature| match group.deduplicated {
                true if group.folds_to_window(feature) => Column::Window(None),
                true => Column::List(None),
                false => Column::Unchanged,
            })
        });
        let lists: Vec<Column> = lists.collect();
        let mut columns = Vec::with_capacity(rows.fields().len());
        columns.resize_with(rows.fields().len() - lists.len(), || Column::Unchanged);
        columns.extend(lists);
        Self { rows, folded: schema.to_folded_arrow(), columns }
    }

    /// The columns of what [`fold`](Self::fold) gives: [`Schema::to_folded_arrow`].
    pub fn folded_schema(&self) -> &SchemaRef {
        &self.folded
    }

    /// Starts a row group: its first sample is stored whole, whatever came before.
    pub fn start_row_group(&mut self) {
        for column in &mut self.columns {
            if let Column::List(last) | Column::Window(last) = column {
                *last = None;
            }
        }
    }

    /// The next samples of the row group, folded: columns of [`Schema::to_arrow`] in, as many rows of
    /// [`Schema::to_folded_arrow`] out.
    ///
    /// # Errors
    ///
    /// [`Error::Column`](crate::Error::Column) if `rows` has other columns or nulls; the row group can then go on as if
    /// this had not been called.
    pub fn fold(&mut self, rows: &RecordBatch) -> Result<RecordBatch> {
        let rows = conform(rows, &self.rows)?;
        let mut folded = Vec::with_capacity(self.folded.fields().len());
        for (column, fold) in rows.columns().iter().zip(&mut self.columns) {
            match fold {
                Column::Unchanged => folded.push(Arc::clone(column)),
                Column::List(last) => folded.push(fold_lists(column.as_list(), last)?),
                Column::Window(last) => folded.extend(fold_windows(column.as_list(), last)?),
            }
        }
        Ok(RecordBatch::try_new(Arc::clone(&self.folded), folded)?)
    }
}

/// A list where it changes, null elsewhere.
fn fold_lists(lists: &ListArray, last: &mut Option<Vec<i64>>) -> Result<ArrayRef> {
    let kept = Kept::of(lists, last, |_, _| 0);
    let changed = NullBuffer::new(kept.changed.clone());
    Ok(Arc::new(kept.into_lists(lists, Some(changed))?))
}

/// The items appended, and the length where the list changes.
fn fold_windows(lists: &ListArray, last: &mut Option<Vec<i64>>) -> Result<[ArrayRef; 2]> {
    let kept = Kept::of(lists, last, overlap);
    let lengths = lists.offsets().windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<i32>>();
    let lengths = Int32Array::try_new(lengths.into(), Some(NullBuffer::new(kept.changed.clone())))?;
    Ok([Arc::new(kept.into_lists(lists, None)?), Arc::new(lengths)])
}

/// What is stored of every list of a batch: its end, from `starts` on.
struct Kept {
    /// Whether the list differs from the one before.
    changed: BooleanBuffer,
    /// Where what is stored starts among the batch's ids; it ends where the list ends.
    starts: Vec<usize>,
}

impl Kept {
    /// Compares every list with the one before, which for the first is `last`, and leaves the last list there.
    /// `overlap` tells how many ids of a changed list are not stored.
    fn of(lists: &ListArray, last: &mut Option<Vec<i64>>, overlap: impl Fn(&[i64], &[i64]) -> usize) -> Self {
        let ids = ids_of(lists);
        let offsets = lists.offsets();
        let mut starts = Vec::with_capacity(lists.len());
        let mut start = offsets[0] as usize;
        let mut previous = last.as_deref();
        let changed = BooleanBuffer::collect_bool(lists.len(), |row| {
            let end = offsets[row + 1] as usize;
            let list = &ids[start..end];
            let changed = previous != Some(list);
            let known = match previous {
                Some(previous) if changed => overlap(previous, list),
                Some(same) => same.len(),
                None => 0,
            };
            starts.push(start + known);
            (previous, start) = (Some(list), end);
            changed
        });
        *last = previous.map(<[i64]>::to_vec);
        Self { changed, starts }
    }

    /// The stored ends of `lists`, which are the lists that this was made of.
    fn into_lists(self, lists: &ListArray, nulls: Option<NullBuffer>) -> Result<ListArray> {
        let ids = ids_of(lists);
        let ends = lists.offsets()[1..].iter().map(|end| *end as usize);
        let lengths = || self.starts.iter().zip(ends.clone()).map(|(start, end)| end - start);
        let mut stored: Vec<i64> = Vec::with_capacity(lengths().sum());
        for (start, end) in self.starts.iter().zip(ends.clone()) {
            stored.extend_from_slice(&ids[*start..end]);
        }
        let stored = Arc::new(Int64Array::new(stored.into(), None));
        Ok(ListArray::try_new(schema::item_field(), OffsetBuffer::from_lengths(lengths()), stored, nulls)?)
    }
}

fn ids_of(lists: &ListArray) -> &[i64] {
    lists.values().as_primitive::<Int64Type>().values()
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Int32Type;

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
