//! The lists of the last sample of a session, in one buffer. With many lists per sample, one buffer is faster to
//! compare than a buffer per list, and a session needs fewer allocations.

use super::record_batches::CACHE_LINE;

/// A list initially has room for as many further ids as it has, but at most for this number. Short lists often
/// grow.
const FIRST_ROOM: usize = 4;

/// The lists of a sample.
#[derive(Debug, Default)]
pub(super) struct LastLists {
    ids: Vec<i64>,
    /// The position of each list, in the order of their ids.
    lists: Vec<LastList>,
}

/// The position of one list in the shared buffer.
#[derive(Debug, Clone, Copy)]
struct LastList {
    start: usize,
    length: u32,
    /// The number of ids that fit between the start of this list and that of the next one.
    room: u32,
    /// The part of the list in the sample's digest.
    part: u128,
}

impl LastLists {
    /// Sets the lists of the first sample, and their parts of its digest.
    pub(super) fn fill(&mut self, lists: &[&[i64]], parts: impl Iterator<Item = u128>) {
        self.ids.reserve_exact(lists.iter().map(|list| list.len() + list.len().min(FIRST_ROOM)).sum());
        let place = |(list, part): (&&[i64], u128)| {
            let (start, length) = (self.ids.len(), list.len());
            self.ids.extend_from_slice(list);
            self.ids.resize(start + length + length.min(FIRST_ROOM), 0);
            LastList { start, length: length as u32, room: (self.ids.len() - start) as u32, part }
        };
        self.lists = lists.iter().zip(parts).map(place).collect();
    }

    /// Returns list number `list`, which is empty before the first sample.
    pub(super) fn list(&self, list: usize) -> &[i64] {
        let Some(LastList { start, length, .. }) = self.lists.get(list) else { return &[] };
        &self.ids[*start..start + *length as usize]
    }

    /// Returns all lists in their order.
    pub(super) fn lists(&self) -> impl Iterator<Item = &[i64]> {
        (0..self.lists.len()).map(|list| self.list(list))
    }

    /// Returns the part of list number `list` in the sample's digest; `None` before the first sample.
    pub(super) fn part(&self, list: usize) -> Option<u128> {
        self.lists.get(list).map(|list| list.part)
    }

    /// Whether there are no lists, as before the first sample.
    pub(super) fn is_empty(&self) -> bool {
        self.lists.is_empty()
    }

    /// Replaces list number `list`.
    pub(super) fn set(&mut self, list: usize, ids: &[i64], part: u128) {
        if ids.len() > self.lists[list].room as usize {
            self.make_room(list, ids.len());
        }
        let replaced = &mut self.lists[list];
        (replaced.length, replaced.part) = (ids.len() as u32, part);
        self.ids[replaced.start..replaced.start + ids.len()].copy_from_slice(ids);
    }

    /// Reads from every cache line of the lists.
    pub(super) fn touch(&self) -> u64 {
        let lists = self.lists.iter().step_by(CACHE_LINE / size_of::<LastList>());
        let ids = self.ids.iter().step_by(CACHE_LINE / size_of::<i64>());
        let ids = ids.fold(0, |sum: u64, id| sum.wrapping_add(*id as u64));
        lists.fold(ids, |sum, list| sum.wrapping_add(list.part as u64))
    }

    /// The number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        8 * self.ids.capacity() + size_of::<LastList>() * self.lists.capacity()
    }

    /// Moves the lists behind list number `list`, so that it has room for `length` ids. Its room at least doubles,
    /// so a list that grows from sample to sample rarely moves the others.
    fn make_room(&mut self, list: usize, length: usize) {
        let grown = &mut self.lists[list];
        let (end, before) = (grown.start + grown.room as usize, grown.room as usize);
        let more = length.max(2 * before) - before;
        grown.room += more as u32;
        let all = self.ids.len();
        if self.ids.capacity() < all + more {
            // Reserve more than needed, because other lists are likely to grow too.
            self.ids.reserve_exact(more.max(all / 8));
        }
        self.ids.resize(all + more, 0);
        self.ids.copy_within(end..all, end + more);
        self.lists[list + 1..].iter_mut().for_each(|behind| behind.start += more);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lists_are_those_that_were_set_last(
            first in prop::collection::vec(prop::collection::vec(any::<i64>(), 0..5), 1..6),
            changes in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(any::<i64>(), 0..30)), 0..40),
        ) {
            let slices: Vec<&[i64]> = first.iter().map(Vec::as_slice).collect();
            let mut lists = LastLists::default();
            prop_assert_eq!((lists.list(0), lists.part(0)), (&[][..], None));
            lists.fill(&slices, 0..);
            let mut expected: Vec<(Vec<i64>, u128)> = first.iter().cloned().zip(0..).collect();
            for (part, (list, ids)) in (100..).zip(changes) {
                let list = list.index(expected.len());
                lists.set(list, &ids, part);
                expected[list] = (ids, part);
            }
            let parts = (0..expected.len()).map(|list| lists.part(list).unwrap());
            let found: Vec<(Vec<i64>, u128)> = lists.lists().map(<[i64]>::to_vec).zip(parts).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
