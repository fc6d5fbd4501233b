//! Reads a whole dataset again, and tells what is not as the snapshot and the format say.
//!
//! ```text
//! files       are there, with their size and SHA-256; rows, row groups and columns are those of the snapshot
//! row groups  every column decodes, folded ones unfold; order within the row group; ids are in their vocabulary
//! buckets     order from row group to row group, contiguous sessions, row groups starting with sessions
//! partitions  samples, sessions, the features' statistics, and the digest of the samples
//! the whole   the totals, the vocabularies' files, and that nothing else lies in the partitions' folders
//! ```
//!
//! What is found does not stop the search, but a file whose bytes are not those that were written is not decoded, and
//! what depends on a row group that cannot be read is not compared. Row groups are read in parallel, one column at a
//! time: each thread holds one decoded column and 16 bytes a sample. A bucket takes 8 bytes a session, 16 in arrival
//! order.

mod against;
mod files;
mod order;
mod row_group;
#[cfg(test)]
mod tests;
mod totals;

use std::path::Path;
use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_storage::Storage;
use rayon::prelude::*;
use serde::Serialize;

pub use self::against::ExpectedSamples;
use self::files::{check_bytes, unnamed_files, vocabulary_problems};
use self::order::OrderCheck;
use self::row_group::{CheckedRowGroup, RowGroupCheck};
use self::totals::{PartitionTotals, snapshot_problems};
use crate::digest::Digest;
use crate::names::DATA;
use crate::scan::OpenFile;
use crate::{DataFile, Error, Partition, Problem, Result, SESSION_COLUMN, Snapshot};

/// As many problems are told with their places; all are counted.
pub const MOST_PROBLEMS: usize = 100;

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
    let mut found = Found { problems: snapshot_problems(&snapshot), ..Found::default() };
    pool.install(|| {
        let files = open_files(&storage, &snapshot, reporter, &mut found)?;
        check_partitions(&snapshot, &files, reporter, &mut found)
    })?;
    found.problems.extend(vocabulary_problems(&storage, &snapshot)?);
    let problems_found = found.problems.len();
    found.problems.truncate(MOST_PROBLEMS);
    let mut warnings = unnamed_files(&storage, &snapshot)?;
    warnings.truncate(MOST_PROBLEMS);
    Ok(Verification {
        snapshot: snapshot.snapshot,
        partitions: snapshot.partitions.len(),
        files: data_files(&snapshot).count(),
        row_groups: data_files(&snapshot)
            .fold(0, |sum, (_, file)| sum.saturating_add(file.row_groups.len() as u64)),
        samples: snapshot.statistics.samples,
        sessions: snapshot.statistics.sessions,
        bytes_on_disk: snapshot.statistics.bytes_on_disk,
        digests: found.digests,
        digest: found.digest,
        row_groups_inside_sessions: found.row_groups_inside_sessions,
        problems_found,
        problems: found.problems,
        warnings,
        wall_seconds: started.elapsed().as_secs_f64(),
    })
}

/// What was found so far.
#[derive(Debug, Default)]
struct Found {
    problems: Vec<Problem>,
    digests: usize,
    digest: Option<Digest>,
    row_groups_inside_sessions: u64,
}

/// Separates a problem of the data from an error that says nothing of it.
fn problem_of<T>(read: Result<T>) -> Result<Result<T, Problem>> {
    match read {
        Ok(read) => Ok(Ok(read)),
        Err(Error::Damaged(problem)) => Ok(Err(*problem)),
        Err(error) => Err(error),
    }
}

/// All data files with their partition's number.
fn data_files(snapshot: &Snapshot) -> impl Iterator<Item = (usize, &DataFile)> {
    let partitions = snapshot.partitions.iter().enumerate();
    partitions.flat_map(|(number, partition)| partition.files.iter().map(move |file| (number, file)))
}

