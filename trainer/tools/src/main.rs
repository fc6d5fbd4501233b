//! `onefold-train-tools`: measures the trainer and checks its kernels, for developers.

mod bench;
mod check;
mod measure;
mod profile;

use std::path::Path;

use clap::{Parser, Subcommand};
use onefold_base::fault::{Explainer, Fault, Kind, Text};
use onefold_base::process::available_threads;
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};
use onefold_trainer::Error;
use onefold_trainer::command::{self, LaunchArguments};

onefold_allocator::use_jemalloc!(onefold_allocator::KEEPING);

/// Measure the trainer, and check GPUs
#[derive(Debug, Parser)]
#[command(name = "onefold-train-tools", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a command on several ranks of this machine, as `onefold-train launch` does
    ///
    /// Example: onefold-train-tools launch --ranks 4 -- check-device --device cuda
    Launch(LaunchArguments),
    /// Measure training steps of a workload's reference model, with deduplication off and on
    ///
    /// Example: onefold-train-tools bench --workload rm1 --data rm1-session --threads 2
    Bench(bench::BenchArguments),
    /// Check a GPU against the CPU: every kernel, then the losses of training steps
    ///
    /// The command compares the results of all kernels on random numbers with their definitions in double precision.
    /// With the dataset of a workload, it also trains the reference model on both, and compares the losses. On ranks
    /// (`launch --ranks N -- check-device --device cuda`, also with one rank), each rank checks its GPU, and all ranks
    /// together check NCCL. The exit status is 1 if a difference is too large.
    ///
    /// Example: onefold-train-tools check-device --device cuda:0 --workload rm1 --data rm1-session
    CheckDevice(check::CheckArguments),
    /// Measure the cost of tables on this machine, for `onefold-shard pretrain`
    ///
    /// The command divides random sets of tables among one to eight ranks, which take turns on this machine, runs
    /// training steps of these tables, and writes the time of each rank to `costs.parquet`. With `--collectives`, ranks
    /// that `launch` or `torchrun` started measure the exchange between them; without such measurements, a cost model
    /// uses bytes ÷ bandwidth.
    ///
    /// Example: onefold-train-tools profile --sets 500 --out costs.parquet
    ///
    /// Example: onefold-train-tools launch --ranks 4 -- profile --collectives --out costs.parquet --append
    Profile(measure::ProfileArguments),
    /// Measure the ranks of plans, or whole steps, and compare with the predictions
    ///
    /// The command creates the shards of all ranks, runs training steps of the tables, in which the ranks take turns on
    /// this machine, and reports whether measurements order the plans as predictions do. If `launch` or `torchrun`
    /// starts as many ranks as the plans have, these also measure the exchange between them, and so whole steps.
    ///
    /// Example: onefold-evaluate-plans compare --tasks tasks --plans plans; onefold-train-tools measure-plans --tasks tasks --plans
    /// plans
    ///
    /// Example: onefold-train-tools launch --ranks 4 -- measure-plans plan.json even.json --tables tables.json
    MeasurePlans(measure::MeasurePlansArguments),
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = command::ERRORS;

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        match &self.command {
            Command::Launch(arguments) => {
                let commands = "`measure-plans`, `profile --collectives` and `check-device`";
                command::launch(arguments, self.output, commands, |cli: &Self| match &cli.command {
                    Command::MeasurePlans(_) | Command::CheckDevice(_) => true,
                    Command::Profile(arguments) => arguments.is_of_ranks(),
                    _ => false,
                })
            }
            Command::Bench(arguments) => bench::run(arguments, printer),
            Command::CheckDevice(arguments) => check::run(arguments, printer),
            Command::Profile(arguments) => measure::profile_machine(arguments, printer),
            Command::MeasurePlans(arguments) => measure::measure(arguments, printer),
        }
    }
}

/// Returns the number of threads: `given`, or all threads of the machine.
fn threads(given: Option<u16>) -> usize {
    given.map_or_else(available_threads, usize::from)
}

/// Returns an error about a file or directory that was given.
fn wrong_file(path: &Path, message: impl Into<Text>, hint: impl Into<Text>) -> Error {
    Fault::of_file(Kind::Options, path, message).hint(hint).into()
}

fn main() {
    command::set_environment();
    command::main(Program::of::<Cli>())
}
