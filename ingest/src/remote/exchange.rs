//! Exchanges that digest their rows on both sides.
//!
//! ```text
//! rows ─▶ SentExec ─▶ exchange ─▶ ReceivedExec ─▶ the same rows
//!         adds who sent a row,      keeps one run of each partition,
//!         then counts and digests   compares counts and digests
//! ```
//!
//! A cluster runs the tasks of a lost machine again, and Ballista 55 may then deliver both the output of the lost task
//! and that of the new one. Each row therefore carries the number of its partition and of the run of this partition.
//! The receiver keeps the first run of a partition that it sees, and drops the rows of other runs. After its rows, a
//! sender tells every receiver the number of the rows that it sent there, and their digest, also if this number is 0.
//! The query fails if they differ from the rows that arrived, or if no sender told the receiver anything.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, Int64Array, RecordBatch, UInt64Array, new_null_array,
};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::{
    DataType, Field, Int64Type, Schema as ArrowSchema, SchemaRef, UInt64Type,
};
use datafusion::common::hash_utils::create_hashes;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::Time;
use datafusion::physical_plan::repartition::{BatchPartitioner, REPARTITION_RANDOM_STATE, RepartitionExec};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties};
use futures::StreamExt;
use onefold_datasets::digest::Digest;
use serde::{Deserialize, Serialize};

use crate::error::{bug, external};
use crate::operator::{operator_methods, plan_properties, shown_as};
use crate::row_digest::RowDigester;

/// The column with the number of the partition that sent a row.
const SENDER: &str = "__onefold_sender";
/// The column with the run of this partition.
const RUN: &str = "__onefold_run";
/// The column with a [value](value_of_each) for the partition that receives a row.
const RECEIVER: &str = "__onefold_receiver";
/// The column with a sender's statement, after its rows, about their number and digest. It is null in the rows
/// themselves.
const SENT: &str = "__onefold_sent";
/// The number of columns that the check adds.
const ADDED: usize = 4;
/// The number of values per partition that are tried in the search for a value of each partition.
const TRIED: usize = 64;

/// Returns for each partition an integer that the engine's hash assigns to it.
pub(crate) fn value_of_each(partitions: usize) -> crate::error::Result<Vec<i64>> {
    let schema = Arc::new(ArrowSchema::new(vec![Field::new(RECEIVER, DataType::Int64, false)]));
    let key: Arc<dyn PhysicalExpr> = Arc::new(Column::new(RECEIVER, 0));
    let tried = Int64Array::from_iter_values(0..(TRIED * partitions) as i64);
    let tried = RecordBatch::try_new(schema, vec![Arc::new(tried)]).map_err(DataFusionError::from)?;
    let mut values = vec![None; partitions];
    let by_hash = Partitioning::Hash(vec![key], partitions);
    BatchPartitioner::try_new(by_hash, Time::new(), 0, 1)?.partition(tried, |partition, rows| {
        values[partition] = rows.column(0).as_primitive::<Int64Type>().values().first().copied();
        Ok(())
    })?;
    values.into_iter().collect::<Option<_>>().ok_or_else(|| bug("no value leads to a partition"))
}

/// Returns `exchange`, an exchange of one input, with checks before and after it.
///
/// # Errors
///
/// If the rows have a column that cannot be digested.
pub(crate) fn checked_exchange(exchange: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let input = Arc::clone(exchange.children()[0]);
    let schema = input.schema();
    let partitioning = exchange
        .downcast_ref::<RepartitionExec>()
        .map_or(Partitioning::UnknownPartitioning(1), |exchange| exchange.partitioning().clone());
    let sent: Arc<dyn ExecutionPlan> = Arc::new(SentExec::new(input, partitioning.clone())?);
    let exchanged: Arc<dyn ExecutionPlan> = match &partitioning {
        Partitioning::Hash(_, partitions) => {
            let receiver: Arc<dyn PhysicalExpr> =
                Arc::new(Column::new_with_schema(RECEIVER, &sent.schema())?);
            Arc::new(RepartitionExec::try_new(sent, Partitioning::Hash(vec![receiver], *partitions))?)
        }
        _ => Arc::new(CoalescePartitionsExec::new(sent)),
    };
    Ok(Arc::new(ReceivedExec::new(exchanged, schema, &partitioning)))
}

