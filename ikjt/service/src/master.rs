//! The master, which assigns workers to clients.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::bail;
use onefold_base::address::Listening;
use onefold_base::fault::{Fault, Kind};
use onefold_base::location::{check_local, is_url};
use onefold_base::sync::locked;
use onefold_ikjt::service::protocol::{ClientState, Lease, Leased, Open, Question, VERSION};
use onefold_terminal::Printer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::Status as GrpcStatus;

use crate::autoscale::{Autoscaler, Bounds, Observed};
use crate::flight::{Answers, answer};
use crate::http;
use crate::jobs::to_status;
use crate::messages::{AskStatus, Drain, Heartbeat, Orders, Status};
use crate::placement::{Earlier, Placement};
use crate::rates::{ClientRate, Limit};
use crate::security::{Proof, SecurityArguments};
use crate::server::{listen, serve, told_to_end};
use crate::warnings::Warnings;

/// The time without a report after which a client is considered gone.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// The interval of decisions about the number of workers.
const DECIDE: Duration = Duration::from_secs(5);

/// The arguments of `master`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct MasterArguments {
    #[command(flatten)]
    serving: ServingArguments,
    /// Range of the number of workers that the master requests in `/metrics`
    #[arg(long, value_name = "LEAST..MOST", default_value = "1..256")]
    workers: Bounds,
}

/// The datasets that a master serves, and its address.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServingArguments {
    /// Address to listen on; with port 0, the system chooses a free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7070")]
    pub(crate) listen: SocketAddr,
    /// Dataset that clients can name, such as `clicks=s3://bucket/clicks`; can be given several times
    #[arg(long = "dataset", value_name = "NAME=LOCATION", value_parser = parse_dataset)]
    pub(crate) datasets: Vec<(String, String)>,
    /// Serve only the datasets of `--dataset`, and no other location that clients name
    #[arg(long)]
    pub(crate) only_named: bool,
    #[command(flatten)]
    pub(crate) security: SecurityArguments,
}

fn parse_dataset(text: &str) -> Result<(String, String), String> {
    let dataset = text.split_once('=').map(|(name, location)| (name.to_owned(), location.to_owned()));
    dataset
        .filter(|(name, location)| !name.is_empty() && !name.contains('/') && !location.is_empty())
        .ok_or_else(|| "expected `NAME=LOCATION`, with a name without slashes".to_owned())
}

/// Runs the master until it receives a signal to end.
pub(crate) async fn run(arguments: &MasterArguments, printer: &Printer) -> anyhow::Result<()> {
    let wanted = watch::Sender::new(arguments.workers.least);
    serve_on(listen(arguments.serving.listen).await?, &arguments.serving, arguments.workers, wanted, printer)
        .await
}

/// Serves requests until the process receives a signal to end. Sends the number of workers to `wanted`.
pub(crate) async fn serve_on(
    listener: TcpListener,
    arguments: &ServingArguments,
    bounds: Bounds,
    wanted: watch::Sender<usize>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let proof = arguments.security.load()?;
    proof.check_roles()?;
    let address = listener.local_addr()?.to_string();
    let master = Arc::new(Master {
        datasets: arguments.datasets()?,
        only_named: arguments.only_named,
        started: Instant::now(),
        placement: Mutex::default(),
        clients: Mutex::default(),
        retries: AtomicU64::new(0),
        second_requests: AtomicU64::new(0),
        wanted,
        warnings: Warnings::default(),
    });
    let (scheme, page) = if proof.secure { ("grpcs", "https") } else { ("grpc", "http") };
    let text = format!(
        "master at {address}: datasets are read at {scheme}://{address}/DATASET, status page at {page}://{address}/"
    );
    printer.summary(&text, &Listening { address })?;
    let shown = Arc::clone(&master);
    let pages = move |proof: &Proof| {
        let shown = Arc::clone(&shown);
        http::routes(proof, move || shown.status())
    };
    tokio::select! {
        served = serve(listener, Arc::clone(&master), &arguments.security, pages) => served,
        () = decide(&master, Autoscaler::new(bounds)) => Ok(()),
        () = told_to_end() => Ok(()),
    }
}

/// Decides periodically how many workers are wanted.
async fn decide(master: &Master, mut scaler: Autoscaler) {
    loop {
        tokio::time::sleep(DECIDE).await;
        let wanted = scaler.decide(Observed::of(&master.status()));
        master.wanted.send_if_modified(|known| std::mem::replace(known, wanted) != wanted);
    }
}

