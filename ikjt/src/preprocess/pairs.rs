//! Operators on two lists of a sample. They run once per distinct pair of rows.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;

use super::arguments::Arguments;
use super::lists::{check_total, contiguous};
use super::problem::Checked;
use crate::batch::Feature;
use crate::hash::{SigridHash, mix};

/// An operator on two lists.
#[derive(Debug, Clone)]
pub(super) enum PairOp {
    Cartesian(SigridHash),
    Intersect,
    Score(Score),
}

/// The similarity of two lists as sets.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Score {
    OverlapCount,
    Jaccard,
}

/// A row of the left feature and a row of the right feature.
pub(super) type RowPair = (usize, usize);

pub(super) fn cartesian(arguments: &mut Arguments) -> Checked<PairOp> {
    let salt = arguments.optional::<u64>("salt")?.unwrap_or(0);
    Ok(PairOp::Cartesian(SigridHash::new(salt, arguments.integer("max", None, (1, i64::MAX))?)))
}

pub(super) fn compute_score(arguments: &mut Arguments) -> Checked<PairOp> {
    arguments.required("score").map(PairOp::Score)
}

/// Returns the inverse index and the distinct pairs of rows, in the order in which they first occur. `left` and
/// `right` are the inverse indices of the two groups, `[B]`.
pub(super) fn distinct_pairs(left: &[i32], right: &[i32]) -> (Vec<i32>, Arc<[RowPair]>) {
    let mut inverse: Vec<i32> = Vec::with_capacity(left.len());
    let mut pairs: Vec<RowPair> = Vec::new();
    let mut known: HashMap<(i32, i32), i32> = HashMap::new();
    let mut before = None;
    for pair in left.iter().copied().zip(right.iter().copied()) {
        // Samples of a session are contiguous, so most samples have the same pair as the previous sample.
        let slot = match inverse.last() {
            Some(last) if before == Some(pair) => *last,
            _ => *known.entry(pair).or_insert_with(|| {
                pairs.push((pair.0 as usize, pair.1 as usize));
                pairs.len() as i32 - 1
            }),
        };
        inverse.push(slot);
        before = Some(pair);
    }
    (inverse, pairs.into())
}

/// Generates the cartesian product of each pair of rows. The pair of an id `x` of the left row and an id `y` of the
/// right row is hashed to `sigrid_hash(y, mix(x, salt), max)`; `x` varies more slowly.
pub(super) fn product(
    name: Arc<str>,
    (left, right): (&Feature, &Feature),
    pairs: &[RowPair],
    hash: SigridHash,
) -> Checked<Feature> {
    let length = |&(l, r): &RowPair| left.row(l).len().saturating_mul(right.row(r).len());
    let total = pairs.iter().map(length).fold(0, usize::saturating_add);
    check_total(&name, total)?;
    let mut ids = Vec::with_capacity(total);
    for &(l, r) in pairs {
        let ys = right.row(r);
        for x in left.row(l) {
            let salted = hash.with_salt(mix(*x, hash.salt()));
            ids.extend(ys.iter().map(|y| salted.hash(*y)));
        }
    }
    contiguous(name, ids, pairs.iter().map(|pair| length(pair) as i32).collect())
}

/// Returns, for each pair of rows, the ids of the left row that are also in the right row: in the left row's order,
/// each id once.
pub(super) fn intersection(
    name: Arc<str>,
    (left, right): (&Feature, &Feature),
    pairs: &[RowPair],
) -> Checked<Feature> {
    let mut ids: Vec<i64> = Vec::new();
    let mut sizes = Vec::with_capacity(pairs.len());
    let (mut set, mut taken) = (RowSet::default(), Vec::new());
    for &(l, r) in pairs {
        let before = ids.len();
        let members = set.of(right, r);
        taken.clear();
        taken.resize(members.len(), false);
        for id in left.row(l) {
            if let Ok(place) = members.binary_search(id)
                && !std::mem::replace(&mut taken[place], true)
            {
                ids.push(*id);
            }
        }
        check_total(&name, ids.len())?;
        sizes.push((ids.len() - before) as i32);
    }
    contiguous(name, ids, sizes)
}

