//! `onefold-ingest`: the batch ETL's command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use onefold_datasets::console::{self, OutputOptions, Printer, available_threads};
use onefold_datasets::units::{format_bytes, format_count, parse_bytes};
use onefold_datasets::{Layout, Order};
use onefold_ingest::{BuildOptions, BuildSummary, Config, build};

/// Build session-clustered training datasets from raw logs
#[derive(Debug, Parser)]
#[command(name = "onefold-ingest", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build a dataset from the raw logs that a `dataset.toml` names
    ///
    /// Example: onefold-ingest build logs/dataset.toml --out dataset --memory-limit 8GiB
    Build(BuildArguments),
}

#[derive(Debug, clap::Args)]
struct BuildArguments {
    /// The configuration: sources, query, session, partitions, features
    config: PathBuf,
    /// Directory of the dataset
    #[arg(long)]
    out: PathBuf,
    /// How lists of ids are stored
    #[arg(long, value_enum, default_value_t = LayoutArgument::Rows)]
    layout: LayoutArgument,
    /// Order of the samples within a partition
    #[arg(long, value_enum, default_value_t = OrderArgument::Session)]
    order: OrderArgument,
    /// Memory for sorts, which spill to disk beyond it, and joins, which hold their side without lists in it
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4GiB")]
    memory_limit: u64,
    /// Where they spill [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    spill_directory: Option<PathBuf>,
    /// Threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Replace the dataset that is at `--out`
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LayoutArgument {
    /// Every sample with its lists, as other programs expect
    Rows,
    /// In feature groups a list only where it changes, and of a sequence only the ids appended
    Folded,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OrderArgument {
    /// The samples of a session together, in time order; sessions by start
    Session,
    /// By time alone, as logged: the baseline to measure clustering against
    Arrival,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let printer = Printer::new(cli.output);
    console::run(|| match &cli.command {
        Command::Build(arguments) => run_build(arguments, &printer),
    })
}

fn run_build(arguments: &BuildArguments, printer: &Printer) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config)?;
    let options = BuildOptions {
        layout: match arguments.layout {
            LayoutArgument::Rows => Layout::Rows,
            LayoutArgument::Folded => Layout::Folded,
        },
        order: match arguments.order {
            OrderArgument::Session => Order::Session,
            OrderArgument::Arrival => Order::Arrival,
        },
        memory_limit: arguments.memory_limit,
        threads: arguments.threads.map_or_else(available_threads, usize::from),
        overwrite: arguments.overwrite,
        spill_directory: arguments.spill_directory.clone(),
    };
    let summary = build(&config, &arguments.out, &options, printer)?;
    Ok(printer.summary(&describe(&summary, &arguments.out), &summary)?)
}

fn describe(summary: &BuildSummary, out: &std::path::Path) -> String {
    format!(
        "built {}: {} samples in {} sessions ({:.2} samples per session)\n\
         {} partitions, {} files, {} on disk ({:.1} bytes per sample), {} order, {} layout\n\
         {:.1} s, {} samples/s",
        out.display(),
        format_count(summary.samples),
        format_count(summary.sessions),
        summary.samples_per_session,
        summary.partitions,
        summary.files,
        format_bytes(summary.bytes_on_disk),
        summary.bytes_on_disk as f64 / summary.samples as f64,
        match summary.order {
            Order::Session => "session",
            Order::Arrival => "arrival",
        },
        match summary.layout {
            Layout::Rows => "rows",
            Layout::Folded => "folded",
        },
        summary.wall_seconds,
        format_count(summary.samples_per_second as u64),
    )
}
