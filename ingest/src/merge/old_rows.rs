//! An operator that reads samples of a dataset. Its input rows name data files, and its output rows are the samples of
//! these files.
//!
//! The file names are rows, so that the machine that receives a row reads the file.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex};

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Float32Array, Int64Array, ListArray, RecordBatch, StringArray, UInt64Array,
};
use datafusion::arrow::compute::{cast, take_arrays};
use datafusion::arrow::datatypes::{
    DataType, Field, Float32Type, Int64Type, Schema as ArrowSchema, SchemaRef, TimestampMicrosecondType,
};
use datafusion::common::ScalarValue;
use datafusion::datasource::memory::MemorySourceConfig;
use datafusion::error::{DataFusionError, Result as EngineResult};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties};
use futures::StreamExt;
use onefold_base::sync::locked;
use onefold_datasets::scan::OpenFiles;
use onefold_datasets::{
    FeatureGroup, FileSet, IdMap, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Snapshot, SparseFeature, TIME_COLUMN,
};
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use crate::cluster::WrittenLists;
use crate::error::{Error, Result, arrow_bug, bug, external};
use crate::operator::{operator_methods, plan_properties, shown_as};

/// The number of batches that are read ahead.
const WAITING: usize = 2;

/// The schema of rows that name files. Each row describes a file set as JSON.
pub(crate) static FILES: LazyLock<SchemaRef> =
    LazyLock::new(|| Arc::new(ArrowSchema::new(vec![Field::new("file", DataType::Utf8, false)])));

/// The columns of a table of a dataset's samples, besides the partition columns, the partition and the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Read {
    /// The time.
    Times,
    /// The hash of the key.
    Keys,
    /// The number of the sample, the hash of the key, the time, the labels and the weight.
    Places,
    /// The time, the key if there is one, the position, floats, kept columns, and lists with the original ids.
    Samples,
}

/// A set of files to read, which contain the columns of the same samples.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OldFile {
    pub(super) partition: usize,
    /// The values of the partition columns.
    pub(super) values: Vec<String>,
    pub(super) files: FileSet,
    /// The number of samples of the range that precede the samples of these files.
    pub(super) before: u64,
}

impl OldFile {
    /// Returns rows that name files.
    pub(crate) fn rows(files: &[Self]) -> EngineResult<RecordBatch> {
        let texts: Vec<String> =
            files.iter().map(serde_json::to_string).collect::<Result<_, _>>().map_err(json)?;
        Ok(RecordBatch::try_new(Arc::clone(&FILES), vec![Arc::new(StringArray::from(texts))])?)
    }

    /// Returns a scan of rows that name files. Each batch becomes a partition of the scan.
    pub(crate) fn scan(rows: Vec<RecordBatch>) -> EngineResult<Arc<dyn ExecutionPlan>> {
        let parts: Vec<_> = rows.into_iter().map(|rows| vec![rows]).collect();
        Ok(MemorySourceConfig::try_new_exec(&parts, Arc::clone(&FILES), None)?)
    }

    /// Returns the files that rows name.
    fn of_rows(rows: &RecordBatch) -> EngineResult<Vec<Self>> {
        // The scan of a file may return another type of texts.
        let texts = cast(rows.column(0), &DataType::Utf8)?;
        let read = |text| serde_json::from_str(text).map_err(json);
        texts.as_string::<i32>().iter().flatten().map(read).collect()
    }
}

/// The specification for reading files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OldRowsSpec {
    /// The dataset: a local path or a URL.
    pub(super) location: PathBuf,
    /// The snapshot, without its partitions.
    pub(super) snapshot: Snapshot,
    pub(super) floats: Vec<String>,
    pub(super) lists: Vec<(FeatureGroup, SparseFeature)>,
    /// The number of columns with positions in timelines. Existing samples have none, so the columns are 0.
    pub(super) positions: usize,
    pub(super) keyed: bool,
    pub(super) read: Read,
}

