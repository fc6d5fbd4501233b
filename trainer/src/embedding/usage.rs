//! The rows of a shard that are in use, and the rows that changed since its table was last stored as a whole.

/// The bit in [`Usage::bytes`] of a row that was looked up since the last eviction.
const RECENT: u8 = 1;
/// The bit of a row that was looked up before the last eviction, and was not evicted.
pub(crate) const EARLIER: u8 = 2;

/// Returns the memory, in bytes, for the usage of `rows` rows.
pub(crate) fn usage_bytes(rows: u64) -> u64 {
    3 * 8 * rows.div_ceil(64)
}

/// Three sets of rows, stored as bit sets.
#[derive(Debug, Clone)]
pub(super) struct Usage {
    touched: Bits,
    recent: Bits,
    earlier: Bits,
}

impl Usage {
    /// Creates the usage of `rows` rows that were never looked up.
    pub(super) fn new(rows: u64) -> Self {
        let none = Bits(vec![0; rows.div_ceil(64) as usize]);
        Self { touched: none.clone(), recent: none.clone(), earlier: none }
    }

    /// Marks rows as looked up, and therefore as changed.
    pub(super) fn look_up(&mut self, rows: impl IntoIterator<Item = u32>) {
        for row in rows {
            self.touched.add(row);
            self.recent.add(row);
        }
    }

    /// Marks rows as changed.
    pub(super) fn touch(&mut self, rows: &[u32]) {
        rows.iter().for_each(|row| self.touched.add(*row));
    }

    /// Clears the set of changed rows.
    pub(super) fn clear_touched(&mut self) {
        self.touched.0.fill(0);
    }

    /// Returns the rows that changed since the last [`clear_touched`](Self::clear_touched), ascending.
    pub(super) fn touched(&self) -> Vec<u32> {
        self.touched.rows()
    }

    /// Returns the number of rows that were looked up and not evicted since.
    pub(super) fn in_use(&self) -> u64 {
        let words = self.recent.0.iter().zip(&self.earlier.0);
        words.map(|(recent, earlier)| u64::from((recent | earlier).count_ones())).sum()
    }

    /// Evicts the rows that were not looked up since the previous eviction, and returns them, ascending. Marks all
    /// rows in use as changed, because their stored usage changes.
    pub(super) fn evict(&mut self) -> Vec<u32> {
        let mut evicted = Bits(Vec::with_capacity(self.recent.0.len()));
        let sets = self.touched.0.iter_mut().zip(&mut self.recent.0).zip(&mut self.earlier.0);
        for ((touched, recent), earlier) in sets {
            *touched |= *recent | *earlier;
            evicted.0.push(*earlier & !*recent);
            *earlier = std::mem::take(recent);
        }
        evicted.rows()
    }

    /// Returns one byte per row with its usage, as stored in a checkpoint.
    pub(super) fn bytes(&self, rows: impl IntoIterator<Item = u32>) -> Vec<u8> {
        let bit = |set: &Bits, row, bit| if set.has(row) { bit } else { 0 };
        rows.into_iter()
            .map(|row| bit(&self.recent, row, RECENT) | bit(&self.earlier, row, EARLIER))
            .collect()
    }

    /// Restores the usage from the result of [`bytes`](Self::bytes).
    pub(super) fn set_bytes(&mut self, rows: impl IntoIterator<Item = u32>, bytes: &[u8]) {
        for (row, byte) in rows.into_iter().zip(bytes) {
            self.recent.set(row, byte & RECENT != 0);
            self.earlier.set(row, byte & EARLIER != 0);
        }
    }
}

/// A set of rows.
#[derive(Debug, Clone)]
struct Bits(Vec<u64>);

impl Bits {
    fn add(&mut self, row: u32) {
        self.0[row as usize / 64] |= 1 << (row % 64);
    }

    fn has(&self, row: u32) -> bool {
        self.0[row as usize / 64] >> (row % 64) & 1 != 0
    }

    fn set(&mut self, row: u32, is_in: bool) {
        self.0[row as usize / 64] &= !(1 << (row % 64));
        if is_in {
            self.add(row);
        }
    }

    /// Returns the rows of the set, ascending.
    fn rows(&self) -> Vec<u32> {
        set_bits(&self.0, 64).collect()
    }
}

/// Returns the indices of the bits that are set in words of `size` bits, ascending.
pub(super) fn set_bits(words: &[u64], size: u32) -> impl Iterator<Item = u32> {
    (0_u32..).zip(words).flat_map(move |(number, word)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(number * size + bit)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const ROWS: u32 = 150;

    #[test]
    fn its_memory_is_counted() {
        for rows in [0, 1, 64, 65, 1000] {
            let Usage { touched, recent, earlier } = Usage::new(rows);
            let words = [touched, recent, earlier].iter().map(|set| set.0.len()).sum::<usize>();
            assert_eq!(8 * words as u64, usage_bytes(rows), "{rows}");
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        LookUp(Vec<u32>),
        Touch(Vec<u32>),
        ClearTouched,
        Evict,
        Store,
    }

    fn step() -> impl Strategy<Value = Step> {
        let rows = || prop::collection::vec(0..ROWS, 0..20);
        prop_oneof![
            4 => rows().prop_map(Step::LookUp),
            1 => rows().prop_map(Step::Touch),
            1 => Just(Step::ClearTouched),
            2 => Just(Step::Evict),
            1 => Just(Step::Store),
        ]
    }

    proptest! {
        #[test]
        fn rows_that_are_not_looked_up_are_evicted(steps in prop::collection::vec(step(), 0..40)) {
            let mut usage = Usage::new(u64::from(ROWS));
            let mut touched = BTreeSet::new();
            // For each row, the number of evictions since its last lookup.
            let mut ages: Vec<Option<u32>> = vec![None; ROWS as usize];
            for step in steps {
                match step {
                    Step::LookUp(rows) => {
                        touched.extend(&rows);
                        rows.iter().for_each(|row| ages[*row as usize] = Some(0));
                        usage.look_up(rows);
                    }
                    Step::Touch(rows) => {
                        touched.extend(&rows);
                        usage.touch(&rows);
                    }
                    Step::ClearTouched => {
                        touched.clear();
                        usage.clear_touched();
                    }
                    Step::Evict => {
                        let in_use = |row: &u32| ages[*row as usize].is_some();
                        touched.extend((0..ROWS).filter(in_use));
                        let old = |row: &u32| ages[*row as usize] == Some(1);
                        let expected: Vec<u32> = (0..ROWS).filter(old).collect();
                        prop_assert_eq!(usage.evict(), expected);
                        for age in &mut ages {
                            *age = age.and_then(|age| (age == 0).then_some(1));
                        }
                    }
                    Step::Store => {
                        let mut restored = Usage::new(u64::from(ROWS));
                        restored.set_bytes(0..ROWS, &usage.bytes(0..ROWS));
                        restored.touch(&usage.touched());
                        usage = restored;
                    }
                }
                prop_assert_eq!(usage.touched(), touched.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(usage.in_use(), ages.iter().flatten().count() as u64);
            }
        }
    }
}