/// Adds the sender to rows, and after them a statement about the rows that were sent to each receiver.
#[derive(Debug)]
pub(crate) struct SentExec {
    input: Arc<dyn ExecutionPlan>,
    /// The partitions that receive the rows.
    pub(crate) partitioning: Partitioning,
    /// The numbers that identify the input's partitions in the whole plan, and the number of the run; `None` if this
    /// process executes the whole plan.
    run: Option<(Vec<u64>, u64)>,
    properties: Arc<PlanProperties>,
}

impl SentExec {
    pub(crate) fn new(input: Arc<dyn ExecutionPlan>, partitioning: Partitioning) -> Result<Self> {
        // This fails before anything is read if a column cannot be digested.
        RowDigester::new(&input.schema()).map_err(external)?;
        let added = [
            Field::new(SENDER, DataType::UInt64, false),
            Field::new(RUN, DataType::UInt64, false),
            Field::new(RECEIVER, DataType::Int64, false),
            Field::new(SENT, DataType::Binary, true),
        ];
        // Statements have nulls in the columns of the input.
        let schema = input.schema();
        let fields = schema.fields().iter().map(|field| Field::clone(field).with_nullable(true));
        let schema = Arc::new(ArrowSchema::new(fields.chain(added).collect::<Vec<_>>()));
        let properties = plan_properties(&schema, input.output_partitioning().partition_count());
        Ok(Self { input, partitioning, run: None, properties })
    }

    /// Makes an operator that sends its rows to one partition.
    pub(crate) fn to_one(input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        Self::new(input, Partitioning::UnknownPartitioning(1))
    }

    /// Returns this operator for one run of a part of the plan. `partitions` identify its partitions.
    pub(crate) fn of_run(&self, partitions: Vec<u64>, run: u64) -> Self {
        Self {
            input: Arc::clone(&self.input),
            partitioning: self.partitioning.clone(),
            run: Some((partitions, run)),
            properties: Arc::clone(&self.properties),
        }
    }

    fn sender(&self, number: u64, run: u64) -> Result<Sender> {
        let values = value_of_each(self.partitioning.partition_count()).map_err(external)?;
        Ok(Sender {
            sender: number,
            run,
            schema: self.schema(),
            partitioning: self.partitioning.clone(),
            digester: RowDigester::new(&self.input.schema()).map_err(external)?,
            sent: vec![Sent::default(); values.len()],
            values,
        })
    }
}

shown_as!(SentExec, |operator| ": to={}", operator.partitioning);

impl ExecutionPlan for SentExec {
    operator_methods!("SentExec", |operator| vec![&operator.input], |input| {
        let new = Self::new(input, operator.partitioning.clone())?;
        Ok(Arc::new(Self { run: operator.run.clone(), ..new }))
    });

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (number, run) = match &self.run {
            Some((partitions, run)) => match partitions.get(partition) {
                Some(number) => (*number, *run),
                None => {
                    return datafusion::common::internal_err!("a partition has no number in the whole plan");
                }
            },
            None => (partition as u64, 0),
        };
        let sender = self.sender(number, run)?;
        let rows = self.input.execute(partition, context)?;
        let sent = futures::stream::try_unfold(Some((rows, sender)), |state| async {
            let Some((mut rows, mut sender)) = state else { return Ok(None) };
            match rows.next().await.transpose()? {
                Some(batch) => Ok(Some((sender.send(&batch)?, Some((rows, sender))))),
                None => Ok(Some((sender.statements()?, None))),
            }
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), sent)))
    }
}

