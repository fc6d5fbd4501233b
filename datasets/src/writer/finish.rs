//! The end of writing: combines partitions, compares them with the existing dataset, and commits.

use std::collections::{BTreeMap, BTreeSet};

use onefold_base::fault::{Fault, Kind, option, text};

use super::DatasetWriter;
use crate::digest::Digest;
use crate::snapshot::{Changes, Commit, Partition, Snapshot, commit, unless_removed};
use crate::{Error, FileSet, PartitionKey, Result, VocabularyFile};

/// The result of a commit.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// The [head](Snapshot::load_head) of the dataset's newest snapshot.
    pub snapshot: Snapshot,
    /// Whether there was a commit; `false` if the dataset already had these samples.
    pub changed: bool,
    /// For each written partition, its numbers of samples before and after the commit.
    pub partitions: BTreeMap<PartitionKey, (u64, u64)>,
}

impl DatasetWriter {
    /// Completes the files and commits. Readers that open the dataset see the changes as soon as the next
    /// snapshot has been created. If the dataset already has the samples of all written partitions, nothing
    /// is committed.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the samples differ from the [expected](Self::expect) ones, if a partition would
    /// lose samples although the commit does not allow it, if another writer has changed the same partitions
    /// or the same vocabulary to other content in the meantime, or if a feature's vocabulary was not added.
    /// [`Error::Storage`] and [`Error::Fault`] if a file or the snapshot cannot be written. After an error
    /// the dataset is unchanged.
    pub fn finish(mut self) -> Result<Written> {
        self.complete()?;
        self.check_expected()?;
        let base = self.base.clone();
        let kept = base.as_ref().filter(|_| self.options.commit.keeps_others());
        let keys: BTreeSet<PartitionKey> = self.written.keys().cloned().collect();
        let old = match kept {
            Some(kept) => {
                let storage = &self.writers.storage;
                unless_removed(storage, kept.snapshot, kept.partitions_of(storage, &keys))?
            }
            None => BTreeMap::new(),
        };
        let mut changes = Changes {
            kind: match (self.options.commit, kept) {
                (Commit::Overwrite, _) if base.is_some() => Commit::Overwrite,
                (Commit::Create | Commit::Overwrite, _) | (_, None) => Commit::Create,
                (kind, Some(_)) => kind,
            },
            layout: self.options.layout,
            order: self.options.order,
            division: self.options.buckets,
            sessions: self.options.sessions.clone().or(kept.and_then(|kept| kept.sessions.clone())),
            schema: self.schema.clone(),
            sample_keys: self.options.sample_keys,
            partition_columns: self.partition_columns.clone(),
            written: std::mem::take(&mut self.written),
            replaced: std::mem::take(&mut self.replaced),
            vocabularies: BTreeMap::new(),
            table_versions: std::mem::take(&mut self.table_versions),
        };
        let keys = changes.written.keys();
        let new: BTreeMap<&PartitionKey, Samples> =
            keys.map(|key| (key, samples_of(&changes, key, old.get(key)))).collect();
        self.check_losses(&old, &new)?;
        self.check_only_new(&old, &new)?;
        let before = |key: &PartitionKey| old.get(key).map_or(0, |old| old.samples);
        let partitions = new.iter().map(|(key, new)| ((*key).clone(), (before(key), new.number))).collect();
        // `forget` and `compact` commit only if they changed something, even if the samples are the same.
        let rewrites = matches!(self.options.commit, Commit::Forget | Commit::Compact);
        let is_unchanged = !rewrites && same_samples(&old, &new);
        let added = std::mem::take(&mut self.vocabularies);
        self.check_vocabularies(kept, &added)?;
        // A vocabulary with unchanged content keeps its old file, and no snapshot lists the new file.
        let (unchanged, vocabularies): (BTreeMap<_, _>, BTreeMap<_, _>) =
            added.into_iter().partition(|(name, file)| {
                kept.and_then(|kept| kept.vocabularies.get(name)).is_some_and(|old| old.sha256 == file.sha256)
            });
        if let Some(kept) = kept.filter(|_| is_unchanged && vocabularies.is_empty()) {
            // Dropping the writer before it is finished removes its files.
            return Ok(Written { snapshot: kept.clone(), changed: false, partitions });
        }
        changes.vocabularies = vocabularies;
        let snapshot = commit(&self.writers.storage, base.as_ref(), &changes)?;
        self.finished = true;
        if !unchanged.is_empty() {
            self.writers.storage.clean_up(unchanged.into_values().map(|file| file.path).collect());
        }
        Ok(Written { snapshot, changed: true, partitions })
    }

    /// Returns an error if an append would reduce the number of samples in a partition.
    fn check_losses(
        &self,
        old: &BTreeMap<PartitionKey, Partition>,
        new: &BTreeMap<&PartitionKey, Samples>,
    ) -> Result<()> {
        if !matches!(self.options.commit, Commit::Append | Commit::Merge) {
            return Ok(());
        }
        // A merge may move a session to another partition if the session now starts earlier.
        let lost = new.iter().filter_map(|(key, new)| {
            let before = old.get(*key)?.samples;
            (self.options.commit == Commit::Append && new.number < before)
                .then_some((key, before, new.number))
        });
        let lost: Vec<_> = lost.collect();
        let Some((key, before, now)) = lost.first() else { return Ok(()) };
        let several = match lost.len() {
            1 => String::new(),
            partitions => format!("{partitions} partitions would lose samples: "),
        };
        let message = format!(
            "{several}{} has {before} samples, and appending would leave {now}; nothing was committed",
            named(key)
        );
        let fault = Fault::of_file(Kind::Failed, self.writers.storage.location(), message);
        Err(fault
            .hint(text![
                "give logs that hold all samples of the partition, add late samples to it with ",
                option("commit").set_to("merge"),
                ", or replace it with ",
                option("commit").set_to("replace")
            ])
            .into())
    }

