//! Snapshots: the committed states of a dataset. A dataset consists of exactly the files that its snapshot
//! lists.
//!
//! ```text
//! snapshots/00000012.json      schema, layout, order, buckets; statistics; operation; valid rows of each manifest
//! manifests/….parquet          the row groups of one commit: files, sessions, times, digests, statistics
//! snapshots/latest             a hint for finding the newest snapshot, which may be wrong
//! ```
//!
//! A snapshot and the files that it lists never change, so no commit affects a reader that holds a snapshot.
//! [`commit()`] creates the next snapshot, and [`vacuum`](crate::vacuum) removes old ones.
//!
//! A commit writes one manifest, which describes only the new row groups, and merges manifests of earlier
//! commits if there are many small ones. The cost of a commit therefore hardly depends on the number of earlier
//! commits. Opening a dataset reads the manifests, but no data file.

mod alter;
mod bucket;
mod changes;
mod commit;
#[cfg(test)]
pub(crate) mod editing;
mod files;
mod manifest;
mod manifests;
mod merge;
mod statistics;
mod store;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use arrow::datatypes::SchemaRef;
use onefold_base::versioned::parse_json;
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};

pub use self::alter::{drop_features, rename_feature};
pub use self::bucket::WrittenBucket;
pub use self::changes::{ColumnChanges, MISSING_DENSE, missing_column, with_name};
pub(crate) use self::commit::{Changes, commit, utc};
pub use self::files::{DataFile, FileSet, Partition, RowGroup};
pub use self::manifests::ManifestEntry;
pub(crate) use self::manifests::{NamedFiles, RowStatistics, rows_of_sets};
pub(crate) use self::statistics::RowGroupStatistics;
pub use self::statistics::{FeatureStatistics, SampleStatistics, Statistics};
pub use self::store::{SnapshotEntry, history, unless_removed};
pub(crate) use self::store::{
    check_exists, head_at, heads_after, latest_head, newest_number, not_a_dataset, numbers,
};
use crate::names::snapshot_path;
use crate::partition_column::{described, misfit};
use crate::partition_filter::filter_of;
use crate::schema::with_sample_keys;
use crate::{Buckets, Error, PartitionColumn, PartitionFilter, PartitionKey, Result, Schema, VocabularyFile};

/// The format version that this code writes, and the only one that it reads.
pub(crate) const FORMAT_VERSION: u32 = 6;

/// The storage layout of sparse features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Every sample stores all of its lists.
    Rows,
    /// In deduplicated groups, a list is stored only where it changes; see [`folded`](crate::folded).
    Folded,
}

impl Layout {
    /// Returns the columns of a data file.
    pub fn to_arrow(self, schema: &Schema) -> SchemaRef {
        match self {
            Self::Rows => schema.to_arrow(),
            Self::Folded => schema.to_folded_arrow(),
        }
    }
}

/// The order of samples within a bucket of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The samples of a session are contiguous and in time order; sessions are ordered by start time.
    Session,
    /// The samples of a session are contiguous and in time order; sessions are ordered by their id. The id is
    /// a hash, so consecutive sessions are a random sample of all sessions.
    SessionHash,
    /// Samples are ordered by time, as a service logs them: the baseline for measuring the effect of
    /// clustering.
    Arrival,
}

impl Order {
    /// Returns whether the samples of a session are contiguous.
    pub fn is_clustered(self) -> bool {
        self != Self::Arrival
    }
}

/// The definition of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sessions {
    /// Samples with equal values of these log columns form a session.
    Key(Vec<String>),
    /// Samples of one user without a pause longer than the gap form a session.
    Gap {
        /// The log column that identifies the user.
        user: String,
        /// The longest pause within a session, in microseconds.
        gap_micros: i64,
    },
}

