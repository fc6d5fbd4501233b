//! Counts sessions, repeats, batches, and features that change together, in one pass over samples.

use std::collections::BTreeMap;
use std::ops::Range;

use rayon::prelude::*;

use super::counter::{BatchCounter, Counted, KeyMaker, Keys};
use onefold_datasets::Schema;
use onefold_datasets::scan::SampleLists;

/// Counts samples in the order in which they are passed.
#[derive(Debug)]
pub(super) struct Pass {
    features: Vec<Counters>,
    groups: Vec<Counters>,
    /// The indices of each group's features.
    members: Vec<Range<usize>>,
    makers: Vec<KeyMaker>,
    /// `together[a * features + b]`: the number of samples in which both features change.
    together: Vec<u64>,
    /// The partition and session of the last sample.
    session: Option<(usize, i64)>,
    session_size: u64,
    /// The number of sessions of each size.
    session_sizes: BTreeMap<u64, u64>,
    samples: u64,
    /// The number of samples that have a previous sample in their session.
    pairs: u64,
}

/// The counts of a feature or a group.
#[derive(Debug)]
struct Counters {
    ids: u64,
    /// The number of samples whose lists differ from those of the previous sample in the same session.
    changes: u64,
    last_key: Option<u64>,
    batches: Vec<BatchCounter>,
}

/// One bit per sample.
type Bits = Vec<u64>;

impl Pass {
    /// Returns a pass that counts batches of these sizes.
    pub(super) fn new(schema: &Schema, batch_sizes: &[usize]) -> Self {
        let counters = || Counters {
            ids: 0,
            changes: 0,
            last_key: None,
            batches: batch_sizes.iter().map(|size| BatchCounter::new(*size)).collect(),
        };
        let mut members = Vec::new();
        let mut makers = Vec::new();
        for group in &schema.groups {
            members.push(makers.len()..makers.len() + group.features.len());
            makers.extend(group.features.iter().map(|f| KeyMaker::new(group.folds_to_window(f))));
        }
        Self {
            features: makers.iter().map(|_| counters()).collect(),
            groups: members.iter().map(|_| counters()).collect(),
            members,
            together: vec![0; makers.len() * makers.len()],
            makers,
            session: None,
            session_size: 0,
            session_sizes: BTreeMap::new(),
            samples: 0,
            pairs: 0,
        }
    }

    /// Starts a stretch of `samples` samples that do not follow the previous samples. Only complete batches of it
    /// count.
    pub(super) fn start_stretch(&mut self, samples: usize) {
        for counters in self.features.iter_mut().chain(&mut self.groups) {
            counters.batches.iter_mut().for_each(|batch| batch.start_stretch(samples));
        }
    }

    /// Counts the next samples, given the sessions of a partition and the features' lists in the schema's order.
    pub(super) fn add(&mut self, partition: usize, sessions: &[i64], lists: &[SampleLists]) {
        let paired = self.pair(partition, sessions);
        let features = self.features.par_iter_mut().zip(&mut self.makers).zip(lists);
        let counted: Vec<(Keys, Bits)> = features
            .map(|((counters, maker), lists)| {
                let keys = maker.keys(lists);
                let changed = counters.add(&keys, &paired);
                (keys, changed)
            })
            .collect();
        let (keys, changed): (Vec<Keys>, Vec<Bits>) = counted.into_iter().unzip();
        let groups = self.groups.par_iter_mut().zip(&self.members);
        groups.for_each(|(counters, members)| {
            counters.add(&Keys::together(&keys[members.clone()]), &paired);
        });
        let rows = self.together.par_chunks_mut(lists.len().max(1)).zip(&changed);
        rows.for_each(|(row, a)| {
            for (count, b) in row.iter_mut().zip(&changed) {
                *count += a.iter().zip(b).map(|(a, b)| u64::from((a & b).count_ones())).sum::<u64>();
            }
        });
    }

    /// Counts the sessions. Returns which samples have a previous sample in their session.
    fn pair(&mut self, partition: usize, sessions: &[i64]) -> Bits {
        let mut paired = vec![0_u64; sessions.len().div_ceil(64)];
        for (sample, session) in sessions.iter().enumerate() {
            if self.session == Some((partition, *session)) {
                paired[sample / 64] |= 1 << (sample % 64);
                self.pairs += 1;
            } else {
                self.end_session();
                self.session = Some((partition, *session));
            }
            self.session_size += 1;
        }
        self.samples += sessions.len() as u64;
        paired
    }

    fn end_session(&mut self) {
        if self.session_size > 0 {
            *self.session_sizes.entry(self.session_size).or_default() += 1;
        }
        self.session_size = 0;
    }

    /// Returns the number of sessions of each size. This requires that the samples of a session were consecutive.
    pub(super) fn session_sizes(&mut self) -> &BTreeMap<u64, u64> {
        self.end_session();
        &self.session_sizes
    }

