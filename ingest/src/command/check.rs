//! `onefold-ingest check`.

use std::path::PathBuf;

use onefold_base::fault::{Fault, Kind};
use onefold_base::units::format_count;
use onefold_terminal::Printer;

use super::{EngineArguments, run_async};
use crate::check;
use crate::check::Checked;
use crate::config::Config;

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArguments {
    /// The configuration, as for `build`
    config: PathBuf,
    #[command(flatten)]
    engine: EngineArguments,
}

/// Reads all logs of a configuration, prints the problems that it finds, and fails if there are any.
pub(crate) fn run(arguments: &CheckArguments, printer: &Printer) -> anyhow::Result<()> {
    let engine = arguments.engine.options();
    let config = Config::load(&arguments.config)?;
    let checked = run_async(engine.threads, check(&config, &engine, printer), printer)?;
    printer.summary(&describe(&checked), &checked)?;
    let found = match checked.problems.len() {
        0 => return Ok(()),
        1 => "a problem".to_owned(),
        more => format!("{} problems", format_count(more as u64)),
    };
    let message = format!("`{}` has {found}", arguments.config.display());
    Err(Fault::new(Kind::Data, message).hint("do what each line says, and check again").into())
}

fn describe(checked: &Checked) -> String {
    let mut lines = Vec::new();
    for (number, problem) in checked.problems.iter().enumerate() {
        lines.push(format!("{}. {}", number + 1, problem.message));
        lines.extend(problem.fixes.iter().map(|fix| format!("   fix: {fix}")));
    }
    if let Some(rows) = &checked.rows {
        lines.push(format!("no problems; {}", rows.described()));
    }
    for (what, count) in checked.skipped.iter().flat_map(|skipped| skipped.described()) {
        lines.push(format!("counted: {} {what}", format_count(count)));
    }
    lines.push(format!("{:.1} s", checked.wall_seconds));
    lines.join("\n")
}
