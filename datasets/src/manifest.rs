//! `manifest.json`: what a dataset consists of. What it does not name is not part of the dataset.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use arrow::datatypes::SchemaRef;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::{Error, PartitionFilter, PartitionKey, Result, Schema, VocabularyFile, commit};

/// The manifest's file name in a dataset directory.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The version this code writes.
const FORMAT_VERSION: u32 = 3;
/// The oldest version this code reads; it has only the layout `rows`, and until 3 partitions have no figures of their
/// own. A reader refuses by number what it cannot read.
const OLDEST_VERSION: u32 = 1;

/// How sparse features are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Every sample carries every list.
    Rows,
    /// In deduplicated groups a list stands only where it changes; [`folded`](crate::folded) says how.
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

/// How samples are ordered within a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The samples of a session stand together, in time order; sessions by start time.
    Session,
    /// As `Session`, but that sessions stand by a hash of what identifies them, so that any run of them is a sample of
    /// all.
    SessionHash,
    /// By time alone, as a service logs them: the baseline that clustering is measured against.
    Arrival,
}

impl Order {
    /// Whether the samples of a session stand together.
    pub fn is_clustered(self) -> bool {
        match self {
            Self::Session | Self::SessionHash => true,
            Self::Arrival => false,
        }
    }
}

/// A dataset's manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub format_version: u32,
    /// Counts the commits to this directory; data files carry it in their names.
    pub generation: u64,
    /// How sparse features are stored.
    pub layout: Layout,
    /// How samples are ordered within a partition.
    pub order: Order,
    /// The columns.
    pub schema: Schema,
    /// The partitions, by key.
    pub partitions: Vec<Partition>,
    /// The vocabularies whose ids features have in place of those of the logs, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vocabularies: BTreeMap<String, VocabularyFile>,
    /// Figures over all partitions.
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
    /// Sessions in the partition; a session never spans two.
    pub sessions: u64,
    /// The files, in sample order.
    pub files: Vec<DataFile>,
    /// Figures by sparse feature; none before version 3.
    #[serde(default)]
    pub features: BTreeMap<String, FeatureStatistics>,
    /// The digest of the samples; none before version 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
}

/// One Parquet file of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path relative to the dataset directory, with `/` between its parts.
    pub path: String,
    /// Samples in the file.
    pub samples: u64,
    /// Row groups in the file.
    pub row_groups: u64,
    /// Size of the file.
    pub bytes_on_disk: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

/// Figures over a whole dataset.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// All samples.
    pub samples: u64,
    /// All sessions.
    pub sessions: u64,
    /// Size of all data files.
    pub bytes_on_disk: u64,
    /// Figures by sparse feature.
    pub features: BTreeMap<String, FeatureStatistics>,
}

/// Figures over a sparse feature of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureStatistics {
    /// Ids over all samples, as if every sample carried its list.
    pub values: u64,
    /// The smallest id, if there is any.
    pub min_id: Option<i64>,
    /// The largest id, if there is any.
    pub max_id: Option<i64>,
    /// The longest list.
    pub max_length: u64,
}

impl FeatureStatistics {
    /// Adds the figures of other samples.
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
    pub fn of(partitions: &[Partition]) -> Self {
        let mut all = Self::default();
        for partition in partitions {
            all.samples += partition.samples;
            all.sessions += partition.sessions;
            all.bytes_on_disk += partition.files.iter().map(|file| file.bytes_on_disk).sum::<u64>();
            for (name, figures) in &partition.features {
                all.features.entry(name.clone()).or_default().merge(figures);
            }
        }
        all
    }
}

impl Manifest {
    /// A manifest of the current version; the statistics are summed from the partitions, which are put in order.
    pub(crate) fn new(
        generation: u64,
        layout: Layout,
        order: Order,
        schema: Schema,
        mut partitions: Vec<Partition>,
        vocabularies: BTreeMap<String, VocabularyFile>,
    ) -> Self {
        partitions.sort_by(|a, b| a.key.cmp(&b.key));
        let statistics = Statistics::of(&partitions);
        let format_version = FORMAT_VERSION;
        Self { format_version, generation, layout, order, schema, partitions, vocabularies, statistics }
    }

