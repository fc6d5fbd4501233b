//! List operators that process a whole row: `firstx`, `lastx`, `ngram`, `enumerate` and `fill_null`.

use std::sync::Arc;

use serde::Deserialize;

use super::arguments::Arguments;
use super::problem::{Checked, Problem};
use crate::batch::{Feature, starts};
use crate::hash::mix;

/// The maximal number of ids that an operator may generate for one feature of one batch: 1 GiB of ids. More indicates
/// a mistake, such as the product of two long lists.
pub(super) const MOST_IDS: usize = 1 << 27;

/// An operator that maps each row of a feature to a row.
#[derive(Debug, Clone)]
pub(super) enum RowOp {
    Ngram {
        n: usize,
        combine: Combine,
    },
    Enumerate {
        start: i64,
    },
    /// `fill_null` on a list.
    FillEmpty {
        value: i64,
    },
}

/// An operator that shortens rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// `firstx`: keeps this number of ids from the start.
    First(usize),
    /// `lastx`: keeps this number of ids from the end.
    Last(usize),
}

/// The result for each n-gram.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Combine {
    /// The ids of the n-gram, in order.
    Concat,
    /// One hash per n-gram.
    Hash { salt: u64 },
}

pub(super) fn ngram(arguments: &mut Arguments) -> Checked<RowOp> {
    #[derive(Deserialize, Default, PartialEq)]
    #[serde(rename_all = "snake_case")]
    enum Name {
        #[default]
        Concat,
        Hash,
    }
    let n = arguments.integer("n", None, (1, i64::from(i32::MAX)))? as usize;
    let salt: Option<u64> = arguments.optional("salt")?;
    let combine = match arguments.optional::<Name>("combine")?.unwrap_or_default() {
        Name::Hash => Combine::Hash { salt: salt.unwrap_or(0) },
        Name::Concat if salt.is_none() => Combine::Concat,
        Name::Concat => {
            let hint = "leave it out, or write `combine = \"hash\"`";
            return Err(Problem::new("`salt` is of no use where n-grams are concatenated", hint));
        }
    };
    Ok(RowOp::Ngram { n, combine })
}

pub(super) fn enumerate(arguments: &mut Arguments) -> Checked<RowOp> {
    // A row has fewer than 2^31 ids, so with this limit no position overflows.
    let most = i64::MAX - i64::from(i32::MAX);
    Ok(RowOp::Enumerate { start: arguments.integer("start", Some(0), (i64::MIN, most))? })
}

impl RowOp {
    pub(super) fn run(&self, feature: Feature) -> Checked<Feature> {
        match *self {
            Self::Ngram { n, combine } => ngrams(&feature, n, combine),
            Self::Enumerate { start } => positions(feature, start),
            Self::FillEmpty { value } => fill_empty(feature, value),
        }
    }
}

/// Returns a problem if `total` ids exceed the limit for one feature of one batch.
pub(super) fn check_total(name: &str, total: usize) -> Checked<()> {
    if total <= MOST_IDS {
        return Ok(());
    }
    Err(Problem::new(
        format!("`{name}` would have {total} ids in one batch; at most {MOST_IDS} are allowed"),
        "shorten the lists with `firstx` before this step, or read smaller batches",
    ))
}

/// Creates a feature whose rows are contiguous in `values`. The caller has checked that there are at most
/// [`MOST_IDS`] values.
pub(super) fn contiguous(name: Arc<str>, values: Vec<i64>, sizes: Vec<i32>) -> Checked<Feature> {
    Ok(Feature::try_new(name, values, starts(&sizes), sizes)?)
}

impl Cut {
    /// Shortens the rows. Changes only offsets and sizes, without copying ids.
    pub(super) fn run(self, feature: Feature) -> Checked<Feature> {
        let (Self::First(count) | Self::Last(count)) = self;
        let most = i32::try_from(count).unwrap_or(i32::MAX);
        if feature.sizes().iter().all(|size| *size <= most) {
            return Ok(feature);
        }
        let (name, values, offsets, sizes) = feature.into_parts();
        let last = |(offset, size): (&i32, &i32)| offset + (size - most).max(0);
        let offsets = match self {
            Self::First(_) => offsets,
            Self::Last(_) => offsets.iter().zip(&*sizes).map(last).collect(),
        };
        let shorter: Vec<i32> = sizes.iter().map(|size| (*size).min(most)).collect();
        Ok(Feature::try_new(name, values, offsets, shorter)?)
    }

    /// Returns one cut that is equivalent to this cut followed by `next`, if there is one.
    pub(super) fn and(self, next: Self) -> Option<Self> {
        match (self, next) {
            (Self::First(a), Self::First(b)) => Some(Self::First(a.min(b))),
            (Self::Last(a), Self::Last(b)) => Some(Self::Last(a.min(b))),
            _ => None,
        }
    }
}

/// Replaces every id by its index in the row, counted from `start`. All rows become slices of one buffer, which is as
/// long as the longest row.
fn positions(feature: Feature, start: i64) -> Checked<Feature> {
    let (name, _, _, sizes) = feature.into_parts();
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let values: Vec<i64> = (start..start + i64::from(longest)).collect();
    Ok(Feature::try_new(name, values, vec![0; sizes.len()], sizes)?)
}