    /// Returns the counts of a feature, by its index in the schema.
    pub(super) fn feature(&self, feature: usize) -> Counts<'_> {
        Counts { counters: &self.features[feature], samples: self.samples, pairs: self.pairs }
    }

    /// Returns the counts of a group, by its index in the schema.
    pub(super) fn group(&self, group: usize) -> Counts<'_> {
        Counts { counters: &self.groups[group], samples: self.samples, pairs: self.pairs }
    }

    /// Returns the counts of a group's batches, by the index of the batch size, or `None` if no batch was complete.
    /// Every feature has a separate window.
    pub(super) fn group_batches(&self, group: usize, size: usize) -> Option<Counted> {
        let features = self.members[group].clone().filter_map(|feature| self.feature(feature).batches(size));
        let window_ids = features.map(|counted| counted.window_ids).sum();
        Some(Counted { window_ids, ..self.group(group).batches(size)? })
    }

    /// Returns the number of samples in which both features change. The features are given by their indices in the
    /// schema.
    pub(super) fn changes_together(&self, a: usize, b: usize) -> u64 {
        self.together[a * self.features.len() + b]
    }
}

impl Counters {
    /// Counts the next samples. Returns the samples among `paired` that differ from their previous sample.
    fn add(&mut self, keys: &Keys, paired: &[u64]) -> Bits {
        let mut changed = vec![0_u64; paired.len()];
        let mut before = self.last_key;
        for (sample, key) in keys.keys.iter().enumerate() {
            changed[sample / 64] |= u64::from(before != Some(*key)) << (sample % 64);
            before = Some(*key);
        }
        self.last_key = before;
        changed.iter_mut().zip(paired).for_each(|(changed, paired)| *changed &= paired);
        self.changes += changed.iter().map(|bits| u64::from(bits.count_ones())).sum::<u64>();
        self.ids += keys.sizes.iter().map(|size| u64::from(*size)).sum::<u64>();
        self.batches.iter_mut().for_each(|batch| batch.add(keys));
        changed
    }
}

/// The counts of a pass for a feature or a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts<'a> {
    counters: &'a Counters,
    samples: u64,
    pairs: u64,
}

impl Counts<'_> {
    /// Returns the mean number of ids per sample.
    pub(super) fn ids_per_sample(&self) -> f64 {
        self.counters.ids as f64 / self.samples.max(1) as f64
    }

    /// Returns the number of samples whose lists differ from those of the previous sample in the same session.
    pub(super) fn changes(&self) -> u64 {
        self.counters.changes
    }

    /// Returns d, the probability that lists repeat from the session's previous sample, or `None` if no sample has a
    /// previous one.
    pub(super) fn repeat_probability(&self) -> Option<f64> {
        (self.pairs > 0).then(|| 1.0 - self.counters.changes as f64 / self.pairs as f64)
    }

    /// Returns the counts of batches, by the index of the batch size, or `None` if no batch was complete.
    pub(super) fn batches(&self, size: usize) -> Option<Counted> {
        Some(self.counters.batches[size].counted).filter(|counted| counted.samples > 0)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::ListArray;
    use arrow::datatypes::Int64Type;

    use super::*;
    use onefold_datasets::{FeatureGroup, SparseFeature, SparseKind};

    fn lists(ids: &[i64]) -> SampleLists {
        let lists = ids.iter().map(|id| Some([Some(*id)]));
        SampleLists::new(&ListArray::from_iter_primitive::<Int64Type, _, _>(lists)).unwrap()
    }

    #[test]
    fn changes_are_counted_within_sessions_and_over_cuts() {
        let feature = |name: &str| SparseFeature::new(name, SparseKind::Sparse);
        let group = |name: &str, features| FeatureGroup { name: name.into(), deduplicated: true, features };
        let groups = vec![group("ab", vec![feature("a"), feature("b")]), group("c", vec![feature("c")])];
        let schema =
            Schema { labels: vec!["y".into()], weight: None, dense: vec![], kept: Vec::new(), groups };
        let sessions = [0, 0, 0, 0, 1, 1, 1];
        let (a, b, c) = ([1, 1, 2, 2, 2, 3, 3], [5, 6, 7, 7, 8, 8, 8], [0; 7]);
        let mut pass = Pass::new(&schema, &[4]);
        for (start, end) in [(0, 3), (3, 6), (6, 7)] {
            let lists = [&a, &b, &c].map(|ids| lists(&ids[start..end]));
            pass.add(0, &sessions[start..end], &lists);
        }
        // Five samples have a previous sample. `a` changes in two of them, `b` in two, and both of them in one.
        assert_eq!(pass.feature(0).changes(), 2);
        assert_eq!((pass.changes_together(0, 1), pass.changes_together(1, 1)), (1, 2));
        assert_eq!(pass.changes_together(1, 0), 1);
        assert_eq!(pass.feature(2).repeat_probability(), Some(1.0));
        assert_eq!((pass.group(0).changes(), pass.group(0).repeat_probability()), (3, Some(1.0 - 3.0 / 5.0)));
        let batches = pass.group(0).batches(0).unwrap();
        assert_eq!((batches.samples, batches.ids, batches.rows, batches.row_ids), (7, 14, 3 + 2, 10));
        assert_eq!(pass.session_sizes(), &BTreeMap::from([(3, 1), (4, 1)]));
        // The next partition also has a session with the number 1.
        let more = [&a, &b, &c].map(|ids| lists(&ids[..1]));
        pass.add(1, &[1], &more);
        assert_eq!(pass.session_sizes(), &BTreeMap::from([(1, 1), (3, 1), (4, 1)]));
    }
}
