//! Merges small files of a dataset: several files with row groups of the same range of buckets, or several
//! files with different columns of the same row groups.
//!
//! The files of a range of buckets are rewritten together, into the same files as in a new dataset with the
//! same samples. The samples and their digest do not change.

use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_storage::Storage;
use serde::Serialize;

use crate::rewrite::{RewriteOptions, Rewriter, check_samples, files_of, start};
use crate::snapshot::unless_removed;
use crate::{Commit, FileSet, PartitionFilter, PartitionKey, Result, Snapshot};

/// The result of [`compact()`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Compacted {
    /// The number of the newest snapshot.
    pub snapshot: u64,
    /// Whether a snapshot was committed; `false` if no range could be improved.
    pub changed: bool,
    /// The number of examined partitions.
    pub partitions: usize,
    /// The number of ranges of buckets that were rewritten.
    pub ranges_rewritten: u64,
    /// The number of samples in the rewritten ranges.
    pub samples_rewritten: u64,
    /// The number of data files of the partitions before the call.
    pub files_before: u64,
    /// The number of data files of the partitions after the call.
    pub files: u64,
    /// The number of row groups of the partitions before the call.
    pub row_groups_before: u64,
    /// The number of row groups of the partitions after the call.
    pub row_groups: u64,
    /// The size of the partitions' data files before the call, in bytes.
    pub bytes_on_disk_before: u64,
    /// The size of the partitions' data files after the call, in bytes.
    pub bytes_on_disk: u64,
    /// The duration in seconds.
    pub wall_seconds: f64,
}

/// The numbers of files, row groups and bytes of file sets.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    files: u64,
    row_groups: u64,
    bytes: u64,
}

impl Size {
    fn of<'s>(sets: impl Iterator<Item = &'s FileSet> + Clone) -> Self {
        let row_groups = sets.clone().map(|set| set.row_groups.len() as u64).sum();
        let (files, bytes) = files_of(sets);
        Self { files, row_groups, bytes }
    }
}

/// Merges files in the partitions that `filter` chooses, and commits. Memory holds the row groups being
/// written.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the filter chooses nothing or another writer has changed the
/// same partitions in the meantime; [`Error::NotADataset`](crate::Error::NotADataset),
/// [`Error::Snapshot`](crate::Error::Snapshot), [`Error::Damaged`](crate::Error::Damaged) and
/// [`Error::Storage`](crate::Error::Storage) if the dataset cannot be read or written. After an error the
/// dataset is unchanged.
pub fn compact(
    storage: &Storage,
    filter: &PartitionFilter,
    how: &RewriteOptions,
    reporter: &dyn Reporter,
) -> Result<Compacted> {
    let started = Instant::now();
    let (writer, snapshot) = start(storage, Commit::Compact, how)?;
    let partitions = snapshot.select(filter)?;
    let before = Size::of(partitions.iter().flat_map(|partition| &partition.files));
    let mut gaining: Vec<(&PartitionKey, &[FileSet])> = Vec::new();
    for partition in &partitions {
        let ranges = partition.ranges(snapshot.division());
        gaining
            .extend(ranges.filter(|sets| has_gain(&snapshot, sets, how)).map(|sets| (&partition.key, sets)));
    }
    let mut compacted = Compacted {
        snapshot: snapshot.snapshot,
        partitions: partitions.len(),
        files_before: before.files,
        files: before.files,
        row_groups_before: before.row_groups,
        row_groups: before.row_groups,
        bytes_on_disk_before: before.bytes,
        bytes_on_disk: before.bytes,
        ..Compacted::default()
    };
    let mut rewriter = Rewriter::new(storage, &snapshot, writer, how.threads, reporter)?;
    let samples: u64 = gaining.iter().flat_map(|(_, sets)| *sets).map(|set| set.samples).sum();
    reporter.begin("compacting", Some(samples), "samples");
    let rewritten = gaining.iter().try_for_each(|(key, sets)| compacted.rewrite(&mut rewriter, key, sets));
    reporter.end();
    unless_removed(storage, snapshot.snapshot, rewritten)?;
    if compacted.ranges_rewritten > 0 {
        compacted.changed = true;
        compacted.snapshot = rewriter.writer.finish()?.snapshot.snapshot;
    }
    compacted.wall_seconds = started.elapsed().as_secs_f64();
    Ok(compacted)
}

impl Compacted {
    /// Rewrites a range, and discards the result if it improves nothing.
    fn rewrite(&mut self, rewriter: &mut Rewriter<'_>, key: &PartitionKey, sets: &[FileSet]) -> Result<()> {
        let all = vec![true; sets.len()];
        let written = rewriter.rewrite(key, sets, &all, &|_| true)?;
        check_samples(sets, &all, &written, 0)?;
        let (before, now) = (Size::of(sets.iter()), Size::of(written.files.iter()));
        // `has_gain` can be wrong, because it does not know the lengths of kept texts.
        let is_smaller = now.files < before.files || now.row_groups < before.row_groups;
        if !is_smaller && !sets.iter().any(has_unused_columns) {
            rewriter.discard(&written);
            return Ok(());
        }
        self.ranges_rewritten += 1;
        self.samples_rewritten += written.samples();
        self.files = self.files + now.files - before.files;
        self.row_groups = self.row_groups + now.row_groups - before.row_groups;
        self.bytes_on_disk = self.bytes_on_disk + now.bytes - before.bytes;
        rewriter.writer.add_rewritten(written, sets.iter())
    }
}

/// Returns whether a set has columns that are no longer read.
fn has_unused_columns(set: &FileSet) -> bool {
    !set.changes.unused.is_empty()
}

/// Returns whether rewriting a range can reduce the number of its files or row groups, or remove unused
/// columns.
///
/// In a new dataset, all row groups and files of a range, except the last one, have at least the decoded
/// size that the options set. This limits their number.
fn has_gain(snapshot: &Snapshot, sets: &[FileSet], how: &RewriteOptions) -> bool {
    let most = |bytes_of_one: usize| decoded_bytes(snapshot, sets) / bytes_of_one.max(1) as u64 + 1;
    let row_groups: usize = sets.iter().map(|set| set.row_groups.len()).sum();
    sets.iter().any(|set| set.files.len() > 1 || has_unused_columns(set))
        || row_groups as u64 > most(how.row_group_bytes)
        || sets.len() as u64 > most(how.file_bytes)
}

/// Returns the decoded size of the samples in bytes, computed as by a writer, but without kept texts.
fn decoded_bytes(snapshot: &Snapshot, sets: &[FileSet]) -> u64 {
    let of_sample = snapshot.schema.sample_bytes(snapshot.sample_keys);
    let row_groups = sets.iter().flat_map(|set| &set.row_groups);
    row_groups.fold(0, |sum: u64, row_group| {
        sum.saturating_add(row_group.samples.saturating_mul(of_sample))
            .saturating_add(row_group.values.saturating_mul(8))
    })
}
