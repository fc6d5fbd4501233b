//! The `folded` layout: stores lists where they change, and for windows only the appended items. Only this
//! module writes and reads it.
//!
//! In a deduplicated group, `null` means "same as the row above", within a row group. A sequence feature is
//! stored as a **window**: its column holds the appended ids, and the length column after it holds the length
//! of the list. With T the concatenation of all ids appended up to a row, the list is the last `length` ids
//! of T. A list that does not continue its predecessor, for example because an id was removed or ids were
//! reordered, is appended as a whole, so any lists can be folded. Each feature is folded independently.
//! Groups that are not deduplicated store a list in every row. In this example, `city` is a sparse feature
//! and `history` a sequence feature:
//!
//! ```text
//!            rows                        folded                          unfolded
//!  sample    city   history              city   history   .length       inverse of city   of history
//!    0       [7]    [1 2 3]              [7]    [1 2 3]      3                0                0
//!    1       [7]    [2 3 4]     fold     null   [4]          3    unfold_     0                1
//!    2       [8]    [2 3 4]   ───────▶   [8]    []         null   group──▶    1                1
//!    3       [8]    []                   null   []           0                1                2
//!    4       []     [9 9]                []     [9 9]        2                2                3
//!
//!  the distinct rows of city:     values 7 8          offsets 0 1 2      sizes 1 1 0
//!  the distinct rows of history:  values 1 2 3 4 9 9  offsets 0 1 4 4    sizes 3 3 0 2
//! ```
//!
//! The writer of datasets folds the columns of a row group. [`unfold_group`] converts them to the buffers of
//! a deduplicated batch without repeating, hashing or comparing a list: the nulls determine the inverse
//! index, and the ids of the columns are the values. In a group of several features, a distinct row starts
//! wherever any of them changes.
//!
//! ```
//! use arrow::array::{ArrayRef, Int32Array, ListArray, RecordBatch};
//! use arrow::datatypes::Int64Type;
//! use onefold_datasets::folded::unfold_group;
//! use onefold_datasets::{FeatureGroup, SparseFeature, SparseKind};
//! use std::sync::Arc;
//!
//! let history = SparseFeature::new("history", SparseKind::Sequence);
//! let group = FeatureGroup { name: "past".into(), deduplicated: true, features: vec![history] };
//! let appended = [vec![1, 2, 3], vec![4], vec![], vec![], vec![9, 9]];
//! let appended = appended.map(|ids| Some(ids.into_iter().map(Some).collect::<Vec<_>>()));
//! let lengths = Int32Array::from(vec![Some(3), Some(3), None, Some(0), Some(2)]);
//! let folded = RecordBatch::try_from_iter([
//!     ("history", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(appended)) as ArrayRef),
//!     ("history.length", Arc::new(lengths)),
//! ])?;
//!
//! let past = unfold_group(&folded, &group)?;
//! assert_eq!(past.inverse, [0, 1, 1, 2, 3]);
//! assert_eq!(past.features[0].values[..], [1, 2, 3, 4, 9, 9]);
//! assert_eq!(past.features[0].offsets, [0, 1, 4, 4]);
//! assert_eq!(past.features[0].sizes, [3, 3, 0, 2]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod fold;
mod unfold;

pub(crate) use fold::Fold;
pub use unfold::{UnfoldError, UnfoldedFeature, UnfoldedGroup, unfold_group};

#[cfg(test)]
pub(crate) mod samples;

#[cfg(test)]
mod tests {
    use arrow::array::{Array, AsArray, RecordBatch};
    use arrow::compute::concat_batches;
    use arrow::datatypes::{Int32Type, Int64Type};
    use proptest::prelude::*;

    use super::samples::{Sample, rows, schema};
    use super::*;
    use crate::FeatureGroup;
    use crate::conform::conform;

    /// Folds samples of [`schema`] batch by batch, starting at the beginning of a row group.
    pub(super) struct Folder(Vec<(Fold, Option<Vec<i64>>)>);

    impl Folder {
        pub(super) fn new() -> Self {
            Self(Fold::of_schema(&schema()).into_iter().map(|fold| (fold, None)).collect())
        }

