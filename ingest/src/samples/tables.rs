//! The tables of the declared steps, and what their rows are marked with.

use std::fmt;

/// The view of the rows that become samples: the feature log or the query.
pub(super) const BASE: &str = "__onefold_base";
/// Their narrow columns, with `__onefold_state` and the rank `__onefold_row` among the rows of one key.
pub(super) const ROWS: &str = "__onefold_rows";
/// The keys that several rows have.
pub(super) const REPEATED: &str = "__onefold_repeated";
/// The events, narrow.
pub(super) const EVENTS: &str = "__onefold_events";
/// The labels of the samples that have an event.
pub(super) const LABELS: &str = "__onefold_labels";
/// The narrow columns of the distinct samples, with what drops them.
pub(super) const CANDIDATES: &str = "__onefold_candidates";
/// The condition for the rows of a log that count.
pub(super) const USABLE: &str = "NOT __onefold_unusable AND __onefold_row = 1";

/// The table of the `i`th `[[attributes]]`.
pub(super) fn attributes_table(i: usize) -> String {
    format!("__onefold_attributes{i}")
}

/// The table that says which rows of the `i`th `[[attributes]]` hold at the samples' times.
pub(super) fn attributes_in_time_table(i: usize) -> String {
    format!("__onefold_attributes_in_time{i}")
}

/// Whether a row of a source can be used, and why not: its column `__onefold_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowState {
    /// It can.
    Usable,
    /// `where` leaves it out.
    LeftOut,
    /// A column that identifies it, its time or a value is null.
    NoKey,
    /// Its time is after the limits.
    Future,
    /// Its parallel lists have different lengths.
    Ragged,
    /// Its time is before the limits.
    Past,
    /// A clock shows its local time twice, or skips it.
    ClockChange,
}

/// Why a step drops a sample: its column `__onefold_dropped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    /// No step does.
    Kept,
    /// It has no event.
    NoEvent,
    /// An `[[attributes]]` has no row for it.
    NoAttributes,
    /// `[sampling]` drops it.
    SampledOut,
}

/// As the number that stands for it in SQL.
impl fmt::Display for RowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as u8)
    }
}

/// As the number that stands for it in SQL.
impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as u8)
    }
}