/// The number and the digest of rows that one partition sends to another: counted, or as the sender states them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Sent {
    rows: u64,
    digest: Digest,
}

/// Sends the rows of one partition.
#[derive(Debug)]
struct Sender {
    sender: u64,
    run: u64,
    schema: SchemaRef,
    partitioning: Partitioning,
    digester: RowDigester,
    /// For each receiver, its value in the column [`RECEIVER`], and the rows that were sent to it.
    values: Vec<i64>,
    sent: Vec<Sent>,
}

impl Sender {
    /// Returns the rows of a batch with their sender and receivers.
    fn send(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let receivers = self.receivers(batch)?;
        for (receiver, sample) in receivers.iter().zip(self.digester.rows(batch).map_err(external)?) {
            self.sent[*receiver].rows += 1;
            self.sent[*receiver].digest.add(sample);
        }
        let statements = BinaryArray::new_null(batch.num_rows());
        self.with_added(batch.columns().to_vec(), receivers.into_iter(), statements)
    }

    /// Returns the receiver of each row of a batch.
    fn receivers(&self, batch: &RecordBatch) -> Result<Vec<usize>> {
        let Partitioning::Hash(keys, partitions) = &self.partitioning else {
            return Ok(vec![0; batch.num_rows()]);
        };
        let keys = keys.iter().map(|key| key.evaluate(batch)?.into_array(batch.num_rows()));
        let keys = keys.collect::<Result<Vec<ArrayRef>>>()?;
        let mut hashes = vec![0; batch.num_rows()];
        create_hashes(&keys, REPARTITION_RANDOM_STATE.random_state(), &mut hashes)?;
        Ok(hashes.into_iter().map(|hash| (hash % *partitions as u64) as usize).collect())
    }

    /// Returns the statements about the rows that were sent, one for each receiver.
    fn statements(&self) -> Result<RecordBatch> {
        let statements = self.sent.iter().map(serde_json::to_vec).collect::<Result<Vec<_>, _>>();
        let statements = statements.map_err(|error| DataFusionError::External(error.into()))?;
        let fields = &self.schema.fields()[..self.schema.fields().len() - ADDED];
        let nulls = fields.iter().map(|field| new_null_array(field.data_type(), self.sent.len()));
        self.with_added(nulls.collect(), 0..self.sent.len(), BinaryArray::from_iter_values(statements))
    }

    fn with_added(
        &self,
        mut columns: Vec<ArrayRef>,
        receivers: impl Iterator<Item = usize>,
        statements: BinaryArray,
    ) -> Result<RecordBatch> {
        let number = |number| Arc::new(UInt64Array::from_value(number, statements.len())) as ArrayRef;
        columns.extend([number(self.sender), number(self.run)]);
        columns.push(Arc::new(Int64Array::from_iter_values(receivers.map(|receiver| self.values[receiver]))));
        columns.push(Arc::new(statements));
        Ok(RecordBatch::try_new(Arc::clone(&self.schema), columns)?)
    }
}

/// Keeps one run of each partition, compares its rows with the senders' statements, and removes the columns that
/// [`SentExec`] added.
#[derive(Debug)]
pub(crate) struct ReceivedExec {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl ReceivedExec {
    /// Makes an operator that receives rows of `schema` from an exchange. The rows are partitioned by the keys of
    /// `partitioning`, if it has keys. On a cluster, a task has some of the partitions.
    pub(crate) fn new(input: Arc<dyn ExecutionPlan>, schema: SchemaRef, partitioning: &Partitioning) -> Self {
        let partitions = input.output_partitioning().partition_count();
        let partitioning = match partitioning {
            Partitioning::Hash(keys, _) => Partitioning::Hash(keys.clone(), partitions),
            _ => Partitioning::UnknownPartitioning(partitions),
        };
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            partitioning,
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self { input, properties: Arc::new(properties) }
    }

