//! Commits changes. A commit creates the next snapshot only if it does not exist, so only one of several
//! concurrent writers succeeds with a given number.
//!
//! A writer writes its manifest once. If the next snapshot number is taken, it reads the snapshots since its
//! own. The commit fails if one of them changed a partition that the writer writes, or changed a vocabulary
//! that the writer also changes, to other content. Otherwise the writer applies its changes to the newest
//! snapshot and tries the next number. As a result, writers of different partitions all succeed unless two of
//! them extend the same vocabulary. If several writers write the same partition, only the first succeeds.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use onefold_base::fault::{Fault, Kind};
use onefold_storage::{Created, Storage, random_name};

use super::bucket::{Written, WrittenBucket, features, write_manifest};
use super::manifests::{self, Listed, RowStatistics};
use super::merge::{merge_small, only_live_rows};
use super::{
    ColumnChanges, Commit, FORMAT_VERSION, FeatureStatistics, FileSet, Layout, ManifestEntry, Operation,
    Order, Sessions, Snapshot, Statistics, TableVersion, heads_after,
};
use crate::names::{HINT, snapshot_path};
use crate::{Buckets, Error, PartitionColumn, PartitionKey, Result, Schema, VocabularyFile};

/// The changes of one writer: a new dataset, or partitions of an existing one.
#[derive(Debug, Clone)]
pub(crate) struct Changes {
    pub(crate) kind: Commit,
    pub(crate) layout: Layout,
    pub(crate) order: Order,
    pub(crate) division: Buckets,
    pub(crate) sessions: Option<Sessions>,
    pub(crate) schema: Schema,
    pub(crate) sample_keys: bool,
    pub(crate) partition_columns: Vec<PartitionColumn>,
    /// The written ranges of buckets. A merge replaces only these ranges; any other commit replaces whole
    /// partitions.
    pub(crate) written: BTreeMap<PartitionKey, BTreeMap<u32, WrittenBucket>>,
    /// The paths of the first files of the sets that are rewritten, in the written partitions.
    pub(crate) replaced: BTreeSet<String>,
    /// The vocabularies that were added or extended. The other vocabularies of the dataset do not change.
    pub(crate) vocabularies: BTreeMap<String, VocabularyFile>,
    /// The versions of the tables that were read, by source. Those of other sources stay.
    pub(crate) table_versions: BTreeMap<String, TableVersion>,
}

impl Changes {
    /// Returns whether the changes replace the whole dataset.
    fn replaces_everything(&self) -> bool {
        !self.kind.keeps_others()
    }

    /// Returns whether the changes replace `set` in the partition `key`.
    pub(crate) fn replaces(&self, key: &PartitionKey, set: &FileSet) -> bool {
        let Some(ranges) = self.written.get(key) else { return false };
        let range = ranges.get(&self.division.range_of(set.bucket));
        match self.kind {
            Commit::Merge => range.is_some(),
            Commit::Columns => range.is_some_and(|range| range.has_set(set)),
            Commit::Forget | Commit::Compact => self.replaced.contains(set.path()),
            _ => true,
        }
    }

    fn ranges_written(&self) -> impl Iterator<Item = &WrittenBucket> {
        self.written.values().flat_map(BTreeMap::values)
    }
}

/// Commits `changes` to the dataset in `storage` and returns the new snapshot. `base` is the snapshot from
/// which the writer started. Both snapshots come without partitions, because a commit reads only manifests
/// that may contain changed partitions.
///
/// # Errors
///
/// [`Error::Fault`] if, since `base`, another writer changed the same partitions, the whole dataset, or the
/// same vocabulary to other content; [`Error::Storage`] if the storage fails. In these cases nothing is
/// committed.
pub(crate) fn commit(storage: &Storage, base: Option<&Snapshot>, changes: &Changes) -> Result<Snapshot> {
    let manifests = write_manifests(storage, changes)?;
    let committed = commit_manifests(storage, base, changes, &manifests);
    if committed.is_err() {
        storage.clean_up(manifests.into_iter().map(|manifest| manifest.path).collect());
    }
    committed
}

