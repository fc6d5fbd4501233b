//! The samples of a dataset as tables of the engine, bucket by bucket.
//!
//! A dataset has no column of users or session keys, so its samples are told apart by the [partition](PARTITION) and
//! [session](OLD_SESSION) that they lie in.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Float32Array, Int64Array, ListArray, RecordBatch, StringArray,
};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{
    DataType, Field, Float32Type, Int64Type, Schema as ArrowSchema, SchemaRef, TimestampMicrosecondType,
};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::ScalarValue;
use datafusion::error::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::streaming::PartitionStream;
use onefold_datasets::scan::OpenFile;
use onefold_datasets::storage::Storage;
use onefold_datasets::{
    DataFile, FeatureGroup, Partition, PartitionKey, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Snapshot,
    SparseFeature, TIME_COLUMN,
};
use tokio::sync::mpsc::Sender;

use crate::cluster::{engine, list_names};
use crate::sessionize::{self, KEY, TIME};
use crate::{Config, Error, Result};

/// The number of a sample's partition in the snapshot: BIGINT.
pub(crate) const PARTITION: &str = "__onefold_partition";
/// The id of the session that a sample has in the dataset: BIGINT.
pub(crate) const OLD_SESSION: &str = "__onefold_old_session";
/// The place of a sample in its bucket, from 0: BIGINT.
pub(crate) const SEQUENCE: &str = "__onefold_sequence";

/// The column with the value of partition column `number` of the configuration.
pub(crate) fn partition_column(number: usize) -> String {
    format!("__onefold_p{number}")
}

/// The column of float `number` of the schema.
pub(crate) fn float_column(number: usize) -> String {
    format!("__onefold_f{number}")
}

/// The column of kept column `number` of the schema.
pub(crate) fn kept_column(number: usize) -> String {
    format!("__onefold_k{number}")
}

/// The column of list `number`, in the order of [`list_names`].
pub(crate) fn list_column(number: usize) -> String {
    format!("__onefold_l{number}")
}

/// The columns that a sample's record has beside time, digest and lists.
pub(crate) fn record_columns(config: &Config) -> Vec<String> {
    let partition = (0..config.partition_columns.len()).map(partition_column);
    let names = [PARTITION, OLD_SESSION, SEQUENCE].map(str::to_owned);
    let key = (!config.samples.key.is_empty()).then(|| KEY.to_owned());
    partition.chain(names).chain(key).collect()
}

/// The columns of a table of a dataset's samples. Partition columns, partition and session are always among them.
#[derive(Debug, Clone)]
pub(crate) enum Read {
    /// The time.
    Times,
    /// The hash of the key.
    Keys,
    /// Time, key if there is one, place, floats, kept columns and lists. For each list the originals of its ids by id, if a
    /// vocabulary numbers them.
    Samples(Vec<Option<Arc<Vec<i64>>>>),
}

/// The dataset that late samples are merged into.
#[derive(Debug)]
pub(crate) struct OldDataset {
    pub(crate) storage: Storage,
    pub(crate) snapshot: Arc<Snapshot>,
    /// The types of the partition columns of the configuration.
    partition_types: Vec<DataType>,
}

impl OldDataset {
    /// The dataset of a snapshot with all of its partitions. `columns` are those of the samples.
    pub(crate) fn new(config: &Config, storage: Storage, snapshot: Snapshot, columns: &ArrowSchema) -> Self {
        let data_type = |name: &String| {
            columns.field_with_name(name).map_or(DataType::Utf8, |field| match field.data_type() {
                DataType::Dictionary(_, values) => (**values).clone(),
                other => other.clone(),
            })
        };
        let partition_types = config.partition_columns.iter().map(data_type).collect();
        Self { storage, snapshot: Arc::new(snapshot), partition_types }
    }

    /// The number of the partition with this key, and the bucket, if there are samples in that.
    pub(crate) fn bucket(&self, key: &PartitionKey, bucket: u32) -> Option<(usize, u32)> {
        let number = self.snapshot.partitions.binary_search_by(|partition| partition.key.cmp(key)).ok()?;
        files(&self.snapshot.partitions[number], bucket).next().map(|_| (number, bucket))
    }

