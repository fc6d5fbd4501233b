//! Vocabularies: map the ids of a feature to numbers in the order of their frequency.
//!
//! The ids in a log can be anything that services use: texts, 64-bit hashes, database keys. A vocabulary
//! assigns a **frequency rank**, from 1 on, to each id that occurs often enough, and the id 0,
//! [`OUT_OF_VOCABULARY`], to all others. Ranks take fewer bytes than the original ids, do not collide as
//! hashes do, and put frequently used rows of an embedding table next to each other.
//!
//! ```
//! use onefold_datasets::vocabulary::Vocabulary;
//!
//! let mut vocabulary = Vocabulary::from_counts([(7001, 2), (42, 9), (13, 1)], 2);
//! assert_eq!(vocabulary.apply(&[42, 7001, 13, 42]), [1, 2, 0, 1]);
//! assert_eq!(vocabulary.original(2), Some(7001));
//!
//! // A later partition: originals with an id keep it, and new originals get the next ids.
//! vocabulary.extend([(5, 80), (7001, 100)], 2);
//! assert_eq!(vocabulary.apply(&[42, 7001, 5]), [1, 2, 3]);
//!
//! // Text ids keep their text.
//! let vocabulary = Vocabulary::from_text_counts([("N17", 3), ("N8", 5)], 1);
//! assert_eq!(vocabulary.id_of_text("N8"), 1);
//! assert_eq!(vocabulary.original_text(2), Some("N17"));
//! ```
//!
//! A vocabulary is a Parquet file next to the data, with the columns `id`, `original` (integers or texts) and
//! `count`. The snapshot records its checksum ([`VocabularyFile`]). A [`VocabularyCounter`] counts ids to
//! create a vocabulary. Text ids are counted by the numbers that [`TextIds`] assigns to texts.

mod counter;
mod digest;
mod file;
mod id_map;
mod originals;
mod table;
mod texts;

use std::cmp::Reverse;
use std::sync::Arc;

pub use self::counter::{CountBudget, VocabularyCounter};
pub use self::file::{FormerOriginals, VocabularyFile};
pub use self::id_map::IdMap;
pub use self::originals::OriginalKind;
use self::originals::{Originals, TextColumn};
pub use self::texts::TextIds;
use self::texts::{TextHash, candidates};
use crate::hash_id;

/// The id of each original that the vocabulary does not contain.
pub const OUT_OF_VOCABULARY: i64 = 0;

/// A one-to-one mapping between a feature's originals and ids. Originals outside the vocabulary share the id
/// 0.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    /// The originals of the ids 1, 2, ….
    originals: Originals,
    /// The number of occurrences of each original; 0 if the original was removed.
    counts: Vec<u64>,
    /// The ids by key. The key of an integer is the integer itself. The key of a text is the first of its
    /// [`candidates`] that is not the key of a text with a lower id.
    ids: Arc<IdMap>,
    hash: TextHash,
}

impl Vocabulary {
    /// Creates a vocabulary of the originals in `(original, count)` pairs with a count of at least
    /// `min_count`. Ids are assigned by descending count, then by ascending original. Counts of the same
    /// original are added.
    pub fn from_counts(counts: impl IntoIterator<Item = (i64, u64)>, min_count: u64) -> Self {
        let mut vocabulary = Self::empty(OriginalKind::Integer, hash_id);
        vocabulary.extend(counts, min_count);
        vocabulary
    }

