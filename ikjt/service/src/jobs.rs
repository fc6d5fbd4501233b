//! The jobs that a worker knows, and their readers.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use onefold_base::fault::{Explain, Fault, Kind, Text};
use onefold_base::sync::locked;
use onefold_ikjt::service::protocol::{Job, OF_WORKER};
use onefold_ikjt::{Checks, Error, ReadRequest, Reader, Workers};
use tokio::sync::OnceCell;
use tonic::{Code, Status};

/// The maximal number of jobs that are kept. A client whose job was evicted sends it again.
const MOST_JOBS: usize = 256;

/// The time without requests after which a job and the metadata of its files are dropped.
const IDLE: Duration = Duration::from_secs(300);

/// The jobs of a worker. They share its threads and its memory.
#[derive(Debug)]
pub(crate) struct Jobs {
    workers: Workers,
    known: Mutex<HashMap<String, Known>>,
}

#[derive(Debug)]
struct Known {
    job: Job,
    opened: Arc<OnceCell<Arc<Opened>>>,
    used: Instant,
}

/// A job with an open dataset.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) reader: Arc<Reader>,
    /// The memory in bytes that its reader needs.
    pub(crate) reading: u64,
}

impl Jobs {
    pub(crate) fn new(workers: Workers) -> Self {
        Self { workers, known: Mutex::default() }
    }

    /// Adds a job.
    pub(crate) fn define(&self, job: Job) {
        let (key, used) = (job.key(), Instant::now());
        let mut known = locked(&self.known);
        known.entry(key).or_insert_with(|| Known { job, opened: Arc::default(), used }).used = used;
        if known.len() > MOST_JOBS {
            let oldest = known.iter().min_by_key(|(_, known)| known.used).map(|(key, _)| key.clone());
            oldest.map(|key| known.remove(&key));
        }
    }

    /// Drops the jobs that are not used any more.
    pub(crate) fn pass(&self) {
        locked(&self.known).retain(|_, known| known.used.elapsed() < IDLE);
    }

    /// Returns a job, and opens its dataset on the first call.
    ///
    /// # Errors
    ///
    /// `NotFound` for a job that the worker does not know; otherwise the error of opening the dataset.
    pub(crate) async fn opened(&self, key: &str) -> Result<Arc<Opened>, Status> {
        let (job, opened) = {
            let mut known = locked(&self.known);
            let known =
                known.get_mut(key).ok_or_else(|| Status::not_found("this job was not defined here"))?;
            known.used = Instant::now();
            (known.job.clone(), Arc::clone(&known.opened))
        };
        let workers = self.workers.clone();
        opened.get_or_try_init(|| blocking(move || open(job, &workers))).await.cloned()
    }
}

/// Opens the dataset of a job.
///
/// # Errors
///
/// See [`Reader::open`] and [`Reader::least_memory`]; [`Error::Fault`] if the dataset at this location has been
/// replaced since the client opened it.
fn open(job: Job, workers: &Workers) -> onefold_ikjt::Result<Arc<Opened>> {
    let Job { dataset, identity, options, rank } = job;
    // Clients of equal jobs may check different tables and labels, so each client runs these checks itself.
    let request = ReadRequest { options, checks: Checks::default(), rank };
    let reader = Reader::open(Path::new(&dataset), request, workers)?;
    if reader.identity() != identity {
        return Err(Error::options(
            format!("`{dataset}` is another dataset than the one that this job was opened with"),
            "open the dataset again: it was built anew",
        ));
    }
    let reading = reader.least_memory()?;
    Ok(Arc::new(Opened { reader: Arc::new(reader), reading }))
}

/// Runs `work`, for a client that opens a dataset, on a thread that may block. A storage error is final in this case,
/// as if the trainer had opened the dataset itself, because requests to storage have already been repeated. (A client
/// that is already reading asks other workers instead.)
pub(crate) async fn opening<T: Send + 'static>(
    work: impl FnOnce() -> onefold_ikjt::Result<T> + Send + 'static,
) -> Result<T, Status> {
    blocking(work).await.map_err(|status| match status.code() {
        Code::Unavailable => {
            let details = Bytes::copy_from_slice(status.details());
            Status::with_details(Code::FailedPrecondition, status.message(), details)
        }
        _ => status,
    })
}

/// Runs `work` on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> onefold_ikjt::Result<T> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Status::internal(error.to_string()))?.map_err(|error| to_status(&error.fault()))
}

/// Converts a fault to a status. The code tells the client whether to try again, and the worker whether its own operator
/// must act.
pub(crate) fn to_status(fault: &Fault) -> Status {
    let sent = of_worker(fault);
    let code = match fault.kind {
        _ if sent != *fault => Code::FailedPrecondition,
        Kind::Data => Code::DataLoss,
        // Another worker, or this worker later, may be able to read the data.
        Kind::Storage => Code::Unavailable,
        Kind::Usage | Kind::Options | Kind::Failed | Kind::Stopped | Kind::Internal => Code::InvalidArgument,
    };
    let details = serde_json::to_vec(&sent).unwrap_or_default();
    Status::with_details(code, sent.to_string(), details.into())
}

/// Replaces options in a fault by the worker's own flags. The client would otherwise print them as flags of its
/// program, which have no effect on the worker.
fn of_worker(fault: &Fault) -> Fault {
    let named = |text: &Text| {
        let is_here = Cell::new(false);
        let words = text.named(|option| match option.name.as_str() {
            "memory_limit" => {
                is_here.set(true);
                format!(
                    "`--memory-limit` {OF_WORKER} to at least twice as much (it reads with half of it; the workers of \
                     `onefold-serve local` share its `--memory-limit`)"
                )
            }
            _ => option.to_string(),
        });
        if is_here.get() { words.into() } else { text.clone() }
    };
    let hints = fault.hints.iter().map(named).collect();
    Fault { kind: fault.kind, message: named(&fault.message), hints }
}

#[cfg(test)]
mod tests {
    use onefold_base::fault::{option, text};

    use super::*;

    #[test]
    fn a_memory_limit_is_that_of_the_worker() {
        let other = text!["or lower ", option("global_batch_size")];
        let fault = Fault::new(Kind::Options, "a row group does not fit")
            .hint(text!["raise ", option("memory_limit"), ", or read fewer features"])
            .hint(other.clone());
        let status = to_status(&fault);
        assert_eq!(status.code(), Code::FailedPrecondition);
        let sent: Fault = serde_json::from_slice(status.details()).unwrap();
        assert!(
            sent.hints[0].named(|_| panic!("an option of the client")).contains("`onefold-serve worker`")
        );
        assert_eq!(sent.hints[1], other);
    }

    #[test]
    fn storage_that_refuses_is_final_when_a_dataset_is_opened() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let refused = || Err::<(), Error>(Fault::new(Kind::Storage, "denied").into());
        let status = runtime.block_on(opening(refused)).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(serde_json::from_slice::<Fault>(status.details()).unwrap().kind, Kind::Storage);
        assert_eq!(runtime.block_on(blocking(refused)).unwrap_err().code(), Code::Unavailable);
    }
}
