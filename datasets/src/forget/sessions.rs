//! Finds the sessions of users, either by session ids and start times, or by a kept column that identifies
//! users.

use std::collections::{HashMap, HashSet};

use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use onefold_base::fault::{Fault, Kind};
use onefold_base::progress::Reporter;
use onefold_storage::Storage;

use crate::scan::OpenFiles;
use crate::users::{BySessions, Told, Users, text_of};
use crate::{FileSet, KeptColumn, PartitionKey, Result, SESSION_COLUMN, Snapshot, TIME_COLUMN};

/// The sessions of users in a range of buckets of a partition.
#[derive(Debug, Default)]
pub(crate) struct FoundSessions {
    /// The ids of the sessions.
    pub(crate) sessions: HashSet<i64>,
    /// The indices of the users of these sessions.
    pub(crate) users: HashSet<usize>,
    /// The number of samples of users in each file set.
    pub(crate) samples: Vec<u64>,
    /// The user of each session examined so far; `None` if the session belongs to no user of the list. If
    /// sessions are contiguous, only the last session is stored. A search by session ids stores only
    /// sessions whose ids can belong to a user of the list.
    known: HashMap<i64, Option<usize>>,
}

impl FoundSessions {
    /// Returns the path of each of the `sets` that were searched, and whether it has samples of the users.
    pub(super) fn by_path<'f>(&'f self, sets: &'f [FileSet]) -> impl Iterator<Item = (String, bool)> + 'f {
        sets.iter().zip(&self.samples).map(|(set, samples)| (set.path().to_owned(), *samples > 0))
    }
}

/// Searches for users in the files of a snapshot.
pub(crate) struct Search<'a> {
    pub(crate) storage: &'a Storage,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) users: &'a Users,
    pub(crate) reporter: &'a dyn Reporter,
}

/// A row group of a partition's files.
#[derive(Clone, Copy)]
struct Place<'p> {
    partition: &'p PartitionKey,
    files: &'p OpenFiles,
    row_group: usize,
}

impl Search<'_> {
    /// Returns the sessions of users in the `sets` of a range of buckets.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if a file differs from the snapshot,
    /// [`Error::Fault`](crate::Error::Fault) if only some samples of a session belong to a user; otherwise
    /// the errors of [`Storage::read_ranges`].
    pub(crate) fn in_range(&self, partition: &PartitionKey, sets: &[FileSet]) -> Result<FoundSessions> {
        let mut found = FoundSessions::default();
        for set in sets {
            let samples = self.in_set(partition, set, &mut found)?;
            found.samples.push(samples);
            self.reporter.advance(set.samples);
        }
        Ok(found)
    }

    /// Searches a file set, adds its sessions of users to `found`, and returns their number of samples.
    fn in_set(&self, partition: &PartitionKey, set: &FileSet, found: &mut FoundSessions) -> Result<u64> {
        if !set.row_groups.iter().any(|row_group| self.users.may_be_in(row_group)) {
            return Ok(0);
        }
        let files = OpenFiles::open(self.storage, self.snapshot, set)?;
        let mut samples = 0;
        for (row_group, described) in set.row_groups.iter().enumerate() {
            if self.users.may_be_in(described) {
                let place = Place { partition, files: &files, row_group };
                samples += match &self.users.told {
                    Told::BySessions(by) => self.by_sessions(by, place, found)?,
                    Told::ByColumn(column) => self.by_column(column, place, found)?,
                };
            }
            self.reporter.go_on()?;
        }
        Ok(samples)
    }

    /// Searches a row group by session ids, adds its sessions of users to `found`, and returns their number
    /// of samples.
    fn by_sessions(&self, by: &BySessions, place: Place<'_>, found: &mut FoundSessions) -> Result<u64> {
        let Place { partition, files, row_group } = place;
        let sessions = files.numbers::<Int64Type>(row_group, SESSION_COLUMN)?;
        let times = files.numbers::<TimestampMicrosecondType>(row_group, TIME_COLUMN)?;
        let (mut row, mut samples) = (0, 0);
        for run in sessions.chunk_by(|a, b| a == b) {
            let (session, start) = (run[0], times[row]);
            row += run.len();
            if !by.may_be(session) {
                continue;
            }
            // The first sample of a session in its partition is the start of the session.
            let user = match found.known.get(&session) {
                Some(user) => *user,
                None => {
                    let user = by.find(self.users, partition, session, start);
                    self.know(session, user, found);
                    user
                }
            };
            if let Some(user) = user {
                found.users.insert(user);
                found.sessions.insert(session);
                samples += run.len() as u64;
            }
        }
        Ok(samples)
    }

    /// Works like [`by_sessions`](Self::by_sessions), but searches by a kept column.
    fn by_column(&self, column: &KeptColumn, place: Place<'_>, found: &mut FoundSessions) -> Result<u64> {
        let Place { files, row_group, .. } = place;
        let sessions = files.numbers::<Int64Type>(row_group, SESSION_COLUMN)?;
        let values = files.kept(row_group, column)?;
        let user_of = |row| text_of(&values, row).and_then(|text| self.users.by_text.get(&text).copied());
        let (mut row, mut samples) = (0, 0);
        for run in sessions.chunk_by(|a, b| a == b) {
            let (session, rows) = (run[0], row..row + run.len());
            row = rows.end;
            let first = user_of(rows.start);
            let before = found.known.get(&session).copied();
            if before.is_none() {
                self.know(session, first, found);
            }
            let is_users = before.unwrap_or(first).is_some();
            for row in rows {
                let user = user_of(row);
                if user.is_some() != is_users {
                    return Err(self.mixed(place, column, session).into());
                }
                found.users.extend(user);
            }
            if is_users {
                found.sessions.insert(session);
                samples += run.len() as u64;
            }
        }
        Ok(samples)
    }

    /// Records the user of a session, or that it belongs to no user of the list.
    fn know(&self, session: i64, user: Option<usize>, found: &mut FoundSessions) {
        if self.snapshot.order.is_clustered() {
            found.known.clear();
        }
        found.known.insert(session, user);
    }

    fn mixed(&self, place: Place<'_>, column: &KeptColumn, session: i64) -> Fault {
        let name = &column.name;
        let message = format!(
            "session {session} has samples of users of the list, and samples with other values of `{name}`, or none"
        );
        let path = self.storage.shown(&place.files.path);
        Fault::of_file(Kind::Data, path, message)
            .hint("choose a kept column with one value in each session, or build the dataset anew without the users")
    }
}
