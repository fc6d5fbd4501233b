//! Exact deduplication of a group's rows.
//!
//! Turns a plain KJT into RecD's InverseKeyedJaggedTensor (Zhao et al., MLSys 2023). In data clustered by session
//! most rows repeat the row of the previous sample. A row is therefore compared with the previous row first, which
//! needs no hash. Only a row that differs is looked up among the distinct rows of the batch. The rows of a folded row
//! group already differ from their predecessors: each row is looked up once, independent of the number of samples
//! that use it, and rows that share ids keep sharing them.

use crate::batch::operations::UsedRows;
use crate::batch::{Feature, Group};
use crate::error::Result;

/// Returns the same samples with every distinct row stored once, in the order in which the rows first occur.
///
/// Two samples share a row exactly if all features of the group have equal ids in both. The new features hold their
/// rows contiguously, without gaps. `deduplicate(g).expand()` equals `g.expand()`.
///
/// # Panics
///
/// If the distinct rows of a feature have more than `i32::MAX` ids in total. This can happen if the lists share ids
/// in `group`.
pub fn deduplicate(group: &Group) -> Group {
    deduplicate_shared(group)
        .and_then(Group::compact)
        .expect("the distinct rows have no more ids than `i32` counts")
}

/// Does the same as [`deduplicate`], but defers the compaction (see [`Feature::select`]) and returns an error instead
/// of panicking.
pub(crate) fn deduplicate_shared(group: &Group) -> Result<Group> {
    let (features, samples) = (group.features(), group.samples());
    let rows = (0..samples).map(|sample| group.row_of(sample));
    let (inverse, distinct) = distinct_rows(features, rows, group.rows().min(samples));
    let rows = features.iter().map(|feature| feature.select(distinct.iter().copied()));
    let (name, rows) = (group.shared_name(), rows.collect::<Result<_>>()?);
    Ok(Group::trusted(name, Some(inverse.into()), distinct.len(), rows))
}

/// Deduplicates rows that share ids, and keeps the sharing. Ids that no distinct row uses are dropped, so the result
/// never has more ids than the distinct rows stored contiguously.
///
/// `group` must be in the form of the groups of [`Batch::slice`](crate::Batch::slice): every row has a sample, rows are
/// numbered in the order of their first use, and every id is used. The search visits rows instead of samples, because
/// data clustered by session has several times as many samples as rows. A group without repeated rows keeps its buffers.
pub(crate) fn deduplicate_windows(group: &Group) -> Group {
    let rows = group.rows();
    let (numbers, distinct) = distinct_rows(group.features(), 0..rows, rows);
    let inverse = match group.inverse() {
        Some(_) if distinct.len() == rows => return group.clone(),
        Some(inverse) => inverse.iter().map(|row| numbers[*row as usize]).collect(),
        None => numbers.into(),
    };
    // A group has at most `i32::MAX` rows; `Feature` checks this.
    let rows = UsedRows::Listed(distinct.iter().map(|row| *row as i32).collect());
    group.with_rows(Some(inverse), &rows)
}

/// Returns the number of the distinct row for each row, and the distinct rows (at most `most`) in the order in which
/// they first occur.
fn distinct_rows(
    features: &[Feature],
    rows: impl ExactSizeIterator<Item = usize> + Clone,
    most: usize,
) -> (Vec<i32>, Vec<usize>) {
    // In most data, different rows differ in the sampled ids of some list. If too many samples collide, whole rows
    // are hashed.
    let few = rows.len() / 8 + 8;
    number_rows(features, rows.clone(), (most, few), |row| hash_row(features, row, sampled))
        .or_else(|| {
            number_rows(features, rows, (most, usize::MAX), |row| hash_row(features, row, <[i64]>::iter))
        })
        .expect("the second time has no limit")
}

