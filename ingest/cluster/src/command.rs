//! The command line of `onefold-cluster`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Parser, Subcommand};
use onefold_base::address::Address;
use onefold_base::fault::Explainer;
use onefold_ingest::command::{AppendArguments, BuildArguments, run_append, run_build};
use onefold_ingest::remote::Cluster;
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};

use crate::client::Client;
use crate::executor::ExecutorArguments;
use crate::scheduler::SchedulerArguments;
use crate::tls::TlsArguments;
use crate::{executor, scheduler};

/// The program.
pub const PROGRAM: Program = Program::of::<Cli>();

/// Build session-clustered training datasets from raw logs on a cluster of machines
#[derive(Debug, Parser)]
#[command(name = "onefold-cluster", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the scheduler, which takes builds and gives their tasks to executors
    ///
    /// It keeps its state in memory: if it ends, its builds fail, nothing of them is committed, and they can be run
    /// again. Example: onefold-cluster scheduler --bind 10.0.0.1
    Scheduler(SchedulerArguments),
    /// Run an executor, which reads logs, exchanges records with the others, and writes data files
    ///
    /// Example: onefold-cluster executor --scheduler 10.0.0.1:50050 --bind 10.0.0.2 --memory-limit 64GiB --work-dir /scratch
    Executor(ExecutorArguments),
    /// Build a dataset, as `onefold-ingest build` does, on the executors of a cluster
    ///
    /// All machines must reach the logs and `--out` by the same paths or URLs. Example: onefold-cluster build
    /// dataset.toml --out s3://bucket/dataset --scheduler 10.0.0.1:50050
    Build(OnCluster<BuildArguments>),
    /// Add partitions to a dataset, as `onefold-ingest append` does, on the executors of a cluster
    ///
    /// Example: onefold-cluster append dataset.toml --out s3://bucket/dataset --scheduler 10.0.0.1:50050
    Append(OnCluster<AppendArguments>),
}

/// The arguments of a build, and of its cluster.
#[derive(Debug, clap::Args)]
struct OnCluster<Arguments: clap::Args> {
    #[command(flatten)]
    arguments: Arguments,
    /// The scheduler, as `HOST:PORT`
    #[arg(long, value_name = "HOST:PORT")]
    scheduler: Address,
    /// Number of parts that each exchange has: two to four for every thread of all executors
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    partitions: u16,
    #[command(flatten)]
    tls: TlsArguments,
}

impl<Arguments: clap::Args> OnCluster<Arguments> {
    /// Connects to the cluster. `work_folder` is the folder that the processes share.
    fn cluster(&self, work_folder: &Path) -> anyhow::Result<Arc<dyn Cluster>> {
        let (scheduler, partitions) = (self.scheduler.clone(), usize::from(self.partitions));
        Ok(Arc::new(Client::new(scheduler, partitions, PathBuf::from(work_folder), self.tls.load()?)))
    }
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &onefold_ingest::command::ERRORS;

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        match &self.command {
            Command::Scheduler(arguments) => block_on(scheduler::run(arguments, printer)),
            Command::Executor(arguments) => block_on(executor::run(arguments, printer)),
            Command::Build(build) => {
                run_build(&build.arguments, Some(&|folder| build.cluster(folder)), printer)
            }
            Command::Append(append) => {
                run_append(&append.arguments, Some(&|folder| append.cluster(folder)), printer)
            }
        }
    }
}

/// Runs a server on a new runtime.
fn block_on(server: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(server)
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
