//! The operator that folds samples: samples in the order of the log in, delta records out, and behind them what was
//! learned of the samples.
//!
//! ```text
//! samples, part 0 ──convert──┐            ┌─▶ worker 0: sessions whose hash is 0 ─▶ records, then totals
//! samples, part 1 ──convert──┼─ every ────┼─▶ worker 1: sessions whose hash is 1 ─▶ records, then totals
//! samples, part 2 ──convert──┘  batch     └─▶ …
//! ```
//!
//! Every worker shares the batches that have samples of its sessions, and is told which rows they are: the lists are
//! not copied on the way. Where the parts of the samples are on several machines, each part is folded for itself.
//!
//! A [`FoldExec`] is described by a [`FoldSpec`], the memory for counts, and its input. What it learns leaves as rows
//! behind the records ([`totals`](super::totals)).

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use datafusion::common::runtime::JoinSet;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{Count, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties};
use futures::StreamExt;
use onefold_datasets::{CountBudget, TextIds};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::convert::{ColumnNames, Converted, Converter};
use super::counts::ColumnCounts;
use super::encode::{ChainNumbers, DeltaEncoder, EncoderOptions};
use super::record_batches::RecordBatches;
use super::statistics::StatisticsOptions;
use crate::Error;
use crate::error::external;
use crate::operator::{operator_methods, plan_properties, shown_as};
use crate::planned::PlannedTable;
use crate::profile::stage;
use crate::sessionize::{TIME, TOTALS};
use crate::spilling_join::in_context;

/// The high and the low half of a sample's digest, which order samples that nothing else does.
pub(crate) const DIGEST: [&str; 2] = ["__onefold_digest_high", "__onefold_digest_low"];
/// A sample as [`record`](super::record) writes it.
pub(crate) const RECORD: &str = "__onefold_record";

/// The most batches that wait for a worker, or for the engine.
const WAITING: usize = 2;
/// Bytes of a batch of the input, at least and at most. One row of a log can hold thousands of ids. But small batches are
/// slow: a log has many columns, each with its dictionary, and a reader goes from one to the next before it has used
/// what it loaded into the processor's caches.
const BATCH_BYTES: RangeInclusive<usize> = 1 << 20..=16 << 20;
/// Within these bounds a batch takes this part of the memory for a worker's sessions, one in so many: several batches of
/// each worker are read, joined, converted and encoded at the same time.
const BATCH_PART: usize = 16;
/// Rows of a batch of the input, at least and at most.
const BATCH_ROWS: RangeInclusive<usize> = 16..=8192;
/// The metrics that count samples and the bytes that they take in memory.
const SAMPLES: &str = "samples";
const BYTES: &str = "bytes";

/// How samples are folded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FoldSpec {
    pub(super) names: ColumnNames,
    pub(super) encoder: EncoderOptions,
    pub(super) statistics: StatisticsOptions,
    /// The workers that share the samples of all parts of the input. If `None`, each part is folded for itself.
    pub(super) workers: Option<usize>,
    /// Bytes of a row of the input.
    pub(super) row_bytes: u64,
}

impl FoldSpec {
    /// Whether ids are counted for vocabularies.
    pub(crate) fn counts_ids(&self) -> bool {
        !self.statistics.vocabularies.is_empty()
    }

    /// Rows of a batch of the input.
    fn batch_rows(&self) -> usize {
        let bytes = (self.encoder.state_bytes / BATCH_PART).clamp(*BATCH_BYTES.start(), *BATCH_BYTES.end());
        (bytes / self.row_bytes.max(1) as usize).clamp(*BATCH_ROWS.start(), *BATCH_ROWS.end())
    }

    /// Sets the memory: bytes that the last samples of a worker's sessions may take, and the budget of the texts of
    /// vocabularies.
    pub(crate) fn set_memory(&mut self, state_bytes: usize, budget: &CountBudget) {
        self.encoder.state_bytes = state_bytes;
        let mut texts = BTreeMap::new();
        self.names.lists.iter_mut().for_each(|(_, form)| form.with_texts(&mut texts, budget));
    }

    /// For each vocabulary the texts whose numbers are counted, where the counts leave this process without them.
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

/// What the workers share.
#[derive(Debug)]
struct Fold {
    spec: FoldSpec,
    /// The memory for the counts of vocabularies.
    budget: CountBudget,
    input: Arc<dyn ExecutionPlan>,
    schema: SchemaRef,
    started: Mutex<Option<Started>>,
    /// The samples that were read so far, and the bytes that they took in memory. All partitions count together: whoever
    /// reports progress asks several times a second, and must not add up the counters of each partition then.
    samples: Count,
    bytes: Count,
}

/// What a worker is told.
enum Told {
    /// A batch, and the rows of it that are the worker's.
    Samples(Arc<Converted>, Vec<u32>),
    /// Counts of the columns of a part of the input. One of the workers is told.
    Columns(ColumnCounts),
}

type Message = Result<Told>;

/// The queues that workers have not taken yet, and the tasks that fill them.
#[derive(Debug)]
struct Started {
    queues: Vec<Option<Receiver<Message>>>,
    readers: Option<JoinSet<()>>,
}

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Told").finish_non_exhaustive()
    }
}

impl FoldExec {
    /// Folds the samples of `input`. Counts of ids take their memory from `budget`.
    ///
    /// # Errors
    ///
    /// If the input does not have the key columns.
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

    /// How it folds.
    pub(crate) fn spec(&self) -> &FoldSpec {
        &self.fold.spec
    }

    /// The samples that were read so far, and the bytes that they took in memory.
    pub(super) fn read(&self) -> (u64, u64) {
        (self.fold.samples.value() as u64, self.fold.bytes.value() as u64)
    }

    /// The table of its rows, as a leaf of the plans that read it: the plan of the samples is optimised already.
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
            // One worker owns the readers. After a success they have ended; `join_all` passes on their panics.
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
    /// The queue of a worker. Where workers share the input, the first call starts the tasks that fill all queues, and
    /// returns them too.
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
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Converts one part of the input for all workers. An error goes to the first of them.
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
        // Mostly the worker that is told last frees the batch. If that were always the same one of 64, it would work
        // half as long again as the others. So every batch begins with another worker.
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
            // Nobody needs them if the worker has stopped.
            let _ = workers[part % workers.len()].send(Ok(Told::Columns(columns))).await;
        }
        Ok(())
    }

    /// An error as it passes through the engine. Where the memory for counts is that of an executor, the message says so.
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
            // Nobody knows which other workers there are.
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

/// Sends the complete batches to the engine; `false` if the engine has stopped reading.
async fn give(records: &mut RecordBatches, output: &Sender<Result<RecordBatch>>) -> bool {
    for records in records.take() {
        if output.send(Ok(records)).await.is_err() {
            return false;
        }
    }
    true
}

/// The columns of records of samples that have the columns of `samples`, and of the totals behind them.
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
