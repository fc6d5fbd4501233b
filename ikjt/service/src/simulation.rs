//! The decisions of a master without the master, for services that no machine at hand could run: `benches/scaling`.

use std::time::Instant;

use crate::autoscale::{Autoscaler, Bounds, Observed};
use crate::messages::{ClientRate, WorkerFigures, WorkerRate, WorkerState};
use crate::placement::Placement;

/// Which worker computes what.
#[derive(Debug, Default)]
pub struct Placing(Placement);

impl Placing {
    /// A worker says how many blocks it has.
    pub fn heard(&mut self, address: &str, threads: usize, blocks: usize, now: Instant) {
        let (address, figures) = (address.to_owned(), WorkerFigures::default());
        let state = WorkerState { address, threads, memory_limit_bytes: 0, blocks, draining: false, figures };
        self.0.heard(state, now);
    }

    /// The worker for a place.
    pub fn lease(&mut self, place: &str, now: Instant) -> Option<String> {
        self.0.lease(place, None, &[], now)
    }
}

/// How many workers there should be.
#[derive(Debug)]
pub struct Scaling(Autoscaler);

/// What a master sees of equal workers and one client.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Workers that are there.
    pub workers: usize,
    /// Threads of each.
    pub threads: usize,
    /// Threads of each that are busy.
    pub busy_threads: f64,
    /// Samples that the client gets a second.
    pub samples_per_second: f64,
    /// The share of the time in which the client waits.
    pub waiting_share: f64,
}

impl Scaling {
    /// Begins with the fewest workers.
    pub fn new(least: usize, most: usize) -> Self {
        Self(Autoscaler::new(Bounds { least, most }))
    }

    /// Decides anew.
    pub fn decide(&mut self, seen: Seen) -> usize {
        let Seen { workers, threads, busy_threads, samples_per_second, waiting_share } = seen;
        let samples_computed_per_second = samples_per_second / workers.max(1) as f64;
        let worker =
            WorkerRate { threads, busy_threads, samples_computed_per_second, ..WorkerRate::default() };
        let client = ClientRate { samples_per_second, waiting_share, ..ClientRate::default() };
        self.0.decide(Observed::of(&vec![worker; workers], &[client]))
    }
}
