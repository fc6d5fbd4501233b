//! Unfolding: converts stored changes to distinct rows, without copying or comparing ids.

use arrow::array::{Array, ArrayRef, AsArray, ListArray, RecordBatch};
use arrow::buffer::{BooleanBuffer, NullBuffer, ScalarBuffer};
use arrow::datatypes::{Int32Type, Int64Type};

use crate::{FeatureGroup, SparseFeature};

/// The distinct rows of a feature group, and the distinct row of each sample.
#[derive(Debug, Clone)]
pub struct UnfoldedGroup {
    /// The distinct row of each sample. It is 0 for the first sample, and never decreases.
    pub inverse: Vec<i32>,
    /// The features in the order of the group, all with the same number of distinct rows.
    pub features: Vec<UnfoldedFeature>,
}

/// The distinct rows of a feature: row `u` is `values[offsets[u]..][..sizes[u]]`. If another feature of the
/// group changes but this one does not, the same offset and size are repeated. The rows of a window overlap.
#[derive(Debug, Clone)]
pub struct UnfoldedFeature {
    /// The feature's name.
    pub name: String,
    /// The ids of the feature's column. The buffer is shared with the column.
    pub values: ScalarBuffer<i64>,
    /// The offset of each distinct row in `values`.
    pub offsets: Vec<i32>,
    /// The number of ids in each distinct row.
    pub sizes: Vec<i32>,
}

/// The reason why folded columns of a file are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column `{column}`{}: {message}", row.map_or_else(String::new, |row| format!(", row {row}")))]
pub struct UnfoldError {
    /// The name of the column.
    pub column: String,
    /// The row in the given batch, counted from 0, if the error concerns a single row.
    pub row: Option<usize>,
    /// A description of the error.
    pub message: String,
}

impl UnfoldError {
    fn new(column: &str, row: Option<usize>, message: impl Into<String>) -> Self {
        Self { column: column.to_owned(), row, message: message.into() }
    }
}

/// Finds the distinct rows of `group` in the folded `columns` of a row group, or in the first rows of one.
/// Other columns are ignored. In a group that is not deduplicated, every row is a distinct row.
///
/// The cost is one `i32` per sample, and an offset and a size per distinct row and feature. The ids are not
/// read.
///
/// # Errors
///
/// [`UnfoldError`] if a column is missing or has another type, the first row is null, a list contains nulls
/// or is null where the layout does not allow it, a length is negative or exceeds the number of ids so far,
/// ids are appended where the length is null, or there are more rows than an `i32` can count.
pub fn unfold_group(columns: &RecordBatch, group: &FeatureGroup) -> Result<UnfoldedGroup, UnfoldError> {
    let features = group.features.iter().map(|feature| Column::find(columns, group, feature));
    let features = features.collect::<Result<Vec<_>, _>>()?;
    let starts = distinct_starts(&features, columns.num_rows());
    Ok(UnfoldedGroup {
        inverse: inverse(&starts, columns.num_rows()),
        features: features.iter().map(|feature| feature.unfold(&starts)).collect::<Result<_, _>>()?,
    })
}

/// The columns of a feature, with checked types. If there are rows, the first one is not null.
struct Column<'a> {
    feature: &'a SparseFeature,
    lists: &'a ListArray,
    ids: &'a ScalarBuffer<i64>,
    /// The validity of the rows, which is set where the list changes. `None` means that the list changes in
    /// every row.
    changes: Option<&'a NullBuffer>,
    /// The lengths, if `lists` contains the items appended to a window.
    lengths: Option<&'a [i32]>,
}

