//! `onefold-ingest`: the batch ETL's command line.

mod commands;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use onefold_terminal::{OutputOptions, Printer};

onefold_terminal::use_jemalloc!();

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
    Build(commands::build::BuildArguments),
    /// Add partitions to a dataset, or build some of its partitions again
    ///
    /// The partitions that the logs give replace those of the same key, if they do not have fewer samples; the others stay.
    /// Running it again changes nothing.
    /// Layout, order and buckets are those of the dataset; features and sessions must be, too. A dataset that does not exist is created.
    /// Example: onefold-ingest append logs/dataset.toml --out dataset --partition date=2024-06-01
    ///
    /// With `--merge`, partitions keep their samples, and samples of the logs that they lack are added: late ones, and those
    /// after midnight of sessions that began before it. Only the buckets that get samples are written anew.
    /// Example: onefold-ingest append logs/dataset.toml --out dataset --merge --partition date=2024-05-31
    Append(commands::build::AppendArguments),
    /// Split an arriving log by the hash of its keys into segments that compress better and cluster alone
    ///
    /// Logs that are split by the same key into as many segments match, segment by segment.
    /// Example: onefold-ingest shard logs/features/*.parquet --by session_id --segments 16 --out segments
    Shard(commands::shard::ShardArguments),
    /// Read a whole dataset and list everything that is wrong with it
    ///
    /// Example: onefold-ingest verify dataset
    Verify(commands::verify::VerifyArguments),
    /// List the snapshots of a dataset: when each was committed, and what it changed
    ///
    /// Example: onefold-ingest history s3://bucket/dataset
    History(commands::history::HistoryArguments),
    /// Remove old snapshots, and files that no other snapshot names
    ///
    /// Files that writers left when they were killed are removed too. The newest snapshot is always kept.
    /// Example: onefold-ingest vacuum dataset --keep 10 --older-than 1d
    Vacuum(commands::vacuum::VacuumArguments),
    /// Measure how much repeats in a dataset, its size on disk in each layout, and how much training can gain
    ///
    /// Example: onefold-ingest report dataset --html report.html
    Report(commands::report::ReportArguments),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let printer = Printer::new(cli.output);
    onefold_terminal::run::<Cli>(|| match &cli.command {
        Command::Build(arguments) => commands::build::run_build(arguments, &printer),
        Command::Append(arguments) => commands::build::run_append(arguments, &printer),
        Command::Shard(arguments) => commands::shard::run(arguments, &printer),
        Command::Verify(arguments) => commands::verify::run(arguments, &printer),
        Command::History(arguments) => commands::history::run(arguments, &printer),
        Command::Vacuum(arguments) => commands::vacuum::run(arguments, &printer),
        Command::Report(arguments) => commands::report::run(arguments, &printer),
    })
}
