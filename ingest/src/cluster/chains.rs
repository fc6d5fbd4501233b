//! Decides which samples of a session are chained, so that few chains are open anywhere in the sorted records.
//!
//! A chain is open from its first record to its last, and the decoder holds the lists of its last sample while it is
//! open. In a log in order of time, the chains of a session follow each other. In other logs they may overlap: in a
//! shuffled log, half of them would be open at once. So a chain is continued only where few others are open; elsewhere
//! samples are stored whole, as chains of one record, for which the decoder holds nothing.

/// The most intervals that are kept for a session. Beyond that they are merged; then more samples are stored whole.
const MOST_INTERVALS: usize = 16;

/// The times of the chains of one session.
#[derive(Debug, Default)]
pub(super) struct Chains {
    /// The current chain: its first time, and its last time if it has several records.
    first: i64,
    last: Option<i64>,
    /// Earlier chains of several records.
    ended: Vec<Interval>,
}

/// The times from first to last, and the most chains that are open there.
#[derive(Debug, Clone, Copy)]
struct Interval {
    first: i64,
    last: i64,
    chains: usize,
}

impl Chains {
    /// Begins a chain whose first sample has this time.
    pub(super) fn begin(&mut self, time: i64) {
        if let Some(last) = self.last.take() {
            self.add(Interval { first: self.first, last, chains: 1 });
        }
        self.first = time;
    }

    /// Adds a sample to the current chain, unless `most` other chains may be open at the same time. Returns whether it
    /// did.
    pub(super) fn extend(&mut self, time: i64, most: usize) -> bool {
        let others = self.ended.iter().filter(|other| other.last >= self.first && other.first <= time);
        let fits = others.map(|other| other.chains).sum::<usize>() < most;
        if fits {
            self.last = Some(time);
        }
        fits
    }

    /// The bytes that it owns on the heap.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Interval>() * self.ended.capacity()
    }

    fn add(&mut self, chain: Interval) {
        if let Some(same) =
            self.ended.iter_mut().find(|same| (same.first, same.last) == (chain.first, chain.last))
        {
            same.chains += 1;
            return;
        }
        let place = self.ended.partition_point(|other| other.first <= chain.first);
        self.ended.insert(place, chain);
        if self.ended.len() > MOST_INTERVALS {
            // Merge the two neighbours with the smallest gap between them.
            let gap = |i: &usize| self.ended[i + 1].first.saturating_sub(self.ended[*i].last);
            let Some(i) = (0..self.ended.len() - 1).min_by_key(gap) else { return };
            let next = self.ended.remove(i + 1);
            let kept = &mut self.ended[i];
            kept.chains =
                if next.first > kept.last { kept.chains.max(next.chains) } else { kept.chains + next.chains };
            kept.last = kept.last.max(next.last);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Chains of samples that come in the order of `times`.
    fn chained(times: &[i64], most: usize) -> Vec<Vec<i64>> {
        let mut chains = Chains::default();
        let mut all: Vec<Vec<i64>> = Vec::new();
        for time in times {
            match all.last_mut() {
                Some(chain) if chain.last() <= Some(time) && chains.extend(*time, most) => chain.push(*time),
                _ => {
                    chains.begin(*time);
                    all.push(vec![*time]);
                }
            }
        }
        all
    }

    proptest! {
        #[test]
        fn no_more_chains_are_open_than_allowed(
            times in prop::collection::vec(prop_oneof![0..50_i64, 0..3000_i64], 1..400),
            most in 1..6_usize,
        ) {
            let chains = chained(&times, most);
            prop_assert_eq!(chains.concat(), times.clone());
            let open = |time: i64| chains.iter().filter(|c| c.len() > 1 && c[0] <= time && time <= c[c.len() - 1]).count();
            for time in times {
                prop_assert!(open(time) <= most, "{} chains at {}", open(time), time);
            }
        }
    }

    #[test]
    fn logs_in_order_or_nearly_so_are_chained() {
        assert_eq!(chained(&[1, 2, 2, 3], 1), [[1, 2, 2, 3]]);
        // Files that come in another order than their times.
        assert_eq!(chained(&[7, 8, 9, 4, 5, 6, 1, 2, 3], 1), [[7, 8, 9], [4, 5, 6], [1, 2, 3]]);
        // One sample from the future.
        assert_eq!(chained(&[1, 2, 99, 3, 4, 5, 6], 2), [vec![1, 2, 99], vec![3, 4, 5, 6]]);
        assert_eq!(chained(&[1, 2, 99, 3, 4], 1), [vec![1, 2, 99], vec![3], vec![4]]);
        // A log with the newest sample first.
        assert_eq!(chained(&[3, 2, 1], 9), [[3], [2], [1]]);
    }
}
