//! A hash table from ids to positive numbers.

/// Slots of the smallest table.
const FEWEST_SLOTS: usize = 64;

/// An open-addressing table with linear probing: 16 bytes a slot, at most three quarters of them used. A number of 0
/// marks a free slot.
#[derive(Debug, Clone, Default)]
pub(super) struct IdTable {
    /// As many as a power of two, or none.
    slots: Vec<(i64, u64)>,
    used: usize,
}

impl IdTable {
    /// A table that holds `ids` ids without growing.
    pub(super) fn with_room_for(ids: usize) -> Self {
        let slots = (ids + ids / 3 + 1).next_power_of_two().max(FEWEST_SLOTS);
        Self { slots: vec![(0, 0); slots], used: 0 }
    }

    /// The number of `id`, 0 if the table does not hold it.
    #[inline]
    pub(super) fn get(&self, id: i64) -> u64 {
        if self.slots.is_empty() { 0 } else { self.slots[self.position(id)].1 }
    }

    /// Adds `number`, which is not 0, to that of `id`. [`is_full`](Self::is_full) was asked before.
    #[inline]
    pub(super) fn add(&mut self, id: i64, number: u64) {
        let at = self.position(id);
        let slot = &mut self.slots[at];
        self.used += usize::from(slot.1 == 0);
        *slot = (id, slot.1.saturating_add(number));
    }

    /// Whether one more id needs a [grown](Self::grow) table.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        4 * (self.used + 1) > 3 * self.slots.len()
    }

    /// Bytes of the table that [`grow`](Self::grow) makes; until it is made, the old one is held too.
    pub(super) fn grown_bytes(&self) -> usize {
        (2 * self.slots.len()).max(FEWEST_SLOTS) * size_of::<(i64, u64)>()
    }

    /// Doubles the slots.
    pub(super) fn grow(&mut self) {
        let slots = (2 * self.slots.len()).max(FEWEST_SLOTS);
        let old = std::mem::replace(self, Self { slots: vec![(0, 0); slots], used: 0 });
        for (id, number) in old.iter() {
            self.add(id, number);
        }
    }

    /// The ids and their numbers, in no order that means anything.
    pub(super) fn iter(&self) -> impl Iterator<Item = (i64, u64)> {
        self.slots.iter().copied().filter(|(_, number)| *number != 0)
    }

    /// The number of ids.
    pub(super) fn len(&self) -> usize {
        self.used
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<(i64, u64)>()
    }

    /// The slot of `id`, or the free one where it would be. There is a free one, and so the search ends.
    #[inline]
    fn position(&self, id: i64) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = hash(id) as usize & mask;
        loop {
            let (found, number) = self.slots[at];
            if number == 0 || found == id {
                return at;
            }
            at = (at + 1) & mask;
        }
    }
}

/// The two halves of a 128-bit product folded together, as in wyhash (Wang Yi): each bit of the id reaches the low
/// ones.
#[inline]
fn hash(id: i64) -> u64 {
    let product = u128::from(id as u64 ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn numbers_are_added_by_id_while_the_table_grows() {
        let mut table = IdTable::default();
        let mut expected: HashMap<i64, u64> = HashMap::new();
        assert_eq!(table.get(0), 0);
        for i in 0..20_000_i64 {
            let id = [i % 700, (i % 5_000) << 44, -i][i as usize % 3];
            if table.is_full() {
                table.grow();
            }
            table.add(id, 1 + i as u64 % 3);
            *expected.entry(id).or_default() += 1 + i as u64 % 3;
        }
        assert_eq!(table.len(), expected.len());
        assert_eq!(table.iter().collect::<HashMap<_, _>>(), expected);
        assert!(expected.iter().all(|(id, number)| table.get(*id) == *number));
        assert_eq!(table.get(-1_000_000), 0);
    }

    #[test]
    fn a_table_has_the_room_that_was_asked_for() {
        for ids in [0, 1, 47, 48, 49, 1_000, 1_536] {
            let mut table = IdTable::with_room_for(ids);
            for id in 0..ids as i64 {
                assert!(!table.is_full(), "{id} of {ids}");
                table.add(id, 1);
            }
        }
    }

    #[test]
    fn regular_ids_do_not_pile_up() {
        for step in [1_i64, 1 << 16, 1 << 32, 1 << 50, 1_000_000_007] {
            let mut table = IdTable::with_room_for(12_000);
            for i in 0..12_000 {
                table.add(i * step, 1);
            }
            let probes = |i: i64| {
                let (at, slots) = (table.position(i * step), table.slots.len());
                (at + slots - hash(i * step) as usize % slots) % slots + 1
            };
            let mean = (0..12_000).map(probes).sum::<usize>() as f64 / 12_000.0;
            // Knuth: (1 + 1/(1-a))/2 = 2.4 with 0.73 of the slots used.
            assert!(mean < 4.0, "{mean} probes with steps of {step}");
        }
    }
}
