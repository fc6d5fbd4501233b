//! The memory of batches: how much each job uses, and which batches are dropped if there is no room.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::{Entry, Progress, Schedule, Taker};
use crate::sending::Message;

impl<T: Clone> Schedule<T> {
    /// Returns the bytes of a block's batches that some client has not received yet.
    fn needed(&self, entry: &Entry<T>, now: Instant) -> u64 {
        let from = self.needed_from(entry, now);
        let had = usize::try_from(from.saturating_sub(entry.first)).unwrap_or(usize::MAX);
        entry.batches.iter().skip(had).map(Message::bytes).sum()
    }

    /// Returns the first step of a block that some client has not received yet. Inactive clients count only if there
    /// are no others.
    fn needed_from(&self, entry: &Entry<T>, now: Instant) -> u64 {
        match self.is_owed(entry, now) {
            true => entry.first,
            false => {
                let there = entry.takers.values().filter(|taker| self.is_there(entry, taker, now));
                let next = there.map(|taker| taker.next).min();
                let all = || entry.takers.values().map(|taker| taker.next).min();
                next.or_else(all).unwrap_or(entry.first)
            }
        }
    }

    /// Returns the bytes of a job's batches that clients have not received yet, and of batches on their way.
    pub(super) fn needed_of(&self, job: &str, now: Instant) -> u64 {
        let entries = self.entries.values().filter(|entry| entry.is_of(job));
        entries.map(|entry| self.needed(entry, now)).sum::<u64>() + self.under_way_of(job)
    }

    /// Does the same as [`needed_of`](Self::needed_of) for every job.
    pub(super) fn needed_by_job(&self, now: Instant) -> HashMap<&str, u64> {
        let mut jobs = HashMap::<&str, u64>::new();
        for entry in self.entries.values() {
            let under_way: u64 = entry.under_way.values().flatten().map(|(_, bytes)| bytes).sum();
            *jobs.entry(entry.block.job.as_str()).or_default() += self.needed(entry, now) + under_way;
        }
        jobs
    }

    pub(super) fn under_way_of(&self, job: &str) -> u64 {
        let entries = self.entries.values().filter(|entry| entry.is_of(job));
        entries.flat_map(|entry| entry.under_way.values().flatten()).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes of batches that each job may hold.
    pub(super) fn share(&self) -> u64 {
        let jobs: HashSet<&str> = self.entries.values().map(|entry| entry.block.job.as_str()).collect();
        self.limits.batches / jobs.len().max(1) as u64
    }

    /// Makes room for another batch of a block. Returns whether there is room.
    pub(super) fn make_room(&mut self, id: u64, bytes: u64, now: Instant) -> bool {
        let Some(entry) = self.entries.get(&id) else { return false };
        let is_awaited = self.is_awaited(entry, now);
        if self.is_held(entry, now) {
            return false;
        }
        if !is_awaited && self.needed_of(&entry.block.job, now).saturating_add(bytes) > self.share() {
            return false;
        }
        let limit = self.limits.batches.saturating_sub(bytes);
        self.free(limit, now);
        while self.used() > limit && self.cut(id, now) {}
        is_awaited || self.used() <= limit
    }

    /// Drops batches that all clients of a block have received, until at most `limit` bytes are used.
    fn free(&mut self, limit: u64, now: Instant) {
        let mut used = self.used();
        let had = |entry: &Entry<T>| self.needed_from(entry, now).saturating_sub(entry.first);
        let had: Vec<(u64, u64)> = self.entries.iter().map(|(id, entry)| (*id, had(entry))).collect();
        for (id, had) in had {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            for _ in 0..had {
                if used <= limit {
                    return;
                }
                let Some(message) = entry.batches.pop_front() else { break };
                entry.first += 1;
                let mut under_way = entry.under_way.values().flatten();
                let is_under_way = under_way.any(|(step, _)| *step + 1 == entry.first);
                used -= if is_under_way { 0 } else { message.bytes() };
            }
        }
    }

    /// Returns the last block, other than `id`, of a job that exceeds its share, if it has batches that can be
    /// computed again later.
    fn last_to_cut(&self, id: u64, now: Instant) -> Option<u64> {
        let (share, needed) = (self.share(), self.needed_by_job(now));
        let may_go = |entry: &Entry<T>| {
            let is_idle = matches!(entry.progress, Progress::Waiting | Progress::Complete);
            let is_next =
                |taker: &Taker| self.is_there(entry, taker, now) && self.is_first(entry, &taker.client);
            let spared = usize::from(entry.takers.values().any(is_next));
            is_idle && entry.batches.len() > spared && needed[entry.block.job.as_str()] > share
        };
        let others = self.entries.iter().filter(|(other, entry)| **other != id && may_go(entry));
        others.max_by_key(|(_, entry)| entry.block.steps.start).map(|(id, _)| *id)
    }

    /// Drops a batch of a block, other than `id`, of a job that exceeds its share. Returns whether there was one.
    fn cut(&mut self, id: u64, now: Instant) -> bool {
        let Some(last) = self.last_to_cut(id, now) else { return false };
        if let Some(entry) = self.entries.get_mut(&last).filter(|entry| !entry.takers.is_empty()) {
            entry.batches.pop_back();
            entry.progress = Progress::Waiting;
        } else {
            self.remove(last);
        }
        true
    }
}
