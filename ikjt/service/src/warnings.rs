//! Warnings on stderr for the operator of a process.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The least interval between repetitions of a warning.
const AGAIN: Duration = Duration::from_secs(60);

/// The maximal number of warnings in this interval.
const MOST: usize = 20;

/// Writes each warning at most once a minute, because clients repeat requests that fail.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Mutex<HashMap<String, Instant>>);

impl Warnings {
    pub(crate) fn warn(&self, text: &str) {
        if self.is_due(text, Instant::now()) {
            tracing::warn!("{text}");
        }
    }

    fn is_due(&self, text: &str, now: Instant) -> bool {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|_, when| now.saturating_duration_since(*when) < AGAIN);
        let is_due = written.len() < MOST && !written.contains_key(text);
        if is_due {
            written.insert(text.to_owned(), now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_written_once_a_minute_and_not_too_many() {
        let (warnings, now) = (Warnings::default(), Instant::now());
        assert!(warnings.is_due("the disk is full", now) && !warnings.is_due("the disk is full", now));
        let others = (0..2 * MOST).filter(|number| warnings.is_due(&number.to_string(), now));
        assert_eq!(others.count(), MOST - 1);
        assert!(warnings.is_due("the disk is full", now + AGAIN));
    }
}