/// Returns the score of every pair of rows.
pub(super) fn scores((left, right): (&Feature, &Feature), pairs: &[RowPair], score: Score) -> Vec<f32> {
    let (mut of_left, mut of_right) = (RowSet::default(), RowSet::default());
    let of_pair = |&(l, r): &RowPair| {
        let (a, b) = (of_left.of(left, l), of_right.of(right, r));
        let common = common(a, b);
        let all = a.len() + b.len() - common;
        match score {
            Score::OverlapCount => common as f32,
            Score::Jaccard if all == 0 => 0.0,
            Score::Jaccard => (common as f64 / all as f64) as f32,
        }
    };
    pairs.iter().map(of_pair).collect()
}

/// Counts the common ids of two ascending lists without repetitions.
fn common(mut a: &[i64], mut b: &[i64]) -> usize {
    let mut count = 0;
    while let ([first_a, rest_a @ ..], [first_b, rest_b @ ..]) = (a, b) {
        let order = first_a.cmp(first_b);
        count += usize::from(order.is_eq());
        a = if order.is_le() { rest_a } else { a };
        b = if order.is_ge() { rest_b } else { b };
    }
    count
}

/// The distinct ids of a row in ascending order, cached for consecutive pairs with the same row.
#[derive(Default)]
struct RowSet {
    row: Option<usize>,
    ids: Vec<i64>,
}

impl RowSet {
    fn of(&mut self, feature: &Feature, row: usize) -> &[i64] {
        if self.row != Some(row) {
            self.row = Some(row);
            self.ids.clear();
            self.ids.extend_from_slice(feature.row(row));
            self.ids.sort_unstable();
            self.ids.dedup();
        }
        &self.ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feature(rows: &[&[i64]]) -> Feature {
        Feature::from_rows("x", rows).unwrap()
    }

    #[test]
    fn pairs_come_in_the_order_in_which_samples_have_them() {
        let (inverse, pairs) = distinct_pairs(&[0, 0, 1, 0, 1, 0], &[2, 2, 0, 2, 1, 0]);
        assert_eq!(inverse, [0, 0, 1, 0, 2, 3]);
        assert_eq!(pairs[..], [(0, 2), (1, 0), (1, 1), (0, 0)]);
        assert!(distinct_pairs(&[], &[]).1.is_empty());
    }

    #[test]
    fn an_intersection_keeps_the_order_of_the_first() {
        let (a, b) = (feature(&[&[5, 1, 5, 9, 3]]), feature(&[&[3, 5, 5], &[]]));
        let both = intersection("y".into(), (&a, &b), &[(0, 0), (0, 1)]).unwrap();
        assert_eq!((both.row(0), both.row(1)), (&[5, 3][..], &[][..]));
    }

    #[test]
    fn scores_count_distinct_ids() {
        let (a, b) = (feature(&[&[1, 1, 2], &[]]), feature(&[&[2, 1, 3, 3], &[]]));
        let pairs = [(0, 0), (0, 1), (1, 1)];
        assert_eq!(scores((&a, &b), &pairs, Score::OverlapCount), [2.0, 0.0, 0.0]);
        assert_eq!(scores((&a, &b), &pairs, Score::Jaccard), [2.0 / 3.0, 0.0, 0.0]);
    }

    #[test]
    fn a_product_goes_through_the_first() {
        let (a, b) = (feature(&[&[1, 2]]), feature(&[&[7, 8]]));
        let hash = SigridHash::new(4, 1 << 40);
        let all = product("y".into(), (&a, &b), &[(0, 0)], hash).unwrap();
        let id = |x, y| crate::hash::sigrid_hash(y, mix(x, 4), 1 << 40);
        assert_eq!(all.row(0), [id(1, 7), id(1, 8), id(2, 7), id(2, 8)]);
    }

    #[test]
    fn a_product_that_is_too_large_is_refused_before_it_is_made() {
        let long = Feature::from_rows("x", &[vec![0; 20_000]]).unwrap();
        let problem = product("y".into(), (&long, &long), &[(0, 0)], SigridHash::new(0, 9)).unwrap_err();
        assert!(format!("{problem:?}").contains("`y` would have 400000000 ids in one batch"));
    }
}
