//! Reads a whole dataset again, and tells what is not as the snapshot and the format say.
//!
//! ```text
//! files       are there, with their size; footers have their checksum, and the snapshot's rows, row groups and columns
//! row groups  every column has its checksum and decodes, folded ones unfold; order within the row group; ids are in
//!             their vocabulary; sessions, times, statistics and digest are those of the manifest
//! ranges      order from row group to row group, contiguous sessions, row groups starting with sessions
//! the whole   the totals, the vocabularies' files, and that nothing else lies in the dataset's folders
//! ```
//!
//! A problem does not stop the verification. But a column chunk with a wrong checksum is not decoded, and a figure that
//! depends on a row group that cannot be read is not compared. Some files are open at a time, as many as it takes to
//! keep the threads busy. Their row groups are read in parallel, one column at a time: each thread holds one decoded
//! column and 16 bytes a sample, and waits until the memory limit has room for them. Beside that, a range of buckets
//! takes 8 bytes a session, 16 in arrival order.

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
use crate::snapshot::RowGroupStatistics;
use crate::{Buckets, Error, FileSet, Partition, PartitionKey, Problem, Result, SESSION_COLUMN, Snapshot};

/// As many problems are told with their places; all are counted.
pub const MOST_PROBLEMS: usize = 100;

/// Row groups whose files are open, for each thread. Files with more of them are open alone.
const ROW_GROUPS_OF_THREAD: usize = 8;

/// How a dataset is verified.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOptions {
    /// Threads, each of which reads a file or a row group at a time.
    pub threads: usize,
    /// The number of the snapshot; the newest one if `None`.
    pub snapshot: Option<u64>,
    /// Memory for the row groups that are read at the same time.
    pub memory_limit: u64,
}

impl VerifyOptions {
    /// Verifies the newest snapshot with `threads` threads and a memory limit of 1 GiB.
    pub fn new(threads: usize) -> Self {
        Self { threads, snapshot: None, memory_limit: 1 << 30 }
    }
}

/// What verifying found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verification {
    /// The number of the snapshot that was verified.
    pub snapshot: u64,
    /// Partitions in the snapshot.
    pub partitions: usize,
    /// Data files in the snapshot.
    pub files: usize,
    /// Row groups in the snapshot.
    pub row_groups: u64,
    /// Samples in the snapshot.
    pub samples: u64,
    /// Sessions in the snapshot.
    pub sessions: u64,
    /// Size of all data files in the snapshot.
    pub bytes_on_disk: u64,
    /// Partitions whose samples could all be read, and were compared with the digest taken when they were written, of
    /// the columns that they were written with.
    pub digests: usize,
    /// The digest of the samples that were read, with the missing values of features that were added later. It does not
    /// depend on their order. `None` if some could not be read.
    pub digest: Option<Digest>,
    /// Row groups that begin inside a session, because the session does not fit into one.
    pub row_groups_inside_sessions: u64,
    /// How many problems were found; a kind of problem counts once in a row group.
    pub problems_found: usize,
    /// The first [`MOST_PROBLEMS`] of them, by partition, file and row group.
    pub problems: Vec<Problem>,
    /// What is odd and does no harm: files that the snapshot does not name.
    pub warnings: Vec<Problem>,
    /// Time that it took.
    pub wall_seconds: f64,
}

impl Verification {
    /// Whether no problem was found.
    pub fn is_sound(&self) -> bool {
        self.problems_found == 0
    }
}

/// Verifies the dataset at `location`. Problems of the data are not errors of this function, and a storage that does
/// not give the data is no problem of the data.
///
/// # Errors
///
/// [`Error::NotADataset`] and [`Error::Snapshot`] if there is no snapshot to compare with, [`Error::Storage`] if the
/// storage does not give a file, or another one takes its place meanwhile, [`Error::Io`] if threads cannot be started,
/// [`Error::Fault`] if a row group does not fit into the memory limit.
pub fn verify(location: &Path, options: &VerifyOptions, reporter: &dyn Reporter) -> Result<Verification> {
    let started = Instant::now();
    let storage = Storage::open(location)?;
    let snapshot = Snapshot::load_from(&storage, options.snapshot)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.max(1)).build();
    let pool = pool.map_err(|error| Error::Io(std::io::Error::other(error)))?;
    let memory = Memory::new(options.memory_limit);
    let mut found = Found::default();
    let mut expected = Expected::new(&storage, &snapshot)?;
    let work = Work { storage: &storage, snapshot: &snapshot, pool: &pool, memory: &memory, reporter };
    work.check_partitions(&mut expected, &mut found)?;
    found.add(snapshot_problems(&snapshot, expected.features()));
    found.add(vocabulary_problems(&storage, &snapshot)?);
    let mut warnings = unnamed_files(&storage, &snapshot)?;
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

