//! Collectives of ranks that are processes, connected through c10d's Gloo.

use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::c10d::{Group, Said, Work};
use super::loss::Watch;
use super::{
    Collectives, Pending, Reduce, check_all_gather, check_all_to_all, check_broadcast, check_tensor, flat,
};
use crate::Result;

/// The time to wait for an operation before this rank checks whether others have failed.
const SLICE: Duration = Duration::from_millis(100);

/// The collectives of processes, on tensors in main memory: c10d's `ProcessGroupGloo`.
///
/// Created by [`Environment::join`](super::Environment::join).
#[derive(Debug)]
pub struct Gloo {
    rank: u32,
    size: u32,
    job: Arc<Job>,
}

/// The state that pending operations share.
#[derive(Debug)]
pub(super) struct Job {
    /// The process group; present until drop.
    group: Option<Group>,
    watch: Watch,
    /// The maximum time of an operation.
    timeout: Duration,
}

impl Gloo {
    /// Creates the collectives of a group whose ranks are connected.
    pub(super) fn new(group: Group, watch: Watch, (rank, size): (u32, u32), timeout: Duration) -> Self {
        Self { rank, size, job: Arc::new(Job { group: Some(group), watch, timeout }) }
    }

    /// Returns the state that other collectives of the same ranks share with these.
    pub(super) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Starts an operation on `tensors`, which are kept alive until it ends.
    fn start<const N: usize>(
        &self,
        operation: &'static str,
        tensors: [Tensor; N],
        start: impl FnOnce(&Group, &[Tensor; N], Duration) -> Said<Work>,
    ) -> Result<Pending> {
        let job = &self.job;
        job.watch.count_operation()?;
        let group = job.group.as_ref().expect("the group is there until the job is dropped");
        let work = start(group, &tensors, job.timeout);
        let work = work.map_err(|message| job.failed(operation, &message))?;
        let job = Arc::clone(job);
        Ok(Pending::new(move || {
            let ended = job.finish(operation, &work);
            drop(tensors);
            ended
        }))
    }
}

impl Job {
    fn finish(&self, operation: &'static str, work: &Work) -> Result<()> {
        loop {
            match work.wait(SLICE) {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    if let Some(error) = self.watch.overdue() {
                        return Err(error);
                    }
                }
                Err(message) => return Err(self.failed(operation, &message)),
            }
        }
    }

    /// Returns the watch over the ranks.
    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Returns the maximum time of an operation.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Tells the other ranks that an operation took too long. Returns this rank's error.
    pub(super) fn late(&self, operation: &'static str) -> crate::Error {
        self.watch.fail(format!("`{operation}` had no answer within {:?}", self.timeout))
    }

    /// Tells the other ranks that an operation has failed. Returns this rank's error.
    pub(super) fn failed(&self, operation: &'static str, message: &str) -> crate::Error {
        // The first rank that times out reports "Timed out waiting …", the others "Application timeout caused
        // pair closure".
        if ["Timed out", "timeout"].iter().any(|text| message.contains(text)) {
            return self.late(operation);
        }
        self.watch.fail({
            // Gloo's messages start with a source location: `[…/pair.cc:534] Connection closed by peer
            // [127.0.0.1]:4711`.
            let line = message.lines().next().unwrap_or_default();
            let text = line.split_once("] ").map_or(line, |(place, text)| match place.starts_with('[') {
                true => text,
                false => line,
            });
            format!("`{operation}` failed: {text}")
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Dropping the group waits for its works. After the loss of a rank that can take long, and this process
        // ends anyway.
        if self.watch.has_failed() {
            std::mem::forget(self.group.take());
        }
    }
}

/// Returns the bytes of a tensor, in the same memory. Operations without arithmetic transfer bytes, whatever
/// the type.
pub(super) fn bytes(tensor: &Tensor) -> Result<Tensor> {
    Ok(flat(tensor)?.f_view_dtype(Kind::Uint8)?)
}

impl Collectives for Gloo {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_to_all(
        &self,
        received: &Tensor,
        received_splits: &[i64],
        sent: &Tensor,
        sent_splits: &[i64],
    ) -> Result<Pending> {
        let place = (self.size, self.device());
        let splits = check_all_to_all(place, (received, received_splits), (sent, sent_splits))?;
        let width = sent.kind().elt_size_in_bytes() as i64;
        let in_bytes = |splits: Vec<i64>| splits.iter().map(|split| split * width).collect::<Vec<_>>();
        let splits = (in_bytes(splits.0), in_bytes(splits.1));
        self.start("all_to_all", [bytes(received)?, bytes(sent)?], |group, [received, sent], timeout| {
            group.all_to_all((received, &splits.0), (sent, &splits.1), timeout)
        })
    }

    fn all_reduce(&self, tensor: &Tensor, operation: Reduce) -> Result<Pending> {
        check_tensor("all_reduce", "tensor", tensor, self.device())?;
        self.start("all_reduce", [flat(tensor)?], |group, [tensor], timeout| {
            group.all_reduce(tensor, operation, timeout)
        })
    }

    fn all_gather(&self, gathered: &Tensor, tensor: &Tensor) -> Result<Pending> {
        check_all_gather((self.size, self.device()), gathered, tensor)?;
        self.start("all_gather", [bytes(gathered)?, bytes(tensor)?], |group, [gathered, tensor], timeout| {
            group.all_gather(gathered, tensor, timeout)
        })
    }

    fn broadcast(&self, tensor: &Tensor, root: u32) -> Result<Pending> {
        check_broadcast((self.size, self.device()), tensor, root)?;
        self.start("broadcast", [bytes(tensor)?], |group, [tensor], timeout| {
            group.broadcast(tensor, root, timeout)
        })
    }

    fn barrier(&self) -> Result<()> {
        self.start("barrier", [], |group, [], timeout| group.barrier(timeout))?.wait()
    }

    fn set_step(&self, step: u64) {
        self.job.watch.set_step(step);
    }

    fn abort(&self, message: &str) {
        self.job.watch.abort(message);
    }
}
