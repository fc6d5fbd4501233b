//! The operator that folds samples. Its input is samples in the order of the log; its output is delta records,
//! followed by the totals of the samples.
//!
//! ```text
//! samples, part 0 ──convert──┐            ┌─▶ worker 0: sessions whose hash is 0 ─▶ records, then totals
//! samples, part 1 ──convert──┼─ every ────┼─▶ worker 1: sessions whose hash is 1 ─▶ records, then totals
//! samples, part 2 ──convert──┘  batch     └─▶ …
//! ```
//!
//! All workers share the batches that have samples of their sessions, and each gets the indexes of its rows, so
//! lists are not copied on the way. If the parts of the samples are on several machines, each part is folded
//! independently.
//!
//! A [`FoldExec`] consists of a [`FoldSpec`], the memory budget for counts, and its input. The totals of its
//! samples are rows that follow the records ([`totals`](super::totals)).

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use datafusion::common::runtime::JoinSet;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{Count, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties};
use futures::StreamExt;
use onefold_base::sync::locked;
use onefold_datasets::{CountBudget, TextIds};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::convert::{ColumnNames, Converted, Converter};
use super::counts::ColumnCounts;
use super::encode::{ChainNumbers, DeltaEncoder, EncoderOptions};
use super::record_batches::RecordBatches;
use super::statistics::StatisticsOptions;
use crate::error::{Error, external};
use crate::operator::{operator_methods, plan_properties, shown_as};
use crate::planned::PlannedTable;
use crate::profile::stage;
use crate::sessionize::{TIME, TOTALS};
use crate::spilling_join::in_context;

/// The high and the low half of a sample's digest. They order samples with equal times and equal order columns.
pub(crate) const DIGEST: [&str; 2] = ["__onefold_digest_high", "__onefold_digest_low"];
/// The column of the records, which [`record`](super::record) writes.
pub(crate) const RECORD: &str = "__onefold_record";

/// The maximum number of batches that wait for a worker or for the engine.
const WAITING: usize = 2;
/// The bounds of the size of an input batch, in bytes. One row of a log can contain thousands of ids, so batches
/// must be limited. But small batches are slow: a log has many columns, each with a dictionary, and a reader moves
/// to the next column before it has used the data that it loaded into the processor's caches.
const BATCH_BYTES: RangeInclusive<usize> = 1 << 20..=16 << 20;
/// Within these bounds, a batch takes 1/16 of the memory for a worker's sessions, because several batches of each
/// worker are read, joined, converted and encoded at the same time.
const BATCH_PART: usize = 16;
/// The bounds of the number of rows of an input batch.
const BATCH_ROWS: RangeInclusive<usize> = 16..=8192;
/// The metrics that count the samples that were read, and their size in memory in bytes.
const SAMPLES: &str = "samples";
const BYTES: &str = "bytes";

/// Options of the folding of samples.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FoldSpec {
    pub(super) names: ColumnNames,
    pub(super) encoder: EncoderOptions,
    pub(super) statistics: StatisticsOptions,
    /// The number of workers that share the samples of all parts of the input. If `None`, each part is folded
    /// independently.
    pub(super) workers: Option<usize>,
    /// The size of a row of the input, in bytes.
    pub(super) row_bytes: u64,
}

impl FoldSpec {
    /// Whether ids are counted for vocabularies.
    pub(crate) fn counts_ids(&self) -> bool {
        !self.statistics.vocabularies.is_empty()
    }

    /// Returns the number of rows of an input batch.
    fn batch_rows(&self) -> usize {
        let bytes = (self.encoder.state_bytes / BATCH_PART).clamp(*BATCH_BYTES.start(), *BATCH_BYTES.end());
        (bytes / self.row_bytes.max(1) as usize).clamp(*BATCH_ROWS.start(), *BATCH_ROWS.end())
    }