/// Reads the files that the rows of its input name.
#[derive(Debug)]
pub(crate) struct OldRowsExec {
    spec: Arc<OldRowsSpec>,
    /// The lists, with the vocabularies of their ids.
    lists: WrittenLists,
    files: Arc<dyn ExecutionPlan>,
    /// The originals of the lists' ids, loaded when a partition first needs them.
    originals: Arc<Mutex<Option<Known>>>,
    properties: Arc<PlanProperties>,
}

/// Originals, and the reservation of their memory.
#[derive(Debug)]
struct Known {
    originals: Vec<Option<Originals>>,
    _held: MemoryReservation,
}

impl OldRowsExec {
    /// Makes an operator that reads the samples of `files` as rows of `schema`.
    pub(crate) fn new(
        spec: Arc<OldRowsSpec>,
        lists: WrittenLists,
        schema: &SchemaRef,
        files: Arc<dyn ExecutionPlan>,
    ) -> Self {
        let properties = plan_properties(schema, files.output_partitioning().partition_count());
        Self { spec, lists, files, originals: Arc::default(), properties }
    }

    /// Returns the specification and the lists.
    pub(crate) fn parts(&self) -> (&OldRowsSpec, &WrittenLists) {
        (&self.spec, &self.lists)
    }
}

shown_as!(
    OldRowsExec,
    |operator| ": location={}, read={:?}",
    operator.spec.location.display(),
    operator.spec.read
);

impl ExecutionPlan for OldRowsExec {
    operator_methods!("OldRowsExec", |operator| vec![&operator.files], |files| Ok(Arc::new(Self {
        originals: Arc::clone(&operator.originals),
        ..Self::new(Arc::clone(&operator.spec), operator.lists.clone(), &operator.schema(), files)
    })));

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> EngineResult<SendableRecordBatchStream> {
        let mut files = self.files.execute(partition, Arc::clone(&context))?;
        let mut rows = RecordBatchReceiverStream::builder(self.schema(), WAITING);
        let (spec, lists, schema) = (Arc::clone(&self.spec), self.lists.clone(), self.schema());
        let (known, output, runtime) = (Arc::clone(&self.originals), rows.tx(), Handle::current());
        // The storage blocks its callers.
        rows.spawn_blocking(move || {
            let originals = match spec.read {
                Read::Samples => known_originals(&known, &lists, context.memory_pool())?,
                Read::Times | Read::Keys | Read::Places => Vec::new(),
            };
            let storage = Storage::open(&spec.location).map_err(|error| external(error.into()))?;
            let batch_rows = context.session_config().batch_size();
            let reader = Reader { storage, spec: &spec, batch_rows, originals, schema };
            while let Some(named) = runtime.block_on(files.next()).transpose()? {
                for file in OldFile::of_rows(&named)? {
                    if !reader.read(&file, &output).map_err(external)? {
                        return Ok(());
                    }
                }
            }
            Ok(())
        });
        Ok(rows.build())
    }
}

/// Returns the originals of the ids of `lists`. The first caller loads them, and other callers wait.
fn known_originals(
    known: &Mutex<Option<Known>>,
    lists: &WrittenLists,
    pool: &Arc<dyn MemoryPool>,
) -> EngineResult<Vec<Option<Originals>>> {
    let mut known = locked(known);
    if let Some(known) = &*known {
        return Ok(known.originals.clone());
    }
    let held = MemoryConsumer::new("originals of vocabularies").register(pool);
    let (lists, _vocabularies) = lists.load(pool)?;
    let maps = lists.iter().map(|list| list.vocabulary.as_ref());
    let originals = originals_of(maps, |bytes| held.try_grow(bytes))?;
    *known = Some(Known { originals: originals.clone(), _held: held });
    Ok(originals)
}

/// The originals of a vocabulary by id. The original of id 0 is a value that the vocabulary does not contain.
type Originals = Arc<Vec<i64>>;

