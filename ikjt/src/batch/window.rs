//! Partial deduplication: rows that are overlapping slices of shared values.
//!
//! A history that gains an item and drops the oldest one is a new row, but almost all of its items are in the
//! previous row. RecD (Zhao et al., MLSys 2023) calls these *partial* duplicates. Here such a row becomes a slice of
//! the same values:
//!
//! ```text
//! row 0  [1, 2, 3]             values   [1, 2, 3, 4, 5]
//! row 1  [2, 3, 4]      ─▶     offsets  [0, 1, 2]
//! row 2  [3, 4, 5]             sizes    [3, 3, 3]
//! ```

use onefold_datasets::{overlap, position_of};

use crate::batch::{Feature, Group};

/// Returns the group with rows that share overlapping values: turns an IKJT into a partial IKJT.
///
/// If a row starts with the last items stored so far, only the items after them are stored. If a row is contained in
/// the previous row, nothing is stored. Every other row is stored whole. The rows and the inverse index do not
/// change, and `fold_windows(g).expand()` equals `g.expand()`. A feature for which this saves no values keeps its
/// buffers, so no feature grows. Time is linear in the number of ids of the rows. [`deduplicate`](crate::deduplicate)
/// reverses the operation.
///
/// ```
/// use onefold_ikjt::{Feature, Group, fold_windows};
///
/// let history = Feature::from_rows("history", &[[1, 2, 3], [2, 3, 4], [3, 4, 5]])?;
/// let folded = fold_windows(&Group::try_new("user", None, vec![history])?);
/// assert_eq!(folded.features()[0].values()[..], [1, 2, 3, 4, 5]);
/// assert_eq!(folded.features()[0].offsets()[..], [0, 1, 2]);
/// # Ok::<(), onefold_ikjt::Error>(())
/// ```
pub fn fold_windows(group: &Group) -> Group {
    let features =
        group.features().iter().map(|feature| fold_feature(feature).unwrap_or_else(|| feature.clone()));
    Group::trusted(group.shared_name(), group.inverse().cloned(), group.rows(), features.collect())
}

/// Folds one feature. Returns `None` if this saves no values.
fn fold_feature(feature: &Feature) -> Option<Feature> {
    let limit = feature.values().len().min(i32::MAX as usize);
    let mut stored: Vec<i64> = Vec::new();
    let mut offsets = Vec::with_capacity(feature.rows());
    // The place at which the last non-empty row is stored.
    let mut previous = 0..0;
    for row in 0..feature.rows() {
        let next = feature.row(row);
        let shared = overlap(&stored, next);
        let within = if shared < next.len() { position_of(next, &stored[previous.clone()]) } else { None };
        let offset = match within {
            Some(place) => previous.start + place,
            None => {
                let offset = stored.len() - shared;
                stored.extend_from_slice(&next[shared..]);
                if stored.len() >= limit {
                    return None;
                }
                offset
            }
        };
        if !next.is_empty() {
            previous = offset..offset + next.len();
        }
        offsets.push(offset as i32);
    }
    let (name, sizes) = (feature.shared_name(), feature.sizes().clone());
    Some(Feature::trusted(name, stored.into(), offsets.into(), sizes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::{groups, lists};
    use crate::batch::deduplicate;

    /// Generates lists of a window over a random walk: items are appended at the end and dropped at the start.
    fn sliding() -> impl Strategy<Value = Vec<Vec<i64>>> {
        let steps = prop::collection::vec((prop::collection::vec(0_i64..3, 0..4), 0_usize..4), 0..30);
        steps.prop_map(|steps| {
            let mut window = vec![];
            let slide = |(items, drop): (Vec<i64>, usize)| {
                window.extend(items);
                window.drain(..drop.min(window.len()));
                window.clone()
            };
            steps.into_iter().map(slide).collect()
        })
    }

    /// Counts the values that the rows need, with a simple quadratic algorithm.
    fn naive(rows: &[Vec<i64>]) -> usize {
        let (mut stored, mut previous): (Vec<i64>, &[i64]) = (vec![], &[]);
        for row in rows.iter().filter(|row| !row.is_empty()) {
            let kept = (0..=row.len()).rev().find(|n| stored.ends_with(&row[..*n])).unwrap();
            if !previous.windows(row.len()).any(|within| within == row) {
                stored.extend(&row[kept..]);
            }
            previous = row;
        }
        stored.len()
    }

    proptest! {
        #[test]
        fn folding_changes_no_sample_and_adds_no_value(group in groups()) {
            for group in [deduplicate(&group), group] {
                let folded = fold_windows(&group);
                prop_assert_eq!(lists(&folded), lists(&group));
                prop_assert_eq!(folded.inverse(), group.inverse());
                prop_assert_eq!(folded.expand(), group.expand());
                for (new, old) in folded.features().iter().zip(group.features()) {
                    prop_assert!(new.values().len() <= old.values().len());
                }
                prop_assert_eq!(lists(&deduplicate(&folded)), lists(&group));
            }
        }

        #[test]
        fn a_sliding_window_costs_its_new_items(rows in sliding()) {
            let feature = Feature::from_rows("w", &rows).unwrap();
            let folded = fold_windows(&Group::try_new("g", None, vec![feature]).unwrap());
            let folded = &folded.features()[0];
            prop_assert_eq!(folded.values().len(), naive(&rows));
            for (u, row) in rows.iter().enumerate() {
                prop_assert_eq!(folded.row(u), &row[..]);
            }
        }
    }

    #[test]
    fn a_row_within_the_one_before_costs_nothing() {
        let rows = [vec![1, 2, 3, 4], vec![2, 3], vec![2, 3], vec![], vec![3], vec![4, 5]];
        let group = Group::try_new("g", None, vec![Feature::from_rows("w", &rows).unwrap()]).unwrap();
        let folded = fold_windows(&group);
        assert_eq!(folded.features()[0].values()[..], [1, 2, 3, 4, 5]);
        assert_eq!(folded.expand(), group);
    }

    #[test]
    fn groups_that_cannot_be_folded_are_not_copied() {
        let feature = Feature::from_rows("x", &[[1, 2], [3, 4]]).unwrap();
        let group = Group::try_new("g", None, vec![feature]).unwrap();
        let folded = fold_windows(&group);
        assert_eq!(folded.features()[0].values().as_ptr(), group.features()[0].values().as_ptr());
    }

    #[test]
    fn repetitive_rows_take_linear_time() {
        // Each long row contains almost the whole next row at almost every position, so a naive search takes 10^11
        // comparisons.
        let long = [vec![0; 1_000_000], vec![1]].concat();
        let short = [vec![0; 500_000], vec![2]].concat();
        let feature = Feature::from_rows("x", &[long, short.clone(), short]).unwrap();
        let folded = fold_windows(&Group::try_new("g", None, vec![feature]).unwrap());
        assert_eq!(folded.features()[0].values().len(), 1_500_002);
    }
}
