//! Requests to the processes of a service, which are repeated until there is an answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_flight::FlightData;
use onefold_base::fault::{Fault, Kind};
use onefold_storage::runtime;
use tonic::Streaming;

use super::address::ServiceAddress;
use super::network::{Failure, Network, TLS_HINT};
use super::protocol::{Define, Job, Lease, Leased, Open, Question, SAME_BYTES, Ticket};
use super::security::Security;
use super::waiting::Waiting;
use crate::error::{Error, Result};

/// The time for which a client retries if a service does not answer while a dataset is opened.
pub(super) const OPENING: Duration = Duration::from_secs(15);

/// The time for which a client retries if a service answered before, so that a master or workers can restart.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// A service from the view of a client.
#[derive(Debug)]
pub(super) struct Service {
    address: ServiceAddress,
    network: Network,
}

impl Service {
    /// Connects to the service at `address`, and waits for its master to name the location of the dataset from the view of
    /// the workers.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if it does not answer, or refuses this client.
    pub(super) fn connect(address: ServiceAddress) -> Result<(Arc<Self>, String)> {
        let security = Security::of_environment()?;
        let service = Arc::new(Self {
            network: Network::new(&security, address.secure)?.compressed(address.compressed),
            address,
        });
        let question = Open { dataset: service.address.dataset.clone() };
        let location = service.ask(OPENING, None, question)?;
        Ok((service, location))
    }

    /// Returns `HOST:PORT` of the master.
    pub(super) fn master(&self) -> &str {
        &self.address.master
    }

    /// Creates the log of this client's waiting.
    pub(super) fn waiting(&self) -> Waiting {
        Waiting::new(format!("the client of the preprocessing service at `{}`", self.master()))
    }

    /// Asks the master until it answers or, with `worker`, the worker that the master assigns to a key. Sends a job to the
    /// worker first if the question is about it and the worker does not know it.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for an error that the process reports, and if there is no answer for the time `patience`.
    pub(super) fn ask<Q: Question + Sync>(
        self: &Arc<Self>,
        patience: Duration,
        worker: Option<(String, Option<Job>)>,
        question: Q,
    ) -> Result<Q::Answer> {
        let service = Arc::clone(self);
        runtime::wait(async move {
            let (waiting, master) = (service.waiting(), service.master());
            let (mut tries, mut avoid) = (Tries::new(patience), Vec::new());
            let asked = async {
                loop {
                    match service.ask_once(worker.as_ref(), &mut avoid, &waiting, &question).await {
                        Ok(answer) => return Ok(answer),
                        Err(Failure::Final(error)) => return Err(error),
                        // A server may close a connection before it sends the reason why it refuses a certificate.
                        Err(Failure::Passing(cause)) if worker.is_none() && service.address.secure => {
                            tries.again(&waiting, master, cause.hint(TLS_HINT)).await?;
                        }
                        Err(Failure::Passing(cause)) => tries.again(&waiting, master, cause).await?,
                        Err(Failure::UnknownJob) => return Err(unexpected()),
                    }
                }
            };
            waiting.watch(asked).await
        })?
    }

    /// Does the work of [`ask`](Self::ask) once. Adds a worker that does not answer to `avoid`.
    async fn ask_once<Q: Question + Sync>(
        &self,
        worker: Option<&(String, Option<Job>)>,
        avoid: &mut Vec<String>,
        waiting: &Waiting,
        question: &Q,
    ) -> Result<Q::Answer, Failure> {
        waiting.because("the master does not answer");
        let Some((key, job)) = worker else { return self.ask_master(question).await };
        let (key, avoided) = (key.clone(), avoid.clone());
        let lease = Lease { key, affinity: None, avoid: avoided, client: None, same_bytes: SAME_BYTES };
        let Leased { worker, .. } = self.ask_master(&lease).await?;
        waiting.because(format!("the worker `{worker}` has not answered a question yet"));
        let answer = self.about_job(&worker, job.as_ref(), || self.network.ask(&worker, question)).await;
        answer.map_err(|failure| {
            let failure = failure.of_worker(&worker);
            *avoid = vec![worker];
            failure
        })
    }

    /// Sends a request about a job to a worker. Sends the job first if the worker does not know it.
    async fn about_job<T, R: Future<Output = Result<T, Failure>>>(
        &self,
        worker: &str,
        job: Option<&Job>,
        request: impl Fn() -> R,
    ) -> Result<T, Failure> {
        match (request().await, job) {
            (Err(Failure::UnknownJob), Some(job)) => {
                self.network.ask(worker, &Define::of(job)).await?;
                request().await
            }
            (answer, _) => answer,
        }
    }

    /// Requests the batches of a ticket from a worker.
    pub(super) async fn get(
        &self,
        worker: &str,
        job: &Job,
        ticket: &Ticket,
    ) -> Result<Streaming<FlightData>, Failure> {
        self.about_job(worker, Some(job), || self.network.get(worker, ticket)).await
    }

    /// Asks the master.
    pub(super) async fn ask_master<Q: Question>(&self, question: &Q) -> Result<Q::Answer, Failure> {
        self.network.ask(self.master(), question).await
    }
}

/// Retries with growing pauses.
#[derive(Debug)]
pub(super) struct Tries {
    until: Instant,
    patience: Duration,
    pause: Duration,
}

impl Tries {
    /// Retries until `patience` has passed.
    pub(super) fn new(patience: Duration) -> Self {
        Self { until: Instant::now() + patience, patience, pause: Duration::from_millis(20) }
    }

    /// Restarts the time limit after a success.
    pub(super) fn succeeded(&mut self) {
        *self = Self::new(self.patience);
    }

    /// Waits before the next try.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] with `cause`, the last error, if the time limit has passed.
    pub(super) async fn again(&mut self, waiting: &Waiting, master: &str, cause: Fault) -> Result<()> {
        waiting.because(cause.message.to_string());
        if Instant::now() + self.pause > self.until {
            let seconds = self.patience.as_secs();
            let place = format!("the preprocessing service at `{master}` gave nothing for {seconds} seconds");
            return Err(Error::Fault(Fault { kind: Kind::Storage, ..cause }.within(&place).hint(format!(
                "start its master and workers (`onefold-serve status --master {master}` shows them), or correct the URL"
            ))));
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (2 * self.pause).min(Duration::from_secs(1));
        Ok(())
    }
}

/// Returns the error for a worker that does not know a job right after the job was sent to it.
pub(super) fn unexpected() -> Error {
    let message = "a worker of the preprocessing service does not know the job that it was asked about";
    Error::Fault(Fault::new(Kind::Data, message))
}
