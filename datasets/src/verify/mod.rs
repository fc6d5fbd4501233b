//! Reads a whole dataset again, and tells what is not as the snapshot and the format say.
//!
//! ```text
//! files       are there, with their size; footers have their checksum, and the snapshot's rows, row groups and columns
//! row groups  every column has its checksum and decodes, folded ones unfold; order within the row group; ids are in
//!             their vocabulary; sessions, times, statistics and digest are those of the manifest
//! buckets     order from row group to row group, contiguous sessions, row groups starting with sessions
//! the whole   the totals, the vocabularies' files, and that nothing else lies in the dataset's folders
//! ```
//!
//! What is found does not stop the search, but a column whose bytes are not those that were written is not decoded, and
//! what depends on a row group that cannot be read is not compared. Whole buckets are checked together, as many as it
//! takes to keep the threads busy. Row groups are read in parallel, one column at a time: each thread holds one decoded
//! column and 16 bytes a sample. A bucket takes 8 bytes a session, 16 in arrival order, and its footers.

mod against;
mod files;
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

pub use self::against::ExpectedSamples;
use self::files::{unnamed_files, vocabulary_problems};
use self::order::OrderCheck;
use self::row_group::{CheckedRowGroup, RowGroupCheck};
use self::totals::{Expected, snapshot_problems};
use crate::digest::Digest;
use crate::names::DATA;
use crate::scan::OpenFiles;
use crate::snapshot::RowGroupStatistics;
use crate::{Error, FileSet, Partition, PartitionKey, Problem, Result, SESSION_COLUMN, Snapshot};

/// As many problems are told with their places; all are counted.
pub const MOST_PROBLEMS: usize = 100;

/// Row groups that are checked together, for each thread. A bucket with more of them is checked alone.
const ROW_GROUPS_OF_THREAD: usize = 8;

/// How a dataset is verified.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOptions {
    /// Threads, each of which reads a file or a row group at a time.
    pub threads: usize,
    /// The number of the snapshot; the newest one if `None`.
    pub snapshot: Option<u64>,
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
    /// Partitions whose samples could all be read, and were compared with the digest taken when they were written.
    pub digests: usize,
    /// The digest of the samples that were read, which does not depend on their order; `None` if some could not be
    /// read.
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
/// storage does not give a file, or another one takes its place meanwhile, [`Error::Io`] if threads cannot be started.
pub fn verify(location: &Path, options: &VerifyOptions, reporter: &dyn Reporter) -> Result<Verification> {
    let started = Instant::now();
    let storage = Storage::open(location)?;
    let snapshot = Snapshot::load_from(&storage, options.snapshot)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.max(1)).build();
    let pool = pool.map_err(|error| Error::Io(std::io::Error::other(error)))?;
    let mut found = Found::default();
    let mut expected = Expected::new(&storage, &snapshot)?;
    let work = Work { storage: &storage, snapshot: &snapshot, pool: &pool, reporter };
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

/// The row groups of a bucket of a partition.
#[derive(Debug, Clone, Copy)]
struct Bucket<'a> {
    partition: &'a Partition,
    sets: &'a [FileSet],
}

impl Bucket<'_> {
    fn row_groups(&self) -> usize {
        self.sets.iter().map(|set| set.row_groups.len()).sum()
    }
}

/// A row group to check, and its files, if they could be opened.
type Place<'a> = (&'a FileSet, Option<&'a OpenFiles>, usize);

/// State that the checks of all buckets share.
struct Work<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    pool: &'a rayon::ThreadPool,
    reporter: &'a dyn Reporter,
}

impl<'a> Work<'a> {
    /// Checks all buckets, some at a time.
    fn check_partitions(&self, expected: &mut Expected, found: &mut Found<'a>) -> Result<()> {
        let (snapshot, reporter) = (self.snapshot, self.reporter);
        let of_partition =
            |partition: &'a Partition| partition.buckets().map(move |sets| Bucket { partition, sets });
        let buckets: Vec<Bucket<'a>> = snapshot.partitions.iter().flat_map(of_partition).collect();
        let most = ROW_GROUPS_OF_THREAD * self.pool.current_num_threads();
        reporter.begin("verifying", Some(snapshot.statistics.samples), "samples");
        let mut rest = &buckets[..];
        let mut checked = Ok(());
        while !rest.is_empty() && checked.is_ok() {
            let mut row_groups = 0;
            let fits = rest.iter().take_while(|bucket| {
                row_groups += bucket.row_groups();
                row_groups <= most
            });
            let (together, others) = rest.split_at(fits.count().max(1));
            rest = others;
            checked = self.check_buckets(together, expected, found);
        }
        reporter.end();
        checked
    }

