//! Compares samples from another source, such as the raw logs, with a dataset: the number and digest of the
//! samples of each partition. Features that the files of a partition lack are not compared. The digests of the
//! dataset come from its manifests; [`verify`](super::verify()) compares them with the files. Files whose
//! features were dropped or renamed since are read, because their digests cover other columns.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Int64Type, SchemaRef};
use onefold_storage::Storage;

use super::partition_path;
use crate::conform::conform;
use crate::digest::Digest;
use crate::lists::with_values;
use crate::scan::OpenFiles;
use crate::writer::Counter;
use crate::{Partition, PartitionFilter, PartitionKey, Problem, Result, Snapshot, thread_pool};

/// Counts samples from another source to compare them with a dataset.
#[derive(Debug)]
pub struct ExpectedSamples<'a> {
    storage: Storage,
    snapshot: &'a Snapshot,
    columns: SchemaRef,
    /// The counters, by the features that the files of a partition lack.
    counters: BTreeMap<Vec<String>, Counter>,
    threads: rayon::ThreadPool,
    partitions: BTreeMap<PartitionKey, (u64, Digest)>,
    /// The highest ids of the features in each partition of the dataset, by feature name.
    highest: BTreeMap<PartitionKey, BTreeMap<String, i64>>,
}

impl<'a> ExpectedSamples<'a> {
    /// Creates a counter of samples that are compared with the dataset of `snapshot` in `storage`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if threads cannot be started.
    pub fn new(storage: &Storage, snapshot: &'a Snapshot, threads: usize) -> Result<Self> {
        Ok(Self {
            storage: storage.clone(),
            snapshot,
            columns: snapshot.schema.to_arrow(),
            counters: BTreeMap::new(),
            threads: thread_pool(threads)?,
            partitions: BTreeMap::new(),
            highest: BTreeMap::new(),
        })
    }

    /// Adds samples of a partition, in any order. They have the columns of
    /// [`Schema::to_arrow`](crate::Schema::to_arrow) in any order, with lists as `List` or `ListView` and ids
    /// from the dataset's vocabularies.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the columns differ, [`Error::Snapshot`](crate::Error::Snapshot) and
    /// [`Error::Storage`](crate::Error::Storage) if a manifest
    /// cannot be read.
    pub fn add(&mut self, key: &PartitionKey, samples: &RecordBatch) -> Result<()> {
        let mut samples = conform(samples, &self.columns)?;
        let has_vocabulary =
            self.snapshot.schema.sparse_features().any(|feature| feature.vocabulary.is_some());
        if has_vocabulary && self.snapshot.partitions.iter().any(|partition| partition.key == *key) {
            samples = self.as_known_to(key, &samples)?;
        }
        let (schema, lacks) = (&self.snapshot.schema, self.lacks(key));
        let counter = self.counters.entry(lacks).or_insert_with_key(|lacks| Counter::new(schema, lacks));
        let counts = self.threads.install(|| counter.count(std::slice::from_ref(&samples)));
        let (number, digest) = self.partitions.entry(key.clone()).or_default();
        *number += samples.num_rows() as u64;
        digest.merge(counts.digest);
        Ok(())
    }

    /// Returns the features that the files of a partition lack, according to its first file set. If another
    /// file set of the partition lacks other features, the samples differ from the source.
    fn lacks(&self, key: &PartitionKey) -> Vec<String> {
        if self.snapshot.features_since.is_empty() {
            return Vec::new();
        }
        let partition = self.snapshot.partitions.iter().find(|partition| partition.key == *key);
        let set = partition.and_then(|partition| partition.files.first());
        set.map(|set| set.changes.lacks.clone()).unwrap_or_default()
    }

