//! Rewrites files of a dataset with all or only some of their samples. [`forget`](crate::forget) and
//! [`compact`](crate::compact) use it.
//!
//! ```text
//! files of a range before     a  b  c  d        b and c are chosen
//! files of a range after      a  b' d           b' has the kept samples of b and c
//! ```
//!
//! Files that are not chosen do not change. Row groups are read one at a time, so memory holds only the row
//! groups being read and written.

use onefold_base::fault::{Fault, Kind};
use onefold_base::progress::Reporter;
use onefold_storage::Storage;

use crate::digest::Digest;
use crate::scan::OpenFiles;
use crate::schema::with_sample_keys;
use crate::snapshot::{newest_number, not_a_dataset};
use crate::writer::{SampleWriter, session_ids};
use crate::{
    Commit, DatasetWriter, FileSet, Order, PartitionKey, Result, RowGroup, Snapshot, WriterOptions,
    WrittenBucket, thread_pool,
};

/// The options for rewriting files. The new files have the form that they would have in a new dataset with
/// the same options.
#[derive(Debug, Clone, Copy)]
pub struct RewriteOptions {
    /// The number of threads that decode and encode.
    pub threads: usize,
    /// The target size of a row group, as in [`WriterOptions::row_group_bytes`].
    pub row_group_bytes: usize,
    /// The target size of a file, as in [`WriterOptions::file_bytes`].
    pub file_bytes: usize,
}

impl RewriteOptions {
    /// Creates options with `threads` threads and the default sizes of row groups and files.
    pub fn new(threads: usize) -> Self {
        let WriterOptions { row_group_bytes, file_bytes, .. } = WriterOptions::new(Order::Session);
        Self { threads, row_group_bytes, file_bytes }
    }
}

/// Starts a writer for a commit of this kind, and loads the snapshot to which it applies.
pub(crate) fn start(
    storage: &Storage,
    kind: Commit,
    how: &RewriteOptions,
) -> Result<(DatasetWriter, Snapshot)> {
    let newest = || newest_number(storage)?.ok_or_else(|| not_a_dataset(storage));
    let mut number = newest()?;
    loop {
        let started = start_at(storage, number, kind, how);
        // Another writer may have committed in the meantime, or even purged the snapshot. In this case, try again.
        match newest()? {
            now if now == number => return started,
            now => number = now,
        }
    }
}

/// Works like [`start`] for snapshot `number`, which must be the newest one.
fn start_at(
    storage: &Storage,
    number: u64,
    kind: Commit,
    how: &RewriteOptions,
) -> Result<(DatasetWriter, Snapshot)> {
    let snapshot = Snapshot::load_from(storage, Some(number))?;
    let options = WriterOptions {
        layout: snapshot.layout,
        commit: kind,
        sample_keys: snapshot.sample_keys,
        buckets: snapshot.division(),
        sessions: snapshot.sessions.clone(),
        threads: how.threads,
        column_order: column_order(&snapshot),
        row_group_bytes: how.row_group_bytes,
        file_bytes: how.file_bytes,
        ..WriterOptions::new(snapshot.order)
    };
    let writer = DatasetWriter::create_in(storage.clone(), snapshot.schema.clone(), options)?;
    Ok((writer, snapshot))
}

/// Returns the column order of the dataset: the columns of the first file, or nothing if they are in schema
/// order.
fn column_order(snapshot: &Snapshot) -> Vec<String> {
    let mut sets = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let Some(set) = sets.next() else { return Vec::new() };
    let columns = with_sample_keys(snapshot.schema.to_arrow(), snapshot.sample_keys);
    let names = set.files.iter().take(1).flat_map(|file| file.columns.iter());
    let names: Vec<&str> = names.filter_map(|name| set.changes.in_schema(name)).collect();
    let places = names.into_iter().filter_map(|name| Some((columns.index_of(name).ok()?, name)));
    let (places, names): (Vec<usize>, Vec<&str>) = places.unzip();
    if places.is_sorted() { Vec::new() } else { names.into_iter().map(str::to_owned).collect() }
}

/// Rewrites files of a snapshot.
pub(crate) struct Rewriter<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    /// The writer that commits the ranges with rewritten files.
    pub(crate) writer: DatasetWriter,
    pool: rayon::ThreadPool,
    reporter: &'a dyn Reporter,
}

impl<'a> Rewriter<'a> {
    /// Creates a rewriter of files of `snapshot`. `writer` must have been [started](start) for this
    /// snapshot.
    pub(crate) fn new(
        storage: &'a Storage,
        snapshot: &'a Snapshot,
        writer: DatasetWriter,
        threads: usize,
        reporter: &'a dyn Reporter,
    ) -> Result<Self> {
        Ok(Self { storage, snapshot, writer, pool: thread_pool(threads)?, reporter })
    }