/// What was found so far.
#[derive(Debug, Default)]
struct Found<'a> {
    /// The first ones.
    problems: Vec<Problem>,
    problems_found: usize,
    /// Partitions with row groups that could not be read.
    unread: BTreeSet<&'a PartitionKey>,
    /// Statistics of the samples that could be read.
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

/// Separates a problem of the data from an error that says nothing of it.
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

/// A row group to check, and its files, if they could be opened.
type Place<'a> = (&'a FileSet, Option<&'a OpenFiles>, usize);

/// State that the checks of all ranges share.
struct Work<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    pool: &'a rayon::ThreadPool,
    memory: &'a Memory,
    reporter: &'a dyn Reporter,
}

impl<'a> Work<'a> {
    /// Checks the row groups of all files, those of some at a time.
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
            let mut row_groups = 0;
            let fits = rest.iter().take_while(|(_, set)| {
                row_groups += set.row_groups.len();
                row_groups <= most
            });
            let (together, others) = rest.split_at(fits.count().max(1));
            rest = others;
            checked = self.check_files(together, expected, &mut open, found);
        }
        reporter.end();
        checked
    }

    /// Reads all row groups of some files. The last range stays `open` until all of its files were read.
    fn check_files(
        &self,
        sets: &[(BucketRange<'a>, &'a FileSet)],
        expected: &mut Expected,
        open: &mut Option<OpenRange<'a>>,
        found: &mut Found<'a>,
    ) -> Result<()> {
        let Self { storage, snapshot, pool, memory, reporter } = *self;
        let open_files = |set: &FileSet| -> Result<OpenFiles> {
            let files = OpenFiles::open(storage, snapshot, set)?;
            files.check_columns(&snapshot.columns_of(set))?;
            Ok(files)
        };
        // The first error of the storage ends the work.
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

/// How a row group is named in errors.
fn row_group_of(storage: &Storage, files: &OpenFiles, index: usize) -> String {
    format!("row group {index} of `{}`", storage.shown(&files.path).display())
}

/// A range of buckets whose files are being read.
struct OpenRange<'a> {
    range: BucketRange<'a>,
    buckets: Buckets,
    order: OrderCheck,
    /// Whether all row groups could be read so far.
    whole: bool,
    sets_left: usize,
}

impl<'a> OpenRange<'a> {
    fn new(range: BucketRange<'a>, snapshot: &Snapshot) -> Self {
        let buckets = snapshot.division();
        let order = OrderCheck::new(snapshot.order, buckets);
        Self { range, buckets, order, whole: true, sets_left: range.sets.len() }
    }

    /// Adds the row groups of the next files.
    fn add(&mut self, set: &FileSet, row_groups: impl Iterator<Item = CheckedRowGroup>, found: &mut Found) {
        for (index, checked) in row_groups.enumerate() {
            self.whole &= checked.counted;
            found.digest.merge(checked.digest);
            found.add(checked.problems);
            found.add(self.order.next(set.path(), index, checked.span));
        }
        self.sets_left -= 1;
    }

    /// Checks what the row groups are together; their sessions only if all of them were read.
    fn end(self, found: &mut Found<'a>) {
        let Self { range: BucketRange { partition, sets }, buckets, order, whole, .. } = self;
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

/// How a partition is named in problems.
fn partition_path(partition: &Partition) -> String {
    match partition.key.to_string() {
        key if key.is_empty() => DATA.to_owned(),
        key => key,
    }
}
