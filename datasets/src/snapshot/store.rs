//! Reads snapshots from storage and finds the newest one.

use onefold_base::fault::{Fault, Kind};
use onefold_storage::Storage;
use serde::Serialize;

use super::{Commit, NamedFiles, Snapshot};
use crate::names::{HINT, SNAPSHOTS, snapshot_number, snapshot_path};
use crate::{Error, Result};

/// Returns the numbers of the existing snapshots in ascending order; with `after`, only greater numbers.
pub(crate) fn numbers(storage: &Storage, after: Option<u64>) -> Result<Vec<u64>> {
    let after_path = after.map(snapshot_path);
    let objects = storage.list(SNAPSHOTS, after_path.as_deref())?;
    let mut numbers: Vec<u64> = objects.iter().filter_map(|object| snapshot_number(&object.path)).collect();
    numbers.retain(|number| after.is_none_or(|after| *number > after));
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns the number of the newest snapshot; `None` if there is no snapshot.
pub(crate) fn newest_number(storage: &Storage) -> Result<Option<u64>> {
    let hint =
        storage.read(HINT)?.and_then(|bytes| std::str::from_utf8(&bytes).ok()?.trim().parse::<u64>().ok());
    if let Some(newest) = hint.and_then(|hint| hint.checked_sub(1))
        && let Some(newest) = numbers(storage, Some(newest))?.last()
    {
        return Ok(Some(*newest));
    }
    // The hint is missing, or the snapshot that it refers to was removed.
    Ok(numbers(storage, None)?.last().copied())
}

/// Reads the newest snapshot without its partitions.
pub(crate) fn latest_head(storage: &Storage) -> Result<Option<Snapshot>> {
    // A vacuum may remove the snapshot between listing and reading. If so, a newer snapshot exists.
    for _ in 0..3 {
        let Some(number) = newest_number(storage)? else { return Ok(None) };
        if let Some(head) = read(storage, number)? {
            return Ok(Some(head));
        }
    }
    Ok(None)
}

/// Reads snapshot `number` without its partitions.
pub(crate) fn head_at(storage: &Storage, number: u64) -> Result<Snapshot> {
    if let Some(head) = read(storage, number)? {
        return Ok(head);
    }
    let there = numbers(storage, None)?;
    let (Some(first), Some(last)) = (there.first(), there.last()) else { return Err(not_a_dataset(storage)) };
    let hint = match there.len() {
        1 => format!("the dataset has only snapshot {first}"),
        _ => format!("the dataset has snapshots {first} to {last}; `onefold-ingest history` lists them"),
    };
    let message = format!("`{}` has no snapshot {number}", storage.location().display());
    Err(Error::NoSnapshot(Fault::new(Kind::Options, message).hint(hint)))
}

impl NamedFiles<'_> {
    /// Returns the paths of all files that snapshot `number` lists: manifests, data files and vocabularies.
    ///
    /// # Errors
    ///
    /// The errors of [`head_at`], and [`Error::Snapshot`] if a manifest is missing or damaged.
    pub(crate) fn of(&mut self, number: u64) -> Result<Vec<String>> {
        let head = head_at(self.storage, number)?;
        let mut named: Vec<String> = head.vocabularies.into_values().map(|file| file.path).collect();
        for entry in &head.manifests {
            named.extend(self.of_entry(entry)?.into_iter().cloned());
        }
        Ok(named)
    }

    /// Works like [`of`](Self::of), but returns `None` if the snapshot was removed in the meantime.
    pub(crate) fn of_existing(&mut self, number: u64) -> Result<Option<Vec<String>>> {
        match unless_removed(self.storage, number, self.of(number)) {
            Err(Error::NoSnapshot(_)) => Ok(None),
            named => named.map(Some),
        }
    }
}

/// Reads the snapshots after number `after`, in order, without their partitions.
///
/// # Errors
///
/// [`Error::Fault`] if some of them were removed: what they changed is then unknown, and a commit could use one of
/// their numbers again, below that of the newest snapshot. Otherwise the errors of [`head_at`].
pub(crate) fn heads_after(storage: &Storage, after: u64) -> Result<Vec<Snapshot>> {
    let numbers = numbers(storage, Some(after))?;
    let heads = numbers.iter().filter_map(|number| read(storage, *number).transpose());
    let heads = heads.collect::<Result<Vec<_>>>()?;
    if heads.iter().map(|head| head.snapshot).eq((after + 1..).take(numbers.len())) {
        return Ok(heads);
    }
    let message =
        "nothing was committed, because snapshots that other writers committed meanwhile were removed";
    let fault = Fault::of_file(Kind::Failed, storage.location(), message);
    Err(fault.hint("run this again; it then starts from the newest snapshot").into())
}

