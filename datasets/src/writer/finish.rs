//! The end of writing: partitions are put together, compared with what the dataset has, and committed.

use std::collections::{BTreeMap, BTreeSet};

use onefold_base::fault::{Fault, Kind, option, text};

use super::{DatasetWriter, WrittenBucket};
use crate::digest::Digest;
use crate::snapshot::{Changes, Commit, Partition, Snapshot, commit, find_partition};
use crate::{Error, PartitionKey, Result, VocabularyFile};

/// What a writer has committed.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// The dataset now: the [head](Snapshot::load_head) of its newest snapshot.
    pub snapshot: Snapshot,
    /// Whether something was committed; `false` if the dataset had these samples already.
    pub changed: bool,
    /// The samples that each partition written had before, and has now.
    pub partitions: BTreeMap<PartitionKey, (u64, u64)>,
}

impl DatasetWriter {
    /// Closes the files and commits: from the moment the next snapshot is created, readers that open the dataset see
    /// it. If the dataset has the samples of all partitions written already, nothing is committed.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the samples are not those [expected](Self::expect), a partition would lose samples and may
    /// not, another writer has changed the same partitions meanwhile, or the same vocabulary to another content, or a
    /// feature's vocabulary was not added; [`Error::Storage`] and [`Error::Fault`] if a file or the snapshot cannot be
    /// written. The dataset is then as it was.
    pub fn finish(mut self) -> Result<Written> {
        self.complete()?;
        self.check_expected()?;
        let base = self.base.clone();
        let kept = base.as_ref().filter(|_| self.options.commit.keeps_others());
        let old = self.old_partitions(kept)?;
        let written = std::mem::take(&mut self.written);
        let new: BTreeMap<PartitionKey, Partition> = written
            .into_iter()
            .map(|(key, buckets)| (key.clone(), self.partition(&key, buckets, old.get(&key))))
            .collect();
        self.check_losses(&old, &new)?;
        let partitions = new.iter().map(|(key, partition)| {
            (key.clone(), (old.get(key).map_or(0, |old| old.samples), partition.samples))
        });
        let partitions = partitions.collect();
        let added = std::mem::take(&mut self.vocabularies);
        self.check_vocabularies(kept, &added)?;
        // A vocabulary with the content of the dataset's is not changed. Its new file is named by no snapshot.
        let (unchanged, vocabularies): (BTreeMap<_, _>, BTreeMap<_, _>) =
            added.into_iter().partition(|(name, file)| {
                kept.and_then(|kept| kept.vocabularies.get(name)).is_some_and(|old| old.sha256 == file.sha256)
            });
        if let Some(kept) = kept.filter(|_| same_samples(&old, &new) && vocabularies.is_empty()) {
            // Dropped unfinished, so that the files written are removed.
            return Ok(Written { snapshot: kept.clone(), changed: false, partitions });
        }
        let changes = Changes {
            kind: match (self.options.commit, kept) {
                (Commit::Overwrite, _) if base.is_some() => Commit::Overwrite,
                (Commit::Create | Commit::Overwrite, _) | (_, None) => Commit::Create,
                (kind, Some(_)) => kind,
            },
            layout: self.options.layout,
            order: self.options.order,
            buckets: self.options.buckets,
            sessions: self.options.sessions.clone().or(kept.and_then(|kept| kept.sessions.clone())),
            schema: self.schema.clone(),
            sample_keys: self.options.sample_keys,
            partition_columns: self.partition_columns.clone(),
            partitions: new,
            vocabularies,
        };
        let snapshot = commit(&self.writers.storage, base.as_ref(), &changes)?;
        self.finished = true;
        if !unchanged.is_empty() {
            self.writers.storage.clean_up(unchanged.into_values().map(|file| file.path).collect());
        }
        Ok(Written { snapshot, changed: true, partitions })
    }

    /// The partitions of the dataset that were written.
    fn old_partitions(&self, kept: Option<&Snapshot>) -> Result<BTreeMap<PartitionKey, Partition>> {
        let Some(kept) = kept else { return Ok(BTreeMap::new()) };
        let mut old = BTreeMap::new();
        for key in self.written.keys() {
            if let Some(partition) = find_partition(&self.writers.storage, kept, key)? {
                old.insert(key.clone(), partition);
            }
        }
        Ok(old)
    }

    /// The partition of the buckets written; when merging, together with the other buckets of `old`.
    fn partition(
        &self,
        key: &PartitionKey,
        buckets: BTreeMap<u32, WrittenBucket>,
        old: Option<&Partition>,
    ) -> Partition {
        let mut partition = Partition::empty(key.clone());
        if self.options.commit == Commit::Merge
            && let Some(old) = old
        {
            let is_kept = |bucket: u32| !buckets.contains_key(&bucket);
            partition.files.extend(old.files.iter().filter(|file| is_kept(file.bucket)).cloned());
            partition.buckets.extend(old.buckets.iter().filter(|old| is_kept(old.bucket)).cloned());
        }
        for written in buckets.into_values().filter(|written| written.bucket.samples > 0) {
            partition.files.extend(written.files);
            partition.buckets.push(written.bucket);
        }
        partition.files.sort_by_key(|file| file.bucket);
        partition.buckets.sort_by_key(|bucket| bucket.bucket);
        partition.add_up();
        if self.options.buckets == 1 {
            partition.buckets.clear();
        }
        partition
    }

    /// Refuses to append a partition with fewer samples than it has.
    fn check_losses(
        &self,
        old: &BTreeMap<PartitionKey, Partition>,
        new: &BTreeMap<PartitionKey, Partition>,
    ) -> Result<()> {
        if !matches!(self.options.commit, Commit::Append | Commit::Merge) {
            return Ok(());
        }
        // A merge may move a session that starts earlier now to another partition.
        let lost = new.iter().filter_map(|(key, new)| {
            let before = old.get(key)?.samples;
            (self.options.commit == Commit::Append && new.samples < before).then_some((
                key,
                before,
                new.samples,
            ))
        });
        let lost: Vec<_> = lost.collect();
        let Some((key, before, now)) = lost.first() else { return Ok(()) };
        let several = match lost.len() {
            1 => String::new(),
            partitions => format!("{partitions} partitions would lose samples: "),
        };
        let message = format!(
            "{several}partition `{key}` has {before} samples, and appending would leave {now}; nothing was committed"
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

    fn check_expected(&self) -> Result<()> {
        let Some((expected, digest)) = self.expected else { return Ok(()) };
        let (mut written, mut all) = (0, Digest::default());
        for bucket in self.written.values().flat_map(BTreeMap::values) {
            written += bucket.bucket.samples;
            all.merge(bucket.bucket.digest);
        }
        if (written, all) == (expected, digest) {
            return Ok(());
        }
        let digests = if written == expected { ", whose digests differ" } else { "" };
        let message = format!(
            "the samples written are not those of the query: {written} of {expected} samples{digests}"
        );
        let hint = "nothing was committed; check that no source changed while it was read, then run this again, and \
                    report it if it stays";
        Err(Fault::new(Kind::Failed, message).hint(hint).into())
    }

    /// Checks that the vocabularies of `kept` and those that were added are those that features name.
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

/// Whether the new partitions have the samples of the old ones.
fn same_samples(old: &BTreeMap<PartitionKey, Partition>, new: &BTreeMap<PartitionKey, Partition>) -> bool {
    new.iter().all(|(key, new)| match old.get(key) {
        Some(old) => old.samples == new.samples && old.digest == new.digest,
        None => new.samples == 0,
    })
}