impl ServingArguments {
    /// Returns the datasets that clients may name, as locations by name. Paths are absolute, because workers have other
    /// working directories.
    fn datasets(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let mut datasets = BTreeMap::new();
        for (name, location) in &self.datasets {
            let location = absolute(location)?;
            if let Some(other) = datasets.insert(name.clone(), location.clone()) {
                let message = format!("two datasets have the name `{name}`: `{other}` and `{location}`");
                bail!(Fault::new(Kind::Options, message).hint("give each dataset a name of its own"));
            }
        }
        Ok(datasets)
    }
}

/// Returns a URL as it is, and a local path in its absolute form.
fn absolute(location: &str) -> anyhow::Result<String> {
    let path = Path::new(location);
    if is_url(path) {
        return Ok(location.to_owned());
    }
    if let Err((message, hint)) = check_local(path) {
        bail!(Fault::new(Kind::Options, format!("`{location}`: {message}")).hint(hint));
    }
    Ok(std::path::absolute(path)?.display().to_string())
}

pub(crate) struct Master {
    datasets: BTreeMap<String, String>,
    only_named: bool,
    started: Instant,
    placement: Mutex<Placement>,
    clients: Mutex<HashMap<String, Client>>,
    /// The numbers of requests that all clients repeated, and that they sent to a second worker.
    retries: AtomicU64,
    second_requests: AtomicU64,
    /// The number of wanted workers.
    wanted: watch::Sender<usize>,
    warnings: Warnings,
}

struct Client {
    state: ClientState,
    seen: Instant,
    /// The state a few seconds before.
    earlier: Earlier<ClientState>,
}

impl Client {
    fn rate(&self) -> ClientRate {
        let (now, then) = (&self.state, &self.earlier.what);
        // The rates of a client that has just begun are averages since its beginning.
        let begins = now.seconds <= then.seconds;
        let seconds = if begins { now.seconds } else { now.seconds - then.seconds };
        let since = |now: f64, then: f64| {
            let amount = if begins { now } else { now - then };
            if seconds > 0.0 { amount / seconds } else { 0.0 }
        };
        ClientRate {
            client: now.client.clone(),
            samples_per_second: since(now.samples as f64, then.samples as f64),
            bytes_per_second: since(now.bytes as f64, then.bytes as f64),
            // A report during a wait counts the whole wait, including the part before the interval.
            waiting_share: since(now.waited_seconds, then.waited_seconds).min(1.0),
        }
    }
}

impl Master {
    /// Returns the location of a dataset that a client requests by name or location.
    fn location(&self, dataset: String) -> Result<String, GrpcStatus> {
        if let Some(location) = self.datasets.get(&dataset) {
            return Ok(location.clone());
        }
        if !self.only_named && dataset.contains('/') {
            return Ok(dataset);
        }
        let names: Vec<_> = self.datasets.keys().map(|name| format!("`{name}`")).collect();
        let hint = match (names.is_empty(), self.only_named) {
            (false, _) => format!("the datasets are {}", names.join(", ")),
            (true, true) => "start the master with `--dataset NAME=LOCATION`".to_owned(),
            (true, false) => "write a URL or a path with a slash, as `s3://bucket/folder`".to_owned(),
        };
        let message = format!("the preprocessing service has no dataset `{dataset}`");
        Err(to_status(&Fault::new(Kind::Options, message).hint(hint)))
    }

    fn heard_of(&self, client: ClientState) {
        let now = Instant::now();
        let mut clients = locked(&self.clients);
        clients.retain(|_, client| now.duration_since(client.seen) < GONE_AFTER);
        let known = clients.remove(&client.client);
        let counted = |of: fn(&ClientState) -> u64| {
            of(&client).saturating_sub(known.as_ref().map_or(0, |known| of(&known.state)))
        };
        self.retries.fetch_add(counted(|client| client.retries), Relaxed);
        self.second_requests.fetch_add(counted(|client| client.second_requests), Relaxed);
        if client.ended {
            return;
        }
        let earlier = match known {
            Some(known) => known.earlier.then(known.state, known.seen),
            None => Earlier::new(client.clone(), now),
        };
        clients.insert(client.client.clone(), Client { state: client, seen: now, earlier });
    }

