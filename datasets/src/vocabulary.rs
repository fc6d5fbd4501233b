//! Vocabularies: the ids of a feature, numbered by how often they occur.
//!
//! A log's ids are what its services made of them: hashes of 64 bits, keys of databases. A vocabulary gives every id that
//! occurs often enough its **frequency rank**, from 1 on, and all others the id 0, [`OUT_OF_VOCABULARY`]. Ranks take
//! fewer bytes than what they stand for, do not collide as hashes do, and put the hot rows of an embedding table side by
//! side.
//!
//! ```
//! use onefold_datasets::vocabulary::Vocabulary;
//!
//! let mut vocabulary = Vocabulary::from_counts([(7001, 2), (42, 9), (13, 1)], 2);
//! assert_eq!(vocabulary.apply(&[42, 7001, 13, 42]), [1, 2, 0, 1]);
//! assert_eq!(vocabulary.original(2), Some(7001));
//!
//! // A later partition: what has a number keeps it, what is new comes after.
//! vocabulary.extend([(5, 80), (7001, 100)], 2);
//! assert_eq!(vocabulary.apply(&[42, 7001, 5]), [1, 2, 3]);
//! ```
//!
//! A vocabulary lies beside the data as a Parquet file, columns `id`, `original` and `count`, and
//! the manifest records its checksum ([`VocabularyFile`]). A [`VocabularyCounter`] counts the ids to make one from.

mod counter;
mod file;
mod table;

use std::cmp::Reverse;

pub use self::counter::{CountBudget, VocabularyCounter};
pub use self::file::VocabularyFile;
use self::table::IdTable;

/// The id of every original that the vocabulary does not hold.
pub const OUT_OF_VOCABULARY: i64 = 0;

/// An array of ids is used where it has no more entries than this for each original, and a hash table elsewhere.
const ARRAY_ENTRIES_PER_ORIGINAL: u64 = 4;

/// A numbering of a feature's ids. Originals and ids map one to one, except for those that are out of the vocabulary.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    /// The original of id 1, of id 2, …
    originals: Vec<i64>,
    /// How often each of them was counted.
    counts: Vec<u64>,
    ids: Ids,
}

/// From an original to its id, 0 where it has none.
#[derive(Debug, Clone)]
enum Ids {
    /// Originals that lie close together: `ids[original - first]`.
    Array {
        first: i64,
        ids: Vec<i64>,
    },
    Table(IdTable),
}

impl Vocabulary {
    /// Numbers the originals of `(original, count)` that were counted at least `min_count` times, by falling count;
    /// those of equal count by rising original. Counts of an original that comes twice are added.
    pub fn from_counts(counts: impl IntoIterator<Item = (i64, u64)>, min_count: u64) -> Self {
        let mut vocabulary =
            Self { originals: Vec::new(), counts: Vec::new(), ids: Ids::Table(IdTable::default()) };
        vocabulary.extend(counts, min_count);
        vocabulary
    }