/// A committed state of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The version of the dataset format.
    pub format_version: u32,
    /// The dataset's identity: a random text, chosen when the dataset is created and the same in all of its
    /// snapshots.
    pub dataset: String,
    /// The number of the snapshot: 1 for the first, and one more for each commit.
    pub snapshot: u64,
    /// The time of the commit by the writer's clock: RFC 3339, UTC.
    pub committed: String,
    /// The operation that created the snapshot.
    pub operation: Operation,
    /// The layout of sparse features.
    pub layout: Layout,
    /// The order of samples within a bucket of a partition.
    pub order: Order,
    /// The number of buckets into which sessions are divided. The session id determines the
    /// [bucket](crate::bucket_of_session).
    pub buckets: u32,
    /// The number of consecutive buckets in a range, whose samples share files. Range 0 begins with bucket 0.
    pub buckets_in_range: u32,
    /// The definition of a session; `None` if the writer did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<Sessions>,
    /// The columns of the samples.
    pub schema: Schema,
    /// For each feature that was added after the dataset was created: the number of the first snapshot with
    /// it. Only files that were written earlier may lack its [columns](ColumnChanges).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub features_since: BTreeMap<String, u64>,
    /// Whether the data files have [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sample_keys: bool,
    /// The partition columns in order, with the types of their values; empty for a dataset without
    /// partitions.
    pub partition_columns: Vec<PartitionColumn>,
    /// The manifests with row groups of the snapshot.
    pub manifests: Vec<ManifestEntry>,
    /// The partitions from the manifests, by key. Empty if only the [head](Self::load_head) was loaded: the
    /// snapshot's file does not contain them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<Partition>,
    /// The vocabularies that assign ids to features' values, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vocabularies: BTreeMap<String, VocabularyFile>,
    /// The versions of the tables whose rows the dataset has, by the names of their sources. An append reads what the
    /// tables gained since.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub table_versions: BTreeMap<String, TableVersion>,
    /// The statistics of all samples.
    pub statistics: Statistics,
}

/// A version of a Delta Lake table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableVersion {
    /// The identity of the table, which its log states.
    pub table: String,
    /// The number of the version.
    pub version: u64,
}

/// A description of a commit's effects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// The kind of commit.
    pub kind: Commit,
    /// The partitions that were written or removed; all partitions if the whole dataset was replaced.
    pub partitions: Vec<PartitionKey>,
    /// The number of samples that the dataset gained; negative if it lost samples.
    pub samples_gained: i64,
}

/// The effect of a commit on a dataset. A writer's kind is set with
/// [`WriterOptions::commit`](crate::WriterOptions::commit). A snapshot records the writer's kind, or `Create`
/// if there was no dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Commit {
    /// Creates a dataset. It is an error if the location is in use.
    Create,
    /// Replaces the whole dataset.
    Overwrite,
    /// Replaces the partitions with the same keys as the written ones and keeps the others. A replaced
    /// partition must not have more samples than the new one. The dataset must have the writer's schema,
    /// layout, order and definition of sessions, but the writer may add features. Creates the dataset if it
    /// does not exist.
    Append,
    /// Works like `Append`, but a partition may lose samples.
    Replace,
    /// Works like `Append`, but replaces only the written ranges of buckets of a partition, and cannot add
    /// features.
    Merge,
    /// Writes columns of existing samples into files beside theirs: features that the samples lack, or new values of
    /// columns. The dataset must exist. It may get additional features, as with `Append`.
    Columns,
    /// Drops or renames features. Only snapshots have this kind; writers cannot be given it.
    Alter,
    /// [Removes](crate::forget) the samples of users, by writing new files in place of those with such samples. The
    /// dataset must exist. Only `forget` uses this kind.
    Forget,
    /// [Merges](crate::compact) files without changing samples. The dataset must exist. Only `compact` uses this kind.
    Compact,
}

impl Commit {
    /// Returns whether partitions that are not written are kept.
    pub fn keeps_others(self) -> bool {
        !matches!(self, Self::Create | Self::Overwrite)
    }

    /// Returns the displayed name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Overwrite => "overwrite",
            Self::Append => "append",
            Self::Replace => "replace",
            Self::Merge => "merge",
            Self::Columns => "columns",
            Self::Alter => "alter",
            Self::Forget => "forget",
            Self::Compact => "compact",
        }
    }
}

impl Snapshot {
    /// Returns the division of sessions into buckets and ranges.
    pub fn division(&self) -> Buckets {
        Buckets { number: self.buckets, in_range: self.buckets_in_range }
    }

    /// Returns the columns of data files written with this schema.
    pub fn file_columns(&self) -> SchemaRef {
        with_sample_keys(self.layout.to_arrow(&self.schema), self.sample_keys)
    }

    /// Loads the newest snapshot of the dataset at `location`, a local path or a URL.
    ///
    /// # Errors
    ///
    /// [`Error::NotADataset`] if there is no snapshot, [`Error::Snapshot`] if its format version is not
    /// supported or it contradicts itself, [`Error::Storage`] if the storage cannot be read.
    pub fn load(location: &Path) -> Result<Self> {
        Self::load_at(location, None)
    }

    /// Loads snapshot `at`, or the newest one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSnapshot`] if the snapshot does not exist or was removed, and the errors of
    /// [`load`](Self::load).
    pub fn load_at(location: &Path, at: Option<u64>) -> Result<Self> {
        Self::load_from(&Storage::open(location)?, at)
    }