    fn lease(&self, lease: Lease) -> Result<Leased, GrpcStatus> {
        if let Some(client) = lease.client {
            self.heard_of(client);
        }
        let mut placement = locked(&self.placement);
        let wanted = (&*lease.avoid, lease.same_bytes);
        let worker = placement.lease(&lease.key, lease.affinity.as_deref(), wanted, Instant::now());
        let workers = placement.count();
        let none = || match workers {
            0 => GrpcStatus::unavailable("the preprocessing service has no worker"),
            _ => GrpcStatus::unavailable(format!(
                "the preprocessing service has {workers} workers, and none that makes batches of version {}: they end, or \
                 are of another version of Onefold",
                lease.same_bytes
            )),
        };
        let leased = worker.map(|worker| Leased { worker, workers }).ok_or_else(none);
        // Logs the error, because only the operator of the service can resolve it.
        leased.inspect_err(|status| self.warnings.warn(status.message(), status.message()))
    }

    pub(crate) fn status(&self) -> Status {
        let now = Instant::now();
        let placement = locked(&self.placement);
        let known = locked(&self.clients);
        let mut clients: Vec<&Client> =
            known.values().filter(|client| now.duration_since(client.seen) < GONE_AFTER).collect();
        clients.sort_by_key(|client| {
            let ClientState { dataset, job, client, .. } = &client.state;
            (dataset, job, client)
        });
        let (worker_rates, client_rates): (_, Vec<_>) =
            (placement.rates(now), clients.iter().map(|client| client.rate()).collect());
        Status {
            version: VERSION.to_owned(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            datasets: self.datasets.clone(),
            leases: placement.leases(),
            retries: self.retries.load(Relaxed),
            second_requests: self.second_requests.load(Relaxed),
            workers: placement.workers(now),
            clients: clients.iter().map(|client| client.state.clone()).collect(),
            wanted_workers: *self.wanted.borrow(),
            limit: Limit::of(&worker_rates, &client_rates),
            worker_rates,
            client_rates,
        }
    }
}

#[tonic::async_trait]
impl Answers for Master {
    const ROLE: &'static str = "master";

    fn is_for_workers(&self, action: &str) -> bool {
        [Heartbeat::ACTION, Drain::ACTION].contains(&action)
    }

    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, GrpcStatus> {
        match action {
            Open::ACTION => answer(body, async |question: Open| self.location(question.dataset)).await,
            Lease::ACTION => answer(body, async |question: Lease| self.lease(question)).await,
            ClientState::ACTION => {
                answer(body, async |client: ClientState| {
                    self.heard_of(client);
                    Ok(())
                })
                .await
            }
            Heartbeat::ACTION => {
                answer(body, async |question: Heartbeat| {
                    let address = question.worker.address.clone();
                    let mut placement = locked(&self.placement);
                    let drain = placement.heard(question.worker, Instant::now());
                    let is_shared = placement.is_shared(&address);
                    drop(placement);
                    if is_shared {
                        let shared = format!("two processes report that they are the worker at `{address}`");
                        let hint = "give each worker an address of its own, by `--listen` and `--host`";
                        self.warnings.warn(&shared, &format!("{shared}\n  hint: {hint}"));
                    }
                    let locations = self.only_named.then(|| self.datasets.values().cloned().collect());
                    Ok(Orders { drain, locations })
                })
                .await
            }
            AskStatus::ACTION => answer(body, async |_: AskStatus| Ok(self.status())).await,
            Drain::ACTION => {
                answer(body, async |question: Drain| {
                    match locked(&self.placement).drain(&question.worker, Instant::now()) {
                        true => Ok(()),
                        false => {
                            let message = format!("there is no worker `{}`", question.worker);
                            let hint = "`onefold-serve status` lists the workers";
                            Err(to_status(&Fault::new(Kind::Options, message).hint(hint)))
                        }
                    }
                })
                .await
            }
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_do_not_depend_on_the_working_directory_of_workers() {
        let locations = |datasets: &[&str]| -> anyhow::Result<Vec<String>> {
            let arguments = ServingArguments {
                listen: "127.0.0.1:0".parse().unwrap(),
                datasets: datasets.iter().map(|text| parse_dataset(text).unwrap()).collect(),
                only_named: false,
                security: SecurityArguments::default(),
            };
            Ok(arguments.datasets()?.into_values().collect())
        };
        let here = std::env::current_dir().unwrap().join("data/b").display().to_string();
        let found = locations(&["a=s3://bucket/a", "b=data/b", "c=/data/c"]).unwrap();
        assert_eq!(found, ["s3://bucket/a", here.as_str(), "/data/c"]);
        for (wrong, message) in [("a=~/data", "did not expand `~`"), ("a=s3:/bucket/a", "two slashes")] {
            let error = locations(&[wrong]).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