    /// Returns the checked rows of an exchange. `rows` have the columns of `schema` and those that [`SentExec`] added.
    pub(crate) fn check(
        rows: SendableRecordBatchStream,
        schema: SchemaRef,
    ) -> Result<SendableRecordBatchStream> {
        let receiver = Receiver::new(Arc::clone(&schema))?;
        let received = futures::stream::try_unfold((rows, receiver), |(mut rows, mut receiver)| async move {
            loop {
                let Some(batch) = rows.next().await.transpose()? else {
                    receiver.finish()?;
                    return Ok(None);
                };
                let batch = receiver.receive(&batch)?;
                if batch.num_rows() > 0 {
                    return Ok(Some((batch, (rows, receiver))));
                }
            }
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, received)))
    }
}

shown_as!(ReceivedExec, |_operator| "");

impl ExecutionPlan for ReceivedExec {
    operator_methods!("ReceivedExec", |operator| vec![&operator.input], |input| {
        Ok(Arc::new(Self::new(input, operator.schema(), &operator.properties.partitioning)))
    });

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        Self::check(self.input.execute(partition, context)?, self.schema())
    }
}

/// The rows that arrived from a partition.
#[derive(Debug)]
struct Received {
    run: u64,
    came: Sent,
    /// The statement of the sender.
    stated: Option<Sent>,
}

/// Receives the rows of one partition.
#[derive(Debug)]
struct Receiver {
    schema: SchemaRef,
    digester: RowDigester,
    /// The rows that arrived, by sending partition.
    senders: HashMap<u64, Received>,
}

impl Receiver {
    fn new(schema: SchemaRef) -> Result<Self> {
        let digester = RowDigester::new(&schema).map_err(external)?;
        Ok(Self { schema, digester, senders: HashMap::new() })
    }

    /// Returns the rows of a batch that are kept.
    fn receive(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let columns = batch.num_columns() - ADDED;
        let senders = batch.column(columns).as_primitive::<UInt64Type>().values();
        let runs = batch.column(columns + 1).as_primitive::<UInt64Type>().values();
        let statements = batch.column(columns + 3).as_binary::<i32>();
        let mut kept = vec![true; batch.num_rows()];
        for (row, kept) in kept.iter_mut().enumerate() {
            let first = || Received { run: runs[row], came: Sent::default(), stated: None };
            let received = self.senders.entry(senders[row]).or_insert_with(first);
            let is_kept = received.run == runs[row];
            *kept = is_kept && statements.is_null(row);
            if is_kept && statements.is_valid(row) {
                let stated = serde_json::from_slice(statements.value(row));
                received.stated = Some(stated.map_err(|error| DataFusionError::External(error.into()))?);
            }
        }
        let kept_rows: Vec<usize> = (0..kept.len()).filter(|row| kept[*row]).collect();
        let rows = match kept_rows.len() == kept.len() {
            true => batch.clone(),
            false => filter_record_batch(batch, &BooleanArray::from(kept))?,
        };
        let rows = RecordBatch::try_new(Arc::clone(&self.schema), rows.columns()[..columns].to_vec())?;
        for (row, sample) in kept_rows.into_iter().zip(self.digester.rows(&rows).map_err(external)?) {
            if let Some(received) = self.senders.get_mut(&senders[row]) {
                received.came.rows += 1;
                received.came.digest.add(sample);
            }
        }
        Ok(rows)
    }

