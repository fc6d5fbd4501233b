//! Removes the samples of users from a dataset.
//!
//! ```text
//! users ─▶ buckets of the users ─▶ session ids and times in these buckets ─▶ sessions of the users
//!                               files with these sessions ─▶ rewritten without them ─▶ commit
//!                               users' entries in the vocabulary of the user feature ─▶ removed
//!                               older snapshots with data of the users ─▶ removed on request
//! ```
//!
//! Only files that contain samples of the users are rewritten. If a session spans row groups, all files of
//! its range of buckets are rewritten. Every sample, including its history lists, belongs to one user, so
//! the data files then contain nothing else about the users. The result has the same samples, sessions and
//! order as a dataset built from logs without these users.

mod older;
pub(crate) mod sessions;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_storage::Storage;
use serde::Serialize;

use self::older::OlderSnapshots;
use self::sessions::{FoundSessions, Search};
use crate::rewrite::{
    RewriteOptions, Rewriter, check_samples, choose_whole_runs, files_of, of_chosen, start,
};
use crate::snapshot::{head_at, numbers, unless_removed};
use crate::users::Users;
use crate::vacuum::{Purged, purge};
use crate::vocabulary::FormerOriginals;
use crate::{Commit, FileSet, PartitionKey, Result, Vocabulary};

pub use crate::users::UserKeys;

/// Options of [`forget()`].
#[derive(Debug, Clone)]
pub struct ForgetOptions {
    /// The kept column that identifies users, if session ids do not.
    pub column: Option<String>,
    /// The options for rewriting files.
    pub how: RewriteOptions,
    /// Whether to only report what would be removed.
    pub dry_run: bool,
    /// Whether to also remove older snapshots that have samples of the users, or that contain their ids in
    /// a vocabulary or in statistics. Jobs that read one of these snapshots then fail. Training runs and
    /// checkpoints record the snapshot that they read, but the dataset does not know about them.
    pub purge: bool,
}

/// The result of [`forget()`]: what it removed, or would remove in a dry run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Forgotten {
    /// Whether this was a dry run, which removes nothing.
    pub dry_run: bool,
    /// The number of the newest snapshot.
    pub snapshot: u64,
    /// Whether a snapshot was committed; `false` for a dry run, or if the newest snapshot contains nothing
    /// of the users.
    pub changed: bool,
    /// The number of distinct users in the list.
    pub users: usize,
    /// The number of users with samples or a vocabulary entry in the newest snapshot.
    pub users_found: usize,
    /// The users of the list that were not found.
    pub users_not_found: Vec<String>,
    /// The number of removed sessions.
    pub sessions_removed: u64,
    /// The number of removed samples.
    pub samples_removed: u64,
    /// The number of partitions with removed samples.
    pub partitions: usize,
    /// The number of data files that were rewritten.
    pub files_rewritten: u64,
    /// The size of the rewritten files before the change, in bytes.
    pub bytes_rewritten: u64,
    /// The number of data files that replace them.
    pub files_written: u64,
    /// The size of the replacement files, in bytes.
    pub bytes_written: u64,
    /// The number of vocabulary entries whose original was removed.
    pub vocabulary_entries_removed: u64,
    /// The number of manifests with statistics in which the smallest or largest id belongs to a user. The
    /// statistics may describe row groups that no longer belong to the snapshot. These manifests are
    /// rewritten.
    pub manifests_with_users: u64,
    /// The numbers of the older snapshots that contain data of the users; `None` if they were not searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots_with_users: Option<Vec<u64>>,
    /// The snapshots and files that were purged; `None` if nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub purged: Option<Purged>,
    /// The duration in seconds.
    pub wall_seconds: f64,
}

/// Removes the samples of the users in `keys` from the dataset in `storage`, and commits the remaining
/// samples. Memory holds the users, their sessions in one range of buckets, the row groups being written,
/// and one vocabulary.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the dataset cannot identify users, or if another writer has
/// changed the same partitions in the meantime; [`Error::NotADataset`](crate::Error::NotADataset),
/// [`Error::Snapshot`](crate::Error::Snapshot), [`Error::Damaged`](crate::Error::Damaged) and
/// [`Error::Storage`](crate::Error::Storage) if the dataset cannot be read or written. After an error
/// nothing is committed, unless the error occurred while purging, which follows the commit.
pub fn forget(
    storage: &Storage,
    keys: &UserKeys,
    options: &ForgetOptions,
    reporter: &dyn Reporter,
) -> Result<Forgotten> {
    let started = Instant::now();
    let (writer, snapshot) = start(storage, Commit::Forget, &options.how)?;
    let users = Users::new(&snapshot, keys, options.column.as_deref())?;
    let rewriter = Rewriter::new(storage, &snapshot, writer, options.how.threads, reporter)?;
    let mut work = Work {
        search: Search { storage, snapshot: &snapshot, users: &users, reporter },
        rewriter,
        dry_run: options.dry_run,
        found: HashSet::new(),
        has_users: HashMap::new(),
        forgotten: Forgotten { dry_run: options.dry_run, users: users.len(), ..Forgotten::default() },
    };
    reporter.begin("forgetting", None, "samples");
    let searched = work.partitions().and_then(|()| work.feature());
    reporter.end();
    unless_removed(storage, snapshot.snapshot, searched)?;
    let Work { rewriter, found, has_users, mut forgotten, .. } = work;
    let Forgotten { samples_removed, vocabulary_entries_removed, manifests_with_users, .. } = forgotten;
    let has_some = samples_removed + vocabulary_entries_removed + manifests_with_users > 0;
    forgotten.changed = has_some && !options.dry_run;
    forgotten.snapshot = match forgotten.changed {
        true => rewriter.writer.finish()?.snapshot.snapshot,
        false => snapshot.snapshot,
    };
    forgotten.users_found = found.len();
    let not_found = (0..users.len()).filter(|user| !found.contains(user));
    forgotten.users_not_found = not_found.map(|user| users.shown(user)).collect();
    if options.purge {
        let column = options.column.as_deref();
        let mut older = OlderSnapshots { storage, keys, column, has_users, reporter };
        // In a dry run, the current newest snapshot would become an older one.
        let newest = if forgotten.changed || !has_some { forgotten.snapshot } else { forgotten.snapshot + 1 };
        let with_users = older.with_users(newest)?;
        if !options.dry_run && !with_users.is_empty() {
            forgotten.purged = Some(purge(storage, &with_users)?);
        }
        forgotten.snapshots_with_users = Some(with_users);
    }
    forgotten.wall_seconds = started.elapsed().as_secs_f64();
    Ok(forgotten)
}

