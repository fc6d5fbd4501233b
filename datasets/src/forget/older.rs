//! Finds older snapshots that contain data of users.

use std::collections::HashMap;

use onefold_base::progress::Reporter;
use onefold_storage::Storage;

use super::sessions::Search;
use crate::snapshot::{numbers, unless_removed};
use crate::users::{UserKeys, Users};
use crate::{Error, ManifestEntry, Result, Snapshot};

/// Searches older snapshots. It reads each of their files only once.
pub(super) struct OlderSnapshots<'a> {
    pub(super) storage: &'a Storage,
    pub(super) keys: &'a UserKeys,
    pub(super) column: Option<&'a str>,
    /// Whether a file set, a vocabulary or a manifest contains data of the users, by path. It has an entry
    /// for each file that was read.
    pub(super) has_users: HashMap<String, bool>,
    pub(super) reporter: &'a dyn Reporter,
}

impl OlderSnapshots<'_> {
    /// Returns the numbers of the snapshots before `newest` that have samples of the users, contain their
    /// ids in a vocabulary or in statistics, or cannot identify users.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`forget`](super::forget()).
    pub(super) fn with_users(&mut self, newest: u64) -> Result<Vec<u64>> {
        let mut with_users = Vec::new();
        let mut older = numbers(self.storage, None)?;
        older.retain(|number| *number < newest);
        self.reporter.begin("older files", None, "samples");
        let searched = older.into_iter().try_for_each(|number| -> Result<()> {
            let snapshot = Snapshot::load_from(self.storage, Some(number));
            let found = snapshot.and_then(|snapshot| self.has_users(&snapshot));
            match unless_removed(self.storage, number, found) {
                // A vacuum removed it in the meantime.
                Err(Error::NoSnapshot(_)) => Ok(()),
                found => found.map(|has_users| with_users.extend(has_users.then_some(number))),
            }
        });
        self.reporter.end();
        searched.map(|()| with_users)
    }

    fn has_users(&mut self, snapshot: &Snapshot) -> Result<bool> {
        let Ok(users) = Users::new(snapshot, self.keys, self.column) else { return Ok(true) };
        let vocabularies = snapshot.vocabularies.values().map(|file| &file.path);
        let mut paths = vocabularies.chain(snapshot.manifests.iter().map(|entry| &entry.path));
        // A later snapshot has most of the vocabularies and manifests, too. The vocabulary is read only for others.
        if paths.clone().any(|path| !self.has_users.contains_key(path))
            && let Some((feature, _, ids)) = users.feature(self.storage, snapshot)?
        {
            let file = feature.vocabulary.as_ref().and_then(|name| snapshot.vocabularies.get(name));
            self.has_users.extend(file.map(|file| (file.path.clone(), !ids.is_empty())));
            for file in snapshot.vocabularies.values() {
                self.has_users.entry(file.path.clone()).or_insert(false);
            }
            let is_new = |entry: &&ManifestEntry| !self.has_users.contains_key(&entry.path);
            let new: Vec<&ManifestEntry> = snapshot.manifests.iter().filter(is_new).collect();
            for entry in new {
                let found = users.in_manifest(self.storage, snapshot, entry, (feature, &ids))?;
                self.has_users.insert(entry.path.clone(), !found.is_empty());
            }
        }
        if paths.any(|path| self.has_users.get(path) == Some(&true)) {
            return Ok(true);
        }
        let search = Search { storage: self.storage, snapshot, users: &users, reporter: self.reporter };
        for partition in &snapshot.partitions {
            for sets in partition.ranges(snapshot.division()) {
                if sets.iter().any(|set| !self.has_users.contains_key(set.path())) {
                    self.has_users.extend(search.in_range(&partition.key, sets)?.by_path(sets));
                }
                if sets.iter().any(|set| self.has_users[set.path()]) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}
