//! The command line of `onefold-shard`. Arguments are checked before any file is accessed.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};
use onefold_base::units::parse_bytes;
use onefold_ikjt::Dedupe;
use onefold_sharding::torchrec::Module;
use onefold_sharding::{MAX_RANKS, ModelFile, searches};
use onefold_terminal::OutputOptions;

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
  onefold-shard plan --tables tables.json --topology topology.json --out plan.json
  onefold-shard show plan.json --html plan.html

A job that continues with other tables or ranks:
  onefold-shard replan --plan plan.json --tables new.json --budget 10GiB --out new-plan.json";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Place tables on the ranks of a topology
    ///
    /// Writes `plan.json`: the rank and the exact row and column range of every shard, and the compute, communication
    /// and memory predicted for every rank. The search `beam` splits tables by columns and rows, copies small ones, and
    /// places the shards so that the most expensive rank is as cheap as can be found. A plan never exceeds the memory
    /// of a rank; if a table fits nowhere, nothing is written and the error says how much is missing.
    Plan(PlanArguments),
    /// Change the plan of a running job, with few moves
    ///
    /// Starts from the old plan. First it moves the shards of ranks that no longer exist, and shards for which their
    /// ranks lack memory. Then it moves, halves, divides and copies tables while this makes the most expensive rank
    /// cheaper, and while at most `--budget` bytes of weights and optimizer state move to ranks that do not have them.
    /// Resume the training with the new plan: each rank reads its shards from the checkpoint's files.
    Replan(ReplanArguments),
    /// Describe the tables of a model, from its training configuration and dataset
    ///
    /// Writes `tables.json`: one table per sparse feature, of the size that `[embedding]` and `[tables]` give
    /// it, with the optimizer state of `[optimizer.tables]`, after the preprocessing that `[data]` names. Ids
    /// per sample are those of the partitions that `[data].train` chooses; dedupe factors, how often rows are
    /// looked up, and which ones most, are counted in their first batches. With `--torchrec` the tables come
    /// from JSON with the fields of TorchRec's `EmbeddingBagConfig` instead.
    Tables(TablesArguments),
    /// Fit a cost model to measured costs
    ///
    /// Reads `costs.parquet` of `onefold-train-tools profile`, fits linear models with weights of at least 0 (computation, and
    /// each direction of exchange that was measured), and reports their errors on held-out samples. With `--network` a
    /// network of NeuroShard corrects the model of the computation. If it does not beat the linear model, no model is
    /// written.
    Pretrain(PretrainArguments),
    /// Show a plan: its ranks, the bottleneck, and the reasons for the places of large tables
    Show(ShowArguments),
    /// Show which tables two plans place differently
    Diff(DiffArguments),
    /// Write a plan as JSON that builds TorchRec's `ShardingPlan`
    Export(ExportArguments),
    /// Describe the ranks that train together
    ///
    /// Writes `topology.json`, which you can edit. With `--measure`, ranks are on this machine's processor. Otherwise
    /// the default bandwidths are those of H100 GPUs: 3.35 TB/s of HBM3, 450 GB/s of NVLink in one direction, and one
    /// 400 Gb/s network port per GPU. Describe ranks that differ as `groups` in the file, each with its number of ranks
    /// and the values that differ.
    Topology(TopologyArguments),
    /// Check that a plan fits tables and a topology
    ///
    /// Each table must occur exactly once, its shards must cover its rows and columns without a gap or an overlap, and
    /// no rank may need more than its memory for the batch size of the tables, with a reserve for batches above the
    /// mean. Otherwise the first fault is printed, and the exit status is 1.
    Check(CheckArguments),
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// The search: ours, NeuroShard's as published, or a baseline
    #[arg(long, default_value = "beam", value_parser = search_names())]
    pub(crate) search: String,
    /// Seed of the search `random`; the other searches are deterministic
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Also print the cost of the plan with this table in other places; may be given several times
    #[arg(long, value_name = "TABLE")]
    pub(crate) explain: Vec<String>,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