/// Checks that snapshot `number`, which was read before, still exists.
///
/// # Errors
///
/// [`Error::NoSnapshot`] if a vacuum or a purge removed it. Its files may then be missing although nothing is damaged.
pub(crate) fn check_exists(storage: &Storage, number: u64) -> Result<()> {
    // If the storage fails, the caller reports its own error.
    if !storage.head(&snapshot_path(number)).is_ok_and(|found| found.is_none()) {
        return Ok(());
    }
    let message = format!("a vacuum or a purge removed snapshot {number} while it was used");
    let fault = Fault::of_file(Kind::Failed, storage.location(), message);
    Err(Error::NoSnapshot(fault.hint("run this again; it then uses the newest snapshot")))
}

/// Returns the result of work with snapshot `number`. If the work failed and the snapshot does not exist any more, the
/// error says so.
///
/// # Errors
///
/// The error of `result`, or [`Error::NoSnapshot`].
pub fn unless_removed<T, E: From<Error>>(
    storage: &Storage,
    number: u64,
    result: Result<T, E>,
) -> Result<T, E> {
    result.or_else(|error| check_exists(storage, number).map_err(E::from).and(Err(error)))
}

fn read(storage: &Storage, number: u64) -> Result<Option<Snapshot>> {
    let path = snapshot_path(number);
    let Some(bytes) = storage.read(&path)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes);
    let snapshot = Snapshot::parse(&text).and_then(|snapshot| match snapshot.snapshot {
        other if other != number => Err(format!("it says that it is snapshot {other}")),
        _ => Ok(snapshot),
    });
    snapshot.map(Some).map_err(|message| Error::snapshot(storage.shown(&path), message))
}

pub(crate) fn not_a_dataset(storage: &Storage) -> Error {
    let hint =
        "give the path or URL that `onefold-ingest build` wrote; if a build was interrupted, run it again";
    let message = format!("`{}` is not a dataset: it has no snapshot", storage.location().display());
    Error::NotADataset(Fault::new(Kind::Options, message).hint(hint))
}

/// An entry of a dataset's history.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SnapshotEntry {
    /// The number of the snapshot.
    pub snapshot: u64,
    /// The time of the commit: RFC 3339, UTC.
    pub committed: String,
    /// The kind of commit.
    pub operation: Commit,
    /// The keys of the partitions that the commit wrote or removed.
    pub partitions_written: Vec<String>,
    /// The number of samples that the dataset gained; negative if it lost samples.
    pub samples_gained: i64,
    /// The number of samples of the dataset.
    pub samples: u64,
    /// The number of sessions of the dataset.
    pub sessions: u64,
    /// The size of the data files in bytes.
    pub bytes_on_disk: u64,
}

/// Returns the existing snapshots of the dataset in `storage`, oldest first; with `limit`, only the newest
/// ones.
///
/// # Errors
///
/// [`Error::NotADataset`] if there are no snapshots, [`Error::Snapshot`] and [`Error::Storage`] if one cannot
/// be read.
pub fn history(storage: &Storage, limit: Option<usize>) -> Result<Vec<SnapshotEntry>> {
    let numbers = numbers(storage, None)?;
    let skipped = limit.map_or(0, |limit| numbers.len().saturating_sub(limit));
    let mut heads = Vec::new();
    for number in &numbers[skipped..] {
        // A vacuum may have removed the snapshot in the meantime.
        heads.extend(read(storage, *number)?);
    }
    if heads.is_empty() {
        heads.push(latest_head(storage)?.ok_or_else(|| not_a_dataset(storage))?);
    }
    let entry = |head: Snapshot| SnapshotEntry {
        snapshot: head.snapshot,
        committed: head.committed,
        operation: head.operation.kind,
        partitions_written: head.operation.partitions.iter().map(ToString::to_string).collect(),
        samples_gained: head.operation.samples_gained,
        samples: head.statistics.samples,
        sessions: head.statistics.sessions,
        bytes_on_disk: head.statistics.bytes_on_disk,
    };
    Ok(heads.into_iter().map(entry).collect())
}
