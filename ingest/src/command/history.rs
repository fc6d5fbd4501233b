//! `onefold-ingest history`.

use std::path::PathBuf;

use onefold_base::units::{format_bytes, format_count};
use onefold_datasets::{SnapshotEntry, history};
use onefold_storage::Storage;
use onefold_terminal::Printer;
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(crate) struct HistoryArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// Show only the last snapshots
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct History {
    snapshots: Vec<SnapshotEntry>,
}

/// Lists the snapshots of a dataset, the oldest first.
pub(crate) fn run(arguments: &HistoryArguments, printer: &Printer) -> anyhow::Result<()> {
    let storage = Storage::open(&arguments.dataset)?;
    let snapshots = history(&storage, arguments.limit.map(|limit| limit as usize))?;
    let lines = snapshots.iter().map(describe);
    let text = [HEADING.to_owned()].into_iter().chain(lines).collect::<Vec<_>>().join("\n");
    Ok(printer.summary(&text, &History { snapshots })?)
}

const HEADING: &str = "snapshot  committed                 operation        samples       gained        size  partitions written";

fn describe(entry: &SnapshotEntry) -> String {
    let gained = format_count(entry.samples_gained.unsigned_abs());
    let sign = if entry.samples_gained < 0 { "-" } else { "+" };
    let partitions = match entry.partitions_written.as_slice() {
        [all] if all.is_empty() => "the whole dataset".to_owned(),
        [first, second, .., last] if entry.partitions_written.len() > 4 => {
            format!("{first}, {second}, … {last} ({})", entry.partitions_written.len())
        }
        all => all.join(", "),
    };
    format!(
        "{:>8}  {}  {:<9} {:>14} {:>12} {:>11}  {partitions}",
        entry.snapshot,
        entry.committed,
        entry.operation.name(),
        format_count(entry.samples),
        format!("{sign}{gained}"),
        format_bytes(entry.bytes_on_disk),
    )
}