#[derive(Debug, Args)]
pub(crate) struct ReplanArguments {
    /// The present plan of the job
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: PathBuf,
    /// The tables as they are now (`onefold-shard tables` writes the file)
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// The topology, if it differs from that of the plan
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    /// Largest amount of weights and optimizer state that may move to other ranks; with 0, only new tables and rows are
    /// placed
    #[arg(long, value_name = "SIZE", value_parser = parse_budget)]
    pub(crate) budget: u64,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

/// Returns a parser of the names of all searches, ours first.
fn search_names() -> PossibleValuesParser {
    PossibleValuesParser::new(searches(0).iter().rev().map(|search| search.id()))
}

/// The choice of the cost model.
#[derive(Debug, Args)]
pub struct ModelOptions {
    /// A learned cost model's file (`onefold-shard pretrain` writes one), `cpu` for the one that comes with this
    /// program, or `analytic` for TorchRec's formulas [default: the model that comes with this program if the topology
    /// names its hardware, else the formulas]; may be given several times, for ranks of several kinds of hardware
    #[arg(long, value_name = "MODEL", value_parser = parse_model)]
    pub(crate) model: Vec<ModelChoice>,
    /// Use the model although it was measured on other hardware than the topology names; of several models, the first
    /// one is used for ranks without a model of their hardware
    #[arg(long, requires = "model")]
    pub(crate) any_hardware: bool,
}

/// A source of predicted costs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ModelChoice {
    /// TorchRec's formulas.
    Analytic,
    /// A model that is part of the program.
    Shipped(&'static str),
    /// The file of a model.
    File(PathBuf),
}

/// Parses the name of a model or a path. A file whose name is also the name of a model can be given as `./cpu`.
fn parse_model(text: &str) -> Result<ModelChoice, String> {
    let shipped = ModelFile::SHIPPED.into_iter().find(|name| *name == text);
    Ok(match shipped {
        Some(name) => ModelChoice::Shipped(name),
        None if text == "analytic" => ModelChoice::Analytic,
        None => ModelChoice::File(PathBuf::from(text)),
    })
}

#[derive(Debug, Args)]
pub(crate) struct PretrainArguments {
    /// Measured costs (`onefold-train-tools profile` writes the file)
    pub(crate) costs: PathBuf,
    /// Also train a network that corrects the linear model, for hardware such as GPUs, where time is not proportional to
    /// work
    #[arg(long)]
    pub(crate) network: bool,
    /// Passes of the network over the training samples
    #[arg(long, requires = "network", default_value_t = 300, value_parser = parse_count)]
    pub(crate) epochs: usize,
    /// Parts of the cross-validation
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = parse_count)]
    pub(crate) folds: usize,
    /// Seed of the split, and of the network's initial weights and order of samples
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Costs of some of the same sets, measured again: the report then contains the error of a repeated measurement
    #[arg(long, value_name = "FILE")]
    pub(crate) repeated: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// The plan (`plan.json`)
    pub(crate) plan: PathBuf,
    /// Also write a self-contained page
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Replace an existing page
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// The first plan
    pub(crate) before: PathBuf,
    /// The second plan
    pub(crate) after: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// The plan (`plan.json`)
    pub(crate) plan: PathBuf,
    /// Write the format that TorchRec reads; there is no other format yet
    #[arg(long, required = true)]
    pub(crate) torchrec: bool,
    /// Path of an embedding collection in the model, such as `sparse_arch.embedding_bag_collection`, and its tables;
    /// without tables, it has all tables that no other module has. May be given several times [default: the model
    /// itself]
    #[arg(long, value_name = "PATH[=TABLE,…]", value_parser = parse_module)]
    pub(crate) module: Vec<Module>,
    /// Device of the shards
    #[arg(long, default_value = "cuda", value_parser = ["cuda", "cpu"])]
    pub(crate) device: String,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

/// Parses `PATH`, or `PATH=TABLE,TABLE`.
fn parse_module(text: &str) -> Result<Module, String> {
    let Some((path, tables)) = text.split_once('=') else { return Ok(Module::of_all(text)) };
    let tables: Vec<String> = tables.split(',').map(|table| table.trim().to_owned()).collect();
    if tables.iter().any(String::is_empty) {
        return Err(format!("`{text}` names a table without a name; write it like `sparse.ebc=user,item`"));
    }
    Ok(Module { path: path.to_owned(), tables })
}

