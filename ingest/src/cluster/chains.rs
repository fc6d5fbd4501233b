//! Decides which samples of a session are chained, so that only few chains are open at any position of the sorted
//! records.
//!
//! A chain is open from its first record to its last, and the decoder holds the lists of its last sample while it
//! is open. In a log in time order, the chains of a session follow each other. In other logs they may overlap: in a
//! shuffled log, half of them would be open at once. So a chain is extended only where few others are open.
//! Otherwise samples are stored whole, as chains of one record, for which the decoder holds nothing.

/// The maximum number of intervals per session. Further intervals are merged, so more samples are stored whole.
const MOST_INTERVALS: usize = 16;

/// A chain that may be extended: the time of its first record, and of its last record if it has several.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Chain {
    first: i64,
    last: Option<i64>,
}

/// The time intervals of the chains of one session that are complete.
#[derive(Debug, Default)]
pub(super) struct Chains {
    /// Chains with several records.
    ended: Vec<Interval>,
}

/// A time interval, and the maximum number of chains that are open in it.
#[derive(Debug, Clone, Copy)]
struct Interval {
    first: i64,
    last: i64,
    chains: usize,
}

impl Chain {
    /// Whether this chain is open at a time that `other` would cover if it were extended to `time`.
    pub(super) fn meets(&self, other: &Self, time: i64) -> bool {
        self.last.is_some_and(|last| last >= other.first && self.first <= time)
    }
}

impl Chains {
    /// Completes `chain` and starts a new one in its place, whose first sample has the time `time`.
    pub(super) fn begin(&mut self, chain: &mut Chain, time: i64) {
        if let Some(last) = chain.last.take() {
            self.add(Interval { first: chain.first, last, chains: 1 });
        }
        chain.first = time;
    }

    /// Extends `chain` by a sample at `time`, unless `most` other chains may be open at the same time. `meeting` is
    /// the number of other unfinished chains that [meet](Chain::meets) it. Returns whether the chain was extended.
    pub(super) fn extend(&self, chain: &mut Chain, meeting: usize, time: i64, most: usize) -> bool {
        let others = self.ended.iter().filter(|other| other.last >= chain.first && other.first <= time);
        let fits = meeting + others.map(|other| other.chains).sum::<usize>() < most;
        if fits {
            chain.last = Some(time);
        }
        fits
    }

    /// The number of bytes on the heap.
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

    /// Returns the chains of samples that arrive in the order of `times`. At most `lasts` chains are extended at a
    /// time.
    fn chained(times: &[i64], most: usize, lasts: usize) -> Vec<Vec<i64>> {
        let (mut chains, mut going_on) = (Chains::default(), vec![(Chain::default(), Vec::new()); lasts]);
        let mut all: Vec<Vec<i64>> = Vec::new();
        for (i, time) in times.iter().enumerate() {
            let place = i % lasts;
            let chain = going_on[place].0;
            let meeting =
                (0..lasts).filter(|other| *other != place && going_on[*other].0.meets(&chain, *time)).count();
            let (chain, samples) = &mut going_on[place];
            if samples.last() <= Some(time)
                && !samples.is_empty()
                && chains.extend(chain, meeting, *time, most)
            {
                samples.push(*time);
            } else {
                chains.begin(chain, *time);
                all.extend(
                    Some(std::mem::replace(samples, vec![*time])).filter(|samples| !samples.is_empty()),
                );
            }
        }
        all.extend(going_on.into_iter().map(|(_, samples)| samples).filter(|samples| !samples.is_empty()));
        all
    }

    proptest! {
        #[test]
        fn no_more_chains_are_open_than_allowed(
            times in prop::collection::vec(prop_oneof![0..50_i64, 0..3000_i64], 1..400),
            most in 1..6_usize,
            lasts in 1..4_usize,
        ) {
            let chains = chained(&times, most, lasts);
            let sorted = |mut times: Vec<i64>| {
                times.sort_unstable();
                times
            };
            prop_assert_eq!(sorted(chains.concat()), sorted(times.clone()));
            let open = |time: i64| chains.iter().filter(|c| c.len() > 1 && c[0] <= time && time <= c[c.len() - 1]).count();
            for time in times {
                prop_assert!(open(time) <= most, "{} chains at {}", open(time), time);
            }
        }
    }

    #[test]
    fn logs_in_order_or_nearly_so_are_chained() {
        assert_eq!(chained(&[1, 2, 2, 3], 1, 1), [[1, 2, 2, 3]]);
        // Files that are read in another order than their times.
        assert_eq!(chained(&[7, 8, 9, 4, 5, 6, 1, 2, 3], 1, 1), [[7, 8, 9], [4, 5, 6], [1, 2, 3]]);
        // One sample from the future.
        assert_eq!(chained(&[1, 2, 99, 3, 4, 5, 6], 2, 1), [vec![1, 2, 99], vec![3, 4, 5, 6]]);
        assert_eq!(chained(&[1, 2, 99, 3, 4], 1, 1), [vec![1, 2, 99], vec![3], vec![4]]);
        // Two parts of a log that are read at the same time.
        assert_eq!(chained(&[1, 11, 2, 12, 3, 13], 1, 2), [[1, 2, 3], [11, 12, 13]]);
        // A log with the newest sample first.
        assert_eq!(chained(&[3, 2, 1], 9, 1), [[3], [2], [1]]);
    }
}
