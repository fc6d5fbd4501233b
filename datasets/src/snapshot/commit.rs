//! The commit: the next snapshot is created if it is not there yet, which of several writers one does.
//!
//! A writer that finds its number taken reads the snapshots since its own. If one of them touched a partition that the
//! writer writes, or changed a vocabulary that the writer changes to another content, the commit fails; otherwise the
//! writer's changes are applied to the newest snapshot, and it tries the next number. So writers of different partitions
//! all succeed unless two of them extend one vocabulary, and of writers of one partition the first does.

use std::collections::BTreeMap;
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use onefold_base::fault::{Fault, Kind};
use onefold_storage::{Created, Storage, random_name};

use super::store::read_list;
use super::{
    Commit, FORMAT_VERSION, LIST_PARTITIONS, Layout, Operation, Order, Partition, PartitionList, Sessions,
    Snapshot, Statistics, heads_after,
};
use crate::names::{HINT, partition_list, snapshot_path};
use crate::{Error, PartitionColumn, PartitionKey, Result, Schema, VocabularyFile};

/// What a writer has written: a new dataset, or partitions of one.
#[derive(Debug, Clone)]
pub(crate) struct Changes {
    pub(crate) kind: Commit,
    pub(crate) layout: Layout,
    pub(crate) order: Order,
    pub(crate) buckets: u32,
    pub(crate) sessions: Option<Sessions>,
    pub(crate) schema: Schema,
    pub(crate) sample_keys: bool,
    pub(crate) partition_columns: Vec<PartitionColumn>,
    /// The partitions written, whole; each replaces the one of its key. One without samples is removed.
    pub(crate) partitions: BTreeMap<PartitionKey, Partition>,
    /// The vocabularies added or extended, and no others. The dataset's other ones stay as they are.
    pub(crate) vocabularies: BTreeMap<String, VocabularyFile>,
}

impl Changes {
    /// Whether the changes replace a whole dataset.
    fn replaces_everything(&self) -> bool {
        !self.kind.keeps_others()
    }
}

/// Commits `changes` to the dataset in `storage`; `base` is the snapshot that they were made for. Gives the new
/// snapshot. Lists are read only where they have partitions that change, so both snapshots are without the partitions
/// of their lists.
///
/// # Errors
///
/// [`Error::Fault`] if another writer has changed the same partitions or the whole dataset since `base`, or the same
/// vocabulary to another content; [`Error::Storage`] if the storage fails. Nothing is committed then.
pub(crate) fn commit(storage: &Storage, base: Option<&Snapshot>, changes: &Changes) -> Result<Snapshot> {
    let mut base = base.cloned();
    loop {
        let next = apply(storage, base.as_ref(), changes)?;
        let mut text = serde_json::to_vec_pretty(&next).map_err(std::io::Error::other)?;
        text.push(b'\n');
        if storage.create(&snapshot_path(next.snapshot), text)? == Created::Yes {
            // Only a hint: whoever looks for the newest snapshot lists what comes after it.
            let _ = storage.replace(HINT, format!("{}\n", next.snapshot).into_bytes());
            return Ok(next);
        }
        let since = heads_after(storage, base.as_ref().map_or(0, |base| base.snapshot))?;
        if let Some(other) = since.iter().find_map(|other| conflict(storage, base.as_ref(), changes, other)) {
            return Err(other);
        }
        base = since.into_iter().last().or(base);
    }
}