impl<'a> Column<'a> {
    fn find(
        columns: &'a RecordBatch,
        group: &FeatureGroup,
        feature: &'a SparseFeature,
    ) -> Result<Self, UnfoldError> {
        let name = &feature.name;
        let column = find(columns, name)?;
        let lists = column.as_list_opt::<i32>().ok_or_else(|| wrong_type(name, column, "List<Int64>"))?;
        let ids = lists.values().as_primitive_opt::<Int64Type>();
        let ids = ids.ok_or_else(|| wrong_type(name, column, "List<Int64>"))?.values();
        check_rows(name, lists.len())?;
        check_items(name, lists)?;
        if group.folds_to_window(feature) {
            let length_name = feature.length_column();
            let column = find(columns, &length_name)?;
            let lengths = column.as_primitive_opt::<Int32Type>();
            let lengths = lengths.ok_or_else(|| wrong_type(&length_name, column, "Int32"))?;
            check_no_null(name, lists.nulls(), "a window's appended ids are never null")?;
            check_first(&length_name, lengths.nulls())?;
            let changes = lengths.nulls().filter(|nulls| nulls.null_count() > 0);
            return Ok(Self { feature, lists, ids, changes, lengths: Some(lengths.values()) });
        }
        if !group.deduplicated {
            check_no_null(name, lists.nulls(), "a group that is not deduplicated has a list in every row")?;
        }
        check_first(name, lists.nulls())?;
        let changes = lists.nulls().filter(|nulls| nulls.null_count() > 0);
        Ok(Self { feature, lists, ids, changes, lengths: None })
    }

    /// Returns the feature's list in each distinct row; `starts` contains the first row of each distinct row.
    fn unfold(&self, starts: &[usize]) -> Result<UnfoldedFeature, UnfoldError> {
        let bounds = self.lists.offsets();
        let (mut offsets, mut sizes) = (Vec::with_capacity(starts.len()), Vec::with_capacity(starts.len()));
        let (mut offset, mut size) = (0, 0);
        // For a window: rows from `next` on have not been checked yet, and `end` is the end of the ids
        // appended before them.
        let (mut next, mut end) = (0, bounds[0]);
        for &row in starts {
            if self.changes.is_none_or(|changes| changes.is_valid(row)) {
                if let Some(lengths) = self.lengths {
                    if bounds[row] != end {
                        return Err(self.appended_without_length(next));
                    }
                    (next, end, size) = (row + 1, bounds[row + 1], lengths[row]);
                    if size < 0 || size > end - bounds[0] {
                        return Err(self.wrong_length(row, size, end - bounds[0]));
                    }
                    offset = end - size;
                } else {
                    (offset, size) = (bounds[row], bounds[row + 1] - bounds[row]);
                }
            }
            offsets.push(offset);
            sizes.push(size);
        }
        if self.lengths.is_some() && bounds[self.lists.len()] != end {
            return Err(self.appended_without_length(next));
        }
        Ok(UnfoldedFeature { name: self.feature.name.clone(), values: self.ids.clone(), offsets, sizes })
    }

    /// Returns the error for the first row, starting at `row`, that appends ids although its length is null.
    fn appended_without_length(&self, row: usize) -> UnfoldError {
        let more = self.lists.offsets()[row..].windows(2).take_while(|pair| pair[0] == pair[1]).count();
        let message = format!("it appends ids, but `{}` is null", self.feature.length_column());
        UnfoldError::new(&self.feature.name, Some(row + more), message)
    }

    fn wrong_length(&self, row: usize, length: i32, ids: i32) -> UnfoldError {
        let message = match length {
            ..0 => format!("the length {length} is negative"),
            _ => format!("the length is {length}, but the row group has {ids} ids up to here"),
        };
        UnfoldError::new(&self.feature.length_column(), Some(row), message)
    }
}

fn find<'a>(columns: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, UnfoldError> {
    columns.column_by_name(name).ok_or_else(|| UnfoldError::new(name, None, "it is missing"))
}

fn wrong_type(name: &str, found: &ArrayRef, expected: &str) -> UnfoldError {
    UnfoldError::new(name, None, format!("it has type {}, expected {expected}", found.data_type()))
}

fn check_first(name: &str, nulls: Option<&NullBuffer>) -> Result<(), UnfoldError> {
    if nulls.is_some_and(|nulls| !nulls.is_empty() && nulls.is_null(0)) {
        let message = "it is null in the first row of a row group, where nothing is above it";
        return Err(UnfoldError::new(name, Some(0), message));
    }
    Ok(())
}

