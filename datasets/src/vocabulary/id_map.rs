//! Maps originals to ids.

use foldhash::fast::FixedState;
use hashbrown::HashSet;

use super::OUT_OF_VOCABULARY;
use super::table::IdTable;

/// The largest number of array entries per original. If an array would have more, a hash table is used
/// instead.
const ARRAY_ENTRIES_PER_ORIGINAL: u64 = 4;

/// A map from 64-bit originals to ids. All other originals map to [`OUT_OF_VOCABULARY`].
#[derive(Debug, Clone)]
pub struct IdMap(Form);

#[derive(Debug, Clone)]
enum Form {
    /// An array for originals that are close together: `ids[original - first]`.
    Array {
        first: i64,
        ids: Vec<i64>,
    },
    Table(IdTable),
}

impl Default for IdMap {
    fn default() -> Self {
        Self(Form::Table(IdTable::default()))
    }
}

impl IdMap {
    /// Creates a map in which the ids of distinct originals are their positions, counted from 1.
    pub(super) fn of_integers(originals: &[i64]) -> Self {
        let numbered = || (1_i64..).zip(originals);
        let (first, last) = (originals.iter().min(), originals.iter().max());
        if let (Some(&first), Some(&last)) = (first, last)
            && last.abs_diff(first) < ARRAY_ENTRIES_PER_ORIGINAL.saturating_mul(originals.len() as u64)
        {
            let mut ids = vec![OUT_OF_VOCABULARY; last.abs_diff(first) as usize + 1];
            for (id, original) in numbered() {
                ids[original.abs_diff(first) as usize] = id;
            }
            return Self(Form::Array { first, ids });
        }
        let mut map = Self::with_room_for(originals.len());
        numbered().for_each(|(id, original)| map.add(*original, id));
        map
    }

    /// Returns the pairs of original and id, in arbitrary order.
    pub fn pairs(&self) -> impl Iterator<Item = (i64, i64)> {
        let (array, table) = match &self.0 {
            Form::Array { first, ids } => (Some((*first, ids)), None),
            Form::Table(table) => (None, Some(table)),
        };
        let of_array = array.into_iter().flat_map(|(first, ids)| {
            let pairs = (0..).zip(ids).filter(|(_, id)| **id != OUT_OF_VOCABULARY);
            pairs.map(move |(place, id)| (first.wrapping_add(place), *id))
        });
        of_array.chain(
            table.into_iter().flat_map(|table| table.iter().map(|(original, id)| (original, id as i64))),
        )
    }

    /// Creates a map from pairs of original and id. The originals must be distinct, and the ids positive.
    pub fn of_pairs(pairs: impl Iterator<Item = (i64, i64)>) -> Self {
        let mut map = Self::default();
        pairs.for_each(|(original, id)| map.add(original, id));
        map
    }

    /// Creates an empty map with room for `originals` originals.
    pub(super) fn with_room_for(originals: usize) -> Self {
        Self(Form::Table(IdTable::with_room_for(originals)))
    }

    /// Adds a positive id for a new original. The map must not be an array.
    pub(super) fn add(&mut self, original: i64, id: i64) {
        if let Form::Table(table) = &mut self.0 {
            if table.is_full() {
                table.grow();
            }
            table.add(original, id as u64);
        }
    }

    /// Returns a value that occurs twice, if there is one.
    pub(super) fn repeated(mut values: impl Iterator<Item = i64>) -> Option<i64> {
        let most = values.size_hint().1.unwrap_or(0);
        let mut seen = HashSet::with_capacity_and_hasher(most, FixedState::default());
        values.find(|value| !seen.insert(*value))
    }

    /// Returns the id of `original`, or [`OUT_OF_VOCABULARY`] if it has no id.
    #[inline]
    pub fn get(&self, original: i64) -> i64 {
        match &self.0 {
            Form::Array { first, ids } => in_array(ids, *first, original),
            Form::Table(table) => in_table(table, original),
        }
    }

    /// Returns the ids of a list of originals.
    pub fn apply(&self, originals: &[i64]) -> Vec<i64> {
        // Branches once for the whole list instead of once per original.
        match &self.0 {
            Form::Array { first, ids } => {
                originals.iter().map(|original| in_array(ids, *first, *original)).collect()
            }
            Form::Table(table) => originals.iter().map(|original| in_table(table, *original)).collect(),
        }
    }

    /// Returns the number of entries of the array, if the map is an array.
    #[cfg(test)]
    pub(super) fn array_len(&self) -> Option<usize> {
        match &self.0 {
            Form::Array { ids, .. } => Some(ids.len()),
            Form::Table(_) => None,
        }
    }

    /// Returns the memory that the map takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        match &self.0 {
            Form::Array { ids, .. } => size_of::<i64>() * ids.capacity(),
            Form::Table(table) => table.memory_bytes(),
        }
    }
}

#[inline]
fn in_array(ids: &[i64], first: i64, original: i64) -> i64 {
    // Originals below `first` wrap around to positions after the end of any array.
    let at = usize::try_from(original.wrapping_sub(first) as u64).unwrap_or(usize::MAX);
    ids.get(at).copied().unwrap_or(OUT_OF_VOCABULARY)
}

#[inline]
fn in_table(table: &IdTable, original: i64) -> i64 {
    // The table returns 0 for unknown keys.
    table.get(original) as i64
}
