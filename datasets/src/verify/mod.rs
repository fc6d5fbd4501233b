//! Reads a whole dataset and reports differences from the snapshot and from the format's rules.
//!
//! ```text
//! files       exist with the recorded size, footer checksum, rows, row groups and columns
//! row groups  all columns have the right checksum, decode and unfold; samples are in order; ids are in their
//!             vocabulary; sessions, times, statistics and digest match the manifest
//! ranges      order between row groups, contiguous sessions, row groups that start with sessions
//! dataset     totals, vocabulary files, and unexpected files in the dataset's folders
//! ```
//!
//! A problem does not stop the verification. However, a column chunk with a wrong checksum is not decoded,
//! and a total that depends on an unreadable row group is not compared. Enough files are open at a time to
//! keep the threads busy. Their row groups are read in parallel, one column at a time: each thread holds one
//! decoded column and 16 bytes per sample, and waits until the memory limit allows this. The limit includes the
//! sessions of the current bucket, which take up to 16 bytes each, and each vocabulary while it is checked.

mod absent;
mod against;
mod files;
mod memory;
mod order;
mod row_group;
#[cfg(test)]
mod tests;
mod totals;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_storage::Storage;
use rayon::prelude::*;
use serde::Serialize;

pub use self::absent::{Absence, absent};
pub use self::against::ExpectedSamples;
use self::files::{unnamed_files, vocabulary_problems};
use self::memory::Memory;
use self::order::OrderCheck;
use self::row_group::{CheckedRowGroup, RowGroupCheck};
use self::totals::{Expected, snapshot_problems};
use crate::digest::Digest;
use crate::names::DATA;
use crate::scan::OpenFiles;
use crate::snapshot::{RowGroupStatistics, check_exists, unless_removed};
use crate::{
    Buckets, Error, FileSet, Partition, PartitionKey, Problem, Result, SESSION_COLUMN, Snapshot, thread_pool,
};

/// The largest number of problems that are reported with their locations. All problems are counted.
pub const MOST_PROBLEMS: usize = 100;

/// The number of row groups per thread whose files are open at a time. Files with more row groups are opened
/// alone.
const ROW_GROUPS_OF_THREAD: usize = 8;
/// The memory in bytes that a run of samples of one session takes: 8 in the result of its row group, and up to
/// 16 among the sessions of its bucket.
const RUN_BYTES: u64 = 24;
/// The divisor that gives the part of the memory limit for the runs of row groups whose files are open at a
/// time.
const RUNS_SHARE: u64 = 4;

/// Options of a verification.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOptions {
    /// The number of threads. Each reads one file or row group at a time.
    pub threads: usize,
    /// The number of the snapshot; `None` for the newest one.
    pub snapshot: Option<u64>,
    /// The memory limit, in bytes, of the row groups that are read in parallel, of the sessions of a bucket,
    /// and of a vocabulary.
    pub memory_limit: u64,
}

