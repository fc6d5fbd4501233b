//! The operator that writes ranges of buckets. Its input is sorted records; its output is rows that describe the
//! written files.
//!
//! ```text
//! sorted records ──▶ cut ─▶ decode, fold, encode by row group ─▶ data files
//! slices, by timeline ─┘                                    └──▶ rows: ranges, samples left out, totals
//! ```
//!
//! A [`WriteExec`] consists of a [`WriteSpec`] and its inputs. Its results are rows, each of which is an
//! [`Outcome`]. Nothing is visible in the dataset before the ranges are committed. File names are unique to a run,
//! so a task that is retried does not overwrite anything.

use std::pin::pin;
use std::sync::{Arc, LazyLock, Mutex};

use datafusion::arrow::array::{AsArray, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{Count, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties};
use futures::StreamExt;
use futures::future::{Either, select};
use onefold_base::sync::locked;
use onefold_datasets::{BucketWriters, Encoders, WrittenBucket};
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::bucket_files::{BucketFiles, LeftOut, WriteSpec};
use super::cut::Cutter;
use super::decode::DecodedTotals;
use super::totals::totals_before;
use super::written_lists::WrittenLists;
use crate::error::external;
use crate::operator::{operator_methods, plan_properties, shown_as};
use crate::profile::stage;

/// The column of the result rows.
const OUTCOME: &str = "outcome";
/// The number of result rows that may wait for the reader.
const WAITING: usize = 2;
/// The metric that counts the samples that have been cut into row groups.
const SAMPLES: &str = "samples";

static SCHEMA: LazyLock<SchemaRef> =
    LazyLock::new(|| Arc::new(ArrowSchema::new(vec![Field::new(OUTCOME, DataType::Utf8, false)])));

/// The content of a result row.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// The files of a range of buckets are complete.
    Range(WrittenBucket),
    /// Counts of the samples of an input partition that were not written.
    LeftOut(LeftOut),
    /// The totals of the samples of an input partition that were decoded or left out.
    Decoded(DecodedTotals),
    /// A part of the totals of the folded samples, from the worker with this number. Used only on a cluster. In one
    /// process, the sort reads the totals.
    Folded(u64, Vec<u8>),
}

impl Outcome {
    fn row(&self) -> Result<RecordBatch> {
        let text = serde_json::to_string(self).map_err(|error| DataFusionError::External(error.into()))?;
        let column = Arc::new(StringArray::from_iter_values([text]));
        Ok(RecordBatch::try_new(Arc::clone(&SCHEMA), vec![column])?)
    }

    /// Parses the rows of a batch.
    pub(super) fn read(rows: &RecordBatch) -> Result<Vec<Self>> {
        let texts = rows.column(0).as_string::<i32>().iter().flatten();
        let read = |text| serde_json::from_str(text).map_err(|error| DataFusionError::External(error.into()));
        texts.map(read).collect()
    }
}

/// Writes the samples of its first input, which are records in the order of the dataset. The other inputs are the
/// slices of the timelines. Every partition of the inputs contains whole ranges of buckets.
#[derive(Debug)]
pub(crate) struct WriteExec {
    spec: Arc<WriteSpec>,
    /// The list columns of samples, with the vocabularies that map their ids to numbers.
    lists: WrittenLists,
    inputs: Vec<Arc<dyn ExecutionPlan>>,
    /// The encoder threads; `None` in a process that does not execute the operator.
    encoders: Option<Encoders>,
    /// The writers of all partitions. Set when the first partition is written.
    writers: Arc<Mutex<Option<BucketWriters>>>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The number of samples that all partitions have cut into row groups so far.
    samples: Count,
}

impl WriteExec {
    /// Creates an operator that writes the records of the first of `inputs`. A process that does not execute it
    /// does not need `encoders`.
    pub(crate) fn new(
        spec: Arc<WriteSpec>,
        lists: WrittenLists,
        inputs: Vec<Arc<dyn ExecutionPlan>>,
        encoders: Option<Encoders>,
    ) -> Self {
        let parts = inputs.first().map_or(1, |input| input.output_partitioning().partition_count());
        let metrics = ExecutionPlanMetricsSet::new();
        let samples = MetricBuilder::new(&metrics).global_counter(SAMPLES);
        Self {
            spec,
            lists,
            inputs,
            encoders,
            writers: Arc::default(),
            properties: plan_properties(&SCHEMA, parts),
            metrics,
            samples,
        }
    }

    /// Returns its specification and its list columns.
    pub(crate) fn parts(&self) -> (&WriteSpec, &WrittenLists) {
        (&self.spec, &self.lists)
    }

    /// Returns the number of samples that were cut into row groups so far.
    pub(super) fn samples(&self) -> u64 {
        self.samples.value() as u64
    }
}

