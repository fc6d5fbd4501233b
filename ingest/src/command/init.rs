//! `onefold-ingest init`.

use std::path::{Path, PathBuf};

use onefold_base::units::count_of;
use onefold_terminal::Printer;

use super::{EngineArguments, run_async};
use crate::init::{InitSummary, init};

#[derive(Debug, clap::Args)]
pub(crate) struct InitArguments {
    /// The logs: files, folders, globs in quotes, and URLs. Files with the same columns are one source
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
    /// The configuration to write; its paths are relative to its folder
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace the file that is at `--out`
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    engine: EngineArguments,
}

/// Writes a configuration for logs.
pub(crate) fn run(arguments: &InitArguments, printer: &Printer) -> anyhow::Result<()> {
    let engine = arguments.engine.options();
    let work = init(&arguments.paths, &arguments.out, arguments.overwrite, &engine);
    let summary = run_async(engine.threads, work, printer)?;
    Ok(printer.summary(&describe(&summary, &arguments.out), &summary)?)
}

fn describe(summary: &InitSummary, out: &Path) -> String {
    let mut lines = vec![format!("wrote {}: samples are the rows of `{}`", out.display(), summary.samples)];
    for source in &summary.sources {
        lines.push(format!(
            "  `{}`: {}, {}, {} seen",
            source.name,
            count_of(source.files as u64, "file"),
            count_of(source.columns as u64, "column"),
            count_of(source.rows_seen as u64, "row"),
        ));
    }
    lines.extend(summary.to_check.iter().map(|check| format!("check: {check}")));
    lines.push(format!("next: onefold-ingest check {}", out.display()));
    lines.push(format!("      onefold-ingest build {} --out dataset", out.display()));
    lines.join("\n")
}