/// The error that `changes`, made for `base`, cannot be applied after `other`; `None` if they can.
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
    } else if let Some(key) =
        other.operation.partitions.iter().find(|key| changes.partitions.contains_key(*key))
    {
        if key.columns().is_empty() {
            "changed the dataset".to_owned()
        } else {
            format!("changed the partition `{key}`")
        }
    } else {
        // Paths differ also where the content is the same.
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

/// A time in UTC, as RFC 3339 writes it, to the millisecond.
pub(crate) fn utc(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// The snapshot after `base` with `changes`. Lists that it needs are written.
fn apply(storage: &Storage, base: Option<&Snapshot>, changes: &Changes) -> Result<Snapshot> {
    let kept = base.filter(|_| !changes.replaces_everything());
    let (mut partitions, mut lists) = match kept {
        None => (Vec::new(), Vec::new()),
        Some(base) => unchanged(storage, base, changes)?,
    };
    let samples_before = base.map_or(0, |base| base.statistics.samples);
    partitions.extend(changes.partitions.values().filter(|partition| partition.samples > 0).cloned());
    partitions.sort_by(|a, b| a.key.cmp(&b.key));
    // What was written now stays in the snapshot, unless that alone is too much.
    if partitions.len() > LIST_PARTITIONS {
        let (moved, stays): (Vec<_>, Vec<_>) = partitions.into_iter().partition(|partition| {
            changes.partitions.len() > LIST_PARTITIONS || !changes.partitions.contains_key(&partition.key)
        });
        for chunk in moved.chunks(LIST_PARTITIONS) {
            lists.push(write_list(storage, chunk)?);
        }
        partitions = stays;
    }
    let mut statistics = Statistics::of(&partitions);
    lists.iter().for_each(|list| statistics.merge(&list.statistics));
    let gained = i128::from(statistics.samples) - i128::from(samples_before);
    Ok(Snapshot {
        format_version: FORMAT_VERSION,
        dataset: base.map_or_else(random_name, |base| base.dataset.clone()),
        snapshot: base.map_or(0, |base| base.snapshot) + 1,
        committed: utc(SystemTime::now()),
        operation: Operation {
            kind: changes.kind,
            partitions: changes.partitions.keys().cloned().collect(),
            samples_gained: i64::try_from(gained).unwrap_or_default(),
        },
        layout: changes.layout,
        order: changes.order,
        buckets: changes.buckets,
        sessions: changes.sessions.clone(),
        schema: changes.schema.clone(),
        sample_keys: changes.sample_keys,
        partition_columns: changes.partition_columns.clone(),
        partitions,
        lists,
        vocabularies: vocabularies(kept, changes),
        statistics,
    })
}

fn vocabularies(kept: Option<&Snapshot>, changes: &Changes) -> BTreeMap<String, VocabularyFile> {
    let mut all = kept.map(|base| base.vocabularies.clone()).unwrap_or_default();
    all.extend(changes.vocabularies.clone());
    all
}

/// The partitions and lists of `base` that `changes` do not touch. Of a list that holds a touched partition the others
/// move back into the snapshot.
fn unchanged(
    storage: &Storage,
    base: &Snapshot,
    changes: &Changes,
) -> Result<(Vec<Partition>, Vec<PartitionList>)> {
    let is_touched = |key: &PartitionKey| changes.partitions.contains_key(key);
    let mut partitions: Vec<Partition> =
        base.partitions.iter().filter(|partition| !is_touched(&partition.key)).cloned().collect();
    let mut lists = Vec::new();
    for list in &base.lists {
        if changes.partitions.range(&list.first..=&list.last).next().is_none() {
            lists.push(list.clone());
            continue;
        }
        let listed = read_list(storage, list)?;
        if listed.iter().any(|partition| is_touched(&partition.key)) {
            partitions.extend(listed.into_iter().filter(|partition| !is_touched(&partition.key)));
        } else {
            lists.push(list.clone());
        }
    }
    Ok((partitions, lists))
}

/// Writes a list of partitions, which are in order.
fn write_list(storage: &Storage, partitions: &[Partition]) -> Result<PartitionList> {
    let path = partition_list();
    storage.create(&path, serde_json::to_vec(partitions).map_err(std::io::Error::other)?)?;
    let key =
        |partition: Option<&Partition>| partition.map(|partition| partition.key.clone()).unwrap_or_default();
    Ok(PartitionList {
        path,
        partitions: partitions.len() as u64,
        files: partitions.iter().map(|partition| partition.files.len() as u64).sum(),
        first: key(partitions.first()),
        last: key(partitions.last()),
        statistics: Statistics::of(partitions),
    })
}

/// The partition of `base` with this key, also from a list.
pub(crate) fn find_partition(
    storage: &Storage,
    base: &Snapshot,
    key: &PartitionKey,
) -> Result<Option<Partition>> {
    if let Some(partition) = base.partitions.iter().find(|partition| partition.key == *key) {
        return Ok(Some(partition.clone()));
    }
    for list in base.lists.iter().filter(|list| (&list.first..=&list.last).contains(&key)) {
        if let Some(partition) = read_list(storage, list)?.into_iter().find(|partition| partition.key == *key)
        {
            return Ok(Some(partition));
        }
    }
    Ok(None)
}