/// Does the work of [`distinct_rows`] with the hash function `hash`. Returns `None` after more than `limit`
/// collisions.
fn number_rows(
    features: &[Feature],
    rows: impl ExactSizeIterator<Item = usize>,
    (most, limit): (usize, usize),
    hash: impl Fn(usize) -> u64,
) -> Option<(Vec<i32>, Vec<usize>)> {
    let mut numbers: Vec<i32> = Vec::with_capacity(rows.len());
    let mut distinct: Vec<usize> = Vec::new();
    let mut index = Index::with_capacity(most);
    let (mut before, mut collisions) = (None, 0);
    for row in rows {
        let number = match before {
            Some((other, number)) if other == row || equal_rows(features, other, row) => number,
            _ => index.find_or_insert(hash(row), &mut distinct, row, |other| {
                let is_equal = equal_rows(features, other, row);
                collisions += usize::from(!is_equal);
                is_equal
            }),
        };
        if collisions > limit {
            return None;
        }
        numbers.push(number);
        before = Some((row, number));
    }
    Some((numbers, distinct))
}

fn equal_rows(features: &[Feature], a: usize, b: usize) -> bool {
    features.iter().all(|feature| feature.row(a) == feature.row(b))
}

/// Returns at most three ids of a list: the first, the middle and the last.
fn sampled(ids: &[i64]) -> impl Iterator<Item = &i64> {
    ids.first().into_iter().chain(ids.get(ids.len() / 2)).chain(ids.last())
}

