//! Snapshots: the committed states of a dataset. What a snapshot does not name is not part of the dataset.
//!
//! ```text
//! snapshots/00000012.json      schema, layout, order, buckets; the partitions with their files; statistics; what changed
//! snapshots/partitions-….json  partitions that did not change for long, [`LIST_PARTITIONS`] to a file
//! snapshots/latest             a hint where to look for the newest snapshot; never trusted
//! ```
//!
//! A snapshot is created once and never changed, and so are the files that it names; a reader that holds a snapshot is
//! therefore not disturbed by any commit. [`commit()`] creates the next one, [`vacuum`](crate::vacuum) removes old
//! ones.
//!
//! A commit writes the partitions that changed lately, and refers to lists of the others, so that its cost does not
//! grow with the commits before it (but for a reference to each list of [`LIST_PARTITIONS`] partitions).

mod commit;
mod row_groups;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Component, Path};

use arrow::datatypes::SchemaRef;
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};

pub(crate) use self::commit::{Changes, commit, find_partition, utc};
pub use self::row_groups::RowGroup;
pub use self::store::{SnapshotEntry, history};
pub(crate) use self::store::{head_at, heads_after, latest_head, named_files, not_a_dataset, numbers};
use crate::dense;
use crate::digest::Digest;
use crate::partition_column::{described, misfit};
use crate::partition_filter::filter_of;
use crate::schema::with_sample_keys;
use crate::{
    DenseStatistics, Error, PartitionColumn, PartitionFilter, PartitionKey, Result, Schema, VocabularyFile,
};

/// The version that this code writes, and the only one that it reads.
pub(crate) const FORMAT_VERSION: u32 = 5;
/// A snapshot holds at most so many partitions itself; beyond that they move to a list.
pub(crate) const LIST_PARTITIONS: usize = 128;

/// How sparse features are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Every sample carries every list.
    Rows,
    /// In deduplicated groups a list is stored only where it changes; see [`folded`](crate::folded).
    Folded,
}

impl Layout {
    /// The columns of a data file.
    pub fn to_arrow(self, schema: &Schema) -> SchemaRef {
        match self {
            Self::Rows => schema.to_arrow(),
            Self::Folded => schema.to_folded_arrow(),
        }
    }
}

/// How samples are ordered within a bucket of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The samples of a session are contiguous, in time order; sessions are ordered by start time.
    Session,
    /// The samples of a session are contiguous, in time order; sessions are ordered by their id, which is a hash, so
    /// that any run of sessions is a random sample of all.
    SessionHash,
    /// By time alone, as a service logs them: the baseline that clustering is measured against.
    Arrival,
}

impl Order {
    /// Whether the samples of a session are contiguous.
    pub fn is_clustered(self) -> bool {
        match self {
            Self::Session | Self::SessionHash => true,
            Self::Arrival => false,
        }
    }
}

/// What makes a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sessions {
    /// Samples with equal values of these columns of the log.
    Key(Vec<String>),
    /// Samples of one user with no pause longer than the gap.
    Gap {
        /// The column of the log that identifies the user.
        user: String,
        /// The longest pause within a session, in microseconds.
        gap_micros: i64,
    },
}

/// One committed state of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Version of this format.
    pub format_version: u32,
    /// The identity of the dataset: random, given when the dataset is created, the same in all of its snapshots.
    pub dataset: String,
    /// The number of the snapshot: 1 for the first, one more for each commit.
    pub snapshot: u64,
    /// When it was committed: RFC 3339, UTC, by the clock of the writer.
    pub committed: String,
    /// What the commit did.
    pub operation: Operation,
    /// How sparse features are stored.
    pub layout: Layout,
    /// How samples are ordered within a bucket of a partition.
    pub order: Order,
    /// The number of buckets that sessions are divided into; a session's id tells its
    /// [bucket](crate::bucket_of_session).
    pub buckets: u32,
    /// What makes a session; `None` if the writer did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<Sessions>,
    /// The columns.
    pub schema: Schema,
    /// Whether the data files have [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sample_keys: bool,
    /// The partition columns with the types of their values, in their order; empty for a dataset without partitions.
    pub partition_columns: Vec<PartitionColumn>,
    /// The partitions, by key. Those of the lists are here, too, unless only the [head](Self::load_head) was loaded.
    pub partitions: Vec<Partition>,
    /// Lists of the other partitions. Empty once they are loaded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lists: Vec<PartitionList>,
    /// The vocabularies that give features their ids, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vocabularies: BTreeMap<String, VocabularyFile>,
    /// Statistics of all partitions.
    pub statistics: Statistics,
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// The kind of commit.
    pub kind: Commit,
    /// The partitions that were written or removed; all, if the whole dataset was replaced.
    pub partitions: Vec<PartitionKey>,
    /// How many samples the dataset gained; negative if it lost some.
    pub samples_gained: i64,
}

