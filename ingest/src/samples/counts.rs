//! Counts of the rows that the declared steps left out, and the errors for rows that must not be left out.

use serde::Serialize;

use crate::config::Policy;
use crate::error::{Error, Result, bug};

/// The numbers of rows that the declared steps left out or filled up, by reason. Counts of steps that are not
/// declared are 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SkipCounts {
    /// Rows with a null in their time column or in a column that identifies a sample (`[checks].null_keys`).
    pub null_key_samples: u64,
    /// Rows with a time before the earliest allowed one (`[checks].past`).
    pub past_samples: u64,
    /// Rows with a time after the latest allowed one (`[checks].future`).
    pub future_samples: u64,
    /// Rows whose local time is ambiguous because a clock was set back. The earlier of the two times is used. Such
    /// rows are left out only with `[checks].clock_changes`.
    pub repeated_times: u64,
    /// Rows whose local time does not exist because a clock was set forward. They get the time at which an
    /// unchanged clock would have shown it. Such rows are left out only with `[checks].clock_changes`.
    pub skipped_times: u64,
    /// Rows whose parallel lists have different lengths (`[checks].ragged`).
    pub ragged_samples: u64,
    /// Rows with the key of an earlier row (`[samples].duplicates`).
    pub duplicate_samples: u64,
    /// Rows of events, attributes and timelines with a null key, time or value (`[checks].null_keys`).
    pub null_key_rows: u64,
    /// Rows of events, attributes and timelines with a time before the earliest allowed one (`[checks].past`).
    pub past_rows: u64,
    /// Rows of events, attributes and timelines with a time after the latest allowed one (`[checks].future`).
    pub future_rows: u64,
    /// Rows of events, attributes and timelines that `[checks].clock_changes` leaves out.
    pub clock_change_rows: u64,
    /// Rows of events, and of timelines over other sources, that repeat another row.
    pub duplicate_events: u64,
    /// Events after the attribution windows of all samples with their key.
    pub late_events: u64,
    /// Events before all samples with their key.
    pub early_events: u64,
    /// Events whose key occurs in no row of the feature log, not even in a row that was left out.
    pub orphan_events: u64,
    /// Samples without an event in their window. They are left out only with `missing = "skip"`.
    pub samples_without_events: u64,
    /// Samples without a row of an `[[attributes]]` section, among those that remain after the join with events.
    /// They are left out only with `missing = "skip"`.
    pub samples_without_attributes: u64,
    /// Samples that `[sampling]` dropped.
    pub sampled_out: u64,
}

impl SkipCounts {
    /// Returns the counts that are not 0, in the order of the steps, with a readable description.
    pub fn described(&self) -> Vec<(&'static str, u64)> {
        let all = [
            ("rows with a null key or time", self.null_key_samples),
            ("rows with a time too far in the past", self.past_samples),
            ("rows with a time in the future", self.future_samples),
            ("rows with a local time that occurs twice, of which the first was taken", self.repeated_times),
            ("rows with a local time that does not occur, read as of an unchanged clock", self.skipped_times),
            ("rows with parallel lists of different lengths", self.ragged_samples),
            ("duplicate samples", self.duplicate_samples),
            ("rows of other sources with a null key, time or value", self.null_key_rows),
            ("rows of other sources with a time too far in the past", self.past_rows),
            ("rows of other sources with a time in the future", self.future_rows),
            (
                "rows of other sources with a local time that occurs twice or not at all",
                self.clock_change_rows,
            ),
            ("duplicate events", self.duplicate_events),
            ("late events", self.late_events),
            ("early events", self.early_events),
            ("events without a sample", self.orphan_events),
            ("samples without an event", self.samples_without_events),
            ("samples without attributes", self.samples_without_attributes),
            ("samples dropped by sampling", self.sampled_out),
        ];
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

/// Rows that cannot become samples for one reason, and whether the configuration skips or refuses them.
pub(super) struct UnfitRows<'a> {
    /// The key of the policy, such as `` `[samples].duplicates` ``.
    pub(super) place: &'a str,
    /// The policy.
    pub(super) policy: Policy,
    /// The number of rows.
    pub(super) count: u64,
    /// The reason, as the predicate of a sentence: "have the key of an earlier row".
    pub(super) what: &'a str,
    /// A remedy other than skipping the rows.
    pub(super) remedy: &'a str,
}

impl UnfitRows<'_> {
    /// Whether the rows are an error.
    pub(super) fn refused(&self) -> bool {
        self.policy == Policy::Error && self.count > 0
    }

    /// Returns the error for the rows, with one row as an `example`.
    pub(super) fn error(&self, example: &str) -> Error {
        let example = if example.is_empty() { String::new() } else { format!(", the first with {example}") };
        Error::data(
            self.place,
            format!("{} {}{example}", self.count, self.what),
            format!(
                "{}, or write {} = \"skip\" to leave them out and count them",
                self.remedy,
                bare(self.place)
            ),
        )
    }
}

/// Returns the last part of a place, which is the key to write.
fn bare(place: &str) -> &str {
    place.trim_matches('`').rsplit(['.', '`']).next().unwrap_or(place)
}

/// Converts `counts` to an array of `N` counts.
pub(super) fn exactly<const N: usize>(counts: Vec<u64>) -> Result<[u64; N]> {
    counts.try_into().map_err(|counts: Vec<u64>| {
        bug(&format!("{} counts came back where {N} were asked for", counts.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_how_many_which_and_what_to_do() {
        let unfit = UnfitRows {
            place: "`[samples].duplicates`",
            policy: Policy::Error,
            count: 3,
            what: "rows have the key of an earlier row",
            remedy: "make `[samples].key` name what identifies a sample",
        };
        assert!(unfit.refused());
        assert!(!UnfitRows { count: 0, ..unfit }.refused());
        let error = unfit.error("request = 7").to_string();
        assert_eq!(
            error,
            "`[samples].duplicates`: 3 rows have the key of an earlier row, the first with request = 7\n  hint: make \
             `[samples].key` name what identifies a sample, or write duplicates = \"skip\" to leave them out and count them"
        );
    }

    #[test]
    fn only_counts_above_zero_are_described() {
        let counts = SkipCounts { late_events: 2, sampled_out: 5, ..SkipCounts::default() };
        assert_eq!(counts.described(), [("late events", 2), ("samples dropped by sampling", 5)]);
    }
}
