//! Snapshots: the committed states of a dataset. What a snapshot does not name is not part of the dataset.
//!
//! ```text
//! snapshots/00000012.json      schema, layout, order, buckets; statistics; what changed; the live rows of each manifest
//! manifests/….parquet          the row groups that one commit wrote: files, sessions, times, digests, statistics
//! snapshots/latest             a hint where to look for the newest snapshot; never trusted
//! ```
//!
//! A snapshot is created once and never changed, and so are the files that it names; a reader that holds a snapshot is
//! therefore not disturbed by any commit. [`commit()`] creates the next one, [`vacuum`](crate::vacuum) removes old
//! ones.
//!
//! A commit writes one manifest, of what it wrote, so that its cost does not grow with the commits before it (but for a
//! reference to each of their manifests). Opening a dataset reads the manifests, and no data file.

mod alter;
mod bucket;
mod changes;
mod commit;
#[cfg(test)]
pub(crate) mod editing;
mod files;
mod manifest;
mod manifests;
mod statistics;
mod store;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use arrow::datatypes::SchemaRef;
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
pub use self::store::{SnapshotEntry, history};
pub(crate) use self::store::{head_at, heads_after, latest_head, not_a_dataset, numbers};
use crate::names::snapshot_path;
use crate::partition_column::{described, misfit};
use crate::partition_filter::filter_of;
use crate::schema::with_sample_keys;
use crate::{Buckets, Error, PartitionColumn, PartitionFilter, PartitionKey, Result, Schema, VocabularyFile};

/// The version that this code writes, and the only one that it reads.
pub(crate) const FORMAT_VERSION: u32 = 6;

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
        self != Self::Arrival
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
    /// The number of consecutive buckets in a range, whose samples share files. Range 0 begins with bucket 0.
    pub buckets_in_range: u32,
    /// What makes a session; `None` if the writer did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<Sessions>,
    /// The columns.
    pub schema: Schema,
    /// The snapshots since which features exist, by feature, of those that were added to the dataset later. Only files
    /// that were written before may lack [columns](ColumnChanges) of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub features_since: BTreeMap<String, u64>,
    /// Whether the data files have [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sample_keys: bool,
    /// The partition columns with the types of their values, in their order; empty for a dataset without partitions.
    pub partition_columns: Vec<PartitionColumn>,
    /// The manifests with row groups of the snapshot.
    pub manifests: Vec<ManifestEntry>,
    /// The partitions, by key, as the manifests say. Empty if only the [head](Self::load_head) was loaded: the file of
    /// a snapshot does not have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<Partition>,
    /// The vocabularies that give features their ids, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vocabularies: BTreeMap<String, VocabularyFile>,
    /// Statistics of all samples.
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
    /// schema, layout, order and definition of sessions must be those of the writer, which may have further features.
    /// No dataset there: it is created.
    Append,
    /// As `Append`, but a partition may lose samples.
    Replace,
    /// As `Append`, but of a partition only the ranges of buckets written are replaced, and there are no further
    /// features.
    Merge,
    /// Columns of samples that are there are written into files beside theirs: those of features that the samples lack,
    /// or other values of columns. The dataset must be there; it may get further features, as of `Append`.
    Columns,
    /// Features were dropped or renamed. A snapshot records it, and no writer is told it.
    Alter,
    /// The samples of some users were [removed](crate::forget), and files that had some written anew. The dataset must be
    /// there. No other writer is told it.
    Forget,
    /// Files were [merged](crate::compact), and all samples are there as before. Likewise.
    Compact,
}

impl Commit {
    /// Whether partitions that are not written are kept.
    pub fn keeps_others(self) -> bool {
        !matches!(self, Self::Create | Self::Overwrite)
    }

    /// The name that people read.
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
    /// The division of the sessions into buckets, and of these into ranges.
    pub fn division(&self) -> Buckets {
        Buckets { number: self.buckets, in_range: self.buckets_in_range }
    }

    /// The columns of data files that are written under this schema.
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
        head.with_partitions(storage)
    }

    /// Loads the newest snapshot without its partitions: everything else, statistics included. It reads no manifest.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_head(location: &Path) -> Result<Self> {
        let storage = Storage::open(location)?;
        latest_head(&storage)?.ok_or_else(|| not_a_dataset(&storage))
    }

    /// The same with the partitions of its manifests.
    fn with_partitions(mut self, storage: &Storage) -> Result<Self> {
        self.partitions =
            manifests::partitions(storage, &self.manifests, self.order)?.into_values().collect();
        self.check_partitions()
            .map_err(|message| Error::snapshot(storage.shown(&snapshot_path(self.snapshot)), message))?;
        Ok(self)
    }

    /// The partitions with these keys, as far as there are some. The snapshot may be a head.
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

    /// The snapshot whose file has this `text`, without its partitions.
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
        if !snapshot.partitions.is_empty() {
            return Err("unknown field `partitions`".to_owned());
        }
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

    /// The statistics of the samples in the partitions that `filter` chooses. The snapshot is one of the dataset in
    /// `storage`, and not a [head](Self::load_head).
    ///
    /// # Errors
    ///
    /// As [`select`](Self::select), [`Error::Snapshot`] if a manifest is damaged, [`Error::Storage`] if the storage
    /// does not give it.
    pub fn statistics_of(&self, storage: &Storage, filter: &PartitionFilter) -> Result<SampleStatistics> {
        let chosen = self.select(filter)?.into_iter().map(|partition| partition.key.clone());
        let chosen: BTreeSet<PartitionKey> = chosen.collect();
        let entries: Vec<_> =
            self.manifests.iter().filter(|entry| entry.may_have(&chosen)).cloned().collect();
        manifests::statistics(storage, &self.schema, &entries, |key| chosen.contains(key), true)
    }

    /// The same without the names of the files' columns, which only those who read the files need.
    #[must_use]
    pub fn without_columns(mut self) -> Self {
        let sets = self.partitions.iter_mut().flat_map(|partition| &mut partition.files);
        sets.flat_map(|set| &mut set.files).for_each(|file| file.columns = [].into());
        self
    }

    /// The files' paths relative to the dataset's folder: the data files in sample order, then the vocabularies.
    pub fn file_paths(&self) -> impl Iterator<Item = &str> {
        let sets = self.partitions.iter().flat_map(|partition| &partition.files);
        let files = sets.flat_map(|set| &set.files).map(|file| file.path.as_str());
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

    /// Checks what serde cannot: the schema, the buckets, the vocabularies, and that no path leaves the dataset's
    /// folder.
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

    /// Checks the partitions of the manifests: their keys, buckets and paths, and that there are as many samples as the
    /// snapshot says.
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

/// Whether a relative path names something below its folder.
pub(crate) fn stays_inside(path: &str) -> bool {
    let path = Path::new(path);
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}