    /// Loads snapshot `at`, or the newest one, of the dataset in `storage`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`load_at`](Self::load_at).
    pub fn load_from(storage: &Storage, at: Option<u64>) -> Result<Self> {
        if let Some(number) = at {
            return head_at(storage, number)?.with_partitions(storage);
        }
        let head = latest_head(storage)?.ok_or_else(|| not_a_dataset(storage))?;
        match head.with_partitions(storage) {
            // A purge that followed the next commit removed it.
            Err(Error::NoSnapshot(_)) => Self::load_from(storage, None),
            loaded => loaded,
        }
    }

    /// Loads the newest snapshot without its partitions, but with all other fields, including statistics.
    /// Reads no manifest.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`load`](Self::load).
    pub fn load_head(location: &Path) -> Result<Self> {
        let storage = Storage::open(location)?;
        latest_head(&storage)?.ok_or_else(|| not_a_dataset(&storage))
    }

    /// Adds the partitions from the manifests.
    fn with_partitions(mut self, storage: &Storage) -> Result<Self> {
        let partitions = manifests::partitions(storage, &self.manifests, self.order);
        self.partitions = unless_removed(storage, self.snapshot, partitions)?.into_values().collect();
        self.check_partitions()
            .map_err(|message| Error::snapshot(storage.shown(&snapshot_path(self.snapshot)), message))?;
        Ok(self)
    }

    /// Returns the partitions with these keys, as far as they exist. The snapshot may be a head.
    pub(crate) fn partitions_of(
        &self,
        storage: &Storage,
        keys: &BTreeSet<PartitionKey>,
    ) -> Result<BTreeMap<PartitionKey, Partition>> {
        let entries: Vec<_> = self.manifests.iter().filter(|entry| entry.may_have(keys)).cloned().collect();
        let mut partitions = manifests::partitions(storage, &entries, self.order)?;
        partitions.retain(|key, _| keys.contains(key));
        Ok(partitions)
    }

    /// Parses the `text` of a snapshot's file, which has no partitions.
    ///
    /// # Errors
    ///
    /// Returns a message if the format version is not supported, a key is missing or unknown, or the snapshot
    /// contradicts itself.
    pub fn parse(text: &str) -> Result<Self, String> {
        let snapshot: Self = parse_json(text.as_bytes(), FORMAT_VERSION)?;
        if !snapshot.partitions.is_empty() {
            return Err("unknown field `partitions`".to_owned());
        }
        snapshot.check()?;
        Ok(snapshot)
    }

    /// Returns the partitions that `filter` chooses, in order. The result may be empty.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] under the conditions of [`PartitionFilter::choice`].
    pub fn matching(&self, filter: &PartitionFilter) -> Result<Vec<&Partition>> {
        if self.partitions.is_empty() {
            return Ok(Vec::new());
        }
        let choice = filter.choice(&self.partition_columns)?;
        let mut chosen = Vec::new();
        for partition in &self.partitions {
            if choice.matches(&partition.key)? {
                chosen.push(partition);
            }
        }
        Ok(chosen)
    }

    /// Returns the partitions that `filter` chooses, in order.
    ///
    /// # Errors
    ///
    /// The errors of [`matching`](Self::matching), and [`Error::Fault`] if the dataset has partitions but the
    /// filter chooses none of them.
    pub fn select(&self, filter: &PartitionFilter) -> Result<Vec<&Partition>> {
        let chosen = self.matching(filter)?;
        if chosen.is_empty() && !self.partitions.is_empty() {
            let some = self.partitions.iter().take(5);
            let some: Vec<_> = some.map(|partition| format!("`{}`", filter_of(&partition.key))).collect();
            return Err(Error::partition_filter(
                &filter.to_string(),
                "no partition matches",
                format!(
                    "the dataset holds {}{}",
                    some.join(", "),
                    if self.partitions.len() > 5 { ", …" } else { "" }
                ),
            ));
        }
        Ok(chosen)
    }

    /// Returns the number of samples in the partitions that `filter` chooses.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`select`](Self::select).
    pub fn chosen_samples(&self, filter: &PartitionFilter) -> Result<u64> {
        let chosen = self.select(filter)?;
        Ok(chosen.iter().fold(0, |sum, partition| sum.saturating_add(partition.samples)))
    }

