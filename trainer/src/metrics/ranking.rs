//! Metrics of the ranking of samples that were shown together.

use std::collections::BTreeMap;

use serde::Serialize;

use super::area::Area;

/// Ranking metrics, averaged over groups of samples. A sample with a label above 0 is a hit, and its label is
/// its relevance.
///
/// - **`gauc`**: the AUC of each group with hits and other samples, weighted by the number of samples (Zhou et
///   al. 2018).
/// - **`group_auc`**: the unweighted mean of the same AUCs.
/// - **`mrr`**, over groups with hits: the reciprocal rank of the first hit.
/// - **`ndcg_at_K`**, over groups with hits: the discounted gain `Σ label / log2(rank + 1)` of the first K
///   samples, divided by its largest possible value (Järvelin and Kekäläinen 2002).
/// - **`hit_rate_at_K`**, over groups with hits: whether there is a hit among the first K samples.
///
/// Samples with equal scores share the gains of their ranks, as in scikit-learn's `ndcg_score`. The first hit
/// among them has their mean rank, and the hit rate is the probability of a hit over their orders.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranking {
    /// The number of groups.
    pub groups: u64,
    /// The number of groups with hits.
    pub groups_with_hits: u64,
    /// The number of groups with hits and other samples.
    pub groups_with_both: u64,
    /// The number of samples without a group, which are ignored.
    pub samples_without_group: u64,
    /// The metrics by name; empty if no group has hits.
    #[serde(flatten)]
    pub figures: BTreeMap<String, f64>,
}

/// Sums of ranking metrics over groups.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RankingSums {
    top: Vec<usize>,
    groups: u64,
    with_hits: u64,
    with_both: u64,
    samples: f64,
    weighted_auc: f64,
    auc: f64,
    reciprocal_rank: f64,
    /// The sums by entry of `top`.
    ndcg: Vec<f64>,
    hit_rate: Vec<f64>,
}

/// Samples with equal scores: their number, the number of hits, and the sum of their labels.
#[derive(Debug, Clone, Copy, Default)]
struct Tie {
    samples: usize,
    hits: usize,
    gain: f64,
}

impl RankingSums {
    /// Creates sums without groups. `top` has the cutoffs K of nDCG and hit rate.
    pub(crate) fn new(top: &[usize]) -> Self {
        let none = vec![0.0; top.len()];
        Self {
            top: top.to_vec(),
            groups: 0,
            with_hits: 0,
            with_both: 0,
            samples: 0.0,
            weighted_auc: 0.0,
            auc: 0.0,
            reciprocal_rank: 0.0,
            ndcg: none.clone(),
            hit_rate: none,
        }
    }

    /// Adds a group: the scores and labels of its samples, which it sorts. They must be finite, and labels must
    /// not be negative.
    pub(crate) fn add(&mut self, samples: &mut [(f32, f32)]) {
        self.groups += 1;
        // The order of equal scores is fixed, so that the sums do not depend on the order of the samples.
        samples.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
        let ties: Vec<Tie> = samples.chunk_by(|a, b| a.0 == b.0).map(Tie::of).collect();
        let hits: usize = ties.iter().map(|tie| tie.hits).sum();
        if hits == 0 {
            return;
        }
        self.with_hits += 1;
        self.reciprocal_rank += reciprocal_rank(&ties);
        if hits < samples.len() {
            self.with_both += 1;
            let (count, auc) = (samples.len() as f64, auc(&ties));
            self.samples += count;
            self.weighted_auc += count * auc;
            self.auc += auc;
        }
        for (place, &top) in self.top.iter().enumerate() {
            self.hit_rate[place] += hit_probability(&ties, top);
        }
        let gains: Vec<f64> = self.top.iter().map(|&top| discounted_gain(&ties, top)).collect();
        samples.sort_by(|a, b| b.1.total_cmp(&a.1));
        let ideal: Vec<Tie> = samples.chunks(1).map(Tie::of).collect();
        for (place, &top) in self.top.iter().enumerate() {
            self.ndcg[place] += gains[place] / discounted_gain(&ideal, top);
        }
    }

