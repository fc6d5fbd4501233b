//! Counts which features change together, by set of features.

use std::collections::HashMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Different sets of features that are counted before they are thinned.
const MOST_SETS: usize = 32 << 10;

/// How often each set of features changed from one sample of a session to the next.
///
/// Exact up to 32,768 different sets. Beyond that every change is kept with probability 1/2, 1/4, …, by a seeded
/// choice: of any group the share of changes is then that of a random sample of at least 16,384 different sets, with a
/// standard error below 0.4 %. How often a feature changes by itself stays exact.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CoChange {
    features: usize,
    samples: u64,
    sessions: u64,
    /// Changes of each feature.
    changes: Vec<u64>,
    /// Set of features, as bits, → how often it changed; without the empty set.
    #[serde(serialize_with = "pairs_of", deserialize_with = "of_pairs")]
    pub(super) sets: HashMap<Box<[u64]>, u64>,
    /// Changes are kept with probability 2^-thinned.
    pub(super) thinned: u32,
    most_sets: usize,
}

impl CoChange {
    /// Starts without observations, of so many features.
    pub fn new(features: usize) -> Self {
        Self::with_most_sets(features, MOST_SETS)
    }

    fn with_most_sets(features: usize, most_sets: usize) -> Self {
        let changes = vec![0; features];
        Self { features, samples: 0, sessions: 0, changes, sets: HashMap::new(), thinned: 0, most_sets }
    }

    /// Words of 64 bits that a set of the features has: bit `f % 64` of word `f / 64` stands for feature `f`.
    pub fn words(&self) -> usize {
        self.features.div_ceil(64)
    }

    /// Observes the first sample of a session.
    pub fn start_session(&mut self) {
        self.samples += 1;
        self.sessions += 1;
    }

    /// Observes `times` samples that each have a predecessor in their session, from which the features of the set
    /// `changed` differ.
    ///
    /// # Panics
    ///
    /// If `changed` does not have [`words`](Self::words) words.
    pub fn observe(&mut self, changed: &[u64], times: u64) {
        assert_eq!(changed.len(), self.words(), "a set of other features");
        self.samples += times;
        if times == 0 || changed.iter().all(|word| *word == 0) {
            return;
        }
        for feature in bits(changed).filter(|feature| *feature < self.features) {
            self.changes[feature] += times;
        }
        // Of changes that come one by one, one in 2^thinned is kept; several at once are thinned like earlier ones.
        let seed = scramble(self.samples ^ changed[0]);
        let kept = (0..self.thinned).fold(times, |times, round| half(times, seed ^ u64::from(round) << 48));
        self.count(changed, kept);
        self.thin_to(self.thinned);
    }

    /// Adds another's observations of the same features, in other sessions. Gives the same whatever ran in
    /// parallel, if the parts are the same and merged in the same order.
    ///
    /// # Panics
    ///
    /// If `other` is about another number of features.
    pub fn merge(&mut self, mut other: Self) {
        assert_eq!(self.features, other.features, "observations of other features");
        let thinned = self.thinned.max(other.thinned);
        self.thin_to(thinned);
        other.thin_to(thinned);
        self.samples += other.samples;
        self.sessions += other.sessions;
        self.changes.iter_mut().zip(&other.changes).for_each(|(sum, more)| *sum += more);
        for (set, times) in other.sets {
            self.count(&set, times);
        }
        self.thin_to(thinned);
    }

    /// The number of features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Samples observed.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Sessions observed.
    pub fn sessions(&self) -> u64 {
        self.sessions
    }

    /// How often a feature differed from the sample before it in its session.
    pub fn changes(&self, feature: usize) -> u64 {
        self.changes.get(feature).copied().unwrap_or(0)
    }

    /// Whether changes of groups are counted exactly, not estimated from a subset.
    pub fn is_exact(&self) -> bool {
        self.thinned == 0
    }

    /// How often any feature of `group` differed from the sample before it in its session.
    pub fn group_changes(&self, group: &[usize]) -> u64 {
        if let [feature] = group {
            return self.changes(*feature);
        }
        let mut wanted = vec![0_u64; self.words()];
        group.iter().for_each(|feature| wanted[feature / 64] |= 1 << (feature % 64));
        let hit = |set: &[u64]| set.iter().zip(&wanted).any(|(a, b)| a & b != 0);
        let hits = self.sets.iter().filter(|(set, _)| hit(set)).map(|(_, times)| *times);
        hits.sum::<u64>() << self.thinned
    }

