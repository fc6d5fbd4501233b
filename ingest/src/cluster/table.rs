//! The table of delta records, which the engine reads like a file while the samples are read and encoded.
//!
//! ```text
//! query, part 0 ──convert──┐            ┌─▶ worker 0: sessions whose hash is 0 ─▶ records
//! query, part 1 ──convert──┼─ every ────┼─▶ worker 1: sessions whose hash is 1 ─▶ records
//! query, part 2 ──convert──┘  batch     └─▶ …
//! ```
//!
//! Every worker shares the batches that have samples of its sessions, and is told which rows they are: the lists are
//! not copied on the way.

use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::runtime::JoinSet;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::StreamExt;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::convert::{ColumnNames, Converted, Converter};
use super::encode::{DeltaEncoder, EncoderOptions, SampleTotals};
use super::progress::Progress;
use super::record_batches::RecordBatches;
use super::statistics::StatisticsOptions;
use crate::sessionize::TIME;
use crate::statistics::ColumnCounts;

/// The high and the low half of a sample's digest, which order samples that nothing else does.
pub(crate) const DIGEST: [&str; 2] = ["__onefold_digest_high", "__onefold_digest_low"];
/// A sample as [`record`](super::record) writes it.
pub(crate) const RECORD: &str = "__onefold_record";

/// The name of the table of records.
pub(crate) const RECORDS_TABLE: &str = "__onefold_records";

/// The most batches that wait for a worker, or for the engine.
const WAITING: usize = 2;

/// One pass that reads the samples of a query and encodes them.
#[derive(Debug)]
pub(super) struct EncodingPass {
    /// The plan of the samples' query.
    input: Arc<dyn ExecutionPlan>,
    /// The context of the input: its batches are smaller than those of records.
    context: Arc<TaskContext>,
    names: ColumnNames,
    options: EncoderOptions,
    statistics: StatisticsOptions,
    schema: SchemaRef,
    workers: usize,
    progress: Arc<Progress>,
    started: Mutex<Option<Started>>,
    outcome: Mutex<Vec<(usize, SampleTotals)>>,
    /// Counts of the columns of the input.
    columns: Mutex<ColumnCounts>,
}

/// A batch and the rows of it that are a worker's, or the error of the query.
type Message = Result<(Arc<Converted>, Vec<u32>)>;

/// The queues that workers have not taken yet, and the tasks that fill them.
#[derive(Debug)]
struct Started {
    queues: Vec<Option<Receiver<Message>>>,
    readers: Option<JoinSet<()>>,
}

/// One of the workers: a partition of the table.
#[derive(Debug)]
struct Worker {
    pass: Arc<EncodingPass>,
    number: usize,
}

