//! Reads a whole dataset again, and tells what is not as the manifest and the format say.
//!
//! ```text
//! files       are there, with their size and SHA-256; rows, row groups and columns are those of the manifest
//! row groups  every column decodes, folded ones unfold; order within the row group; ids are in their vocabulary
//! partitions  order from row group to row group, sessions numbered from 0 without a gap, row groups starting with
//!             sessions; samples, sessions, the features' statistics, and the digest of the samples
//! the whole   the totals, the vocabularies' files, and that nothing else lies in the partitions' folders
//! ```
//!
//! What is found does not stop the search, but a file whose bytes are not those that were written is not decoded, and
//! what depends on a row group that cannot be read is not compared. Row groups are read in parallel, one column at a
//! time: each thread holds one decoded column and 16 bytes a sample. A partition in arrival order takes a bit a session.

mod against;
mod files;
mod order;
mod row_group;
#[cfg(test)]
mod tests;
mod totals;

use std::path::Path;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

pub use self::against::ExpectedSamples;
use self::files::{check_bytes, unnamed_files, vocabulary_problems};
use self::order::OrderCheck;
use self::row_group::{CheckedRowGroup, RowGroupCheck};
use self::totals::{PartitionTotals, feature_sums, manifest_problems, total_problems};
use crate::progress::Reporter;
use crate::scan::OpenFile;
use crate::{DataFile, Error, MANIFEST_FILE, Manifest, Partition, Problem, Result};

/// As many problems are told with their places; all are counted.
pub const MOST_PROBLEMS: usize = 100;

/// How a dataset is verified.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOptions {
    /// Threads, each of which reads a file or a row group at a time.
    pub threads: usize,
}

/// What verifying found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verification {
    /// Partitions in the manifest.
    pub partitions: usize,
    /// Data files in the manifest.
    pub files: usize,
    /// Row groups in the manifest.
    pub row_groups: u64,
    /// Samples in the manifest.
    pub samples: u64,
    /// Sessions in the manifest.
    pub sessions: u64,
    /// Size of all data files in the manifest.
    pub bytes_on_disk: u64,
    /// Partitions whose samples were compared with the digest taken when they were written; format versions before 3
    /// have none.
    pub digests: usize,
    /// Row groups that begin inside a session, because the session does not fit into one.
    pub row_groups_inside_sessions: u64,
    /// How many problems were found; a kind of problem counts once in a row group.
    pub problems_found: usize,
    /// The first [`MOST_PROBLEMS`] of them, by partition, file and row group.
    pub problems: Vec<Problem>,
    /// What is odd and does no harm: files that the manifest does not name.
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