impl VerifyOptions {
    /// Creates options that verify the newest snapshot with `threads` threads and a memory limit of 1 GiB.
    pub fn new(threads: usize) -> Self {
        Self { threads, snapshot: None, memory_limit: 1 << 30 }
    }
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verification {
    /// The number of the verified snapshot.
    pub snapshot: u64,
    /// The number of partitions in the snapshot.
    pub partitions: usize,
    /// The number of data files in the snapshot.
    pub files: usize,
    /// The number of row groups in the snapshot.
    pub row_groups: u64,
    /// The number of samples in the snapshot.
    pub samples: u64,
    /// The number of sessions in the snapshot.
    pub sessions: u64,
    /// The size of all data files in the snapshot, in bytes.
    pub bytes_on_disk: u64,
    /// The number of partitions that could be read completely. Their samples were compared with the digests
    /// from when they were written, over the columns with which they were written.
    pub digests: usize,
    /// The digest of the samples that were read, with missing values for features that were added later. It
    /// does not depend on the order of the samples. `None` if some samples could not be read.
    pub digest: Option<Digest>,
    /// The number of row groups that begin inside a session, because the session does not fit into one row
    /// group.
    pub row_groups_inside_sessions: u64,
    /// The number of problems. Problems of the same kind in a row group count once.
    pub problems_found: usize,
    /// The first [`MOST_PROBLEMS`] problems, by partition, file and row group.
    pub problems: Vec<Problem>,
    /// Harmless irregularities: files that the snapshot does not list.
    pub warnings: Vec<Problem>,
    /// The duration of the verification in seconds.
    pub wall_seconds: f64,
}

impl Verification {
    /// Returns whether no problem was found.
    pub fn is_sound(&self) -> bool {
        self.problems_found == 0
    }
}

/// Verifies the dataset at `location`. Problems in the data are part of the result. Failures to read the data
/// are errors.
///
/// # Errors
///
/// [`Error::NotADataset`] and [`Error::Snapshot`] if there is no valid snapshot, [`Error::NoSnapshot`] if the snapshot
/// does not exist or was removed meanwhile, [`Error::Storage`] if a file cannot be read or is replaced by another one
/// meanwhile, [`Error::Io`] if threads cannot be started, [`Error::Fault`] if a row group, the sessions of a bucket or a
/// vocabulary do not fit into the memory limit.
pub fn verify(location: &Path, options: &VerifyOptions, reporter: &dyn Reporter) -> Result<Verification> {
    let storage = Storage::open(location)?;
    let snapshot = Snapshot::load_from(&storage, options.snapshot)?;
    let verification =
        unless_removed(&storage, snapshot.snapshot, check(&storage, &snapshot, options, reporter))?;
    if !verification.is_sound() {
        check_exists(&storage, snapshot.snapshot)?;
    }
    Ok(verification)
}

/// Verifies a snapshot. If a vacuum or a purge removes the snapshot in the meantime, missing files look like damage.
fn check(
    storage: &Storage,
    snapshot: &Snapshot,
    options: &VerifyOptions,
    reporter: &dyn Reporter,
) -> Result<Verification> {
    let started = Instant::now();
    let pool = thread_pool(options.threads)?;
    let memory_limit = options.memory_limit;
    let mut found = Found::default();
    let mut expected = Expected::new(storage, snapshot)?;
    let work = Work { storage, snapshot, pool: &pool, memory_limit, reporter };
    work.check_partitions(&mut expected, &mut found)?;
    found.add(snapshot_problems(snapshot, expected.features()));
    found.add(vocabulary_problems(storage, snapshot, memory_limit)?);
    let mut warnings = unnamed_files(storage, snapshot)?;
    warnings.truncate(MOST_PROBLEMS);
    let sets = || snapshot.partitions.iter().flat_map(|partition| &partition.files);
    Ok(Verification {
        snapshot: snapshot.snapshot,
        partitions: snapshot.partitions.len(),
        files: sets().map(|set| set.files.len()).sum(),
        row_groups: sets().map(|set| set.row_groups.len() as u64).sum(),
        samples: snapshot.statistics.samples,
        sessions: snapshot.statistics.sessions,
        bytes_on_disk: snapshot.statistics.bytes_on_disk,
        digests: snapshot.partitions.len() - found.unread.len(),
        digest: found.unread.is_empty().then_some(found.digest),
        row_groups_inside_sessions: found.row_groups_inside_sessions,
        problems_found: found.problems_found,
        problems: found.problems,
        warnings,
        wall_seconds: started.elapsed().as_secs_f64(),
    })
}

/// The findings so far.
#[derive(Debug, Default)]
struct Found<'a> {
    /// The first [`MOST_PROBLEMS`] problems.
    problems: Vec<Problem>,
    problems_found: usize,
    /// The partitions with row groups that could not be read.
    unread: BTreeSet<&'a PartitionKey>,
    /// The digest of the samples that could be read.
    digest: Digest,
    row_groups_inside_sessions: u64,
}

impl Found<'_> {
    fn add(&mut self, problems: impl IntoIterator<Item = Problem>) {
        for problem in problems {
            self.problems_found += 1;
            if self.problems.len() < MOST_PROBLEMS {
                self.problems.push(problem);
            }
        }
    }
}

