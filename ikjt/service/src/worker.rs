//! A worker, which reads datasets and sends batches.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::bail;
use futures::stream::{self, StreamExt};
use onefold_base::address::{Address, Listening};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::process::{available_threads, cpu_seconds};
use onefold_base::units::parse_bytes;
use onefold_ikjt::cache::Cache;
use onefold_ikjt::service::protocol::{
    Block, CountSamples, Define, FindSnapshot, FindStatistics, Question, SAME_BYTES, SampleCounts, Ticket,
};
use onefold_ikjt::service::{Failure, Network};
use onefold_ikjt::{Error, Workers, load_snapshot, load_statistics};
use onefold_terminal::Printer;
use tokio::sync::watch;
use tonic::Status;

use crate::blocks::{Blocks, OfBlock, Subscription};
use crate::flight::{Answers, Batches, answer};
use crate::http;
use crate::jobs::{Jobs, blocking, opening, to_status};
use crate::messages::{Heartbeat, Orders, WorkerFigures, WorkerState};
use crate::schedule::{Limits, Request};
use crate::security::{Proof, SecurityArguments};
use crate::server::{listen, serve, told_if_silent, told_to_end};
use crate::warnings::Warnings;

/// The interval at which a worker reports to the master.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// The time for which a request waits for the master's first answer, which names the datasets that may be read.
const HEARD_WITHIN: Duration = Duration::from_secs(5);

/// The time for which a draining worker waits for clients that still read from it.
const DRAINING: Duration = Duration::from_secs(60);

/// The arguments of `worker`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WorkerArguments {
    /// Master, as `HOST:PORT`
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) master: Address,
    /// Address to listen on; with port 0, the system chooses a free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub(crate) listen: SocketAddr,
    /// Name or address at which clients reach this process [default: that of `--listen`]
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Memory for row groups and batches
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "2GiB")]
    pub(crate) memory_limit: u64,
    /// Folder on a local disk for cached data that does not fit into memory; several workers can share it
    #[arg(long, value_name = "FOLDER")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Limit on the data of this worker in `--cache-dir`
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64GiB", requires = "cache_dir")]
    pub(crate) cache_limit: u64,
    /// Number of threads that decode, deduplicate and preprocess [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Drain when stdin is closed, as it is when the process that started this one ends
    #[arg(long, hide = true)]
    pub(crate) until_stdin_closes: bool,
    #[command(flatten)]
    pub(crate) security: SecurityArguments,
}

/// Runs a worker until it receives a signal to end, or has drained.
pub(crate) async fn run(arguments: &WorkerArguments, printer: &Printer) -> anyhow::Result<()> {
    if arguments.host.is_none() && arguments.listen.ip().is_unspecified() {
        let message = format!(
            "clients cannot reach a worker at `{}`, which means all addresses of this machine",
            arguments.listen
        );
        let hint = text!["name the one that they reach with ", option("host")];
        bail!(Fault::new(Kind::Options, message).hint(hint));
    }
    let proof = arguments.security.load()?;
    let threads = arguments.threads.map_or_else(available_threads, usize::from);
    // One half of the memory is for reading. The other half is for batches that wait for clients and for the cache,
    // except one eighth of it for the program itself.
    let half = arguments.memory_limit / 2;
    let limits = Limits { reading: half - half / 4, batches: half - half / 8 };
    let disk = arguments.cache_dir.as_deref().map(|folder| (folder, arguments.cache_limit));
    let cache = Cache::new(limits.batches, disk)?;
    let workers = Workers::new(threads, half)?.with_cache(&cache);
    let listener = listen(arguments.listen).await?;
    let port = listener.local_addr()?.port();
    let host = arguments.host.clone().unwrap_or_else(|| arguments.listen.ip().to_string());
    let address = match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    };
    if is_local(&host) && !is_local(&arguments.master.host) {
        tracing::warn!(
            "clients on other machines cannot reach this worker, because `{address}` is an address of its own machine \
             only\n  hint: give an address that they can reach with `--listen`, and with `--host` if it has another name"
        );
    }
    let worker = Arc::new(Worker {
        address: address.clone(),
        process: format!("{:016x}", RandomState::new().build_hasher().finish()),
        threads,
        memory_limit: arguments.memory_limit,
        jobs: Jobs::new(workers),
        blocks: Blocks::new(limits, Arc::clone(&cache)),
        draining: AtomicBool::new(false),
        allowed: watch::Sender::new(Allowed::Unknown),
        warnings: Arc::default(),
    });
    let shown = Arc::clone(&worker);
    let pages = move |proof: &Proof| {
        let shown = Arc::clone(&shown);
        http::worker_routes(proof, move || shown.state())
    };
    printer.summary(&format!("worker at {address}"), &Listening { address: address.clone() })?;
    let ended = tokio::select! {
        served = serve(listener, Arc::clone(&worker), &arguments.security, pages) => served,
        failed = name_itself(arguments, proof, &worker) => failed,
        () = drained(&worker, arguments.until_stdin_closes) => Ok(()),
        () = pass(&worker, &cache) => Ok(()),
    };
    cache.close();
    ended
}