    /// The dedupe factor of a group, `1 / u` as above; 1 if nothing was observed.
    pub fn dedupe_factor(&self, group: &[usize]) -> f64 {
        self.samples.max(1) as f64 / (self.sessions + self.group_changes(group)).max(1) as f64
    }

    fn count(&mut self, set: &[u64], times: u64) {
        if times == 0 {
            return;
        }
        match self.sets.get_mut(set) {
            Some(known) => *known += times,
            None => {
                self.sets.insert(set.into(), times);
            }
        }
    }

    /// Halves the counts until they are thinned at least `thinned` times and the sets are few enough.
    fn thin_to(&mut self, thinned: u32) {
        while self.thinned < thinned || self.sets.len() > self.most_sets {
            let round = scramble(self.samples ^ u64::from(self.thinned) << 48);
            self.sets.retain(|set, times| {
                let seed = set.iter().fold(round, |seed, word| scramble(seed ^ word));
                *times = half(*times, seed);
                *times > 0
            });
            self.thinned += 1;
        }
    }
}

/// The sets as pairs: not every format has maps with such keys.
fn pairs_of<S: Serializer>(sets: &HashMap<Box<[u64]>, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(sets)
}

fn of_pairs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HashMap<Box<[u64]>, u64>, D::Error> {
    Ok(Vec::<(Box<[u64]>, u64)>::deserialize(deserializer)?.into_iter().collect())
}

/// The positions of the bits that are set.
fn bits(words: &[u64]) -> impl Iterator<Item = usize> {
    words.iter().enumerate().flat_map(|(at, word)| {
        let mut left = *word;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(64 * at + bit)
        })
    })
}

/// How many of `times` coins show heads.
fn half(times: u64, seed: u64) -> u64 {
    let coins = |word: u64| {
        let left = times - 64 * word;
        let used = if left < 64 { (1 << left) - 1 } else { u64::MAX };
        u64::from((scramble(seed.wrapping_add(word)) & used).count_ones())
    };
    (0..times.div_ceil(64)).map(coins).sum()
}

/// The output function of SplitMix64 (Steele, Lea and Flood 2014): every input bit changes every output bit.
pub(super) fn scramble(value: u64) -> u64 {
    onefold_datasets::digest::scramble(value.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::simulate::{rm1, simulate};

    #[test]
    fn more_sets_than_are_kept_are_estimated() {
        let features = 130;
        let parts: Vec<(Vec<usize>, f64)> =
            (0..features).map(|f| (vec![f], 0.02 + f as f64 / 150.0)).collect();
        let mut exact = CoChange::with_most_sets(features, usize::MAX);
        let mut thinned = CoChange::with_most_sets(features, 4_096);
        simulate(&parts, 60_000, &mut exact);
        simulate(&parts, 60_000, &mut thinned);
        assert!(exact.is_exact() && !thinned.is_exact());
        assert!(thinned.sets.len() <= 4_096 && thinned.sets.len() > 1_024, "{}", thinned.sets.len());
        assert_eq!((exact.samples(), exact.sessions()), (thinned.samples(), thinned.sessions()));
        assert_eq!(exact.changes, thinned.changes);
        for group in [vec![0, 1], vec![3, 40], vec![0, 5, 10], vec![128, 129]] {
            let (a, b) = (exact.group_changes(&group) as f64, thinned.group_changes(&group) as f64);
            // Five standard errors of 2,048 samples.
            assert!((a - b).abs() / 60_000.0 < 0.055, "{group:?}: {a} {b}");
        }
    }

    #[test]
    fn parts_that_are_merged_say_what_the_whole_says() {
        let (features, parts) = rm1(4_000);
        let mut whole = CoChange::new(features.len());
        simulate(&parts, 4_000, &mut whole);
        simulate(&parts[3..], 3_000, &mut whole);
        let halves = |most_sets| {
            let mut halves = [(); 2].map(|()| CoChange::with_most_sets(features.len(), most_sets));
            simulate(&parts, 4_000, &mut halves[0]);
            simulate(&parts[3..], 3_000, &mut halves[1]);
            let [mut first, second] = halves;
            first.merge(second);
            first
        };
        let merged = halves(MOST_SETS);
        assert_eq!(
            (merged.samples, merged.sessions, &merged.changes),
            (7_000, whole.sessions, &whole.changes)
        );
        assert_eq!(merged.sets, whole.sets);
        let (thinned, again) = (halves(50), halves(50));
        assert!(!thinned.is_exact() && thinned.sets.len() <= 50);
        assert_eq!((thinned.sets, thinned.thinned), (again.sets, again.thinned));
    }
}