/// Separates problems in the data from other errors.
fn problem_of<T>(read: Result<T>) -> Result<Result<T, Problem>> {
    match read {
        Ok(read) => Ok(Ok(read)),
        Err(Error::Damaged(problem)) => Ok(Err(*problem)),
        Err(error) => Err(error),
    }
}

/// The row groups of a range of buckets of a partition.
#[derive(Debug, Clone, Copy)]
struct BucketRange<'a> {
    partition: &'a Partition,
    sets: &'a [FileSet],
}

/// A row group to check: its file set, its files if they could be opened, and its index.
type Place<'a> = (&'a FileSet, Option<&'a OpenFiles>, usize);

/// The state that the checks of all ranges share.
struct Work<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    pool: &'a rayon::ThreadPool,
    memory_limit: u64,
    reporter: &'a dyn Reporter,
}

impl<'a> Work<'a> {
    /// Checks the row groups of all files, a limited number of files at a time.
    fn check_partitions(&self, expected: &mut Expected, found: &mut Found<'a>) -> Result<()> {
        let (snapshot, reporter) = (self.snapshot, self.reporter);
        let division = snapshot.division();
        let of_partition = |partition: &'a Partition| {
            partition.ranges(division).map(move |sets| BucketRange { partition, sets })
        };
        let ranges = snapshot.partitions.iter().flat_map(of_partition);
        let sets: Vec<(BucketRange<'a>, &'a FileSet)> =
            ranges.flat_map(|range| range.sets.iter().map(move |set| (range, set))).collect();
        let most = ROW_GROUPS_OF_THREAD * self.pool.current_num_threads();
        reporter.begin("verifying", Some(snapshot.statistics.samples), "samples");
        let (mut rest, mut open) = (&sets[..], None);
        let mut checked = Ok(());
        while !rest.is_empty() && checked.is_ok() {
            let (mut row_groups, mut bytes) = (0, 0_u64);
            let fits = rest.iter().take_while(|(_, set)| {
                row_groups += set.row_groups.len();
                bytes = bytes.saturating_add(run_bytes(set));
                row_groups <= most && bytes <= self.memory_limit / RUNS_SHARE
            });
            let (together, others) = rest.split_at(fits.count().max(1));
            rest = others;
            checked = self.check_files(together, expected, &mut open, found);
        }
        reporter.end();
        checked
    }

    /// Reads all row groups of some files. The last range stays in `open` until all of its files have been
    /// read.
    fn check_files(
        &self,
        sets: &[(BucketRange<'a>, &'a FileSet)],
        expected: &mut Expected,
        open: &mut Option<OpenRange<'a>>,
        found: &mut Found<'a>,
    ) -> Result<()> {
        let Self { storage, snapshot, pool, memory_limit, reporter } = *self;
        let open_bucket = open.as_ref().map_or(0, |open| open.order.bytes());
        let held = sets.iter().fold(open_bucket, |sum, (_, set)| sum.saturating_add(run_bytes(set)));
        let memory = Memory::new(memory_limit, held);
        let open_files = |set: &FileSet| -> Result<OpenFiles> {
            let files = OpenFiles::open(storage, snapshot, set)?;
            files.check_columns(&snapshot.columns_of(set))?;
            Ok(files)
        };
        // The first storage error stops the verification.
        let opened: Result<Vec<Result<OpenFiles, Problem>>> =
            pool.install(|| sets.par_iter().map(|(_, set)| problem_of(open_files(set))).collect());
        let opened = opened?;
        let mut statistics = Vec::new();
        for (_, set) in sets {
            statistics.extend(expected.of(set)?);
        }
        let places = sets.iter().zip(&opened).flat_map(|((_, set), files)| {
            (0..set.row_groups.len()).map(move |index| (*set, files.as_ref().ok(), index))
        });
        let places: Vec<Place> = places.collect();
        let check = |(place, statistics): (&Place, &RowGroupStatistics)| {
            let (set, files, index) = *place;
            let Some(files) = files else { return Ok(CheckedRowGroup::default()) };
            let described = &set.row_groups[index];
            let room = memory.wait_for(files.checking_bytes(index));
            let _room = room.map_err(|fault| fault.within(&row_group_of(storage, files, index)))?;
            let checked = RowGroupCheck { snapshot, files, index, described, statistics }.run()?;
            reporter.advance(described.samples);
            reporter.go_on()?;
            Ok(checked)
        };
        let checked: Result<Vec<CheckedRowGroup>> =
            pool.install(|| places.par_iter().zip(&statistics).map(check).collect());
        let mut checked = checked?.into_iter();
        for ((range, set), files) in sets.iter().zip(&opened) {
            let mut current = open.take().unwrap_or_else(|| OpenRange::new(*range, snapshot));
            found.add(files.as_ref().err().cloned());
            current.add(set, checked.by_ref().take(set.row_groups.len()), found);
            match current.sets_left {
                0 => current.end(found),
                _ => *open = Some(current),
            }
        }
        Ok(())
    }
}