/// Returns whether a host name or address means the machine itself.
fn is_local(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}

/// Reports to the master periodically. Ends only with an error that the master returns, unless the files with
/// certificates or tokens have changed.
async fn name_itself(arguments: &WorkerArguments, mut proof: Proof, worker: &Worker) -> anyhow::Result<()> {
    let master = &arguments.master.to_string();
    let mut network = Network::new(&proof.security, proof.secure)?;
    let mut lost = false;
    loop {
        let heartbeat = Heartbeat { worker: worker.state() };
        let say = || {
            if !std::mem::replace(&mut lost, true) {
                tracing::warn!("the master at `{master}` does not answer, still waiting");
            }
        };
        let answer = told_if_silent(network.ask(master, &heartbeat), say).await;
        match answer {
            Ok(Orders { drain, locations }) => {
                if std::mem::take(&mut lost) {
                    tracing::warn!("the master at `{master}` answers again");
                }
                if drain {
                    worker.draining.store(true, Relaxed);
                }
                let allowed = locations.map_or(Allowed::Any, Allowed::These);
                worker.allowed.send_if_modified(|known| std::mem::replace(known, allowed.clone()) != allowed);
            }
            Err(failure) => {
                let found = arguments.security.load().ok().filter(|found| *found != proof);
                let is_new = found.is_some();
                if let Some(found) = found {
                    network = Network::new(&found.security, found.secure)?;
                    proof = found;
                }
                match failure {
                    Failure::Final(error) if !is_new => return Err(error.into()),
                    Failure::Passing(cause) if !lost => {
                        lost = true;
                        tracing::warn!("the master at `{master}` does not answer, trying again: {cause}");
                    }
                    _ => (),
                }
            }
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

/// Informs the blocks and jobs that time passes, and reports disk failures of the cache.
async fn pass(worker: &Worker, cache: &Cache) {
    loop {
        tokio::time::sleep(HEARTBEAT).await;
        worker.blocks.pass();
        worker.jobs.pass();
        if let Some(failure) = cache.take_disk_failure() {
            let failed = "`--cache-dir` cannot be written to";
            let hint = "free space there, or lower `--cache-limit`";
            // The names of the files differ, so the subject does not contain them.
            worker.warnings.warn(failed, &format!("{failed}: {failure}\n  hint: {hint}"));
        }
    }
}

/// Waits until stdin is closed.
async fn stdin_closed() {
    let (sender, closed) = tokio::sync::oneshot::channel();
    // Uses a separate thread, because a runtime that shuts down waits for its own blocking threads.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = sender.send(());
    });
    let _ = closed.await;
}

/// Waits until the worker must drain and no client reads from it any more.
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
        // The master must learn first that the worker drains.
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
    address: String,
    process: String,
    threads: usize,
    memory_limit: u64,
    jobs: Jobs,
    blocks: Arc<Blocks>,
    draining: AtomicBool,
    /// The datasets that the worker may read, which the master determines.
    allowed: watch::Sender<Allowed>,
    warnings: Arc<Warnings>,
}

