//! Runs a master and workers on one machine.

use std::collections::VecDeque;
use std::env;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::process::available_threads;
use onefold_base::units::{format_bytes, parse_bytes};
use onefold_terminal::Printer;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use crate::autoscale::Bounds;
use crate::master::{self, ServingArguments};
use crate::server::listen;

/// The interval of checking for workers that have ended.
const LOOK: Duration = Duration::from_millis(500);

/// The maximal number of restarts of workers within [`LATELY`]. If there are more, restarting does not remove the cause.
const MOST_RESTARTS: usize = 20;

/// The time within which at most [`MOST_RESTARTS`] are allowed.
const LATELY: Duration = Duration::from_secs(600);

/// The least memory in bytes with which a worker can read anything.
const LEAST_MEMORY: u64 = 16 << 20;

/// The arguments of `local`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LocalArguments {
    /// Number of worker processes, or a range in which it follows the demand of clients
    #[arg(long, value_name = "N|LEAST..MOST", default_value = "1")]
    workers: Bounds,
    /// Memory of all workers together, at the largest number of workers
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "2GiB")]
    memory_limit: u64,
    /// Folder on a local disk for cached data that does not fit into memory
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// Limit on the data of all workers in `--cache-dir`
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64GiB", requires = "cache_dir")]
    cache_limit: u64,
    /// Number of threads of all workers together, at the largest number of workers; at least one for each worker
    /// [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    #[command(flatten)]
    serving: ServingArguments,
}

/// Runs a master and its workers until the master ends.
pub(crate) async fn run(arguments: &LocalArguments, printer: &Printer) -> anyhow::Result<()> {
    if !arguments.serving.listen.ip().is_loopback() {
        let message = format!(
            "the workers of `onefold-serve local` are on loopback, but clients would come to `{}`",
            arguments.serving.listen
        );
        let hint = "run `onefold-serve master` and `onefold-serve worker` to serve other machines";
        bail!(Fault::new(Kind::Options, message).hint(hint));
    }
    let most = arguments.workers.most as u64;
    if arguments.memory_limit / most < LEAST_MEMORY {
        let message = format!(
            "{most} workers would have {} of memory each",
            format_bytes(arguments.memory_limit / most)
        );
        let hint = format!(" to at least {}, or lower ", format_bytes(most * LEAST_MEMORY));
        let hint = text!["raise ", option("memory_limit"), hint, option("workers")];
        bail!(Fault::new(Kind::Options, message).hint(hint));
    }
    // Before workers are started, which would be refused.
    arguments.serving.security.load()?.check_roles()?;
    let listener = listen(arguments.serving.listen).await?;
    let address = listener.local_addr()?.to_string();
    let wanted = watch::Sender::new(arguments.workers.least);
    let (changes, bounds) = (wanted.subscribe(), arguments.workers);
    tokio::select! {
        done = master::serve_on(listener, &arguments.serving, bounds, wanted, printer) => done,
        failed = keep(arguments, &address, changes) => failed,
    }
}

impl LocalArguments {
    fn start_worker(&self, master: &str) -> anyhow::Result<Child> {
        let threads = self.threads.map_or_else(available_threads, usize::from);
        let threads = (threads / self.workers.most).max(1);
        let memory_limit = self.memory_limit / self.workers.most as u64;
        let mut command = Command::new(env::current_exe().context("the path of this program is not known")?);
        command.args(["worker", "--until-stdin-closes", "--quiet", "--master", master]);
        command.args(["--threads", &threads.to_string(), "--memory-limit", &memory_limit.to_string()]);
        if let Some(folder) = &self.cache_dir {
            let limit = self.cache_limit / self.workers.most as u64;
            command.arg("--cache-dir").arg(folder).args(["--cache-limit", &limit.to_string()]);
        }
        command.args(self.serving.security.to_arguments());
        // The pipe is closed when this process ends for any reason, or when the worker is no longer wanted.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
        command.spawn().context("a worker cannot be started")
    }
}

/// Keeps the wanted number of workers running: starts new workers, restarts workers that have ended, and drains the
/// newest ones if there are too many. Returns an error if workers end too often.
async fn keep(
    arguments: &LocalArguments,
    master: &str,
    wanted: watch::Receiver<usize>,
) -> anyhow::Result<()> {
    let (mut workers, mut draining) = (Vec::<Child>::new(), Vec::<Child>::new());
    let mut restarts = VecDeque::<Instant>::new();
    loop {
        let wanted = *wanted.borrow();
        while workers.len() > wanted
            && let Some(mut worker) = workers.pop()
        {
            // A worker drains when its stdin is closed.
            drop(worker.stdin.take());
            draining.push(worker);
        }
        while workers.len() < wanted {
            workers.push(arguments.start_worker(master)?);
        }
        tokio::time::sleep(LOOK).await;
        draining.retain_mut(|worker| !matches!(worker.try_wait(), Ok(Some(_))));
        for worker in &mut workers {
            let Some(status) = worker.try_wait()? else { continue };
            restarts.push_back(Instant::now());
            while restarts.front().is_some_and(|restart| restart.elapsed() > LATELY) {
                restarts.pop_front();
            }
            if restarts.len() > MOST_RESTARTS {
                let message = format!("workers end again and again, the last one with {status}");
                bail!(Fault::new(Kind::Failed, message).hint("their messages are printed above"));
            }
            tracing::warn!("a worker ended with {status}, and is started again");
            *worker = arguments.start_worker(master)?;
        }
    }
}