#[derive(Debug, Args)]
pub(crate) struct TablesArguments {
    /// The training configuration (`train.toml`)
    #[arg(required_unless_present = "torchrec", conflicts_with = "torchrec", requires = "data")]
    pub(crate) config: Option<PathBuf>,
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    #[arg(long, value_name = "DATASET", requires = "config", conflicts_with = "torchrec")]
    pub(crate) data: Option<PathBuf>,
    /// Tables as JSON with TorchRec's field names, in place of a configuration and a dataset
    #[arg(long, value_name = "FILE")]
    pub(crate) torchrec: Option<PathBuf>,
    /// The number of the dataset's snapshot [default: with `--resume` that of the run, otherwise the newest]
    #[arg(long, value_name = "N", conflicts_with = "torchrec")]
    pub(crate) at: Option<u64>,
    /// The run whose model will be trained further, as in the training's option `--warm-start`: its tables keep their
    /// rows
    #[arg(long, value_name = "RUN", conflicts_with = "torchrec")]
    pub(crate) warm_start: Option<PathBuf>,
    /// The run that will be resumed on other ranks or with another plan: its snapshot and its tables are used
    #[arg(long, value_name = "RUN", conflicts_with_all = ["torchrec", "warm_start"])]
    pub(crate) resume: Option<PathBuf>,
    /// Dedupe factor of a feature group [default: as counted in the samples that are read]
    #[arg(long, value_name = "GROUP=FACTOR", value_parser = GroupFactor::parse, conflicts_with = "torchrec")]
    pub(crate) dedupe_factor: Vec<GroupFactor>,
    /// How the training deduplicates batches, as in its option `--dedupe`
    #[arg(long, value_enum, default_value_t = Dedupe::Window, conflicts_with = "torchrec")]
    pub(crate) dedupe: Dedupe,
    /// Samples to read, to count how often rows are looked up and how much is deduplicated; with 0 only the dataset's
    /// statistics are used
    #[arg(long, value_name = "N", default_value_t = onefold_sharding::ACCESS_BATCH, conflicts_with = "torchrec")]
    pub(crate) samples: u64,
    /// Memory for counted ids; if the ids need more, fewer samples are counted
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "1GiB", conflicts_with = "torchrec")]
    pub(crate) memory_limit: u64,
    #[command(flatten)]
    pub(crate) output: OutputFile,
}

#[derive(Debug, Args)]
pub(crate) struct TopologyArguments {
    /// Number of ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub(crate) ranks: u32,
    /// Memory of a rank for tables, their optimizer state and exchange buffers, such as `60GiB`: the memory of the
    /// device without that of activations, the dense model and the framework
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) memory: u64,
    /// Measure this machine, for ranks on its processor: the bandwidths of its memory and of messages between its ranks,
    /// and its name
    #[arg(long)]
    pub(crate) measure: bool,
    /// Ranks of one machine; must divide the ranks [default: with `--measure` all, otherwise as many as divide the ranks,
    /// up to 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub(crate) ranks_per_node: Option<u32>,
    /// Bandwidth of a rank's memory, per second [default: as measured, or an H100's: 3.35e12]
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth)]
    pub(crate) memory_bandwidth: Option<f64>,
    /// Bandwidth between ranks of one machine, per second and direction [default: as measured, or an H100's: 4.5e11]
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth)]
    pub(crate) intra_node_bandwidth: Option<f64>,
    /// Bandwidth of a rank to other machines, per second and direction [default: as measured between ranks of this
    /// machine, or an H100's: 5e10]
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth)]
    pub(crate) inter_node_bandwidth: Option<f64>,
    /// The hardware of a rank, as `onefold-train-tools profile` names it; learned cost models need it [default: as measured]
    #[arg(long, value_name = "NAME")]
    pub(crate) hardware: Option<String>,
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

/// The inputs of a plan.
#[derive(Debug, Args)]
pub(crate) struct Inputs {
    /// The tables (`onefold-shard tables` writes the file)
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// The topology (`onefold-shard topology` writes the file)
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: PathBuf,
}

/// The output file of a command.
#[derive(Debug, Args)]
pub(crate) struct OutputFile {
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// A dedupe factor of a feature group, given as `GROUP=FACTOR`.
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

/// Parses a number of at least 1.
///
/// # Errors
///
/// A message for other texts.
pub fn parse_count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| format!("`{text}` is not a number of at least 1"))
}

/// Parses a size, or `0`.
fn parse_budget(text: &str) -> Result<u64, String> {
    if text.trim() == "0" { Ok(0) } else { parse_bytes(text) }
}

/// Parses a bandwidth in bytes per second: a number like `3.35e12`, or a size like `450GB`.
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
    fn a_module_is_a_path_and_tables() {
        assert_eq!(parse_module("sparse.ebc"), Ok(Module::of_all("sparse.ebc")));
        let tables = vec!["user".to_owned(), "item".to_owned()];
        assert_eq!(parse_module("ebc=user, item"), Ok(Module { path: "ebc".into(), tables }));
        assert!(parse_module("ebc=").unwrap_err().contains("without a name"));
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