/// The datasets that a worker may read.
#[derive(Debug, Clone, PartialEq)]
enum Allowed {
    /// The master has not answered yet.
    Unknown,
    Any,
    /// The datasets at these locations.
    These(Vec<String>),
}

impl Allowed {
    /// Returns an error for a location that may not be read.
    fn check(&self, location: &str) -> Result<(), Status> {
        let refused = |message: &str, hint: &str| {
            let message = format!("a worker does not read `{location}`: {message}");
            Err(to_status(&Fault::new(Kind::Options, message).hint(hint)))
        };
        if location.starts_with("grpc://") || location.starts_with("grpcs://") {
            return refused("another service reads it", "give the location where the dataset is stored");
        }
        let is_same = |allowed: &String| allowed.trim_end_matches('/') == location.trim_end_matches('/');
        match self {
            Self::Unknown => Err(Status::unavailable("the worker has not heard from its master yet")),
            Self::These(allowed) if !allowed.iter().any(is_same) => refused(
                "its service reads only datasets that its master names",
                "name it with `--dataset NAME=LOCATION` of `onefold-serve master`",
            ),
            Self::Any | Self::These(_) => Ok(()),
        }
    }
}

impl Worker {
    fn state(&self) -> WorkerState {
        let figures = WorkerFigures {
            cpu_seconds: cpu_seconds().unwrap_or(0.0),
            failures: self.warnings.failures(),
            ..self.blocks.figures()
        };
        WorkerState {
            address: self.address.clone(),
            process: self.process.clone(),
            same_bytes: SAME_BYTES,
            threads: self.threads,
            memory_limit_bytes: self.memory_limit,
            blocks: self.blocks.active(),
            draining: self.draining.load(Relaxed),
            figures,
        }
    }

    /// Returns an error for a location that the worker may not read. Waits for the master's first answer.
    async fn check(&self, location: &str) -> Result<(), Status> {
        let mut allowed = self.allowed.subscribe();
        let known = allowed.wait_for(|allowed| *allowed != Allowed::Unknown);
        let allowed = match tokio::time::timeout(HEARD_WITHIN, known).await {
            Ok(Ok(allowed)) => allowed.clone(),
            _ => Allowed::Unknown,
        };
        allowed.check(location)
    }

    /// Answers a question about a dataset.
    async fn answer(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status> {
        match action {
            FindSnapshot::ACTION => {
                answer(body, async |question: FindSnapshot| {
                    let FindSnapshot { location, number } = question;
                    self.check(&location).await?;
                    let load = move || Ok(load_snapshot(location.as_ref(), number)?.without_columns());
                    opening(load).await
                })
                .await
            }
            FindStatistics::ACTION => {
                answer(body, async |question: FindStatistics| {
                    let FindStatistics { location, number, partitions } = question;
                    self.check(&location).await?;
                    let load = move || {
                        let snapshot = load_snapshot(location.as_ref(), Some(number))?;
                        load_statistics(location.as_ref(), &snapshot, &partitions)
                    };
                    opening(load).await
                })
                .await
            }
            Define::ACTION => {
                answer(body, async |question: Define| {
                    let Define { job, same_bytes } = question;
                    if same_bytes != SAME_BYTES {
                        let message = format!(
                            "this worker makes batches of version {SAME_BYTES}, and not of version {same_bytes}\n  hint: \
                             install the same version of Onefold everywhere"
                        );
                        return Err(Status::invalid_argument(message));
                    }
                    self.check(&job.dataset).await?;
                    self.jobs.define(job);
                    Ok(())
                })
                .await
            }
            CountSamples::ACTION => {
                answer(body, async |question: CountSamples| {
                    let opened = self.jobs.opened(&question.job).await?;
                    let sampled = blocking(move || opened.reader.sample_counts(question.epoch)).await?;
                    Ok(SampleCounts { sampled: sampled.map(Arc::unwrap_or_clone) })
                })
                .await
            }
            _ => Ok(None),
        }
    }

    /// Subscribes a client to the batches of a block.
    async fn subscribe(&self, ticket: Ticket) -> Result<Subscription, Status> {
        let opened = self.jobs.opened(&ticket.block.job).await?;
        let (reader, reading) = (Arc::clone(&opened.reader), opened.reading);
        let (block, from, blocks) = (ticket.block.clone(), ticket.from, Arc::clone(&self.blocks));
        let (epoch_share, cached) = blocking(move || {
            let epoch_share = share_before(&block, from, opened.reader.steps(block.epoch)?)?;
            if let Some(interest) = opened.reader.interest() {
                interest.reached(epoch_share);
            }
            Ok((epoch_share, blocks.on_disk(&block)))
        })
        .await?;
        let of_block = OfBlock { reader, epoch_share };
        Ok(self.blocks.read(Request { ticket, reading, of_block, cached }))
    }
}

#[tonic::async_trait]
impl Answers for Worker {
    const ROLE: &'static str = "worker";

    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status> {
        let answer = self.answer(action, body).await;
        answer.inspect_err(|status| self.warnings.failed(status))
    }

