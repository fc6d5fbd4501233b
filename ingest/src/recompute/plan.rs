//! Plans the columns to compute, and the row groups that get them.

use std::collections::{BTreeSet, HashSet};

use onefold_datasets::{FeatureGroup, FileSet, PartitionFilter, PartitionKey, Schema, Snapshot};

use super::Task;
use crate::config::Config;
use crate::decide::{extended, keeps_features};
use crate::error::Result;
use crate::sessionize::EVENT_TIME;

/// The columns that are computed, and the row groups that get them.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// The names of the columns, in the order of the schema.
    pub(super) columns: Vec<String>,
    /// The ranges of buckets with these row groups, in the order of the dataset.
    pub(super) ranges: Vec<RangeToFill<'a>>,
}

/// The row groups to fill in one range of buckets of a partition.
#[derive(Debug)]
pub(super) struct RangeToFill<'a> {
    /// The index of the partition in the snapshot, and its key.
    pub(super) partition: usize,
    pub(super) key: &'a PartitionKey,
    pub(super) range: u32,
    pub(super) sets: Vec<&'a FileSet>,
}

impl<'a> Plan<'a> {
    /// Plans for the partitions of a snapshot that `filter` selects. `schema` is the schema after the commit.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if the filter does not fit the partitions, or selects none.
    pub(super) fn new(
        task: Task,
        snapshot: &'a Snapshot,
        schema: &Schema,
        filter: &PartitionFilter,
    ) -> Result<Self> {
        let chosen: BTreeSet<&PartitionKey> =
            snapshot.select(filter)?.into_iter().map(|partition| &partition.key).collect();
        let further = schema.further_features(&snapshot.schema);
        let mut lacking: BTreeSet<&String> = further.iter().collect();
        let division = snapshot.division();
        let gets_columns =
            |set: &&FileSet| task == Task::Labels || !further.is_empty() || !set.changes.lacks.is_empty();
        let mut ranges = Vec::new();
        for (number, partition) in snapshot.partitions.iter().enumerate() {
            if !chosen.contains(&partition.key) {
                continue;
            }
            for sets in partition.ranges(division) {
                let range = sets.first().map_or(0, |set| division.range_of(set.bucket));
                let sets: Vec<&FileSet> = sets.iter().filter(gets_columns).collect();
                if sets.is_empty() {
                    continue;
                }
                lacking.extend(sets.iter().flat_map(|set| &set.changes.lacks));
                ranges.push(RangeToFill { partition: number, key: &partition.key, range, sets });
            }
        }
        let columns = match task {
            Task::Labels => schema.labels.iter().chain(&schema.weight).cloned().collect(),
            Task::Features => {
                let sparse = schema.sparse_features().map(|feature| &feature.name);
                schema.dense.iter().chain(sparse).filter(|name| lacking.contains(name)).cloned().collect()
            }
        };
        Ok(Self { columns, ranges })
    }

    /// Returns the file sets in the order of the dataset, each with the index of its partition.
    pub(super) fn sets(&self) -> Vec<(usize, &'a FileSet)> {
        let sets = self.ranges.iter().flat_map(|range| range.sets.iter().map(|set| (range.partition, *set)));
        sets.collect()
    }

    /// Returns the number of samples that get columns.
    pub(super) fn samples(&self) -> u64 {
        self.sets().into_iter().fold(0, |sum, (_, set)| sum.saturating_add(set.samples))
    }

    /// Returns the earliest and the latest time of the samples that get columns, in microseconds since 1970.
    pub(super) fn times(&self) -> (i64, i64) {
        let sets = self.sets().into_iter();
        sets.flat_map(|(_, set)| &set.row_groups).fold((i64::MAX, i64::MIN), |(first, last), row_group| {
            (first.min(row_group.first_time), last.max(row_group.last_time))
        })
    }
}

/// Returns the schema of a dataset extended by the additional features of a configuration. If the dataset's groups
/// differ from the configured ones, because they were chosen from the data, the additional features get separate
/// groups. If the configuration changes or lacks features of the dataset, returns its schema, which the dataset's writer
/// refuses.
pub(super) fn with_features(config: &Config, old: &Schema) -> Schema {
    let new = Schema { kept: old.kept.clone(), ..config.schema.clone() };
    let further = new.further_features(old);
    let known = |group: &FeatureGroup| {
        let features = group.features.iter().filter(|feature| !further.contains(&feature.name));
        let known = FeatureGroup { features: features.cloned().collect(), ..group.clone() };
        (!known.features.is_empty()).then_some(known)
    };
    let known: Vec<FeatureGroup> = new.groups.iter().filter_map(known).collect();
    if known == old.groups || !keeps_features(old, config) { new } else { extended(old, &new) }
}

/// Returns the configuration reduced to some columns. A timeline keeps all of its columns, because all of them
/// determine which of its rows are used.
pub(super) fn only(config: &Config, columns: &[String], task: Task) -> Config {
    let mut some = config.clone();
    let is_wanted = |name: &String| columns.contains(name);
    some.timelines.retain(|timeline| timeline.columns.iter().any(|(feature, _)| is_wanted(feature)));
    let made: HashSet<&String> = some
        .timelines
        .iter()
        .flat_map(|timeline| timeline.columns.iter().map(|(feature, _)| feature))
        .collect();
    let schema = &mut some.schema;
    schema.labels.retain(is_wanted);
    schema.weight = schema.weight.take().filter(is_wanted);
    schema.dense.retain(is_wanted);
    for group in &mut schema.groups {
        group.features.retain(|feature| is_wanted(&feature.name) || made.contains(&feature.name));
    }
    schema.groups.retain(|group| !group.features.is_empty());
    let used: HashSet<&String> =
        schema.sparse_features().filter_map(|feature| feature.vocabulary.as_ref()).collect();
    some.vocabularies.retain(|name, _| used.contains(name));
    some.keep.clear();
    if task == Task::Labels && some.join.is_some() {
        some.keep.push(EVENT_TIME.to_owned());
    }
    some
}
