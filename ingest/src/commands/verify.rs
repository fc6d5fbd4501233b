//! `onefold-ingest verify`.

use std::path::PathBuf;

use onefold_datasets::console::{Printer, available_threads};
use onefold_datasets::units::{format_bytes, format_count};
use onefold_datasets::verify::{Verification, VerifyOptions, verify};

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

/// Reads the dataset again; fails if anything is wrong with it, after telling what.
pub(crate) fn run(arguments: &VerifyArguments, printer: &Printer) -> anyhow::Result<()> {
    let threads = arguments.threads.map_or_else(available_threads, usize::from);
    let verification = verify(&arguments.dataset, &VerifyOptions { threads }, printer)?;
    let dataset = arguments.dataset.display();
    printer.summary(&describe(&dataset.to_string(), &verification), &verification)?;
    match verification.problems_found {
        0 => Ok(()),
        1 => anyhow::bail!("`{dataset}` has a problem\n  hint: {HINT}"),
        more => anyhow::bail!("`{dataset}` has {} problems\n  hint: {HINT}", format_count(more as u64)),
    }
}

const HINT: &str = "build the dataset, or the partitions named, again with `onefold-ingest build`";

fn describe(dataset: &str, verification: &Verification) -> String {
    let mut text = String::new();
    for problem in &verification.problems {
        text.push_str(&format!("{problem}\n"));
    }
    if verification.problems_found > verification.problems.len() {
        let more = verification.problems_found - verification.problems.len();
        text.push_str(&format!("and {} more problems\n", format_count(more as u64)));
    }
    for warning in &verification.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    if verification.is_sound() {
        let inside = match verification.row_groups_inside_sessions {
            0 => String::new(),
            some => format!(" ({} begin inside a session)", format_count(some)),
        };
        text.push_str(&format!(
            "verified {dataset}: {} samples in {} sessions, {} partitions, {} files, {} row groups{inside}, {} in {:.1} s: sound",
            format_count(verification.samples),
            format_count(verification.sessions),
            verification.partitions,
            verification.files,
            format_count(verification.row_groups),
            format_bytes(verification.bytes_on_disk),
            verification.wall_seconds,
        ));
    }
    text
}
