//! The partitions, files and row groups of a snapshot, with enough detail to plan the order in which readers
//! read them.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ColumnChanges;
use crate::digest::Digest;
use crate::{Buckets, PartitionKey};

/// A partition and its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// The values of the partition columns.
    pub key: PartitionKey,
    /// The number of samples in the partition.
    pub samples: u64,
    /// The number of sessions in the partition.
    pub sessions: u64,
    /// The digest of the samples, over the columns that their files have.
    pub digest: Digest,
    /// The latest time of a sample, in microseconds since 1970; `None` if there are no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<i64>,
    /// The files, ordered by their first bucket and then in sample order.
    pub files: Vec<FileSet>,
}

/// Row groups of a range of buckets, and the files with their columns. Parquet row n of every file belongs to
/// the same sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSet {
    /// The first bucket with sessions in the row groups.
    pub bucket: u32,
    /// The number of samples in the row groups.
    pub samples: u64,
    /// The row groups in sample order. Row group k of the set is row group k of each file.
    pub row_groups: Vec<RowGroup>,
    /// The files, at least one, each with some of the columns.
    pub files: Vec<DataFile>,
    /// The differences between the columns of the files and the schema.
    #[serde(default, skip_serializing_if = "ColumnChanges::is_none")]
    pub changes: ColumnChanges,
}

/// One Parquet file of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// The path relative to the dataset's folder, separated by `/`.
    pub path: String,
    /// The size of the file in bytes.
    pub bytes_on_disk: u64,
    /// The size of the footer in bytes: the Parquet metadata and the eight bytes after it.
    pub footer_bytes: u32,
    /// The 64-bit XXH3 of the footer.
    pub footer_checksum: u64,
    /// The names of the columns, in file order.
    pub columns: Arc<[String]>,
    /// The compressed size of each row group in bytes.
    pub row_group_bytes: Vec<u64>,
}

/// A row group.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowGroup {
    /// The first bucket with sessions in the row group.
    pub bucket: u32,
    /// The Parquet rows at which the later buckets begin, up to the last bucket with samples in this row
    /// group. A bucket without samples begins at the same row as the next bucket.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bucket_starts: Vec<u32>,
    /// The number of samples in the row group.
    pub samples: u64,
    /// The number of sessions whose first sample in the partition is in the row group.
    pub sessions: u64,
    /// The number of runs of consecutive samples of one session. In clustered order, it is the number of
    /// sessions with samples in the row group.
    pub runs: u64,
    /// The session of the first sample. If it equals the last session of the previous row group, that session
    /// continues here.
    pub first_session: i64,
    /// The session of the last sample.
    pub last_session: i64,
    /// The earliest time of a sample, in microseconds since 1970.
    pub first_time: i64,
    /// The latest time of a sample, in microseconds since 1970.
    pub last_time: i64,
    /// The number of ids over all samples and sparse features if every sample had its own copies of its
    /// lists.
    pub values: u64,
    /// The compressed size of all columns in bytes.
    pub bytes_on_disk: u64,
    /// The digest of the samples, over the columns that the files have.
    pub digest: Digest,
}

impl Partition {
    /// Creates a partition without samples.
    pub(crate) fn empty(key: PartitionKey) -> Self {
        Self { key, samples: 0, sessions: 0, digest: Digest::default(), last_time: None, files: Vec::new() }
    }

    /// Adds row groups. The row groups of one range of buckets must be added in order; ranges can be added in
    /// any order.
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

    /// Returns the size of the data files in bytes.
    pub fn bytes_on_disk(&self) -> u64 {
        self.files.iter().fold(0, |sum, set| sum.saturating_add(set.bytes_on_disk()))
    }

    /// Returns the file sets of each range of buckets that has samples, in ascending order.
    pub fn ranges(&self, buckets: Buckets) -> impl Iterator<Item = &[FileSet]> {
        self.files.chunk_by(move |a, b| buckets.range_of(a.bucket) == buckets.range_of(b.bucket))
    }

    /// Returns the file sets whose first bucket is in `buckets`, the buckets of a range.
    pub fn of_range(&self, buckets: Range<u32>) -> impl Iterator<Item = &FileSet> {
        self.files.iter().filter(move |set| buckets.contains(&set.bucket))
    }
}

impl FileSet {
    /// Returns the path of the first file, which identifies the set.
    pub fn path(&self) -> &str {
        self.files.first().map_or("", |file| &file.path)
    }

    /// Returns the size of the files in bytes.
    pub fn bytes_on_disk(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes_on_disk))
    }

    /// Returns the number of sessions whose first sample in the partition is in the row groups.
    pub fn sessions(&self) -> u64 {
        self.row_groups.iter().fold(0, |sum, row_group| sum.saturating_add(row_group.sessions))
    }
}

impl RowGroup {
    /// Returns the last bucket with sessions in the row group.
    pub fn last_bucket(&self) -> u32 {
        self.bucket.saturating_add(u32::try_from(self.bucket_starts.len()).unwrap_or(u32::MAX))
    }

    /// Returns the Parquet rows of the sessions in these buckets.
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

    /// Adds the sessions and times of samples that follow the samples added before.
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
        // Bucket 3 has two rows, bucket 4 none, bucket 5 three and bucket 6 one.
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
