//! The command line of `onefold-shard`: what is typed, checked before any file is touched.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use onefold_datasets::console::OutputOptions;
use onefold_datasets::units::parse_bytes;
use onefold_sharding::{MAX_RANKS, Topology};

/// Place embedding tables on ranks: describe the tables and the machine, make a plan, check a plan
#[derive(Debug, Parser)]
#[command(name = "onefold-shard", version, propagate_version = true, after_help = STEPS)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

const STEPS: &str = "\
From a dataset to a plan:
  onefold-shard tables train.toml --data DATASET --out tables.json
  onefold-shard topology --ranks 8 --memory 60GiB --out topology.json
  onefold-shard plan --tables tables.json --topology topology.json --out plan.json";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Place tables on the ranks of a topology
    ///
    /// Writes `plan.json`: the rank and the exact row and column range of every shard, and the compute,
    /// communication and memory predicted for every rank. Whole tables go onto ranks by size, the
    /// largest first, each onto the rank with the least memory used. A plan never exceeds the memory of a rank; if
    /// a table fits nowhere, nothing is written and the error says how much is missing.
    Plan(PlanArguments),
    /// Describe the tables of a model, from its training configuration and dataset
    ///
    /// Writes `tables.json`: one table per sparse feature, of the size that `[embedding]` and `[tables]` give
    /// it, with the optimizer state of `[optimizer.tables]`. The pooling factor, the mean number of ids per
    /// sample, comes from the statistics of the whole dataset.
    Tables(TablesArguments),
    /// Describe the ranks that train together
    ///
    /// Writes `topology.json`, to be edited. The bandwidths default to GPUs of the H100 class: 3.35 TB/s of
    /// HBM3, 450 GB/s of NVLink in one direction, one 400 Gb/s network port for each GPU.
    Topology(TopologyArguments),
    /// Check that a plan fits tables and a topology
    ///
    /// Each table must be there exactly once, its shards must tile its rows and columns without a gap or an
    /// overlap, and no rank may hold more than its memory. Exits with status 1 and the first fault otherwise.
    Check(CheckArguments),
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

#[derive(Debug, Args)]
pub(crate) struct TablesArguments {
    /// The training configuration (`train.toml`)
    pub(crate) config: PathBuf,
    /// Directory of the dataset
    #[arg(long, value_name = "DATASET")]
    pub(crate) data: PathBuf,
    /// Dedupe factor of a feature group, as `onefold-read bench` measures it [default: 1 for every group]
    #[arg(long, value_name = "GROUP=FACTOR", value_parser = GroupFactor::parse)]
    pub(crate) dedupe_factor: Vec<GroupFactor>,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

#[derive(Debug, Args)]
pub(crate) struct TopologyArguments {
    /// Number of ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub(crate) ranks: u32,
    /// Memory of a rank for tables and their optimizer state, like `60GiB`: what the device has, less what
    /// activations, the dense model and the framework take
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) memory: u64,
    /// Ranks of one machine; must divide the ranks [default: all ranks up to 8, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub(crate) ranks_per_node: Option<u32>,
    /// Bandwidth of a rank's memory, per second
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth, default_value_t = Topology::H100_MEMORY_BANDWIDTH)]
    pub(crate) memory_bandwidth: f64,
    /// Bandwidth between ranks of one machine, per second and direction
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth, default_value_t = Topology::H100_INTRA_NODE_BANDWIDTH)]
    pub(crate) intra_node_bandwidth: f64,
    /// Bandwidth of a rank to other machines, per second and direction
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth, default_value_t = Topology::H100_INTER_NODE_BANDWIDTH)]
    pub(crate) inter_node_bandwidth: f64,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// The plan (`plan.json`)
    pub(crate) plan: PathBuf,
    #[command(flatten)]
    pub(crate) inputs: Inputs,
}

/// What a plan is made from.
#[derive(Debug, Args)]
pub(crate) struct Inputs {
    /// The tables (`onefold-shard tables` writes the file)
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// The topology (`onefold-shard topology` writes the file)
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: PathBuf,
}

/// Where a command writes.
#[derive(Debug, Args)]
pub(crate) struct OutputFile {
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Replace the file if it is there
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// A `GROUP=FACTOR` of the command line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GroupFactor {
    pub(crate) group: String,
    pub(crate) factor: f64,
}

impl GroupFactor {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("`{text}` is not GROUP=FACTOR with a factor of at least 1; write it like `history=4.5`")
        };
        let (group, factor) = text.rsplit_once('=').ok_or_else(wrong)?;
        let factor: f64 = factor.trim().parse().map_err(|_| wrong())?;
        if !factor.is_finite() || factor < 1.0 || group.is_empty() {
            return Err(wrong());
        }
        Ok(Self { group: group.to_owned(), factor })
    }
}

/// Bytes per second: a number like `3.35e12`, or a size like `450GB`.
fn parse_bandwidth(text: &str) -> Result<f64, String> {
    let number = text.trim().parse::<f64>().or_else(|_| parse_bytes(text).map(|bytes| bytes as f64));
    let valid = number.ok().filter(|bandwidth| bandwidth.is_finite() && *bandwidth >= 1.0);
    valid.ok_or_else(|| {
        format!("`{text}` is not a number of bytes per second; write it like `450GB` or `4.5e11`")
    })
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
    fn bandwidths_are_numbers_or_sizes() {
        assert_eq!(parse_bandwidth("3.35e12"), Ok(3.35e12));
        assert_eq!(parse_bandwidth("450GB"), Ok(4.5e11));
        for wrong in ["", "0", "-1", "inf", "NaN", "fast"] {
            assert!(parse_bandwidth(wrong).unwrap_err().contains("write it like `450GB`"), "{wrong}");
        }
    }

    #[test]
    fn a_group_factor_is_a_name_and_a_number_of_at_least_one() {
        let parsed = GroupFactor::parse("history=4.5").unwrap();
        assert_eq!(parsed, GroupFactor { group: "history".into(), factor: 4.5 });
        for wrong in ["history", "history=", "=2", "history=0.5", "history=NaN", "history=inf", "history=x"] {
            assert!(GroupFactor::parse(wrong).unwrap_err().contains("is not GROUP=FACTOR"), "{wrong}");
        }
    }
}
