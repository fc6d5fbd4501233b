//! Removes snapshots that nobody needs any more, and the files that only they name.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use onefold_storage::{Object, Storage};
use serde::Serialize;

use crate::Result;
use crate::snapshot::{SNAPSHOTS, named_files, not_a_dataset, numbers, snapshot_number, snapshot_path};
use crate::writer::{DATA, VOCABULARIES, WORK, WRITTEN_FOLDERS};

/// What a vacuum keeps.
#[derive(Debug, Clone, Copy)]
pub struct VacuumOptions {
    /// The newest snapshots that are kept, at least 1.
    pub keep: usize,
    /// Whatever is younger is kept: snapshots that a job may be reading, and files that a writer has not committed yet.
    /// It must be longer than the longest job that reads or writes the dataset.
    pub older_than: Duration,
    /// Only say what would be removed.
    pub dry_run: bool,
}

impl Default for VacuumOptions {
    /// The last 10 snapshots, and whatever is younger than a day.
    fn default() -> Self {
        Self { keep: 10, older_than: Duration::from_secs(86_400), dry_run: false }
    }
}

/// What a vacuum removed, or would remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Vacuumed {
    /// Whether nothing was removed, because only the figures were asked for.
    pub dry_run: bool,
    /// Numbers of the snapshots that are kept.
    pub snapshots_kept: Vec<u64>,
    /// Numbers of the snapshots removed.
    pub snapshots_removed: Vec<u64>,
    /// Other files removed: data, vocabularies, lists of partitions.
    pub files_removed: usize,
    /// The size of all that was removed.
    pub bytes_removed: u64,
    /// Files that no snapshot names, but that are too young to be removed.
    pub young_files_kept: usize,
}

/// Removes what `options` do not keep from the dataset in `storage`. The newest snapshot is always kept. Snapshots are
/// removed before the files that they name, so that a vacuum that is killed leaves every snapshot whole.
///
/// # Errors
///
/// [`Error::NotADataset`](crate::Error::NotADataset) if there is no snapshot,
/// [`Error::Snapshot`](crate::Error::Snapshot) if one that is kept cannot be read; nothing is removed then.
/// [`Error::Storage`](crate::Error::Storage) if the storage fails.
pub fn vacuum(storage: &Storage, options: &VacuumOptions) -> Result<Vacuumed> {
    let now = SystemTime::now();
    // A clock that is ahead of the store's only keeps more.
    let is_old =
        |object: &Object| now.duration_since(object.modified).is_ok_and(|age| age >= options.older_than);
    // Listed before the snapshots: a file that is committed meanwhile is named by a snapshot that is read below.
    let objects: Vec<Object> = [DATA, VOCABULARIES, SNAPSHOTS, WORK]
        .into_iter()
        .map(|folder| storage.list(folder, None))
        .collect::<onefold_storage::Result<Vec<_>>>()?
        .concat();
    let numbers = numbers(storage, None)?;
    let Some(newest) = numbers.last() else { return Err(not_a_dataset(storage)) };
    let last: HashSet<u64> = numbers.iter().rev().take(options.keep.max(1)).copied().collect();
    let old: HashSet<u64> = objects
        .iter()
        .filter(|object| is_old(object))
        .filter_map(|object| snapshot_number(&object.path))
        .collect();
    let (removed, kept): (Vec<u64>, Vec<u64>) = numbers
        .iter()
        .partition(|number| **number != *newest && !last.contains(number) && old.contains(number));
    let named = named_files(storage, kept.iter().copied())?;
    let is_file =
        |object: &&Object| object.path != crate::snapshot::HINT && snapshot_number(&object.path).is_none();
    let mut unnamed: Vec<Object> =
        objects.iter().filter(is_file).filter(|object| !named.contains(&object.path)).cloned().collect();
    let listed: HashSet<&str> = objects.iter().map(|object| object.path.as_str()).collect();
    let left_over = storage.left_over_files(&WRITTEN_FOLDERS)?.into_iter();
    unnamed.extend(left_over.filter(|file| !listed.contains(file.path.as_str())));
    let (old_files, young_files): (Vec<Object>, Vec<Object>) = unnamed.into_iter().partition(is_old);
    let removed_paths: HashSet<String> = removed.iter().copied().map(snapshot_path).collect();
    let size_of_snapshots =
        objects.iter().filter(|object| removed_paths.contains(&object.path)).map(|object| object.bytes);
    let bytes_removed = size_of_snapshots.chain(old_files.iter().map(|object| object.bytes)).sum();
    let vacuumed = Vacuumed {
        dry_run: options.dry_run,
        snapshots_kept: kept,
        snapshots_removed: removed.clone(),
        files_removed: old_files.len(),
        bytes_removed,
        young_files_kept: young_files.len(),
    };
    if !options.dry_run {
        storage.delete(removed.into_iter().map(snapshot_path).collect())?;
        storage.delete(old_files.into_iter().map(|object| object.path).collect())?;
        storage.remove_empty_folders(&WRITTEN_FOLDERS);
    }
    Ok(vacuumed)
}