    async fn get(&self, ticket: Ticket) -> Result<Batches, Status> {
        let subscribed = self.subscribe(ticket).await;
        let subscription = subscribed.inspect_err(|status| self.warnings.failed(status))?;
        let next = async |(mut subscription, warnings): (Subscription, Arc<Warnings>)| {
            let sent = subscription.next().await?;
            let sent = sent.inspect_err(|status| warnings.failed(status));
            Some((sent, (subscription, warnings)))
        };
        Ok(stream::unfold((subscription, Arc::clone(&self.warnings)), next).boxed())
    }
}

/// Returns the share of an epoch's steps before a block, from 0 to 1.
///
/// # Errors
///
/// [`Error::Fault`] if the epoch has no such block, or `from` is not a step of the block.
fn share_before(block: &Block, from: u64, steps: u64) -> onefold_ikjt::Result<f32> {
    let Range { start, end } = block.steps;
    match start < end && end <= steps && (start..=end).contains(&from) {
        true => Ok(start as f32 / steps as f32),
        false => Err(Error::options(
            format!("the steps {start} to {end} from {from} on are no block of an epoch of {steps} steps"),
            "this is a bug in Onefold; please report it",
        )),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn only_allowed_locations_are_read() {
        let these = Allowed::These(vec!["s3://bucket/clicks".to_owned()]);
        assert!(these.check("s3://bucket/clicks/").is_ok() && Allowed::Any.check("/data").is_ok());
        for refused in ["/etc", "s3://bucket/clicks/../views", "grpc://10.0.0.1:7070/clicks"] {
            assert!(these.check(refused).unwrap_err().message().contains(refused), "{refused}");
        }
        assert!(Allowed::Any.check("grpcs://10.0.0.1:7070/clicks").is_err());
        assert_eq!(Allowed::Unknown.check("/data").unwrap_err().code(), Code::Unavailable);
    }

    #[test]
    fn addresses_of_the_machine_itself_are_known() {
        for (host, expected) in [("127.0.0.1", true), ("::1", true), ("[::1]", true), ("localhost", true)]
            .into_iter()
            .chain([("10.0.0.1", false), ("[fd00::1]", false), ("worker-1", false)])
        {
            assert_eq!(is_local(host), expected, "{host}");
        }
    }

    #[test]
    fn only_blocks_of_the_epoch_are_computed() {
        let share = |steps, from| {
            let block = Block { job: "job".to_owned(), epoch: 0, steps };
            share_before(&block, from, 94).ok()
        };
        assert_eq!(
            [share(0..47, 0), share(47..94, 50), share(47..94, 94)],
            [Some(0.0), Some(0.5), Some(0.5)]
        );
        let wrong = [(0..95, 0), (94..94, 94), (47..94, 46), (47..94, 95), (0..100_000, 0)];
        for (steps, from) in wrong {
            assert_eq!(share(steps.clone(), from), None, "{steps:?} from {from}");
        }
    }
}