shown_as!(WriteExec, |operator| ": location={}", operator.spec.location.display());

impl ExecutionPlan for WriteExec {
    operator_methods!("WriteExec", |operator| operator.inputs.iter().collect());

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(Self::new(Arc::clone(&self.spec), self.lists.clone(), children, self.encoders.clone())))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let inputs = self.inputs.iter().map(|input| input.execute(partition, Arc::clone(&context)));
        let mut inputs = inputs.collect::<Result<Vec<_>>>()?.into_iter();
        let Some(sorted) = inputs.next() else {
            return datafusion::common::internal_err!("there are no records to write");
        };
        let Some(encoders) = self.encoders.clone() else {
            return datafusion::common::internal_err!("there are no threads that encode");
        };
        let mut rows = RecordBatchReceiverStream::builder(Arc::clone(&SCHEMA), WAITING);
        let (spec, lists, runtime) = (Arc::clone(&self.spec), self.lists.clone(), Handle::current());
        let (writers, parts) = (Arc::clone(&self.writers), self.properties.partitioning.partition_count());
        let (output, samples) = (rows.tx(), self.samples.clone());
        // Writing blocks on the encoder threads and on the storage, which threads of the engine must not do.
        let work = move || {
            let pool = context.memory_pool();
            let (lists, _vocabularies) = lists.load(pool)?;
            let mut writing = Writing {
                cutter: Cutter::new(&spec.cut, lists, inputs),
                sorted,
                output,
                held: MemoryConsumer::new("decoding of samples").register(pool),
                samples,
            };
            let writers = writers_of_part(&spec, encoders, &writers, parts).map_err(external)?;
            let mut files = BucketFiles::new(&spec, writers).map_err(external)?;
            if !runtime.block_on(writing.run(&mut files))? {
                return Ok(());
            }
            let Writing { cutter, output, .. } = writing;
            let last = [Outcome::LeftOut(files.left_out()), Outcome::Decoded(cutter.totals())];
            for outcome in last {
                // The send fails if the reader has stopped.
                let _ = output.blocking_send(outcome.row());
            }
            Ok(())
        };
        stage("cut into row groups", || rows.spawn_blocking(work));
        Ok(rows.build())
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

/// Creates the writers of one of `parts` partitions. `shared` has the writers that were created for an earlier
/// partition.
fn writers_of_part(
    spec: &WriteSpec,
    encoders: Encoders,
    shared: &Mutex<Option<BucketWriters>>,
    parts: usize,
) -> crate::error::Result<BucketWriters> {
    let mut shared = locked(shared);
    let writers = match &mut *shared {
        Some(writers) => writers,
        none => {
            let storage = Storage::open(&spec.location)?;
            none.insert(BucketWriters::new(storage, spec.schema.clone(), spec.options.clone(), encoders)?)
        }
    };
    Ok(writers.for_part(parts))
}

/// The state of writing one partition of the inputs.
struct Writing {
    cutter: Cutter,
    sorted: SendableRecordBatchStream,
    output: Sender<Result<RecordBatch>>,
    held: MemoryReservation,
    samples: Count,
}

impl Writing {
    /// Writes all records. Returns `false` if the reader of the result rows has stopped.
    async fn run(&mut self, files: &mut BucketFiles<'_>) -> Result<bool> {
        loop {
            let Some(next) = next_or_closed(&mut self.sorted, &self.output).await else { return Ok(false) };
            let Some(records) = next.transpose()? else { break };
            let (totals, records) = totals_before(&records).map_err(external)?;
            for (worker, part) in totals {
                if self.output.send(Outcome::Folded(worker, part).row()).await.is_err() {
                    return Ok(false);
                }
            }
            if records.num_rows() == 0 {
                continue;
            }
            self.cutter.cut(&records, files).await.map_err(external)?;
            self.held.resize(self.cutter.held_bytes());
            self.samples.add(records.num_rows());
            self.give(files).await?;
        }
        self.cutter.leave(files).map_err(external)?;
        files.finish().map_err(external)?;
        self.give(files).await?;
        Ok(!self.output.is_closed())
    }

    /// Sends the ranges whose files are complete.
    async fn give(&mut self, files: &mut BucketFiles<'_>) -> Result<()> {
        while let Ok(place) = self.output.reserve().await
            && let Some(range) = files.take()
        {
            place.send(Outcome::Range(range).row());
        }
        Ok(())
    }
}

/// Returns the next batch, or `None` if the reader of the output has stopped.
async fn next_or_closed(
    rows: &mut SendableRecordBatchStream,
    output: &Sender<Result<RecordBatch>>,
) -> Option<Option<Result<RecordBatch>>> {
    match select(pin!(output.closed()), rows.next()).await {
        Either::Left(_) => None,
        Either::Right((next, _)) => Some(next),
    }
}