    /// Returns an error if an append of new rows alone would replace the samples that a partition has.
    fn check_only_new(
        &self,
        old: &BTreeMap<PartitionKey, Partition>,
        new: &BTreeMap<&PartitionKey, Samples>,
    ) -> Result<()> {
        if !self.only_new || self.options.commit != Commit::Append {
            return Ok(());
        }
        let is_other = |(key, new): &(&&PartitionKey, &Samples)| {
            let old = old.get(**key).map(|old| Samples { number: old.samples, digest: old.digest });
            old.is_some_and(|old| old != **new)
        };
        let Some((key, _)) = new.iter().find(is_other) else { return Ok(()) };
        let message = format!(
            "{} has samples of earlier rows, which appending would replace, because only rows that were added to a \
             table are read; nothing was committed",
            named(key)
        );
        let fault = Fault::of_file(Kind::Failed, self.writers.storage.location(), message);
        Err(fault
            .hint(text![
                "add the samples to the partition with ",
                option("commit").set_to("merge"),
                " if they have keys, or read the whole table: `append = \"all\"` in its source"
            ])
            .into())
    }

    fn check_expected(&self) -> Result<()> {
        let Some((expected, digest)) = self.expected else { return Ok(()) };
        let mut all = Samples::default();
        for range in self.written.values().flat_map(BTreeMap::values) {
            all.add(range.samples(), range.digest());
        }
        if all == (Samples { number: expected, digest }) {
            return Ok(());
        }
        let written = all.number;
        let digests = if written == expected { ", whose digests differ" } else { "" };
        let message = format!(
            "the samples written are not those of the query: {written} of {expected} samples{digests}"
        );
        let hint = "nothing was committed; check that no source changed while it was read, then run this again, and \
                    report it if it stays";
        Err(Fault::new(Kind::Failed, message).hint(hint).into())
    }

    /// Checks that the vocabularies of `kept` and the added ones are exactly those to which features refer.
    fn check_vocabularies(
        &self,
        kept: Option<&Snapshot>,
        added: &BTreeMap<String, VocabularyFile>,
    ) -> Result<()> {
        let kept = kept.into_iter().flat_map(|kept| kept.vocabularies.keys());
        let all: BTreeSet<&String> = kept.chain(added.keys()).collect();
        let of_feature =
            |name: &String| self.schema.sparse_features().any(|f| f.vocabulary.as_ref() == Some(name));
        let mut named = self.schema.sparse_features().filter_map(|feature| feature.vocabulary.as_ref());
        let wrong = named.find(|name| !all.contains(name)).map(|name| (name, "was not added"));
        let wrong = wrong.or_else(|| {
            let foreign = all.iter().copied().find(|name| !of_feature(name));
            foreign.map(|name| (name, "belongs to no feature"))
        });
        let Some((name, what)) = wrong else { return Ok(()) };
        let message = format!("the vocabulary `{name}` {what}");
        let hint = "add the vocabularies that features name, and no others";
        Err(Error::schema(message, hint))
    }
}

/// The number of samples and their digest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Samples {
    number: u64,
    digest: Digest,
}

impl Samples {
    fn add(&mut self, number: u64, digest: Digest) {
        self.number += number;
        self.digest.merge(digest);
    }
}

/// Returns the name of a partition in a message about the dataset. Without partition columns, it is the dataset.
fn named(key: &PartitionKey) -> String {
    if key.columns().is_empty() { "it".to_owned() } else { format!("partition `{key}`") }
}

/// Returns the number and digest of the samples that a written partition will have. `old` is the partition in the
/// existing dataset.
fn samples_of(changes: &Changes, key: &PartitionKey, old: Option<&Partition>) -> Samples {
    let mut samples = Samples::default();
    let written = changes.written.get(key).into_iter().flat_map(BTreeMap::values);
    written.for_each(|range| samples.add(range.samples(), range.digest()));
    let kept = old.into_iter().flat_map(|old| &old.files).filter(|set| !changes.replaces(key, set));
    for row_group in kept.flat_map(|set| &set.row_groups) {
        samples.add(row_group.samples, row_group.digest);
    }
    samples
}

/// Returns whether the new partitions have the samples of the old ones. Digests of files whose features have
/// changed since cannot be compared: another feature may now have the old name and the same values.
fn same_samples(old: &BTreeMap<PartitionKey, Partition>, new: &BTreeMap<&PartitionKey, Samples>) -> bool {
    new.iter().all(|(key, new)| match old.get(*key) {
        Some(old) => {
            let is_whole = |set: &FileSet| set.changes.lacks.is_empty() && set.changes.are_digested();
            let is_current = old.files.iter().all(is_whole);
            is_current && *new == Samples { number: old.samples, digest: old.digest }
        }
        None => new.number == 0,
    })
}
