//! A hash table from ids to positive numbers that grows only on request.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

/// The number of ids that the smallest table holds: seven eighths of 64 slots.
const FEWEST_IDS: usize = 56;
/// An upper limit for the size of the smallest table, in bytes.
const FEWEST_BYTES: usize = 20 * 64;

/// A table with 17 bytes per slot, of which at most seven eighths are used.
#[derive(Debug, Clone, Default)]
pub(super) struct IdTable(HashMap<i64, u64, FixedState>);

impl IdTable {
    /// Creates a table that holds `ids` ids without growing.
    pub(super) fn with_room_for(ids: usize) -> Self {
        Self(HashMap::with_capacity_and_hasher(ids.max(FEWEST_IDS), FixedState::default()))
    }

    /// Returns the number of `id`, or 0 if the table does not contain it.
    #[inline]
    pub(super) fn get(&self, id: i64) -> u64 {
        self.0.get(&id).copied().unwrap_or(0)
    }

    /// Adds `number`, which is not 0, to the number of `id`. Callers must check [`is_full`](Self::is_full)
    /// first.
    #[inline]
    pub(super) fn add(&mut self, id: i64, number: u64) {
        let sum = self.0.entry(id).or_insert(0);
        *sum = sum.saturating_add(number);
    }

    /// Returns whether another id would need a [larger](Self::grow) table.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.0.len() == self.0.capacity()
    }

    /// Returns the maximum size in bytes of the table that [`grow`](Self::grow) creates. The old table is
    /// kept until the new one is complete.
    pub(super) fn grown_bytes(&self) -> usize {
        (2 * self.memory_bytes()).max(FEWEST_BYTES)
    }

    /// Doubles the slots of a full table.
    pub(super) fn grow(&mut self) {
        self.0.reserve(if self.0.is_empty() { FEWEST_IDS } else { 1 });
    }

    /// Returns the ids and their numbers, in arbitrary order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (i64, u64)> {
        self.0.iter().map(|(id, number)| (*id, *number))
    }

    /// Returns the number of ids.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.allocation_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_added_by_id_while_the_table_grows() {
        let mut table = IdTable::default();
        let mut expected: HashMap<i64, u64, FixedState> = HashMap::default();
        assert_eq!(table.get(0), 0);
        for i in 0..20_000_i64 {
            let id = [i % 700, (i % 5_000) << 44, -i][i as usize % 3];
            if table.is_full() {
                let most = table.grown_bytes();
                table.grow();
                assert!(!table.is_full() && table.memory_bytes() <= most);
            }
            table.add(id, 1 + i as u64 % 3);
            *expected.entry(id).or_default() += 1 + i as u64 % 3;
        }
        assert_eq!(table.len(), expected.len());
        assert_eq!(table.iter().collect::<HashMap<_, _, FixedState>>(), expected);
        assert!(expected.iter().all(|(id, number)| table.get(*id) == *number));
        assert_eq!(table.get(-1_000_000), 0);
    }

    #[test]
    fn a_table_has_the_requested_capacity() {
        for ids in [0, 1, 56, 57, 1_000, 1_792] {
            let mut table = IdTable::with_room_for(ids);
            for id in 0..ids as i64 {
                assert!(!table.is_full(), "{id} of {ids}");
                table.add(id, 1);
            }
        }
    }
}