    /// Returns the means.
    pub(crate) fn figures(&self, samples_without_group: u64) -> Ranking {
        let mut figures = BTreeMap::new();
        let mut mean = |name: String, sum: f64, count: f64| {
            if count > 0.0 {
                figures.insert(name, sum / count);
            }
        };
        mean("gauc".to_owned(), self.weighted_auc, self.samples);
        mean("group_auc".to_owned(), self.auc, self.with_both as f64);
        mean("mrr".to_owned(), self.reciprocal_rank, self.with_hits as f64);
        for (place, top) in self.top.iter().enumerate() {
            mean(format!("ndcg_at_{top}"), self.ndcg[place], self.with_hits as f64);
            mean(format!("hit_rate_at_{top}"), self.hit_rate[place], self.with_hits as f64);
        }
        Ranking {
            groups: self.groups,
            groups_with_hits: self.with_hits,
            groups_with_both: self.with_both,
            samples_without_group,
            figures,
        }
    }
}

impl Tie {
    fn of(samples: &[(f32, f32)]) -> Self {
        let hits = samples.iter().filter(|(_, label)| *label > 0.0).count();
        let gain = samples.iter().map(|(_, label)| f64::from(*label)).sum();
        Self { samples: samples.len(), hits, gain }
    }
}

/// Returns the fraction of pairs of a hit and another sample in which the hit has the higher score, with ties
/// counting half.
fn auc(ties: &[Tie]) -> f64 {
    let counts = |tie: &Tie| [(tie.samples - tie.hits) as f64, tie.hits as f64];
    let Area { negative, positive, won, .. } = Area::of(ties.iter().rev().map(counts));
    won / (positive * negative)
}

fn reciprocal_rank(ties: &[Tie]) -> f64 {
    let mut before = 0.0;
    for tie in ties {
        let samples = tie.samples as f64;
        if tie.hits > 0 {
            return 1.0 / (before + (samples + 1.0) / 2.0);
        }
        before += samples;
    }
    0.0
}

/// Returns the probability that one of the first `top` samples is a hit, over all orders of samples with equal
/// scores.
fn hit_probability(ties: &[Tie], top: usize) -> f64 {
    let mut places = top;
    for tie in ties {
        if places == 0 {
            break;
        }
        if tie.hits > 0 {
            // The probability that no drawn sample is a hit is hypergeometric.
            let drawn = places.min(tie.samples);
            let others = tie.samples - tie.hits;
            let miss = |i: usize| others.saturating_sub(i) as f64 / (tie.samples - i) as f64;
            return 1.0 - (0..drawn).map(miss).product::<f64>();
        }
        places = places.saturating_sub(tie.samples);
    }
    0.0
}

