//! `onefold-ingest shard`.

use std::path::{Path, PathBuf};

use crate::shard::{ShardOptions, ShardSummary, shard};
use onefold_base::process::available_threads;
use onefold_base::units::{format_bytes, format_count, parse_bytes};
use onefold_terminal::Printer;

/// The arguments of `shard`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShardArguments {
    /// The log: files (Parquet, CSV or JSON lines), folders, globs, or URLs of these, which are read in the order of
    /// their names
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<String>,
    /// The key columns, whose hash chooses the segment: those that identify a session, or the user
    #[arg(long, required = true, value_delimiter = ',', value_name = "COLUMN")]
    by: Vec<String>,
    /// Number of segments
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=512), default_value_t = 16)]
    segments: u16,
    /// Folder of the segments: a path or a URL
    #[arg(long)]
    out: PathBuf,
    /// Memory for rows that wait to be written: with more memory, row groups are larger and files smaller
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4GiB")]
    memory_limit: u64,
    /// Threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Bytes of a page before it is compressed: larger ones compress better and take more memory to read
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4MiB")]
    page_size: u64,
    /// Replace the segments that are at `--out`
    #[arg(long)]
    overwrite: bool,
}

/// Runs `shard`.
pub(crate) fn run(arguments: &ShardArguments, printer: &Printer) -> anyhow::Result<()> {
    let options = ShardOptions {
        by: arguments.by.clone(),
        segments: usize::from(arguments.segments),
        memory_limit: arguments.memory_limit,
        threads: arguments.threads.map_or_else(available_threads, usize::from),
        page_bytes: usize::try_from(arguments.page_size).unwrap_or(usize::MAX),
        overwrite: arguments.overwrite,
    };
    let summary = shard(&arguments.logs, &arguments.out, &options, printer)?;
    Ok(printer.summary(&describe(&summary, &arguments.out), &summary)?)
}

fn describe(summary: &ShardSummary, out: &Path) -> String {
    let nulls = match summary.null_key_rows {
        0 => String::new(),
        rows => format!("{} rows have no key and are in one segment\n", format_count(rows)),
    };
    format!(
        "sharded {} rows of {} files into {} segments of {} to {} rows at {}\n{nulls}\
         {} on disk, {:.2} times smaller than the {} of the log\n\
         {:.1} s, {} rows/s",
        format_count(summary.rows),
        format_count(summary.log_files as u64),
        summary.segments,
        format_count(summary.smallest_segment_rows),
        format_count(summary.largest_segment_rows),
        out.display(),
        format_bytes(summary.bytes_on_disk),
        summary.compression_gain,
        format_bytes(summary.log_bytes),
        summary.wall_seconds,
        format_count(summary.rows_per_second as u64),
    )
}
