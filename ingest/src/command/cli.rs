//! The command line of `onefold-ingest`.

use clap::{Parser, Subcommand};
use onefold_base::fault::Explainer;
use onefold_terminal::{CommandLine, OutputOptions, Printer};

use super::{
    ERRORS, build, check, columns, compact, features, forget, history, init, parts, report, shard, vacuum,
    verify,
};
use crate::recompute::Task as ColumnsTask;

/// Build session-clustered training datasets from raw logs
#[derive(Debug, Parser)]
#[command(name = "onefold-ingest", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Look at the first rows of logs, and write a `dataset.toml` that builds a dataset of them
    ///
    /// Comments give the evidence of each choice, and mark the choices to check. Example: onefold-ingest init
    /// 'logs/*.csv' --out dataset.toml
    Init(init::InitArguments),
    /// Build a dataset from the raw logs that a `dataset.toml` names
    ///
    /// Example: onefold-ingest build logs/dataset.toml --out dataset --memory-limit 8GiB
    Build(build::BuildArguments),
    /// Read all logs of a `dataset.toml` once, and list every problem, with what to write; nothing is written
    ///
    /// Example: onefold-ingest check logs/dataset.toml
    Check(check::CheckArguments),
    /// Add partitions to a dataset, or build some of its partitions again
    ///
    /// The partitions of the logs are added, or replace existing partitions unless these have more samples. Running it
    /// again changes nothing. Layout, order and buckets are those of the dataset. Features and sessions must be equal,
    /// but further features are allowed: existing samples then have no ids, or 0, for these. If the dataset does not
    /// exist, it is created. If samples have keys, samples after midnight are added to the partition in which their
    /// session began. Example: onefold-ingest append logs/dataset.toml --out dataset --partition date=2024-06-01
    ///
    /// With `--merge`, partitions keep their samples, and get the samples of the logs that they lack: late samples, and
    /// samples after midnight whose session began before. Only the ranges of buckets that get samples are rewritten.
    /// Example: onefold-ingest append logs/dataset.toml --out dataset --merge --partition date=2024-05-31
    Append(build::AppendArguments),
    /// Compute features that a dataset or some of its partitions lack, and write their columns alone
    ///
    /// The configuration declares further features, as for `append`. Their values are computed from the logs, joined by
    /// the key of the samples, and written into files beside the existing ones. The dataset then equals one that was
    /// built with all features. Example: onefold-ingest add-features logs/dataset.toml --out dataset --partition
    /// 'date>=2024-05-01'
    AddFeatures(columns::ColumnsArguments),
    /// Compute labels and weights again from the current logs, and write those that changed
    ///
    /// No other column is written. Partitions without changed labels get no files. Example: onefold-ingest relabel
    /// logs/dataset.toml --out dataset --partition 'date>=2024-05-25'
    Relabel(columns::ColumnsArguments),
    /// Write one range of a dataset's buckets; `commit` makes a dataset of all of them
    ///
    /// With this, any scheduler can build a dataset on many machines. Each needs only the samples of its range. Samples
    /// of other ranges are left out. Nothing is visible before the commit. Example: onefold-ingest write dataset.toml
    /// segments/segment-00003-of-00016.parquet --bucket 3/16 --dataset s3://bucket/dataset --out
    /// s3://bucket/parts/3.json
    Write(parts::WriteArguments),
    /// Commit the ranges that `write` has written
    ///
    /// Example: onefold-ingest commit s3://bucket/dataset s3://bucket/parts
    Commit(parts::CommitArguments),
    /// Split an arriving log by the hash of its keys into segments that compress better and cluster alone
    ///
    /// Logs that are split by the same key into the same number of segments match segment by segment. Example:
    /// onefold-ingest shard logs/features/*.parquet --by session_id --segments 16 --out segments
    Shard(shard::ShardArguments),
    /// Read a whole dataset and list everything that is wrong with it
    ///
    /// With `--absent`, also search all existing snapshots for users, and list what is found. Example: onefold-ingest
    /// verify dataset
    Verify(verify::VerifyArguments),
    /// List the snapshots of a dataset: when each was committed, and what it changed
    ///
    /// Example: onefold-ingest history s3://bucket/dataset
    History(history::HistoryArguments),
    /// Remove old snapshots, and files that no other snapshot names
    ///
    /// Files of killed writers are removed, too. The newest snapshot is always kept, and so are files whose names are
    /// not those of dataset files. Example: onefold-ingest vacuum dataset --keep 10 --older-than 1d
    Vacuum(vacuum::VacuumArguments),
    /// Remove the samples of users from a dataset
    ///
    /// Only files with samples of the users are rewritten. The file of users has the values of the session's key, or of
    /// the user if a pause ends sessions. The new snapshot equals a dataset that was built from logs without the users.
    /// Older snapshots still contain them. With `--purge`, these snapshots are removed, too, and everything that reads
    /// one of them fails afterwards. Example: onefold-ingest forget dataset --users users.txt
    Forget(forget::ForgetArguments),
    /// Merge the files of partitions that have more files than a build writes
    ///
    /// A range of buckets with more files or row groups than a new dataset would have is rewritten as in a new dataset.
    /// Samples and digest do not change. If no range needs it, nothing is committed. Example: onefold-ingest compact
    /// dataset --partition 'date>=2024-06-01'
    Compact(compact::CompactArguments),
    /// Drop features from a dataset, without rewriting files
    ///
    /// Older snapshots still have them. The space of their columns becomes free when partitions are written again and
    /// old snapshots are removed by `vacuum`. Example: onefold-ingest drop-features dataset user_age item_tags
    DropFeatures(features::DropArguments),
    /// Rename a feature of a dataset, without rewriting files
    ///
    /// Older snapshots have the old name. Example: onefold-ingest rename-feature dataset user_tags user_topics
    RenameFeature(features::RenameArguments),
    /// Measure how much repeats in a dataset, its size on disk in each layout, and how much training can gain
    ///
    /// Example: onefold-ingest report dataset --html report.html
    Report(report::ReportArguments),
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &ERRORS;

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        match &self.command {
            Command::Init(arguments) => init::run(arguments, printer),
            Command::Build(arguments) => build::run_build(arguments, None, printer),
            Command::Check(arguments) => check::run(arguments, printer),
            Command::Append(arguments) => build::run_append(arguments, None, printer),
            Command::AddFeatures(arguments) => columns::run(arguments, ColumnsTask::Features, printer),
            Command::Relabel(arguments) => columns::run(arguments, ColumnsTask::Labels, printer),
            Command::Write(arguments) => parts::run_write(arguments, printer),
            Command::Commit(arguments) => parts::run_commit(arguments, printer),
            Command::Shard(arguments) => shard::run(arguments, printer),
            Command::Verify(arguments) => verify::run(arguments, printer),
            Command::History(arguments) => history::run(arguments, printer),
            Command::Vacuum(arguments) => vacuum::run(arguments, printer),
            Command::Forget(arguments) => forget::run(arguments, printer),
            Command::Compact(arguments) => compact::run(arguments, printer),
            Command::DropFeatures(arguments) => features::run_drop(arguments, printer),
            Command::RenameFeature(arguments) => features::run_rename(arguments, printer),
            Command::Report(arguments) => report::run(arguments, printer),
        }
    }
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
