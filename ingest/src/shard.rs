//! `shard`: splits an arriving log by the hash of its keys into segments.
//!
//! ```text
//! files of the log, by name ─▶ hash of the key columns ─▶ segment-00000-of-00016.parquet, …
//!         sources                      route                  segment, output
//! ```
//!
//! All rows with the same key go to one segment, in the order in which they are in the log, with unchanged values. With
//! N segments, the samples of a session are N times closer to each other than in the log. A segment therefore
//! compresses better than the log, and each segment can be clustered separately. The hash is the one that divides the
//! sessions of a dataset into buckets ([`onefold_datasets::bucket_of_identity`]): segment i of N has the sessions of
//! bucket i of N.
//!
//! Decoded rows are buffered until they take half of the memory limit; then each of the largest segments writes a row
//! group. All rows are digested when they are read from the log, and again when the finished segments are read back. If
//! both digests are equal, the segments are committed.

mod output;
mod route;
mod segment;

use std::path::Path;
use std::slice;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::common::spawn_buffered;
use datafusion::physical_plan::execute_stream_partitioned;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::prelude::{SessionConfig, SessionContext, ident};
use futures::{StreamExt, stream};
use onefold_base::fault::{Explain as _, Fault};
use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_datasets::digest::Digest;
use rayon::prelude::*;
use serde::Serialize;
use tokio::runtime::Handle;

use self::output::Output;
use self::route::Router;
pub(crate) use self::segment::ShardOptions;
use self::segment::{SegmentFile, Segments};
use crate::error::{Error, Result};
use crate::problems::Problems;
use crate::row_digest::RowDigester;
use crate::sources::{self, Source};

/// The version of [`SEGMENTS_FILE`](sources::SEGMENTS_FILE) that this program writes.
const FORMAT_VERSION: u32 = 1;
/// The table of the rows that are read.
const ROWS: &str = "log";
/// The target size of a decoded batch, in bytes, and the bounds of the number of its rows.
const BATCH_BYTES: u64 = 8 << 20;
const BATCH_ROWS: (u64, u64) = (16, 32 << 10);

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

/// The contents of [`SEGMENTS_FILE`](sources::SEGMENTS_FILE).
#[derive(Debug, Serialize)]
struct SegmentList<'a> {
    format_version: u32,
    by: &'a [String],
    rows: u64,
    digest: Digest,
    segments: &'a [SegmentFile],
}

/// Splits a log into segments in the folder `out`, a path or a URL. The log consists of the files at `paths` (files,
/// folders, globs, or URLs of these, in every format that a source may have), in the order of their names. `name=value`
/// folders of the paths become text columns.
///
/// # Errors
///
/// [`Error::Fault`] or [`Error::Dataset`] with the name of the file: a path without files, a file that cannot be read
/// or has other columns than the others, a key column that is missing or has another type than integer or text,
/// segments that cannot be written or differ from the rows that were read, and an `out` that is occupied.
pub(crate) fn shard(
    paths: &[String],
    out: &Path,
    options: &ShardOptions,
    reporter: &dyn Reporter,
) -> Result<ShardSummary> {
    let started = Instant::now();
    let threads = options.threads.max(1);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let runtime = runtime.handle();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(std::io::Error::other)?;

    let log = [runtime.block_on(sources::find_paths(ROWS, paths)).map_err(without_configuration)?];
    let log_files = log[0].columns_of_files().count();
    let log_rows = Rows::open(&log, None, runtime).map_err(without_configuration)?;
    let columns = log_rows.rows.schema();
    let first = log[0].columns_of_files().next().map_or(Path::new(""), |(name, _)| name);
    let router = Router::new(&columns, first, &options.by, options.segments)?;
    let digester = RowDigester::new(&columns)?;
    let output = Output::create(out, options)?;
    let segments = Segments::new(&output, &columns, options);
    reporter.begin("sharding", sources::total_rows(&log), "rows");
    let (split, files) = pool.install(|| split(log_rows, &router, &digester, segments, reporter))?;
    reporter.end();
    reporter.begin("verifying", Some(split.rows), "rows");
    pool.install(|| verify(&output, &columns, &split, &router, runtime, reporter))?;
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
    output.commit(text.into_bytes())?;

    let (log_bytes, bytes_on_disk) =
        (sources::total_bytes(&log), files.iter().map(|file| file.bytes_on_disk).sum::<u64>());
    let rows = files.iter().map(|file| file.rows);
    let wall_seconds = started.elapsed().as_secs_f64();
    Ok(ShardSummary {
        rows: split.rows,
        log_files,
        segments: files.len(),
        null_key_rows: split.null_key_rows,
        largest_segment_rows: rows.clone().max().unwrap_or(0),
        smallest_segment_rows: rows.min().unwrap_or(0),
        log_bytes,
        bytes_on_disk,
        compression_gain: log_bytes as f64 / bytes_on_disk.max(1) as f64,
        wall_seconds,
        rows_per_second: split.rows as f64 / wall_seconds,
        peak_rss_bytes: peak_rss_bytes(),
    })
}