    /// Replaces ids that vocabularies did not yet have when the partition was written. A vocabulary only
    /// grows, so ids above the partition's highest id were added later and were 0 at that time.
    fn as_known_to(&mut self, key: &PartitionKey, samples: &RecordBatch) -> Result<RecordBatch> {
        if !self.highest.contains_key(key) {
            let filter = PartitionFilter::of_keys([key.clone()]);
            let features = self.snapshot.statistics_of(&self.storage, &filter)?.features;
            let highest = features.into_iter().map(|(name, of)| (name, of.max_id.unwrap_or(0)));
            self.highest.insert(key.clone(), highest.collect());
        }
        let mut highest: BTreeMap<&str, i64> = BTreeMap::new();
        for feature in self.snapshot.schema.sparse_features() {
            let Some(vocabulary) = &feature.vocabulary else { continue };
            let largest = self.highest[key].get(&feature.name).copied().unwrap_or(0);
            let known = highest.entry(vocabulary).or_default();
            *known = (*known).max(largest);
        }
        let mut columns = samples.columns().to_vec();
        for feature in self.snapshot.schema.sparse_features() {
            if let Some(vocabulary) = &feature.vocabulary
                && let Ok(index) = samples.schema_ref().index_of(&feature.name)
            {
                columns[index] = without_ids_above(&columns[index], highest[vocabulary.as_str()])?;
            }
        }
        Ok(RecordBatch::try_new(samples.schema(), columns)?)
    }

    /// Returns the number of samples that were counted.
    pub fn samples(&self) -> u64 {
        self.partitions.values().map(|(samples, _)| samples).sum()
    }

    /// Returns the differences from the dataset in the partitions that `filter` chooses.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) under the conditions of [`Snapshot::matching`];
    /// [`Error::Damaged`](crate::Error::Damaged) and [`Error::Storage`](crate::Error::Storage) if a file whose
    /// features were dropped or renamed cannot be read.
    pub fn problems(&self, filter: &PartitionFilter) -> Result<Vec<Problem>> {
        let mut problems = Vec::new();
        for partition in self.snapshot.matching(filter)? {
            let message = self.difference(partition)?;
            problems.extend(message.map(|message| Problem::new(partition_path(partition), message)));
        }
        for (key, (samples, _)) in &self.partitions {
            if !self.snapshot.partitions.iter().any(|partition| partition.key == *key) {
                let message = format!("the sources have {samples} samples of it, the dataset has none");
                problems.push(Problem::new(key.to_string(), message));
            }
        }
        Ok(problems)
    }

    fn difference(&self, partition: &Partition) -> Result<Option<String>> {
        let of_dataset = partition.samples;
        let Some((samples, digest)) = self.partitions.get(&partition.key) else {
            return Ok(Some(format!("the dataset has {of_dataset} samples of it, the sources have none")));
        };
        if *samples != of_dataset {
            return Ok(Some(format!("the sources have {samples} samples, the dataset has {of_dataset}")));
        }
        let written = self.written(partition)?;
        Ok((*digest != written).then(|| {
            format!(
                "its {of_dataset} samples are not those of the sources: their digests are {written} and {digest}"
            )
        }))
    }

    /// Returns the digest of a partition of the dataset, over the columns that its files have.
    fn written(&self, partition: &Partition) -> Result<Digest> {
        let Self { storage, snapshot, columns, threads, .. } = self;
        let mut digest = Digest::default();
        for set in &partition.files {
            if set.changes.are_digested() {
                set.row_groups.iter().for_each(|row_group| digest.merge(row_group.digest));
                continue;
            }
            let files = OpenFiles::open(storage, snapshot, set)?;
            files.check_columns(&snapshot.columns_of(set))?;
            let counter = Counter::new(&snapshot.schema, &set.changes.lacks);
            let how = (&snapshot.schema, snapshot.layout, snapshot.sample_keys);
            for row_group in 0..files.row_groups() {
                let samples = threads.install(|| files.samples(row_group, how, None))?;
                let samples = conform(&samples, columns)?;
                digest.merge(threads.install(|| counter.count(std::slice::from_ref(&samples))).digest);
            }
        }
        Ok(digest)
    }
}

/// Returns a list column in which ids above `highest` are replaced by 0.
fn without_ids_above(column: &ArrayRef, highest: i64) -> Result<ArrayRef> {
    let (DataType::List(item) | DataType::ListView(item)) = column.data_type() else {
        return Ok(Arc::clone(column));
    };
    with_values(column, item, |ids| {
        let known = |id: i64| if id > highest { 0 } else { id };
        let known: Int64Array = ids.as_primitive::<Int64Type>().unary(known);
        Ok(Arc::new(known) as ArrayRef)
    })
}
