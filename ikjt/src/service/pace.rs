//! Decides when a worker is so late that the client also asks another one.
//!
//! A worker that is stopped or cut off is silent. A worker that computes, or that has other work before, says so about
//! five times a second, and has more time: another worker would compute the same batches again.

use std::time::{Duration, Instant};

/// The time limit until the usual time between batches is known, and the least one of a worker that is not silent.
const AT_FIRST: Duration = Duration::from_secs(5);

/// The least time limit of a silent worker.
const LEAST_SILENT: Duration = Duration::from_secs(1);

/// The time limit of a silent worker as a multiple of the usual time between batches.
const SILENT_FACTOR: u32 = 20;

/// The time limit as a multiple of the usual time, if batches usually take seconds.
const SLOW_FACTOR: u32 = 3;

/// The pace at which batches arrive.
#[derive(Debug)]
pub(super) struct Pace {
    /// The moving average of the time to wait for a batch.
    usual: Option<Duration>,
    /// The time of the last request to a worker or of the last batch.
    since: Instant,
    /// The time of the last message.
    heard: Instant,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { usual: None, since: now, heard: now }
    }

    /// Begins to wait for the next batch.
    pub(super) fn restart(&mut self, now: Instant) {
        (self.since, self.heard) = (now, now);
    }

    /// Records a message without a batch. If the worker waits for another client, no worker would be faster.
    pub(super) fn heard(&mut self, now: Instant, waits_for_client: bool) {
        self.heard = now;
        if waits_for_client {
            self.since = now;
        }
    }

    /// Records that the next batch has come.
    pub(super) fn came(&mut self, now: Instant) {
        let time = now.saturating_duration_since(self.since);
        self.usual = Some(self.usual.map_or(time, |usual| (usual * 7 + time) / 8));
    }

    /// Returns the time until another worker is asked.
    pub(super) fn left(&self, now: Instant) -> Duration {
        let slow = self.usual.map_or(AT_FIRST, |usual| AT_FIRST.max(SLOW_FACTOR * usual));
        let silent = self.usual.map_or(slow, |usual| (SILENT_FACTOR * usual).clamp(LEAST_SILENT, slow));
        let left = |limit: Duration, since| limit.saturating_sub(now.saturating_duration_since(since));
        left(silent, self.heard).min(left(slow, self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_silent_worker_is_given_up_before_one_that_computes() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert_eq!(pace.left(start + seconds(4)), seconds(1), "the usual time is not known");
        pace.came(start + Duration::from_millis(1));
        pace.restart(start);
        assert_eq!(pace.left(start), seconds(1));
        assert_eq!(pace.left(start + seconds(1)), Duration::ZERO);
        for second in 0..5 {
            pace.heard(start + seconds(second), false);
            assert_eq!(pace.left(start + seconds(second)), seconds(1), "it computes");
        }
        pace.heard(start + seconds(5), false);
        assert_eq!(pace.left(start + seconds(5)), Duration::ZERO, "it computes for too long");
        pace.heard(start + seconds(6), true);
        assert_eq!(pace.left(start + seconds(6)), seconds(1), "it waits for another client");
    }

    #[test]
    fn slow_batches_have_more_time() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        // Messages in between do not shorten the usual time.
        pace.heard(start + seconds(3), false);
        pace.came(start + seconds(4));
        pace.restart(start);
        assert_eq!(pace.left(start), seconds(12));
        pace.came(start + seconds(12));
        pace.restart(start);
        assert_eq!(pace.left(start), seconds(15));
    }
}