impl EncodingPass {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        input: Arc<dyn ExecutionPlan>,
        context: Arc<TaskContext>,
        names: ColumnNames,
        options: EncoderOptions,
        statistics: StatisticsOptions,
        workers: usize,
        progress: Arc<Progress>,
    ) -> Result<Self> {
        let schema = records_schema(&names, &input.schema())?;
        Ok(Self {
            input,
            context,
            names,
            options,
            statistics,
            schema,
            workers,
            progress,
            started: Mutex::new(None),
            outcome: Mutex::new(Vec::new()),
            columns: Mutex::default(),
        })
    }

    /// The table of the records. Reading it runs the pass, so it can be read once.
    pub(super) fn table(self: &Arc<Self>) -> Result<StreamingTable> {
        let worker =
            |number| -> Arc<dyn PartitionStream> { Arc::new(Worker { pass: Arc::clone(self), number }) };
        StreamingTable::try_new(Arc::clone(&self.schema), (0..self.workers).map(worker).collect())
    }

    /// The totals of all samples; `None` before all records were given, and after the totals were taken.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there are more distinct ids than may be counted.
    pub(super) fn outcome(&self) -> crate::Result<Option<SampleTotals>> {
        let mut parts = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.len() < self.workers {
            return Ok(None);
        }
        parts.sort_by_key(|(worker, _)| *worker);
        let mut parts = parts.drain(..).map(|(_, totals)| totals);
        let Some(mut all) = parts.next() else { return Ok(None) };
        for part in parts {
            all.merge(part)?;
        }
        if self.statistics.values {
            all.statistics.columns = self.columns.lock().unwrap_or_else(PoisonError::into_inner).clone();
        }
        Ok(Some(all))
    }

    /// The queue of a worker. The first call starts the tasks that fill all queues, and returns them too.
    fn start(self: &Arc<Self>, worker: usize) -> Option<(Receiver<Message>, Option<JoinSet<()>>)> {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let started = started.get_or_insert_with(|| {
            let (senders, queues): (Vec<_>, Vec<_>) = (0..self.workers).map(|_| channel(WAITING)).unzip();
            let mut readers = JoinSet::new();
            for part in 0..self.input.output_partitioning().partition_count() {
                readers.spawn(Arc::clone(self).read(part, senders.clone()));
            }
            Started { queues: queues.into_iter().map(Some).collect(), readers: Some(readers) }
        });
        Some((started.queues[worker].take()?, started.readers.take()))
    }

    /// Converts one part of the input for all workers. An error goes to the first of them.
    async fn read(self: Arc<Self>, part: usize, workers: Vec<Sender<Message>>) {
        if let Err(error) = self.convert(part, &workers).await {
            // If the worker has stopped, the query has ended already.
            let _ = workers[0].send(Err(error)).await;
        }
    }

    async fn convert(&self, part: usize, workers: &[Sender<Message>]) -> Result<()> {
        let converter = Converter::new(self.names.clone(), &self.input.schema()).map_err(external)?;
        let mut batches = self.input.execute(part, Arc::clone(&self.context))?;
        let mut columns = ColumnCounts::default();
        while let Some(batch) = batches.next().await {
            let batch = batch?;
            self.progress.read(batch.num_rows(), batch.get_array_memory_size());
            let converted = Arc::new(converter.convert(&batch).map_err(external)?);
            columns.merge(&converted.counts);
            let rows = converted.rows_by_worker(workers.len());
            for (worker, rows) in workers.iter().zip(rows).filter(|(_, rows)| !rows.is_empty()) {
                if worker.send(Ok((Arc::clone(&converted), rows))).await.is_err() {
                    return Ok(());
                }
            }
        }
        // Known before the workers' queues end, and so before their outcome.
        self.columns.lock().unwrap_or_else(PoisonError::into_inner).merge(&columns);
        Ok(())
    }

    /// Encodes the samples of a worker.
    async fn work(
        self: Arc<Self>,
        number: usize,
        mut queue: Receiver<Message>,
        output: Sender<Result<RecordBatch>>,
    ) -> Result<()> {
        let mut encoder = DeltaEncoder::new(self.options.clone(), &self.statistics, &self.schema, number)
            .map_err(external)?;
        while let Some(message) = queue.recv().await {
            let (batch, rows) = message?;
            encoder.encode(&batch, &rows).map_err(external)?;
            drop(batch);
            if !give(encoder.records(), &output).await {
                return Ok(());
            }
        }
        while encoder.forget_some().map_err(external)? {
            if !give(encoder.records(), &output).await {
                return Ok(());
            }
        }
        encoder.records().complete_batch().map_err(external)?;
        let last = encoder.records().take();
        // Stored before the last records are sent: a reader that has seen their end may ask for the totals.
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).push((number, encoder.finish()));
        for records in last {
            if output.send(Ok(records)).await.is_err() {
                break;
            }
        }
        Ok(())
    }
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

/// The columns of records of samples that have the columns of `samples`.
pub(super) fn records_schema(names: &ColumnNames, samples: &ArrowSchema) -> Result<SchemaRef> {
    let mut fields = Vec::new();
    for key in &names.keys {
        fields.push(Arc::new(samples.field_with_name(key)?.clone()));
    }
    fields.push(Arc::new(Field::new(TIME, DataType::Int64, false)));
    fields.extend(DIGEST.map(|half| Arc::new(Field::new(half, DataType::UInt64, false))));
    fields.push(Arc::new(Field::new(RECORD, DataType::Binary, false)));
    Ok(Arc::new(ArrowSchema::new(fields)))
}

/// Wraps an error of this crate so that it can pass through the engine.
pub(super) fn external(error: crate::Error) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

impl PartitionStream for Worker {
    fn schema(&self) -> &SchemaRef {
        &self.pass.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let mut stream = RecordBatchReceiverStream::builder(Arc::clone(&self.pass.schema), WAITING);
        let (pass, number, output) = (Arc::clone(&self.pass), self.number, stream.tx());
        stream.spawn(async move {
            let Some((queue, readers)) = pass.start(number) else {
                return datafusion::common::internal_err!("the samples are read twice");
            };
            let worked = Arc::clone(&pass).work(number, queue, output).await;
            // The first worker owns the readers. After a success they have ended; `join_all` passes on their panics.
            if worked.is_ok()
                && let Some(readers) = readers
            {
                readers.join_all().await;
            }
            worked
        });
        stream.build()
    }
}
