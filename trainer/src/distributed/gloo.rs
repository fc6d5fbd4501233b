//! Collectives of ranks that are processes, connected through c10d's Gloo.

use std::sync::Arc;
use std::time::Duration;

use super::c10d::{Group, Work};
use super::loss::Watch;
use super::{Collectives, Operation, Pending};
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
    pub(super) job: Arc<Job>,
}

/// The state that pending operations share.
#[derive(Debug)]
pub(super) struct Job {
    /// The process group; present until drop.
    group: Option<Group>,
    pub(super) watch: Watch,
    /// The maximum time of an operation.
    pub(super) timeout: Duration,
}

impl Gloo {
    /// Creates the collectives of a group whose ranks are connected.
    pub(super) fn new(group: Group, watch: Watch, (rank, size): (u32, u32), timeout: Duration) -> Self {
        Self { rank, size, job: Arc::new(Job { group: Some(group), watch, timeout }) }
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

impl Collectives for Gloo {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn start(&self, operation: Operation) -> Result<Pending> {
        let (job, name, operation) = (Arc::clone(&self.job), operation.name(), operation.in_bytes()?);
        job.watch.count_operation()?;
        let group = job.group.as_ref().expect("the group is there until the job is dropped");
        let work = group.start(&operation, job.timeout).map_err(|message| job.failed(name, &message))?;
        Ok(Pending::new(move || {
            let ended = job.finish(name, &work);
            // Tensors are kept alive until the operation has ended.
            drop(operation);
            ended
        }))
    }

    fn set_step(&self, step: u64) {
        self.job.watch.set_step(step);
    }

    fn abort(&self, message: &str) {
        self.job.watch.abort(message);
    }
}