    /// Reads all row groups of some buckets, and checks what they are together.
    fn check_buckets(
        &self,
        buckets: &[Bucket<'a>],
        expected: &mut Expected,
        found: &mut Found<'a>,
    ) -> Result<()> {
        let Self { storage, snapshot, pool, reporter } = *self;
        let columns = snapshot.file_columns();
        let sets: Vec<&FileSet> = buckets.iter().flat_map(|bucket| bucket.sets).collect();
        let open = |set: &&FileSet| -> Result<OpenFiles> {
            let open = OpenFiles::open(storage, set)?;
            open.check_columns(&columns)?;
            Ok(open)
        };
        // The first error of the storage ends the work.
        let opened: Result<Vec<Result<OpenFiles, Problem>>> =
            pool.install(|| sets.par_iter().map(|set| problem_of(open(set))).collect());
        let opened = opened?;
        let mut statistics = Vec::new();
        for set in &sets {
            statistics.extend(expected.of(set)?);
        }
        let places = sets.iter().zip(&opened).flat_map(|(set, file)| {
            (0..set.row_groups.len()).map(move |index| (*set, file.as_ref().ok(), index))
        });
        let places: Vec<Place> = places.collect();
        let check = |(place, statistics): (&Place, &RowGroupStatistics)| {
            let (set, files, index) = *place;
            let Some(files) = files else { return Ok(CheckedRowGroup::default()) };
            let described = &set.row_groups[index];
            let checked = RowGroupCheck { snapshot, files, index, described, statistics }.run()?;
            reporter.advance(described.samples);
            reporter.go_on()?;
            Ok(checked)
        };
        let checked: Result<Vec<CheckedRowGroup>> =
            pool.install(|| places.par_iter().zip(&statistics).map(check).collect());
        let mut checked = checked?.into_iter();
        let mut opened = opened.iter();
        for bucket in buckets {
            let mut order = OrderCheck::new(snapshot.order);
            let mut whole = true;
            for (set, file) in bucket.sets.iter().zip(&mut opened) {
                found.add(file.as_ref().err().cloned());
                for (index, checked) in checked.by_ref().take(set.row_groups.len()).enumerate() {
                    whole &= checked.counted;
                    found.digest.merge(checked.digest);
                    found.add(checked.problems);
                    found.add(order.next(set.path(), index, checked.span));
                }
            }
            if !whole {
                found.unread.insert(&bucket.partition.key);
            }
            end_bucket(bucket, &order, whole, found);
        }
        Ok(())
    }
}

/// Checks what the row groups of a bucket are together; their sessions only if all of them were read.
fn end_bucket(bucket: &Bucket, order: &OrderCheck, whole: bool, found: &mut Found) {
    found.row_groups_inside_sessions += order.row_groups_inside_sessions();
    found.add(order.small_row_groups());
    let (sessions, split) = order.sessions();
    let problem =
        |message: String| Problem::new(partition_path(bucket.partition), message).in_column(SESSION_COLUMN);
    found.add(split.map(|session| problem(format!("the samples of session {session} are not contiguous"))));
    let expected: u64 = bucket.sets.iter().map(FileSet::sessions).sum();
    if whole && sessions != expected {
        let number = bucket.sets.first().map_or(0, |set| set.bucket);
        found
            .add([problem(format!("bucket {number} has {sessions} sessions, the snapshot says {expected}"))]);
    }
}

/// How a partition is named in problems.
fn partition_path(partition: &Partition) -> String {
    match partition.key.to_string() {
        key if key.is_empty() => DATA.to_owned(),
        key => key,
    }
}
