//! `shard`: splits an arriving log by the hash of its keys into segments.
//!
//! ```text
//! log files, in arrival order ─▶ hash of the key columns ─▶ segment-00000-of-00016.parquet, …
//!          log                          route                   segment
//! ```
//!
//! All rows with the same key go to one segment, in the order in which they arrived, with unchanged columns. With N
//! segments, the samples of a session are N times closer to each other than in the log. A segment therefore compresses
//! better than the log, and each segment can be clustered separately. The hash is the one that divides the sessions of
//! a dataset into buckets ([`onefold_datasets::bucket_of_identity`]): segment i of N has the sessions of bucket i of N.
//!
//! Decoded rows are buffered until they take half of the memory limit; then each of the largest segments writes a row
//! group. All rows are digested when they are read from the log, and again when the finished segments are read back. If
//! both digests are equal, one rename makes the segments visible.

mod log;
mod route;
mod segment;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use arrow::array::RecordBatch;
use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_datasets::digest::Digest;
use onefold_storage::commit::{self, StagedDirectory};
use rayon::prelude::*;
use serde::Serialize;

use self::log::Log;
use self::route::Router;
pub(crate) use self::segment::ShardOptions;
use self::segment::{SegmentFile, Segments};
use crate::row_digest::RowDigester;
use crate::sources::SEGMENTS_FILE;
use crate::{Error, Result};

/// The version of [`SEGMENTS_FILE`] that this program writes.
const FORMAT_VERSION: u32 = 1;

/// The result of [`shard`].
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShardSummary {
    /// The number of rows of the log, which is also the number of rows of all segments.
    pub(crate) rows: u64,
    /// The number of files of the log.
    pub(crate) log_files: usize,
    /// The number of segments.
    pub(crate) segments: usize,
    /// The number of rows with a null in a key column; they are all in one segment.
    pub(crate) null_key_rows: u64,
    /// The number of rows of the largest segment.
    pub(crate) largest_segment_rows: u64,
    /// The number of rows of the smallest segment.
    pub(crate) smallest_segment_rows: u64,
    /// The total size of the log's files, in bytes.
    pub(crate) log_bytes: u64,
    /// The total size of the segments, in bytes.
    pub(crate) bytes_on_disk: u64,
    /// `log_bytes / bytes_on_disk`: the factor by which the segments are smaller than the log.
    pub(crate) compression_gain: f64,
    /// The time from the start to the commit, in seconds.
    pub(crate) wall_seconds: f64,
    /// `rows / wall_seconds`.
    pub(crate) rows_per_second: f64,
    /// The largest resident set of the process, in bytes, if the kernel reports it.
    pub(crate) peak_rss_bytes: Option<u64>,
}

/// The contents of [`SEGMENTS_FILE`].
#[derive(Debug, Serialize)]
struct SegmentList<'a> {
    format_version: u32,
    by: &'a [String],
    rows: u64,
    digest: Digest,
    segments: &'a [SegmentFile],
}