    /// Sets the memory limit for the last samples of a worker's sessions, in bytes, and the budget for the texts of
    /// vocabularies.
    pub(crate) fn set_memory(&mut self, state_bytes: usize, budget: &CountBudget) {
        self.encoder.state_bytes = state_bytes;
        let mut texts = BTreeMap::new();
        self.names.lists.iter_mut().for_each(|(_, form)| form.with_texts(&mut texts, budget));
    }

    /// Returns for each vocabulary the texts that must be sent along with its counts. These are needed only if the
    /// counts leave this process.
    fn texts_of_counts(&self) -> Vec<Option<Arc<TextIds>>> {
        let mut texts = vec![None; self.statistics.vocabularies.len()];
        if self.workers.is_none() {
            for ((_, form), vocabulary) in self.names.lists.iter().zip(&self.statistics.vocabulary_of) {
                if let Some(place) = vocabulary.and_then(|vocabulary| texts.get_mut(vocabulary)) {
                    *place = form.texts().cloned();
                }
            }
        }
        texts
    }
}

/// Folds the samples of its input.
#[derive(Debug)]
pub(crate) struct FoldExec {
    fold: Arc<Fold>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

/// The state that the workers share.
#[derive(Debug)]
struct Fold {
    spec: FoldSpec,
    /// The memory budget for the counts of vocabularies.
    budget: CountBudget,
    input: Arc<dyn ExecutionPlan>,
    schema: SchemaRef,
    started: Mutex<Option<Started>>,
    /// The number of samples that were read, and their size in memory in bytes. All partitions use the same
    /// counters, because progress is reported several times a second and must not sum over the partitions each
    /// time.
    samples: Count,
    bytes: Count,
}

/// A message to a worker.
#[derive(Debug)]
enum Told {
    /// A batch, and the indexes of the worker's rows in it.
    Samples(Arc<Converted>, Vec<u32>),
    /// Counts of the columns of a part of the input. They are sent to one worker only.
    Columns(ColumnCounts),
}

type Message = Result<Told>;

/// The queues that workers have not taken yet, and the tasks that fill them.
#[derive(Debug)]
struct Started {
    queues: Vec<Option<Receiver<Message>>>,
    readers: Option<JoinSet<()>>,
}

impl FoldExec {
    /// Creates the operator that folds the samples of `input`. Counts of ids take their memory from `budget`.
    ///
    /// # Errors
    ///
    /// An error if the input does not have the key columns.
    pub(crate) fn new(spec: FoldSpec, budget: CountBudget, input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        let schema = records_schema(&spec.names, &input.schema())?;
        let parts = spec.workers.unwrap_or_else(|| input.output_partitioning().partition_count());
        let properties = plan_properties(&schema, parts);
        let metrics = ExecutionPlanMetricsSet::new();
        let count = |name| MetricBuilder::new(&metrics).global_counter(name);
        let (samples, bytes) = (count(SAMPLES), count(BYTES));
        let fold = Fold { spec, budget, input, schema, started: Mutex::new(None), samples, bytes };
        Ok(Self { fold: Arc::new(fold), properties, metrics })
    }

    /// Returns the options of the folding.
    pub(crate) fn spec(&self) -> &FoldSpec {
        &self.fold.spec
    }

    /// Returns the number of samples that were read, and their size in memory in bytes.
    pub(super) fn read(&self) -> (u64, u64) {
        (self.fold.samples.value() as u64, self.fold.bytes.value() as u64)
    }