    /// Compares the rows that arrived with the statements of their senders.
    fn finish(&self) -> Result<()> {
        let wrong = |message: String| {
            let hint = "run it again; if it fails again, check the disks of the executors' `--work-dir`";
            Err(external(crate::error::Error::engine(message, hint)))
        };
        for (partition, Received { came, stated, .. }) in &self.senders {
            let sent = stated.unwrap_or_default();
            if stated.is_none() || sent != *came {
                return wrong(format!(
                    "an exchange between machines changed rows: partition {partition:016x} sent {} rows with digest {}, \
                     {} rows with digest {} came",
                    sent.rows, sent.digest, came.rows, came.digest
                ));
            }
        }
        // The engine may give the rows of several partitions to one task, so the number of senders is not known.
        if self.senders.is_empty() {
            return wrong("nothing arrived from an exchange between machines".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::ListArray;
    use datafusion::datasource::memory::MemorySourceConfig;
    use datafusion::physical_plan::{collect, collect_partitioned};

    use super::*;

    /// Returns rows with a number, a list, and a bucket, which is the number modulo 3.
    fn batch(numbers: std::ops::Range<i64>) -> RecordBatch {
        let lists = numbers.clone().map(|number| (number % 4 > 0).then(|| (0..number % 4).map(Some)));
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>(lists);
        let buckets = Int64Array::from_iter_values(numbers.clone().map(|number| number % 3));
        let columns: [(&str, ArrayRef); 3] = [
            ("number", Arc::new(Int64Array::from_iter_values(numbers))),
            ("list", Arc::new(lists)),
            ("bucket", Arc::new(buckets)),
        ];
        RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
    }

    /// Returns the rows that a run of partition `number` sends, and its statements after them.
    fn sent(number: u64, run: u64, rows: &RecordBatch) -> [RecordBatch; 2] {
        let input = MemorySourceConfig::try_new_exec(&[vec![]], rows.schema(), None).unwrap();
        let mut sender = SentExec::to_one(input).unwrap().sender(number, run).unwrap();
        [sender.send(rows).unwrap(), sender.statements().unwrap()]
    }

    /// Returns the numbers that are received, or the error.
    fn received(batches: &[RecordBatch]) -> Result<Vec<i64>> {
        let mut receiver = Receiver::new(batch(0..0).schema())?;
        let mut numbers = Vec::new();
        for batch in batches {
            let rows = receiver.receive(batch)?;
            numbers.extend_from_slice(rows.column(0).as_primitive::<Int64Type>().values());
        }
        receiver.finish()?;
        Ok(numbers)
    }

    #[test]
    fn one_run_of_a_partition_is_kept() {
        let [rows, stated] = sent(7, 1, &batch(0..10));
        let [again, stated_again] = sent(7, 2, &batch(0..10));
        let all: Vec<i64> = (0..10).collect();
        assert_eq!(received(&[rows.clone(), stated.clone()]).unwrap(), all);
        // A part of the other run's rows suffices to test this.
        let mixed =
            [rows.slice(0, 4), again.slice(0, 6), rows.slice(4, 6), stated_again.clone(), stated.clone()];
        assert_eq!(received(&mixed).unwrap(), all);
        assert_eq!(received(&[again, rows, stated, stated_again]).unwrap(), all);
    }

    fn wrong(batches: &[RecordBatch], part: &str) {
        let error = received(batches).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("--work-dir"), "{error}");
    }

    #[test]
    fn rows_that_are_lost_or_changed_are_found() {
        let [rows, stated] = sent(7, 1, &batch(0..10));
        wrong(&[rows.slice(0, 9), stated.clone()], "partition 0000000000000007 sent 10 rows");
        wrong(&[rows.clone(), rows.slice(4, 1), stated.clone()], "11 rows with digest");
        wrong(std::slice::from_ref(&rows), "sent 0 rows");
        wrong(&[stated], "0 rows with digest");
        // As many rows, but others.
        let [_, stated] = sent(7, 1, &batch(3..4));
        let [row, _] = sent(7, 1, &batch(0..1));
        wrong(&[row, stated], "sent 1 rows");
    }

    #[test]
    fn a_sender_without_rows_says_so_and_lost_senders_are_missed() {
        let [rows, stated] = sent(7, 1, &batch(0..10));
        let [none, empty] = sent(8, 1, &batch(0..0));
        assert_eq!((none.num_rows(), empty.num_rows()), (0, 1));
        let all = received(&[rows.clone(), stated.clone(), empty.clone()]).unwrap();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        assert_eq!(received(std::slice::from_ref(&empty)).unwrap(), Vec::<i64>::new());
        wrong(&[], "nothing arrived");
    }

    /// Rows of columns without nulls, of which some partitions have none.
    #[test]
    fn every_receiver_hears_of_every_sender() {
        let rows =
            RecordBatch::try_from_iter([("number", Arc::new(Int64Array::from(vec![1, 2])) as ArrayRef)]);
        let rows = rows.unwrap();
        let parts = [vec![rows.clone()], vec![], vec![]];
        let input = MemorySourceConfig::try_new_exec(&parts, rows.schema(), None).unwrap();
        let key = Arc::new(Column::new("number", 0)) as Arc<dyn PhysicalExpr>;
        let exchange: Arc<dyn ExecutionPlan> =
            Arc::new(RepartitionExec::try_new(input, Partitioning::Hash(vec![key], 5)).unwrap());
        let checked = checked_exchange(&exchange).unwrap();
        let sent = Arc::clone(checked.children()[0]);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let context = Arc::new(TaskContext::default());
        let received = runtime.block_on(collect_partitioned(checked, Arc::clone(&context))).unwrap();
        assert_eq!(received.iter().flatten().map(RecordBatch::num_rows).sum::<usize>(), 2);
        // The exchange, without what has been read from it.
        let sent: Arc<dyn ExecutionPlan> = Arc::new(
            RepartitionExec::try_new(Arc::clone(sent.children()[0]), sent.output_partitioning().clone())
                .unwrap(),
        );
        for rows in runtime.block_on(collect_partitioned(sent, context)).unwrap() {
            let statements = rows.iter().map(|rows| rows.num_rows() - rows.column(4).null_count());
            assert_eq!(statements.sum::<usize>(), 3);
        }
    }

    #[test]
    fn exchanges_with_checks_give_the_same_rows() {
        let context = Arc::new(TaskContext::default());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let parts = [vec![batch(0..50), batch(50..60)], vec![], vec![batch(60..100)]];
        let input: Arc<dyn ExecutionPlan> =
            MemorySourceConfig::try_new_exec(&parts, batch(0..0).schema(), None).unwrap();
        let key = Arc::new(Column::new("number", 0)) as Arc<dyn PhysicalExpr>;
        let by_hash = RepartitionExec::try_new(Arc::clone(&input), Partitioning::Hash(vec![key], 4)).unwrap();
        let gathered: Arc<dyn ExecutionPlan> = Arc::new(CoalescePartitionsExec::new(input));
        runtime.block_on(async {
            let sorted = |batches: &[RecordBatch]| {
                let values =
                    batches.iter().flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values());
                let mut numbers: Vec<i64> = values.copied().collect();
                numbers.sort_unstable();
                numbers
            };
            let plain = collect_partitioned(Arc::new(by_hash), Arc::clone(&context)).await.unwrap();
            let key = Arc::new(Column::new("number", 0)) as Arc<dyn PhysicalExpr>;
            let again = RepartitionExec::try_new(
                MemorySourceConfig::try_new_exec(&parts, batch(0..0).schema(), None).unwrap(),
                Partitioning::Hash(vec![key], 4),
            );
            let again: Arc<dyn ExecutionPlan> = Arc::new(again.unwrap());
            let checked = checked_exchange(&again).unwrap();
            let checked = collect_partitioned(checked, Arc::clone(&context)).await.unwrap();
            for (plain, checked) in plain.iter().zip(&checked) {
                assert_eq!(sorted(plain), sorted(checked));
            }
            let checked = checked_exchange(&gathered).unwrap();
            let rows = collect(checked, Arc::clone(&context)).await.unwrap();
            assert_eq!(sorted(&rows), (0..100).collect::<Vec<_>>());
        });
    }
}