/// Returns `Σ gain / log2(rank + 1)` over the first `top` ranks.
fn discounted_gain(ties: &[Tie], top: usize) -> f64 {
    let (mut rank, mut sum) = (0, 0.0);
    for tie in ties {
        let ranks = rank..(rank + tie.samples).min(top);
        let discounts: f64 = ranks.map(|rank| 1.0 / ((rank + 2) as f64).log2()).sum();
        sum += tie.gain / tie.samples as f64 * discounts;
        rank += tie.samples;
        if rank >= top {
            break;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranking(groups: &[&[(f32, f32)]], top: &[usize]) -> Ranking {
        let mut sums = RankingSums::new(top);
        groups.iter().for_each(|group| sums.add(&mut group.to_vec()));
        sums.figures(0)
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found}, expected {expected}");
    }

    /// The expected values are from scikit-learn 1.7: `roc_auc_score`, and
    /// `ndcg_score([labels], [scores], k=k)`, which averages over equal scores, for both groups.
    #[test]
    fn figures_are_those_of_scikit_learn() {
        let first: &[(f32, f32)] = &[(0.9, 0.0), (0.5, 1.0), (0.5, 0.0), (0.1, 1.0), (0.3, 0.0)];
        let second: &[(f32, f32)] = &[(2.0, 3.0), (1.0, 1.0), (0.0, 0.0)];
        let found = ranking(&[first, second], &[1, 2, 5]);
        assert_eq!((found.groups, found.groups_with_hits, found.groups_with_both), (2, 2, 2));
        let of = |name: &str| found.figures[name];
        // The first group has 2 x 3 pairs: the hit at 0.5 wins 1.5 of them, the hit at 0.1 none.
        close(of("group_auc"), (0.25 + 1.0) / 2.0);
        close(of("gauc"), (5.0 * 0.25 + 3.0) / 8.0);
        close(of("ndcg_at_1"), 0.5);
        let at = |rank: f64| 1.0 / (rank + 1.0).log2();
        close(of("ndcg_at_2"), (0.5 * at(2.0) / (at(1.0) + at(2.0)) + 1.0) / 2.0);
        let all = 0.5 * (at(2.0) + at(3.0)) + at(5.0);
        close(of("ndcg_at_5"), (all / (at(1.0) + at(2.0)) + 1.0) / 2.0);
        // The hit at 0.5 has rank 2 or 3 with equal probability.
        close(of("mrr"), (1.0 / 2.5 + 1.0) / 2.0);
        close(of("hit_rate_at_1"), 0.5);
        close(of("hit_rate_at_2"), (0.5 + 1.0) / 2.0);
        close(of("hit_rate_at_5"), 1.0);
    }

    #[test]
    fn degenerate_groups_are_counted_and_left_out() {
        let found = ranking(&[&[(1.0, 0.0), (2.0, 0.0)], &[(1.0, 1.0), (1.0, 1.0)], &[(1.0, 1.0)]], &[1]);
        assert_eq!((found.groups, found.groups_with_hits, found.groups_with_both), (3, 2, 0));
        assert_eq!(found.figures.get("gauc"), None);
        // Two hits with equal scores: the first hit has their mean rank.
        close(found.figures["mrr"], (1.0 / 1.5 + 1.0) / 2.0);
        assert_eq!((found.figures["ndcg_at_1"], found.figures["hit_rate_at_1"]), (1.0, 1.0));
        assert!(ranking(&[], &[3]).figures.is_empty());
        assert!(ranking(&[&[(0.5, 0.0)]], &[3]).figures.is_empty());
    }

    type Samples<'a> = &'a [(f32, f32)];

    /// Computes a metric by its definition, as the mean over all orders of the samples that are consistent with
    /// their scores.
    fn over_orders(samples: Samples<'_>, figure: &dyn Fn(Samples<'_>) -> f64) -> f64 {
        fn orders(rest: &[(f32, f32)], taken: &mut Vec<(f32, f32)>, all: &mut Vec<Vec<(f32, f32)>>) {
            let best = rest.iter().map(|sample| sample.0).fold(f32::NEG_INFINITY, f32::max);
            if rest.is_empty() {
                all.push(taken.clone());
            }
            for place in (0..rest.len()).filter(|place| rest[*place].0 == best) {
                let mut rest = rest.to_vec();
                taken.push(rest.remove(place));
                orders(&rest, taken, all);
                taken.pop();
            }
        }
        let mut all = Vec::new();
        orders(samples, &mut Vec::new(), &mut all);
        all.iter().map(|order| figure(order)).sum::<f64>() / all.len() as f64
    }

    proptest! {
        #[test]
        fn figures_equal_their_definitions_over_all_orders_of_ties(
            samples in prop::collection::vec((0_u8..3, 0_u8..3), 1..7), top in 1_usize..5
        ) {
            let samples: Vec<_> = samples.into_iter().map(|(s, l)| (f32::from(s), f32::from(l))).collect();
            let found = ranking(&[&samples], &[top]);
            let hits = samples.iter().filter(|sample| sample.1 > 0.0).count();
            prop_assume!(hits > 0);
            let gain = |order: &[(f32, f32)]| {
                let gains = order.iter().take(top).enumerate();
                gains.map(|(i, sample)| f64::from(sample.1) / ((i + 2) as f64).log2()).sum::<f64>()
            };
            let mut best = samples.clone();
            best.sort_by(|a, b| b.1.total_cmp(&a.1));
            let ndcg = over_orders(&samples, &gain) / gain(&best);
            let of = |name: &str| found.figures[&format!("{name}_at_{top}")];
            prop_assert!((of("ndcg") - ndcg).abs() < 1e-12);
            let hit = |order: &[(f32, f32)]| f64::from(u8::from(order.iter().take(top).any(|s| s.1 > 0.0)));
            let hit = over_orders(&samples, &hit);
            prop_assert!((of("hit_rate") - hit).abs() < 1e-12);
            if hits < samples.len() {
                let won = |a: &(f32, f32), b: &(f32, f32)| {
                    if a.0 > b.0 { 1.0 } else { f64::from(u8::from(a.0 == b.0)) / 2.0 }
                };
                let others = || samples.iter().filter(|sample| sample.1 == 0.0);
                let pairs = samples.iter().filter(|s| s.1 > 0.0).flat_map(|a| others().map(move |b| won(a, b)));
                let auc = pairs.sum::<f64>() / (hits * (samples.len() - hits)) as f64;
                prop_assert!((found.figures["gauc"] - auc).abs() < 1e-12);
            }
        }
    }
}