fn check_no_null(name: &str, nulls: Option<&NullBuffer>, why: &str) -> Result<(), UnfoldError> {
    match nulls.filter(|nulls| nulls.null_count() > 0) {
        None => Ok(()),
        Some(nulls) => {
            let row = nulls.iter().position(|valid| !valid);
            Err(UnfoldError::new(name, row, format!("it is null, but {why}")))
        }
    }
}

/// Checks that no list contains a null.
fn check_items(name: &str, lists: &ListArray) -> Result<(), UnfoldError> {
    if lists.values().null_count() == 0 {
        return Ok(());
    }
    let bounds = lists.offsets();
    let (start, end) = (bounds[0] as usize, bounds[lists.len()] as usize);
    let null = (start..end).find(|item| lists.values().is_null(*item));
    null.map_or(Ok(()), |item| {
        let row = bounds.partition_point(|bound| *bound as usize <= item) - 1;
        Err(UnfoldError::new(name, Some(row), "its list holds a null"))
    })
}

/// Checks that row numbers fit into `i32`, the type of inverse indices and offsets. The number of ids always
/// fits, but there can be more empty lists.
fn check_rows(name: &str, rows: usize) -> Result<(), UnfoldError> {
    if i32::try_from(rows).is_err() {
        let message = format!("its {rows} rows are more than 32-bit inverse indices address");
        return Err(UnfoldError::new(name, None, message));
    }
    Ok(())
}

/// Returns the rows in which any feature changes.
fn distinct_starts(features: &[Column], rows: usize) -> Vec<usize> {
    let mut union: Option<BooleanBuffer> = None;
    for feature in features {
        let Some(changes) = feature.changes else { return (0..rows).collect() };
        union = Some(match union {
            None => changes.inner().clone(),
            Some(union) => &union | changes.inner(),
        });
    }
    // In a group without features, all samples share one empty row.
    let Some(union) = union else { return (0..rows.min(1)).collect() };
    let mut starts = Vec::with_capacity(union.count_set_bits());
    starts.extend(union.set_indices());
    starts
}

