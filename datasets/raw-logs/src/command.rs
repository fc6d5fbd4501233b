//! The commands of `onefold-data`, which make raw logs from public data or from a seed.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::ebnerd::{self, ImportSummary};
use crate::generate::{GenerateOptions, Workload, generate};
use crate::movielens::{self, FetchSummary};
use crate::raw_log::DATASET_CONFIG_FILE;
use clap::{Args, Parser, Subcommand, ValueEnum};
use onefold_base::fault::{Explainer, explained};
use onefold_base::units::{format_bytes, format_count};
use onefold_storage::Storage;
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};
use serde::Serialize;

/// Make raw logs as a service writes them, in arrival order, with a `dataset.toml` that
/// `onefold-ingest build` reads and a `train.toml` that `onefold-train run` reads
#[derive(Debug, Parser)]
#[command(name = "onefold-data", version)]
struct Cli {
    #[command(flatten)]
    output: OutputOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetch a public data set from the network, once, and write it as raw logs
    #[command(after_help = "Example:\n  onefold-data fetch movielens-100k --out movielens")]
    Fetch(FetchArguments),
    /// Convert public logs on this machine to raw logs
    #[command(after_help = "Example:\n  onefold-data import ebnerd --from ebnerd_demo --out news")]
    Import(ImportArguments),
    /// Generate the raw logs of a benchmark workload from a seed
    #[command(
        after_help = "Example:\n  onefold-data generate --workload rm1 --samples 100000 --seed 1 --out rm1"
    )]
    Generate(GenerateArguments),
}

/// The data sets that can be fetched.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum FetchSource {
    /// 100,000 ratings of films, 1997 to 1998
    #[value(name = "movielens-100k")]
    MovieLens100K,
}

/// The logs that can be imported.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ImportSource {
    /// EB-NeRD: a newspaper's impressions and clicks, 2023 (RecSys Challenge 2024)
    Ebnerd,
}

/// The output directory.
#[derive(Debug, Args)]
struct Output {
    /// The directory to write; it appears whole or not at all
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Replace existing raw logs
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Args)]
struct FetchArguments {
    /// The data set
    #[arg(value_name = "DATA")]
    source: FetchSource,
    #[command(flatten)]
    output: Output,
    /// Where downloads are kept [default: ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ImportArguments {
    /// The kind of the logs
    #[arg(value_name = "DATA")]
    source: ImportSource,
    /// The directory of the logs: `train/behaviors.parquet` and so on, or `train_behaviors.parquet`
    #[arg(long, value_name = "DIR")]
    from: PathBuf,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Args)]
struct GenerateArguments {
    /// The workload
    #[arg(long)]
    workload: Workload,
    /// How many samples to generate
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// The seed: equal seeds make equal logs
    #[arg(long)]
    seed: u64,
    #[command(flatten)]
    output: Output,
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[explained::<crate::Error>];

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        match &self.command {
            Command::Fetch(arguments) => fetch(arguments, printer),
            Command::Import(arguments) => import(arguments, printer),
            Command::Generate(arguments) => generate_workload(arguments, printer),
        }
    }
}

/// The program, for calls from the process of another program.
pub const PROGRAM: Program = Program::of::<Cli>();

fn fetch(arguments: &FetchArguments, printer: &Printer) -> anyhow::Result<()> {
    let FetchSource::MovieLens100K = arguments.source;
    let out = arguments.output.out.as_path();
    let start = Instant::now();
    let cache = arguments.cache.as_deref();
    let summary = movielens::fetch(out, cache, arguments.output.overwrite, printer)?;
    finish(printer, (out, start), "MovieLens 100K", &summary, movielens_lines(&summary))
}

fn import(arguments: &ImportArguments, printer: &Printer) -> anyhow::Result<()> {
    let ImportSource::Ebnerd = arguments.source;
    let out = arguments.output.out.as_path();
    let start = Instant::now();
    let summary = ebnerd::import(&arguments.from, out, arguments.output.overwrite, printer)?;
    finish(printer, (out, start), "EB-NeRD", &summary, ebnerd_lines(&summary))
}

fn generate_workload(arguments: &GenerateArguments, printer: &Printer) -> anyhow::Result<()> {
    let &GenerateArguments { workload, samples, seed, .. } = arguments;
    let out = arguments.output.out.as_path();
    let options = GenerateOptions { workload, samples, seed, overwrite: arguments.output.overwrite };
    let start = Instant::now();
    let summary = generate(out, &options, printer)?;
    let lines =
        vec![("samples", format_count(summary.samples)), ("sessions", format_count(summary.sessions))];
    finish(printer, (out, start), &format!("workload {}", workload.name()), summary, lines)
}

/// The summary of every command.
#[derive(Debug, Serialize)]
struct Report<'a, S> {
    #[serde(flatten)]
    summary: S,
    out: &'a Path,
    files: u64,
    bytes_on_disk: u64,
    wall_seconds: f64,
}

/// Ends a command with its summary. For a person, the summary consists of `lines`, pairs of a label and a value, and
/// the next command to run.
fn finish(
    printer: &Printer,
    (out, start): (&Path, Instant),
    what: &str,
    summary: impl Serialize,
    mut lines: Vec<(&str, String)>,
) -> anyhow::Result<()> {
    let written = Storage::open(out)?.list("", None)?;
    let (files, bytes_on_disk) = (written.len() as u64, written.iter().map(|file| file.bytes).sum());
    let report = Report { summary, out, files, bytes_on_disk, wall_seconds: start.elapsed().as_secs_f64() };
    lines.push(("files", format_count(files)));
    lines.push(("size", format_bytes(bytes_on_disk)));
    lines.push(("time", format!("{:.1} s", report.wall_seconds)));
    let width = lines.iter().map(|(label, _)| label.len()).max().unwrap_or_default();
    let lines: String = lines.iter().map(|(label, value)| format!("  {label:<width$}  {value}\n")).collect();
    let config = out.join(DATASET_CONFIG_FILE);
    let (shown, config) = (out.display(), config.display());
    let next = format!("next: onefold-ingest build {config} --out DATASET");
    Ok(printer.summary(&format!("raw logs of {what} in `{shown}`\n{lines}{next}"), &report)?)
}

fn movielens_lines(summary: &FetchSummary) -> Vec<(&'static str, String)> {
    let held_out = summary.samples - summary.train_samples;
    vec![
        ("samples", format!("{} ({} held out)", format_count(summary.samples), format_count(held_out))),
        ("sessions", format_count(summary.sessions)),
        ("users", format_count(summary.users)),
        ("items", format_count(summary.items)),
        ("liked", format!("{:.1} %", 100.0 * summary.positive_share)),
        ("history", format!("{:.1} items on average", summary.mean_history_length)),
        ("download", if summary.downloaded { "fetched" } else { "cached" }.to_owned()),
    ]
}

fn ebnerd_lines(summary: &ImportSummary) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        ("samples", format_count(summary.samples)),
        ("impressions", format_count(summary.impressions)),
        ("sessions", format_count(summary.sessions)),
        ("users", format_count(summary.users)),
        ("articles", format_count(summary.articles)),
        ("clicked", format!("{:.1} %", 100.0 * summary.positive_share)),
        ("history", format!("{:.1} articles on average", summary.mean_history_length)),
    ];
    if summary.empty_impressions > 0 {
        lines.push(("without samples", format!("{} impressions", format_count(summary.empty_impressions))));
    }
    if summary.clicks_not_shown > 0 {
        lines.push(("not shown", format!("{} clicks", format_count(summary.clicks_not_shown))));
    }
    lines
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