    /// Works like [`from_counts`](Self::from_counts) for text originals. Texts with equal counts are ordered
    /// by their UTF-8 bytes.
    pub fn from_text_counts<'t>(counts: impl IntoIterator<Item = (&'t str, u64)>, min_count: u64) -> Self {
        let mut vocabulary = Self::empty(OriginalKind::Text, hash_id);
        vocabulary.extend_texts(counts, min_count);
        vocabulary
    }

    fn empty(kind: OriginalKind, hash: TextHash) -> Self {
        let originals = Originals::empty(kind);
        Self { originals, counts: Vec::new(), ids: Arc::new(IdMap::default()), hash }
    }

    /// Adds the counts of more data. Originals with an id keep it. Other originals with a count of at least
    /// `min_count` get the next ids, in the order of [`from_counts`](Self::from_counts). Returns the number
    /// of new ids.
    ///
    /// Originals that do not reach `min_count` are not remembered: the next call counts them from 0.
    ///
    /// # Panics
    ///
    /// Panics if the originals of the vocabulary are texts.
    pub fn extend(&mut self, counts: impl IntoIterator<Item = (i64, u64)>, min_count: u64) -> usize {
        let ranked = self.rank_new(counts, min_count, Self::id);
        let Originals::Integers(originals) = &mut self.originals else {
            panic!("the originals of this vocabulary are texts");
        };
        originals.extend(ranked.iter().map(|(original, _)| original));
        self.add_counts(&ranked)
    }

    /// Works like [`extend`](Self::extend) for text originals.
    ///
    /// # Panics
    ///
    /// Panics if the originals of the vocabulary are integers.
    pub fn extend_texts<'t>(
        &mut self,
        counts: impl IntoIterator<Item = (&'t str, u64)>,
        min_count: u64,
    ) -> usize {
        let ranked = self.rank_new(counts, min_count, |known, text| known.id_of_text(text));
        let Originals::Texts(originals) = &mut self.originals else {
            panic!("the originals of this vocabulary are integers");
        };
        ranked.iter().for_each(|(original, _)| originals.push(original));
        self.add_counts(&ranked)
    }

    /// Adds the counts of originals that have an id, and returns the ranked others.
    fn rank_new<T: Ord + Copy>(
        &mut self,
        counts: impl IntoIterator<Item = (T, u64)>,
        min_count: u64,
        id: impl Fn(&Self, T) -> i64,
    ) -> Vec<(T, u64)> {
        let mut new = Vec::new();
        for (original, count) in counts {
            let id = id(self, original);
            if !self.add_to_count(id, count) {
                new.push((original, count));
            }
        }
        rank(new, min_count)
    }

    /// Adds the counts of new originals, and returns their number.
    fn add_counts<T>(&mut self, ranked: &[(T, u64)]) -> usize {
        if !ranked.is_empty() {
            self.counts.extend(ranked.iter().map(|(_, count)| count));
            self.assign_keys();
        }
        ranked.len()
    }

    /// Assigns keys to the originals that were not removed.
    fn assign_keys(&mut self) {
        self.ids = Arc::new(match &self.originals {
            Originals::Integers(integers) => integer_keys(integers, &self.counts),
            Originals::Texts(texts) => text_keys(texts, &self.counts, self.hash).0,
        });
    }

    /// Adds to the count of `id`; returns `false` if the id does not exist.
    fn add_to_count(&mut self, id: i64, count: u64) -> bool {
        match usize::try_from(id - 1).ok().and_then(|at| self.counts.get_mut(at)) {
            Some(known) => {
                *known = known.saturating_add(count);
                true
            }
            None => false,
        }
    }

    /// Creates a vocabulary from these columns, which have the same length. The error is an original that
    /// occurs twice.
    fn from_columns(originals: Originals, counts: Vec<u64>) -> Result<Self, String> {
        let ids = match &originals {
            Originals::Integers(integers) => match IdMap::repeated(of_live(integers, &counts)) {
                Some(twice) => return Err(twice.to_string()),
                None => integer_keys(integers, &counts),
            },
            Originals::Texts(texts) => match text_keys(texts, &counts, hash_id) {
                (_, Some(twice)) => return Err(format!("`{twice}`")),
                (ids, None) => ids,
            },
        };
        Ok(Self { originals, counts, ids: Arc::new(ids), hash: hash_id })
    }

    /// Removes the originals of these ids; unknown ids are ignored. A removed id is never assigned again,
    /// and all other ids stay the same. A removed original gets a new id if it is counted again.
    pub fn remove(&mut self, ids: impl IntoIterator<Item = i64>) {
        let places = ids.into_iter().filter_map(position).filter(|place| *place < self.counts.len());
        let places: Vec<usize> = places.collect();
        places.iter().for_each(|place| self.counts[*place] = 0);
        match &mut self.originals {
            Originals::Integers(integers) => places.iter().for_each(|place| integers[*place] = 0),
            Originals::Texts(texts) => {
                let mut left = TextColumn::default();
                let live = texts.iter().zip(&self.counts);
                live.for_each(|(text, count)| left.push(if *count > 0 { text } else { "" }));
                *texts = left;
            }
        }
        self.assign_keys();
    }

    /// Returns whether the originals are integers or texts.
    pub fn kind(&self) -> OriginalKind {
        self.originals.kind()
    }

    /// Returns the id of `original`, or [`OUT_OF_VOCABULARY`] if it has no id. If the originals are texts, no
    /// integer has an id.
    #[inline]
    pub fn id(&self, original: i64) -> i64 {
        match &self.originals {
            Originals::Integers(_) => self.ids.get(original),
            Originals::Texts(_) => OUT_OF_VOCABULARY,
        }
    }

    /// Returns the id of the text `original`, or [`OUT_OF_VOCABULARY`] if it has no id.
    pub fn id_of_text(&self, original: &str) -> i64 {
        let Originals::Texts(texts) = &self.originals else { return OUT_OF_VOCABULARY };
        key_of(texts, &self.ids, self.hash, original).map_or(OUT_OF_VOCABULARY, |(_, id)| id)
    }

    /// Returns the id of an original that is given as text, even if originals are integers;
    /// [`OUT_OF_VOCABULARY`] if it has no id.
    pub fn id_of_key(&self, original: &str) -> i64 {
        match &self.originals {
            Originals::Integers(_) => {
                original.parse().map_or(OUT_OF_VOCABULARY, |original| self.id(original))
            }
            Originals::Texts(_) => self.id_of_text(original),
        }
    }

    /// Returns the integer original of `id`; `None` for [`OUT_OF_VOCABULARY`], for unknown ids, and if
    /// originals are texts.
    pub fn original(&self, id: i64) -> Option<i64> {
        let Originals::Integers(integers) = &self.originals else { return None };
        integers.get(self.live_position(id)?).copied()
    }

    /// Returns the text original of `id`; `None` for [`OUT_OF_VOCABULARY`], for unknown ids, and if originals
    /// are integers.
    pub fn original_text(&self, id: i64) -> Option<&str> {
        let Originals::Texts(texts) = &self.originals else { return None };
        texts.get(self.live_position(id)?)
    }

    /// Returns the number of occurrences of the original of `id`; `None` for [`OUT_OF_VOCABULARY`] and for
    /// unknown ids.
    pub fn count(&self, id: i64) -> Option<u64> {
        self.counts.get(self.live_position(id)?).copied()
    }

    /// Returns the index in the columns of an id whose original was not removed.
    fn live_position(&self, id: i64) -> Option<usize> {
        position(id).filter(|place| self.counts.get(*place).is_some_and(|count| *count > 0))
    }

    /// Returns the ids of a list of integer originals.
    pub fn apply(&self, originals: &[i64]) -> Vec<i64> {
        match &self.originals {
            Originals::Integers(_) => self.ids.apply(originals),
            Originals::Texts(_) => vec![OUT_OF_VOCABULARY; originals.len()],
        }
    }

    /// Returns the ids of originals in the form in which the ETL passes them from logs to the writer:
    /// integers as they are, and texts as the numbers that `texts` assigned.
    pub fn id_map(&self, texts: Option<&TextIds>) -> Arc<IdMap> {
        match texts {
            None => Arc::clone(&self.ids),
            Some(texts) => {
                let texts = texts.lock();
                let ids = texts.iter().map(|(number, text)| (number, self.id_of_text(text)));
                Arc::new(IdMap::of_pairs(ids.filter(|(_, id)| *id != OUT_OF_VOCABULARY)))
            }
        }
    }

    /// Returns the number of assigned ids, which is the largest id. It includes ids whose originals were
    /// removed.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Returns whether no id was ever assigned.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns the memory that the vocabulary takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.originals.memory_bytes() + size_of::<u64>() * self.counts.capacity() + self.ids.memory_bytes()
    }
}

