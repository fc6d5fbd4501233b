use super::co_change::scramble;
use super::merge::INDEX_BYTES;
use super::*;

/// Returns a feature with lists of this mean length over `samples` samples.
fn feature(name: &str, samples: u64, length: u64) -> ObservedFeature {
    let feature = SparseFeature::new(name, SparseKind::Sparse);
    ObservedFeature { feature, values: samples * length, window_values: 0 }
}

/// Returns the indices of the features of a group.
fn indices(group: &GroupSummary, features: &[ObservedFeature]) -> Vec<usize> {
    let index = |name: &String| features.iter().position(|feature| feature.feature.name == *name).unwrap();
    group.features.iter().map(index).collect()
}

/// Returns a random number in `0..1`.
fn random(state: &mut u64) -> f64 {
    *state += 1;
    scramble(*state) as f64 / u64::MAX as f64
}

/// Simulates a log of sessions with a mean of 16.5 samples. Each part is a list of features that change together, and
/// the probability that they change.
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

/// Returns the workload rm1 (`onefold-data generate --workload rm1`): its features, and its true groups with the
/// fraction of samples at which each group changes.
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
    // A short list of frequent ids sometimes repeats by chance.
    parts.extend((30..42).map(|feature| (vec![feature], 0.98)));
    (user.chain(sequence).chain(item).collect(), parts)
}

#[test]
fn the_groups_of_rm1_are_found() {
    let (features, parts) = rm1(30_000);
    let mut observed = CoChange::new(features.len());
    simulate(&parts, 30_000, &mut observed);
    assert!(observed.is_exact());
    let chosen = choose_groups(&features, &observed);
    let found: Vec<(&str, Vec<usize>)> =
        chosen.iter().map(|group| (group.name.as_str(), indices(group, &features))).collect();
    let names = ["user_a", "user_b", "user_c", "user_d", "sequence_a", "sequence_b"];
    let mut given: Vec<(&str, Vec<usize>)> =
        names.into_iter().zip(parts.iter().map(|(features, _)| features.clone())).collect();
    given.push((UNGROUPED, (30..42).collect()));
    assert_eq!(found, given);
    assert!(chosen[..6].iter().all(|group| group.deduplicated) && !chosen[6].deduplicated);
    // The expected values are 1 / (1 - d (S-1)/S) with d = 0.9 and 0.7.
    assert!((chosen[0].dedupe_factor / 6.5 - 1.0).abs() < 0.06, "{chosen:?}");
    assert!((chosen[4].dedupe_factor / 2.9 - 1.0).abs() < 0.06, "{chosen:?}");
    let why = &chosen[4].why;
    assert!(why.starts_with("one of its 3 features changes at "), "{why}");
    assert!(why.ends_with(", 15.75 for the ids of its windows"), "{why}");
    assert!(chosen[6].why.starts_with("no feature has a dedupe factor over 1.5"), "{}", chosen[6].why);
}

/// Returns the cost of groups in bytes per sample: distinct rows and inverse indices. Each group is given with whether
/// it is deduplicated.
fn groups_cost(groups: &[(Vec<usize>, bool)], features: &[ObservedFeature], observed: &CoChange) -> f64 {
    let cost = |(group, deduplicated): &(Vec<usize>, bool)| {
        let bytes: f64 = group.iter().map(|f| weight(&features[*f], observed)).sum();
        if *deduplicated { bytes / observed.dedupe_factor(group) + INDEX_BYTES } else { bytes }
    };
    groups.iter().map(cost).sum()
}

/// Returns the cost of a partition of the features by its definition, from exact counts of sets.
fn cost_of(groups: &[Vec<usize>], features: &[ObservedFeature], observed: &CoChange) -> f64 {
    let cost = |group: &Vec<usize>| {
        let distinct = (observed.sessions() + observed.group_changes(group)) as f64;
        let bytes = group.iter().map(|f| 8.0 * features[*f].values as f64 / observed.samples() as f64 + 8.0);
        bytes.sum::<f64>() * distinct / observed.samples() as f64 + 4.0
    };
    groups.iter().map(cost).sum()
}

/// Visits all ways to divide `left` into groups, in addition to `groups`.
fn partitions(left: &[usize], groups: &mut Vec<Vec<usize>>, visit: &mut dyn FnMut(&[Vec<usize>])) {
    let Some((feature, left)) = left.split_first() else { return visit(groups) };
    for at in 0..groups.len() {
        groups[at].push(*feature);
        partitions(left, groups, visit);
        groups[at].pop();
    }
    groups.push(vec![*feature]);
    partitions(left, groups, visit);
    groups.pop();
}