/// Searches for users and removes what it finds, one range of buckets at a time.
struct Work<'a> {
    search: Search<'a>,
    rewriter: Rewriter<'a>,
    dry_run: bool,
    /// The indices of the users that were found.
    found: HashSet<usize>,
    /// Whether a file set, a vocabulary or a manifest contains data of the users, by path.
    has_users: HashMap<String, bool>,
    forgotten: Forgotten,
}

impl Work<'_> {
    fn partitions(&mut self) -> Result<()> {
        let snapshot = self.search.snapshot;
        for partition in &snapshot.partitions {
            let before = self.forgotten.samples_removed;
            for sets in partition.ranges(snapshot.division()) {
                let found = self.search.in_range(&partition.key, sets)?;
                self.has_users.extend(found.by_path(sets));
                if !found.sessions.is_empty() {
                    self.remove(&partition.key, sets, found)?;
                }
            }
            self.forgotten.partitions += usize::from(self.forgotten.samples_removed > before);
        }
        Ok(())
    }

    /// Removes the samples that were found in a range, and adds the rewritten files to the commit.
    fn remove(&mut self, key: &PartitionKey, sets: &[FileSet], found: FoundSessions) -> Result<()> {
        let forgotten = &mut self.forgotten;
        let removed = found.samples.iter().sum::<u64>();
        forgotten.sessions_removed += found.sessions.len() as u64;
        forgotten.samples_removed += removed;
        self.found.extend(found.users);
        let mut chosen: Vec<bool> = found.samples.iter().map(|samples| *samples > 0).collect();
        choose_whole_runs(self.search.snapshot, sets, &mut chosen);
        let (files, bytes) = files_of(of_chosen(sets, &chosen));
        forgotten.files_rewritten += files;
        forgotten.bytes_rewritten += bytes;
        if self.dry_run {
            return Ok(());
        }
        let is_kept = |session: i64| !found.sessions.contains(&session);
        let written = self.rewriter.rewrite(key, sets, &chosen, &is_kept)?;
        check_samples(sets, &chosen, &written, removed)?;
        let (files, bytes) = files_of(&written.files);
        forgotten.files_written += files;
        forgotten.bytes_written += bytes;
        self.rewriter.writer.add_rewritten(written, of_chosen(sets, &chosen))
    }

    /// Removes the users' originals from the vocabulary of the feature that identifies users, and finds the
    /// manifests whose statistics contain ids of the users.
    fn feature(&mut self) -> Result<()> {
        let Search { storage, snapshot, users, .. } = self.search;
        let Some((feature, vocabulary, ids)) = users.feature(storage, snapshot)? else { return Ok(()) };
        if let (Some(name), Some(mut vocabulary)) = (&feature.vocabulary, vocabulary) {
            self.has_users.insert(snapshot.vocabularies[name].path.clone(), !ids.is_empty());
            self.forgotten.vocabulary_entries_removed += ids.len() as u64;
            self.found.extend(ids.values());
            if !self.dry_run && !ids.is_empty() {
                let former = self.former_originals(name, &vocabulary)?;
                vocabulary.remove(ids.keys().copied());
                self.rewriter.writer.add_vocabulary_of(name, &vocabulary, former)?;
            }
        }
        for entry in &snapshot.manifests {
            let found = users.in_manifest(storage, snapshot, entry, (feature, &ids))?;
            self.has_users.insert(entry.path.clone(), !found.is_empty());
            self.forgotten.manifests_with_users += u64::from(!found.is_empty());
        }
        Ok(())
    }

    /// Returns the digests by which trained models may know a vocabulary before originals are removed: one
    /// for each existing snapshot, and the digests recorded by earlier removals.
    fn former_originals(&self, name: &str, vocabulary: &Vocabulary) -> Result<Vec<FormerOriginals>> {
        let Search { storage, snapshot, .. } = self.search;
        let mut former: Vec<FormerOriginals> = snapshot.vocabularies[name].former.clone();
        for number in numbers(storage, None)? {
            let head = head_at(storage, number)?;
            let entries = head.vocabularies.get(name).map(|file| file.entries);
            let digest = entries.and_then(|entries| Some((entries, vocabulary.digest(entries)?)));
            let found = digest.map(|(entries, digest)| FormerOriginals { entries, digest });
            former.extend(found.filter(|found| !former.contains(found)));
        }
        Ok(former)
    }
}
