//! Counts which sets of features change together.

use std::collections::HashMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The number of different sets that are counted before changes are sampled.
const MOST_SETS: usize = 32 << 10;

/// The numbers of changes per level. A change has level `l` with probability 2^-(l + 1).
type Levels = Vec<u64>;

/// Counts how often each set of features changed from one sample of a session to the next.
///
/// The counts are exact up to 32,768 different sets. Beyond that, each change is kept with probability 1/2, 1/4, …. The
/// fraction of changes of a group is then estimated from a random sample of about 16,384 or more different sets, with a
/// standard error of 0.4 % or less. A change is kept or dropped by its seed, so the result does not depend on the order
/// of the observations, nor on how they were divided before they were merged. The counts of single features stay exact.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CoChange {
    features: usize,
    samples: u64,
    sessions: u64,
    /// The number of changes of each feature.
    changes: Vec<u64>,
    /// The number of changes of each set of features, per level. A set is a bit set; the empty set is not stored.
    #[serde(serialize_with = "pairs_of", deserialize_with = "of_pairs")]
    pub(super) sets: HashMap<Box<[u64]>, Levels>,
    /// Changes below this level have been dropped.
    pub(super) thinned: usize,
    most_sets: usize,
}

impl CoChange {
    /// Makes a counter for this number of features, without observations.
    pub(crate) fn new(features: usize) -> Self {
        Self::with_most_sets(features, MOST_SETS)
    }

    fn with_most_sets(features: usize, most_sets: usize) -> Self {
        let changes = vec![0; features];
        Self { features, samples: 0, sessions: 0, changes, sets: HashMap::new(), thinned: 0, most_sets }
    }

    /// Returns the number of 64-bit words in a set of features. Bit `f % 64` of word `f / 64` represents feature `f`.
    pub(crate) fn words(&self) -> usize {
        self.features.div_ceil(64)
    }

    /// Observes the first sample of a session.
    pub(crate) fn start_session(&mut self) {
        self.samples += 1;
        self.sessions += 1;
    }

    /// Observes `times` samples that each differ from their predecessor in the session in the features of the set
    /// `changed`. Observations should have different seeds.
    ///
    /// # Panics
    ///
    /// If `changed` does not have [`words`](Self::words) words.
    pub(crate) fn observe(&mut self, changed: &[u64], times: u64, seed: u64) {
        assert_eq!(changed.len(), self.words(), "a set of other features");
        self.samples += times;
        if times == 0 || changed.iter().all(|word| *word == 0) {
            return;
        }
        for feature in bits(changed).filter(|feature| *feature < self.features) {
            self.changes[feature] += times;
        }
        for time in 0..times {
            self.count(changed, scramble(seed.wrapping_add(time)).trailing_zeros() as usize, 1);
        }
        self.thin();
    }

    /// Adds the observations of `other`, which has the same features and other sessions.
    ///
    /// # Panics
    ///
    /// If `other` has another number of features.
    pub(crate) fn merge(&mut self, other: Self) {
        assert_eq!(self.features, other.features, "observations of other features");
        self.samples += other.samples;
        self.sessions += other.sessions;
        self.changes.iter_mut().zip(&other.changes).for_each(|(sum, more)| *sum += more);
        self.thin_to(other.thinned);
        for (set, levels) in other.sets {
            levels.into_iter().enumerate().for_each(|(level, times)| self.count(&set, level, times));
        }
        self.thin();
    }

    /// Returns the number of features.
    pub(crate) fn features(&self) -> usize {
        self.features
    }

    /// Returns the number of observed samples.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the number of observed sessions.
    pub(crate) fn sessions(&self) -> u64 {
        self.sessions
    }

    /// Returns how often a feature differed from the previous sample of its session.
    pub(crate) fn changes(&self, feature: usize) -> u64 {
        self.changes.get(feature).copied().unwrap_or(0)
    }

    /// Returns whether the changes of groups are counted exactly, not estimated from a sample.
    #[cfg(test)]
    pub(crate) fn is_exact(&self) -> bool {
        self.thinned == 0
    }