/// Verifies the dataset in `directory`. Problems of the data are not errors of this function.
///
/// # Errors
///
/// [`Error::NotADataset`] and [`Error::Manifest`] if there is no manifest to compare with, [`Error::Io`] if the
/// directory cannot be listed or threads cannot be started.
pub fn verify(directory: &Path, options: &VerifyOptions, reporter: &dyn Reporter) -> Result<Verification> {
    let started = Instant::now();
    let manifest = Manifest::load(directory)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.max(1)).build();
    let pool = pool.map_err(|error| Error::Io(std::io::Error::other(error)))?;
    let mut found = Found { problems: manifest_problems(&manifest), ..Found::default() };
    pool.install(|| {
        let files = open_files(directory, &manifest, reporter, &mut found);
        check_partitions(&manifest, &files, reporter, &mut found);
    });
    found.problems.extend(vocabulary_problems(directory, &manifest));
    let problems_found = found.problems.len();
    found.problems.truncate(MOST_PROBLEMS);
    let mut warnings = unnamed_files(directory, &manifest)?;
    warnings.truncate(MOST_PROBLEMS);
    Ok(Verification {
        partitions: manifest.partitions.len(),
        files: data_files(&manifest).count(),
        row_groups: data_files(&manifest).fold(0, |sum, (_, file)| sum.saturating_add(file.row_groups)),
        samples: manifest.statistics.samples,
        sessions: manifest.statistics.sessions,
        bytes_on_disk: manifest.statistics.bytes_on_disk,
        digests: found.digests,
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
    row_groups_inside_sessions: u64,
}

/// All data files with their partition's number.
fn data_files(manifest: &Manifest) -> impl Iterator<Item = (usize, &DataFile)> {
    let partitions = manifest.partitions.iter().enumerate();
    partitions.flat_map(|(number, partition)| partition.files.iter().map(move |file| (number, file)))
}

/// The files whose bytes and footers are as the manifest says, in its order; the others are problems.
fn open_files(
    directory: &Path,
    manifest: &Manifest,
    reporter: &dyn Reporter,
    found: &mut Found,
) -> Vec<Option<OpenFile>> {
    let columns = manifest.layout.to_arrow(&manifest.schema);
    let files: Vec<&DataFile> = data_files(manifest).map(|(_, file)| file).collect();
    reporter.begin("checksums", Some(manifest.statistics.bytes_on_disk), "bytes");
    let open = |file: &&DataFile| {
        let bytes = check_bytes(directory, &file.path, file.bytes_on_disk, &file.sha256, reporter);
        let open = bytes.and_then(|()| OpenFile::open(directory, file))?;
        open.check_columns(&columns)?;
        Ok(open)
    };
    let opened: Vec<Result<OpenFile, Problem>> = files.par_iter().map(open).collect();
    reporter.end();
    opened.into_iter().map(|file| file.map_err(|problem| found.problems.push(problem)).ok()).collect()
}

/// Reads all row groups of `files`, which stand as in the manifest, and checks what they are together.
fn check_partitions(
    manifest: &Manifest,
    files: &[Option<OpenFile>],
    reporter: &dyn Reporter,
    found: &mut Found,
) {
    let totals: Vec<PartitionTotals> =
        manifest.partitions.iter().map(|partition| PartitionTotals::new(manifest, partition)).collect();
    // A file that is not read has its place too: what comes after it is not at the partition's start.
    let places = data_files(manifest).zip(files).flat_map(|((partition, _), file)| {
        let row_groups = file.as_ref().map_or(1, OpenFile::row_groups);
        (0..row_groups).map(move |index| (partition, file.as_ref(), index))
    });
    let places: Vec<(usize, Option<&OpenFile>, usize)> = places.collect();
    reporter.begin("verifying", Some(manifest.statistics.samples), "samples");
    let check = |&(partition, file, index): &(usize, Option<&OpenFile>, usize)| {
        let file = file?;
        let checked = RowGroupCheck { manifest, file, index, totals: &totals[partition] }.run();
        reporter.advance(file.rows(index).unwrap_or(0) as u64);
        Some(checked)
    };
    let checked: Vec<Option<CheckedRowGroup>> = places.par_iter().map(check).collect();
    reporter.end();
    let mut whole = vec![true; manifest.partitions.len()];
    let mut checked = places.iter().zip(checked).peekable();
    for (number, (partition, totals)) in manifest.partitions.iter().zip(&totals).enumerate() {
        let mut order = OrderCheck::new(manifest.order);
        while let Some(((_, file, index), checked)) = checked.next_if(|((of, ..), _)| *of == number) {
            let checked = checked.unwrap_or_default();
            let path = file.map_or("", |file| &file.path);
            whole[number] &= checked.counted;
            found.problems.extend(checked.problems);
            found.problems.extend(order.next(path, *index, checked.span));
        }
        check_partition(manifest, partition, totals, &order, whole[number], found);
    }
    // Before format version 3 there are only figures over all partitions.
    let older = manifest.partitions.iter().all(|partition| partition.features.is_empty());
    if older && whole.iter().all(|whole| *whole) {
        found.problems.extend(total_problems(manifest, &feature_sums(manifest, &totals)));
    }
}

/// What a partition's row groups are together; of what is summed only if all of them were read.
fn check_partition(
    manifest: &Manifest,
    partition: &Partition,
    totals: &PartitionTotals,
    order: &OrderCheck,
    whole: bool,
    found: &mut Found,
) {
    found.row_groups_inside_sessions += order.row_groups_inside_sessions();
    found.problems.extend(order.small_row_groups());
    if whole {
        found.problems.extend(totals.problems(manifest, partition, order.sessions()));
        found.digests += usize::from(partition.digest.is_some());
    }
}

/// How a partition is named in problems.
fn partition_path(partition: &Partition) -> String {
    match partition.key.to_string() {
        key if key.is_empty() => MANIFEST_FILE.to_owned(),
        key => key,
    }
}
