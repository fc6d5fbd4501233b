//! Removes snapshots that were superseded long ago, files that only these snapshots list, and files of
//! writers that did not commit.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use onefold_storage::{Object, Storage};
use serde::Serialize;

use crate::names::{HINT, SNAPSHOTS, WRITTEN_FOLDERS, is_written, snapshot_number, snapshot_path};
use crate::snapshot::{NamedFiles, not_a_dataset, numbers, utc};
use crate::{Error, Result};

/// Determines which snapshots and files a vacuum keeps.
#[derive(Debug, Clone, Copy)]
pub struct VacuumOptions {
    /// The number of newest snapshots to keep. At least one is always kept.
    pub keep: usize,
    /// The minimum age, since they were last needed, of snapshots and files that are removed:
    ///
    /// - A snapshot, even if it is not among the newest `keep`, is kept if it was superseded less than this
    ///   long ago. It is superseded at the modification time of the next snapshot that exists.
    /// - A file that no kept snapshot lists is kept if the first snapshot that no longer lists it was
    ///   committed less than this long ago.
    /// - A file that no snapshot ever listed, from a writer that is running or was killed, is kept if it was
    ///   modified less than this long ago.
    ///
    /// The duration must be longer than the longest job that reads or writes the dataset.
    pub older_than: Duration,
    /// Whether to only list the snapshots and files that would be removed.
    pub dry_run: bool,
}

impl Default for VacuumOptions {
    /// Keeps the last 10 snapshots, and everything that was superseded or written less than a day ago.
    fn default() -> Self {
        Self { keep: 10, older_than: Duration::from_secs(86_400), dry_run: false }
    }
}

/// The snapshots and files that a vacuum removed, or would remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Vacuumed {
    /// Whether this was a dry run, which removes nothing.
    pub dry_run: bool,
    /// The numbers of the kept snapshots.
    pub snapshots_kept: Vec<u64>,
    /// The numbers of the removed snapshots.
    pub snapshots_removed: Vec<u64>,
    /// The number of other removed files: data, vocabularies, manifests.
    pub files_removed: usize,
    /// The size of everything removed, in bytes.
    pub bytes_removed: u64,
    /// The number of files that no kept snapshot lists, but that are too young to be removed.
    pub young_files_kept: usize,
    /// The number of files in the dataset's folders whose names no writer creates. They are never removed.
    pub foreign_files_kept: usize,
    /// The files that a dry run would remove: snapshots first, then other files, each ordered by path. Empty
    /// if it was not a dry run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub would_remove: Vec<Removal>,
}

/// A file that a vacuum would remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removal {
    /// The path relative to the dataset's folder.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The reason why the file is removed.
    pub reason: Reason,
    /// The start of the file's age (RFC 3339, UTC): the time at which the snapshot, or the last snapshot that
    /// lists the file, was superseded; or the file's modification time if its writer did not commit.
    pub since: String,
}

/// The reason why a vacuum removes a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// A snapshot that was superseded, or a file that only such snapshots list.
    Superseded,
    /// A file that no snapshot lists: its writer did not commit.
    NotCommitted,
}

/// Removes from the dataset in `storage` everything that `options` do not keep. Snapshots are removed before
/// their files, so a killed vacuum leaves all remaining snapshots complete. Files whose names no writer
/// creates are never removed. An unreadable snapshot is removed if it is old enough.
///
/// # Errors
///
/// [`Error::NotADataset`] if there is no snapshot, [`Error::Snapshot`] if a kept snapshot cannot be read (in
/// both cases nothing is removed), [`Error::Storage`] if the storage fails.
pub fn vacuum(storage: &Storage, options: &VacuumOptions) -> Result<Vacuumed> {
    let now = SystemTime::now();
    // A time after `now` means that the storage's clock is ahead, and counts as young.
    let is_old = |since: SystemTime| now.duration_since(since).is_ok_and(|age| age >= options.older_than);
    // Files are listed before snapshots, so the snapshot of a file that is committed in the meantime is read
    // below.
    let files = other_files(storage)?;
    let snapshots = snapshots(storage)?;
    if snapshots.is_empty() {
        return Err(not_a_dataset(storage));
    }
    let superseded = superseded(&snapshots);
    let last: HashSet<u64> = snapshots.keys().rev().take(options.keep.max(1)).copied().collect();
    let is_removed = |number: &u64| {
        !last.contains(number) && superseded.get(number).is_some_and(|(_, since)| is_old(*since))
    };
    let (removed, kept): (Vec<u64>, Vec<u64>) = snapshots.keys().copied().partition(is_removed);
    let mut files_of = NamedFiles::new(storage);
    let mut named = HashSet::new();
    for number in &kept {
        // Another vacuum, which keeps less, may remove the snapshot in the meantime.
        named.extend(files_of.of_existing(*number)?.into_iter().flatten());
    }
    let dropped = dropped(&mut files_of, &removed, &superseded)?;

    let not_named = files.into_iter().filter(|file| !named.contains(&file.path));
    let (written, foreign): (Vec<Object>, Vec<Object>) = not_named.partition(|file| is_written(&file.path));
    let unneeded = written.iter().map(|object| match dropped.get(&object.path) {
        Some(since) => (object, Reason::Superseded, *since),
        None => (object, Reason::NotCommitted, object.modified),
    });
    let (old_files, young_files): (Vec<_>, Vec<_>) = unneeded.partition(|(_, _, since)| is_old(*since));
    let removal = |(object, reason, since): (&Object, Reason, SystemTime)| Removal {
        path: object.path.clone(),
        bytes: object.bytes,
        reason,
        since: utc(since),
    };
    let mut old_files: Vec<Removal> = old_files.into_iter().map(removal).collect();
    old_files.sort_by(|a, b| a.path.cmp(&b.path));
    let old_snapshots = removed.iter().filter_map(|number| superseded.get(number));
    let old_snapshots = old_snapshots.map(|(object, since)| removal((*object, Reason::Superseded, *since)));
    let old_snapshots: Vec<Removal> = old_snapshots.collect();

    let mut vacuumed = Vacuumed {
        dry_run: options.dry_run,
        snapshots_kept: kept,
        snapshots_removed: removed,
        files_removed: old_files.len(),
        bytes_removed: old_snapshots.iter().chain(&old_files).map(|old| old.bytes).sum(),
        young_files_kept: young_files.len(),
        foreign_files_kept: foreign.len(),
        would_remove: Vec::new(),
    };
    if options.dry_run {
        vacuumed.would_remove = old_snapshots.into_iter().chain(old_files).collect();
        return Ok(vacuumed);
    }
    let paths = |old: Vec<Removal>| old.into_iter().map(|old| old.path).collect::<Vec<String>>();
    storage.delete(paths(old_snapshots))?;
    storage.delete(paths(old_files))?;
    storage.remove_empty_folders(&WRITTEN_FOLDERS);
    Ok(vacuumed)
}

