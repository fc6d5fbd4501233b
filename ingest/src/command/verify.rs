//! `onefold-ingest verify`.

use std::path::PathBuf;

use crate::compare;
use crate::compare::Comparison;
use crate::config::Config;
use onefold_base::fault::{Fault, Kind};
use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_datasets::verify::{Absence, Verification, VerifyOptions, absent, verify};
use onefold_datasets::{PartitionFilter, Problem};
use onefold_storage::Storage;
use onefold_terminal::Printer;
use serde::Serialize;

use super::users::read_users;
use super::{EngineArguments, run_async};

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// The number of the snapshot to verify [default: the newest]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// Read the sources of this configuration, and compare their samples with those of the dataset
    #[arg(long, value_name = "CONFIG")]
    against: Option<PathBuf>,
    /// With `--against`: compare only these partitions, such as `date=2024-06-01` or `city="Paris, TX"`
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true, requires = "against")]
    partition: PartitionFilter,
    /// Look for the users of this file in all snapshots that exist, or in that of `--at`: in ids of sessions, the kept
    /// column and the feature of the users' column, statistics and vocabularies. The file has the form that `forget`
    /// takes
    #[arg(long, value_name = "FILE")]
    absent: Option<PathBuf>,
    /// With `--absent`: identify users by this kept column, if sessions are not keyed by user
    #[arg(long, value_name = "NAME", requires = "absent")]
    column: Option<String>,
    #[command(flatten)]
    engine: EngineArguments,
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct Verified<'a> {
    #[serde(flatten)]
    verification: &'a Verification,
    /// The result of the comparison; absent without `--against`.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<&'a Comparison>,
    /// The result of the search for users; absent without `--absent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    absent: Option<&'a Absence>,
}

/// Reads the whole dataset, prints the problems that it finds, and fails if there are any.
pub(crate) fn run(arguments: &VerifyArguments, printer: &Printer) -> anyhow::Result<()> {
    let engine = arguments.engine.options();
    // An invalid configuration fails before the long verification.
    let config = arguments.against.as_deref().map(Config::load).transpose()?;
    let users = arguments.absent.as_deref().map(read_users).transpose()?;
    let options =
        VerifyOptions { threads: engine.threads, snapshot: arguments.at, memory_limit: engine.memory_limit };
    let verification = verify(&arguments.dataset, &options, printer)?;
    let comparison = match &config {
        None => None,
        Some(config) => {
            let work =
                compare(config, &arguments.dataset, arguments.at, &arguments.partition, &engine, printer);
            Some(run_async(engine.threads, work, printer)?)
        }
    };
    let absence = match &users {
        None => None,
        Some(users) => {
            let (storage, column) = (Storage::open(&arguments.dataset)?, arguments.column.as_deref());
            Some(absent(&storage, users, column, arguments.at, printer)?)
        }
    };
    let dataset = arguments.dataset.display().to_string();
    let verified =
        Verified { verification: &verification, against: comparison.as_ref(), absent: absence.as_ref() };
    printer.summary(&describe(&dataset, &verified), &verified)?;
    let places = absence.map_or(0, |absence| absence.places_found) as u64;
    let found =
        match verification.problems_found + comparison.map_or(0, |comparison| comparison.problems.len()) {
            0 if places == 0 => return Ok(()),
            0 => {
                let found = count_of(places, "place");
                let message = format!("`{dataset}` has something of the users in {found}");
                return Err(Fault::new(Kind::Data, message).hint(FORGET).into());
            }
            1 => "a problem".to_owned(),
            more => format!("{} problems", format_count(more as u64)),
        };
    Err(Fault::new(Kind::Data, format!("`{dataset}` has {found}")).hint(HINT).into())
}

const FORGET: &str = "remove it with `onefold-ingest forget DATASET --users FILE --purge`";

const HINT: &str = "build the dataset, or the partitions named, again with `onefold-ingest build`";

fn describe(dataset: &str, verified: &Verified<'_>) -> String {
    let verification = verified.verification;
    let compared: &[Problem] = verified.against.map_or(&[], |against| &against.problems);
    let mut lines: Vec<String> = verification.problems.iter().map(Problem::to_string).collect();
    if verification.problems_found > verification.problems.len() {
        let more = verification.problems_found - verification.problems.len();
        lines.push(format!("and {} more problems", format_count(more as u64)));
    }
    lines.extend(compared.iter().map(Problem::to_string));
    lines.extend(verification.warnings.iter().map(|warning| format!("warning: {warning}")));
    if verification.is_sound() {
        let outcome = if compared.is_empty() { "sound" } else { "its files are undamaged" };
        lines.push(format!("{}: {outcome}", describe_files(dataset, verification)));
    }
    if let Some(against) = verified.against {
        let samples = format_count(against.samples);
        let outcome = match compared.len() {
            0 => format!("the same {samples} samples"),
            1 => format!("the sources have {samples} samples, and 1 partition differs"),
            more => format!(
                "the sources have {samples} samples, and {} partitions differ",
                format_count(more as u64)
            ),
        };
        lines.push(format!("compared with the sources: {outcome}, in {:.1} s", against.wall_seconds));
    }
    lines.extend(verified.absent.into_iter().flat_map(describe_absence));
    lines.join("\n")
}

/// Returns the lines about the search for users.
fn describe_absence(absence: &Absence) -> Vec<String> {
    let mut lines: Vec<String> = absence.places.iter().map(Problem::to_string).collect();
    if absence.places_found > absence.places.len() {
        lines.push(format!(
            "and {} more places",
            format_count((absence.places_found - absence.places.len()) as u64)
        ));
    }
    let outcome = match absence.places_found {
        0 => "nothing".to_owned(),
        places => format!("something in {}", count_of(places as u64, "place")),
    };
    lines.push(format!(
        "looked for {} in {}, {}: found {outcome}, in {:.1} s",
        count_of(absence.users as u64, "user"),
        count_of(absence.snapshots.len() as u64, "snapshot"),
        count_of(absence.samples, "sample"),
        absence.wall_seconds,
    ));
    if !absence.files_not_read.is_empty() {
        let files = count_of(absence.files_not_read.len() as u64, "file");
        lines.push(format!(
            "not looked at: {files} that no snapshot names; `onefold-ingest vacuum` removes old ones"
        ));
    }
    lines
}

fn describe_files(dataset: &str, verification: &Verification) -> String {
    let inside = match verification.row_groups_inside_sessions {
        0 => String::new(),
        some => format!(" ({} begin inside a session)", format_count(some)),
    };
    format!(
        "verified {dataset}: {} in {}, {}, {}, {}{inside}, {} in {:.1} s",
        count_of(verification.samples, "sample"),
        count_of(verification.sessions, "session"),
        count_of(verification.partitions as u64, "partition"),
        count_of(verification.files as u64, "file"),
        count_of(verification.row_groups, "row group"),
        format_bytes(verification.bytes_on_disk),
        verification.wall_seconds,
    )
}
