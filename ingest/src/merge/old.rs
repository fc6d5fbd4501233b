//! Provides the samples of a dataset as tables of the engine, by ranges of buckets.
//!
//! A dataset has no columns for users or session keys, so its samples are identified by their partition and session.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use datafusion::physical_plan::ExecutionPlan;
use onefold_datasets::{FeatureGroup, FileSet, Partition, PartitionKey, Snapshot, SparseFeature};

use super::old_rows::{OldFile, OldRowsExec, OldRowsSpec, Read, value_of};
use crate::cluster::{
    OLD_SESSION, PARTITION, SEQUENCE, WrittenLists, float_column, kept_column, list_column, list_names,
    partition_column,
};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::sessionize::{self, KEY, TIME};

/// The dataset into which late samples are merged.
#[derive(Debug)]
pub(crate) struct OldDataset {
    location: PathBuf,
    pub(crate) snapshot: Snapshot,
    /// The types of the partition columns of the configuration.
    partition_types: Vec<DataType>,
}

impl OldDataset {
    /// Makes the description of a dataset with all of its partitions. `columns` are the columns of the samples.
    pub(crate) fn new(config: &Config, location: &Path, snapshot: Snapshot, columns: &ArrowSchema) -> Self {
        let data_type = |name: &String| {
            columns.field_with_name(name).map_or(DataType::Utf8, |field| match field.data_type() {
                DataType::Dictionary(_, values) => (**values).clone(),
                other => other.clone(),
            })
        };
        let partition_types = config.partition_columns.iter().map(data_type).collect();
        Self { location: location.to_owned(), snapshot, partition_types }
    }

    /// Returns the index of the partition with this key, and the range of buckets, if the partition has samples in the
    /// range.
    pub(crate) fn range(&self, key: &PartitionKey, range: u32) -> Option<(usize, u32)> {
        let number = self.snapshot.partitions.binary_search_by(|partition| partition.key.cmp(key)).ok()?;
        self.of_range(number, range).next().map(|_| (number, range))
    }

    /// Returns the files of a range of buckets of partition `number`.
    pub(super) fn of_range(&self, number: usize, range: u32) -> impl Iterator<Item = &FileSet> {
        self.snapshot.partitions[number].of_range(self.snapshot.division().of_range(range))
    }

    /// Returns the time of the last sample in a range of buckets of partition `number`, if there are any samples.
    pub(crate) fn last_time(&self, number: usize, range: u32) -> Option<i64> {
        let row_groups = self.of_range(number, range).flat_map(|set| &set.row_groups);
        row_groups.map(|row_group| row_group.last_time).max()
    }

    /// Returns the specification for reading samples, and the columns of the result.
    pub(crate) fn rows(&self, config: &Config, read: Read) -> (OldRowsSpec, SchemaRef) {
        let lists = list_names(config).map(|name| self.feature(name)).collect::<Option<Vec<_>>>();
        let spec = OldRowsSpec {
            location: self.location.clone(),
            snapshot: Snapshot { partitions: Vec::new(), manifests: Vec::new(), ..self.snapshot.clone() },
            floats: floats(config, read).map(str::to_owned).collect(),
            lists: lists.unwrap_or_default(),
            positions: if read == Read::Places { 0 } else { sessionize::position_columns(config).len() },
            keyed: !config.samples.key.is_empty(),
            read,
        };
        (spec, self.columns(config, read))
    }

    /// Divides the files of some ranges of partitions among several readers.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a partition's value cannot be converted to the type of its column in the samples.
    pub(crate) fn files(
        &self,
        config: &Config,
        ranges: &BTreeSet<(usize, u32)>,
        readers: usize,
    ) -> Result<Vec<Vec<OldFile>>> {
        let of_range = |&(number, range): &(usize, u32)| {
            numbered(self.of_range(number, range).map(move |files| (number, files)))
        };
        self.divide(config, ranges.iter().flat_map(of_range), readers)
    }

    /// Divides files among at most `readers` readers. Each set of files is given with the index of its partition, and
    /// the number of the samples that precede it.
    fn divide<'s>(
        &self,
        config: &Config,
        sets: impl Iterator<Item = (usize, &'s FileSet, u64)>,
        readers: usize,
    ) -> Result<Vec<Vec<OldFile>>> {
        let readers = readers.max(1);
        let mut parts: Vec<Vec<OldFile>> = vec![Vec::new(); readers];
        for (place, (partition, files, before)) in sets.enumerate() {
            let values = self.values(config, &self.snapshot.partitions[partition])?;
            parts[place % readers].push(OldFile { partition, values, files: files.clone(), before });
        }
        parts.retain(|files| !files.is_empty());
        Ok(parts)
    }

