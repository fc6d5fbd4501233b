//! One written range of buckets of a partition, and the manifest of several ranges.

use onefold_storage::Storage;
use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, Names, Row, RowFile, StatisticsRow};
use super::manifests::{ManifestEntry, checksum};
use super::{ColumnChanges, DataFile, FeatureStatistics, FileSet, RowGroup, RowGroupStatistics};
use crate::digest::Digest;
use crate::names::manifest_file;
use crate::{PartitionKey, Result, Schema};

/// The files and statistics of one [range of buckets](crate::Buckets) of a partition: the data that a commit
/// needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenBucket {
    /// The key of the partition.
    pub key: PartitionKey,
    /// The number of the range.
    pub range: u32,
    /// The files of the range, in sample order; empty if the range has no samples.
    pub files: Vec<FileSet>,
    /// The statistics of each row group, in sample order.
    pub(crate) statistics: Vec<RowGroupStatistics>,
}

impl WrittenBucket {
    /// Creates a range without samples.
    pub(crate) fn empty(key: PartitionKey, range: u32) -> Self {
        Self { key, range, files: Vec::new(), statistics: Vec::new() }
    }

    fn row_groups(&self) -> impl Iterator<Item = &RowGroup> {
        self.files.iter().flat_map(|set| &set.row_groups)
    }

    /// Returns the number of samples in the range.
    pub fn samples(&self) -> u64 {
        self.files.iter().fold(0, |sum, set| sum.saturating_add(set.samples))
    }

    /// Returns the digest of the samples.
    pub fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        self.row_groups().for_each(|row_group| digest.merge(row_group.digest));
        digest
    }

    /// Returns the paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(|set| &set.files).map(|file| file.path.as_str())
    }

    /// Returns whether the range contains a new version of `set`, which has the same first file.
    pub(crate) fn has_set(&self, set: &FileSet) -> bool {
        self.files.iter().any(|written| written.path() == set.path())
    }

    /// Returns the file sets, each with the statistics of its row groups.
    pub(super) fn sets(&self) -> impl Iterator<Item = (&FileSet, &[RowGroupStatistics])> {
        let mut rest = &self.statistics[..];
        self.files.iter().map(move |set| {
            let (of_set, others) = rest.split_at(set.row_groups.len().min(rest.len()));
            rest = others;
            (set, of_set)
        })
    }
}

/// Returns the statistics of the sparse features over all samples of row groups, in schema order, without
/// the features that the files lack.
pub(super) fn features(row_groups: &[RowGroupStatistics]) -> Vec<FeatureStatistics> {
    let mut sum = RowGroupStatistics::default();
    for RowGroupStatistics { features, .. } in row_groups {
        sum.merge(RowGroupStatistics { features: features.clone(), dense: Vec::new() });
    }
    sum.features
}

/// Row groups that a manifest describes: their partition, files and statistics.
pub(super) type Written<'b> = (&'b PartitionKey, &'b FileSet, &'b [RowGroupStatistics]);

/// Writes the manifest of row groups in files with these changes. `sets` must be ordered by partition and
/// bucket.
pub(super) fn write_manifest(
    storage: &Storage,
    schema: &Schema,
    changes: &ColumnChanges,
    sets: &[Written<'_>],
) -> Result<ManifestEntry> {
    let ends = sets.first().zip(sets.last()).map(|((first, ..), (last, ..))| (*first, *last));
    let (first, last) = ends.map(|(first, last)| (first.clone(), last.clone())).unwrap_or_default();
    let manifest = manifest(schema, changes, sets);
    let rows = u32::try_from(manifest.rows.len()).map_err(std::io::Error::other)?;
    let encoded = manifest.encode().map_err(std::io::Error::other)?;
    let (statistics, rest) = encoded.bytes.split_at(encoded.statistics_bytes as usize);
    let entry = ManifestEntry {
        path: manifest_file(),
        bytes: encoded.bytes.len() as u64,
        statistics_bytes: encoded.statistics_bytes,
        statistics_checksum: checksum(statistics),
        checksum: checksum(rest),
        first,
        last,
        rows: vec![(0, rows)],
        changes: changes.clone(),
    };
    storage.create(&entry.path, encoded.bytes)?;
    Ok(entry)
}

fn manifest(schema: &Schema, changes: &ColumnChanges, sets: &[Written<'_>]) -> Manifest {
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

/// Returns the index of a file's columns in the list of column lists, and adds them if they are missing.
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
