//! Finds feature groups in the data: which features change together, and which of them to deduplicate.
//!
//! A **group** has one inverse index, and a new distinct row at each sample at which any of its features changes. Let
//! there be `n` samples in `s` sessions, and let group G change at `c(G)` of the samples that have a predecessor in
//! their session. Then
//!
//! ```text
//! u(G) = (s + c(G)) / n          distinct rows per sample; 1 / u(G) is the dedupe factor
//! ```
//!
//! With S = n / s samples per session and the probability d = 1 - c / (n - s) that a value repeats, the dedupe factor
//! is `1 / (1 - d (S-1)/S)` as in RecD (Zhao et al. 2023), but counted instead of estimated.
//!
//! A distinct row of a feature costs 8 bytes per id, and 8 bytes for its offset and size. It is sent, looked up and
//! pooled once. A sample costs 4 bytes of inverse index per group. The cost of a group in bytes per sample is therefore
//!
//! ```text
//! cost(G) = u(G) W(G) + 4,       W(G) = sum over its features of 8 (mean length + 1)
//! ```
//!
//! and merging two groups changes the cost by
//!
//! ```text
//! cost(A ∪ B) - cost(A) - cost(B) = (u(A ∪ B) - u(A)) W(A) + (u(A ∪ B) - u(B)) W(B) - 4
//! ```
//!
//! The first two terms are never negative: they are the rows that are stored again because features of the other group
//! changed. The last term is the saved inverse index. Short lists that rarely change therefore share a group even if
//! they change independently, and long lists only if they nearly always change together.
//!
//! [`choose_groups`] starts with one group for each set of features that always change together, and repeatedly merges
//! the pair of groups that lowers the cost most. This is agglomerative clustering by cost (after Ward 1963) with a heap
//! of pairs: O(F² log F) for F features. A feature is deduplicated if its own dedupe factor exceeds
//! [`WORTHWHILE_FACTOR`]. A sequence feature is also deduplicated if the dedupe factor of its ids does, after its
//! windows share ids (the partial factor). No merge lowers the dedupe factor of a group of features of the first kind
//! below the threshold.
//!
//! [`CoChange`] counts how often each *set* of features changed. There are few different sets, so this is cheap. Unlike
//! counts of pairs, it gives `c` of any group.

mod co_change;
mod merge;
mod names;
#[cfg(test)]
mod tests;

use onefold_datasets::{SparseFeature, SparseKind};
use serde::Serialize;

pub(crate) use self::co_change::CoChange;
use self::merge::merge_groups;
use self::names::{UNGROUPED, group_names};

/// The dedupe factor above which deduplication saves more than its inverse index costs (RecD's rule of thumb).
pub(crate) const WORTHWHILE_FACTOR: f64 = 1.5;

/// The bytes of an id, and of the offset and size of a row.
const ID_BYTES: f64 = 8.0;
const PLACE_BYTES: f64 = 8.0;

/// The statistics of one sparse feature over the observed samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObservedFeature {
    /// The feature.
    pub(crate) feature: SparseFeature,
    /// The number of ids over all samples.
    pub(crate) values: u64,
    /// For a sequence feature, the number of ids that are stored if windows share them: all ids of the first sample of
    /// each session, and the ids appended at later samples. Ignored for other features.
    pub(crate) window_values: u64,
}

/// A feature group that was chosen from the data.
#[derive(Debug, Clone, Serialize)]
pub struct GroupSummary {
    /// The name of the group: the words that the names of its features begin with, or else the name of the first
    /// feature.
    pub name: String,
    /// Whether the group is deduplicated.
    pub deduplicated: bool,
    /// The features of the group.
    pub features: Vec<String>,
    /// The expected dedupe factor of the lists in batches of whole sessions.
    pub dedupe_factor: f64,
    /// The reason for the choice, in a sentence.
    pub why: String,
}

/// Chooses the groups. Returns the deduplicated groups in the order of their first feature, then the group of all other
/// features. Each feature is in exactly one group.
///
/// # Panics
///
/// If `observed` and `features` have different numbers of features.
pub(crate) fn choose_groups(features: &[ObservedFeature], observed: &CoChange) -> Vec<GroupSummary> {
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
    // These features change with nearly each sample, so merging their groups cannot lower a dedupe factor much.
    groups.extend(merge_groups(&by_windows, &weights, observed, f64::INFINITY));
    groups.sort();
    let all_names: Vec<&str> = features.iter().map(|feature| feature.feature.name.as_str()).collect();
    let names = group_names(&all_names, &groups);
    let names_of = |group: &[usize]| group.iter().map(|feature| all_names[*feature].to_owned()).collect();
    let mut chosen: Vec<GroupSummary> = groups
        .into_iter()
        .zip(names)
        .map(|(group, name)| {
            let dedupe_factor = observed.dedupe_factor(&group);
            let why = why_deduplicated(features, observed, &group);
            GroupSummary { name, deduplicated: true, features: names_of(&group), dedupe_factor, why }
        })
        .collect();
    if !rest.is_empty() {
        let best = rest.iter().map(|f| observed.dedupe_factor(&[*f])).fold(1.0, f64::max);
        chosen.push(GroupSummary {
            name: UNGROUPED.to_owned(),
            deduplicated: false,
            dedupe_factor: 1.0,
            why: format!(
                "no feature has a dedupe factor over {WORTHWHILE_FACTOR} (the largest is {best:.2})"
            ),
            features: names_of(&rest),
        });
    }
    chosen
}

/// Returns the average number of bytes of a distinct row of a feature.
fn weight(feature: &ObservedFeature, observed: &CoChange) -> f64 {
    ID_BYTES * feature.values as f64 / observed.samples().max(1) as f64 + PLACE_BYTES
}

/// Returns the factor by which sharing ids between windows reduces the stored ids; 1 for features that are not
/// sequences.
fn partial_factor(feature: &ObservedFeature) -> f64 {
    match feature.feature.kind {
        SparseKind::Sequence => feature.values as f64 / feature.window_values.max(1) as f64,
        SparseKind::Sparse => 1.0,
    }
}

/// Returns the reason why a group is deduplicated, for the summary.
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