/// Writes one manifest for each distinct value of [`ColumnChanges`] among the written files; none if
/// nothing was written.
fn write_manifests(storage: &Storage, changes: &Changes) -> Result<Vec<ManifestEntry>> {
    let mut parts: Vec<(&ColumnChanges, Vec<Written<'_>>)> = Vec::new();
    for range in changes.ranges_written() {
        for (set, statistics) in range.sets() {
            let written = (&range.key, set, statistics);
            match parts.iter_mut().find(|(of_part, _)| **of_part == set.changes) {
                Some((_, part)) => part.push(written),
                None => parts.push((&set.changes, vec![written])),
            }
        }
    }
    parts
        .into_iter()
        .map(|(of_part, part)| write_manifest(storage, &changes.schema, of_part, &part))
        .collect()
}

/// Creates the next snapshot, which lists the manifests of the written row groups.
fn commit_manifests(
    storage: &Storage,
    base: Option<&Snapshot>,
    changes: &Changes,
    written: &[ManifestEntry],
) -> Result<Snapshot> {
    let mut base = base.cloned();
    loop {
        // Even if the next number is free, other writers may have committed: a purge may have removed the snapshot
        // with this number.
        let since = heads_after(storage, base.as_ref().map_or(0, |base| base.snapshot))?;
        if let Some(other) = since.iter().find_map(|other| conflict(storage, base.as_ref(), changes, other)) {
            return Err(other);
        }
        base = since.into_iter().last().or(base);
        let next = apply(storage, base.as_ref(), changes, written)?;
        if create(storage, &next)? {
            return Ok(next);
        }
        // Another writer was faster. Manifests that were rewritten for this snapshot belong to none.
        let known = base.iter().flat_map(|base| &base.manifests).chain(written);
        let known: HashSet<&str> = known.map(|entry| entry.path.as_str()).collect();
        let paths = next.manifests.into_iter().map(|entry| entry.path);
        storage.clean_up(paths.filter(|path| !known.contains(path.as_str())).collect());
    }
}

/// Creates the file of a snapshot without partitions; returns `false` if a snapshot with this number exists.
pub(super) fn create(storage: &Storage, snapshot: &Snapshot) -> Result<bool> {
    let mut text = serde_json::to_vec_pretty(snapshot).map_err(std::io::Error::other)?;
    text.push(b'\n');
    if storage.create(&snapshot_path(snapshot.snapshot), text)? != Created::Yes {
        return Ok(false);
    }
    // An error does not matter: this is only a hint, and readers list the snapshots after it.
    let _ = storage.replace(HINT, format!("{}\n", snapshot.snapshot).into_bytes());
    Ok(true)
}

/// Returns an error if `changes`, which were prepared for `base`, conflict with the later snapshot `other`.
fn conflict(
    storage: &Storage,
    base: Option<&Snapshot>,
    changes: &Changes,
    other: &Snapshot,
) -> Option<Error> {
    let what = if base.is_none() {
        "created the dataset".to_owned()
    } else if changes.replaces_everything() {
        "changed the dataset".to_owned()
    } else if !other.operation.kind.keeps_others() {
        "replaced the whole dataset".to_owned()
    } else if other.partition_columns != changes.partition_columns {
        "changed the partition columns".to_owned()
    } else if base.is_some_and(|base| ![&base.schema, &changes.schema].contains(&&other.schema)) {
        "changed the features".to_owned()
    } else if let Some(key) = other.operation.partitions.iter().find(|key| changes.written.contains_key(*key))
    {
        if key.columns().is_empty() {
            "changed the dataset".to_owned()
        } else {
            format!("changed the partition `{key}`")
        }
    } else {
        // Only content counts: paths can differ for equal content.
        let content = |snapshot: &Snapshot, name: &String| -> Option<String> {
            snapshot.vocabularies.get(name).map(|file| file.sha256.clone())
        };
        let changed = |(name, file): &(&String, &VocabularyFile)| {
            let now = content(other, name);
            now != base.and_then(|base| content(base, name)) && now.as_ref() != Some(&file.sha256)
        };
        let (name, _) = changes.vocabularies.iter().find(changed)?;
        format!("extended the vocabulary `{name}`")
    };
    let message = format!(
        "nothing was committed, because another writer {what} meanwhile (snapshot {})",
        other.snapshot
    );
    let fault = Fault::of_file(Kind::Failed, storage.location(), message);
    Some(fault.hint("run this again; it then starts from that snapshot").into())
}

/// Formats a time in UTC according to RFC 3339, in milliseconds.
pub(crate) fn utc(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// Returns the snapshot that results from applying `changes` to `base`.
fn apply(
    storage: &Storage,
    base: Option<&Snapshot>,
    changes: &Changes,
    written: &[ManifestEntry],
) -> Result<Snapshot> {
    let kept = base.filter(|_| !changes.replaces_everything());
    let Left { mut manifests, mut statistics, removed } = left_of(storage, kept, changes)?;
    let number = base.map_or(0, |base| base.snapshot) + 1;
    let mut features_since = kept.map(|base| base.features_since.clone()).unwrap_or_default();
    let added = kept.map(|base| changes.schema.further_features(&base.schema)).unwrap_or_default();
    manifests.iter_mut().for_each(|entry| entry.changes.add_features(&added));
    features_since.extend(added.into_iter().map(|feature| (feature, number)));
    if changes.kind == Commit::Forget {
        // The statistics of removed row groups may contain ids of forgotten users.
        let only_live = |entry| only_live_rows(storage, (&changes.schema, changes.order), entry);
        manifests = manifests.into_iter().map(only_live).collect::<Result<_>>()?;
    }
    manifests = merge_small(storage, (&changes.schema, changes.order), manifests)?;
    add_written(&mut statistics, changes);
    if let Some(base) = kept {
        correct_ends(storage, &mut statistics, (&base.statistics, &removed), changes, &manifests)?;
    }
    manifests.extend(written.iter().cloned());
    let samples_before = base.map_or(0, |base| base.statistics.samples);
    let gained = i128::from(statistics.samples) - i128::from(samples_before);
    let mut vocabularies = kept.map(|base| base.vocabularies.clone()).unwrap_or_default();
    vocabularies.extend(changes.vocabularies.clone());
    let mut table_versions = kept.map(|base| base.table_versions.clone()).unwrap_or_default();
    table_versions.extend(changes.table_versions.clone());
    Ok(Snapshot {
        format_version: FORMAT_VERSION,
        dataset: base.map_or_else(random_name, |base| base.dataset.clone()),
        snapshot: number,
        committed: utc(SystemTime::now()),
        operation: Operation {
            kind: changes.kind,
            partitions: changes.written.keys().cloned().collect(),
            samples_gained: i64::try_from(gained).unwrap_or_default(),
        },
        layout: changes.layout,
        order: changes.order,
        buckets: changes.division.number,
        buckets_in_range: changes.division.in_range,
        sessions: changes.sessions.clone(),
        schema: changes.schema.clone(),
        features_since,
        sample_keys: changes.sample_keys,
        partition_columns: changes.partition_columns.clone(),
        manifests,
        partitions: Vec::new(),
        vocabularies,
        table_versions,
        statistics,
    })
}

/// The row groups of a snapshot that remain after changes.
#[derive(Debug, Default)]
struct Left {
    manifests: Vec<ManifestEntry>,
    /// The smallest and largest ids and lengths of the features still include the removed samples.
    statistics: Statistics,
    /// The statistics of the features in the removed samples.
    removed: BTreeMap<String, FeatureStatistics>,
}

/// Returns the row groups of `base` that `changes` do not replace. The number of partitions includes the
/// written ones; the other totals do not include written samples.
fn left_of(storage: &Storage, base: Option<&Snapshot>, changes: &Changes) -> Result<Left> {
    let statistics = base.map(|base| base.statistics.clone()).unwrap_or_default();
    let mut left = Left { statistics, ..Left::default() };
    let keys: BTreeSet<PartitionKey> = changes.written.keys().cloned().collect();
    let (mut before, mut after) = (BTreeSet::new(), BTreeSet::new());
    for (base, entry) in
        base.into_iter().flat_map(|base| base.manifests.iter().map(move |entry| (base, entry)))
    {
        if !entry.may_have(&keys) {
            left.manifests.push(entry.clone());
            continue;
        }
        let (mut kept, mut removed) = (Vec::new(), Vec::new());
        for listed in entry.listed(storage)? {
            let is_written = keys.contains(&listed.key);
            if is_written {
                before.insert(listed.key.clone());
            }
            if changes.replaces(&listed.key, &listed.set) {
                subtract(&mut left.statistics, &listed.set);
                removed.push(listed);
                continue;
            }
            if is_written {
                after.insert(listed.key.clone());
            }
            kept.push(listed);
        }
        if removed.is_empty() {
            left.manifests.push(entry.clone());
            continue;
        }
        left.manifests.extend(part_of(entry, &kept));
        let features = RowStatistics::open(storage, entry, &base.schema)?.sum(&removed, false)?.features;
        for (name, feature) in features {
            if let Some(total) = left.statistics.features.get_mut(&name) {
                total.values = total.values.saturating_sub(feature.values);
            }
            left.removed.entry(name).or_default().merge(&feature);
        }
    }
    let written = changes.ranges_written().filter(|range| range.samples() > 0);
    after.extend(written.map(|range| range.key.clone()));
    let partitions = left.statistics.partitions.saturating_sub(before.len() as u64);
    left.statistics.partitions = partitions + after.len() as u64;
    Ok(left)
}

/// Returns the manifest entry restricted to the row groups `kept`, which are in manifest order; `None` if
/// `kept` is empty.
fn part_of(entry: &ManifestEntry, kept: &[Listed]) -> Option<ManifestEntry> {
    let keys = || kept.iter().map(|listed| &listed.key);
    let mut rows: Vec<(u32, u32)> = Vec::new();
    for range in kept.iter().map(Listed::rows) {
        // Row indices of an entry fit into 32 bits.
        let (start, end) = (range.start as u32, range.end as u32);
        match rows.last_mut() {
            Some((_, last)) if *last == start => *last = end,
            _ => rows.push((start, end)),
        }
    }
    Some(ManifestEntry { first: keys().min()?.clone(), last: keys().max()?.clone(), rows, ..entry.clone() })
}

/// Subtracts the row groups of `set` from the totals.
fn subtract(statistics: &mut Statistics, set: &FileSet) {
    statistics.samples = statistics.samples.saturating_sub(set.samples);
    statistics.sessions = statistics.sessions.saturating_sub(set.sessions());
    statistics.files = statistics.files.saturating_sub(set.files.len() as u64);
    statistics.bytes_on_disk = statistics.bytes_on_disk.saturating_sub(set.bytes_on_disk());
}

/// Corrects the smallest and largest ids and lengths of the features in `statistics` after samples with the
/// statistics `removed` were removed from samples with the statistics `before`. Manifests of the other row groups
/// are read only if the removed samples may alone have had such an id or length. The newest are read first, until
/// some have them too.
fn correct_ends(
    storage: &Storage,
    statistics: &mut Statistics,
    (before, removed): (&Statistics, &BTreeMap<String, FeatureStatistics>),
    changes: &Changes,
    manifests: &[ManifestEntry],
) -> Result<()> {
    let is_at_end = |(name, before): &(&String, &FeatureStatistics)| {
        removed.get(*name).is_some_and(|removed| {
            removed.min_id.is_some_and(|id| before.min_id == Some(id))
                || removed.max_id.is_some_and(|id| before.max_id == Some(id))
                || removed.max_length > 0 && removed.max_length == before.max_length
        })
    };
    let uncertain: Vec<_> = before.features.iter().filter(is_at_end).collect();
    let mut found = Statistics::default();
    add_written(&mut found, changes);
    let (mut rest, mut number) = (manifests, 1);
    while !rest.is_empty()
        && !uncertain
            .iter()
            .all(|(name, before)| found.features.get(*name).is_some_and(|found| found.contains_ends(before)))
    {
        let (older, newest) = rest.split_at(rest.len().saturating_sub(number));
        let all = manifests::statistics(storage, &changes.schema, newest, |_| true, false)?;
        for (name, feature) in all.features {
            found.features.entry(name).or_default().merge(&feature);
        }
        (rest, number) = (older, 2 * number);
    }
    for (name, _) in uncertain {
        if let Some((feature, found)) = statistics.features.get_mut(name).zip(found.features.get(name)) {
            *feature = FeatureStatistics { values: feature.values, ..*found };
        }
    }
    Ok(())
}

/// Adds the written row groups to the totals, except to the number of partitions.
fn add_written(statistics: &mut Statistics, changes: &Changes) {
    let names: Vec<&String> = changes.schema.sparse_features().map(|feature| &feature.name).collect();
    for name in &names {
        statistics.features.entry((*name).clone()).or_default();
    }
    for range in changes.ranges_written() {
        for (set, row_groups) in range.sets() {
            statistics.samples = statistics.samples.saturating_add(set.samples);
            statistics.sessions = statistics.sessions.saturating_add(set.sessions());
            statistics.files += set.files.len() as u64;
            statistics.bytes_on_disk = statistics.bytes_on_disk.saturating_add(set.bytes_on_disk());
            let there = names.iter().filter(|name| !set.changes.lacks(name));
            for (name, feature) in there.zip(features(row_groups)) {
                statistics.features.entry((*name).clone()).or_default().merge(&feature);
            }
        }
    }
}