    /// Adds the counts of more data. An original that has an id keeps it; of the others those with a
    /// count of at least `min_count` follow, numbered as in [`from_counts`](Self::from_counts). Gives how many followed.
    ///
    /// What did not reach `min_count` is forgotten: rare originals are counted from 0 the next time.
    pub fn extend(&mut self, counts: impl IntoIterator<Item = (i64, u64)>, min_count: u64) -> usize {
        let mut new: Vec<(i64, u64)> = Vec::new();
        for (original, count) in counts {
            match usize::try_from(self.id(original) - 1).ok().and_then(|at| self.counts.get_mut(at)) {
                Some(known) => *known = known.saturating_add(count),
                None => new.push((original, count)),
            }
        }
        new.sort_unstable_by_key(|(original, _)| *original);
        new.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same {
                kept.1 = kept.1.saturating_add(later.1);
            }
            same
        });
        new.retain(|(_, count)| *count >= min_count.max(1));
        new.sort_unstable_by_key(|(original, count)| (Reverse(*count), *original));
        if !new.is_empty() {
            self.originals.extend(new.iter().map(|(original, _)| original));
            self.counts.extend(new.iter().map(|(_, count)| count));
            self.ids = Ids::of(&self.originals);
        }
        new.len()
    }

    /// The vocabulary of columns that were checked.
    fn from_columns(originals: Vec<i64>, counts: Vec<u64>) -> Self {
        let ids = Ids::of(&originals);
        Self { originals, counts, ids }
    }

    /// The id of `original`, [`OUT_OF_VOCABULARY`] if it has none.
    #[inline]
    pub fn id(&self, original: i64) -> i64 {
        self.ids.get(original)
    }

    /// What `id` stands for; `None` for [`OUT_OF_VOCABULARY`] and for what is no id of this vocabulary.
    pub fn original(&self, id: i64) -> Option<i64> {
        self.originals.get(usize::try_from(id).ok()?.checked_sub(1)?).copied()
    }

    /// How often the original of `id` was counted, `None` as for [`original`](Self::original).
    pub fn count(&self, id: i64) -> Option<u64> {
        self.counts.get(usize::try_from(id).ok()?.checked_sub(1)?).copied()
    }

    /// The ids of a list of originals.
    pub fn apply(&self, originals: &[i64]) -> Vec<i64> {
        let mut ids = Vec::new();
        self.apply_to(originals, &mut ids);
        ids
    }

    /// Appends the ids of a list of originals to `ids`.
    pub fn apply_to(&self, originals: &[i64], ids: &mut Vec<i64>) {
        // One branch for all of them, not one each.
        match &self.ids {
            Ids::Array { first, ids: array } => {
                ids.extend(originals.iter().map(|original| in_array(array, *first, *original)));
            }
            Ids::Table(table) => ids.extend(originals.iter().map(|original| in_table(table, *original))),
        }
    }

    /// The number of originals that have an id: the largest id.
    pub fn len(&self) -> usize {
        self.originals.len()
    }

    /// Whether every original is out of the vocabulary.
    pub fn is_empty(&self) -> bool {
        self.originals.is_empty()
    }

    /// Bytes that the vocabulary takes in memory.
    pub fn memory_bytes(&self) -> usize {
        let ids = match &self.ids {
            Ids::Array { ids, .. } => size_of::<i64>() * ids.capacity(),
            Ids::Table(table) => table.memory_bytes(),
        };
        size_of::<i64>() * self.originals.capacity() + size_of::<u64>() * self.counts.capacity() + ids
    }
}

impl PartialEq for Vocabulary {
    /// Whether ids, originals and counts are the same.
    fn eq(&self, other: &Self) -> bool {
        (&self.originals, &self.counts) == (&other.originals, &other.counts)
    }
}

impl Eq for Vocabulary {}

impl Ids {
    /// The ids of distinct originals: their positions, from 1 on.
    fn of(originals: &[i64]) -> Self {
        let numbered = || (1_i64..).zip(originals);
        let (first, last) = (originals.iter().min(), originals.iter().max());
        if let (Some(&first), Some(&last)) = (first, last)
            && last.abs_diff(first) < ARRAY_ENTRIES_PER_ORIGINAL.saturating_mul(originals.len() as u64)
        {
            let mut ids = vec![OUT_OF_VOCABULARY; last.abs_diff(first) as usize + 1];
            for (id, original) in numbered() {
                ids[original.abs_diff(first) as usize] = id;
            }
            return Self::Array { first, ids };
        }
        // Frequent ones come first, so that they are found where they are looked for first.
        let mut table = IdTable::with_room_for(originals.len());
        for (id, original) in numbered() {
            table.add(*original, id as u64);
        }
        Self::Table(table)
    }

    #[inline]
    fn get(&self, original: i64) -> i64 {
        match self {
            Self::Array { first, ids } => in_array(ids, *first, original),
            Self::Table(table) => in_table(table, original),
        }
    }
}

#[inline]
fn in_array(ids: &[i64], first: i64, original: i64) -> i64 {
    // Wrapping makes what is below `first` larger than any array.
    let at = usize::try_from(original.wrapping_sub(first) as u64).unwrap_or(usize::MAX);
    ids.get(at).copied().unwrap_or(OUT_OF_VOCABULARY)
}