/// The files whose bytes and footers are as the snapshot says, in its order; the others are problems.
fn open_files(
    storage: &Storage,
    snapshot: &Snapshot,
    reporter: &dyn Reporter,
    found: &mut Found,
) -> Result<Vec<Option<OpenFile>>> {
    let columns = snapshot.file_columns();
    let files: Vec<&DataFile> = data_files(snapshot).map(|(_, file)| file).collect();
    reporter.begin("checksums", Some(snapshot.statistics.bytes_on_disk), "bytes");
    let open = |file: &DataFile| -> Result<OpenFile> {
        let found = check_bytes(storage, &file.path, file.bytes_on_disk, &file.sha256, reporter)?;
        let open = OpenFile::open_object(storage, file, found)?;
        open.check_columns(&columns)?;
        Ok(open)
    };
    // The first error of the storage ends the work.
    let opened: Result<Vec<Result<OpenFile, Problem>>> =
        files.par_iter().map(|file| problem_of(open(file))).collect();
    reporter.end();
    let keep = |file: Result<OpenFile, Problem>| file.map_err(|problem| found.problems.push(problem)).ok();
    Ok(opened?.into_iter().map(keep).collect())
}

/// Reads all row groups of `files`, which stand as in the snapshot, and checks what they are together.
fn check_partitions(
    snapshot: &Snapshot,
    files: &[Option<OpenFile>],
    reporter: &dyn Reporter,
    found: &mut Found,
) -> Result<()> {
    let totals: Vec<PartitionTotals> =
        snapshot.partitions.iter().map(|_| PartitionTotals::new(snapshot)).collect();
    // A file that is not read has its place too: the order is not followed across it, and its partition is not whole.
    let places = data_files(snapshot).zip(files).flat_map(|((partition, named), file)| {
        let row_groups = file.as_ref().map_or(1, OpenFile::row_groups);
        (0..row_groups).map(move |index| (partition, named, file.as_ref(), index))
    });
    let places: Vec<(usize, &DataFile, Option<&OpenFile>, usize)> = places.collect();
    reporter.begin("verifying", Some(snapshot.statistics.samples), "samples");
    let check = |&(partition, named, file, index): &(usize, &DataFile, Option<&OpenFile>, usize)| {
        let Some(file) = file else { return Ok(None) };
        let checked = RowGroupCheck { snapshot, file, named, index, totals: &totals[partition] }.run()?;
        reporter.advance(file.rows(index).unwrap_or(0) as u64);
        reporter.go_on()?;
        Ok(Some(checked))
    };
    let checked: Result<Vec<Option<CheckedRowGroup>>> = places.par_iter().map(check).collect();
    reporter.end();
    let mut whole = vec![true; snapshot.partitions.len()];
    let mut checked = places.iter().zip(checked?).peekable();
    for (number, (partition, totals)) in snapshot.partitions.iter().zip(&totals).enumerate() {
        let mut sessions = 0;
        let mut of_bucket: Option<(u32, OrderCheck)> = None;
        while let Some(((_, named, file, index), checked)) = checked.next_if(|((of, ..), _)| *of == number) {
            if of_bucket.as_ref().is_none_or(|(last, _)| *last != named.bucket) {
                sessions += of_bucket.map_or(0, |(_, order)| end_bucket(partition, &order, found));
                of_bucket = Some((named.bucket, OrderCheck::new(snapshot.order)));
            }
            let checked = checked.unwrap_or_default();
            let path = file.map_or("", |file| &file.path);
            whole[number] &= checked.counted;
            found.problems.extend(checked.problems);
            if let Some((_, order)) = &mut of_bucket {
                found.problems.extend(order.next(path, *index, checked.span));
            }
        }
        sessions += of_bucket.map_or(0, |(_, order)| end_bucket(partition, &order, found));
        if whole[number] {
            found.problems.extend(totals.problems(snapshot, partition, sessions));
            found.digests += 1;
        }
    }
    if whole.iter().all(|whole| *whole) {
        let mut all = Digest::default();
        totals.iter().for_each(|totals| all.merge(totals.digest()));
        found.digest = Some(all);
    }
    Ok(())
}

/// Checks what the row groups of a bucket are together; gives the number of its sessions.
fn end_bucket(partition: &Partition, order: &OrderCheck, found: &mut Found) -> u64 {
    found.row_groups_inside_sessions += order.row_groups_inside_sessions();
    found.problems.extend(order.small_row_groups());
    let (sessions, split) = order.sessions();
    found.problems.extend(split.map(|session| {
        let message = format!("the samples of session {session} are not contiguous");
        Problem::new(partition_path(partition), message).in_column(SESSION_COLUMN)
    }));
    sessions
}

/// How a partition is named in problems.
fn partition_path(partition: &Partition) -> String {
    match partition.key.to_string() {
        key if key.is_empty() => DATA.to_owned(),
        key => key,
    }
}