    /// Returns the statistics of the samples in the partitions that `filter` chooses. The snapshot must
    /// belong to the dataset in `storage` and must not be a [head](Self::load_head).
    ///
    /// # Errors
    ///
    /// The errors of [`select`](Self::select), [`Error::Snapshot`] if a manifest is damaged,
    /// [`Error::Storage`] if the storage cannot be read.
    pub fn statistics_of(&self, storage: &Storage, filter: &PartitionFilter) -> Result<SampleStatistics> {
        let chosen = self.select(filter)?.into_iter().map(|partition| partition.key.clone());
        let chosen: BTreeSet<PartitionKey> = chosen.collect();
        let entries: Vec<_> =
            self.manifests.iter().filter(|entry| entry.may_have(&chosen)).cloned().collect();
        manifests::statistics(storage, &self.schema, &entries, |key| chosen.contains(key), true)
    }

    /// Removes the lists of column names of the files, which are needed only to read the files.
    #[must_use]
    pub fn without_columns(mut self) -> Self {
        let sets = self.partitions.iter_mut().flat_map(|partition| &mut partition.files);
        sets.flat_map(|set| &mut set.files).for_each(|file| file.columns = [].into());
        self
    }

    /// Returns the files' paths relative to the dataset's folder: the data files in sample order, then the
    /// vocabularies.
    pub fn file_paths(&self) -> impl Iterator<Item = &str> {
        let sets = self.partitions.iter().flat_map(|partition| &partition.files);
        let files = sets.flat_map(|set| &set.files).map(|file| file.path.as_str());
        files.chain(self.vocabularies.values().map(|file| file.path.as_str()))
    }

    /// Checks that samples with these partition columns can be added to the dataset.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset has other partition columns, or columns of other types.
    pub fn check_partition_columns(&self, columns: &[PartitionColumn]) -> Result<()> {
        let is_new = self.partition_columns.is_empty() && self.statistics.samples == 0;
        if is_new || self.partition_columns == columns {
            return Ok(());
        }
        let (old, new) = (described(&self.partition_columns), described(columns));
        Err(Error::schema(
            format!("the dataset is {old}, but the samples to append are {new}"),
            "partition by the same columns with values of the same types (`CAST` in the query converts a \
             column), or build the dataset anew",
        ))
    }

    /// Checks properties that serde cannot check: the schema, the buckets, the vocabularies, and that no path
    /// leaves the dataset's folder.
    fn check(&self) -> Result<(), String> {
        self.schema.validate().map_err(|error| error.to_string())?;
        if !self.division().is_valid() {
            let (buckets, in_range) = (self.buckets, self.buckets_in_range);
            return Err(format!("it has {buckets} buckets in ranges of {in_range}"));
        }
        self.check_changes()?;
        let manifests = self.manifests.iter().map(|entry| entry.path.as_str());
        check_paths(manifests.chain(self.file_paths()))?;
        for feature in self.schema.sparse_features() {
            let unknown = |name: &&String| !self.vocabularies.contains_key(*name);
            if let Some(name) = feature.vocabulary.as_ref().filter(unknown) {
                return Err(format!("the feature `{}` has the unknown vocabulary `{name}`", feature.name));
            }
        }
        Ok(())
    }

    /// Checks the partitions from the manifests: their keys, buckets and paths, and that the number of
    /// samples matches the snapshot.
    fn check_partitions(&self) -> Result<(), String> {
        check_paths(self.file_paths())?;
        let mut samples = 0_u64;
        for partition in &self.partitions {
            let key = &partition.key;
            if let Some(message) = misfit(&self.partition_columns, key) {
                return Err(format!("the partition `{key}` does not fit: {message}"));
            }
            let division = self.division();
            for set in &partition.files {
                let range = division.of_range(division.range_of(set.bucket));
                let last = set.row_groups.last().map_or(set.bucket, RowGroup::last_bucket);
                let (path, buckets) = (set.path(), self.buckets);
                if last >= buckets {
                    return Err(format!("`{path}` is of bucket {last}, but there are {buckets}"));
                }
                if last >= range.end {
                    let first = set.bucket;
                    return Err(format!(
                        "`{path}` has the buckets {first} to {last}, which are of two ranges"
                    ));
                }
            }
            samples = samples.saturating_add(partition.samples);
        }
        let total = self.statistics.samples;
        match samples == total {
            true => Ok(()),
            false => Err(format!("the statistics count {total} samples, the manifests {samples}")),
        }
    }
}

fn check_paths<'p>(mut paths: impl Iterator<Item = &'p str>) -> Result<(), String> {
    let outside = paths.find(|path| !stays_inside(path));
    outside.map_or(Ok(()), |path| Err(format!("the file path `{path}` leaves the dataset")))
}

/// Returns whether a relative path is inside its folder.
pub(crate) fn stays_inside(path: &str) -> bool {
    let path = Path::new(path);
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}
