//! Sums over row groups, and their comparison with the snapshot's.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

use super::partition_path;
use crate::digest::Digest;
use crate::names::SNAPSHOTS;
use crate::scan::SampleLists;
use crate::{DenseStatistics, FeatureStatistics, Partition, Problem, SESSION_COLUMN, Snapshot, TIME_COLUMN};

/// What the row groups of a partition have together.
#[derive(Debug)]
pub(super) struct PartitionTotals {
    sums: Mutex<Sums>,
    /// The sessions seen, in arrival order, where they are not contiguous: about 16 bytes a session.
    seen: Option<Mutex<HashSet<i64>>>,
}

#[derive(Debug, Default)]
struct Sums {
    /// By feature, in the schema's order.
    features: Vec<FeatureStatistics>,
    /// By dense feature, in the schema's order.
    dense: Vec<DenseRange>,
    digest: Digest,
    last_time: Option<i64>,
}

/// The parts of the statistics of a dense feature that are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct DenseRange {
    finite: u64,
    not_finite: u64,
    /// The smallest and the largest finite value.
    ends: Option<(f32, f32)>,
}

impl DenseRange {
    fn of(statistics: &DenseStatistics) -> Self {
        let ends = statistics.min().zip(statistics.max());
        Self { finite: statistics.finite(), not_finite: statistics.not_finite(), ends }
    }

    fn add(&mut self, values: &[f32]) {
        let mut finite = 0;
        for x in values.iter().copied().filter(|x| x.is_finite()) {
            finite += 1;
            self.ends = Some(self.ends.map_or((x, x), |(min, max)| (min.min(x), max.max(x))));
        }
        self.finite += finite;
        self.not_finite += values.len() as u64 - finite;
    }

    fn shown(&self) -> String {
        let Self { finite, not_finite, ends } = self;
        let ends = ends.map_or_else(String::new, |(min, max)| format!(" from {min} to {max}"));
        format!("{finite} values{ends}, {not_finite} others")
    }
}

impl PartitionTotals {
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        let seen = (!snapshot.order.is_clustered()).then(Mutex::default);
        Self { sums: Mutex::default(), seen }
    }

    /// Counts a row group, with its features in the schema's order.
    pub(super) fn add(&self, features: &[FeatureStatistics], digest: Digest) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.features.resize(features.len(), FeatureStatistics::default());
        for (sum, feature) in sums.features.iter_mut().zip(features) {
            sum.merge(feature);
        }
        sums.digest.merge(digest);
    }

    /// The digest of the samples counted so far.
    pub(super) fn digest(&self) -> Digest {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner).digest
    }

    /// Notes the sessions of a row group in arrival order.
    pub(super) fn see_sessions(&self, sessions: &[i64]) {
        if let Some(seen) = &self.seen {
            seen.lock().unwrap_or_else(PoisonError::into_inner).extend(sessions);
        }
    }

    /// Notes the times of a row group.
    pub(super) fn see_times(&self, times: &[i64]) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.last_time = sums.last_time.max(times.iter().copied().max());
    }

    /// Notes the values of dense feature number `feature` of a row group.
    pub(super) fn see_dense(&self, feature: usize, values: &[f32]) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        if sums.dense.len() <= feature {
            sums.dense.resize(feature + 1, DenseRange::default());
        }
        sums.dense[feature].add(values);
    }

    /// Where the partition's samples, all of which were counted, are not what the snapshot says. `clustered_sessions`
    /// is how many sessions they are in clustered order.
    pub(super) fn problems(
        &self,
        snapshot: &Snapshot,
        partition: &Partition,
        clustered_sessions: u64,
    ) -> Vec<Problem> {
        let path = partition_path(partition);
        let wrong = |message: String| Problem::new(&path, message);
        let mut problems = Vec::new();
        let sessions = match &self.seen {
            None => clustered_sessions,
            Some(seen) => seen.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
        };
        if sessions != partition.sessions {
            let message = format!("it has {sessions} sessions, the snapshot says {}", partition.sessions);
            problems.push(wrong(message).in_column(SESSION_COLUMN));
        }
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = snapshot.schema.sparse_features().zip(&sums.features);
        for (feature, found) in counted {
            let expected = partition.features.get(&feature.name).copied().unwrap_or_default();
            problems.extend(differences(&expected, found).map(|m| wrong(m).in_column(&feature.name)));
        }
        for (name, found) in snapshot.schema.dense.iter().zip(&sums.dense) {
            let expected = partition.dense.get(name).map(DenseRange::of);
            if let Some(expected) = expected.filter(|expected| expected != found) {
                let message = format!("it has {}, the snapshot says {}", found.shown(), expected.shown());
                problems.push(wrong(message).in_column(name));
            }
        }
        if partition.last_time != sums.last_time {
            let message = "its last time is not the one that the snapshot says".to_owned();
            problems.push(wrong(message).in_column(TIME_COLUMN));
        }
        if partition.digest != sums.digest {
            let message = format!(
                "the samples are not those that were written: their digest is {}, the snapshot says {}",
                sums.digest, partition.digest
            );
            problems.push(wrong(message));
        }
        problems
    }
}

