//! The outcome for the rows of `[samples]`: each is written, or left out for one reason.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Why a row does not become a sample of the dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// `[samples].where` does not hold.
    Where,
    /// It has no value in a column that identifies a sample, or no time.
    NullKey,
    /// Its time is before the limits.
    Past,
    /// Its time is after the limits.
    Future,
    /// A clock shows its local time twice, or skips it.
    ClockChange,
    /// Its parallel lists have different lengths.
    Ragged,
    /// It has the key of an earlier row.
    Duplicate,
    /// It has no event, and `[join].missing` is `"skip"`.
    NoEvent,
    /// An `[[attributes]]` has no row for it, and `missing` is `"skip"`.
    NoAttributes,
    /// `[sampling]` drops it.
    SampledOut,
    /// Its session is not one of those that are taken.
    OtherSession,
    /// Its session belongs to another range of buckets.
    OtherRange,
    /// Its session lies in a partition that is not written.
    OtherPartition,
    /// The dataset has it already.
    AlreadyThere,
}

impl Reason {
    fn described(self) -> &'static str {
        match self {
            Self::Where => "by `where`",
            Self::NullKey => "without a key or time",
            Self::Past => "too far in the past",
            Self::Future => "in the future",
            Self::ClockChange => "with a local time that occurs twice or not at all",
            Self::Ragged => "with parallel lists of different lengths",
            Self::Duplicate => "as duplicates",
            Self::NoEvent => "without an event",
            Self::NoAttributes => "without attributes",
            Self::SampledOut => "by sampling",
            Self::OtherSession => "of sessions that are not taken",
            Self::OtherRange => "of other ranges",
            Self::OtherPartition => "of other partitions",
            Self::AlreadyThere => "that were there already",
        }
    }
}

/// The rows of `[samples]`, and the outcome for them: `read` is `written` and all of `left_out` together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows of the source or query of `[samples]`.
    pub read: u64,
    /// Rows that became samples of the dataset.
    pub written: u64,
    /// The others, by reason. A reason without rows is not here.
    pub left_out: BTreeMap<Reason, u64>,
}

impl RowCounts {
    /// Counts rows that are left out.
    pub(crate) fn leave_out(&mut self, reason: Reason, rows: u64) {
        if rows > 0 {
            *self.left_out.entry(reason).or_default() += rows;
        }
    }

    /// Makes rows that were left out of other partitions written ones: a later step has written them.
    pub(crate) fn write_later(&mut self, rows: u64) {
        let others = self.left_out_for(Reason::OtherPartition);
        let rows = rows.min(others);
        self.written += rows;
        self.left_out.insert(Reason::OtherPartition, others - rows);
        self.left_out.retain(|_, rows| *rows > 0);
    }

    /// The rows that were left out for a reason.
    pub(crate) fn left_out_for(&self, reason: Reason) -> u64 {
        self.left_out.get(&reason).copied().unwrap_or(0)
    }

    /// Rows that are written, or left out for a reason that counts samples and not rows of the log.
    pub(crate) fn samples(&self) -> u64 {
        let reasons = [Reason::OtherSession, Reason::OtherRange, Reason::OtherPartition];
        self.written + reasons.map(|reason| self.left_out_for(reason)).iter().sum::<u64>()
    }

    /// Whether every row is written or left out.
    pub(crate) fn is_complete(&self) -> bool {
        self.read == self.written + self.left_out.values().sum::<u64>()
    }

    /// Checks that every row is written or left out.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if one is not, or is twice.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_complete() {
            return Ok(());
        }
        Err(Error::engine(
            format!("not every row of `[samples]` is accounted for: {}", self.described()),
            "the query and the conditions must give the same rows each time they are evaluated; check that no source \
             changed meanwhile",
        ))
    }

    /// The counts as one line: `10 rows read: 8 written, left out 2 as duplicates`.
    pub(crate) fn described(&self) -> String {
        use onefold_base::units::{count_of, format_count};

        let left_out = self.left_out.iter();
        let left_out =
            left_out.map(|(reason, rows)| format!("{} {}", format_count(*rows), reason.described()));
        let left_out: Vec<String> = left_out.collect();
        let written = format!("{} read: {} written", count_of(self.read, "row"), format_count(self.written));
        if left_out.is_empty() { written } else { format!("{written}, left out {}", left_out.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_written_or_left_out() {
        let mut rows = RowCounts { read: 1010, written: 1000, ..RowCounts::default() };
        rows.leave_out(Reason::Past, 0);
        rows.leave_out(Reason::Duplicate, 2);
        rows.leave_out(Reason::OtherRange, 7);
        let error = rows.check().unwrap_err().to_string();
        assert!(error.contains("not every row") && error.contains("7 of other ranges"), "{error}");
        rows.leave_out(Reason::Duplicate, 1);
        rows.check().unwrap();
        assert_eq!(rows.samples(), 1007);
        assert_eq!(
            rows.described(),
            "1,010 rows read: 1,000 written, left out 3 as duplicates, 7 of other ranges"
        );
        let mut later = RowCounts { read: 10, written: 4, ..RowCounts::default() };
        later.leave_out(Reason::OtherPartition, 6);
        later.write_later(2);
        assert_eq!((later.written, later.left_out_for(Reason::OtherPartition)), (6, 4));
        later.write_later(5);
        assert_eq!((later.read, later.written, later.left_out.len()), (10, 10, 0));
        let text = serde_json::to_string(&rows).unwrap();
        assert_eq!(text, r#"{"read":1010,"written":1000,"left_out":{"duplicate":3,"other_range":7}}"#);
        assert_eq!(serde_json::from_str::<RowCounts>(&text).unwrap(), rows);
    }
}