/// Returns the distinct row of each sample.
fn inverse(starts: &[usize], rows: usize) -> Vec<i32> {
    let mut inverse = Vec::with_capacity(rows);
    for (row, end) in (0..).zip(starts.iter().skip(1).chain([&rows])) {
        inverse.resize(*end, row);
    }
    inverse
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int32Array, Int64Array, StringArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::{DataType, Field};

    use super::super::samples::{rows, schema};
    use super::super::tests::Folder;
    use super::super::unfold_group;
    use super::*;

    /// Returns four folded samples. The second changes nothing, the third changes `city` and `history`, the
    /// fourth changes `tags`.
    fn folded() -> RecordBatch {
        let samples = [
            [vec![7], vec![1], vec![1, 2, 3], vec![5]],
            [vec![7], vec![1], vec![1, 2, 3], vec![5]],
            [vec![8], vec![1], vec![2, 3, 4], vec![5]],
            [vec![8], vec![2], vec![2, 3, 4], vec![5]],
        ];
        Folder::new().fold(&rows(&samples))
    }

    fn lists(lists: &[Option<&[Option<i64>]>]) -> ArrayRef {
        let lists = lists.iter().map(|list| list.map(<[_]>::to_vec));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    }

    fn lengths(lengths: [Option<i32>; 4]) -> ArrayRef {
        Arc::new(Int32Array::from_iter(lengths))
    }

    /// Returns the error of unfolding the group of the column `name` if `column` replaces that column.
    fn refused(name: &str, column: Option<ArrayRef>) -> String {
        let folded = folded();
        let columns = folded.schema_ref().fields().iter().zip(folded.columns());
        let columns = columns.filter_map(|(field, old)| {
            let new = if field.name() == name { column.clone() } else { Some(Arc::clone(old)) };
            new.map(|new| (field.name().clone(), new, true))
        });
        let columns = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
        let results = schema().groups.into_iter().map(|group| unfold_group(&columns, &group));
        let errors: Vec<_> = results.filter_map(Result::err).collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        errors[0].to_string()
    }

    #[test]
    fn lists_that_are_not_folded_lists_are_refused() {
        let one = Some(&[Some(1)][..]);
        assert_eq!(refused("city", None), "column `city`: it is missing");
        let text: ArrayRef = Arc::new(StringArray::from(vec!["a"; 4]));
        assert_eq!(refused("city", Some(text)), "column `city`: it has type Utf8, expected List<Int64>");
        let null_first = lists(&[None, one, None, one]);
        let message =
            "column `city`, row 0: it is null in the first row of a row group, where nothing is above it";
        assert_eq!(refused("city", Some(null_first)), message);
        let null_item = lists(&[one, None, Some(&[]), Some(&[Some(1), None])]);
        assert_eq!(refused("city", Some(null_item)), "column `city`, row 3: its list holds a null");
        let null_list = lists(&[one, one, None, one]);
        let message =
            "column `item`, row 2: it is null, but a group that is not deduplicated has a list in every row";
        assert_eq!(refused("item", Some(null_list)), message);
    }

    #[test]
    fn lists_of_another_number_type_are_refused() {
        let item = Arc::new(Field::new("element", DataType::Int32, false));
        let numbers = Arc::new(Int32Array::from(vec![1; 4]));
        let ints = ListArray::new(item, OffsetBuffer::from_lengths([1; 4]), numbers, None);
        let error = refused("tags", Some(Arc::new(ints)));
        assert!(error.starts_with("column `tags`: it has type List("), "{error}");
        assert!(error.ends_with("expected List<Int64>"), "{error}");
    }

    #[test]
    fn windows_that_are_not_folded_windows_are_refused() {
        let (three, one, none) =
            (Some(&[Some(1), Some(2), Some(3)][..]), Some(&[Some(4)][..]), Some(&[][..]));
        let length = |lengths_: [Option<i32>; 4]| refused("history.length", Some(lengths(lengths_)));
        assert_eq!(refused("history.length", None), "column `history.length`: it is missing");
        let long: ArrayRef = Arc::new(Int64Array::from(vec![3; 4]));
        let message = "column `history.length`: it has type Int64, expected Int32";
        assert_eq!(refused("history.length", Some(long)), message);
        assert_eq!(
            length([None, Some(3), Some(3), None]),
            "column `history.length`, row 0: it is null in the first row of a row group, where nothing is above it"
        );
        assert_eq!(
            length([Some(3), None, Some(-1), None]),
            "column `history.length`, row 2: the length -1 is negative"
        );
        assert_eq!(
            length([Some(4), None, Some(3), None]),
            "column `history.length`, row 0: the length is 4, but the row group has 3 ids up to here"
        );
        assert_eq!(
            length([Some(3), None, None, None]),
            "column `history`, row 2: it appends ids, but `history.length` is null"
        );
        assert_eq!(
            refused("history", Some(lists(&[three, one, one, none]))),
            "column `history`, row 1: it appends ids, but `history.length` is null"
        );
        assert_eq!(
            refused("history", Some(lists(&[three, none, None, none]))),
            "column `history`, row 2: it is null, but a window's appended ids are never null"
        );
    }

    #[test]
    fn more_rows_than_the_inverse_index_can_count_are_refused() {
        assert!(check_rows("city", i32::MAX as usize).is_ok());
        let error = check_rows("city", 1 << 31).unwrap_err().to_string();
        assert_eq!(error, "column `city`: its 2147483648 rows are more than 32-bit inverse indices address");
    }

    #[test]
    fn values_are_shared_with_the_column() {
        let folded = folded().slice(0, 3);
        for group in &schema().groups {
            for feature in unfold_group(&folded, group).unwrap().features {
                let column = folded.column_by_name(&feature.name).unwrap().as_list::<i32>();
                let ids = column.values().as_primitive::<Int64Type>().values();
                assert!(feature.values.ptr_eq(ids), "{}", feature.name);
            }
        }
    }

    #[test]
    fn zero_rows_unfold_to_zero_distinct_rows() {
        let none = folded().slice(2, 0);
        for group in &schema().groups {
            let unfolded = unfold_group(&none, group).unwrap();
            assert!(unfolded.inverse.is_empty());
            assert!(unfolded.features.iter().all(|f| f.offsets.is_empty() && f.sizes.is_empty()));
        }
    }
}