    /// The table of the samples of some buckets of partitions, read by so many streams in batches of about so many
    /// rows.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a partition's value does not have the type that its column has in the samples.
    pub(crate) fn table(
        &self,
        config: &Config,
        buckets: &BTreeSet<(usize, u32)>,
        read: Read,
        (streams, batch_rows): (usize, usize),
    ) -> Result<StreamingTable> {
        let schema = self.columns(config, &read);
        let lists = list_names(config).map(|name| self.feature(name)).collect::<Option<Vec<_>>>();
        let table = Arc::new(Table {
            storage: self.storage.clone(),
            snapshot: Arc::clone(&self.snapshot),
            floats: config.schema.float_columns().map(str::to_owned).collect(),
            lists: lists.unwrap_or_default(),
            positions: sessionize::position_columns(config).len(),
            keyed: !config.samples.key.is_empty(),
            read,
            schema: Arc::clone(&schema),
            batch_rows: batch_rows.max(1),
        });
        let mut parts: Vec<Vec<OldFile>> = vec![Vec::new(); streams.max(1)];
        let mut next = 0;
        for (number, bucket) in buckets {
            let partition = &self.snapshot.partitions[*number];
            let values = self.values(config, partition)?;
            for (file, before) in files(partition, *bucket) {
                let place = next % parts.len();
                parts[place].push(OldFile {
                    partition: *number,
                    values: values.clone(),
                    file: file.clone(),
                    before,
                });
                next += 1;
            }
        }
        let stream = |files| -> Arc<dyn PartitionStream> {
            Arc::new(Files { table: Arc::clone(&table), files: Arc::new(files) })
        };
        Ok(StreamingTable::try_new(schema, parts.into_iter().map(stream).collect())?)
    }

    /// The columns of a table.
    fn columns(&self, config: &Config, read: &Read) -> SchemaRef {
        let integer = |name: &str| Field::new(name, DataType::Int64, false);
        let types = self.partition_types.iter().enumerate();
        let mut fields: Vec<Field> =
            types.map(|(i, kind)| Field::new(partition_column(i), kind.clone(), false)).collect();
        fields.extend([PARTITION, OLD_SESSION].map(integer));
        match read {
            Read::Times => fields.push(integer(TIME)),
            Read::Keys => fields.push(integer(KEY)),
            Read::Samples(lists) => {
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
                fields.extend((0..lists.len()).map(list));
            }
        }
        Arc::new(ArrowSchema::new(fields))
    }

    /// The values of a partition's columns, as far as the configuration names them, each of the type that it has in
    /// logs.
    fn values(&self, config: &Config, partition: &Partition) -> Result<Vec<ScalarValue>> {
        let columns = partition.key.columns().iter().zip(&self.partition_types);
        let value = |((name, text), kind): (&(String, String), &DataType)| -> Result<ScalarValue> {
            let texts: ArrayRef = Arc::new(StringArray::from(vec![text.as_str()]));
            let typed = cast(&texts, kind).ok().filter(|typed| typed.null_count() == 0);
            let typed = typed.ok_or_else(|| Error::Config {
                path: config.path.clone(),
                message: format!(
                    "the dataset has the partition `{}`, but in the logs `{name}` is a {kind}",
                    partition.key
                ),
                hint: "merge with the configuration that the dataset was built with".to_owned(),
            })?;
            Ok(ScalarValue::try_from_array(&typed, 0)?)
        };
        columns.map(value).collect()
    }

    /// A feature of the dataset and its group.
    fn feature(&self, name: &str) -> Option<(FeatureGroup, SparseFeature)> {
        let groups = self.snapshot.schema.groups.iter();
        let mut features =
            groups.flat_map(|group| group.features.iter().map(move |feature| (group, feature)));
        features.find(|(_, f)| f.name == name).map(|(group, feature)| (group.clone(), feature.clone()))
    }
}

/// The files of a bucket of a partition, each with the number of samples of the bucket before it.
fn files(partition: &Partition, bucket: u32) -> impl Iterator<Item = (&DataFile, u64)> {
    let mut before = 0;
    partition.files.iter().filter(move |file| file.bucket == bucket).map(move |file| {
        before += file.samples;
        (file, before - file.samples)
    })
}

/// A file to read.
#[derive(Debug, Clone)]
struct OldFile {
    partition: usize,
    /// The values of the partition columns.
    values: Vec<ScalarValue>,
    file: DataFile,
    /// Samples of the bucket before those of the file.
    before: u64,
}

/// How files are read.
struct Table {
    storage: Storage,
    snapshot: Arc<Snapshot>,
    floats: Vec<String>,
    lists: Vec<(FeatureGroup, SparseFeature)>,
    /// Columns of places in timelines, which old samples do not have: 0.
    positions: usize,
    keyed: bool,
    read: Read,
    schema: SchemaRef,
    batch_rows: usize,
}

/// The files of one stream.
struct Files {
    table: Arc<Table>,
    files: Arc<Vec<OldFile>>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("files", &self.files.len()).finish()
    }
}

impl PartitionStream for Files {
    fn schema(&self) -> &SchemaRef {
        &self.table.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let mut stream = RecordBatchReceiverStream::builder(Arc::clone(&self.table.schema), 2);
        let (table, files, output) = (Arc::clone(&self.table), Arc::clone(&self.files), stream.tx());
        stream.spawn_blocking(move || {
            for file in files.iter() {
                if !table.read(file, &output).map_err(|error| DataFusionError::External(Box::new(error)))? {
                    break;
                }
            }
            Ok(())
        });
        stream.build()
    }
}

/// A batch for the engine, or an error.
type Output = Sender<datafusion::error::Result<RecordBatch>>;

