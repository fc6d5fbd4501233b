//! Compares statistics of row groups with the snapshot's totals.

use std::collections::HashMap;
use std::sync::Arc;

use onefold_storage::Storage;

use crate::names::SNAPSHOTS;
use crate::snapshot::{RowGroupStatistics, RowStatistics, rows_of_sets};
use crate::{DenseStatistics, Error, FeatureStatistics, FileSet, Partition, Problem, Result, Snapshot};

/// The statistics of row groups in the manifests, and their sums.
pub(super) struct Expected<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    /// The manifest path and the row of the first row group of each file set, by the set's path.
    rows: HashMap<String, (Arc<str>, usize)>,
    /// The manifest that was used last. Adjacent partitions are usually in the same manifest.
    open: Option<RowStatistics<'a>>,
    path: Arc<str>,
    sum: RowGroupStatistics,
}

impl<'a> Expected<'a> {
    /// Finds the manifest row of each row group. The statistics are read later.
    pub(super) fn new(storage: &'a Storage, snapshot: &'a Snapshot) -> Result<Self> {
        let rows = rows_of_sets(storage, &snapshot.manifests)?;
        let sum = RowGroupStatistics::default();
        Ok(Self { storage, snapshot, rows, open: None, path: "".into(), sum })
    }

    /// Returns the statistics of the row groups of a set.
    pub(super) fn of(&mut self, set: &FileSet) -> Result<Vec<RowGroupStatistics>> {
        let missing = || Error::snapshot(self.storage.shown(set.path()), "no manifest names it any more");
        let (path, first) = self.rows.get(set.path()).cloned().ok_or_else(missing)?;
        let open = match self.open.take().filter(|_| self.path == path) {
            Some(open) => open,
            None => {
                let entry = self.snapshot.manifests.iter().find(|entry| *entry.path == *path);
                RowStatistics::open(self.storage, entry.ok_or_else(missing)?, &self.snapshot.schema)?
            }
        };
        self.path = path;
        let open = self.open.insert(open);
        let mut statistics = Vec::with_capacity(set.row_groups.len());
        for row in first..first + set.row_groups.len() {
            let of_row = open.get(row, true)?;
            self.sum.merge(RowGroupStatistics { features: of_row.features.clone(), dense: Vec::new() });
            statistics.push(of_row);
        }
        Ok(statistics)
    }

    /// Returns the sums of the sparse features' statistics over all requested row groups, in schema order.
    pub(super) fn features(&self) -> &[FeatureStatistics] {
        &self.sum.features
    }
}

/// The statistics of a dense feature that are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct DenseRange {
    finite: u64,
    not_finite: u64,
    /// The smallest and largest finite value.
    ends: Option<(f32, f32)>,
}

impl DenseRange {
    pub(super) fn of(statistics: &DenseStatistics) -> Self {
        let ends = statistics.min().zip(statistics.max());
        Self { finite: statistics.finite(), not_finite: statistics.not_finite(), ends }
    }

    pub(super) fn of_values(values: &[f32]) -> Self {
        let mut range = Self::default();
        for x in values.iter().copied().filter(|x| x.is_finite()) {
            range.finite += 1;
            range.ends = Some(range.ends.map_or((x, x), |(min, max)| (min.min(x), max.max(x))));
        }
        range.not_finite = values.len() as u64 - range.finite;
        range
    }

    pub(super) fn shown(&self) -> String {
        let Self { finite, not_finite, ends } = self;
        let ends = ends.map_or_else(String::new, |(min, max)| format!(" from {min} to {max}"));
        format!("{finite} values{ends}, {not_finite} others")
    }
}

/// Returns a problem for each total that differs from the sum over the partitions; `features` are the sums of
/// the sparse features.
pub(super) fn snapshot_problems(snapshot: &Snapshot, features: &[FeatureStatistics]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let statistics = &snapshot.statistics;
    let sum = |of: &dyn Fn(&Partition) -> u64| {
        snapshot.partitions.iter().fold(0_u64, |s, p| s.saturating_add(of(p)))
    };
    let files = |p: &Partition| p.files.iter().map(|set| set.files.len() as u64).sum::<u64>();
    let totals = [
        ("partitions", statistics.partitions, snapshot.partitions.len() as u64),
        ("files", statistics.files, sum(&files)),
        ("sessions", statistics.sessions, sum(&|p| p.sessions)),
        ("bytes on disk", statistics.bytes_on_disk, sum(&Partition::bytes_on_disk)),
    ];
    for (what, total, sum) in totals.into_iter().filter(|(_, total, sum)| total != sum) {
        let message = format!("the statistics count {total} {what}, the manifests {sum}");
        problems.push(Problem::new(SNAPSHOTS, message));
    }
    for (number, feature) in snapshot.schema.sparse_features().enumerate() {
        let total = statistics.features.get(&feature.name).copied().unwrap_or_default();
        let found = differences(&total, &features.get(number).copied().unwrap_or_default());
        problems.extend(found.map(|message| Problem::new(SNAPSHOTS, message).in_column(&feature.name)));
    }
    problems
}

/// Returns the differences between the recorded statistics and those that were found.
pub(super) fn differences(
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