impl PartialEq for Vocabulary {
    /// Compares ids, originals and counts.
    fn eq(&self, other: &Self) -> bool {
        (&self.originals, &self.counts) == (&other.originals, &other.counts)
    }
}

impl Eq for Vocabulary {}

/// Returns the index of an id in the columns.
fn position(id: i64) -> Option<usize> {
    usize::try_from(id).ok()?.checked_sub(1)
}

/// Returns the originals with a count of at least `min_count`, by descending count, then by ascending
/// original. Counts of the same original are added.
fn rank<T: Ord + Copy>(mut counts: Vec<(T, u64)>, min_count: u64) -> Vec<(T, u64)> {
    counts.sort_unstable_by_key(|(original, _)| *original);
    counts.dedup_by(|later, kept| {
        let same = later.0 == kept.0;
        if same {
            kept.1 = kept.1.saturating_add(later.1);
        }
        same
    });
    counts.retain(|(_, count)| *count >= min_count.max(1));
    counts.sort_unstable_by_key(|(original, count)| (Reverse(*count), *original));
    counts
}

/// Returns the integers whose count is not 0, that is, the originals that were not removed.
fn of_live(integers: &[i64], counts: &[u64]) -> impl Iterator<Item = i64> {
    integers.iter().zip(counts).filter(|(_, count)| **count > 0).map(|(original, _)| *original)
}

