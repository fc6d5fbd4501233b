//! A snapshot's description of its partitions, their files and row groups: enough to plan which of them is read when, and
//! by whom.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ColumnChanges;
use crate::digest::Digest;
use crate::{Buckets, PartitionKey};

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
    /// The digest of the samples, of the columns that their files have.
    pub digest: Digest,
    /// The time of the last sample, in microseconds since 1970; `None` without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<i64>,
    /// The files, in the order of their first buckets and of the samples.
    pub files: Vec<FileSet>,
}

/// Row groups of a range of buckets, and the files that have their columns: Parquet rows of the files correspond one to
/// one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSet {
    /// The first bucket whose sessions are in the row groups.
    pub bucket: u32,
    /// Samples in the row groups.
    pub samples: u64,
    /// The row groups in the order of the samples. Row group k of the set is row group k of each file.
    pub row_groups: Vec<RowGroup>,
    /// The files, at least one. Each has some of the columns.
    pub files: Vec<DataFile>,
    /// How the columns of the files differ from those of the schema.
    #[serde(default, skip_serializing_if = "ColumnChanges::is_none")]
    pub changes: ColumnChanges,
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowGroup {
    /// The first bucket whose sessions are in the row group.
    pub bucket: u32,
    /// The Parquet rows at which the buckets after the first begin, up to the last one that has samples here. A bucket
    /// without samples begins where the next one does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bucket_starts: Vec<u32>,
    /// Samples in the row group.
    pub samples: u64,
    /// Sessions whose first sample in the partition is in the row group.
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
    /// The digest of the samples, of the columns that the files have.
    pub digest: Digest,
}

impl Partition {
    /// A partition without samples.
    pub(crate) fn empty(key: PartitionKey) -> Self {
        Self { key, samples: 0, sessions: 0, digest: Digest::default(), last_time: None, files: Vec::new() }
    }

    /// Adds row groups. The row groups of one range of buckets come in their order, ranges in any order.
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

    /// The row groups of each range of buckets that has some, in ascending order.
    pub fn ranges(&self, buckets: Buckets) -> impl Iterator<Item = &[FileSet]> {
        self.files.chunk_by(move |a, b| buckets.range_of(a.bucket) == buckets.range_of(b.bucket))
    }

    /// The files with sessions of one of these buckets, which are those of a range.
    pub fn of_range(&self, buckets: Range<u32>) -> impl Iterator<Item = &FileSet> {
        self.files.iter().filter(move |set| buckets.contains(&set.bucket))
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

    /// Sessions whose first sample in the partition is in the row groups.
    pub fn sessions(&self) -> u64 {
        self.row_groups.iter().fold(0, |sum, row_group| sum.saturating_add(row_group.sessions))
    }
}

impl RowGroup {
    /// The last bucket whose sessions are in the row group.
    pub fn last_bucket(&self) -> u32 {
        self.bucket.saturating_add(u32::try_from(self.bucket_starts.len()).unwrap_or(u32::MAX))
    }

    /// The Parquet rows of the sessions in these buckets.
    pub fn rows_of(&self, buckets: &Range<u32>) -> Range<u64> {
        let start = |bucket: u32| match bucket.checked_sub(self.bucket) {
            None | Some(0) => 0,
            Some(after) => {
                let start = self.bucket_starts.get(after as usize - 1);
                start.map_or(self.samples, |start| u64::from(*start))
            }
        };
        start(buckets.start)..start(buckets.end)
    }

    /// Adds samples with these sessions and times, which follow those that were added before.
    pub(crate) fn add(&mut self, buckets: Buckets, sessions: &[i64], times: &[i64]) {
        let (Some(first), Some(last)) = (sessions.first(), sessions.last()) else { return };
        let earliest = times.iter().copied().min().unwrap_or(i64::MAX);
        let latest = times.iter().copied().max().unwrap_or(i64::MIN);
        let continues = self.samples > 0 && self.last_session == *first;
        if self.samples == 0 {
            (self.first_session, self.first_time, self.last_time) = (*first, earliest, latest);
            self.bucket = buckets.bucket_of(*first);
        }
        self.runs -= u64::from(continues);
        for run in sessions.chunk_by(|a, b| a == b) {
            let further = buckets.bucket_of(run[0]).saturating_sub(self.bucket) as usize;
            if further > self.bucket_starts.len() {
                // A row group has fewer than 2^31 rows.
                self.bucket_starts.resize(further, self.samples as u32);
            }
            self.samples += run.len() as u64;
            self.runs += 1;
        }
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
        let buckets = Buckets { number: 4, in_range: 4 };
        row_group.add(buckets, &[], &[]);
        row_group.add(buckets, &[7, 7, 9], &[50, 60, 20]);
        row_group.add(buckets, &[9, 3, 1 << 62], &[30, 40, 50]);
        let expected = RowGroup {
            bucket_starts: vec![5, 5],
            samples: 6,
            runs: 4,
            first_session: 7,
            last_session: 1 << 62,
            first_time: 20,
            last_time: 60,
            ..RowGroup::default()
        };
        assert_eq!(row_group, expected);
    }

    #[test]
    fn rows_are_divided_by_buckets() {
        // Bucket 3 has 2 rows, 4 none, 5 three, 6 one.
        let row_group =
            RowGroup { bucket: 3, bucket_starts: vec![2, 2, 5], samples: 6, ..RowGroup::default() };
        assert_eq!(row_group.last_bucket(), 6);
        let rows = |buckets: Range<u32>| row_group.rows_of(&buckets);
        assert_eq!([rows(0..3), rows(3..4), rows(4..5), rows(5..6)], [0..0, 0..2, 2..2, 2..5]);
        assert_eq!([rows(6..7), rows(7..9), rows(0..64), rows(4..6)], [5..6, 6..6, 0..6, 2..5]);
        let parts: Vec<Range<u64>> = (0..8).map(|bucket| rows(bucket..bucket + 1)).collect();
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
    }
}