/// Returns the memory in bytes that the runs of a set take after its row groups were checked.
fn run_bytes(set: &FileSet) -> u64 {
    let runs = set.row_groups.iter().map(|row_group| row_group.runs.min(row_group.samples));
    runs.fold(0, |sum, runs| sum.saturating_add(runs.saturating_mul(RUN_BYTES)))
}

/// Returns the name of a row group for errors.
fn row_group_of(storage: &Storage, files: &OpenFiles, index: usize) -> String {
    format!("row group {index} of `{}`", storage.shown(&files.path).display())
}

/// A range of buckets whose files are being read.
struct OpenRange<'a> {
    range: BucketRange<'a>,
    buckets: Buckets,
    order: OrderCheck,
    /// Whether all row groups so far could be read.
    whole: bool,
    sets_left: usize,
}

impl<'a> OpenRange<'a> {
    fn new(range: BucketRange<'a>, snapshot: &Snapshot) -> Self {
        let buckets = snapshot.division();
        let order = OrderCheck::new(snapshot.order, buckets);
        Self { range, buckets, order, whole: true, sets_left: range.sets.len() }
    }

    /// Adds the row groups of the next file set.
    fn add(&mut self, set: &FileSet, row_groups: impl Iterator<Item = CheckedRowGroup>, found: &mut Found) {
        for (index, checked) in row_groups.enumerate() {
            self.whole &= checked.counted;
            found.digest.merge(checked.digest);
            found.add(checked.problems);
            found.add(self.order.next(set.path(), index, checked.span));
        }
        self.sets_left -= 1;
    }

    /// Checks the range as a whole. Its sessions are checked only if all row groups were read.
    fn end(self, found: &mut Found<'a>) {
        let Self { range: BucketRange { partition, sets }, buckets, mut order, whole, .. } = self;
        if !whole {
            found.unread.insert(&partition.key);
        }
        found.row_groups_inside_sessions += order.row_groups_inside_sessions();
        // Columns that were written later do not change where row groups end.
        if sets.iter().all(|set| set.files.len() == 1) {
            found.add(order.small_row_groups());
        }
        let (sessions, split) = order.sessions();
        let problem =
            |message: String| Problem::new(partition_path(partition), message).in_column(SESSION_COLUMN);
        let of_split = |session| problem(format!("the samples of session {session} are not contiguous"));
        found.add(split.map(of_split));
        let expected: u64 = sets.iter().map(FileSet::sessions).sum();
        if whole && sessions != expected {
            let first = sets.first().map_or(0, |set| set.bucket);
            let range = buckets.of_range(buckets.range_of(first));
            let name = match range.len() {
                1 => format!("bucket {} has", range.start),
                _ => format!("the buckets {} to {} have", range.start, range.end - 1),
            };
            let message = format!("{name} {sessions} sessions, the snapshot says {expected}");
            found.add([problem(message)]);
        }
    }
}

/// Returns the name of a partition for problems.
fn partition_path(partition: &Partition) -> String {
    match partition.key.to_string() {
        key if key.is_empty() => DATA.to_owned(),
        key => key,
    }
}
