//! Messages between the master and its workers and users.

use std::collections::BTreeMap;

use onefold_ikjt::StageFigures;
use onefold_ikjt::cache::CacheFigures;
use onefold_ikjt::service::protocol::{ClientState, Question};
use serde::{Deserialize, Serialize};

use crate::rates::{ClientRate, Limit, WorkerRate};

/// Reports to the master that a worker is running.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    pub(crate) worker: WorkerState,
}

impl Question for Heartbeat {
    const ACTION: &'static str = "heartbeat";
    type Answer = Orders;
}

/// The master's answer to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Whether the worker must end as soon as no client reads its blocks.
    pub(crate) drain: bool,
    /// The locations of the datasets that the worker may read, or `None` for any location.
    pub(crate) locations: Option<Vec<String>>,
}

/// The state of a worker that the master knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerState {
    /// The address `HOST:PORT` at which clients reach the worker.
    pub(crate) address: String,
    /// The random name of the process, because another process may later have the same address.
    pub(crate) process: String,
    /// The version of the bytes of its batches, [`SAME_BYTES`](onefold_ikjt::service::protocol::SAME_BYTES).
    pub(crate) same_bytes: u32,
    pub(crate) threads: usize,
    pub(crate) memory_limit_bytes: u64,
    /// The number of blocks that are requested and not complete.
    pub(crate) blocks: usize,
    /// Whether the worker gets no further blocks, and ends when its blocks have been read.
    pub(crate) draining: bool,
    #[serde(flatten)]
    pub(crate) figures: WorkerFigures,
}

/// A worker's counters since it was started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerFigures {
    /// The number of batches that the worker computed.
    pub(crate) batches_computed: u64,
    /// The number of samples in these batches.
    pub(crate) samples_computed: u64,
    /// The number of batches that the worker sent, including batches from the cache.
    pub(crate) batches_sent: u64,
    /// The number of bytes of these batches.
    pub(crate) bytes_sent: u64,
    /// The number of requests that were answered with an error.
    #[serde(default)]
    pub(crate) failures: u64,
    /// The bytes of batches that wait in memory for clients.
    pub(crate) bytes_kept: u64,
    /// The statistics of the cache.
    #[serde(flatten)]
    pub(crate) cache: CacheFigures,
    /// The processor time of the process in seconds.
    pub(crate) cpu_seconds: f64,
    /// The time of the reader's threads by stage.
    #[serde(flatten)]
    pub(crate) stages: StageFigures,
}

/// Asks the master for the status of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskStatus {}

impl Question for AskStatus {
    const ACTION: &'static str = "status";
    type Answer = Status;
}

/// The status of the service.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) version: String,
    pub(crate) uptime_seconds: f64,
    /// The locations of datasets, by name.
    pub(crate) datasets: BTreeMap<String, String>,
    pub(crate) leases: u64,
    /// The number of requests that clients repeated after a failure.
    #[serde(default)]
    pub(crate) retries: u64,
    /// The number of requests to a second worker, because the first one gave nothing for long.
    #[serde(default)]
    pub(crate) second_requests: u64,
    /// The number of wanted workers.
    pub(crate) wanted_workers: usize,
    pub(crate) workers: Vec<WorkerState>,
    pub(crate) clients: Vec<ClientState>,
    pub(crate) worker_rates: Vec<WorkerRate>,
    pub(crate) client_rates: Vec<ClientRate>,
    pub(crate) limit: Limit,
}

/// Tells the master that a worker must end as soon as no client reads its blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Drain {
    /// The worker's address.
    pub(crate) worker: String,
}

impl Question for Drain {
    const ACTION: &'static str = "drain";
    type Answer = ();
}
