//! Clients of equal jobs: decides which clients wait for which others.

use std::time::Instant;

use onefold_ikjt::service::protocol::{Block, Notice};

use super::{Client, Entry, PATIENCE, Progress, Schedule, Taker, WINDOW};

impl Client {
    /// Returns whether the client has recently taken a batch.
    pub(super) fn is_there(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.seen) < PATIENCE
    }
}

impl<T: Clone> Schedule<T> {
    /// Records that a client requests the next step of a block.
    pub(super) fn saw(&mut self, block: &Block, taker: &Taker, now: Instant) {
        let Taker { client, pass, next } = taker;
        let clients = &mut self.jobs.entry(block.job.clone()).or_default().clients;
        let begun = || Client { epoch: block.epoch, pass: *pass, at: *next, seen: now };
        let client = clients.entry(client.clone()).or_insert_with(begun);
        (client.seen, client.at) = (now, client.at.max(*next));
    }

    /// Returns why a subscription waits for its next batch, unless the batch is there or its block has failed.
    pub(crate) fn why_waiting(&self, subscription: u64, now: Instant) -> Option<Notice> {
        let entry = self.subscriptions.get(&subscription).and_then(|id| self.entries.get(id))?;
        let taker = entry.takers.get(&subscription).filter(|taker| taker.next >= entry.next_batch())?;
        let is_paused = self.runs.values().any(|run| {
            run.paused && run.job == entry.block.job && run.epoch == entry.block.epoch && taker.next < run.end
        });
        let (waits_for_client, reason) = match entry.progress {
            Progress::Running if !is_paused => (false, "the worker computes the batch"),
            Progress::Complete | Progress::Failed(_) if !is_paused => return None,
            _ if self.is_held(entry, now) || self.is_followed(entry, taker, now) => (
                true,
                "a client of an equal job is behind, and batches that it needs fill the worker's memory",
            ),
            _ if is_paused => (false, "batches that clients have not read yet fill the worker's memory"),
            _ => (false, "the worker computes for other jobs, or has no memory left to read with"),
        };
        Some(Notice { reason: reason.to_owned(), waits_for_client })
    }

    /// Returns whether the client reads no earlier block of the epoch on this worker.
    pub(super) fn is_first(&self, entry: &Entry<T>, client: &str) -> bool {
        let Block { job, epoch, steps } = &entry.block;
        let is_earlier = |other: &Entry<T>| {
            other.block.steps.start < steps.start && other.block.epoch == *epoch && other.is_of(job)
        };
        !self.entries.values().any(|other| is_earlier(other) && other.is_read_by(client))
    }

    /// Returns the active clients of a block's job that read the same epoch.
    fn clients(&self, entry: &Entry<T>, now: Instant) -> impl Iterator<Item = (&str, &Client)> {
        let (clients, epoch) = (self.jobs.get(&entry.block.job).map(|job| &job.clients), entry.block.epoch);
        let clients = clients.into_iter().flatten();
        clients
            .filter(move |(_, client)| client.epoch == epoch && client.is_there(now))
            .map(|(name, client)| (name.as_str(), client))
    }

    /// Returns by how many blocks a client is behind a step, or `None` if it is ahead. The position of the client is
    /// the first step that it has not received of the blocks that it reads.
    fn behind(&self, entry: &Entry<T>, step: u64, (name, client): (&str, &Client)) -> Option<u64> {
        let Block { job, epoch, .. } = &entry.block;
        let entries = self.entries.values().filter(|other| other.is_of(job) && other.block.epoch == *epoch);
        let takers = entries.flat_map(|entry| entry.takers.values());
        let next = takers.filter(|taker| taker.client == name).map(|taker| taker.next).min();
        Some(step.checked_sub(next.unwrap_or(client.at))?.div_ceil(entry.length()))
    }

    /// Returns whether a client will come to a block that it has not requested yet.
    pub(super) fn is_owed(&self, entry: &Entry<T>, now: Instant) -> bool {
        let will_come = |(name, client): (&str, &Client)| {
            let behind = entry.block.steps.start.checked_sub(client.at);
            !entry.is_read_by(name) && behind.is_some_and(|steps| steps.div_ceil(entry.length()) <= WINDOW)
        };
        self.clients(entry, now).any(will_come)
    }

    /// Returns whether a block must wait until clients behind its readers have caught up.
    pub(super) fn is_held(&self, entry: &Entry<T>, now: Instant) -> bool {
        let start = entry.block.steps.start;
        let waits = |taker: &Taker| {
            let others = self
                .clients(entry, now)
                .filter(|(name, client)| client.pass == taker.pass && !entry.is_read_by(name));
            let mut behind = others.filter_map(|client| self.behind(entry, start, client));
            behind.any(|blocks| (WINDOW + 1..=2 * WINDOW).contains(&blocks))
        };
        !entry.takers.is_empty() && entry.takers.values().all(waits)
    }

    /// Returns whether another client is behind the client that waits for the next batch of a block, but within the
    /// window.
    fn is_followed(&self, entry: &Entry<T>, taker: &Taker, now: Instant) -> bool {
        let others = self
            .clients(entry, now)
            .filter(|(name, client)| client.pass == taker.pass && *name != taker.client);
        let mut behind = others.filter_map(|other| self.behind(entry, entry.next_batch(), other));
        behind.any(|blocks| (1..=WINDOW).contains(&blocks))
    }

    /// Returns whether a client has nothing to do until the next batch of a block is computed, and does not have to
    /// wait for another client.
    pub(super) fn is_awaited(&self, entry: &Entry<T>, now: Instant) -> bool {
        let next = entry.next_batch();
        entry.takers.iter().any(|(subscription, taker)| {
            taker.next >= next
                && !entry.under_way.contains_key(subscription)
                && self.is_first(entry, &taker.client)
                && !self.is_followed(entry, taker, now)
        })
    }

    /// Returns whether a client has recently taken a batch.
    pub(super) fn is_there(&self, entry: &Entry<T>, taker: &Taker, now: Instant) -> bool {
        let client = self.jobs.get(&entry.block.job).and_then(|job| job.clients.get(&taker.client));
        client.is_some_and(|client| client.is_there(now))
    }
}