    /// Returns how often any feature of `group` differed from the previous sample of its session.
    pub(crate) fn group_changes(&self, group: &[usize]) -> u64 {
        if let [feature] = group {
            return self.changes(*feature);
        }
        let mut wanted = vec![0_u64; self.words()];
        group.iter().for_each(|feature| wanted[feature / 64] |= 1 << (feature % 64));
        let hit = |set: &[u64]| set.iter().zip(&wanted).any(|(a, b)| a & b != 0);
        let hits = self.sets.iter().filter(|(set, _)| hit(set)).flat_map(|(_, levels)| levels);
        hits.sum::<u64>() << self.thinned
    }

    /// Returns the dedupe factor `1 / u` of a group (see the parent module); 1 if nothing was observed.
    pub(crate) fn dedupe_factor(&self, group: &[usize]) -> f64 {
        self.samples.max(1) as f64 / (self.sessions + self.group_changes(group)).max(1) as f64
    }

    /// Counts changes of a level, unless the level has been dropped.
    fn count(&mut self, set: &[u64], level: usize, times: u64) {
        if times == 0 || level < self.thinned {
            return;
        }
        if !self.sets.contains_key(set) {
            self.sets.insert(set.into(), Vec::new());
        }
        let levels = self.sets.get_mut(set).expect("the set was inserted above");
        levels.resize(levels.len().max(level + 1), 0);
        levels[level] += times;
    }

    /// Drops the lowest levels until at most `most_sets` sets remain.
    fn thin(&mut self) {
        while self.sets.len() > self.most_sets {
            self.thin_to(self.thinned + 1);
        }
    }

    /// Drops the levels below `thinned`.
    fn thin_to(&mut self, thinned: usize) {
        if thinned <= self.thinned {
            return;
        }
        self.thinned = thinned;
        self.sets.retain(|_, levels| {
            levels.iter_mut().take(thinned).for_each(|times| *times = 0);
            levels.len() > thinned
        });
    }
}

/// Serializes the sets as pairs, because JSON and other formats have no maps with such keys.
fn pairs_of<S: Serializer>(sets: &HashMap<Box<[u64]>, Levels>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(sets)
}

fn of_pairs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HashMap<Box<[u64]>, Levels>, D::Error> {
    Ok(Vec::<(Box<[u64]>, Levels)>::deserialize(deserializer)?.into_iter().collect())
}

/// Returns the positions of the bits that are set.
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

/// The output function of SplitMix64 (Steele, Lea and Flood 2014): every input bit changes every output bit.
pub(super) fn scramble(value: u64) -> u64 {
    onefold_datasets::digest::scramble(value.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::tests::{rm1, simulate};

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
            // Five standard errors for 2,048 samples.
            assert!((a - b).abs() / 60_000.0 < 0.055, "{group:?}: {a} {b}");
        }
    }

    #[test]
    fn merged_counts_of_parts_equal_those_of_the_whole() {
        let (features, parts) = rm1(4_000);
        for (most_sets, is_exact) in [(MOST_SETS, true), (50, false)] {
            let observed = |ways: &[&[(Vec<usize>, f64)]]| {
                let mut observed = CoChange::with_most_sets(features.len(), most_sets);
                ways.iter().for_each(|parts| simulate(parts, 4_000, &mut observed));
                observed
            };
            let whole = observed(&[&parts, &parts[3..]]);
            assert!(whole.is_exact() == is_exact && whole.sets.len() <= most_sets);
            let (first, second) = (observed(&[&parts]), observed(&[&parts[3..]]));
            for (mut merged, other) in [(first.clone(), second.clone()), (second, first)] {
                merged.merge(other);
                assert_eq!(
                    (merged.samples, merged.sessions, &merged.changes, merged.thinned),
                    (8_000, whole.sessions, &whole.changes, whole.thinned)
                );
                let all = 0..features.len();
                let pairs = all.clone().flat_map(|one| all.clone().map(move |other| [one, other]));
                for pair in pairs {
                    assert_eq!(merged.group_changes(&pair), whole.group_changes(&pair));
                }
            }
        }
    }
}
