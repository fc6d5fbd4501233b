//! A snapshot's description of its partitions, their files and row groups: enough to plan which of them is read when, and
//! by whom.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::PartitionKey;
use crate::digest::Digest;

/// One partition and its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// The partition columns' values.
    pub key: PartitionKey,
    /// Samples in the partition.
    pub samples: u64,
    /// Sessions in the partition.
    pub sessions: u64,
    /// The digest of the samples.
    pub digest: Digest,
    /// The time of the last sample, in microseconds since 1970; `None` without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<i64>,
    /// The files, by bucket and then in the order of the samples.
    pub files: Vec<FileSet>,
}

/// Row groups of one bucket, and the files that have their columns: Parquet rows of the files correspond one to one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSet {
    /// The bucket of the sessions.
    pub bucket: u32,
    /// Samples in the row groups.
    pub samples: u64,
    /// The row groups in the order of the samples. Row group k of the set is row group k of each file.
    pub row_groups: Vec<RowGroup>,
    /// The files, at least one. Each has some of the columns.
    pub files: Vec<DataFile>,
}

/// One Parquet file of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path relative to the dataset's folder, with `/` between its parts.
    pub path: String,
    /// Size of the file.
    pub bytes_on_disk: u64,
    /// Size of the footer: the Parquet metadata, and the eight bytes after it.
    pub footer_bytes: u32,
    /// XXH3 of the footer with 64 bits.
    pub footer_checksum: u64,
    /// The columns in the order of the file.
    pub columns: Arc<[String]>,
    /// Compressed size of each row group.
    pub row_group_bytes: Vec<u64>,
}

/// One row group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowGroup {
    /// Samples in the row group.
    pub samples: u64,
    /// Sessions whose first sample of the bucket is in the row group.
    pub sessions: u64,
    /// Runs of consecutive samples of one session: in clustered order, the sessions with samples in the row group.
    pub runs: u64,
    /// The session of the first sample. If it is the last one of the row group before, the session goes on here.
    pub first_session: i64,
    /// The session of the last sample.
    pub last_session: i64,
    /// The earliest time of a sample, in microseconds since 1970.
    pub first_time: i64,
    /// The latest time of a sample, in microseconds since 1970.
    pub last_time: i64,
    /// Ids over all samples and sparse features, as if every sample carried its lists.
    pub values: u64,
    /// Compressed size of all columns.
    pub bytes_on_disk: u64,
    /// The digest of the samples.
    pub digest: Digest,
}

impl Partition {
    /// A partition without samples.
    pub(crate) fn empty(key: PartitionKey) -> Self {
        Self { key, samples: 0, sessions: 0, digest: Digest::default(), last_time: None, files: Vec::new() }
    }

    /// Adds row groups. The row groups of one bucket come in their order, buckets in any order.
    pub(crate) fn add(&mut self, set: FileSet) {
        self.samples = self.samples.saturating_add(set.samples);
        for row_group in &set.row_groups {
            self.sessions = self.sessions.saturating_add(row_group.sessions);
            self.digest.merge(row_group.digest);
            self.last_time = self.last_time.max(Some(row_group.last_time));
        }
        let place = self.files.partition_point(|other| other.bucket <= set.bucket);
        self.files.insert(place, set);
    }

    /// Size of the data files.
    pub fn bytes_on_disk(&self) -> u64 {
        self.files.iter().fold(0, |sum, set| sum.saturating_add(set.bytes_on_disk()))
    }

    /// The row groups of each bucket that has some, in ascending order.
    pub fn buckets(&self) -> impl Iterator<Item = &[FileSet]> {
        self.files.chunk_by(|a, b| a.bucket == b.bucket)
    }

    /// The time of the last sample of a bucket, if it has any.
    pub fn last_time(&self, bucket: u32) -> Option<i64> {
        let sets = self.files.iter().filter(|set| set.bucket == bucket);
        sets.flat_map(|set| &set.row_groups).map(|row_group| row_group.last_time).max()
    }
}

impl FileSet {
    /// The path of the first file, by which the row groups are known.
    pub fn path(&self) -> &str {
        self.files.first().map_or("", |file| &file.path)
    }

    /// Size of the files.
    pub fn bytes_on_disk(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes_on_disk))
    }

    /// Sessions whose first sample of the bucket is in the row groups.
    pub fn sessions(&self) -> u64 {
        self.row_groups.iter().fold(0, |sum, row_group| sum.saturating_add(row_group.sessions))
    }
}

impl RowGroup {
    /// Adds samples with these sessions and times, which follow those that were added before.
    pub(crate) fn add(&mut self, sessions: &[i64], times: &[i64]) {
        let (Some(first), Some(last)) = (sessions.first(), sessions.last()) else { return };
        let earliest = times.iter().copied().min().unwrap_or(i64::MAX);
        let latest = times.iter().copied().max().unwrap_or(i64::MIN);
        let continues = self.samples > 0 && self.last_session == *first;
        if self.samples == 0 {
            (self.first_session, self.first_time, self.last_time) = (*first, earliest, latest);
        }
        self.samples += sessions.len() as u64;
        self.runs += sessions.chunk_by(|a, b| a == b).count() as u64 - u64::from(continues);
        self.last_session = *last;
        self.first_time = self.first_time.min(earliest);
        self.last_time = self.last_time.max(latest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_counted_over_several_batches() {
        let mut row_group = RowGroup::default();
        row_group.add(&[], &[]);
        row_group.add(&[7, 7, 9], &[50, 60, 20]);
        row_group.add(&[9, 3], &[30, 40]);
        let expected = RowGroup {
            samples: 5,
            runs: 3,
            first_session: 7,
            last_session: 3,
            first_time: 20,
            last_time: 60,
            ..RowGroup::default()
        };
        assert_eq!(row_group, expected);
    }
}
