//! The row groups that a job will read, and its progress.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onefold_base::sync::locked;

use super::Chunk;

/// The time without requests after which a job is considered idle, because it may have ended.
const IDLE_AFTER: Duration = Duration::from_secs(60);

/// The weight of reads by an idle job.
const IDLE: f64 = 0.1;

/// The expected reads in the next epoch, which the job may not have.
const NEXT_EPOCH: f64 = 0.5;

/// The expected reads that happen only if the job is restarted.
const STARTED_AGAIN: f64 = 0.1;

/// The row groups that one job reads in an epoch, and the job's progress.
#[derive(Debug)]
pub struct Interest {
    /// For each file and row group, its position in the epoch, from 0 to 1.
    shares: HashMap<(Arc<str>, usize), f32>,
    columns: HashSet<String>,
    /// Whether the next epoch has the same batches. Then it does not need the columns if the batches are cached.
    repeats: bool,
    /// How far behind its position the job still needs columns, as a share of the epoch: a block that ends within a
    /// row group is followed by a block that needs the same row group.
    still_needed: f32,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    share: f32,
    when: Instant,
}

impl Interest {
    /// Creates the interest in `columns` of the given row groups. The keys of `shares` are the path of a file and the
    /// number of a row group in it; the values are positions in the epoch, from 0 to 1.
    pub(crate) fn new(
        shares: HashMap<(Arc<str>, usize), f32>,
        columns: HashSet<String>,
        repeats: bool,
        still_needed: f32,
    ) -> Arc<Self> {
        let now = Mutex::new(Now { share: 0.0, when: Instant::now() });
        Arc::new(Self { shares, columns, repeats, still_needed, now })
    }

    /// Records that the job has reached the position `share` of its epoch.
    pub fn reached(&self, share: f32) {
        *locked(&self.now) = Now { share, when: Instant::now() };
    }

    /// Records that the job has reached a row group.
    pub(crate) fn reached_row_group(&self, file: &Arc<str>, row_group: usize) {
        if let Some(share) = self.shares.get(&(Arc::clone(file), row_group)) {
            self.reached(*share);
        }
    }

    /// Returns how often the job is expected to read a column, and the distance to the next read as a share of the
    /// epoch.
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

    /// Returns how often the job is expected to read the batches at `share`, and the distance to the next read as a
    /// share of the epoch.
    pub(super) fn batches(&self, share: f32, now: Instant) -> (f64, f32) {
        self.expected(share, 0.0, if self.repeats { NEXT_EPOCH } else { STARTED_AGAIN }, now)
    }

    /// Returns the expected reads at `share`, and the distance to the next one. The expectation is 1 if the position
    /// is ahead of the job, or at most `behind` behind it, and otherwise `again`.
    fn expected(&self, share: f32, behind: f32, again: f64, now: Instant) -> (f64, f32) {
        let Now { share: at, when } = *locked(&self.now);
        let (reads, distance) = match share > at - behind {
            true => (1.0, (share - at).max(0.0)),
            false => (again, 1.0 + share - at),
        };
        let idle = now.saturating_duration_since(when) > IDLE_AFTER;
        (if idle { IDLE * reads } else { reads }, distance)
    }
}
