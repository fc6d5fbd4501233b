//! A worker: reads datasets and sends batches.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::bail;
use axum::Router;
use futures::stream::{self, StreamExt};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::process::{available_threads, cpu_seconds};
use onefold_base::progress::Reporter;
use onefold_base::units::parse_bytes;
use onefold_ikjt::cache::Cache;
use onefold_ikjt::service::protocol::{
    CountSamples, Define, FindSnapshot, FindStatistics, Question, SampleCounts, Ticket,
};
use onefold_ikjt::service::{Failure, Network};
use onefold_ikjt::{Workers, load_snapshot, load_statistics};
use onefold_terminal::Printer;
use tonic::Status;

use crate::blocks::{Blocks, Subscription};
use crate::command::{Listening, listen, serve, told_to_end};
use crate::flight::{Answers, Batches, answer};
use crate::jobs::{Jobs, blocking};
use crate::messages::{Heartbeat, WorkerFigures, WorkerState};
use crate::security::SecurityArguments;

/// How often a worker names itself.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// How long a worker that is to end waits for clients that still read from it.
const DRAINING: Duration = Duration::from_secs(60);

/// The arguments of `worker`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WorkerArguments {
    /// The master, as `HOST:PORT`
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) master: String,
    /// Address to listen on; any free port if it is 0
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub(crate) listen: SocketAddr,
    /// Name or address by which clients reach this process [default: that of `--listen`]
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Memory for row groups and batches
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "2GiB")]
    pub(crate) memory_limit: u64,
    /// Folder on a local disk for what does not fit into memory and is worth reading again; workers may share one
    #[arg(long, value_name = "FOLDER")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// The most that this worker keeps in `--cache-dir`
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64GiB", requires = "cache_dir")]
    pub(crate) cache_limit: u64,
    /// Threads that decode, deduplicate and preprocess [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Drain when stdin is closed, as it is when the process that started this one ends
    #[arg(long, hide = true)]
    pub(crate) until_stdin_closes: bool,
    #[command(flatten)]
    pub(crate) security: SecurityArguments,
}

/// Runs a worker until it is told to end, or to drain.
pub(crate) async fn run(arguments: &WorkerArguments, printer: &Printer) -> anyhow::Result<()> {
    if arguments.host.is_none() && arguments.listen.ip().is_unspecified() {
        let message = format!(
            "clients cannot reach a worker at `{}`, which stands for all addresses of this machine",
            arguments.listen
        );
        let hint = text!["name the one that they reach with ", option("host")];
        bail!(Fault::new(Kind::Options, message).hint(hint));
    }
    let proof = arguments.security.load()?;
    let threads = arguments.threads.map_or_else(available_threads, usize::from);
    // One half for reading, and one for batches that wait for clients, and for the cache.
    let half = arguments.memory_limit / 2;
    let disk = arguments.cache_dir.as_deref().map(|folder| (folder, arguments.cache_limit));
    let cache = Cache::new(half, disk)?;
    let workers = Workers::new(threads, half)?.with_cache(&cache);
    let worker = Arc::new(Worker {
        jobs: Jobs::new(workers),
        blocks: Blocks::new(half, Arc::clone(&cache)),
        draining: AtomicBool::new(false),
    });
    let network = Network::new(&proof.security, proof.secure)?;
    let listener = listen(arguments.listen).await?;
    let port = listener.local_addr()?.port();
    let host = arguments.host.clone().unwrap_or_else(|| arguments.listen.ip().to_string());
    let address = match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    };
    let state = || WorkerState {
        address: address.clone(),
        threads,
        memory_limit_bytes: arguments.memory_limit,
        blocks: worker.blocks.active(),
        draining: worker.draining.load(Relaxed),
        figures: worker.figures(),
    };
    printer.summary(&format!("worker at {address}"), &Listening { address: address.clone() })?;
    let ended = tokio::select! {
        served = serve(listener, Arc::clone(&worker), &proof, Router::new()) => served,
        failed = name_itself(&network, &arguments.master, state, &worker, printer) => failed,
        () = drained(&worker, arguments.until_stdin_closes) => Ok(()),
    };
    cache.close();
    ended
}

