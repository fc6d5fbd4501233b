//! What a snapshot says of the row groups of a data file: enough to plan which of them is read when, and by whom.

use serde::{Deserialize, Serialize};

/// One row group of a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowGroup {
    /// Samples in the row group.
    pub samples: u64,
    /// Runs of consecutive samples of one session: in clustered order, the sessions with samples in the row group.
    pub sessions: u64,
    /// The session of the first sample. If it is the last one of the row group before, the session goes on here.
    pub first_session: i64,
    /// The session of the last sample.
    pub last_session: i64,
    /// The earliest time of a sample, in microseconds since 1970.
    pub first_time: i64,
    /// The latest time of a sample, in microseconds since 1970.
    pub last_time: i64,
    /// Ids over all samples and sparse features, as if every sample carried its lists.
    pub values: u64,
    /// Compressed size of all columns.
    pub bytes_on_disk: u64,
}

/// Checks that the row groups of a file have `samples` samples together, and none is empty.
///
/// # Errors
///
/// What is wrong.
pub(super) fn check(row_groups: &[RowGroup], samples: u64) -> Result<(), String> {
    if let Some(empty) = row_groups.iter().position(|row_group| row_group.samples == 0) {
        return Err(format!("row group {empty} has no samples"));
    }
    let listed = row_groups.iter().fold(0, |sum: u64, row_group| sum.saturating_add(row_group.samples));
    if listed != samples {
        return Err(format!("the file has {samples} samples, its row groups have {listed}"));
    }
    Ok(())
}

impl RowGroup {
    /// Adds samples with these sessions and times, which follow those that were added before.
    pub(crate) fn add(&mut self, sessions: &[i64], times: &[i64]) {
        let (Some(first), Some(last)) = (sessions.first(), sessions.last()) else { return };
        let earliest = times.iter().copied().min().unwrap_or(i64::MAX);
        let latest = times.iter().copied().max().unwrap_or(i64::MIN);
        let continues = self.samples > 0 && self.last_session == *first;
        if self.samples == 0 {
            (self.first_session, self.first_time, self.last_time) = (*first, earliest, latest);
        }
        self.samples += sessions.len() as u64;
        self.sessions += sessions.chunk_by(|a, b| a == b).count() as u64 - u64::from(continues);
        self.last_session = *last;
        self.first_time = self.first_time.min(earliest);
        self.last_time = self.last_time.max(latest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_counted_over_several_batches() {
        let mut row_group = RowGroup::default();
        row_group.add(&[], &[]);
        row_group.add(&[7, 7, 9], &[50, 60, 20]);
        row_group.add(&[9, 3], &[30, 40]);
        let expected = RowGroup {
            samples: 5,
            sessions: 3,
            first_session: 7,
            last_session: 3,
            first_time: 20,
            last_time: 60,
            ..RowGroup::default()
        };
        assert_eq!(row_group, expected);
    }

    #[test]
    fn row_groups_have_the_samples_of_their_file() {
        let one = RowGroup { samples: 4, sessions: 1, ..RowGroup::default() };
        assert_eq!(check(&[one, one], 8), Ok(()));
        assert_eq!(check(&[one, one], 9).unwrap_err(), "the file has 9 samples, its row groups have 8");
        assert_eq!(check(&[one, RowGroup::default()], 4).unwrap_err(), "row group 1 has no samples");
    }
}
