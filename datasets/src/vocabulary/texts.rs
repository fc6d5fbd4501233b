//! Assigns numbers to text ids. The ETL passes the numbers instead of the texts from logs to the writer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use onefold_base::sync::locked;

use super::CountBudget;
use super::table::IdTable;
use crate::{Error, Result, hash_id};

/// A function from the bytes of a text to a non-negative number.
pub(super) type TextHash = fn(&[u8]) -> i64;

/// The number of parts of [`TextIds`] with separate locks: a power of two.
const SHARDS: usize = 64;
/// A mask of the bits of a number that do not select the shard.
const WITHIN_SHARD: i64 = (1 << (63 - SHARDS.trailing_zeros())) - 1;
/// The smallest capacity in bytes of a shard's texts, once it has a text.
const FEWEST_TEXT_BYTES: usize = 1 << 10;
/// The number of bytes of a text's length, which is stored before the text.
const LENGTH_BYTES: usize = size_of::<usize>();

/// Returns the numbers that a text may get, in the order of preference: its hash, then the following numbers
/// in the shard of the hash. A text gets the first of them that no other text has, so two texts never have
/// the same number, even if their hashes are equal.
pub(super) fn candidates(hash: i64) -> impl Iterator<Item = i64> {
    let shard = hash & !WITHIN_SHARD;
    (0..=WITHIN_SHARD).map(move |step| shard | (hash.wrapping_add(step) & WITHIN_SHARD))
}

/// Assigns a unique number to each distinct text, and stores the texts. Threads can share it. The number of a
/// text is its [`hash_id`], unless another text already has this number.
///
/// A text takes its own bytes, 8 bytes for its length, and 20 to 39 bytes in a table. The memory comes from a
/// [`CountBudget`].
#[derive(Debug)]
pub struct TextIds {
    feature: String,
    budget: CountBudget,
    shards: Vec<Mutex<Shard>>,
    distinct: AtomicU64,
    hash: TextHash,
}

/// The texts whose hashes have the same high bits.
#[derive(Debug, Default)]
struct Shard {
    /// Maps a text's number to its offset in `texts`, plus one.
    places: IdTable,
    /// The texts, each preceded by its length.
    texts: Vec<u8>,
}

/// The texts and their numbers, locked so that no other thread can add texts.
#[derive(Debug)]
pub struct LockedTextIds<'t> {
    shards: Vec<MutexGuard<'t, Shard>>,
}

impl TextIds {
    /// Creates an empty set of texts of `feature`, or of the vocabulary with this name. The texts take their
    /// memory from `budget` and return it when this is dropped.
    pub fn new(feature: &str, budget: &CountBudget) -> Self {
        Self::with_hash(feature, budget, hash_id)
    }

    pub(super) fn with_hash(feature: &str, budget: &CountBudget, hash: TextHash) -> Self {
        Self {
            feature: feature.to_owned(),
            budget: budget.clone(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            distinct: AtomicU64::new(0),
            hash,
        }
    }

    /// Returns the name of the feature or vocabulary to which the texts belong.
    pub fn name(&self) -> &str {
        &self.feature
    }

    /// Returns the number of `text`, which is not negative, and assigns one if the text is new.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyIds`] if the budget does not suffice for another text.
    pub fn number(&self, text: &str) -> Result<i64> {
        let hash = (self.hash)(text.as_bytes());
        let mut shard = locked(&self.shards[shard_of(hash)]);
        for number in candidates(hash) {
            match shard.places.get(number) {
                0 => return self.add(&mut shard, number, text),
                place if shard.text(place) == text.as_bytes() => return Ok(number),
                _ => {}
            }
        }
        Err(self.too_many())
    }

    /// Adds a text that has not been numbered yet.
    fn add(&self, shard: &mut Shard, number: i64, text: &str) -> Result<i64> {
        if shard.places.is_full() && !self.budget.grow(&mut shard.places) {
            return Err(self.too_many());
        }
        let bytes = shard.texts.len() + LENGTH_BYTES + text.len();
        let old = shard.texts.capacity();
        if bytes > old {
            let new = bytes.max(2 * old).max(FEWEST_TEXT_BYTES);
            if !self.budget.take(new) {
                return Err(self.too_many());
            }
            shard.texts.reserve_exact(new - shard.texts.len());
            self.budget.give_back(old);
        }
        let place = shard.texts.len() as u64 + 1;
        shard.texts.extend_from_slice(&text.len().to_le_bytes());
        shard.texts.extend_from_slice(text.as_bytes());
        shard.places.add(number, place);
        self.distinct.fetch_add(1, Ordering::Relaxed);
        Ok(number)
    }

    fn too_many(&self) -> Error {
        let distinct = self.distinct.load(Ordering::Relaxed);
        Error::TooManyIds { feature: self.feature.clone(), distinct, limit: self.budget.limit }
    }

    /// Returns the number of distinct texts.
    pub fn distinct(&self) -> u64 {
        self.distinct.load(Ordering::Relaxed)
    }

    /// Prevents other threads from adding texts, so that texts can be looked up by their numbers.
    pub fn lock(&self) -> LockedTextIds<'_> {
        LockedTextIds { shards: self.shards.iter().map(locked).collect() }
    }
}