/// The snapshots and files that a purge removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Purged {
    /// The numbers of the removed snapshots.
    pub snapshots_removed: Vec<u64>,
    /// The number of other removed files: data, vocabularies, manifests.
    pub files_removed: usize,
    /// The size of the other removed files, in bytes.
    pub bytes_removed: u64,
}

/// Removes snapshots of any age, and the files that only they list. `snapshots` must not contain the newest
/// snapshot. Like [`vacuum`], it removes snapshots first. If it is killed before it removes the files, a
/// later vacuum removes them.
pub(crate) fn purge(storage: &Storage, snapshots: &[u64]) -> Result<Purged> {
    let mut files_of = NamedFiles::new(storage);
    let mut named: HashSet<String> = HashSet::new();
    for number in snapshots {
        named.extend(files_of.of_existing(*number)?.into_iter().flatten());
    }
    storage.delete(snapshots.iter().map(|number| snapshot_path(*number)).collect())?;
    // Snapshots that were committed in the meantime may list files of the removed ones.
    for number in numbers(storage, None)? {
        for path in files_of.of_existing(number)?.into_iter().flatten() {
            named.remove(&path);
        }
    }
    let files = other_files(storage)?.into_iter().filter(|file| named.contains(&file.path));
    let files: Vec<Object> = files.collect();
    let purged = Purged {
        snapshots_removed: snapshots.to_vec(),
        files_removed: files.len(),
        bytes_removed: files.iter().map(|file| file.bytes).sum(),
    };
    storage.delete(files.into_iter().map(|file| file.path).collect())?;
    storage.remove_empty_folders(&WRITTEN_FOLDERS);
    Ok(purged)
}

/// Returns all files in the dataset's folders, including temporary ones, except the snapshots and the hint.
fn other_files(storage: &Storage) -> Result<Vec<Object>> {
    let mut files = Vec::new();
    for folder in WRITTEN_FOLDERS {
        files.extend(storage.list(folder, None)?);
    }
    let listed: HashSet<String> = files.iter().map(|file| file.path.clone()).collect();
    let left_over = storage.left_over_files(&WRITTEN_FOLDERS)?;
    files.extend(left_over.into_iter().filter(|file| !listed.contains(&file.path)));
    files.retain(|file| file.path != HINT && snapshot_number(&file.path).is_none());
    Ok(files)
}

/// Returns the existing snapshots, by number.
fn snapshots(storage: &Storage) -> Result<BTreeMap<u64, Object>> {
    let objects = storage.list(SNAPSHOTS, None)?.into_iter();
    Ok(objects.filter_map(|object| Some((snapshot_number(&object.path)?, object))).collect())
}

/// Returns all snapshots except the newest, each with the time at which it was superseded: the modification
/// time of the next one.
fn superseded(snapshots: &BTreeMap<u64, Object>) -> BTreeMap<u64, (&Object, SystemTime)> {
    let pairs = snapshots.iter().zip(snapshots.values().skip(1));
    pairs.map(|((number, snapshot), next)| (*number, (snapshot, next.modified))).collect()
}

/// Returns the files that the `removed` snapshots list, each with the time at which the last snapshot that
/// lists it was superseded. This is the commit time of the first snapshot that no longer lists the file.
fn dropped(
    files_of: &mut NamedFiles,
    removed: &[u64],
    superseded: &BTreeMap<u64, (&Object, SystemTime)>,
) -> Result<HashMap<String, SystemTime>> {
    let mut dropped = HashMap::new();
    for number in removed {
        let Some((_, since)) = superseded.get(number) else { continue };
        match files_of.of(*number) {
            Ok(named) => dropped.extend(named.into_iter().map(|path| (path, *since))),
            // The snapshot is damaged, or another vacuum has removed it. The age of its files then starts at
            // their own modification time, which is before the commit.
            Err(Error::Snapshot(_) | Error::NoSnapshot(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(dropped)
}

#[cfg(test)]
mod tests;
