//! A master and workers on one machine.

use std::env;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use onefold_datasets::process::available_threads;
use onefold_datasets::progress::Reporter;
use onefold_datasets::units::parse_bytes;
use onefold_terminal::Printer;
use tokio::process::{Child, Command};

use crate::master::{self, MasterArguments};

/// How often workers that have ended are started again.
const LOOK: Duration = Duration::from_millis(500);

/// A worker that ends so often has a reason that starting it again does not remove.
const MOST_RESTARTS: usize = 20;

/// The arguments of `local`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LocalArguments {
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// Memory of all workers together
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "2GiB")]
    memory_limit: u64,
    /// Threads of all workers together, at least one for each [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    #[command(flatten)]
    master: MasterArguments,
}

/// Runs a master and its workers until the master ends.
pub(crate) async fn run(arguments: &LocalArguments, printer: &Printer) -> anyhow::Result<()> {
    if !arguments.master.listen.ip().is_loopback() {
        bail!(
            "the workers of `onefold-serve local` are on loopback, but clients would come to `{}`\n  hint: run \
             `onefold-serve master` and `onefold-serve worker` to serve other machines",
            arguments.master.listen
        );
    }
    let listener = master::listen(&arguments.master).await?;
    let address = listener.local_addr()?.to_string();
    let mut workers = Vec::new();
    for _ in 0..arguments.workers {
        workers.push(arguments.start_worker(&address)?);
    }
    tokio::select! {
        done = master::serve_on(listener, &arguments.master, printer) => done,
        failed = keep(&mut workers, arguments, &address, printer) => failed,
    }
}

impl LocalArguments {
    fn start_worker(&self, master: &str) -> anyhow::Result<Child> {
        let threads = self.threads.map_or_else(available_threads, usize::from);
        let threads = (threads / usize::from(self.workers)).max(1);
        let memory_limit = self.memory_limit / u64::from(self.workers);
        let mut command = Command::new(env::current_exe().context("the path of this program is not known")?);
        command.args(["worker", "--until-stdin-closes", "--quiet", "--master", master]);
        command.args(["--threads", &threads.to_string(), "--memory-limit", &memory_limit.to_string()]);
        command.args(self.master.security.to_arguments());
        // Its stdin is closed when this process ends, whatever ends it.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
        command.spawn().context("a worker cannot be started")
    }
}

/// Starts workers again that have ended. Ends if they end again and again.
async fn keep(
    workers: &mut [Child],
    arguments: &LocalArguments,
    master: &str,
    printer: &Printer,
) -> anyhow::Result<()> {
    let mut restarts = 0;
    loop {
        tokio::time::sleep(LOOK).await;
        for worker in &mut *workers {
            let Some(status) = worker.try_wait()? else { continue };
            restarts += 1;
            if restarts > MOST_RESTARTS {
                bail!(
                    "workers end again and again, the last one with {status}\n  hint: their messages stand above"
                );
            }
            printer.note(&format!("a worker ended with {status}, and is started again"));
            *worker = arguments.start_worker(master)?;
        }
    }
}