/// Replaces every empty row by a row with the single id `value`. All these rows share one id at the end of the
/// buffer.
fn fill_empty(feature: Feature, value: i64) -> Checked<Feature> {
    if feature.sizes().iter().all(|size| *size > 0) {
        return Ok(feature);
    }
    check_total(feature.name(), feature.values().len())?;
    let (name, values, offsets, sizes) = feature.into_parts();
    let end = values.len() as i32;
    let fill = |(&offset, &size): (&i32, &i32)| if size == 0 { (end, 1) } else { (offset, size) };
    let (offsets, sizes): (Vec<i32>, Vec<i32>) = offsets.iter().zip(&*sizes).map(fill).unzip();
    Ok(Feature::try_new(name, [&values[..], &[value]].concat(), offsets, sizes)?)
}

/// Maps every row to its n-grams, the windows of `n` consecutive ids.
fn ngrams(feature: &Feature, n: usize, combine: Combine) -> Checked<Feature> {
    let width = if combine == Combine::Concat { n } else { 1 };
    let grams = |ids: usize| (ids + 1).saturating_sub(n);
    let length = |ids: usize| grams(ids).saturating_mul(width);
    let values = feature.values().len();
    // If rows overlap, the n-grams of the whole buffer are computed once, and rows share n-grams as they share ids.
    let overlapping = feature.total_size() > values as u64;
    let lengths = feature.sizes().iter().map(|size| length(*size as usize));
    let total = match overlapping {
        true => length(values),
        false => lengths.clone().fold(0, usize::saturating_add),
    };
    check_total(feature.name(), total)?;
    // Each length is at most `total`, which has been checked, so it fits `i32`.
    let sizes: Vec<i32> = lengths.map(|length| length as i32).collect();
    let mut ids: Vec<i64> = Vec::with_capacity(total);
    let mut append = |row: &[i64]| match combine {
        Combine::Hash { salt } => ids.extend(row.windows(n).map(|gram| hash_gram(gram, salt))),
        Combine::Concat => row.windows(n).for_each(|gram| ids.extend_from_slice(gram)),
    };
    match overlapping {
        true => append(&feature.values()[..]),
        false => (0..feature.rows()).for_each(|row| append(feature.row(row))),
    }
    if !overlapping {
        return contiguous(feature.shared_name(), ids, sizes);
    }
    let moved = |(&offset, &size): (&i32, &i32)| if size == 0 { 0 } else { offset * width as i32 };
    let offsets: Vec<i32> = feature.offsets().iter().zip(&sizes).map(moved).collect();
    Ok(Feature::try_new(feature.shared_name(), ids, offsets, sizes)?)
}

/// Hashes the ids in order, each one salted with the hash of the ids before it, to a non-negative id.
fn hash_gram(gram: &[i64], salt: u64) -> i64 {
    (gram.iter().fold(salt, |state, id| mix(*id, state)) >> 1) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows() -> Feature {
        Feature::try_new("h", vec![1_i64, 2, 3, 4, 5], vec![0, 1, 2, 5], vec![3, 3, 3, 0]).unwrap()
    }

    fn rows(feature: &Feature) -> Vec<Vec<i64>> {
        (0..feature.rows()).map(|row| feature.row(row).to_vec()).collect()
    }

    #[test]
    fn the_first_ids_of_windows_are_slices_of_the_same_buffer() {
        let (before, after) = (windows(), Cut::First(2).run(windows()).unwrap());
        assert_eq!(rows(&after), [vec![1, 2], vec![2, 3], vec![3, 4], vec![]]);
        assert_eq!(after.values()[..], before.values()[..]);
        let shared = windows();
        assert_eq!(Cut::First(2).run(shared.clone()).unwrap().values().as_ptr(), shared.values().as_ptr());
    }

    #[test]
    fn the_last_ids_of_windows_are_slices_of_the_same_buffer() {
        let before = windows();
        let after = Cut::Last(2).run(before.clone()).unwrap();
        assert_eq!(rows(&after), [vec![2, 3], vec![3, 4], vec![4, 5], vec![]]);
        assert_eq!(after.values().as_ptr(), before.values().as_ptr());
    }

    #[test]
    fn ngrams_of_windows_overlap_as_the_windows_do() {
        let concat = ngrams(&windows(), 2, Combine::Concat).unwrap();
        assert_eq!(rows(&concat), [vec![1, 2, 2, 3], vec![2, 3, 3, 4], vec![3, 4, 4, 5], vec![]]);
        assert_eq!(concat.values().len(), 8);
        let hashed = ngrams(&windows(), 3, Combine::Hash { salt: 1 }).unwrap();
        assert_eq!(hashed.values().len(), 3);
        assert_eq!(hashed.row(1), [(mix(4, mix(3, mix(2, 1))) >> 1) as i64]);
        assert!(hashed.values().iter().all(|id| *id >= 0));
    }

    #[test]
    fn ngrams_of_short_lists_are_empty() {
        let short = Feature::from_rows("x", &[vec![1, 2], vec![], vec![1, 2, 3]]).unwrap();
        assert_eq!(rows(&ngrams(&short, 3, Combine::Concat).unwrap()), [vec![], vec![], vec![1, 2, 3]]);
        let none = ngrams(&short, usize::MAX, Combine::Concat).unwrap();
        assert_eq!(none.total_size(), 0);
    }

    #[test]
    fn positions_and_fill_values_are_stored_once() {
        let places = positions(windows(), 5).unwrap();
        assert_eq!(rows(&places), [vec![5, 6, 7], vec![5, 6, 7], vec![5, 6, 7], vec![]]);
        assert_eq!(places.values()[..], [5, 6, 7]);
        let filled = fill_empty(windows(), -1).unwrap();
        assert_eq!(rows(&filled)[2..], [vec![3, 4, 5], vec![-1]]);
        assert_eq!(filled.values().len(), 6);
    }
}