    /// Returns a table of its rows that is a leaf of the plans that read it, because the plan of the samples is
    /// already optimised.
    pub(super) fn table(self: &Arc<Self>) -> PlannedTable {
        PlannedTable(Arc::clone(self) as _)
    }
}

shown_as!(
    FoldExec,
    |operator| ": identity={:?}, workers={:?}",
    operator.fold.spec.names.identity,
    operator.fold.spec.workers
);

impl ExecutionPlan for FoldExec {
    operator_methods!("FoldExec", |operator| vec![&operator.fold.input], |input| Ok(Arc::new(Self::new(
        operator.fold.spec.clone(),
        operator.fold.budget.clone(),
        input
    )?)));

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let mut stream = RecordBatchReceiverStream::builder(Arc::clone(&self.fold.schema), WAITING);
        let (fold, output) = (Arc::clone(&self.fold), stream.tx());
        let work = async move {
            let (queue, readers) = fold.start(partition, &context)?;
            let worked = Arc::clone(&fold).work(partition, queue, output).await;
            // One worker owns the reader tasks. After a success they have ended; `join_all` propagates their
            // panics.
            if worked.is_ok()
                && let Some(readers) = readers
            {
                readers.join_all().await;
            }
            worked
        };
        stage("fold samples", || stream.spawn(work));
        Ok(stream.build())
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

impl Fold {
    /// Returns the queue of a worker. If workers share the input, the first call starts the tasks that fill all
    /// queues and returns them too.
    fn start(
        self: &Arc<Self>,
        worker: usize,
        context: &Arc<TaskContext>,
    ) -> Result<(Receiver<Message>, Option<JoinSet<()>>)> {
        let config = context.session_config().clone().with_batch_size(self.spec.batch_rows());
        let context = in_context(context, config, context.runtime_env());
        let read = |readers: &mut JoinSet<()>, part: usize, workers: Vec<Sender<Message>>| {
            let work = Arc::clone(self).read(part, workers, Arc::clone(&context));
            stage("convert samples", || readers.spawn(work));
        };
        let Some(workers) = self.spec.workers else {
            let (sender, queue) = channel(WAITING);
            let mut readers = JoinSet::new();
            read(&mut readers, worker, vec![sender]);
            return Ok((queue, Some(readers)));
        };
        let mut started = locked(&self.started);
        let started = started.get_or_insert_with(|| {
            let (senders, queues): (Vec<_>, Vec<_>) = (0..workers).map(|_| channel(WAITING)).unzip();
            let mut readers = JoinSet::new();
            for part in 0..self.input.output_partitioning().partition_count() {
                read(&mut readers, part, senders.clone());
            }
            Started { queues: queues.into_iter().map(Some).collect(), readers: Some(readers) }
        });
        match started.queues[worker].take() {
            Some(queue) => Ok((queue, started.readers.take())),
            None => datafusion::common::internal_err!("the samples are read twice"),
        }
    }

    /// Converts one part of the input for all workers. An error is sent to the first worker.
    async fn read(self: Arc<Self>, part: usize, workers: Vec<Sender<Message>>, context: Arc<TaskContext>) {
        if let Err(error) = self.convert(part, &workers, context).await {
            // If the worker has stopped, the query has ended already.
            let _ = workers[0].send(Err(error)).await;
        }
    }

    async fn convert(
        &self,
        part: usize,
        workers: &[Sender<Message>],
        context: Arc<TaskContext>,
    ) -> Result<()> {
        let converter = Converter::new(self.spec.names.clone(), &self.input.schema()).map_err(external)?;
        let mut batches = self.input.execute(part, context)?;
        let mut columns = ColumnCounts::default();
        // Usually the worker that receives a batch last frees it. If that were always the same worker of 64, it
        // would take half as long again as the others. So every batch starts with another worker.
        let mut first = part % workers.len();
        while let Some(batch) = batches.next().await {
            let batch = batch?;
            self.samples.add(batch.num_rows());
            self.bytes.add(batch.get_array_memory_size());
            let converted = Arc::new(converter.convert(&batch).map_err(|error| self.failed(error))?);
            columns.merge(&converted.counts);
            let mut rows = converted.rows_by_worker(workers.len());
            rows.rotate_left(first);
            let shares = workers.iter().cycle().skip(first).zip(rows);
            for (worker, rows) in shares.filter(|(_, rows)| !rows.is_empty()) {
                let told = Told::Samples(Arc::clone(&converted), rows);
                if worker.send(Ok(told)).await.is_err() {
                    return Ok(());
                }
            }
            first = (first + 1) % workers.len();
        }
        if self.spec.statistics.values && columns.samples > 0 {
            // The send fails if the worker has stopped; then the counts are not needed.
            let _ = workers[part % workers.len()].send(Ok(Told::Columns(columns))).await;
        }
        Ok(())
    }

