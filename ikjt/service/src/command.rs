//! The command line of `onefold-serve`.

use std::fmt::Write as _;

use clap::{Parser, Subcommand};
use onefold_base::address::{Address, Listening};
use onefold_base::fault::{Explainer, explained, option, text};
use onefold_base::units::{format_bytes, format_count};
use onefold_ikjt::service::protocol::Question;
use onefold_ikjt::service::{Failure, Network};
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};

use crate::local::LocalArguments;
use crate::master::MasterArguments;
use crate::messages::{AskStatus, Drain, Status};
use crate::rates::{JobRate, JobRates};
use crate::security::SecurityArguments;
use crate::server::told_if_silent;
use crate::worker::WorkerArguments;
use crate::{local, master, worker};

/// The program.
pub const PROGRAM: Program = Program::of::<Cli>();

/// Run a preprocessing service, whose hosts read, deduplicate and transform batches for trainers
///
/// Trainers, `onefold-read` and the Python package read a dataset through the service if the location of the dataset is
/// a URL such as `grpc://HOST:PORT/s3://bucket/dataset`.
#[derive(Debug, Parser)]
#[command(name = "onefold-serve", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the master, which assigns workers to clients
    ///
    /// The master stores no state: after a restart, workers and clients find it and continue. Example: onefold-serve
    /// master --listen 10.0.0.1:7070 --dataset clicks=s3://bucket/clicks
    Master(MasterArguments),
    /// Run a worker, which reads datasets and sends batches
    ///
    /// Example: onefold-serve worker --master 10.0.0.1:7070 --listen 10.0.0.2:7071 --memory-limit 64GiB
    Worker(WorkerArguments),
    /// Run a master and workers on this machine as one service
    ///
    /// Example: onefold-serve local --workers 1..8 --dataset clicks=data/clicks
    Local(LocalArguments),
    /// Show the workers and clients of a service
    ///
    /// Example: onefold-serve status --master 10.0.0.1:7070 --json
    Status(Asking),
    /// Show the jobs of a service
    ///
    /// Clients of equal jobs read the same batches, which are computed once. Example:
    /// onefold-serve jobs --master 10.0.0.1:7070
    Jobs(Asking),
    /// End a worker as soon as its clients have read what it computes
    ///
    /// Example: onefold-serve drain 10.0.0.2:7071 --master 10.0.0.1:7070
    Drain {
        /// Worker, as `HOST:PORT`
        worker: Address,
        #[command(flatten)]
        asking: Asking,
    },
}

/// Which master is asked, and how.
#[derive(Debug, clap::Args)]
struct Asking {
    /// Master, as `HOST:PORT`
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7070")]
    master: Address,
    #[command(flatten)]
    security: SecurityArguments,
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[explained::<onefold_ikjt::Error>];

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let done = match &self.command {
            Command::Master(arguments) => runtime.block_on(master::run(arguments, printer)),
            Command::Worker(arguments) => runtime.block_on(worker::run(arguments, printer)),
            Command::Local(arguments) => runtime.block_on(local::run(arguments, printer)),
            Command::Status(asking) => runtime.block_on(show_status(asking, printer)),
            Command::Jobs(asking) => runtime.block_on(show_jobs(asking, printer)),
            Command::Drain { worker, asking } => runtime.block_on(drain(worker, asking, printer)),
        };
        // Ends threads that still read files together with the process.
        runtime.shutdown_background();
        done
    }
}

/// Sends a question to the master once.
async fn ask<Q: Question>(asking: &Asking, question: &Q) -> anyhow::Result<Q::Answer> {
    let proof = asking.security.load()?;
    let network = Network::new(&proof.security, proof.secure)?;
    let master = asking.master.to_string();
    let say = || tracing::warn!("the master at `{master}` has not answered yet, still waiting");
    let answer = told_if_silent(network.ask(&master, question), say).await;
    answer.map_err(|failure| match failure {
        Failure::Final(error) => error.into(),
        Failure::Passing(cause) => {
            let master = option("master");
            let hint = text!["start one with `onefold-serve master`, or name another one with ", master];
            cause.within(&format!("no master answers at `{}`", asking.master)).hint(hint).into()
        }
        Failure::UnknownJob => anyhow::anyhow!("`{}` is not a master", asking.master),
    })
}

async fn show_status(asking: &Asking, printer: &Printer) -> anyhow::Result<()> {
    let status = ask(asking, &AskStatus {}).await?;
    Ok(printer.summary(&describe(&status), &status)?)
}

fn describe(status: &Status) -> String {
    let mut text = format!(
        "Onefold {}, up {:.0} s, {} leases, {} of {} wanted workers, {} clients",
        status.version,
        status.uptime_seconds,
        format_count(status.leases),
        status.workers.len(),
        status.wanted_workers,
        status.clients.len()
    );
    for (name, location) in &status.datasets {
        let _ = write!(text, "\ndataset {name:<22} {location}");
    }
    for worker in &status.workers {
        let figures = &worker.figures;
        let _ = write!(
            text,
            "\nworker  {:<22} {} threads, {} blocks, {} samples computed, {} sent, {} waiting, {} cached, {} on disk{}",
            worker.address,
            worker.threads,
            worker.blocks,
            format_count(figures.samples_computed),
            format_bytes(figures.bytes_sent),
            format_bytes(figures.bytes_kept),
            format_bytes(figures.cache.cached_bytes),
            format_bytes(figures.cache.cached_bytes_on_disk),
            if worker.draining { ", draining" } else { "" }
        );
    }
    for client in &status.clients {
        let share = 100.0 * client.waited_seconds / client.seconds.max(f64::MIN_POSITIVE);
        let _ = write!(
            text,
            "\nclient  {:<22} job {}, {} samples, {}, waiting {share:.0} % of the time, {}",
            client.client,
            client.job.get(..8).unwrap_or(&client.job),
            format_count(client.samples),
            format_bytes(client.bytes),
            client.dataset
        );
    }
    text
}

async fn show_jobs(asking: &Asking, printer: &Printer) -> anyhow::Result<()> {
    let status = ask(asking, &AskStatus {}).await?;
    let jobs = JobRates::of(&status.clients, &status.client_rates);
    let lines: Vec<String> = jobs.jobs.iter().map(describe_job).collect();
    let text = if lines.is_empty() { "no job is read".to_owned() } else { lines.join("\n") };
    Ok(printer.summary(&text, &jobs)?)
}

fn describe_job(job: &JobRate) -> String {
    format!(
        "job {}  {} {}, {} samples/s, waiting {:.0} % of the time, {} samples, {}",
        job.job.get(..8).unwrap_or(&job.job),
        job.clients,
        if job.clients == 1 { "client" } else { "clients" },
        format_count(job.samples_per_second as u64),
        100.0 * job.waiting_share,
        format_count(job.samples),
        job.dataset
    )
}

async fn drain(worker: &Address, asking: &Asking, printer: &Printer) -> anyhow::Result<()> {
    ask(asking, &Drain { worker: worker.to_string() }).await?;
    let text = format!("worker {worker} ends when its clients have read what it computes");
    Ok(printer.summary(&text, &Listening { address: worker.to_string() })?)
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
    fn processes_are_named_by_host_and_port() {
        for line in ["worker --master", "status --master", "jobs --master", "drain"] {
            for (address, is_right) in
                [("10.0.0.1:7070", true), ("10.0.0.1", false), ("http://a:7070", false)]
            {
                let words = format!("onefold-serve {line} {address}");
                assert_eq!(Cli::try_parse_from(words.split(' ')).is_ok(), is_right, "{words}");
            }
        }
    }
}
