//! Merges groups as long as that lowers their cost.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::co_change::CoChange;

/// The bytes of a sample's entry in an inverse index.
pub(super) const INDEX_BYTES: f64 = 4.0;

/// A group during merging.
#[derive(Debug)]
struct Cluster {
    features: Vec<usize>,
    /// A bit set of the sets in [`Sets`] that contain one of its features.
    hits: Vec<u64>,
    /// The number of distinct rows per sample.
    distinct: f64,
    /// The bytes of a distinct row.
    weight: f64,
}

/// Merges `features`, which begin as groups of features that always change together, as long as that lowers the cost.
/// No merged group has more than `most_distinct` distinct rows per sample. The features of a group are in ascending
/// order.
pub(super) fn merge_groups(
    features: &[usize],
    weights: &[f64],
    observed: &CoChange,
    most_distinct: f64,
) -> Vec<Vec<usize>> {
    let sets = Sets::of(observed, features);
    let first = sets.clusters(features, weights);
    // Pairs whose merger lowers the cost are ordered by the saving, then by their numbers. The bits of positive numbers
    // have the order of the numbers.
    let merge = |a: &Cluster, b: &Cluster, pair: (usize, usize)| {
        let distinct = sets.distinct_of_union(&a.hits, &b.hits);
        let again = (distinct - a.distinct) * a.weight + (distinct - b.distinct) * b.weight;
        let saves = again < INDEX_BYTES && distinct <= most_distinct;
        saves.then(|| ((INDEX_BYTES - again).to_bits(), Reverse(pair)))
    };
    let mut merges = BinaryHeap::new();
    for (j, b) in first.iter().enumerate() {
        merges.extend(first[..j].iter().enumerate().filter_map(|(i, a)| merge(a, b, (i, j))));
    }
    // A merged group is appended at the end, and the entries of its two parts become `None`.
    let mut clusters: Vec<Option<Cluster>> = first.into_iter().map(Some).collect();
    while let Some((_, Reverse((i, j)))) = merges.pop() {
        if clusters[i].is_none() {
            continue;
        }
        let Some(b) = clusters[j].take() else { continue };
        let Some(a) = clusters[i].take() else { continue };
        let merged = sets.merged(a, b);
        let number = clusters.len();
        let others = clusters.iter().enumerate();
        merges.extend(others.filter_map(|(k, other)| merge(other.as_ref()?, &merged, (k, number))));
        clusters.push(Some(merged));
    }
    clusters.into_iter().flatten().map(|cluster| cluster.features).collect()
}

/// The observed sets of features, restricted to the features to merge, with their counts. The counts are stored as one
/// bit set per binary digit, so that a union of groups is counted 64 sets at a time.
#[derive(Debug)]
struct Sets {
    /// The sets, most frequent first. Bit `i` represents the `i`th feature to merge.
    sets: Vec<Vec<u64>>,
    /// For each `k`, the bit set of the sets whose count has bit `k`. Trailing zero words are omitted. Frequent sets
    /// come first, so the bit sets of high digits are short.
    count_bits: Vec<Vec<u64>>,
    /// The distinct rows per sample at the starts of sessions, and those that one counted change adds.
    at_starts: f64,
    a_change: f64,
}

impl Sets {
    fn of(observed: &CoChange, features: &[usize]) -> Self {
        let mut reduced: BTreeMap<Vec<u64>, u64> = BTreeMap::new();
        for (set, levels) in &observed.sets {
            let mut bits = vec![0_u64; features.len().div_ceil(64)];
            for (i, feature) in features.iter().enumerate() {
                bits[i / 64] |= (set[feature / 64] >> (feature % 64) & 1) << (i % 64);
            }
            *reduced.entry(bits).or_default() += levels.iter().sum::<u64>();
        }
        reduced.retain(|set, _| set.iter().any(|word| *word != 0));
        let mut counted: Vec<(Vec<u64>, u64)> = reduced.into_iter().collect();
        counted.sort_by_key(|(_, times)| Reverse(*times));
        let longest = counted.first().map_or(0, |(_, times)| u64::BITS - times.leading_zeros());
        let count_bits = (0..longest).map(|k| {
            let mut words = vec![0_u64; counted.len().div_ceil(64)];
            for (at, (_, times)) in counted.iter().enumerate() {
                words[at / 64] |= (times >> k & 1) << (at % 64);
            }
            words.truncate(words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1));
            words
        });
        let samples = observed.samples().max(1) as f64;
        Self {
            count_bits: count_bits.collect(),
            sets: counted.into_iter().map(|(set, _)| set).collect(),
            at_starts: observed.sessions() as f64 / samples,
            a_change: (1_u64 << observed.thinned) as f64 / samples,
        }
    }

    /// Returns a group for each set of `features` that always change together, in the order of their first features.
    fn clusters(&self, features: &[usize], weights: &[f64]) -> Vec<Cluster> {
        let mut by_hits: BTreeMap<Vec<u64>, Vec<usize>> = BTreeMap::new();
        for (i, feature) in features.iter().enumerate() {
            let mut hits = vec![0_u64; self.sets.len().div_ceil(64)];
            for (at, set) in self.sets.iter().enumerate() {
                hits[at / 64] |= (set[i / 64] >> (i % 64) & 1) << (at % 64);
            }
            by_hits.entry(hits).or_default().push(*feature);
        }
        let cluster = |(hits, features): (Vec<u64>, Vec<usize>)| Cluster {
            distinct: self.distinct_of_union(&hits, &hits),
            weight: features.iter().map(|feature| weights[*feature]).sum(),
            hits,
            features,
        };
        let mut clusters: Vec<Cluster> = by_hits.into_iter().map(cluster).collect();
        clusters.sort_by_key(|cluster| cluster.features[0]);
        clusters
    }

    /// Returns the distinct rows per sample of a group that changes with the sets in `a` and in `b`.
    fn distinct_of_union(&self, a: &[u64], b: &[u64]) -> f64 {
        let changes = self.count_bits.iter().enumerate().map(|(k, bits)| {
            let hits =
                a.iter().zip(b).zip(bits).map(|((a, b), bits)| u64::from(((a | b) & bits).count_ones()));
            hits.sum::<u64>() << k
        });
        self.at_starts + self.a_change * changes.sum::<u64>() as f64
    }

    fn merged(&self, a: Cluster, b: Cluster) -> Cluster {
        let hits: Vec<u64> = a.hits.iter().zip(&b.hits).map(|(a, b)| a | b).collect();
        let mut features = [a.features, b.features].concat();
        features.sort_unstable();
        let distinct = self.distinct_of_union(&hits, &hits);
        Cluster { features, hits, distinct, weight: a.weight + b.weight }
    }
}