    /// Returns the plan that reads the columns of [`Read::Places`] from some file sets, each given with the index of
    /// its partition. Samples are numbered from 0 in the order of `sets`.
    pub(crate) fn places(
        &self,
        config: &Config,
        sets: &[(usize, &FileSet)],
        readers: usize,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let parts = self.divide(config, numbered(sets.iter().copied()), readers)?;
        let (spec, schema) = self.rows(config, Read::Places);
        let rows = parts.iter().map(|files| OldFile::rows(files)).collect::<Result<Vec<_>, _>>()?;
        let lists = WrittenLists::Here(Vec::new());
        Ok(Arc::new(OldRowsExec::new(Arc::new(spec), lists, &schema, OldFile::scan(rows)?)))
    }

    /// Returns the columns of a table.
    fn columns(&self, config: &Config, read: Read) -> SchemaRef {
        let integer = |name: &str| Field::new(name, DataType::Int64, false);
        let types = self.partition_types.iter().enumerate();
        let mut fields: Vec<Field> =
            types.map(|(i, kind)| Field::new(partition_column(i), kind.clone(), false)).collect();
        fields.extend([PARTITION, OLD_SESSION].map(integer));
        match read {
            Read::Times => fields.push(integer(TIME)),
            Read::Keys => fields.push(integer(KEY)),
            Read::Places => {
                fields.extend([SEQUENCE, KEY, TIME].map(integer));
                let floats = 0..floats(config, read).count();
                fields.extend(floats.map(|i| Field::new(float_column(i), DataType::Float32, false)));
            }
            Read::Samples => {
                fields.push(integer(SEQUENCE));
                fields.extend((!config.samples.key.is_empty()).then(|| integer(KEY)));
                fields.push(integer(TIME));
                fields.extend(sessionize::position_columns(config).iter().map(|name| integer(name)));
                let floats = 0..config.schema.float_columns().count();
                fields.extend(floats.map(|i| Field::new(float_column(i), DataType::Float32, false)));
                let kept = self.snapshot.schema.kept.iter().enumerate();
                fields.extend(kept.map(|(i, kept)| Field::new(kept_column(i), kept.kind.data_type(), true)));
                let item = Arc::new(Field::new("element", DataType::Int64, false));
                let list = |i| Field::new(list_column(i), DataType::List(Arc::clone(&item)), false);
                fields.extend((0..list_names(config).count()).map(list));
            }
        }
        Arc::new(ArrowSchema::new(fields))
    }

    /// Returns the values of a partition in the partition columns of the configuration, after a check that they can be
    /// converted to the types in the logs.
    fn values(&self, config: &Config, partition: &Partition) -> Result<Vec<String>> {
        let columns = partition.key.columns().iter().zip(&self.partition_types);
        let value = |((name, text), kind): (&(String, String), &DataType)| match value_of(text, kind) {
            Some(_) => Ok(text.clone()),
            None => Err(Error::config(
                &config.path,
                format!(
                    "the dataset has the partition `{}`, but in the logs `{name}` is a {kind}",
                    partition.key
                ),
                "use the configuration that the dataset was built with",
            )),
        };
        columns.map(value).collect()
    }

    /// Returns a feature of the dataset and its group.
    fn feature(&self, name: &str) -> Option<(FeatureGroup, SparseFeature)> {
        let mut features = self.snapshot.schema.grouped_features();
        features.find(|(_, f)| f.name == name).map(|(group, feature)| (group.clone(), feature.clone()))
    }
}

/// Adds to each set of files the number of the samples that precede it.
fn numbered<'s>(
    sets: impl Iterator<Item = (usize, &'s FileSet)>,
) -> impl Iterator<Item = (usize, &'s FileSet, u64)> {
    sets.scan(0, |before, (partition, files)| {
        let first = *before;
        *before += files.samples;
        Some((partition, files, first))
    })
}

/// Returns the float columns to read. [`Read::Places`] reads labels and weights, but no dense features.
fn floats(config: &Config, read: Read) -> impl Iterator<Item = &str> {
    let dense = if read == Read::Places { config.schema.dense.len() } else { 0 };
    let all = config.schema.float_columns().count();
    config.schema.float_columns().take(all - dense)
}