/// Hashes a row's lengths and the ids of each list that `some` selects, by multiplying and rotating as in `FxHash`.
fn hash_row<'a, I>(features: &'a [Feature], row: usize, some: impl Fn(&'a [i64]) -> I) -> u64
where
    I: Iterator<Item = &'a i64>,
{
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, id: i64| (state.rotate_left(5) ^ id as u64).wrapping_mul(K);
    let mut state = 0;
    for feature in features {
        let ids = feature.row(row);
        state = some(ids).fold(mix(state, ids.len() as i64), |state, id| mix(state, *id));
    }
    state ^ (state >> 32)
}

/// An open-addressing hash table from hashes to distinct rows. At most half of it is full, so that probe sequences
/// stay short.
struct Index {
    /// `(hash, slot)`; a negative slot is free.
    entries: Vec<(u64, i32)>,
}

impl Index {
    fn with_capacity(rows: usize) -> Self {
        Self { entries: vec![(0, -1); (2 * rows).next_power_of_two().max(2)] }
    }

    /// Returns the number of the distinct row that `equal` accepts. Otherwise adds `row` as a new distinct row.
    fn find_or_insert(
        &mut self,
        hash: u64,
        distinct: &mut Vec<usize>,
        row: usize,
        mut equal: impl FnMut(usize) -> bool,
    ) -> i32 {
        let mask = self.entries.len() - 1;
        let mut entry = hash as usize & mask;
        loop {
            let (other, slot) = self.entries[entry];
            if slot < 0 {
                // A group has at most `i32::MAX` rows; `Feature` checks this.
                let slot = distinct.len() as i32;
                self.entries[entry] = (hash, slot);
                distinct.push(row);
                return slot;
            }
            if other == hash && equal(distinct[slot as usize]) {
                return slot;
            }
            entry = (entry + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary;

    /// A slow, simple reference implementation: the inverse index and the distinct rows.
    fn naive(group: &Group) -> (Vec<i32>, Vec<Vec<Vec<i64>>>) {
        let mut seen: HashMap<Vec<Vec<i64>>, i32> = HashMap::new();
        let mut rows = Vec::new();
        let inverse = (0..group.samples())
            .map(|sample| {
                let row: Vec<_> =
                    group.features().iter().map(|f| f.row(group.row_of(sample)).to_vec()).collect();
                *seen.entry(row.clone()).or_insert_with(|| {
                    rows.push(row);
                    rows.len() as i32 - 1
                })
            })
            .collect();
        (inverse, rows)
    }

    fn groups() -> impl Strategy<Value = Group> {
        // Few different ids and lengths, so that rows repeat at short and long distances.
        let row = prop::collection::vec(prop::collection::vec(-1_i64..3, 0..4), 1..=3);
        (1_usize..=3, prop::collection::vec(row, 0..40)).prop_map(|(features, rows)| {
            let feature = |f: usize| {
                let lists: Vec<_> = rows.iter().map(|row| row[f % row.len()].clone()).collect();
                Feature::from_rows(format!("f{f}"), &lists).unwrap()
            };
            Group::try_new("g", None, (0..features).map(feature).collect()).unwrap()
        })
    }

    proptest! {
        #[test]
        fn deduplication_equals_the_naive_model(group in groups()) {
            let (inverse, rows) = naive(&group);
            let folded = deduplicate(&group);
            prop_assert_eq!(&folded.inverse().unwrap()[..], &inverse[..]);
            prop_assert_eq!(folded.rows(), rows.len());
            for (u, row) in rows.iter().enumerate() {
                let found: Vec<_> = folded.features().iter().map(|f| f.row(u).to_vec()).collect();
                prop_assert_eq!(&found, row);
            }
        }

        #[test]
        fn expansion_reverses_deduplication_and_deduplication_is_idempotent(group in groups()) {
            let folded = deduplicate(&group);
            prop_assert_eq!(folded.expand(), group);
            prop_assert_eq!(deduplicate(&folded), folded);
        }

        #[test]
        fn window_has_the_rows_of_exact_and_each_shared_id_once(group in arbitrary::groups()) {
            let group = group.slice(0..group.samples());
            let (exact, windows) = (deduplicate(&group), deduplicate_windows(&group));
            prop_assert_eq!(&windows, &exact);
            prop_assert_eq!(windows.expand(), group.expand());
            let rows: Vec<Vec<&[i64]>> =
                (0..group.rows()).map(|row| group.features().iter().map(|f| f.row(row)).collect()).collect();
            let is_new = |row: &usize| !rows[..*row].contains(&rows[*row]);
            for (i, feature) in group.features().iter().enumerate() {
                let spans = (0..group.rows()).filter(is_new).map(|row| feature.span(row));
                let used: BTreeSet<usize> = spans.flatten().collect();
                let stored = windows.features()[i].values().len();
                prop_assert_eq!(stored, used.len());
                prop_assert!(stored <= exact.features()[i].values().len());
            }
        }
    }

    #[test]
    fn a_repeated_session_adds_no_ids_and_its_windows_stay_shared() {
        // Two sessions of one user with another user's session between them, as a folded row group stores them.
        let values = vec![1_i64, 2, 3, 4, 8, 9, 1, 2, 3, 4];
        let feature = Feature::try_new("w", values, vec![0, 1, 4, 6, 7], vec![3, 3, 2, 3, 3]).unwrap();
        let inverse = vec![0, 1, 1, 2, 3, 4, 4];
        let group = Group::try_new("g", Some(inverse.into()), vec![feature]).unwrap();
        let windows = deduplicate_windows(&group);
        assert_eq!(windows.inverse().unwrap()[..], [0, 1, 1, 2, 0, 1, 1]);
        assert_eq!(windows.features()[0].values()[..], [1, 2, 3, 4, 8, 9]);
        assert_eq!(windows.features()[0].offsets()[..], [0, 1, 4]);
        assert_eq!(windows.expand(), group.expand());
    }

    #[test]
    fn rows_without_repetitions_are_not_copied() {
        let feature = Feature::try_new("w", vec![1_i64, 2, 3, 4], vec![0, 1], vec![3, 3]).unwrap();
        let group = Group::try_new("g", Some(vec![0, 1, 1].into()), vec![feature]).unwrap();
        let windows = deduplicate_windows(&group);
        assert_eq!(windows.features()[0].values().as_ptr(), group.features()[0].values().as_ptr());
        assert_eq!(windows, group);
    }

    #[test]
    fn rows_that_differ_in_few_ids_stay_distinct() {
        // The sampled ids are equal in all rows, so the number of collisions exceeds the limit.
        let rows: Vec<Vec<i64>> = (0..200).map(|i| [vec![7], vec![i % 100], vec![7; 30]].concat()).collect();
        let group = Group::try_new("g", None, vec![Feature::from_rows("x", &rows).unwrap()]).unwrap();
        let features = group.features();
        let sampled = number_rows(features, 0..200, (200, 33), |row| hash_row(features, row, sampled));
        assert!(sampled.is_none());
        let folded = deduplicate(&group);
        assert_eq!(folded.rows(), 100);
        assert_eq!(folded.expand(), group);
    }

    #[test]
    fn rows_with_equal_concatenated_lists_stay_distinct() {
        let a = Feature::from_rows("a", &[vec![1], vec![1, 2]]).unwrap();
        let b = Feature::from_rows("b", &[vec![2, 3], vec![3]]).unwrap();
        assert_eq!(deduplicate(&Group::try_new("g", None, vec![a, b]).unwrap()).rows(), 2);
    }
}
