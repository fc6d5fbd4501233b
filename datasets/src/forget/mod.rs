//! Removes the samples of users from a dataset.
//!
//! ```text
//! users ─▶ their buckets ─▶ sessions and times of these buckets ─▶ sessions of the users
//!                               files that hold some ─▶ written again without them ─▶ commit
//!                               entries of the vocabulary of the users' feature ─▶ removed
//!                               older snapshots that hold some ─▶ removed, if that is asked for
//! ```
//!
//! Only files with samples of the users are written again, and all of a range of buckets if a session does not fit into a
//! row group. A sample with its lists, also those of the user's history, is one of one user, so nothing else of the users
//! is left in data files. What is left is what a dataset has that was built from logs without the users: the same samples
//! in the same sessions and order.

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
use crate::snapshot::{head_at, numbers};
use crate::users::Users;
use crate::vacuum::{Purged, purge};
use crate::vocabulary::FormerOriginals;
use crate::{Commit, FileSet, PartitionKey, Result, Vocabulary};

pub use crate::users::UserKeys;

/// How users are forgotten.
#[derive(Debug, Clone)]
pub struct ForgetOptions {
    /// The kept column that tells users, where sessions are not those of users.
    pub column: Option<String>,
    /// How files are written again.
    pub how: RewriteOptions,
    /// Only find what would be removed.
    pub dry_run: bool,
    /// Remove the older snapshots, too, that have samples of the users or know them by a vocabulary or by statistics.
    /// Whatever reads one of these snapshots fails from then on: training runs and checkpoints record the snapshot that they read, which
    /// the dataset does not know.
    pub purge: bool,
}

/// What was removed, or would be.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Forgotten {
    /// Whether nothing was removed, because only the figures were asked for.
    pub dry_run: bool,
    /// The number of the newest snapshot.
    pub snapshot: u64,
    /// Whether this committed it; `false` if it has nothing of the users.
    pub changed: bool,
    /// Users of the list, each counted once.
    pub users: usize,
    /// Users of whom there were samples or an entry of a vocabulary.
    pub users_found: usize,
    /// The other ones.
    pub users_not_found: Vec<String>,
    /// Sessions of the users.
    pub sessions_removed: u64,
    /// Samples of the users.
    pub samples_removed: u64,
    /// Partitions in which there were some.
    pub partitions: usize,
    /// Data files that were written again.
    pub files_rewritten: u64,
    /// Their size.
    pub bytes_rewritten: u64,
    /// Data files that took their place.
    pub files_written: u64,
    /// Their size.
    pub bytes_written: u64,
    /// Entries of vocabularies that lost their original.
    pub vocabulary_entries_removed: u64,
    /// Manifests that have statistics in which the smallest or the largest id is one of a user, also of row groups that
    /// the snapshot does not count any more. They are written again.
    pub manifests_with_users: u64,
    /// Older snapshots that have something of the users; `None` if they were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots_with_users: Option<Vec<u64>>,
    /// What was purged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub purged: Option<Purged>,
    /// Time that it took.
    pub wall_seconds: f64,
}

/// Removes the samples of the users of `keys` from the dataset in `storage`, and commits what is left. Memory holds the
/// users, their sessions in one range of buckets, the row groups that are being written, and one vocabulary.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the dataset cannot tell users, or another writer has changed the same
/// partitions meanwhile; [`Error::NotADataset`](crate::Error::NotADataset), [`Error::Snapshot`](crate::Error::Snapshot),
/// [`Error::Damaged`](crate::Error::Damaged) and [`Error::Storage`](crate::Error::Storage) if the dataset cannot be
/// read or written. Nothing is committed then, but after an error of purging the commit has taken place.
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
    let searched = work.partitions().and_then(|()| work.vocabularies()).and_then(|()| work.statistics());
    reporter.end();
    searched?;
    let Work { rewriter, found, has_users, mut forgotten, .. } = work;
    let Forgotten { samples_removed, vocabulary_entries_removed, manifests_with_users, .. } = forgotten;
    let has_some = samples_removed + vocabulary_entries_removed + manifests_with_users > 0;
    forgotten.changed = has_some && !options.dry_run;
    forgotten.snapshot = match forgotten.changed {
        true => rewriter.finish()?.snapshot.snapshot,
        false => snapshot.snapshot,
    };
    forgotten.users_found = found.len();
    let not_found = (0..users.len()).filter(|user| !found.contains(user));
    forgotten.users_not_found = not_found.map(|user| users.shown(user)).collect();
    if options.purge {
        let column = options.column.as_deref();
        let mut older = OlderSnapshots { storage, keys, column, has_users, reporter };
        // In a dry run the newest snapshot would be an older one.
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

/// The search for users and the removal of what is found, range by range.
struct Work<'a> {
    search: Search<'a>,
    rewriter: Rewriter<'a>,
    dry_run: bool,
    /// The users that were found.
    found: HashSet<usize>,
    /// Whether a set of files, a vocabulary or a manifest has something of the users, by path.
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

    /// Removes the samples that were found in a range.
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
        self.rewriter.add(written, sets, &chosen)
    }

    /// Removes the originals of the users from the vocabulary of their feature.
    fn vocabularies(&mut self) -> Result<()> {
        let Search { storage, snapshot, users, .. } = self.search;
        for name in snapshot.vocabularies.keys() {
            let Some((mut vocabulary, ids)) = users.known_by(storage, snapshot, name)? else { continue };
            self.has_users.insert(snapshot.vocabularies[name].path.clone(), !ids.is_empty());
            if ids.is_empty() {
                continue;
            }
            self.forgotten.vocabulary_entries_removed += ids.len() as u64;
            self.found.extend(ids.values());
            if !self.dry_run {
                let former = self.former_originals(name, &vocabulary)?;
                vocabulary.remove(ids.into_keys());
                self.rewriter.add_vocabulary(name, &vocabulary, former)?;
            }
        }
        Ok(())
    }

    /// Finds the manifests with statistics of the users.
    fn statistics(&mut self) -> Result<()> {
        let Search { storage, snapshot, users, .. } = self.search;
        let Some((feature, ids)) = users.feature(storage, snapshot)? else { return Ok(()) };
        for entry in &snapshot.manifests {
            let found = users.in_manifest(storage, snapshot, entry, (feature, &ids))?;
            self.has_users.insert(entry.path.clone(), !found.is_empty());
            self.forgotten.manifests_with_users += u64::from(!found.is_empty());
        }
        Ok(())
    }

    /// What models may know of a vocabulary before originals are removed: its digest as it is in the snapshots that
    /// exist, and those that are known of earlier removals.
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