/// Returns the originals of the ids of each list; `None` for lists without a vocabulary. `hold` reserves their memory
/// in bytes.
fn originals_of<'m>(
    maps: impl Iterator<Item = Option<&'m Arc<IdMap>>>,
    hold: impl Fn(usize) -> EngineResult<()>,
) -> EngineResult<Vec<Option<Originals>>> {
    let mut known: Vec<(&Arc<IdMap>, Originals)> = Vec::new();
    let mut all = Vec::new();
    for map in maps {
        let Some(map) = map else {
            all.push(None);
            continue;
        };
        let of_map = known.iter().find(|(other, _)| Arc::ptr_eq(other, map)).map(|(_, of)| Arc::clone(of));
        all.push(Some(match of_map {
            Some(of_map) => of_map,
            None => {
                let most = map.pairs().map(|(_, id)| id).max().unwrap_or(0);
                let ids = usize::try_from(most).map_err(|error| DataFusionError::External(error.into()))? + 1;
                hold(8 * ids)?;
                let unknown = (i64::MIN..).find(|original| map.get(*original) == 0).unwrap_or(i64::MIN);
                let mut originals = vec![unknown; ids];
                map.pairs().for_each(|(original, id)| originals[id as usize] = original);
                let originals = Arc::new(originals);
                known.push((map, Arc::clone(&originals)));
                originals
            }
        }));
    }
    Ok(all)
}

/// Converts a text from the name of a partition's folder to the type of its column.
pub(super) fn value_of(text: &str, kind: &DataType) -> Option<ScalarValue> {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
    let typed = cast(&texts, kind).ok().filter(|typed| typed.null_count() == 0)?;
    ScalarValue::try_from_array(&typed, 0).ok()
}

fn json(error: serde_json::Error) -> DataFusionError {
    DataFusionError::External(error.into())
}

/// Reads files.
struct Reader<'a> {
    storage: Storage,
    spec: &'a OldRowsSpec,
    batch_rows: usize,
    /// The originals of the ids of each list; `None` for lists without a vocabulary.
    originals: Vec<Option<Originals>>,
    schema: SchemaRef,
}

/// The channel that takes batches, or an error, for the engine.
type Output = Sender<datafusion::error::Result<RecordBatch>>;

impl Reader<'_> {
    /// Reads a file. Returns `false` if the engine needs no more batches.
    fn read(&self, file: &OldFile, output: &Output) -> Result<bool> {
        let snapshot = &self.spec.snapshot;
        let open = OpenFiles::open(&self.storage, snapshot, &file.files)?;
        open.check_columns(&snapshot.columns_of(&file.files)).map_err(onefold_datasets::Error::from)?;
        let mut before = file.before;
        for group in 0..open.row_groups() {
            let columns = RowGroup::read(self.spec, &open, group, before)?;
            let rows = columns.values.first().map_or(0, |sessions| sessions.len());
            for start in (0..rows).step_by(self.batch_rows) {
                let rows = start..(start + self.batch_rows).min(rows);
                let batch = self.batch(file, &columns, rows)?;
                if output.blocking_send(Ok(batch)).is_err() {
                    return Ok(false);
                }
            }
            before += rows as u64;
        }
        Ok(true)
    }

    /// Returns some rows of a row group.
    fn batch(&self, file: &OldFile, group: &RowGroup, rows: Range<usize>) -> Result<RecordBatch> {
        let mut columns = Vec::with_capacity(self.schema.fields().len());
        for (text, field) in file.values.iter().zip(self.schema.fields()) {
            let value = value_of(text, field.data_type());
            let value = value.ok_or_else(|| bug("a partition has a value of another type"))?;
            columns.push(value.to_array_of_size(rows.len())?);
        }
        columns.push(Arc::new(Int64Array::from(vec![file.partition as i64; rows.len()])));
        // Slices would keep the row group in memory, and operators would count all of it for each batch.
        let picked = UInt64Array::from_iter_values(rows.start as u64..rows.end as u64);
        columns.extend(take_arrays(&group.values, &picked, None).map_err(arrow_bug)?);
        for (lists, originals) in group.lists.iter().zip(&self.originals) {
            let lists = lists.to_array(rows.clone());
            columns.push(match originals {
                None => lists,
                Some(originals) => with_originals(&lists, originals)?,
            });
        }
        RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(arrow_bug)
    }
}

/// The columns of a row group that a table needs after the partition, in the order of the table.
struct RowGroup {
    /// The columns before the lists; the first one is the session.
    values: Vec<ArrayRef>,
    lists: Vec<onefold_datasets::scan::SampleLists>,
}

