//! Counts what happens to the rows of `[samples]`: each row is written, or left out for one reason.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The reason why a row does not become a sample of the dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The condition `[samples].where` does not hold.
    Where,
    /// A column that identifies a sample, or the time, is null.
    NullKey,
    /// The time is before the limits.
    Past,
    /// The time is after the limits.
    Future,
    /// A clock shows the local time twice, or skips it.
    ClockChange,
    /// Parallel lists have different lengths.
    Ragged,
    /// An earlier row has the same key.
    Duplicate,
    /// The row has no event, and `[join].missing` is `"skip"`.
    NoEvent,
    /// An `[[attributes]]` section has no values for the row, and its `missing` is `"skip"`.
    NoAttributes,
    /// `[sampling]` drops the row.
    SampledOut,
    /// The session of the row is not taken.
    OtherSession,
    /// The session of the row belongs to another range of buckets.
    OtherRange,
    /// The session of the row lies in a partition that is not written.
    OtherPartition,
    /// The dataset already has the sample.
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

/// The number of rows of `[samples]`, and what happened to them: `read` is the sum of `written` and all of `left_out`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// The number of rows of the source or query of `[samples]`.
    pub read: u64,
    /// The number of rows that became samples of the dataset.
    pub written: u64,
    /// The number of other rows, by reason. Reasons without rows have no entry.
    pub left_out: BTreeMap<Reason, u64>,
}

impl RowCounts {
    /// Adds rows that are left out.
    pub(crate) fn leave_out(&mut self, reason: Reason, rows: u64) {
        if rows > 0 {
            *self.left_out.entry(reason).or_default() += rows;
        }
    }

    /// Moves rows from those of other partitions to the written ones, because a later step has written them.
    pub(crate) fn write_later(&mut self, rows: u64) {
        let others = self.left_out_for(Reason::OtherPartition);
        let rows = rows.min(others);
        self.written += rows;
        self.left_out.insert(Reason::OtherPartition, others - rows);
        self.left_out.retain(|_, rows| *rows > 0);
    }

    /// Returns the number of rows that were left out for a reason.
    pub(crate) fn left_out_for(&self, reason: Reason) -> u64 {
        self.left_out.get(&reason).copied().unwrap_or(0)
    }

    /// Returns the number of samples: rows that are written, or left out for a reason that applies to samples.
    pub(crate) fn samples(&self) -> u64 {
        let reasons = [Reason::OtherSession, Reason::OtherRange, Reason::OtherPartition];
        self.written + reasons.map(|reason| self.left_out_for(reason)).iter().sum::<u64>()
    }

    /// Returns whether each row is written or left out.
    pub(crate) fn is_complete(&self) -> bool {
        self.read == self.written + self.left_out.values().sum::<u64>()
    }

    /// Checks that each row is written or left out.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a row is neither, or is counted twice.
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

    /// Returns the counts as one line: `10 rows read: 8 written, left out 2 as duplicates`.
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