#[test]
fn few_features_are_grouped_nearly_as_well_as_by_trying_all_ways() {
    let mut worst: f64 = 1.0;
    for seed in 0..40_u64 {
        let state = &mut (seed << 32);
        let features: Vec<ObservedFeature> = (0..6)
            .map(|i| feature(&format!("f{i}"), 2_000, 1 + (random(state) * 3.0).powi(3) as u64))
            .collect();
        // The parts overlap: some features change alone as well as with others.
        let parts: Vec<(Vec<usize>, f64)> = (0..5)
            .map(|_| {
                let part: Vec<usize> = (0..6).filter(|_| random(state) < 0.4).collect();
                (part, 0.12 * random(state).powi(2))
            })
            .collect();
        let mut observed = CoChange::new(6);
        simulate(&parts, 2_000, &mut observed);
        let chosen = choose_groups(&features, &observed);
        let chosen: Vec<Vec<usize>> = chosen.iter().map(|group| indices(group, &features)).collect();
        let mut best = f64::INFINITY;
        partitions(&[0, 1, 2, 3, 4, 5], &mut Vec::new(), &mut |groups| {
            best = best.min(cost_of(groups, &features, &observed));
        });
        let cost = cost_of(&chosen, &features, &observed);
        assert!(cost >= best - 1e-9);
        worst = worst.max(cost / best);
    }
    assert!(worst < 1.03, "{worst}");
}

#[test]
fn a_sequence_that_changes_with_every_sample_is_deduplicated_for_its_windows() {
    let mut history = feature("history", 1_000, 50);
    history.feature.kind = SparseKind::Sequence;
    let mut ages = history.clone();
    ages.feature.name = "history_age".into();
    (history.window_values, ages.window_values) = (4_000, 50_000);
    let mut observed = CoChange::new(2);
    (0..50).for_each(|_| observed.start_session());
    observed.observe(&[0b11], 950, 0);
    let chosen = choose_groups(&[history, ages], &observed);
    assert_eq!(chosen.len(), 2);
    assert_eq!((chosen[0].name.as_str(), chosen[0].deduplicated), ("history", true));
    assert_eq!(
        chosen[0].why,
        "it changes at 100.0 % of the samples that continue a session: dedupe factor 1.00, 12.50 for the ids of its windows"
    );
    assert_eq!((chosen[1].name.as_str(), chosen[1].deduplicated), (UNGROUPED, false));
}

#[test]
fn no_merge_reduces_the_dedupe_factor_of_features_below_the_threshold() {
    // Each feature has 0.5 distinct rows per sample, and both together have 0.7. The lists are empty, so an inverse
    // index costs more than the rows.
    let features = [feature("a", 1_000, 0), feature("b", 1_000, 0)];
    let mut observed = CoChange::new(2);
    (0..10).for_each(|_| observed.start_session());
    for (set, times) in [(0b01, 200), (0b10, 200), (0b11, 290), (0, 300)] {
        observed.observe(&[set], times, 0);
    }
    let chosen = choose_groups(&features, &observed);
    let found: Vec<_> = chosen.iter().map(|group| group.features.clone()).collect();
    assert_eq!(found, [["a"], ["b"]]);
    assert!(chosen.iter().all(|group| group.dedupe_factor > WORTHWHILE_FACTOR));
}

#[test]
fn the_groups_of_a_thousand_generated_features_are_found() {
    let samples = 20_000;
    let features: Vec<ObservedFeature> =
        (0..1_000).map(|i| feature(&format!("f{i:03}"), samples, 1 + i % 30)).collect();
    let parts: Vec<(Vec<usize>, f64)> =
        (0..250).map(|g| ((4 * g..4 * g + 4).collect(), 0.02 + (g % 10) as f64 / 50.0)).collect();
    let mut observed = CoChange::new(1_000);
    simulate(&parts, samples, &mut observed);
    let chosen = choose_groups(&features, &observed);
    let chosen: Vec<(Vec<usize>, bool)> =
        chosen.iter().map(|group| (indices(group, &features), group.deduplicated)).collect();
    for (part, _) in &parts {
        let holds = |(group, _): &(Vec<usize>, bool)| part.iter().all(|feature| group.contains(feature));
        assert!(chosen.iter().any(holds), "{part:?} is torn apart");
    }
    let given: Vec<(Vec<usize>, bool)> = parts.iter().map(|(part, _)| (part.clone(), true)).collect();
    let [found, given] = [&chosen, &given].map(|groups| groups_cost(groups, &features, &observed));
    assert!(found <= given, "{found} {given}");
}
