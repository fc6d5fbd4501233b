//! Rewrites manifests without changing the row groups that they describe.
//!
//! A snapshot's file has an entry for each manifest. If the snapshot lists many small manifests, a commit
//! therefore merges the oldest of them into one. Its size is limited, so a commit writes little, however many
//! commits came before.

use std::collections::{BTreeMap, HashMap};

use onefold_storage::Storage;

use super::bucket::{Written, write_manifest};
use super::manifests::{ManifestEntry, RowStatistics, in_order};
use super::{ColumnChanges, FileSet, Order, RowGroupStatistics};
use crate::{PartitionKey, Result, Schema};

/// The largest number of small manifests of files with the same columns that a commit does not merge.
const MOST_SMALL: usize = 32;
/// The largest size in bytes of a manifest that is made of several ones. Manifests of up to half this size are
/// small.
const MERGED_BYTES: u64 = 1 << 20;

/// Merges small manifests of `entries` if there are many. `schema` and `order` are those of the snapshot.
pub(super) fn merge_small(
    storage: &Storage,
    (schema, order): (&Schema, Order),
    entries: Vec<ManifestEntry>,
) -> Result<Vec<ManifestEntry>> {
    let chosen = many_small(&entries);
    if chosen.len() < 2 {
        return Ok(entries);
    }
    let together: Vec<&ManifestEntry> = chosen.iter().map(|number| &entries[*number]).collect();
    let merged = rewrite(storage, (schema, order), &together)?;
    let place = |(number, entry): (usize, ManifestEntry)| match chosen.binary_search(&number) {
        Ok(0) => Some(merged.clone()),
        Ok(_) => None,
        Err(_) => Some(entry),
    };
    Ok(entries.into_iter().enumerate().filter_map(place).collect())
}

/// Returns the numbers of the manifests to merge, in ascending order; empty if there are few.
fn many_small(entries: &[ManifestEntry]) -> Vec<usize> {
    let mut groups: Vec<(&ColumnChanges, Vec<usize>)> = Vec::new();
    for (number, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.bytes <= MERGED_BYTES / 2) {
        match groups.iter_mut().find(|(changes, _)| **changes == entry.changes) {
            Some((_, group)) => group.push(number),
            None => groups.push((&entry.changes, vec![number])),
        }
    }
    let many = groups.into_iter().map(|(_, group)| group).find(|group| group.len() > MOST_SMALL);
    let mut bytes = 0;
    let fits = |number: &usize| {
        bytes += entries[*number].bytes;
        bytes <= MERGED_BYTES
    };
    many.unwrap_or_default().into_iter().take_while(fits).collect()
}

/// Rewrites a manifest that contains row groups which no longer belong to the snapshot without them.
pub(super) fn only_live_rows(
    storage: &Storage,
    (schema, order): (&Schema, Order),
    entry: ManifestEntry,
) -> Result<ManifestEntry> {
    let live: usize = entry.rows.iter().map(|(first, next)| next.saturating_sub(*first) as usize).sum();
    match entry.open(storage, false)?.len() == live {
        true => Ok(entry),
        false => rewrite(storage, (schema, order), &[&entry]),
    }
}

/// Writes a manifest of the row groups of several manifests that belong to the snapshot. The columns of their
/// files differ from the schema in the same way.
fn rewrite(
    storage: &Storage,
    (schema, order): (&Schema, Order),
    entries: &[&ManifestEntry],
) -> Result<ManifestEntry> {
    let mut sets: BTreeMap<PartitionKey, Vec<(usize, FileSet)>> = BTreeMap::new();
    let mut statistics: HashMap<String, Vec<RowGroupStatistics>> = HashMap::new();
    let mut changes = ColumnChanges::default();
    for (number, entry) in entries.iter().enumerate() {
        changes.clone_from(&entry.changes);
        let mut of_rows = RowStatistics::open(storage, entry, schema)?;
        for listed in of_rows.listed()? {
            let of_set = listed.rows().map(|row| of_rows.stored(row)).collect::<Result<_>>()?;
            statistics.insert(listed.set.path().to_owned(), of_set);
            sets.entry(listed.key).or_default().push((number, listed.set));
        }
    }
    let sets: Vec<(PartitionKey, FileSet)> = sets
        .into_iter()
        .flat_map(|(key, sets)| in_order(sets, order).into_iter().map(move |set| (key.clone(), set)))
        .collect();
    let written = sets.iter().map(|(key, set)| (key, set, statistics[set.path()].as_slice()));
    write_manifest(storage, schema, &changes, &written.collect::<Vec<Written<'_>>>())
}