impl RowGroup {
    /// Reads a row group. `before` is the number of samples of the range before the row group.
    fn read(spec: &OldRowsSpec, file: &OpenFiles, group: usize, before: u64) -> Result<Self> {
        let column = |values| -> ArrayRef { Arc::new(Int64Array::new(values, None)) };
        let integers = |name| Ok::<_, Error>(column(file.numbers::<Int64Type>(group, name)?));
        let times = || Ok::<_, Error>(column(file.numbers::<TimestampMicrosecondType>(group, TIME_COLUMN)?));
        let sessions = integers(SESSION_COLUMN)?;
        let rows = sessions.len();
        let mut read = Self { values: vec![sessions], lists: Vec::new() };
        match spec.read {
            Read::Times => read.values.push(times()?),
            Read::Keys => read.values.push(integers(SAMPLE_KEY_COLUMN)?),
            Read::Places | Read::Samples => {
                let sequence = (before as i64..).take(rows);
                read.values.push(Arc::new(Int64Array::from_iter_values(sequence)));
                if spec.keyed {
                    read.values.push(integers(SAMPLE_KEY_COLUMN)?);
                }
                read.values.push(times()?);
                read.values.extend((0..spec.positions).map(|_| column(vec![0; rows].into())));
                for name in &spec.floats {
                    let floats = file.numbers::<Float32Type>(group, name)?;
                    read.values.push(Arc::new(Float32Array::new(floats, None)));
                }
            }
        }
        if spec.read == Read::Samples {
            for kept in &spec.snapshot.schema.kept {
                read.values.push(file.kept(group, kept)?);
            }
            for (in_group, feature) in &spec.lists {
                read.lists.push(file.lists(group, spec.snapshot.layout, in_group, feature)?);
            }
        }
        Ok(read)
    }
}

/// Converts lists of ids of a vocabulary to lists of their originals.
fn with_originals(lists: &ArrayRef, originals: &[i64]) -> Result<ArrayRef> {
    let lists = lists.as_list::<i32>();
    let ids = lists.values().as_primitive::<Int64Type>();
    let unknown = originals.first().copied().unwrap_or(i64::MIN);
    let original =
        |id: i64| usize::try_from(id).ok().and_then(|id| originals.get(id)).copied().unwrap_or(unknown);
    let ids: Int64Array = ids.unary(original);
    let DataType::List(item) = lists.data_type() else { return Ok(Arc::new(lists.clone())) };
    let lists = ListArray::try_new(Arc::clone(item), lists.offsets().clone(), Arc::new(ids), None);
    Ok(Arc::new(lists.map_err(arrow_bug)?))
}

#[cfg(test)]
mod tests {
    use onefold_datasets::Vocabulary;

    use super::*;

    #[test]
    fn originals_are_those_that_a_vocabulary_numbers() {
        let originals = [7, i64::MIN, 40, -3];
        let counts = originals.iter().enumerate().map(|(place, original)| (*original, 10 - place as u64));
        let map = Vocabulary::from_counts(counts, 1).id_map(None);
        let lists = [Some(&map), None, Some(&map)];
        let mut held = Vec::new();
        let hold = std::cell::RefCell::new(&mut held);
        let all = originals_of(lists.into_iter(), |bytes| {
            hold.borrow_mut().push(bytes);
            Ok(())
        });
        let all = all.unwrap();
        let [Some(first), None, Some(last)] = &all[..] else { panic!("{all:?}") };
        assert_eq!(first[1..], originals);
        assert!(!originals.contains(&first[0]) && Arc::ptr_eq(first, last));
        assert_eq!(held, [8 * 5], "the originals of one vocabulary are in memory once");
    }

    #[test]
    fn values_of_partitions_have_the_type_of_their_column() {
        assert_eq!(value_of("17", &DataType::Int64), Some(ScalarValue::Int64(Some(17))));
        assert_eq!(value_of("2026-01-02", &DataType::Date32), Some(ScalarValue::Date32(Some(20_455))));
        assert_eq!(value_of("a", &DataType::Int64), None);
    }
}
