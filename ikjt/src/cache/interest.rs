//! The row groups that a job will read, and its progress.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Chunk;

/// A job that has asked for nothing for so long may have ended.
const IDLE_AFTER: Duration = Duration::from_secs(60);

/// What the reads of a job that may have ended count.
const IDLE: f64 = 0.1;

/// What a read in a next epoch counts, which the job may not have.
const NEXT_EPOCH: f64 = 0.5;

/// What a read counts that happens only if the job is started again.
const STARTED_AGAIN: f64 = 0.1;

/// The row groups that one job reads in an epoch, and its progress.
#[derive(Debug)]
pub struct Interest {
    /// By file and row group, the share of the epoch before it: from 0 to 1.
    shares: HashMap<(Arc<str>, usize), f32>,
    columns: HashSet<String>,
    /// Whether another epoch has the same batches, so that it needs no columns if they are kept.
    repeats: bool,
    /// How far behind the job still needs columns, as a part of the epoch: what ends in the middle of row groups
    /// goes on with them.
    still_needed: f32,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    share: f32,
    when: Instant,
}

impl Interest {
    /// The interest in `columns` of these row groups, given by the path of a file and their number in it, with the
    /// shares of the epoch before them.
    pub(crate) fn new(
        shares: HashMap<(Arc<str>, usize), f32>,
        columns: HashSet<String>,
        repeats: bool,
        still_needed: f32,
    ) -> Arc<Self> {
        let now = Mutex::new(Now { share: 0.0, when: Instant::now() });
        Arc::new(Self { shares, columns, repeats, still_needed, now })
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job is at `share` of its epoch.
    pub fn reached(&self, share: f32) {
        *self.now() = Now { share, when: Instant::now() };
    }

    /// The job is at a row group.
    pub(crate) fn reached_row_group(&self, file: &Arc<str>, row_group: usize) {
        if let Some(share) = self.shares.get(&(Arc::clone(file), row_group)) {
            self.reached(*share);
        }
    }

    /// How often the job is expected to read a column, and how far away the next time is.
    pub(super) fn columns(&self, chunk: &Chunk, now: Instant) -> (f64, f32) {
        let share = self.shares.get(&(Arc::clone(&chunk.file), chunk.row_group));
        match share.filter(|_| self.columns.contains(&*chunk.column)) {
            Some(share) => {
                let again = if self.repeats { STARTED_AGAIN } else { NEXT_EPOCH };
                self.expected(*share, self.still_needed, again, now)
            }
            None => (0.0, f32::MAX),
        }
    }

    /// How often the job is expected to read the batches at `share`, and how far away the next time is.
    pub(super) fn batches(&self, share: f32, now: Instant) -> (f64, f32) {
        self.expected(share, 0.0, if self.repeats { NEXT_EPOCH } else { STARTED_AGAIN }, now)
    }

    /// Expected reads of `share`: 1 while it is ahead (or within `behind`), else `again`.
    fn expected(&self, share: f32, behind: f32, again: f64, now: Instant) -> (f64, f32) {
        let Now { share: at, when } = *self.now();
        let (reads, distance) = match share > at - behind {
            true => (1.0, (share - at).max(0.0)),
            false => (again, 1.0 + share - at),
        };
        let idle = now.saturating_duration_since(when) > IDLE_AFTER;
        (if idle { IDLE * reads } else { reads }, distance)
    }
}
