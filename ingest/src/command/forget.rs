//! `onefold-ingest forget`.

use std::path::PathBuf;

use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_datasets::forget::{ForgetOptions, Forgotten, forget};
use onefold_storage::Storage;
use onefold_terminal::Printer;

use super::RewriteArguments;
use super::users::read_users;

/// The maximum number of users that the summary names.
const MOST_NAMED: usize = 5;

#[derive(Debug, clap::Args)]
pub(crate) struct ForgetArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// The users: a text file with one a line; or a CSV file with a header (`.csv`) or a Parquet file (`.parquet`) with the
    /// columns of the session's key, or with the column of the user
    #[arg(long, value_name = "FILE")]
    users: PathBuf,
    /// Identify users by this kept column (`keep` in `dataset.toml`), if sessions are not keyed by user
    #[arg(long, value_name = "NAME")]
    column: Option<String>,
    /// Print what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Remove the older snapshots that have something of the users, and the files that only they name. The dataset does not
    /// know which runs and checkpoints need them
    #[arg(long)]
    purge: bool,
    #[command(flatten)]
    rewrite: RewriteArguments,
}

/// Removes the samples of users.
pub(crate) fn run(arguments: &ForgetArguments, printer: &Printer) -> anyhow::Result<()> {
    let ForgetArguments { column, dry_run, purge, .. } = arguments;
    let keys = read_users(&arguments.users)?;
    let storage = Storage::open(&arguments.dataset)?;
    let how = arguments.rewrite.options();
    let options = ForgetOptions { column: column.clone(), how, dry_run: *dry_run, purge: *purge };
    let forgotten = forget(&storage, &keys, &options, printer)?;
    Ok(printer.summary(&describe(&forgotten), &forgotten)?)
}

fn describe(forgotten: &Forgotten) -> String {
    let verb = if forgotten.dry_run { "would remove" } else { "removed" };
    let mut lines = vec![format!(
        "{verb} {} in {} of {} of {}",
        count_of(forgotten.samples_removed, "sample"),
        count_of(forgotten.sessions_removed, "session"),
        format_count(forgotten.users_found as u64),
        count_of(forgotten.users as u64, "user"),
    )];
    if forgotten.files_rewritten > 0 {
        let rewritten = count_of(forgotten.files_rewritten, "file");
        let now = match forgotten.dry_run {
            true => String::new(),
            false => format!(
                ", now {} ({})",
                count_of(forgotten.files_written, "file"),
                format_bytes(forgotten.bytes_written)
            ),
        };
        lines.push(format!(
            "files written again: {rewritten} ({}) in {}{now}",
            format_bytes(forgotten.bytes_rewritten),
            count_of(forgotten.partitions as u64, "partition"),
        ));
    }
    if forgotten.vocabulary_entries_removed > 0 {
        let entries = count_of(forgotten.vocabulary_entries_removed, "original");
        lines.push(format!("vocabularies: {verb} {entries}"));
    }
    if !forgotten.users_not_found.is_empty() {
        let named: Vec<&str> =
            forgotten.users_not_found.iter().take(MOST_NAMED).map(String::as_str).collect();
        let more = if forgotten.users_not_found.len() > MOST_NAMED { ", …" } else { "" };
        lines.push(format!("not found: `{}`{more}", named.join("`, `")));
    }
    lines.push(match forgotten.changed {
        true => format!("committed snapshot {}", forgotten.snapshot),
        false => format!("nothing committed; snapshot {} is the newest", forgotten.snapshot),
    });
    lines.extend(describe_older(forgotten));
    lines.push(format!("{:.1} s", forgotten.wall_seconds));
    lines.join("\n")
}

/// Returns the lines about older snapshots, if there is something to report.
fn describe_older(forgotten: &Forgotten) -> Option<String> {
    let numbers = |snapshots: &[u64]| snapshots.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    match (&forgotten.purged, &forgotten.snapshots_with_users) {
        (Some(purged), _) => Some(format!(
            "purged the snapshots {}, and {} ({}); runs and checkpoints that record one of these snapshots cannot read it \
             any more",
            numbers(&purged.snapshots_removed),
            count_of(purged.files_removed as u64, "file"),
            format_bytes(purged.bytes_removed),
        )),
        (None, Some(with_users)) if with_users.is_empty() => {
            Some("no older snapshot has something of the users".to_owned())
        }
        (None, Some(with_users)) => Some(format!(
            "would purge the snapshots {}; runs and checkpoints that record one of these could not read it any more",
            numbers(with_users)
        )),
        (None, None) if forgotten.changed => {
            Some("older snapshots still have the users: `--purge` removes these snapshots".to_owned())
        }
        (None, None) => None,
    }
}