/// Replaces hints about `dataset.toml`, which `shard` does not have.
fn without_configuration(error: Error) -> Error {
    let fault = error.fault();
    let has = |part: &str| fault.hints.iter().any(|hint| hint.to_string().contains(part));
    if has("{ delta = ") {
        let hint = "give the files of one version of the table, or build it without `shard`, as the source `{ delta = … }`";
        return Fault { hints: Vec::new(), ..fault }.hint(hint).into();
    }
    if !has("[sources]") {
        return error;
    }
    let hint = "give files with the same columns and types, folders that hold some, globs such as \
                `logs/*.parquet`, or URLs of these";
    Fault { hints: Vec::new(), ..fault }.hint(hint).into()
}

/// Rows of files, in the order of the files' names.
struct Rows<'a> {
    rows: SendableRecordBatchStream,
    runtime: &'a Handle,
}

impl<'a> Rows<'a> {
    /// Starts to read `files`: all columns, or those with the names of `columns`. The next batch is read while the
    /// previous one is used.
    fn open(files: &[Source; 1], columns: Option<&SchemaRef>, runtime: &'a Handle) -> Result<Self> {
        let (least, most) = BATCH_ROWS;
        let batch_rows = (BATCH_BYTES / sources::widest_row_bytes(files).max(1)).clamp(least, most);
        // With one partition, the files are read in order.
        let config = SessionConfig::new().with_target_partitions(1).with_batch_size(batch_rows as usize);
        let context = SessionContext::new_with_config(config.with_collect_statistics(false));
        let rows = runtime.block_on(async {
            sources::register(&context, files).await?;
            let mut table = context.table(ROWS).await?;
            if let Some(columns) = columns {
                table = table.select(columns.fields().iter().map(|field| ident(field.name())))?;
            }
            let plan = sources::planned(table, &Problems::default()).await?;
            let schema = plan.schema();
            // Files that are read in different ways are in different partitions, which are read one after the other.
            let parts = stream::iter(execute_stream_partitioned(plan, context.task_ctx())?).flatten();
            Ok::<_, Error>(spawn_buffered(Box::pin(RecordBatchStreamAdapter::new(schema, parts)), 1))
        })?;
        Ok(Self { rows, runtime })
    }
}

impl Iterator for Rows<'_> {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Result<RecordBatch>> {
        Some(self.runtime.block_on(self.rows.next())?.map_err(Error::from))
    }
}

/// The rows that were written to the segments.
#[derive(Debug, Default)]
struct Split {
    rows: u64,
    null_key_rows: u64,
    digest: Digest,
}

/// Appends each row of the log to its segment.
fn split(
    log: Rows<'_>,
    router: &Router,
    digester: &RowDigester,
    mut segments: Segments<'_>,
    reporter: &dyn Reporter,
) -> Result<(Split, Vec<SegmentFile>)> {
    let mut split = Split::default();
    for batch in log {
        let batch = batch?;
        let routes = router.route(&batch)?;
        split.rows += batch.num_rows() as u64;
        split.null_key_rows += routes.null_key_rows;
        split.digest.merge(digester.digest(&batch)?);
        segments.append(&batch, &routes.rows_by_segment)?;
        reporter.advance(batch.num_rows() as u64);
        reporter.go_on()?;
    }
    Ok((split, segments.finish()?))
}

/// Reads the segments back, and checks that they contain the rows of the log and that each row is in the segment of its
/// key.
fn verify(
    output: &Output,
    columns: &SchemaRef,
    split: &Split,
    router: &Router,
    runtime: &Handle,
    reporter: &dyn Reporter,
) -> Result<()> {
    let verified = output.names.par_iter().enumerate().map(|(number, name)| {
        let segment = output.path(name);
        let file = [runtime.block_on(sources::find_paths(ROWS, slice::from_ref(&segment)))?];
        let rows = Rows::open(&file, Some(columns), runtime)?;
        // Texts may have another type than in the log. The digest is the same.
        let digester = RowDigester::new(&rows.rows.schema())?;
        let mut found = (0, Digest::default());
        for batch in rows {
            let batch = batch?;
            found.0 += batch.num_rows() as u64;
            found.1.merge(digester.digest(&batch)?);
            if router.route(&batch)?.rows_by_segment[number].len() != batch.num_rows() {
                return Err(damaged(&segment));
            }
            reporter.advance(batch.num_rows() as u64);
            reporter.go_on()?;
        }
        Ok(found)
    });
    let mut whole = (0, Digest::default());
    for (rows, digest) in verified.collect::<Result<Vec<_>>>()? {
        whole.0 += rows;
        whole.1.merge(digest);
    }
    if whole == (split.rows, split.digest) { Ok(()) } else { Err(damaged(&output.path(""))) }
}

fn damaged(path: &str) -> Error {
    Error::data(
        format!("`{path}`"),
        "what was written is not what was read from the log",
        "check the disk and the memory of this machine, then run this again",
    )
}

#[cfg(test)]
mod tests;
