//! `onefold-ingest vacuum`.

use std::path::PathBuf;
use std::time::Duration;

use onefold_base::units::{count_of, format_bytes, parse_duration_micros};
use onefold_datasets::vacuum::{Reason, Removal, VacuumOptions, Vacuumed, vacuum};
use onefold_storage::Storage;
use onefold_terminal::Printer;

#[derive(Debug, clap::Args)]
pub(crate) struct VacuumArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// The number of newest snapshots to keep; the others are kept, too, if --older-than says so
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    keep: u32,
    /// Keep snapshots and files that were needed less than this ago; choose more than the duration of the longest job
    ///
    /// A snapshot is kept, also beyond --keep, if it was superseded less than this ago. It is superseded at the
    /// modification time of the next snapshot that exists. A file that no kept snapshot names is kept if the first
    /// snapshot that no longer names it was committed less than this ago. A file that no snapshot ever named, of a
    /// writer that is at work or was killed, is kept if it was modified less than this ago. The longest job is the
    /// longest one that reads or writes the dataset.
    #[arg(long, value_name = "AGE", default_value = "1d", value_parser = parse_age)]
    older_than: Duration,
    /// Print each snapshot and file that would be removed, and why, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

fn parse_age(text: &str) -> Result<Duration, String> {
    if text == "0s" {
        return Ok(Duration::ZERO);
    }
    parse_duration_micros(text).map(|micros| Duration::from_micros(micros.unsigned_abs()))
}

/// Removes old snapshots, and the files that only these snapshots reference.
pub(crate) fn run(arguments: &VacuumArguments, printer: &Printer) -> anyhow::Result<()> {
    let storage = Storage::open(&arguments.dataset)?;
    let VacuumArguments { keep, older_than, dry_run, .. } = *arguments;
    let vacuumed = vacuum(&storage, &VacuumOptions { keep: keep as usize, older_than, dry_run })?;
    Ok(printer.summary(&describe(&vacuumed), &vacuumed)?)
}

fn describe(vacuumed: &Vacuumed) -> String {
    let verb = if vacuumed.dry_run { "would remove" } else { "removed" };
    let kept = match vacuumed.snapshots_kept.as_slice() {
        [only] => format!("keeps snapshot {only}"),
        [first, .., last] => {
            format!("keeps {} snapshots from {first} to {last}", vacuumed.snapshots_kept.len())
        }
        [] => String::new(),
    };
    let young = match vacuumed.young_files_kept {
        0 => String::new(),
        files => {
            format!("\nkeeps {} that no snapshot names, because of their age", count_of(files as u64, "file"))
        }
    };
    let foreign = match vacuumed.foreign_files_kept {
        0 => String::new(),
        files => format!("\nkeeps {} with names that no dataset has", count_of(files as u64, "file")),
    };
    let listed: String =
        vacuumed.would_remove.iter().map(|removal| format!("\n{}", reason(removal))).collect();
    format!(
        "{verb} {} and {}, {} in all; {kept}{young}{foreign}{listed}",
        count_of(vacuumed.snapshots_removed.len() as u64, "snapshot"),
        count_of(vacuumed.files_removed as u64, "file"),
        format_bytes(vacuumed.bytes_removed),
    )
}

/// Returns a line about a file that would be removed.
fn reason(removal: &Removal) -> String {
    let Removal { path, since, .. } = removal;
    match removal.reason {
        Reason::Superseded => format!("{path}: superseded since {since}"),
        Reason::NotCommitted => {
            format!("{path}: left by a writer that did not commit, last modified {since}")
        }
    }
}