        pub(super) fn fold(&mut self, rows: &RecordBatch) -> RecordBatch {
            let rows = conform(rows, &schema().to_arrow()).unwrap();
            let columns = rows.schema_ref().fields().iter().zip(rows.columns());
            let folded = self.0.iter_mut().zip(columns);
            let folded = folded
                .flat_map(|((fold, last), (field, column))| fold.fold(field.name(), column, last).unwrap());
            RecordBatch::try_new(schema().to_folded_arrow(), folded.collect()).unwrap()
        }
    }

    /// Unfolds the column `name` of a row group by the definition of the layout: returns the list of each
    /// row, with T written out.
    fn lists_by_definition(columns: &RecordBatch, name: &str) -> Vec<Vec<i64>> {
        let lists = columns.column_by_name(name).unwrap().as_list::<i32>();
        let ids = |row| lists.value(row).as_primitive::<Int64Type>().values().to_vec();
        let lengths = columns.column_by_name(&format!("{name}.length"));
        let mut rows: Vec<Vec<i64>> = Vec::new();
        let mut appended = Vec::new();
        for row in 0..columns.num_rows() {
            appended.extend(ids(row));
            let list = match lengths.map(|lengths| lengths.as_primitive::<Int32Type>()) {
                None => lists.is_valid(row).then(|| ids(row)),
                Some(lengths) => lengths
                    .is_valid(row)
                    .then(|| appended[appended.len() - lengths.value(row) as usize..].to_vec()),
            };
            rows.push(list.unwrap_or_else(|| rows[row - 1].clone()));
        }
        rows
    }

    /// Returns the lists of a group's samples, expanded from its distinct rows.
    fn expand(group: &UnfoldedGroup) -> Vec<Vec<Vec<i64>>> {
        let row = |feature: &UnfoldedFeature, row: usize| {
            feature.values[feature.offsets[row] as usize..][..feature.sizes[row] as usize].to_vec()
        };
        let sample = |distinct: &i32| group.features.iter().map(|f| row(f, *distinct as usize)).collect();
        group.inverse.iter().map(sample).collect()
    }

    /// Returns the inverse index with a new distinct row wherever a sample differs from the preceding one.
    fn naive_inverse(samples: &[Vec<Vec<i64>>], deduplicated: bool) -> Vec<i32> {
        let mut inverse = vec![0; samples.len().min(1)];
        for pair in samples.windows(2) {
            inverse.push(inverse[inverse.len() - 1] + i32::from(!deduplicated || pair[0] != pair[1]));
        }
        inverse
    }

    fn group_samples(samples: &[Sample], group: usize) -> Vec<Vec<Vec<i64>>> {
        let features = [0..3, 3..4][group].clone();
        samples.iter().map(|sample| sample[features.clone()].to_vec()).collect()
    }

    fn check(columns: &RecordBatch, samples: &[Sample], group: usize, schema: &FeatureGroup) {
        let unfolded = unfold_group(columns, schema).unwrap();
        let expected = group_samples(samples, group);
        assert_eq!(expand(&unfolded), expected);
        assert_eq!(unfolded.inverse, naive_inverse(&expected, schema.deduplicated));
        let distinct = unfolded.inverse.last().map_or(0, |last| *last as usize + 1);
        assert!(unfolded.features.iter().all(|f| f.offsets.len() == distinct && f.sizes.len() == distinct));
    }

    /// Generates a change of a list from one sample to the next.
    fn change() -> impl Strategy<Value = (usize, usize, Vec<i64>)> {
        // Kinds: 0 and 1 keep the list, 2 slides it, 3 removes an inner id, 4 reverses it, 5 replaces it.
        (0..6_usize, 0..4_usize, prop::collection::vec(0..3_i64, 0..4))
    }

    fn changed(list: &[i64], (kind, count, ids): (usize, usize, Vec<i64>)) -> Vec<i64> {
        let mut list = list.to_vec();
        match kind {
            0 | 1 => {}
            2 => {
                list.drain(..count.min(list.len()));
                list.extend(ids);
            }
            3 if count < list.len() => drop(list.remove(count)),
            4 => list.reverse(),
            _ => list = ids,
        }
        list
    }

