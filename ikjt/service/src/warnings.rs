//! The failures of a process, and warnings about them on stderr for its operator.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use onefold_base::sync::locked;
use tonic::{Code, Status};

/// The least interval between repetitions of a warning.
const AGAIN: Duration = Duration::from_secs(60);

/// The maximal number of warnings in this interval.
const MOST: usize = 20;

/// Writes one warning about a subject per minute, because clients repeat requests that fail.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    /// The time of the last warning about each subject.
    written: Mutex<HashMap<String, Instant>>,
    failures: AtomicU64,
}

impl Warnings {
    /// Counts a request that is answered with an error. Warns the operator if this process cannot read data, or lacks
    /// memory, because a client cannot resolve this.
    pub(crate) fn failed(&self, status: &Status) {
        // A client sends a job only after a worker has not found it.
        if status.code() != Code::NotFound {
            self.failures.fetch_add(1, Relaxed);
        }
        let is_of_process = matches!(status.code(), Code::FailedPrecondition | Code::Unavailable);
        // Other statuses contain no fault.
        if is_of_process && !status.details().is_empty() {
            self.warn(status.message(), status.message());
        }
    }

    /// Returns the number of requests that were answered with an error.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Writes a warning, unless a warning about the same subject was written within the last minute.
    pub(crate) fn warn(&self, subject: &str, text: &str) {
        if self.is_due(subject, Instant::now()) {
            tracing::warn!("{text}");
        }
    }

    fn is_due(&self, subject: &str, now: Instant) -> bool {
        let mut written = locked(&self.written);
        written.retain(|_, when| now.saturating_duration_since(*when) < AGAIN);
        let is_due = written.len() < MOST && !written.contains_key(subject);
        if is_due {
            written.insert(subject.to_owned(), now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_counted() {
        let warnings = Warnings::default();
        warnings.failed(&Status::not_found("the job was not sent yet"));
        warnings.failed(&Status::invalid_argument("there is no such step"));
        assert_eq!(warnings.failures(), 1);
    }

    #[test]
    fn each_warning_is_written_once_a_minute_and_their_number_is_limited() {
        let (warnings, now) = (Warnings::default(), Instant::now());
        assert!(warnings.is_due("the disk is full", now) && !warnings.is_due("the disk is full", now));
        let others = (0..2 * MOST).filter(|number| warnings.is_due(&number.to_string(), now));
        assert_eq!(others.count(), MOST - 1);
        assert!(warnings.is_due("the disk is full", now + AGAIN));
    }
}