/// Creates the map from integers to their ids, which are counted from 1. Removed originals are omitted.
fn integer_keys(integers: &[i64], counts: &[u64]) -> IdMap {
    if !counts.contains(&0) {
        return IdMap::of_integers(integers);
    }
    let numbered = (1_i64..).zip(integers).zip(counts).filter(|(_, count)| **count > 0);
    IdMap::of_pairs(numbered.map(|((id, original), _)| (*original, id)))
}

/// Assigns keys to texts, which are numbered from 1 on. Also returns a text that occurs twice, if there is
/// one.
fn text_keys(texts: &TextColumn, counts: &[u64], hash: TextHash) -> (IdMap, Option<String>) {
    let mut ids = IdMap::with_room_for(texts.len());
    for ((id, text), _) in (1..).zip(texts.iter()).zip(counts).filter(|(_, count)| **count > 0) {
        match key_of(texts, &ids, hash, text) {
            Some((key, OUT_OF_VOCABULARY)) => ids.add(key, id),
            _ => return (ids, Some(text.to_owned())),
        }
    }
    (ids, None)
}

/// Returns the first candidate key of `text` that no other text has, and the id of `text`, which is
/// [`OUT_OF_VOCABULARY`] if the key is not in use.
fn key_of(texts: &TextColumn, ids: &IdMap, hash: TextHash, text: &str) -> Option<(i64, i64)> {
    candidates(hash(text.as_bytes())).find_map(|key| match ids.get(key) {
        OUT_OF_VOCABULARY => Some((key, OUT_OF_VOCABULARY)),
        id => (texts.get(position(id)?) == Some(text)).then_some((key, id)),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use proptest::prelude::*;

    use super::*;

    /// Generates originals that repeat, are close together, or far apart.
    fn originals() -> impl Strategy<Value = i64> {
        prop_oneof![0_i64..20, -3_i64..3, any::<i64>(), Just(i64::MIN), Just(i64::MAX)]
    }

    fn counts() -> impl Strategy<Value = Vec<(i64, u64)>> {
        prop::collection::vec((originals(), 0_u64..6), 0..60)
    }

    fn integers(vocabulary: &Vocabulary) -> &[i64] {
        match &vocabulary.originals {
            Originals::Integers(integers) => integers,
            Originals::Texts(_) => panic!("texts"),
        }
    }

    /// Ranks originals by definition: by descending count, then by ascending original, if their count
    /// suffices.
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
            prop_assert_eq!(integers(&vocabulary), &expected[..]);
            let before = vocabulary.clone();

            let followed = vocabulary.extend(second.clone(), min_count);
            let new = ranked(&second, min_count, &expected);
            prop_assert_eq!(followed, new.len());
            expected.extend(new);
            prop_assert_eq!(integers(&vocabulary), &expected[..]);
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
    fn dense_originals_are_looked_up_in_an_array_and_sparse_ones_in_a_table() {
        let close = Vocabulary::from_counts((0..1_000).map(|i| (3 * i - 500, 1)), 1);
        assert_eq!(close.ids.array_len(), Some(2_998));
        let copy = IdMap::of_pairs(close.ids.pairs());
        assert_eq!((copy.get(-500), copy.get(-499), copy.get(2_497)), (1, 0, 1_000));
        assert!(close.memory_bytes() < 50_000, "{}", close.memory_bytes());
        let far = Vocabulary::from_counts((0..1_000).map(|i| (i << 40, 1)), 1);
        assert_eq!(far.ids.array_len(), None);
        assert_eq!(far.apply(&[999 << 40, 1]), [1_000, 0]);
        let copy = IdMap::of_pairs(far.ids.pairs());
        assert_eq!((copy.get(999 << 40), copy.get(1), copy.pairs().count()), (1_000, 0, 1_000));
        let whole = Vocabulary::from_counts([(i64::MIN, 1), (i64::MAX, 2)], 1);
        assert_eq!(whole.apply(&[i64::MIN, i64::MAX, 0, -1]), [2, 1, 0, 0]);
    }

    /// A hash with only six values, so that most texts collide.
    fn weak_hash(bytes: &[u8]) -> i64 {
        [0, 1, 2, i64::MAX, i64::MAX - 1, 1 << 57][bytes.len() % 6]
    }

    proptest! {
        #[test]
        fn texts_that_collide_keep_ids_of_their_own(
            first in prop::collection::vec(("[ab]{0,8}", 0_u64..6), 0..60),
            second in prop::collection::vec(("[ab]{0,8}", 0_u64..6), 0..60),
            min_count in 0_u64..8,
            weak in any::<bool>(),
        ) {
            let hash = if weak { weak_hash } else { hash_id };
            let ranked = |counts: &[(String, u64)], known: &[String]| {
                let mut sums: BTreeMap<String, u64> = BTreeMap::new();
                counts.iter().for_each(|(text, count)| *sums.entry(text.clone()).or_default() += count);
                sums.retain(|text, count| *count >= min_count.max(1) && !known.contains(text));
                let mut ranked: Vec<(String, u64)> = sums.into_iter().collect();
                ranked.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
                ranked.into_iter().map(|(text, _)| text).collect::<Vec<String>>()
            };
            let mut vocabulary = Vocabulary::empty(OriginalKind::Text, hash);
            vocabulary.extend_texts(first.iter().map(|(text, count)| (text.as_str(), *count)), min_count);
            let mut expected = ranked(&first, &[]);
            prop_assert_eq!(vocabulary.len(), expected.len());
            vocabulary.extend_texts(second.iter().map(|(text, count)| (text.as_str(), *count)), min_count);
            let new = ranked(&second, &expected);
            expected.extend(new);
            prop_assert_eq!(vocabulary.len(), expected.len());
            for (id, text) in (1..).zip(&expected) {
                prop_assert_eq!(vocabulary.original_text(id), Some(text.as_str()));
                prop_assert_eq!(vocabulary.id_of_text(text), id);
            }
            for (text, _) in first.iter().chain(&second).filter(|(text, _)| !expected.contains(text)) {
                prop_assert_eq!(vocabulary.id_of_text(text), OUT_OF_VOCABULARY);
            }

            // The ETL passes numbers instead of texts, which map to the same ids.
            let numbers = TextIds::with_hash("x", &CountBudget::new(1 << 20), hash);
            let all: Vec<(String, i64)> = first.iter().chain(&second)
                .map(|(text, _)| (text.clone(), numbers.number(text).unwrap())).collect();
            let map = vocabulary.id_map(Some(&numbers));
            for (text, number) in all {
                prop_assert_eq!(map.get(number), vocabulary.id_of_text(&text));
            }
        }
    }

    #[test]
    fn originals_that_are_removed_leave_their_ids() {
        let mut integers = Vocabulary::from_counts([(7, 9), (8, 5), (9, 4)], 1);
        integers.remove([2, 17, 0]);
        assert_eq!((integers.apply(&[7, 8, 9, 0]), integers.len()), (vec![1, 0, 3, 0], 3));
        assert_eq!((integers.original(2), integers.count(2), integers.id_of_key("9")), (None, None, 3));
        // A removed original gets a new id.
        assert_eq!(integers.extend([(8, 3), (9, 1)], 1), 1);
        assert_eq!((integers.id(8), integers.original(4), integers.original(2)), (4, Some(8), None));
        let mut texts = Vocabulary::from_text_counts([("a", 9), ("b", 5), ("", 4)], 1);
        texts.remove([2]);
        assert_eq!([texts.id_of_text("a"), texts.id_of_key("b"), texts.id_of_text("")], [1, 0, 3]);
        assert_eq!((texts.original_text(2), texts.original_text(3)), (None, Some("")));
        assert_eq!((texts.extend_texts([("b", 1)], 1), texts.id_of_text("b")), (1, 4));
        // Removes several originals, and stores the vocabulary in a file.
        texts.remove([1, 3]);
        let directory = tempfile::tempdir().unwrap();
        let storage = onefold_storage::Storage::open(directory.path()).unwrap();
        for (path, vocabulary) in [("integers.parquet", integers), ("texts.parquet", texts)] {
            let file = vocabulary.write(&storage, path).unwrap();
            assert_eq!((file.entries, Vocabulary::read(&storage, &file).unwrap()), (4, vocabulary));
        }
    }

    #[test]
    fn integers_and_texts_do_not_mix() {
        let texts = Vocabulary::from_text_counts([("17", 2), ("", 1)], 1);
        assert_eq!((texts.kind(), texts.id(17), texts.original(1)), (OriginalKind::Text, 0, None));
        assert_eq!((texts.apply(&[17]), texts.original_text(2)), (vec![0], Some("")));
        let integers = Vocabulary::from_counts([(17, 2)], 1);
        assert_eq!((integers.id_of_text("17"), integers.original_text(1)), (0, None));
        assert_ne!(texts, integers);
    }

    #[test]
    fn an_empty_vocabulary_knows_nothing() {
        let vocabulary = Vocabulary::from_counts([(5, 1)], 2);
        assert!(vocabulary.is_empty());
        assert_eq!(vocabulary.apply(&[5, 0]), [0, 0]);
    }
}
