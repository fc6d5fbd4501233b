//! `shard`: splits an arriving log by the hash of its keys into segments.
//!
//! ```text
//! log files, in arrival order ─▶ hash of the key columns ─▶ segment-00000-of-00016.parquet, …
//!          log                          route                   segment
//! ```
//!
//! All rows of a key come into one segment, in the order in which they arrived, with all their columns as they are. The
//! samples of a session, which arrive scattered, are then N times closer to each other, so that a segment compresses
//! better than the log, and each segment can be clustered by itself. The hash is the one that divides the sessions of a
//! dataset into buckets ([`onefold_datasets::bucket_of_identity`]): segment i of N has the sessions of bucket i of N.
//!
//! Memory: rows wait, decoded, until half of the limit is used; then the largest segments write a row group each. Every
//! row is digested on the way in, and once more when all segments are written and read again; only if both digests are
//! the same do the segments appear, by one rename.

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

/// The version of [`SEGMENTS_FILE`] that this code writes.
const FORMAT_VERSION: u32 = 1;

/// The result of [`shard`].
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShardSummary {
    /// Rows of the log, and of all segments together.
    pub(crate) rows: u64,
    /// Files of the log.
    pub(crate) log_files: usize,
    /// Segments written.
    pub(crate) segments: usize,
    /// Rows with a null in a key column; they are in one segment.
    pub(crate) null_key_rows: u64,
    /// Rows of the largest segment.
    pub(crate) largest_segment_rows: u64,
    /// Rows of the smallest segment.
    pub(crate) smallest_segment_rows: u64,
    /// Size of the log's files.
    pub(crate) log_bytes: u64,
    /// Size of the segments.
    pub(crate) bytes_on_disk: u64,
    /// `log_bytes / bytes_on_disk`: how many times smaller the segments are than the log.
    pub(crate) compression_gain: f64,
    /// Time from start to commit.
    pub(crate) wall_seconds: f64,
    /// `rows / wall_seconds`.
    pub(crate) rows_per_second: f64,
    /// Largest resident set of the process, if the kernel tells it.
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

/// Splits the log of the files that `patterns` match (files, folders of Parquet files, globs; in this order, each in
/// the order of its names) into segments in the directory `out`, which appears whole or not at all. `name=value`
/// folders of the paths become text columns.
///
/// # Errors
///
/// [`Error::Dataset`] around the [error](onefold_datasets::Error) that names the file: a pattern that matches none, a
/// file that cannot be read or has other columns than the first one, a key column that is missing or neither integer
/// nor text, segments that cannot be written or do not hold what was read, and a place at `out` that is occupied.
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

/// The rows that went into the segments.
#[derive(Debug, Default)]
struct Split {
    rows: u64,
    null_key_rows: u64,
    digest: Digest,
}

/// Reads the log on a thread of its own, and appends every row to its segment.
fn split(
    log: &Log,
    router: &Router,
    segments: &mut Segments,
    pool: &rayon::ThreadPool,
    reporter: &dyn Reporter,
) -> Result<Split> {
    reporter.begin("sharding", Some(log.rows), "rows");
    let digester = RowDigester::new(&log.schema)?;
    // One batch waits while the next is read and the last is split.
    let (sender, batches) = sync_channel(1);
    let split = std::thread::scope(|scope| {
        // The reader sends batches and errors. It ends when the receiver has ended because of an error.
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

/// Reads the segments again, and checks that they hold the rows that went into them and that each row is where its key
/// belongs.
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
