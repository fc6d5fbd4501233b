//! The tables of the declared steps, and the markers of their rows.

use std::fmt;

use crate::config::TimeConfig;

/// The view of the rows that become samples: the feature log or the query.
pub(super) const BASE: &str = "__onefold_base";
/// The narrow columns of [`BASE`], with `__onefold_state` and the rank `__onefold_row` among the rows of one key.
pub(super) const ROWS: &str = "__onefold_rows";
/// The keys that several rows have.
pub(super) const REPEATED: &str = "__onefold_repeated";
/// The narrow columns of the events.
pub(super) const EVENTS: &str = "__onefold_events";
/// The labels of the samples that have an event.
pub(super) const LABELS: &str = "__onefold_labels";
/// The narrow columns of the distinct samples, with the reason to drop them.
pub(super) const CANDIDATES: &str = "__onefold_candidates";
/// The condition for the rows of a log that can be used.
pub(super) const USABLE: &str = "NOT __onefold_unusable AND __onefold_row = 1";

/// Returns the name of the table of the `i`th `[[attributes]]`.
pub(super) fn attributes_table(i: usize) -> String {
    format!("__onefold_attributes{i}")
}

/// Returns the name of the table that says which rows of the `i`th `[[attributes]]` are valid at the samples'
/// times.
pub(super) fn attributes_in_time_table(i: usize) -> String {
    format!("__onefold_attributes_in_time{i}")
}

/// A table of the rows of a log, and the section that reads it.
pub(super) struct LogRows<'a> {
    pub(super) table: &'a str,
    pub(super) place: &'a str,
    pub(super) source: &'a str,
    pub(super) on: &'a [(String, String)],
    pub(super) time: &'a TimeConfig,
}

/// Whether a row of a source can be used, or why not: the values of the column `__onefold_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowState {
    /// The row can be used.
    Usable,
    /// `where` leaves the row out.
    LeftOut,
    /// The time, a column that identifies the row, or a value is null.
    NoKey,
    /// The time is after the limits.
    Future,
    /// Parallel lists of the row have different lengths.
    Ragged,
    /// The time is before the limits.
    Past,
    /// The local time is ambiguous or nonexistent because of a clock change.
    ClockChange,
}

/// The reason why a step drops a sample: the values of the column `__onefold_dropped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    /// No step drops the sample.
    Kept,
    /// The sample has no event.
    NoEvent,
    /// An `[[attributes]]` section has no row for the sample.
    NoAttributes,
    /// `[sampling]` drops the sample.
    SampledOut,
}

/// Formats the state as its number in SQL.
impl fmt::Display for RowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as u8)
    }
}

/// Formats the reason as its number in SQL.
impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as u8)
    }
}
