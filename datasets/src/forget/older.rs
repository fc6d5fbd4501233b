//! Older snapshots that have something of users.

use std::collections::HashMap;

use onefold_base::progress::Reporter;
use onefold_storage::Storage;

use super::sessions::Search;
use crate::snapshot::numbers;
use crate::users::{UserKeys, Users};
use crate::{Result, Snapshot};

/// Reads older snapshots, each of their files once.
pub(super) struct OlderSnapshots<'a> {
    pub(super) storage: &'a Storage,
    pub(super) keys: &'a UserKeys,
    pub(super) column: Option<&'a str>,
    /// Whether a set of files or a vocabulary has something of the users, by path, of those that were read.
    pub(super) has_users: HashMap<String, bool>,
    pub(super) reporter: &'a dyn Reporter,
}

impl OlderSnapshots<'_> {
    /// The numbers of the snapshots before `newest` that have samples of the users or know them by a vocabulary, and of
    /// those that cannot tell users.
    ///
    /// # Errors
    ///
    /// As [`forget`](super::forget()).
    pub(super) fn with_users(&mut self, newest: u64) -> Result<Vec<u64>> {
        let mut with_users = Vec::new();
        self.reporter.begin("older files", None, "samples");
        for number in numbers(self.storage, None)?.into_iter().filter(|number| *number < newest) {
            if self.has_users(&Snapshot::load_from(self.storage, Some(number))?)? {
                with_users.push(number);
            }
        }
        self.reporter.end();
        Ok(with_users)
    }

    fn has_users(&mut self, snapshot: &Snapshot) -> Result<bool> {
        let Ok(users) = Users::new(snapshot, self.keys, self.column) else { return Ok(true) };
        for (name, file) in &snapshot.vocabularies {
            if !self.has_users.contains_key(&file.path) {
                let known = users.known_by(self.storage, snapshot, name)?;
                self.has_users.insert(file.path.clone(), known.is_some_and(|(_, ids)| !ids.is_empty()));
            }
            if self.has_users[&file.path] {
                return Ok(true);
            }
        }
        let search = Search { storage: self.storage, snapshot, users: &users, reporter: self.reporter };
        for partition in &snapshot.partitions {
            for sets in partition.ranges(snapshot.division()) {
                if sets.iter().any(|set| !self.has_users.contains_key(set.path())) {
                    let found = search.in_range(&partition.key, sets)?;
                    let has_samples = found.samples.iter().map(|samples| *samples > 0);
                    let paths = sets.iter().map(|set| set.path().to_owned());
                    self.has_users.extend(paths.zip(has_samples));
                }
                if sets.iter().any(|set| self.has_users[set.path()]) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}
