//! Questions about a dataset that a service reads, and their answers.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arrow_flight::FlightData;
use onefold_base::fault::{Fault, Kind};
use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::runtime;
use tonic::Streaming;

use super::address::ServiceAddress;
use super::network::{Failure, Network, TLS_HINT};
use super::protocol::{
    CountSamples, Define, FindSnapshot, FindStatistics, Job, Lease, Leased, Open, Question, SAME_BYTES,
    SampleCounts, Ticket,
};
use super::security::Security;
use super::waiting::Waiting;
use crate::{Error, Result};

/// The time for which a client retries if a service does not answer while a dataset is opened.
const OPENING: Duration = Duration::from_secs(15);

/// The time for which a client retries if a service answered before, so that a master or workers can restart.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// A service from the view of a client.
#[derive(Debug)]
pub(super) struct Service {
    address: ServiceAddress,
    network: Network,
    /// The dataset's location from the view of the workers.
    location: OnceLock<String>,
}

impl Service {
    /// Connects to the service at `address`, and waits for an answer of its master.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if it does not answer, or refuses this client.
    pub(super) fn connect(address: ServiceAddress) -> Result<Arc<Self>> {
        let security = Security::of_environment()?;
        let service = Arc::new(Self {
            network: Network::new(&security, address.secure)?.compressed(address.compressed),
            location: OnceLock::new(),
            address,
        });
        let question = Open { dataset: service.address.dataset.clone() };
        let location = Self::ask_until_answered(Arc::clone(&service), question)?;
        service.location.get_or_init(|| location);
        Ok(service)
    }

    /// Returns the dataset's location from the view of the workers.
    pub(super) fn location(&self) -> &str {
        self.location.get().map_or("", String::as_str)
    }

    /// Returns `HOST:PORT` of the master.
    pub(super) fn master(&self) -> &str {
        &self.address.master
    }

    /// Returns a snapshot of the dataset.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset has no such snapshot, or the service does not answer.
    pub(super) fn snapshot(self: &Arc<Self>, number: Option<u64>) -> Result<Snapshot> {
        let location = self.location().to_owned();
        self.ask_a_worker(OPENING, &location.clone(), None, FindSnapshot { location, number })
    }

    /// Returns the statistics of the samples in some partitions of snapshot `number`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for an error that the worker reports, and if the service does not answer.
    pub(super) fn statistics(
        self: &Arc<Self>,
        number: u64,
        partitions: &PartitionFilter,
    ) -> Result<SampleStatistics> {
        let (location, partitions) = (self.location().to_owned(), partitions.clone());
        self.ask_a_worker(OPENING, &location.clone(), None, FindStatistics { location, number, partitions })
    }

    /// Returns the numbers of samples that sampling keeps in an epoch of a job.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for an error that the worker reports, and if the service does not answer.
    pub(super) fn counts(self: &Arc<Self>, job: &Job, epoch: u64) -> Result<SampleCounts> {
        let key = job.key();
        self.ask_a_worker(PATIENCE, &key, Some(job), CountSamples { job: key.clone(), epoch })
    }

    /// Asks the master until it answers, while a dataset is opened.
    fn ask_until_answered<Q: Question + Sync>(service: Arc<Self>, question: Q) -> Result<Q::Answer> {
        runtime::wait(async move {
            let waiting = service.waiting();
            let mut tries = Tries::new(OPENING);
            let master = &service.address.master;
            let asked = async {
                loop {
                    waiting.because("the master does not answer");
                    match service.ask_master(&question).await {
                        Ok(answer) => return Ok(answer),
                        Err(Failure::Final(error)) => return Err(error),
                        // A server may close a connection before it sends the reason why it refuses a certificate.
                        Err(Failure::Passing(cause)) if service.address.secure => {
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

    /// Creates the log of this client's waiting.
    pub(super) fn waiting(&self) -> Waiting {
        Waiting::new(format!("the client of the preprocessing service at `{}`", self.master()))
    }

    /// Asks the worker that the master assigns to `key`. Sends the job first if the worker does not know it.
    fn ask_a_worker<Q: Question + Sync>(
        self: &Arc<Self>,
        patience: Duration,
        key: &str,
        job: Option<&Job>,
        question: Q,
    ) -> Result<Q::Answer> {
        let (service, job, key) = (Arc::clone(self), job.cloned(), key.to_owned());
        runtime::wait(async move {
            let waiting = service.waiting();
            let mut tries = Tries::new(patience);
            let mut avoid = Vec::new();
            let asked = async {
                loop {
                    let lease = Lease {
                        key: key.clone(),
                        affinity: None,
                        avoid: avoid.clone(),
                        client: None,
                        same_bytes: SAME_BYTES,
                    };
                    waiting.because("the master does not answer");
                    let failure = match service.ask_master(&lease).await {
                        Err(failure) => failure,
                        Ok(Leased { worker, .. }) => {
                            waiting.because(format!("the worker `{worker}` has not answered a question yet"));
                            match service.ask_about(&worker, job.as_ref(), &question).await {
                                Ok(answer) => return Ok(answer),
                                Err(failure) => {
                                    let failure = failure.of_worker(&worker);
                                    avoid = vec![worker];
                                    failure
                                }
                            }
                        }
                    };
                    match failure {
                        Failure::Final(error) => return Err(error),
                        Failure::Passing(cause) => {
                            tries.again(&waiting, &service.address.master, cause).await?;
                        }
                        Failure::UnknownJob => return Err(unexpected()),
                    }
                }
            };
            waiting.watch(asked).await
        })?
    }

    /// Asks a worker about a job. Sends the job first if the worker does not know it.
    async fn ask_about<Q: Question>(
        &self,
        worker: &str,
        job: Option<&Job>,
        question: &Q,
    ) -> Result<Q::Answer, Failure> {
        match (self.network.ask(worker, question).await, job) {
            (Err(Failure::UnknownJob), Some(job)) => {
                self.network.ask(worker, &Define::of(job)).await?;
                self.network.ask(worker, question).await
            }
            (answer, _) => answer,
        }
    }

    /// Requests the batches of a ticket from a worker. Sends the job first if the worker does not know it.
    pub(super) async fn get(
        &self,
        worker: &str,
        job: &Job,
        ticket: &Ticket,
    ) -> Result<Streaming<FlightData>, Failure> {
        match self.network.get(worker, ticket).await {
            Err(Failure::UnknownJob) => {
                self.network.ask(worker, &Define::of(job)).await?;
                self.network.get(worker, ticket).await
            }
            answer => answer,
        }
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