    /// Reads the manifest of the dataset in `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::NotADataset`] if there is none, [`Error::Manifest`] if it is of a version that this code does not
    /// read, is not what its version is like, or contradicts itself.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST_FILE);
        let text = match fs_err::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let hint = "give the directory that `onefold-ingest build --out` wrote; if a build was interrupted, run it again";
                return Err(Error::NotADataset { path: directory.to_owned(), hint: hint.to_owned() });
            }
            other => other?,
        };
        Self::parse(&text).map_err(|message| Error::Manifest { path, message })
    }

    /// The manifest that `text` is.
    ///
    /// # Errors
    ///
    /// What is wrong, where `text` is of a version that this code does not read, is not what its version is like, or
    /// contradicts itself.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            format_version: u32,
        }
        let version: Versioned = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if !(OLDEST_VERSION..=FORMAT_VERSION).contains(&version.format_version) {
            return Err(format!(
                "format version {}, this program reads {OLDEST_VERSION} to {FORMAT_VERSION}",
                version.format_version
            ));
        }
        let manifest: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Writes the manifest: the commit of a dataset. Readers see the old one or this one.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if it cannot be written; the previous manifest is then untouched.
    pub(crate) fn store(&self, directory: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self).map_err(std::io::Error::other)?;
        text.push('\n');
        let path = directory.join(MANIFEST_FILE);
        commit::write_atomically(&path, text.as_bytes()).map_err(|error| Error::write(path, error))
    }

    /// The partitions that `filter` chooses, in order.
    ///
    /// # Errors
    ///
    /// [`Error::PartitionFilter`] if the filter names no partition column, or chooses nothing of a dataset
    /// that has samples.
    pub fn select(&self, filter: &PartitionFilter) -> Result<Vec<&Partition>> {
        let mut chosen = Vec::new();
        for partition in &self.partitions {
            if filter.matches(&partition.key)? {
                chosen.push(partition);
            }
        }
        if chosen.is_empty() && !self.partitions.is_empty() {
            let some: Vec<_> = self.partitions.iter().take(5).map(|p| format!("`{}`", p.key)).collect();
            return Err(Error::PartitionFilter {
                filter: filter.to_string(),
                message: "no partition matches".to_owned(),
                hint: format!(
                    "the dataset holds {}{}",
                    some.join(", "),
                    if self.partitions.len() > 5 { ", …" } else { "" }
                ),
            });
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

    /// The files' paths relative to the dataset directory: the data files in sample order, then the vocabularies.
    pub fn file_paths(&self) -> impl Iterator<Item = PathBuf> {
        let files = self.partitions.iter().flat_map(|partition| &partition.files).map(|file| &file.path);
        files.chain(self.vocabularies.values().map(|file| &file.path)).map(PathBuf::from)
    }

    /// Checks what serde cannot: the version's layouts, the schema, the totals, and that no path leaves the directory.
    fn check(&self) -> Result<(), String> {
        if self.format_version == 1 && self.layout != Layout::Rows {
            return Err("format version 1 has only the layout `rows`".to_owned());
        }
        self.schema.validate().map_err(|error| error.to_string())?;
        for partition in &self.partitions {
            let files: u64 = partition.files.iter().fold(0, |sum, file| sum.saturating_add(file.samples));
            if files != partition.samples {
                return Err(format!(
                    "partition `{}` has {} samples, its files have {files}",
                    partition.key, partition.samples
                ));
            }
        }
        for path in self.file_paths() {
            if !path.components().all(|part| matches!(part, std::path::Component::Normal(_))) {
                return Err(format!("the file path `{}` leaves the dataset", path.display()));
            }
        }
        for feature in self.schema.sparse_features() {
            if let Some(name) =
                feature.vocabulary.as_ref().filter(|name| !self.vocabularies.contains_key(*name))
            {
                return Err(format!(
                    "the feature `{}` has the vocabulary `{name}`, which is not there",
                    feature.name
                ));
            }
        }
        let partitions: u64 =
            self.partitions.iter().fold(0, |sum, partition| sum.saturating_add(partition.samples));
        if partitions != self.statistics.samples {
            let total = self.statistics.samples;
            return Err(format!("the statistics count {total} samples, the partitions {partitions}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let schema =
            Schema { labels: vec!["label".into()], weight: None, dense: vec!["age".into()], groups: vec![] };
        let file = DataFile {
            path: "split=a/part-00000-g1.parquet".into(),
            samples: 3,
            row_groups: 1,
            bytes_on_disk: 9,
            sha256: "00".into(),
        };
        let key = PartitionKey::parse("split=a").unwrap();
        let (features, digest) = (BTreeMap::new(), Some(Digest::default()));
        let partition = Partition { key, samples: 3, sessions: 2, files: vec![file], features, digest };
        Manifest::new(1, Layout::Folded, Order::Session, schema, vec![partition], BTreeMap::new())
    }

    #[test]
    fn what_is_stored_is_what_is_loaded() {
        let directory = tempfile::tempdir().unwrap();
        manifest().store(directory.path()).unwrap();
        assert_eq!(Manifest::load(directory.path()).unwrap(), manifest());
    }

    #[test]
    fn other_versions_and_escaping_paths_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(MANIFEST_FILE);
        let refused = |manifest: Manifest| {
            fs_err::write(&path, serde_json::to_string(&manifest).unwrap()).unwrap();
            Manifest::load(directory.path()).unwrap_err().to_string()
        };
        let mut newer = manifest();
        newer.format_version = 4;
        assert!(refused(newer).contains("format version 4, this program reads 1 to 3"));
        let mut older = manifest();
        older.format_version = 0;
        assert!(refused(older).contains("format version 0, this program reads 1 to 3"));
        let mut escaping = manifest();
        escaping.partitions[0].files[0].path = "../secret.parquet".into();
        assert!(refused(escaping).contains("leaves the dataset"));
        let mut escaping = manifest();
        let file = VocabularyFile {
            path: "/etc/ids.parquet".into(),
            entries: 1,
            bytes_on_disk: 1,
            sha256: "00".into(),
        };
        escaping.vocabularies.insert("ids".into(), file);
        assert!(refused(escaping).contains("`/etc/ids.parquet` leaves the dataset"));
        let mut unequal = manifest();
        unequal.partitions[0].files[0].samples = 4;
        assert!(refused(unequal).contains("has 3 samples, its files have 4"));
    }

    #[test]
    fn figures_of_partitions_add_up() {
        let of =
            |values, min_id, max_id, max_length| FeatureStatistics { values, min_id, max_id, max_length };
        let mut all = FeatureStatistics::default();
        for (part, sum) in [
            (of(0, None, None, 0), of(0, None, None, 0)),
            (of(3, Some(-2), Some(5), 2), of(3, Some(-2), Some(5), 2)),
            (of(0, None, None, 0), of(3, Some(-2), Some(5), 2)),
            (of(4, Some(1), Some(9), 1), of(7, Some(-2), Some(9), 2)),
        ] {
            all.merge(&part);
            assert_eq!(all, sum);
        }
    }

    #[test]
    fn version_1_is_read_but_knows_no_folded_layout() {
        let directory = tempfile::tempdir().unwrap();
        let mut first = manifest();
        first.format_version = 1;
        first.store(directory.path()).unwrap();
        let error = Manifest::load(directory.path()).unwrap_err().to_string();
        assert!(error.contains("format version 1 has only the layout `rows`"), "{error}");
        first.layout = Layout::Rows;
        first.store(directory.path()).unwrap();
        assert_eq!(Manifest::load(directory.path()).unwrap(), first);
    }

    #[test]
    fn a_directory_without_a_manifest_is_no_dataset() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Manifest::load(directory.path()), Err(Error::NotADataset { .. })));
    }

    #[test]
    fn a_filter_that_chooses_nothing_names_what_there_is() {
        let error = manifest().select(&PartitionFilter::parse("split=b").unwrap()).unwrap_err().to_string();
        assert!(error.contains("no partition matches") && error.contains("`split=a`"), "{error}");
    }
}