/// Splits a log into segments in the directory `out`, which becomes visible as a whole or not at all. The log consists
/// of the files that `patterns` match (files, folders of Parquet files, globs), in the order of the patterns and then
/// of the file names. `name=value` folders of the paths become text columns.
///
/// # Errors
///
/// [`Error::Dataset`] with an [error](onefold_datasets::Error) that names the file: a pattern that matches no file, a
/// file that cannot be read or has other columns than the first one, a key column that is missing or has another type
/// than integer or text, segments that cannot be written or differ from the rows that were read, and a location `out`
/// that is occupied.
pub(crate) fn shard(
    patterns: &[PathBuf],
    out: &Path,
    options: &ShardOptions,
    reporter: &dyn Reporter,
) -> Result<ShardSummary> {
    let started = Instant::now();
    let log = Log::find(patterns)?;
    let router = Router::new(&log, &options.by, options.segments)?;
    let staged = StagedDirectory::create(out, SEGMENTS_FILE, options.overwrite)?;
    let threads = options.threads.max(1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(std::io::Error::other)?;
    let mut segments = Segments::create(staged.path(), &log, options)?;
    let split = split(&log, &router, &mut segments, &pool, reporter)?;
    let files = pool.install(|| segments.finish())?;
    reporter.begin("verifying", Some(split.rows), "rows");
    pool.install(|| verify(staged.path(), &files, &split, &router, reporter))?;
    reporter.end();
    let list = SegmentList {
        format_version: FORMAT_VERSION,
        by: &options.by,
        rows: split.rows,
        digest: split.digest,
        segments: &files,
    };
    let mut text = serde_json::to_string_pretty(&list).map_err(std::io::Error::other)?;
    text.push('\n');
    commit::write_atomically(&staged.path().join(SEGMENTS_FILE), text.as_bytes())?;
    staged.commit()?;

    let bytes_on_disk: u64 = files.iter().map(|file| file.bytes_on_disk).sum();
    let rows = files.iter().map(|file| file.rows);
    let wall_seconds = started.elapsed().as_secs_f64();
    Ok(ShardSummary {
        rows: split.rows,
        log_files: log.files.len(),
        segments: files.len(),
        null_key_rows: split.null_key_rows,
        largest_segment_rows: rows.clone().max().unwrap_or(0),
        smallest_segment_rows: rows.min().unwrap_or(0),
        log_bytes: log.bytes,
        bytes_on_disk,
        compression_gain: log.bytes as f64 / bytes_on_disk.max(1) as f64,
        wall_seconds,
        rows_per_second: split.rows as f64 / wall_seconds,
        peak_rss_bytes: peak_rss_bytes(),
    })
}

/// The rows that were written to the segments.
#[derive(Debug, Default)]
struct Split {
    rows: u64,
    null_key_rows: u64,
    digest: Digest,
}

/// Reads the log on a separate thread, and appends each row to its segment.
fn split(
    log: &Log,
    router: &Router,
    segments: &mut Segments,
    pool: &rayon::ThreadPool,
    reporter: &dyn Reporter,
) -> Result<Split> {
    reporter.begin("sharding", Some(log.rows), "rows");
    let digester = RowDigester::new(&log.schema)?;
    // One batch is buffered while the next one is read and the previous one is split.
    let (sender, batches) = sync_channel(1);
    let split = std::thread::scope(|scope| {
        // The thread sends batches or an error. It ends when the receiver has ended because of an error.
        scope.spawn(move || log.read(|batch| sender.send(batch).is_ok()));
        let digester = &digester;
        pool.install(move || split_batches(batches, router, digester, segments, reporter))
    })?;
    reporter.end();
    if split.rows != log.rows {
        return Err(log::wrong(
            &log.files[0].path,
            format!("{} of the log's {} rows could be read", split.rows, log.rows),
            "a file of the log was changed while it was read; run this again",
        ));
    }
    Ok(split)
}

fn split_batches(
    batches: Receiver<Result<RecordBatch>>,
    router: &Router,
    digester: &RowDigester,
    segments: &mut Segments,
    reporter: &dyn Reporter,
) -> Result<Split> {
    let mut split = Split::default();
    for batch in batches {
        let batch = batch?;
        let routes = router.route(&batch)?;
        split.rows += batch.num_rows() as u64;
        split.null_key_rows += routes.null_key_rows;
        split.digest.merge(digester.digest(&batch)?);
        segments.append(&batch, &routes.rows_by_segment)?;
        reporter.advance(batch.num_rows() as u64);
        reporter.go_on()?;
    }
    Ok(split)
}

/// Reads the segments back, and checks that they contain the rows of the log and that each row is in the segment of its
/// key.
fn verify(
    directory: &Path,
    files: &[SegmentFile],
    split: &Split,
    router: &Router,
    reporter: &dyn Reporter,
) -> Result<()> {
    let verified: Vec<(u64, Digest)> = files
        .par_iter()
        .enumerate()
        .map(|(number, file)| {
            let log = Log::open(vec![directory.join(&file.path)])?;
            let digester = RowDigester::new(&log.schema)?;
            let mut found = (0, Digest::default());
            let mut error = None;
            log.read(|batch| {
                let checked = batch.and_then(|batch| {
                    found.0 += batch.num_rows() as u64;
                    found.1.merge(digester.digest(&batch)?);
                    reporter.advance(batch.num_rows() as u64);
                    reporter.go_on()?;
                    Ok(router.route(&batch)?.rows_by_segment[number].len() == batch.num_rows())
                });
                match checked {
                    Ok(true) => return true,
                    Ok(false) => error = Some(damaged(&log.files[0].path)),
                    Err(wrong) => error = Some(wrong),
                }
                false
            });
            error.map_or(Ok(found), Err)
        })
        .collect::<Result<_>>()?;
    let mut whole = (0, Digest::default());
    for (rows, digest) in verified {
        whole.0 += rows;
        whole.1.merge(digest);
    }
    if whole == (split.rows, split.digest) { Ok(()) } else { Err(damaged(directory)) }
}

fn damaged(path: &Path) -> Error {
    log::wrong(
        path,
        "what was written is not what was read from the log".to_owned(),
        "check the disk and the memory of this machine, then run this again; nothing was replaced",
    )
}

#[cfg(test)]
mod tests;
