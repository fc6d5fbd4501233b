//! Feature groups found in the data: which features change together, and which are worth deduplicating.
//!
//! A **group** has one inverse index, and a distinct row wherever any of its features changes. Over `n` samples in `s`
//! sessions, a group G that changes at `c(G)` of the samples which have a predecessor in their session has
//!
//! ```text
//! u(G) = (s + c(G)) / n          distinct rows per sample; 1 / u(G) is the dedupe factor
//! ```
//!
//! With S = n / s samples per session and d = 1 - c / (n - s), the probability that a value repeats, this is the
//! `1 / (1 - d (S-1)/S)` of RecD (Zhao et al. 2023), counted rather than estimated.
//!
//! A distinct row of a feature costs its ids, 8 bytes each, and its place, 8 bytes of offset and size; it is shipped,
//! looked up and pooled once. A sample costs 4 bytes of inverse index per group. So a group costs, in bytes per sample,
//!
//! ```text
//! cost(G) = u(G) W(G) + 4,       W(G) = sum over its features of 8 (mean length + 1)
//! ```
//!
//! and putting two groups together changes the cost by
//!
//! ```text
//! cost(A ∪ B) - cost(A) - cost(B) = (u(A ∪ B) - u(A)) W(A) + (u(A ∪ B) - u(B)) W(B) - 4
//! ```
//!
//! The first two terms, never negative, are rows stored again because the other features changed; the last
//! is the index saved. Short lists that seldom change share a group even if they change apart; long ones only
//! if they change together nearly always.
//!
//! [`choose_groups`] starts with one group for every set of features that always change together, which loses nothing,
//! and merges the pair that lowers the cost most until none does: agglomerative clustering by cost (after Ward 1963),
//! with a heap of pairs, O(F² log F) for F features. A feature is **worth deduplicating** if its dedupe factor alone is
//! over [`WORTHWHILE_FACTOR`]; a sequence also if its ids are, once its windows share them (the partial factor). No
//! merge takes a group of features that are worth it below that factor.
//!
//! Features that change together are observed as [`CoChange`]: how often each *set* of features changed. Sets are few,
//! so this is cheap, and unlike the counts of pairs it gives `c` of any group.

mod co_change;
mod merge;
mod names;
#[cfg(test)]
mod tests;

use onefold_datasets::{SparseFeature, SparseKind};

pub(crate) use self::co_change::CoChange;
use self::merge::merge_groups;
use self::names::{UNGROUPED, group_names};

/// The dedupe factor over which deduplication is worth its index (RecD's rule of thumb).
pub(crate) const WORTHWHILE_FACTOR: f64 = 1.5;

/// Bytes of an id, and of a row's offset and size.
const ID_BYTES: f64 = 8.0;
const PLACE_BYTES: f64 = 8.0;
/// The statistics of one sparse feature over the samples that were observed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObservedFeature {
    /// The feature.
    pub(crate) feature: SparseFeature,
    /// Ids over all samples.
    pub(crate) values: u64,
    /// Of a sequence: ids that are stored if windows share them, that is all ids of a session's first sample and those
    /// appended at later ones. Ignored for other features.
    pub(crate) window_values: u64,
}

/// A group that was chosen.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ChosenGroup {
    /// The common beginning of its features' names, or the name of the first.
    pub(crate) name: String,
    /// Whether it is worth deduplicating.
    pub(crate) deduplicated: bool,
    /// Its features: rising positions among those observed.
    pub(crate) features: Vec<usize>,
    /// The dedupe factor that is expected of it.
    pub(crate) dedupe_factor: f64,
    /// Why it was chosen, in a sentence.
    pub(crate) why: String,
}

/// Chooses the groups: those worth deduplicating by their first feature, then that of all others. Every feature is in
/// one.
///
/// # Panics
///
/// If `observed` is about another number of features than `features` are.
pub(crate) fn choose_groups(features: &[ObservedFeature], observed: &CoChange) -> Vec<ChosenGroup> {
    assert_eq!(features.len(), observed.features(), "observations of other features");
    let (mut by_rows, mut by_windows, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for (number, feature) in features.iter().enumerate() {
        if observed.dedupe_factor(&[number]) > WORTHWHILE_FACTOR {
            by_rows.push(number);
        } else if partial_factor(feature) > WORTHWHILE_FACTOR {
            by_windows.push(number);
        } else {
            rest.push(number);
        }
    }
    let weights: Vec<f64> = features.iter().map(|feature| weight(feature, observed)).collect();
    let mut groups = merge_groups(&by_rows, &weights, observed, 1.0 / WORTHWHILE_FACTOR);
    // These change with nearly every sample, so a group of them has no factor to lose.
    groups.extend(merge_groups(&by_windows, &weights, observed, f64::INFINITY));
    groups.sort();
    let all_names: Vec<&str> = features.iter().map(|feature| feature.feature.name.as_str()).collect();
    let names = group_names(&all_names, &groups);
    let mut chosen: Vec<ChosenGroup> = groups
        .into_iter()
        .zip(names)
        .map(|(group, name)| {
            let dedupe_factor = observed.dedupe_factor(&group);
            let why = why_deduplicated(features, observed, &group);
            ChosenGroup { name, deduplicated: true, features: group, dedupe_factor, why }
        })
        .collect();
    if !rest.is_empty() {
        let best = rest.iter().map(|f| observed.dedupe_factor(&[*f])).fold(1.0, f64::max);
        chosen.push(ChosenGroup {
            name: UNGROUPED.to_owned(),
            deduplicated: false,
            dedupe_factor: 1.0,
            why: format!(
                "no feature has a dedupe factor over {WORTHWHILE_FACTOR} (the largest is {best:.2})"
            ),
            features: rest,
        });
    }
    chosen
}

/// Bytes that a distinct row of a feature costs on average.
fn weight(feature: &ObservedFeature, observed: &CoChange) -> f64 {
    ID_BYTES * feature.values as f64 / observed.samples().max(1) as f64 + PLACE_BYTES
}

/// How many times fewer ids are stored when windows share them; 1 for features that are not sequences.
fn partial_factor(feature: &ObservedFeature) -> f64 {
    match feature.feature.kind {
        SparseKind::Sequence => feature.values as f64 / feature.window_values.max(1) as f64,
        SparseKind::Sparse => 1.0,
    }
}

/// The reason why a group is deduplicated, for the summary.
fn why_deduplicated(features: &[ObservedFeature], observed: &CoChange, group: &[usize]) -> String {
    let continued = observed.samples() - observed.sessions();
    let share = 100.0 * observed.group_changes(group) as f64 / continued.max(1) as f64;
    let what = match group.len() {
        1 => "it changes".to_owned(),
        many => format!("one of its {many} features changes"),
    };
    let sequences = || {
        let of_group = group.iter().map(|feature| &features[*feature]);
        of_group.filter(|feature| feature.feature.kind == SparseKind::Sequence)
    };
    let values: u64 = sequences().map(|feature| feature.values).sum();
    let window_values: u64 = sequences().map(|feature| feature.window_values).sum();
    let windows = match values {
        0 => String::new(),
        _ => format!(", {:.2} for the ids of its windows", values as f64 / window_values.max(1) as f64),
    };
    format!(
        "{what} at {share:.1} % of the samples that continue a session: dedupe factor {:.2}{windows}",
        observed.dedupe_factor(group)
    )
}