    /// Rewrites the `chosen` sets of a range with the samples of the sessions for which `is_kept` returns
    /// `true`. New files lack the features that the old ones lack, because their values may still be computed. The
    /// new files are removed if the writer is dropped before [`finish`](DatasetWriter::finish).
    pub(crate) fn rewrite(
        &mut self,
        key: &PartitionKey,
        sets: &[FileSet],
        chosen: &[bool],
        is_kept: &dyn Fn(i64) -> bool,
    ) -> Result<WrittenBucket> {
        let range = sets.first().map_or(0, |set| self.snapshot.division().range_of(set.bucket));
        let mut written = WrittenBucket::empty(key.clone(), range);
        let mut output: Option<(SampleWriter, &[String])> = None;
        for (set, chosen) in sets.iter().zip(chosen) {
            let lacks = &set.changes.lacks[..];
            if output.as_ref().is_some_and(|(_, lacking)| !*chosen || *lacking != lacks) {
                self.end(output.take(), &mut written)?;
            }
            if *chosen {
                let begin = || (self.writer.some_of_range(key, range, lacks), lacks);
                self.copy(set, is_kept, &mut output.get_or_insert_with(begin).0)?;
            }
        }
        self.end(output, &mut written)?;
        Ok(written)
    }

    /// Completes new files, and adds them to `written`.
    fn end(&mut self, output: Option<(SampleWriter, &[String])>, written: &mut WrittenBucket) -> Result<()> {
        let Some((output, _)) = output else { return Ok(()) };
        let new = output.finish()?;
        self.writer.owns(&new);
        written.files.extend(new.files);
        written.statistics.extend(new.statistics);
        Ok(())
    }

    /// Appends the samples of a set that belong to kept sessions.
    fn copy(&self, set: &FileSet, is_kept: &dyn Fn(i64) -> bool, output: &mut SampleWriter) -> Result<()> {
        let Self { storage, snapshot, .. } = self;
        let files = OpenFiles::open(storage, snapshot, set)?;
        files.check_columns(&snapshot.columns_of(set))?;
        let how = (&snapshot.schema, snapshot.layout, snapshot.sample_keys);
        for row_group in 0..files.row_groups() {
            let samples = self.pool.install(|| files.samples(row_group, how, None))?;
            let sessions = session_ids(&samples);
            let mut start = 0;
            for run in sessions.chunk_by(|a, b| is_kept(*a) == is_kept(*b)) {
                if is_kept(run[0]) {
                    output.append(&samples.slice(start, run.len()))?;
                }
                start += run.len();
            }
            self.reporter.advance(sessions.len() as u64);
            self.reporter.go_on()?;
        }
        Ok(())
    }

    /// Removes the new files of a range that was [rewritten](Self::rewrite) completely and is not going to
    /// be [added](DatasetWriter::add_rewritten).
    pub(crate) fn discard(&self, range: &WrittenBucket) {
        self.storage.clean_up(range.paths().map(str::to_owned).collect());
    }
}

/// Chooses all sets of a range if some are chosen and cannot be rewritten separately. This is the case if a
/// session spans several row groups, or if the samples of a session are not contiguous.
pub(crate) fn choose_whole_runs(snapshot: &Snapshot, sets: &[FileSet], chosen: &mut [bool]) {
    let row_groups: Vec<&RowGroup> = sets.iter().flat_map(|set| &set.row_groups).collect();
    let goes_on = |pair: &[&RowGroup]| pair[0].last_session == pair[1].first_session;
    let is_one_run = !snapshot.order.is_clustered() || row_groups.windows(2).any(goes_on);
    if chosen.contains(&true) && is_one_run {
        chosen.fill(true);
    }
}

/// Returns the chosen sets.
pub(crate) fn of_chosen<'s>(sets: &'s [FileSet], chosen: &[bool]) -> impl Iterator<Item = &'s FileSet> {
    sets.iter().zip(chosen).filter(|(_, chosen)| **chosen).map(|(set, _)| set)
}

/// Checks that `written` has all samples of the chosen sets except `removed` samples. If `removed` is 0, it
/// also compares digests.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the samples differ, which is a bug.
pub(crate) fn check_samples(
    sets: &[FileSet],
    chosen: &[bool],
    written: &WrittenBucket,
    removed: u64,
) -> Result<()> {
    let (mut before, mut digest, mut is_digested) = (0, Digest::default(), true);
    for set in of_chosen(sets, chosen) {
        before += set.samples;
        set.row_groups.iter().for_each(|row_group| digest.merge(row_group.digest));
        // Otherwise the recorded digest covers other columns.
        is_digested &= set.changes.are_digested();
    }
    let same_samples = removed > 0 || !is_digested || digest == written.digest();
    if before == written.samples() + removed && same_samples {
        return Ok(());
    }
    let left = written.samples();
    let message = format!("of {before} samples {removed} were to be removed, but {left} are left, or others");
    let hint = "nothing was committed; run `onefold-ingest verify`, and report this if that finds nothing";
    Err(Fault::new(Kind::Failed, message).hint(hint).into())
}

/// Returns the number of files of sets, and their size in bytes.
pub(crate) fn files_of<'s>(sets: impl IntoIterator<Item = &'s FileSet>) -> (u64, u64) {
    sets.into_iter()
        .fold((0, 0), |(files, bytes), set| (files + set.files.len() as u64, bytes + set.bytes_on_disk()))
}

#[cfg(test)]
pub(crate) mod tests;