impl Drop for TextIds {
    fn drop(&mut self) {
        for shard in &self.shards {
            let shard = locked(shard);
            self.budget.give_back(shard.places.memory_bytes() + shard.texts.capacity());
        }
    }
}

impl Shard {
    /// Returns the bytes of the text at `place`, a value of `places`; empty if no text begins there.
    fn text(&self, place: u64) -> &[u8] {
        let start = place as usize - 1;
        let length = self.texts.get(start..start + LENGTH_BYTES).and_then(|bytes| bytes.try_into().ok());
        let length = length.map_or(0, usize::from_le_bytes);
        self.texts.get(start + LENGTH_BYTES..).and_then(|bytes| bytes.get(..length)).unwrap_or(&[])
    }
}

impl LockedTextIds<'_> {
    /// Returns the text with this number.
    pub fn text(&self, number: i64) -> Option<&str> {
        let shard = self.shards.get(shard_of(number))?;
        match shard.places.get(number) {
            0 => None,
            place => std::str::from_utf8(shard.text(place)).ok(),
        }
    }

    /// Returns all numbers and their texts, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = (i64, &str)> {
        let pairs = self.shards.iter().flat_map(|shard| {
            shard.places.iter().map(|(number, place)| (number, std::str::from_utf8(shard.text(place)).ok()))
        });
        pairs.filter_map(|(number, text)| Some((number, text?)))
    }
}

/// Returns the shard of a non-negative number.
fn shard_of(number: i64) -> usize {
    ((number & !WITHIN_SHARD) >> (63 - SHARDS.trailing_zeros())) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn ids_of_texts_are_hashes_and_equal_on_all_threads() {
        let budget = CountBudget::new(16 << 20);
        let texts = TextIds::new("item", &budget);
        let text = |i: i64| format!("N{}", i % 3_000);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let texts = &texts;
                scope.spawn(move || {
                    for i in 0..6_000 {
                        let text = text(i * 7 + thread);
                        assert_eq!(texts.number(&text).unwrap(), hash_id(text.as_bytes()));
                    }
                });
            }
        });
        assert_eq!(texts.distinct(), 3_000);
        let locked = texts.lock();
        let all: BTreeMap<i64, &str> = locked.iter().collect();
        assert_eq!(all.len(), 3_000);
        assert!((0..3_000).all(|i| all[&hash_id(text(i).as_bytes())] == text(i)));
        assert_eq!(locked.text(hash_id(b"N17")), Some("N17"));
        assert_eq!(locked.text(5), None);
        drop(locked);
        assert!(budget.used_bytes() > 3_000 * (8 + 4 + 16));
        drop(texts);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn texts_whose_hashes_are_equal_have_numbers_of_their_own() {
        // The hashes include the end of a shard, after which the shard's first number is tried.
        for hash in [(|_| 5) as TextHash, |_| i64::MAX, |_| WITHIN_SHARD] {
            let texts = TextIds::with_hash("item", &CountBudget::new(1 << 20), hash);
            let numbers: Vec<i64> = (0..50).map(|i| texts.number(&i.to_string()).unwrap()).collect();
            assert_eq!(numbers.iter().collect::<BTreeSet<_>>().len(), 50);
            assert!(numbers.iter().all(|number| *number >= 0 && shard_of(*number) == shard_of(hash(b""))));
            let again: Vec<i64> = (0..50).map(|i| texts.number(&i.to_string()).unwrap()).collect();
            assert_eq!(numbers, again);
            let locked = texts.lock();
            assert!((0..50).all(|i| locked.text(numbers[i]) == Some(i.to_string().as_str())));
        }
    }

    #[test]
    fn the_bytes_of_texts_are_counted() {
        let budget = CountBudget::new(1 << 20);
        let texts = TextIds::new("page", &budget);
        let long = "x".repeat(10_000);
        let error = (0..1_000).find_map(|i| texts.number(&format!("{i}{long}")).err()).unwrap();
        assert!((20..105).contains(&texts.distinct()), "{} texts", texts.distinct());
        assert!(error.to_string().starts_with("feature `page`: "), "{error}");
        // Texts that already have a number keep it.
        assert_eq!(texts.number(&format!("0{long}")).unwrap(), hash_id(format!("0{long}").as_bytes()));
    }
}