/// How a commit changes a dataset. A writer is told one, with
/// [`WriterOptions::commit`](crate::WriterOptions::commit). A snapshot records the one that took place: that of the
/// writer, or `Create` if there was no dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Commit {
    /// A dataset is created. It is an error if something is there.
    Create,
    /// The whole dataset is replaced.
    Overwrite,
    /// The partitions written replace those of the same key, which must not have more samples; the others are kept. Its
    /// schema, layout, order and definition of sessions must be those of the writer. No dataset there: it is created.
    Append,
    /// As `Append`, but a partition may lose samples.
    Replace,
    /// As `Append`, but of a partition only the buckets written are replaced.
    Merge,
}

impl Commit {
    /// Whether partitions that are not written are kept.
    pub fn keeps_others(self) -> bool {
        matches!(self, Self::Append | Self::Replace | Self::Merge)
    }

    /// The name that people read.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Overwrite => "overwrite",
            Self::Append => "append",
            Self::Replace => "replace",
            Self::Merge => "merge",
        }
    }
}

/// A list of partitions that lies beside the snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionList {
    /// Path relative to the dataset's folder.
    pub path: String,
    /// The number of partitions in the list.
    pub partitions: u64,
    /// The number of their data files.
    pub files: u64,
    /// The smallest key in the list.
    pub first: PartitionKey,
    /// The largest key in the list.
    pub last: PartitionKey,
    /// Statistics of the partitions in the list.
    pub statistics: Statistics,
}

/// One partition and its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// The partition columns' values.
    pub key: PartitionKey,
    /// Samples in the partition.
    pub samples: u64,
    /// Sessions in the partition.
    pub sessions: u64,
    /// The files, by bucket and then in the order of the samples.
    pub files: Vec<DataFile>,
    /// Statistics by sparse feature.
    pub features: BTreeMap<String, FeatureStatistics>,
    /// Statistics by dense feature; empty if an earlier program wrote some of the samples.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dense: BTreeMap<String, DenseStatistics>,
    /// The digest of the samples.
    pub digest: Digest,
    /// The time of the last sample, in microseconds since 1970; `None` without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<i64>,
    /// The same by bucket, in ascending order of buckets; empty for a dataset of one bucket.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<Bucket>,
}

/// Statistics of one bucket of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bucket {
    /// The number of the bucket, from 0.
    pub bucket: u32,
    /// Samples in the bucket.
    pub samples: u64,
    /// Sessions in the bucket.
    pub sessions: u64,
    /// Statistics by sparse feature.
    pub features: BTreeMap<String, FeatureStatistics>,
    /// Statistics by dense feature; empty if an earlier program wrote the bucket.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dense: BTreeMap<String, DenseStatistics>,
    /// The digest of the samples.
    pub digest: Digest,
    /// The time of the last sample, in microseconds since 1970; `None` without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<i64>,
}

/// One Parquet file of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path relative to the dataset's folder, with `/` between its parts.
    pub path: String,
    /// The bucket whose sessions are in the file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bucket: u32,
    /// Samples in the file.
    pub samples: u64,
    /// The row groups, in the order of the file.
    pub row_groups: Vec<RowGroup>,
    /// Size of the file.
    pub bytes_on_disk: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Statistics of several partitions.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// All samples.
    pub samples: u64,
    /// All sessions.
    pub sessions: u64,
    /// Size of all data files.
    pub bytes_on_disk: u64,
    /// Statistics by sparse feature.
    pub features: BTreeMap<String, FeatureStatistics>,
}

/// Statistics of a sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureStatistics {
    /// Ids over all samples, as if every sample carried its list.
    pub values: u64,
    /// The smallest id, if there is any.
    pub min_id: Option<i64>,
    /// The largest id, if there is any.
    pub max_id: Option<i64>,
    /// The length of the longest list.
    pub max_length: u64,
}

impl FeatureStatistics {
    /// Adds the statistics of other samples.
    pub fn merge(&mut self, other: &Self) {
        let least = |a: Option<i64>, b: Option<i64>| a.into_iter().chain(b).min();
        self.values = self.values.saturating_add(other.values);
        self.min_id = least(self.min_id, other.min_id);
        self.max_id = self.max_id.max(other.max_id);
        self.max_length = self.max_length.max(other.max_length);
    }
}