    /// Wraps an error for the engine. If the memory budget for counts is that of an executor, the message says so.
    fn failed(&self, error: Error) -> DataFusionError {
        external(match error {
            Error::Dataset(onefold_datasets::Error::TooManyIds { feature, distinct, .. })
                if self.spec.workers.is_none() =>
            {
                Error::engine(
                    format!(
                        "the memory of an executor does not suffice to count the ids of `{feature}` for a vocabulary: its \
                         tasks have counted {distinct} distinct ones or more"
                    ),
                    "raise `--memory-limit` of the executors, an eighth of which is for such counts, or leave this \
                     feature's ids as they are (remove its `vocabulary`)",
                )
            }
            other => other,
        })
    }

    /// Encodes the samples of a worker.
    async fn work(
        self: Arc<Self>,
        number: usize,
        mut queue: Receiver<Message>,
        output: Sender<Result<RecordBatch>>,
    ) -> Result<()> {
        let FoldSpec { encoder, statistics, workers, .. } = &self.spec;
        let (worker, chains) = match workers {
            Some(_) => (number as u64, ChainNumbers::of_worker(encoder.first_worker + number)),
            // Other workers are not known here, so the numbers are random.
            None => (random_number(), ChainNumbers::random()),
        };
        let mut encoder =
            DeltaEncoder::new(encoder.clone(), (statistics, &self.budget), &self.schema, chains)
                .map_err(external)?;
        while let Some(message) = queue.recv().await {
            match message? {
                Told::Samples(batch, rows) => {
                    encoder.encode(&batch, &rows).map_err(|error| self.failed(error))?
                }
                Told::Columns(columns) => encoder.columns(&columns),
            }
            if !give(encoder.records(), &output).await {
                return Ok(());
            }
        }
        while encoder.forget_some().map_err(|error| self.failed(error))? {
            if !give(encoder.records(), &output).await {
                return Ok(());
            }
        }
        let (totals, mut records) = encoder.finish();
        let parts = totals.into_parts(self.spec.texts_of_counts()).map_err(external)?;
        for (place, part) in (0..).zip(parts) {
            records.push_totals(worker, place, &part.map_err(external)?).map_err(external)?;
            if !give(&mut records, &output).await {
                return Ok(());
            }
        }
        records.complete_batch().map_err(external)?;
        give(&mut records, &output).await;
        Ok(())
    }
}

fn random_number() -> u64 {
    RandomState::new().hash_one(0)
}

/// Sends the complete batches to the engine. Returns `false` if the engine has stopped reading.
async fn give(records: &mut RecordBatches, output: &Sender<Result<RecordBatch>>) -> bool {
    for records in records.take() {
        if output.send(Ok(records)).await.is_err() {
            return false;
        }
    }
    true
}

/// Returns the schema of records and totals. `samples` is the schema of the samples.
pub(super) fn records_schema(names: &ColumnNames, samples: &ArrowSchema) -> Result<SchemaRef> {
    let mut fields = Vec::new();
    for key in &names.keys {
        // Totals have no keys.
        fields.push(Arc::new(samples.field_with_name(key)?.clone().with_nullable(true)));
    }
    fields.push(Arc::new(Field::new(TIME, DataType::Int64, false)));
    fields.extend(DIGEST.map(|half| Arc::new(Field::new(half, DataType::UInt64, false))));
    fields.push(Arc::new(Field::new(RECORD, DataType::Binary, false)));
    fields.push(Arc::new(Field::new(TOTALS, DataType::Boolean, false)));
    Ok(Arc::new(ArrowSchema::new(fields)))
}
