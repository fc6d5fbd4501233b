//! What a job will read, and how far it is.

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

/// What one job reads of an epoch, and how far it is.
#[derive(Debug)]
pub struct Interest {
    /// By file and row group, its place in the epoch: from 0 at the beginning to 1 at the end.
    places: HashMap<(Arc<str>, usize), f32>,
    columns: HashSet<String>,
    /// Whether another epoch has the same batches, so that it needs no columns if they are kept.
    repeats: bool,
    /// How far before its place the job still needs columns, as a part of the epoch: what ends in the middle of row groups
    /// goes on with them.
    still_needed: f32,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    place: f32,
    when: Instant,
}

impl Interest {
    /// The interest in `columns` of these row groups, given by the path of a file and their number in it, with their
    /// places in the epoch.
    pub(crate) fn new(
        places: HashMap<(Arc<str>, usize), f32>,
        columns: HashSet<String>,
        repeats: bool,
        still_needed: f32,
    ) -> Arc<Self> {
        let now = Mutex::new(Now { place: 0.0, when: Instant::now() });
        Arc::new(Self { places, columns, repeats, still_needed, now })
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job is at `place` of its epoch.
    pub fn reached(&self, place: f32) {
        *self.now() = Now { place, when: Instant::now() };
    }

    /// The job is at a row group.
    pub(crate) fn reached_row_group(&self, file: &Arc<str>, row_group: usize) {
        if let Some(place) = self.places.get(&(Arc::clone(file), row_group)) {
            self.reached(*place);
        }
    }

    /// How often the job is expected to read a column, and how far away the next time is.
    pub(super) fn columns(&self, chunk: &Chunk, now: Instant) -> (f64, f32) {
        let place = self.places.get(&(Arc::clone(&chunk.file), chunk.row_group));
        match place.filter(|_| self.columns.contains(&*chunk.column)) {
            Some(place) => {
                let again = if self.repeats { STARTED_AGAIN } else { NEXT_EPOCH };
                self.expected(*place, self.still_needed, again, now)
            }
            None => (0.0, f32::MAX),
        }
    }

    /// How often the job is expected to read the batches at `place`, and how far away the next time is.
    pub(super) fn batches(&self, place: f32, now: Instant) -> (f64, f32) {
        self.expected(place, 0.0, if self.repeats { NEXT_EPOCH } else { STARTED_AGAIN }, now)
    }

    /// What is read at `place`, and counts `again` once that is so far behind.
    fn expected(&self, place: f32, behind: f32, again: f64, now: Instant) -> (f64, f32) {
        let Now { place: at, when } = *self.now();
        let (reads, distance) = match place > at - behind {
            true => (1.0, (place - at).max(0.0)),
            false => (again, 1.0 + place - at),
        };
        let idle = now.saturating_duration_since(when) > IDLE_AFTER;
        (if idle { IDLE * reads } else { reads }, distance)
    }
}
