//! The command line of `onefold-evaluate-plans`. Arguments are checked before any file is accessed.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use onefold_base::units::parse_bytes;
use onefold_sharding::MAX_RANKS;
use onefold_sharding_cli::{ModelOptions, parse_count};
use onefold_terminal::OutputOptions;

/// Compare the planner's searches on tasks like those of NeuroShard's benchmark
#[derive(Debug, Parser)]
#[command(name = "onefold-evaluate-plans", version, propagate_version = true, after_help = STEPS)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

const STEPS: &str = "\
The searches beside each other:
  onefold-evaluate-plans tasks --tables 10-60 --ranks 4 --count 100 --seed 1 --out tasks
  onefold-evaluate-plans compare --tasks tasks";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Draw placement tasks like those of NeuroShard's benchmark
    ///
    /// Writes a folder per task with `tables.json` and `topology.json`. Tables are drawn with replacement from a pool
    /// of 856 whose rows and pooling factors have the mean and deviation of Meta's public ones, with random dimensions.
    Tasks(TasksArguments),
    /// Run every search on the same tasks, and print their predicted costs
    Compare(CompareArguments),
}

#[derive(Debug, Args)]
pub(crate) struct TasksArguments {
    /// Tables of a task: a number, or a range like `10-60`
    #[arg(long, value_name = "N", value_parser = parse_range)]
    pub(crate) tables: RangeInclusive<usize>,
    /// Number of ranks
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub(crate) ranks: u32,
    /// Dimensions are 4, 8, 16, … up to this
    #[arg(long, value_name = "D", default_value_t = 128)]
    pub(crate) max_dim: u64,
    /// Number of tasks
    #[arg(long, value_name = "K", value_parser = parse_count)]
    pub(crate) count: usize,
    /// Another seed gives other tasks
    #[arg(long, value_name = "S")]
    pub(crate) seed: u64,
    /// Memory of a rank
    #[arg(id = "memory_bytes", long = "memory", value_name = "SIZE", value_parser = parse_bytes, default_value = "4GiB")]
    pub(crate) memory: u64,
    /// Samples per step over all ranks
    #[arg(long, value_name = "N", default_value_t = 65_536)]
    pub(crate) global_batch_size: u64,
    /// Directory to write; it must not be there
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArguments {
    /// Directory of tasks (`tasks` writes one)
    #[arg(long, value_name = "DIR")]
    pub(crate) tasks: PathBuf,
    /// Also write every plan, a folder per task with a file per search, as `onefold-train-tools measure-plans` takes them;
    /// the directory must not be there
    #[arg(long, value_name = "DIR")]
    pub(crate) plans: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// Seed of the search `random`
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Parses `20`, or `10-60`.
fn parse_range(text: &str) -> Result<RangeInclusive<usize>, String> {
    let wrong = || format!("`{text}` is not a number of tables; write it like `20` or `10-60`");
    let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
    match text.split_once('-') {
        None => number(text).map(|tables| tables..=tables),
        Some((least, most)) => Ok(number(least)?..=number(most)?),
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

    #[test]
    fn a_range_is_a_number_or_two() {
        assert_eq!(parse_range("20"), Ok(20..=20));
        assert_eq!(parse_range("10-60"), Ok(10..=60));
        assert!(parse_range("ten").unwrap_err().contains("write it like `20` or `10-60`"));
        assert!(parse_count("0").is_err());
    }
}