impl Statistics {
    /// The sums over `partitions`.
    pub fn of<'p>(partitions: impl IntoIterator<Item = &'p Partition>) -> Self {
        let mut all = Self::default();
        for partition in partitions {
            all.samples = all.samples.saturating_add(partition.samples);
            all.sessions = all.sessions.saturating_add(partition.sessions);
            let bytes =
                partition.files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.bytes_on_disk));
            all.bytes_on_disk = all.bytes_on_disk.saturating_add(bytes);
            all.merge_features(&partition.features);
        }
        all
    }

    fn merge(&mut self, other: &Self) {
        self.samples = self.samples.saturating_add(other.samples);
        self.sessions = self.sessions.saturating_add(other.sessions);
        self.bytes_on_disk = self.bytes_on_disk.saturating_add(other.bytes_on_disk);
        self.merge_features(&other.features);
    }

    fn merge_features(&mut self, features: &BTreeMap<String, FeatureStatistics>) {
        for (name, feature) in features {
            self.features.entry(name.clone()).or_default().merge(feature);
        }
    }
}

impl Partition {
    /// A partition without samples.
    pub(crate) fn empty(key: PartitionKey) -> Self {
        let (features, dense, digest) = (BTreeMap::new(), BTreeMap::new(), Digest::default());
        let (files, buckets) = (Vec::new(), Vec::new());
        Self { key, samples: 0, sessions: 0, files, features, dense, digest, last_time: None, buckets }
    }

    /// Sets the totals to the sums over the buckets.
    pub(crate) fn add_up(&mut self) {
        (self.samples, self.sessions, self.features) = (0, 0, BTreeMap::new());
        self.digest = Digest::default();
        for bucket in &self.buckets {
            self.samples += bucket.samples;
            self.sessions += bucket.sessions;
            for (name, feature) in &bucket.features {
                self.features.entry(name.clone()).or_default().merge(feature);
            }
            self.digest.merge(bucket.digest);
        }
        self.dense = dense::merged(self.buckets.iter().map(|bucket| &bucket.dense));
        self.last_time = self.buckets.iter().filter_map(|bucket| bucket.last_time).max();
    }

    /// The time of the last sample of a bucket, if it has any; of a dataset of so many buckets.
    pub fn last_time(&self, bucket: u32, buckets: u32) -> Option<i64> {
        if buckets == 1 {
            return self.last_time;
        }
        self.buckets.iter().find(|known| known.bucket == bucket)?.last_time
    }
}

impl Snapshot {
    /// The columns of the data files.
    pub fn file_columns(&self) -> SchemaRef {
        with_sample_keys(self.layout.to_arrow(&self.schema), self.sample_keys)
    }

    /// Loads the newest snapshot of the dataset at `location`, a local path or a URL.
    ///
    /// # Errors
    ///
    /// [`Error::NotADataset`] if there is none, [`Error::Snapshot`] if it is of a version that this code does not read
    /// or contradicts itself, [`Error::Storage`] if the storage does not give it.
    pub fn load(location: &Path) -> Result<Self> {
        Self::load_at(location, None)
    }

    /// Loads the snapshot number `at`, or the newest one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSnapshot`] if there is no such snapshot (any more), otherwise as [`load`](Self::load).
    pub fn load_at(location: &Path, at: Option<u64>) -> Result<Self> {
        Self::load_from(&Storage::open(location)?, at)
    }

    /// Loads the snapshot number `at`, or the newest one, of the dataset in `storage`.
    ///
    /// # Errors
    ///
    /// As [`load_at`](Self::load_at).
    pub fn load_from(storage: &Storage, at: Option<u64>) -> Result<Self> {
        let head = match at {
            Some(number) => head_at(storage, number)?,
            None => latest_head(storage)?.ok_or_else(|| not_a_dataset(storage))?,
        };
        head.with_lists(storage)
    }

