//! Logs as far as groups are concerned, for tests.

use onefold_datasets::{SparseFeature, SparseKind};

use super::ObservedFeature;
use super::co_change::{CoChange, scramble};

/// A feature of `samples` samples with lists of this mean length.
pub(super) fn feature(name: &str, samples: u64, length: u64) -> ObservedFeature {
    let feature = SparseFeature::new(name, SparseKind::Sparse);
    ObservedFeature { feature, values: samples * length, window_values: 0 }
}

/// Random numbers in `0..1`.
pub(super) fn random(state: &mut u64) -> f64 {
    *state += 1;
    scramble(*state) as f64 / u64::MAX as f64
}

/// What a log of sessions with a mean of 16.5 samples shows in which each part, of features and the probability that
/// it changes, changes together.
pub(super) fn simulate(parts: &[(Vec<usize>, f64)], samples: u64, observed: &mut CoChange) {
    let state = &mut 1_u64;
    observed.start_session();
    for _ in 1..samples {
        if random(state) < 1.0 / 16.5 {
            observed.start_session();
            continue;
        }
        let mut set = vec![0; observed.words()];
        for (features, probability) in parts {
            if random(state) < *probability {
                features.iter().for_each(|feature| set[feature / 64] |= 1 << (feature % 64));
            }
        }
        observed.observe(&set, 1, *state);
    }
}

/// The workload rm1 (`onefold-data generate --workload rm1`): its features, their true groups, and the part of its
/// samples with which each group changes.
pub(super) fn rm1(samples: u64) -> (Vec<ObservedFeature>, Vec<(Vec<usize>, f64)>) {
    let user = (0..24).map(|i| feature(&format!("user_{i:02}"), samples, 20));
    let sequence = (0..6).map(|i| {
        let sequence = feature(&format!("sequence_{i:02}"), samples, 100);
        let feature = SparseFeature { kind: SparseKind::Sequence, ..sequence.feature };
        ObservedFeature { feature, window_values: samples * 635 / 100, ..sequence }
    });
    let item = (0..12).map(|i| feature(&format!("item_{i:02}"), samples, 2));
    let mut parts: Vec<(Vec<usize>, f64)> = Vec::new();
    parts.extend((0..4).map(|group| ((6 * group..6 * group + 6).collect(), 0.1)));
    parts.extend((0..2).map(|group| ((24 + 3 * group..27 + 3 * group).collect(), 0.3)));
    // A short list of frequent ids repeats by chance now and then.
    parts.extend((30..42).map(|feature| (vec![feature], 0.98)));
    (user.chain(sequence).chain(item).collect(), parts)
}