    fn samples() -> impl Strategy<Value = Vec<Sample>> {
        let changes = [change(), change(), change(), change()];
        prop::collection::vec(changes, 0..60).prop_map(|all| {
            let mut last: Sample = Default::default();
            all.into_iter()
                .map(|changes| {
                    for (list, change) in last.iter_mut().zip(changes) {
                        *list = changed(list, change);
                    }
                    last.clone()
                })
                .collect()
        })
    }

    /// Folds samples in batches. A batch ends where `ends` is 1 or 2, and a row group ends where it is 2.
    fn fold_row_groups(samples: &[Sample], ends: &[u8]) -> Vec<(std::ops::Range<usize>, RecordBatch)> {
        // All samples are in one batch, so the folded batches are slices with any offset.
        let all = rows(samples);
        let mut folder = Folder::new();
        let (mut groups, mut batches, mut start, mut group_start) = (vec![], vec![], 0, 0);
        for (end, kind) in (1..=samples.len()).zip(ends) {
            let kind = if end == samples.len() { 2 } else { *kind };
            if kind == 0 {
                continue;
            }
            batches.push(folder.fold(&all.slice(start, end - start)));
            start = end;
            if kind == 2 {
                let group = concat_batches(&schema().to_folded_arrow(), &batches).unwrap();
                groups.push((group_start..end, group));
                batches.clear();
                group_start = end;
                folder = Folder::new();
            }
        }
        groups
    }

    proptest! {
        #[test]
        fn unfolding_undoes_folding(samples in samples(), ends in prop::collection::vec(0..3_u8, 60)) {
            let schema = schema();
            let groups = fold_row_groups(&samples, &ends);
            for (range, columns) in &groups {
                let expected = &samples[range.clone()];
                for (feature, name) in ["city", "tags", "history", "item"].iter().enumerate() {
                    let lists: Vec<_> = expected.iter().map(|sample| sample[feature].clone()).collect();
                    prop_assert_eq!(lists_by_definition(columns, name), lists, "{}", name);
                }
                for (i, group) in schema.groups.iter().enumerate() {
                    check(columns, expected, i, group);
                }
            }
            // Also checks a row group that is a slice of several, and the first rows of a row group.
            if let Some((_, first)) = groups.first() {
                let all = concat_batches(first.schema_ref(), groups.iter().map(|(_, group)| group)).unwrap();
                for (range, _) in &groups {
                    for length in [range.len(), range.len() / 2] {
                        let expected = &samples[range.start..range.start + length];
                        check(&all.slice(range.start, length), expected, 0, &schema.groups[0]);
                    }
                }
            }
        }

        #[test]
        fn a_feature_alone_has_its_own_distinct_rows(samples in samples()) {
            for (range, columns) in fold_row_groups(&samples, &[0; 60]) {
                for (i, feature) in schema().groups[0].features.iter().enumerate() {
                    let features = vec![feature.clone()];
                    let group = FeatureGroup { name: "one".into(), deduplicated: true, features };
                    let unfolded = unfold_group(&columns, &group).unwrap();
                    let expected = samples[range.clone()].iter().map(|sample| vec![sample[i].clone()]);
                    let expected: Vec<_> = expected.collect();
                    prop_assert_eq!(expand(&unfolded), &expected[..]);
                    prop_assert_eq!(unfolded.inverse, naive_inverse(&expected, true));
                }
            }
        }
    }

    #[test]
    fn a_window_that_slides_stores_every_id_once() {
        let timeline: Vec<i64> = (0..200).collect();
        let sample = |row: usize| [vec![], vec![], timeline[row..row + 100].to_vec(), vec![]];
        let samples: Vec<Sample> = (0..=100).map(sample).collect();
        let columns = Folder::new().fold(&rows(&samples));
        let unfolded = unfold_group(&columns, &schema().groups[0]).unwrap();
        assert_eq!(unfolded.features[2].values[..], timeline);
        assert_eq!(unfolded.features[2].offsets, Vec::from_iter(0..=100));
        assert_eq!(expand(&unfolded), group_samples(&samples, 0));
    }
}