/// Tells the master again and again that the worker is there. Ends only with what the master refuses.
async fn name_itself(
    network: &Network,
    master: &str,
    state: impl Fn() -> WorkerState,
    worker: &Worker,
    printer: &Printer,
) -> anyhow::Result<()> {
    let mut lost = false;
    loop {
        match network.ask(master, &Heartbeat { worker: state() }).await {
            Ok(orders) => {
                if std::mem::take(&mut lost) {
                    printer.note(&format!("the master at `{master}` answers again"));
                }
                if orders.drain {
                    worker.draining.store(true, Relaxed);
                }
            }
            Err(Failure::Final(error)) => return Err(error.into()),
            Err(Failure::Passing(cause)) if !lost => {
                lost = true;
                printer.note(&format!("the master at `{master}` does not answer, trying again: {cause}"));
            }
            Err(_) => (),
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

/// Waits until nobody can write to stdin any more.
async fn stdin_closed() {
    let (sender, closed) = tokio::sync::oneshot::channel();
    // A thread of its own, because a runtime that ends waits for those that read for it.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = sender.send(());
    });
    let _ = closed.await;
}

/// Waits until the worker was told to end and nobody reads from it any more.
async fn drained(worker: &Worker, until_stdin_closes: bool) {
    tokio::select! {
        () = stdin_closed(), if until_stdin_closes => worker.draining.store(true, Relaxed),
        () = told_to_end() => worker.draining.store(true, Relaxed),
        () = async {
            while !worker.draining.load(Relaxed) {
                tokio::time::sleep(HEARTBEAT).await;
            }
        } => (),
    }
    let idle = async {
        // The master hears of it first.
        loop {
            tokio::time::sleep(2 * HEARTBEAT).await;
            if worker.blocks.active() == 0 {
                return;
            }
        }
    };
    tokio::select! {
        () = idle => (),
        () = told_to_end() => (),
        () = tokio::time::sleep(DRAINING) => (),
    }
}

struct Worker {
    jobs: Jobs,
    blocks: Arc<Blocks>,
    draining: AtomicBool,
}

impl Worker {
    fn figures(&self) -> WorkerFigures {
        WorkerFigures { cpu_seconds: cpu_seconds().unwrap_or(0.0), ..self.blocks.figures() }
    }
}

#[tonic::async_trait]
impl Answers for Worker {
    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status> {
        match action {
            FindSnapshot::ACTION => {
                answer(body, async |question: FindSnapshot| {
                    let FindSnapshot { location, number } = question;
                    let load = move || Ok(load_snapshot(location.as_ref(), number)?.without_columns());
                    blocking(load).await
                })
                .await
            }
            FindStatistics::ACTION => {
                answer(body, async |question: FindStatistics| {
                    let FindStatistics { location, number, partitions } = question;
                    let load = move || {
                        let snapshot = load_snapshot(location.as_ref(), Some(number))?;
                        load_statistics(location.as_ref(), &snapshot, &partitions)
                    };
                    blocking(load).await
                })
                .await
            }
            Define::ACTION => {
                answer(body, async |question: Define| {
                    self.jobs.define(question.job);
                    Ok(())
                })
                .await
            }
            CountSamples::ACTION => {
                answer(body, async |question: CountSamples| {
                    let reader = self.jobs.reader(&question.job).await?;
                    let sampled = blocking(move || reader.sample_counts(question.epoch)).await?;
                    Ok(SampleCounts { sampled })
                })
                .await
            }
            _ => Ok(None),
        }
    }

    async fn get(&self, ticket: Ticket) -> Result<Batches, Status> {
        let Ticket { block, from } = ticket;
        let reader = self.jobs.reader(&block.job).await?;
        let (of_job, of_block, blocks) = (Arc::clone(&reader), block.clone(), Arc::clone(&self.blocks));
        let (epoch_share, cached) = blocking(move || {
            let epoch_share = of_block.steps.start as f32 / of_job.steps(of_block.epoch)?.max(1) as f32;
            if let Some(interest) = of_job.interest() {
                interest.reached(epoch_share);
            }
            Ok((epoch_share, blocks.cached(&of_block)))
        })
        .await?;
        let subscription = self.blocks.read(block, from, reader, epoch_share, cached);
        let next = async |mut subscription: Subscription| {
            subscription.next().await.map(|message| (message, subscription))
        };
        Ok(stream::unfold(subscription, next).boxed())
    }
}