    /// Loads the newest snapshot without the partitions that its lists have: everything else, statistics included. Its
    /// cost does not grow with the number of partitions.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_head(location: &Path) -> Result<Self> {
        let storage = Storage::open(location)?;
        latest_head(&storage)?.ok_or_else(|| not_a_dataset(&storage))
    }

    /// The number of partitions, those of lists included.
    pub fn partition_count(&self) -> u64 {
        self.partitions.len() as u64 + self.lists.iter().map(|list| list.partitions).sum::<u64>()
    }

    /// The number of data files, those of lists included.
    pub fn file_count(&self) -> u64 {
        let files = self.partitions.iter().map(|partition| partition.files.len() as u64);
        files.chain(self.lists.iter().map(|list| list.files)).sum()
    }

    /// The snapshot that `text` is, without its lists.
    ///
    /// # Errors
    ///
    /// What is wrong with it: a version that this code does not read, a missing or unknown key, a contradiction.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            format_version: u32,
        }
        let version: Versioned = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let version = version.format_version;
        if version != FORMAT_VERSION {
            return Err(format!("format version {version}, this program reads {FORMAT_VERSION}"));
        }
        let snapshot: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        snapshot.check()?;
        Ok(snapshot)
    }

    /// The partitions that `filter` chooses, in order; there may be none.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] as [`PartitionFilter::choice`].
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

    /// The partitions that `filter` chooses, in order.
    ///
    /// # Errors
    ///
    /// As [`matching`](Self::matching), and [`Error::Fault`] if the filter chooses nothing of a dataset that
    /// has partitions.
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

    /// The samples of the partitions that `filter` chooses.
    ///
    /// # Errors
    ///
    /// As [`select`](Self::select).
    pub fn chosen_samples(&self, filter: &PartitionFilter) -> Result<u64> {
        let chosen = self.select(filter)?;
        Ok(chosen.iter().fold(0, |sum, partition| sum.saturating_add(partition.samples)))
    }

    /// The statistics of every dense feature over the partitions that `filter` chooses; `None` if an earlier program
    /// wrote some of their samples, without such statistics. The snapshot must not be a [head](Self::load_head).
    ///
    /// # Errors
    ///
    /// As [`select`](Self::select).
    pub fn dense_statistics(
        &self,
        filter: &PartitionFilter,
    ) -> Result<Option<BTreeMap<String, DenseStatistics>>> {
        let chosen = self.select(filter)?.into_iter().filter(|partition| partition.samples > 0);
        let chosen: Vec<_> = chosen.map(|partition| &partition.dense).collect();
        let all = dense::merged(chosen.iter().copied());
        let is_known = |name: &String| chosen.is_empty() || all.contains_key(name);
        Ok(self.schema.dense.iter().all(is_known).then_some(all))
    }

    /// The files' paths relative to the dataset's folder: the data files in sample order, then the vocabularies.
    pub fn file_paths(&self) -> impl Iterator<Item = &str> {
        let files =
            self.partitions.iter().flat_map(|partition| &partition.files).map(|file| file.path.as_str());
        files.chain(self.vocabularies.values().map(|file| file.path.as_str()))
    }

    /// Checks that samples with these partition columns can be added to the dataset.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset has others, or values of another type in them.
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

    /// Checks what serde cannot: the schema, the totals, the buckets, the partitions' keys, and that no path leaves the
    /// dataset's folder.
    fn check(&self) -> Result<(), String> {
        self.schema.validate().map_err(|error| error.to_string())?;
        if self.buckets == 0 {
            return Err("it has 0 buckets".to_owned());
        }
        self.partitions.iter().try_for_each(|partition| self.check_partition(partition))?;
        let lists = self.lists.iter().map(|list| list.path.as_str());
        if let Some(path) = self.file_paths().chain(lists).find(|path| !stays_inside(path)) {
            return Err(format!("the file path `{path}` leaves the dataset"));
        }
        for feature in self.schema.sparse_features() {
            let unknown = |name: &&String| !self.vocabularies.contains_key(*name);
            if let Some(name) = feature.vocabulary.as_ref().filter(unknown) {
                return Err(format!("the feature `{}` has the unknown vocabulary `{name}`", feature.name));
            }
        }
        let listed = self.lists.iter().map(|list| list.statistics.samples);
        let samples = self.partitions.iter().map(|partition| partition.samples).chain(listed);
        let (samples, total) = (samples.fold(0, u64::saturating_add), self.statistics.samples);
        if samples != total {
            return Err(format!("the statistics count {total} samples, the partitions {samples}"));
        }
        Ok(())
    }

    fn check_partition(&self, partition: &Partition) -> Result<(), String> {
        let Partition { key, samples, files, .. } = partition;
        if let Some(message) = misfit(&self.partition_columns, key) {
            return Err(format!("the partition `{key}` does not fit: {message}"));
        }
        let in_files = files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.samples));
        if in_files != *samples {
            return Err(format!("partition `{key}` has {samples} samples, its files have {in_files}"));
        }
        if let Some(file) = files.iter().find(|file| file.bucket >= self.buckets) {
            return Err(format!(
                "`{}` is of bucket {}, but there are {}",
                file.path, file.bucket, self.buckets
            ));
        }
        if let Some((file, message)) = files
            .iter()
            .find_map(|file| Some((file, row_groups::check(&file.row_groups, file.samples).err()?)))
        {
            return Err(format!("`{}`: {message}", file.path));
        }
        let counted = |of: &DenseStatistics| of.finite().saturating_add(of.not_finite());
        if let Some((name, of)) = partition.dense.iter().find(|(_, of)| counted(of) != *samples) {
            return Err(format!(
                "partition `{key}` has {samples} samples, the statistics of `{name}` count {}",
                counted(of)
            ));
        }
        if !files.is_sorted_by_key(|file| file.bucket) {
            return Err(format!("the files of partition `{key}` are not in the order of their buckets"));
        }
        Ok(())
    }
}

/// Whether a relative path names something below its folder.
pub(crate) fn stays_inside(path: &str) -> bool {
    let path = Path::new(path);
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}
