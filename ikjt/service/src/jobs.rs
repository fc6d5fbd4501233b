//! The jobs that a worker knows, and their readers.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onefold_base::fault::{Explain, Fault, Kind};
use onefold_ikjt::service::protocol::Job;
use onefold_ikjt::{Checks, Error, ReadRequest, Reader, Workers};
use tokio::sync::OnceCell;
use tonic::{Code, Status};

/// The most jobs that are remembered. A client whose job was forgotten sends it again.
const MOST_JOBS: usize = 256;

/// The jobs of a worker, all of which share its threads and its memory.
#[derive(Debug)]
pub(crate) struct Jobs {
    workers: Workers,
    known: Mutex<HashMap<String, Known>>,
}

#[derive(Debug)]
struct Known {
    job: Job,
    reader: Arc<OnceCell<Arc<Reader>>>,
    used: Instant,
}

impl Jobs {
    pub(crate) fn new(workers: Workers) -> Self {
        Self { workers, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a job.
    pub(crate) fn define(&self, job: Job) {
        let (key, used) = (job.key(), Instant::now());
        let mut known = self.known();
        known.entry(key).or_insert_with(|| Known { job, reader: Arc::default(), used }).used = used;
        if known.len() > MOST_JOBS {
            let oldest = known.iter().min_by_key(|(_, known)| known.used).map(|(key, _)| key.clone());
            oldest.map(|key| known.remove(&key));
        }
    }

    /// The reader of a job, which is opened when it is first needed.
    ///
    /// # Errors
    ///
    /// `NotFound` for a job that the worker does not know; otherwise what is wrong with the dataset.
    pub(crate) async fn reader(&self, key: &str) -> Result<Arc<Reader>, Status> {
        let (job, reader) = {
            let mut known = self.known();
            let known =
                known.get_mut(key).ok_or_else(|| Status::not_found("this job was not defined here"))?;
            known.used = Instant::now();
            (known.job.clone(), Arc::clone(&known.reader))
        };
        let workers = self.workers.clone();
        reader.get_or_try_init(|| blocking(move || open(job, &workers))).await.cloned()
    }
}

/// The reader of a job.
///
/// # Errors
///
/// As [`Reader::open`]; [`Error::Fault`] if another dataset has taken the place of the one that the client opened.
fn open(job: Job, workers: &Workers) -> onefold_ikjt::Result<Arc<Reader>> {
    let Job { dataset, identity, options, rank } = job;
    // Clients of equal jobs may check other tables and labels: each of them does so itself.
    let request = ReadRequest { options, checks: Checks::default(), rank };
    let reader = Reader::open(Path::new(&dataset), request, workers)?;
    if reader.snapshot().dataset != identity {
        return Err(Error::options(
            format!("`{dataset}` is another dataset than the one that this job was opened with"),
            "open the dataset again: it was built anew",
        ));
    }
    Ok(Arc::new(reader))
}

/// Does `work` on a thread that may wait.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> onefold_ikjt::Result<T> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Status::internal(error.to_string()))?.map_err(|error| to_status(&error.fault()))
}

/// A fault as it is sent: the code says who can do something about it.
pub(crate) fn to_status(fault: &Fault) -> Status {
    let code = match fault.kind {
        Kind::Data => Code::DataLoss,
        // Another worker, or this one later, may be able to read what this one cannot read now.
        Kind::Storage => Code::Unavailable,
        Kind::Usage | Kind::Options | Kind::Failed | Kind::Stopped | Kind::Internal => Code::InvalidArgument,
    };
    let details = serde_json::to_vec(fault).unwrap_or_default();
    Status::with_details(code, fault.to_string(), details.into())
}
