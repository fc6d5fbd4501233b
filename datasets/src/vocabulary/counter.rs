//! Counts ids within a memory budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::table::IdTable;
use crate::{Error, Result};

/// A memory budget, in bytes, that the counters of several features and threads share.
#[derive(Debug, Clone)]
pub struct CountBudget {
    /// The size of the whole budget in bytes.
    pub(super) limit: u64,
    left: Arc<AtomicU64>,
}

impl CountBudget {
    /// Creates a budget of `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        Self { limit: bytes, left: Arc::new(AtomicU64::new(bytes)) }
    }

    /// Returns the number of bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.limit - self.left.load(Ordering::Relaxed)
    }

    /// Takes `bytes` from the budget; takes nothing and returns `false` if fewer are left.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let less = |left: u64| left.checked_sub(bytes as u64);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    /// Grows a full table; returns `false` if there is not enough memory left.
    pub(super) fn grow(&self, table: &mut IdTable) -> bool {
        let (old, new) = (table.memory_bytes(), table.grown_bytes());
        let fits = self.take(new);
        if fits {
            table.grow();
            self.give_back(old + new - table.memory_bytes());
        }
        fits
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.left.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Counts a feature's ids exactly. It takes 20 to 39 bytes per distinct id, and half as much more while it
/// grows.
#[derive(Debug)]
pub struct VocabularyCounter {
    feature: String,
    budget: CountBudget,
    counts: IdTable,
}

impl VocabularyCounter {
    /// Creates a counter of the ids of `feature`. It takes its memory from `budget` and returns it when
    /// dropped.
    pub fn new(feature: &str, budget: &CountBudget) -> Self {
        Self { feature: feature.to_owned(), budget: budget.clone(), counts: IdTable::default() }
    }

    /// Adds `times` to the count of `id`.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyIds`] if the budget does not suffice for another id. In this case nothing is counted.
    #[inline]
    pub fn add(&mut self, id: i64, times: u64) -> Result<()> {
        if times == 0 {
            return Ok(());
        }
        if self.counts.is_full() {
            self.grow()?;
        }
        self.counts.add(id, times);
        Ok(())
    }

    /// Adds the counts of another counter of the same feature, for example from another thread.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`add`](Self::add). The ids before the one that did not fit are counted.
    pub fn merge(&mut self, mut other: Self) -> Result<()> {
        if self.counts.len() < other.counts.len() {
            // The tables are swapped together with their budgets.
            std::mem::swap(&mut self.budget, &mut other.budget);
            std::mem::swap(&mut self.counts, &mut other.counts);
        }
        other.counts().try_for_each(|(id, times)| self.add(id, times))
    }

    /// Returns the ids and their counts, in arbitrary order.
    pub fn counts(&self) -> impl Iterator<Item = (i64, u64)> {
        self.counts.iter()
    }

    /// Returns the number of distinct ids.
    pub fn distinct(&self) -> usize {
        self.counts.len()
    }

    #[cold]
    fn grow(&mut self) -> Result<()> {
        if self.budget.grow(&mut self.counts) {
            return Ok(());
        }
        Err(Error::TooManyIds {
            feature: self.feature.clone(),
            distinct: self.counts.len() as u64,
            limit: self.budget.limit,
        })
    }
}

impl Drop for VocabularyCounter {
    fn drop(&mut self) {
        self.budget.give_back(self.counts.memory_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn counts_are_exact_and_merged() {
        let budget = CountBudget::new(1 << 20);
        let (mut a, mut b) = (VocabularyCounter::new("x", &budget), VocabularyCounter::new("x", &budget));
        for i in 0..1_000_i64 {
            a.add(i % 10, 2).unwrap();
            a.add(i, 2).unwrap();
            b.add(i * i, 1).unwrap();
        }
        a.add(77, 0).unwrap();
        a.add(-5, 0).unwrap();
        let mut expected: BTreeMap<i64, u64> = BTreeMap::new();
        (0..1_000_i64).for_each(|i| {
            *expected.entry(i % 10).or_default() += 2;
            *expected.entry(i).or_default() += 2;
            *expected.entry(i * i).or_default() += 1;
        });
        a.merge(b).unwrap();
        assert_eq!(a.counts().collect::<BTreeMap<_, _>>(), expected);
        assert_eq!(a.distinct(), expected.len());
        assert_eq!(budget.used_bytes(), a.counts.memory_bytes() as u64);
        drop(a);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn a_spent_budget_is_an_error_that_says_what_to_do() {
        let budget = CountBudget::new(96 << 10);
        let mut other = VocabularyCounter::new("y", &budget);
        other.add(1, 1).unwrap();
        let mut counter = VocabularyCounter::new("item", &budget);
        let error = (0..100_000).find_map(|id| counter.add(id, 1).err()).unwrap();
        // The table has 2,048 slots, and the budget has no room for another one with 4,096.
        assert_eq!(counter.distinct(), 1_792);
        assert_eq!(
            error.to_string(),
            "feature `item`: the memory limit does not suffice to count its ids for a vocabulary: 1,792 distinct ones so \
             far, 96.0 KiB for all features\n  hint: raise the option `memory_limit`, or leave this feature's ids as they are (remove its `vocabulary`)"
        );
        assert_eq!(counter.counts().count(), 1_792);
        drop((counter, other));
        assert_eq!(budget.used_bytes(), 0);
    }
}