/// Where the snapshot's figures over all partitions are not the sums of its partitions'.
pub(super) fn snapshot_problems(snapshot: &Snapshot) -> Vec<Problem> {
    let mut problems = Vec::new();
    let statistics = &snapshot.statistics;
    let sum = |of: &dyn Fn(&Partition) -> u64| {
        snapshot.partitions.iter().fold(0_u64, |s, p| s.saturating_add(of(p)))
    };
    let bytes =
        |p: &Partition| p.files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.bytes_on_disk));
    let totals = [
        ("sessions", statistics.sessions, sum(&|p| p.sessions)),
        ("bytes on disk", statistics.bytes_on_disk, sum(&bytes)),
    ];
    for (what, total, sum) in totals.into_iter().filter(|(_, total, sum)| total != sum) {
        let message = format!("the statistics count {total} {what}, the partitions {sum}");
        problems.push(Problem::new(SNAPSHOTS, message));
    }
    let mut sums: BTreeMap<String, FeatureStatistics> = BTreeMap::new();
    for (name, feature) in snapshot.partitions.iter().flat_map(|partition| &partition.features) {
        sums.entry(name.clone()).or_default().merge(feature);
    }
    for feature in snapshot.schema.sparse_features() {
        let of = |figures: &BTreeMap<String, FeatureStatistics>| {
            figures.get(&feature.name).copied().unwrap_or_default()
        };
        let found = differences(&of(&statistics.features), &of(&sums));
        problems.extend(found.map(|message| Problem::new(SNAPSHOTS, message).in_column(&feature.name)));
    }
    problems
}

/// The figures of a feature in one row group, say.
pub(super) fn count_lists(lists: &SampleLists) -> FeatureStatistics {
    let mut counted = FeatureStatistics::default();
    for sample in 0..lists.len() {
        let list = lists.list(sample);
        counted.values += list.len() as u64;
        if lists.repeats(sample) {
            continue;
        }
        counted.max_length = counted.max_length.max(list.len() as u64);
        counted.min_id = counted.min_id.into_iter().chain(list.iter().copied().min()).min();
        counted.max_id = counted.max_id.max(list.iter().copied().max());
    }
    counted
}

/// What differs between the figures that the snapshot has and those that were found.
fn differences(
    expected: &FeatureStatistics,
    found: &FeatureStatistics,
) -> impl Iterator<Item = String> + use<> {
    let id = |id: Option<i64>| id.map_or_else(|| "none".to_owned(), |id| id.to_string());
    let figures = |s: &FeatureStatistics| {
        [
            ("number of ids", s.values.to_string()),
            ("smallest id", id(s.min_id)),
            ("largest id", id(s.max_id)),
            ("longest list", s.max_length.to_string()),
        ]
    };
    let pairs = figures(expected).into_iter().zip(figures(found));
    pairs
        .filter(|(expected, found)| expected != found)
        .map(|((what, expected), (_, found))| format!("its {what} is {found}, the snapshot says {expected}"))
}
