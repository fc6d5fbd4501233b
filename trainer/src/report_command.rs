//! The command `onefold-train report`.

use std::path::{Path, PathBuf};

use onefold_storage::commit::{check_output, write_atomically};
use onefold_terminal::Printer;
use onefold_trainer::report::Report;
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(crate) struct ReportArguments {
    /// The directories of the runs, which may be incomplete
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The HTML file to write
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
}

/// The output of the command with `--json`.
#[derive(Debug, Serialize)]
struct ReportSummary<'a> {
    html: &'a Path,
    runs: Vec<ReportedRun<'a>>,
}

#[derive(Debug, Serialize)]
struct ReportedRun<'a> {
    run: &'a str,
    evaluations: usize,
    days: usize,
}

pub(crate) fn run(arguments: &ReportArguments, printer: &Printer) -> anyhow::Result<()> {
    check_output(&arguments.html)?;
    let report = Report::load(&arguments.runs)?;
    write_atomically(&arguments.html, report.html().as_bytes())?;
    let runs: Vec<_> =
        report.counts().map(|(run, evaluations, days)| ReportedRun { run, evaluations, days }).collect();
    let text = format!(
        "drew {} in {}",
        onefold_base::units::count_of(runs.len() as u64, "run"),
        arguments.html.display()
    );
    Ok(printer.summary(&text, &ReportSummary { html: &arguments.html, runs })?)
}
