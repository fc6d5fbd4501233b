//! Messages between the master and its workers and users.

use std::collections::BTreeMap;

use onefold_ikjt::StageFigures;
use onefold_ikjt::cache::CacheFigures;
use onefold_ikjt::service::protocol::{ClientState, Question};
use serde::{Deserialize, Serialize};

use crate::rates::Limit;

/// To the master: a worker is there.
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
    /// To end when nobody reads its blocks any more.
    pub(crate) drain: bool,
    /// The locations of the datasets that it may read; any if `None`.
    pub(crate) locations: Option<Vec<String>>,
}

/// A worker as the master sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerState {
    /// `HOST:PORT`, by which clients reach it.
    pub(crate) address: String,
    /// A random name of the process: another one may come to the same address.
    pub(crate) process: String,
    /// The version of the bytes of its batches, [`SAME_BYTES`](onefold_ikjt::service::protocol::SAME_BYTES).
    pub(crate) same_bytes: u32,
    pub(crate) threads: usize,
    pub(crate) memory_limit_bytes: u64,
    /// Blocks that are asked for and not complete.
    pub(crate) blocks: usize,
    /// Whether it gets no further blocks, and ends when those that it has were read.
    pub(crate) draining: bool,
    #[serde(flatten)]
    pub(crate) figures: WorkerFigures,
}

/// A worker's counters since it was started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerFigures {
    /// Batches that it computed.
    pub(crate) batches_computed: u64,
    /// Samples in them.
    pub(crate) samples_computed: u64,
    /// Batches that it sent, computed or kept.
    pub(crate) batches_sent: u64,
    /// Bytes of them.
    pub(crate) bytes_sent: u64,
    /// Bytes of batches that wait in memory for clients.
    pub(crate) bytes_kept: u64,
    /// What is kept for reads to come.
    #[serde(flatten)]
    pub(crate) cache: CacheFigures,
    /// Processor time of the process.
    pub(crate) cpu_seconds: f64,
    /// Where the time of the reader's threads went.
    #[serde(flatten)]
    pub(crate) stages: StageFigures,
}

/// A worker's rates over the last 2 to 4 seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerRate {
    pub(crate) address: String,
    pub(crate) threads: usize,
    /// Processor seconds a second.
    pub(crate) busy_threads: f64,
    pub(crate) samples_computed_per_second: f64,
    pub(crate) bytes_sent_per_second: f64,
    /// Of the batches that were sent, those that were there already: another client had asked for them.
    pub(crate) shared_share: f64,
    /// Seconds a second, summed over the reader's threads.
    pub(crate) stages: StageFigures,
}

/// A client's rates over the last 2 to 4 seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ClientRate {
    pub(crate) client: String,
    pub(crate) samples_per_second: f64,
    pub(crate) bytes_per_second: f64,
    /// The share of the time in which its caller waits for a batch.
    pub(crate) waiting_share: f64,
}

/// To the master: what the service does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskStatus {}

impl Question for AskStatus {
    const ACTION: &'static str = "status";
    type Answer = Status;
}

/// What the service does.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) version: String,
    pub(crate) uptime_seconds: f64,
    /// Datasets by their names.
    pub(crate) datasets: BTreeMap<String, String>,
    pub(crate) leases: u64,
    /// How many workers there should be.
    pub(crate) wanted_workers: usize,
    pub(crate) workers: Vec<WorkerState>,
    pub(crate) clients: Vec<ClientState>,
    pub(crate) worker_rates: Vec<WorkerRate>,
    pub(crate) client_rates: Vec<ClientRate>,
    pub(crate) limit: Limit,
}

/// To the master: a worker is to end when nobody reads its blocks any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Drain {
    /// The worker's address.
    pub(crate) worker: String,
}

impl Question for Drain {
    const ACTION: &'static str = "drain";
    type Answer = ();
}