impl Table {
    /// Reads a file; `false` if the engine does not want more.
    fn read(&self, file: &OldFile, output: &Output) -> Result<bool> {
        let open = OpenFile::open(&self.storage, &file.file)?;
        open.check_columns(&self.snapshot.file_columns()).map_err(onefold_datasets::Error::from)?;
        let mut before = file.before;
        for group in 0..open.row_groups() {
            let columns = RowGroup::read(self, &open, group)?;
            let rows = columns.sessions.len();
            for start in (0..rows).step_by(self.batch_rows) {
                let rows = start..(start + self.batch_rows).min(rows);
                let batch = self.batch(file, &columns, rows, before)?;
                if output.blocking_send(Ok(batch)).is_err() {
                    return Ok(false);
                }
            }
            before += rows as u64;
        }
        Ok(true)
    }

    /// Some rows of a row group. `before` it are so many samples of the bucket.
    fn batch(
        &self,
        file: &OldFile,
        group: &RowGroup,
        rows: std::ops::Range<usize>,
        before: u64,
    ) -> Result<RecordBatch> {
        let integers =
            |values: &[i64]| -> ArrayRef { Arc::new(Int64Array::from(values[rows.clone()].to_vec())) };
        let same = |value: i64| -> ArrayRef { Arc::new(Int64Array::from(vec![value; rows.len()])) };
        let mut columns = Vec::with_capacity(self.schema.fields().len());
        for value in &file.values {
            columns.push(value.to_array_of_size(rows.len())?);
        }
        columns.extend([same(file.partition as i64), integers(&group.sessions)]);
        if let Read::Samples(originals) = &self.read {
            let first = before as i64;
            let sequence = rows.clone().map(|row| first + row as i64);
            columns.push(Arc::new(Int64Array::from_iter_values(sequence)));
            columns.extend(group.keys.as_ref().map(|keys| integers(keys)));
            columns.extend(group.times.as_ref().map(|times| integers(times)));
            columns.extend((0..self.positions).map(|_| same(0)));
            for floats in &group.floats {
                columns.push(Arc::new(Float32Array::from(floats[rows.clone()].to_vec())));
            }
            columns.extend(group.kept.iter().map(|values| values.slice(rows.start, rows.len())));
            for (lists, originals) in group.lists.iter().zip(originals) {
                let lists = lists.to_array(rows.clone());
                columns.push(match originals {
                    None => lists,
                    Some(originals) => with_originals(&lists, originals)?,
                });
            }
        } else {
            columns.extend(group.times.as_ref().or(group.keys.as_ref()).map(|values| integers(values)));
        }
        RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(engine)
    }
}

/// The columns of a row group that a table has.
struct RowGroup {
    sessions: Vec<i64>,
    times: Option<Vec<i64>>,
    keys: Option<Vec<i64>>,
    floats: Vec<Vec<f32>>,
    kept: Vec<ArrayRef>,
    lists: Vec<onefold_datasets::scan::SampleLists>,
}

impl RowGroup {
    fn read(table: &Table, file: &OpenFile, group: usize) -> Result<Self> {
        let sessions = file.numbers::<Int64Type>(group, SESSION_COLUMN)?.to_vec();
        let (floats, kept, lists) = (Vec::new(), Vec::new(), Vec::new());
        let mut columns = Self { sessions, times: None, keys: None, floats, kept, lists };
        if !matches!(table.read, Read::Keys) {
            columns.times = Some(file.numbers::<TimestampMicrosecondType>(group, TIME_COLUMN)?.to_vec());
        }
        let is_whole = matches!(table.read, Read::Samples(_));
        if matches!(table.read, Read::Keys) || is_whole && table.keyed {
            columns.keys = Some(file.numbers::<Int64Type>(group, SAMPLE_KEY_COLUMN)?.to_vec());
        }
        if is_whole {
            for name in &table.floats {
                columns.floats.push(file.numbers::<Float32Type>(group, name)?.to_vec());
            }
            for column in &table.snapshot.schema.kept {
                columns.kept.push(file.kept(group, column)?);
            }
            for (in_group, feature) in &table.lists {
                columns.lists.push(file.lists(group, table.snapshot.layout, in_group, feature)?);
            }
        }
        Ok(columns)
    }
}

/// Lists of ids of a vocabulary as lists of their originals.
fn with_originals(lists: &ArrayRef, originals: &[i64]) -> Result<ArrayRef> {
    let lists = lists.as_list::<i32>();
    let ids = lists.values().as_primitive::<Int64Type>();
    let unknown = originals.first().copied().unwrap_or(i64::MIN);
    let original =
        |id: i64| usize::try_from(id).ok().and_then(|id| originals.get(id)).copied().unwrap_or(unknown);
    let ids: Int64Array = ids.unary(original);
    let DataType::List(item) = lists.data_type() else { return Ok(Arc::new(lists.clone())) };
    let lists = ListArray::try_new(Arc::clone(item), lists.offsets().clone(), Arc::new(ids), None);
    Ok(Arc::new(lists.map_err(engine)?))
}
