//! A range of buckets of a partition as a writer wrote it, and the manifest of several ranges.

use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, Names, Row, RowFile, StatisticsRow};
use super::{ColumnChanges, DataFile, FeatureStatistics, FileSet, RowGroup, RowGroupStatistics};
use crate::digest::Digest;
use crate::{PartitionKey, Schema};

/// The files of one [range of buckets](crate::Buckets) of a partition, and what is known of its samples: what a commit
/// needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenBucket {
    /// The partition.
    pub key: PartitionKey,
    /// The range.
    pub range: u32,
    /// Its files, in the order of the samples; none if it has no samples.
    pub files: Vec<FileSet>,
    /// One for each row group, in the order of the samples. They have no features that the files lack.
    pub(crate) statistics: Vec<RowGroupStatistics>,
}

impl WrittenBucket {
    /// A range without samples.
    pub(crate) fn empty(key: PartitionKey, range: u32) -> Self {
        Self { key, range, files: Vec::new(), statistics: Vec::new() }
    }

    fn row_groups(&self) -> impl Iterator<Item = &RowGroup> {
        self.files.iter().flat_map(|set| &set.row_groups)
    }

    /// Samples in the range.
    pub fn samples(&self) -> u64 {
        self.files.iter().fold(0, |sum, set| sum.saturating_add(set.samples))
    }

    /// The digest of the samples.
    pub fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        self.row_groups().for_each(|row_group| digest.merge(row_group.digest));
        digest
    }

    /// The paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(|set| &set.files).map(|file| file.path.as_str())
    }

    /// Whether row groups of this set are written anew: what is known of them has the same first file.
    pub(crate) fn has_set(&self, set: &FileSet) -> bool {
        self.files.iter().any(|written| written.path() == set.path())
    }

    /// The files, each with the statistics of its row groups.
    pub(super) fn sets(&self) -> impl Iterator<Item = (&FileSet, &[RowGroupStatistics])> {
        let mut rest = &self.statistics[..];
        self.files.iter().map(move |set| {
            let (of_set, others) = rest.split_at(set.row_groups.len().min(rest.len()));
            rest = others;
            (set, of_set)
        })
    }
}

/// The statistics of the sparse features over all samples of row groups, in the order of the schema without the features
/// that the files lack.
pub(super) fn features(row_groups: &[RowGroupStatistics]) -> Vec<FeatureStatistics> {
    let mut sum = RowGroupStatistics::default();
    for RowGroupStatistics { features, .. } in row_groups {
        sum.merge(RowGroupStatistics { features: features.clone(), dense: Vec::new() });
    }
    sum.features
}

/// Row groups that a manifest describes: their partition, files and statistics.
pub(super) type Written<'b> = (&'b PartitionKey, &'b FileSet, &'b [RowGroupStatistics]);

/// The manifest of row groups of files with these changes, which come in the order of partitions and buckets.
pub(super) fn manifest(schema: &Schema, changes: &ColumnChanges, sets: &[Written<'_>]) -> Manifest {
    let in_files = |feature: &str| (!changes.lacks(feature)).then(|| changes.in_files(feature).to_owned());
    let sparse = schema.sparse_features().map(|feature| feature.name.as_str());
    let dense = schema.dense.iter().map(String::as_str);
    let mut manifest = Manifest {
        names: Names {
            columns: Vec::new(),
            features: sparse.filter_map(in_files).collect(),
            dense: dense.filter_map(in_files).collect(),
        },
        ..Manifest::default()
    };
    for (key, set, statistics) in sets {
        let partition = key.to_string();
        let columns: Vec<u32> =
            set.files.iter().map(|file| position(&mut manifest.names.columns, file)).collect();
        for (number, row_group) in set.row_groups.iter().enumerate() {
            let files = set.files.iter().zip(&columns);
            let files = files.map(|(file, columns)| row_file(file, *columns, number)).collect();
            manifest.rows.push(row(partition.clone(), row_group, files));
        }
        manifest.statistics.extend(statistics.iter().map(statistics_row));
    }
    manifest
}

/// The position of a file's columns among the lists of columns.
fn position(all: &mut Vec<Vec<String>>, file: &DataFile) -> u32 {
    let place = all.iter().position(|columns| columns[..] == file.columns[..]).unwrap_or_else(|| {
        all.push(file.columns.to_vec());
        all.len() - 1
    });
    place as u32
}

fn row(partition: String, row_group: &RowGroup, files: Vec<RowFile>) -> Row {
    Row {
        partition,
        bucket: row_group.bucket,
        bucket_starts: row_group.bucket_starts.clone(),
        samples: row_group.samples,
        sessions: row_group.sessions,
        runs: row_group.runs,
        first_session: row_group.first_session,
        last_session: row_group.last_session,
        first_time: row_group.first_time,
        last_time: row_group.last_time,
        values: row_group.values,
        digest: row_group.digest.to_string(),
        files,
    }
}

fn row_file(file: &DataFile, columns: u32, row_group: usize) -> RowFile {
    RowFile {
        path: file.path.clone(),
        bytes: file.bytes_on_disk,
        footer_bytes: file.footer_bytes,
        footer_checksum: file.footer_checksum,
        columns,
        row_group: row_group as u32,
        row_group_bytes: file.row_group_bytes.get(row_group).copied().unwrap_or(0),
    }
}

fn statistics_row(of: &RowGroupStatistics) -> StatisticsRow {
    StatisticsRow {
        features: of.features.clone(),
        dense: of.dense.iter().cloned().map(String::from).collect(),
    }
}