#[inline]
fn in_table(table: &IdTable, original: i64) -> i64 {
    // The table holds 0 for what it does not hold.
    table.get(original) as i64
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use proptest::prelude::*;

    use super::*;

    /// Originals that repeat, lie close together or are far apart.
    fn originals() -> impl Strategy<Value = i64> {
        prop_oneof![0_i64..20, -3_i64..3, any::<i64>(), Just(i64::MIN), Just(i64::MAX)]
    }

    fn counts() -> impl Strategy<Value = Vec<(i64, u64)>> {
        prop::collection::vec((originals(), 0_u64..6), 0..60)
    }

    /// The definition: originals with enough counts, by falling count, then rising original.
    fn ranked(counts: &[(i64, u64)], min_count: u64, known: &[i64]) -> Vec<i64> {
        let mut sums: BTreeMap<i64, u64> = BTreeMap::new();
        counts.iter().for_each(|(original, count)| *sums.entry(*original).or_default() += count);
        let mut ranked: Vec<(i64, u64)> = sums
            .into_iter()
            .filter(|(original, count)| *count >= min_count.max(1) && !known.contains(original))
            .collect();
        ranked.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked.into_iter().map(|(original, _)| original).collect()
    }

    proptest! {
        #[test]
        fn ids_are_ranks_and_map_back(first in counts(), second in counts(), min_count in 0_u64..8) {
            let mut vocabulary = Vocabulary::from_counts(first.clone(), min_count);
            let mut expected = ranked(&first, min_count, &[]);
            prop_assert_eq!(&vocabulary.originals, &expected);
            let before = vocabulary.clone();

            let followed = vocabulary.extend(second.clone(), min_count);
            let new = ranked(&second, min_count, &expected);
            prop_assert_eq!(followed, new.len());
            expected.extend(new);
            prop_assert_eq!(&vocabulary.originals, &expected);
            for id in 1..=before.len() as i64 {
                prop_assert_eq!(vocabulary.original(id), before.original(id), "{} was renumbered", id);
            }

            prop_assert_eq!(vocabulary.len(), expected.len());
            let ids: HashMap<i64, i64> = expected.iter().copied().zip(1..).collect();
            let asked: Vec<i64> = first.iter().chain(&second).map(|(original, _)| *original).collect();
            let found: Vec<i64> = asked.iter().map(|o| ids.get(o).copied().unwrap_or(0)).collect();
            prop_assert_eq!(vocabulary.apply(&asked), found);
            for (id, original) in (1..).zip(&expected) {
                prop_assert_eq!(vocabulary.id(*original), id);
                prop_assert_eq!(vocabulary.original(id), Some(*original));
            }
            prop_assert_eq!(vocabulary.original(OUT_OF_VOCABULARY), None);
            prop_assert_eq!(vocabulary.original(vocabulary.len() as i64 + 1), None);
            prop_assert_eq!(vocabulary.original(-1), None);
        }
    }

    #[test]
    fn counts_of_later_data_are_added_to_those_that_are_known() {
        let mut vocabulary = Vocabulary::from_counts([(5, 3), (6, 4), (7, 1)], 2);
        assert_eq!(vocabulary.extend([(5, 10), (7, 1), (8, u64::MAX), (8, 1)], 2), 1);
        let counts: Vec<_> = (0..5).map(|id| vocabulary.count(id)).collect();
        assert_eq!(counts, [None, Some(4), Some(13), Some(u64::MAX), None]);
    }

    #[test]
    fn close_originals_have_an_array_and_far_ones_a_table() {
        let close = Vocabulary::from_counts((0..1_000).map(|i| (3 * i - 500, 1)), 1);
        assert!(matches!(&close.ids, Ids::Array { first: -500, ids } if ids.len() == 2_998));
        assert!(close.memory_bytes() < 50_000, "{}", close.memory_bytes());
        let far = Vocabulary::from_counts((0..1_000).map(|i| (i << 40, 1)), 1);
        assert!(matches!(far.ids, Ids::Table(_)));
        assert_eq!(far.apply(&[999 << 40, 1]), [1_000, 0]);
        let whole = Vocabulary::from_counts([(i64::MIN, 1), (i64::MAX, 2)], 1);
        assert_eq!(whole.apply(&[i64::MIN, i64::MAX, 0, -1]), [2, 1, 0, 0]);
    }

    #[test]
    fn an_empty_vocabulary_knows_nothing() {
        let vocabulary = Vocabulary::from_counts([(5, 1)], 2);
        assert!(vocabulary.is_empty());
        assert_eq!(vocabulary.apply(&[5, 0]), [0, 0]);
    }
}
