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
//! sender tells each receiver the number of the rows that it sent there, and their digest. If they differ from the rows
//! that arrived, the query fails.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, RecordBatch, UInt32Array, UInt64Array,
};
use datafusion::arrow::compute::{cast, concat_batches, filter_record_batch, take_record_batch};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, UInt64Type};
use datafusion::common::hash_utils::create_hashes;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::repartition::{REPARTITION_RANDOM_STATE, RepartitionExec};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties};
use futures::StreamExt;
use onefold_datasets::digest::{Digest, SampleDigest};
use serde::{Deserialize, Serialize};

use crate::error::external;
use crate::operator::{only, operator_methods, plan_properties, shown_as};
use crate::row_digest::RowDigester;

/// The column with the number of the partition that sent a row.
const SENDER: &str = "__onefold_sender";
/// The column with the run of this partition.
const RUN: &str = "__onefold_run";
/// The column with a sender's statement, after its rows, about their number and digest. It is null in the rows
/// themselves.
const SENT: &str = "__onefold_sent";
/// The number of columns that the check adds.
const ADDED: usize = 3;

/// The groups in which rows are compared: the rows that a sender sends with one value of a column. Without groups, the
/// rows that it sends to one partition are compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Groups {
    /// The index of the column.
    pub(crate) column: usize,
    /// The name of the groups in messages.
    pub(crate) name: String,
}

/// Returns `exchange`, an exchange of one input, with checks before and after it.
///
/// # Errors
///
/// If the rows have a column that cannot be digested.
pub(crate) fn checked_exchange(
    exchange: Arc<dyn ExecutionPlan>,
    groups: Option<Groups>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let input = Arc::clone(exchange.children()[0]);
    let schema = input.schema();
    let (sent, partitioning) = match exchange.downcast_ref::<RepartitionExec>() {
        Some(exchange) => {
            let partitioning = exchange.partitioning().clone();
            (SentExec::new(input, partitioning.clone(), groups.clone())?, partitioning)
        }
        None => (SentExec::to_one(input)?, Partitioning::UnknownPartitioning(1)),
    };
    let sent: Arc<dyn ExecutionPlan> = Arc::new(sent);
    let exchanged: Arc<dyn ExecutionPlan> = match exchange.is::<RepartitionExec>() {
        true => Arc::new(RepartitionExec::try_new(sent, partitioning.clone())?),
        false => Arc::new(CoalescePartitionsExec::new(sent)),
    };
    Ok(Arc::new(ReceivedExec::new(exchanged, schema, partitioning, groups)))
}

/// Adds the sender to rows, and after them a statement about the rows that were sent.
#[derive(Debug)]
pub(crate) struct SentExec {
    input: Arc<dyn ExecutionPlan>,
    /// The partitioning of the exchange that follows.
    pub(crate) partitioning: Partitioning,
    pub(crate) groups: Option<Groups>,
    /// The numbers that identify the input's partitions in the whole plan, and the number of the run; `None` if this
    /// process executes the whole plan.
    run: Option<(Vec<u64>, u64)>,
    properties: Arc<PlanProperties>,
}

impl SentExec {
    pub(crate) fn new(
        input: Arc<dyn ExecutionPlan>,
        partitioning: Partitioning,
        groups: Option<Groups>,
    ) -> Result<Self> {
        // This fails before anything is read if a column cannot be digested.
        RowDigester::new(&input.schema()).map_err(external)?;
        let added = [
            Field::new(SENDER, DataType::UInt64, false),
            Field::new(RUN, DataType::UInt64, false),
            Field::new(SENT, DataType::Binary, true),
        ];
        let fields = input.schema().fields().iter().cloned().chain(added.map(Arc::new)).collect::<Vec<_>>();
        // Copies of some rows follow the rows, so the output has no order.
        let schema = Arc::new(ArrowSchema::new(fields));
        let properties = plan_properties(&schema, input.output_partitioning().partition_count());
        Ok(Self { input, partitioning, groups, run: None, properties })
    }

    /// Makes an operator that sends its rows to one partition.
    pub(crate) fn to_one(input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        Self::new(input, Partitioning::UnknownPartitioning(1), None)
    }

    /// Returns this operator for one run of a part of the plan. `partitions` identify its partitions.
    pub(crate) fn of_run(&self, partitions: Vec<u64>, run: u64) -> Self {
        Self {
            input: Arc::clone(&self.input),
            partitioning: self.partitioning.clone(),
            groups: self.groups.clone(),
            run: Some((partitions, run)),
            properties: Arc::clone(&self.properties),
        }
    }
}

shown_as!(SentExec, |operator| ": to={}", operator.partitioning);

impl ExecutionPlan for SentExec {
    fn name(&self) -> &str {
        "SentExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn apply_expressions(
        &self,
        visit: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        if let Partitioning::Hash(keys, _) = &self.partitioning {
            for key in keys {
                if visit(key)? == TreeNodeRecursion::Stop {
                    return Ok(TreeNodeRecursion::Stop);
                }
            }
        }
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let input = only(children)?;
        Ok(Arc::new(Self {
            run: self.run.clone(),
            ..Self::new(input, self.partitioning.clone(), self.groups.clone())?
        }))
    }

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
        let schema = self.schema();
        let sender = Sender {
            sender: number,
            run,
            schema: Arc::clone(&schema),
            partitioning: self.partitioning.clone(),
            groups: self.groups.clone(),
            digester: RowDigester::new(&self.input.schema()).map_err(external)?,
            sent: BTreeMap::new(),
        };
        let rows = self.input.execute(partition, context)?;
        let sent = futures::stream::try_unfold(Some((rows, sender)), |state| async {
            let Some((mut rows, mut sender)) = state else { return Ok(None) };
            match rows.next().await.transpose()? {
                Some(batch) => Ok(Some((sender.send(&batch)?, Some((rows, sender))))),
                None => Ok(sender.last()?.map(|last| (last, None))),
            }
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, sent)))
    }
}

/// The rows of a group that were sent.
#[derive(Debug)]
struct SentGroup {
    said: Said,
    /// The first row of the group. Its copy carries the statement about the group to the receiver of the group's rows.
    first: RecordBatch,
}

/// A statement about the rows of a group: their number and digest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Said {
    group: u64,
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
    groups: Option<Groups>,
    digester: RowDigester,
    sent: BTreeMap<u64, SentGroup>,
}

impl Sender {
    /// Returns the rows of a batch with their sender.
    fn send(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let rows = batch.num_rows();
        let samples = self.digester.rows(batch).map_err(external)?;
        let groups = self.groups_of(batch)?;
        for (row, (group, sample)) in groups.into_iter().zip(samples).enumerate() {
            let sent = match self.sent.entry(group) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    // A copy, because a slice would keep the whole batch in memory.
                    let first = take_record_batch(batch, &UInt32Array::from(vec![row as u32]))?;
                    entry.insert(SentGroup { said: Said { group, ..Said::default() }, first })
                }
            };
            sent.said.rows += 1;
            sent.said.digest.add(sample);
        }
        self.with_added(batch, Arc::new(BinaryArray::new_null(rows)))
    }

    /// Returns the group of each row of a batch.
    fn groups_of(&self, batch: &RecordBatch) -> Result<Vec<u64>> {
        if let Some(Groups { column, .. }) = &self.groups {
            let values = cast(batch.column(*column), &DataType::UInt64)?;
            let values = values.as_primitive::<UInt64Type>();
            return Ok((0..values.len()).map(|row| values.value(row)).collect());
        }
        match &self.partitioning {
            Partitioning::Hash(keys, partitions) => {
                let keys = keys.iter().map(|key| key.evaluate(batch)?.into_array(batch.num_rows()));
                let keys = keys.collect::<Result<Vec<ArrayRef>>>()?;
                let mut hashes = vec![0; batch.num_rows()];
                create_hashes(&keys, REPARTITION_RANDOM_STATE.random_state(), &mut hashes)?;
                Ok(hashes.into_iter().map(|hash| hash % *partitions as u64).collect())
            }
            _ => Ok(vec![0; batch.num_rows()]),
        }
    }

    /// Returns the statements about the rows that were sent; `None` if there were no rows.
    fn last(&mut self) -> Result<Option<RecordBatch>> {
        let sent = std::mem::take(&mut self.sent);
        let Some(some) = sent.values().next() else { return Ok(None) };
        let rows = concat_batches(&some.first.schema(), sent.values().map(|sent| &sent.first))?;
        let said = sent.values().map(|sent| serde_json::to_vec(&sent.said));
        let said =
            said.collect::<Result<Vec<_>, _>>().map_err(|error| DataFusionError::External(error.into()))?;
        let said = BinaryArray::from_iter_values(said);
        self.with_added(&rows, Arc::new(said)).map(Some)
    }

    fn with_added(&self, batch: &RecordBatch, sent: ArrayRef) -> Result<RecordBatch> {
        let number = |number| Arc::new(UInt64Array::from_value(number, batch.num_rows())) as ArrayRef;
        let added = [number(self.sender), number(self.run), sent];
        let columns = batch.columns().iter().cloned().chain(added).collect();
        Ok(RecordBatch::try_new(Arc::clone(&self.schema), columns)?)
    }
}

/// Keeps one run of each partition, compares its rows with the sender's statements, and removes the columns that
/// [`SentExec`] added.
#[derive(Debug)]
pub(crate) struct ReceivedExec {
    input: Arc<dyn ExecutionPlan>,
    pub(crate) groups: Option<Groups>,
    properties: Arc<PlanProperties>,
}

impl ReceivedExec {
    /// Makes an operator that receives rows of `schema` from an exchange.
    pub(crate) fn new(
        input: Arc<dyn ExecutionPlan>,
        schema: SchemaRef,
        partitioning: Partitioning,
        groups: Option<Groups>,
    ) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            partitioning,
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self { input, groups, properties: Arc::new(properties) }
    }

    /// Makes an operator that receives the rows of an exchange, without the columns that [`SentExec`] added.
    pub(crate) fn of_exchange(input: Arc<dyn ExecutionPlan>, groups: Option<Groups>) -> Self {
        let schema = input.schema();
        let fields = schema.fields()[..schema.fields().len() - ADDED].to_vec();
        let partitioning = input.output_partitioning().clone();
        Self::new(input, Arc::new(ArrowSchema::new(fields)), partitioning, groups)
    }

    /// Returns the checked rows of an exchange. `rows` have the columns of `schema` and those that [`SentExec`] added.
    pub(crate) fn check(
        rows: SendableRecordBatchStream,
        schema: SchemaRef,
        groups: Option<Groups>,
    ) -> Result<SendableRecordBatchStream> {
        let digester = RowDigester::new(&schema).map_err(external)?;
        let receiver = Receiver { schema: Arc::clone(&schema), groups, digester, senders: HashMap::new() };
        let received = futures::stream::try_unfold((rows, receiver), |(mut rows, mut receiver)| async {
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
    operator_methods!("ReceivedExec", |operator| vec![&operator.input], |input| Ok(Arc::new(
        Self::of_exchange(input, operator.groups.clone())
    )));

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        Self::check(self.input.execute(partition, context)?, self.schema(), self.groups.clone())
    }
}

/// The rows that arrived from a partition.
#[derive(Debug)]
struct Received {
    run: u64,
    /// The counts and digests of the rows that arrived, by group; one group if no column groups them.
    groups: BTreeMap<u64, Said>,
    /// The statements of the sender, by group.
    said: BTreeMap<u64, Said>,
}

/// Receives the rows of one partition.
#[derive(Debug)]
struct Receiver {
    schema: SchemaRef,
    groups: Option<Groups>,
    digester: RowDigester,
    /// The rows that arrived, by sending partition.
    senders: HashMap<u64, Received>,
}

impl Receiver {
    /// Returns the rows of a batch that are kept.
    fn receive(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let columns = batch.num_columns() - ADDED;
        let senders = batch.column(columns).as_primitive::<UInt64Type>().clone();
        let runs = batch.column(columns + 1).as_primitive::<UInt64Type>().clone();
        let said = batch.column(columns + 2).as_binary::<i32>().clone();
        let mut kept = vec![true; batch.num_rows()];
        for (row, kept) in kept.iter_mut().enumerate() {
            let run = runs.value(row);
            let received = self.senders.entry(senders.value(row)).or_insert_with(|| Received {
                run,
                groups: BTreeMap::new(),
                said: BTreeMap::new(),
            });
            *kept = received.run == run && said.is_null(row);
            if received.run == run && said.is_valid(row) {
                let said: Said = serde_json::from_slice(said.value(row))
                    .map_err(|error| DataFusionError::External(error.into()))?;
                received.said.insert(said.group, said);
            }
        }
        let rows = RecordBatch::try_new(Arc::clone(&self.schema), batch.columns()[..columns].to_vec())?;
        if kept.iter().all(|kept| *kept) {
            self.count(&rows, senders.values().iter().copied())?;
            return Ok(rows);
        }
        let rows = filter_record_batch(&rows, &BooleanArray::from(kept.clone()))?;
        self.count(&rows, (0..kept.len()).filter(|row| kept[*row]).map(|row| senders.value(row)))?;
        Ok(rows)
    }

    /// Counts and digests rows that are kept.
    fn count(&mut self, rows: &RecordBatch, senders: impl Iterator<Item = u64>) -> Result<()> {
        if rows.num_rows() == 0 {
            return Ok(());
        }
        let groups = match &self.groups {
            Some(Groups { column, .. }) => Some(cast(rows.column(*column), &DataType::UInt64)?),
            None => None,
        };
        let samples: Vec<SampleDigest> = self.digester.rows(rows).map_err(external)?;
        for (row, (sender, sample)) in senders.zip(samples).enumerate() {
            let group = groups.as_ref().map_or(0, |groups| groups.as_primitive::<UInt64Type>().value(row));
            let Some(received) = self.senders.get_mut(&sender) else { continue };
            let counted = received.groups.entry(group).or_insert_with(|| Said { group, ..Said::default() });
            counted.rows += 1;
            counted.digest.add(sample);
        }
        Ok(())
    }

    /// Compares the rows that arrived with the statements of their senders.
    fn finish(&self) -> Result<()> {
        for (partition, received) in &self.senders {
            let nothing = Said::default();
            let pairs: Vec<(&Said, &Said)> = match self.groups {
                Some(_) => {
                    let groups = received.groups.keys().chain(received.said.keys());
                    groups
                        .map(|group| {
                            let sent = received.said.get(group).unwrap_or(&nothing);
                            (sent, received.groups.get(group).unwrap_or(&nothing))
                        })
                        .collect()
                }
                None => vec![(
                    received.said.values().next().unwrap_or(&nothing),
                    received.groups.values().next().unwrap_or(&nothing),
                )],
            };
            for (sent, came) in pairs {
                if (sent.rows, &sent.digest) != (came.rows, &came.digest) {
                    return Err(external(self.difference(*partition, sent, came)));
                }
            }
        }
        Ok(())
    }

    fn difference(&self, partition: u64, sent: &Said, came: &Said) -> crate::Error {
        let of = match &self.groups {
            Some(Groups { name, .. }) => format!(" of {name} {}", sent.group.max(came.group)),
            None => String::new(),
        };
        crate::Error::engine(
            format!(
                "an exchange between machines changed rows{of}: partition {partition:016x} sent {} rows with digest {}, \
                 {} rows with digest {} came",
                sent.rows, sent.digest, came.rows, came.digest
            ),
            "run it again; if it fails again, check the disks of the executors' `--work-dir`",
        )
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{Int64Array, ListArray};
    use datafusion::arrow::datatypes::Int64Type;
    use datafusion::datasource::memory::MemorySourceConfig;
    use datafusion::physical_expr::expressions::Column;
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

    fn groups() -> Option<Groups> {
        Some(Groups { column: 2, name: "bucket".to_owned() })
    }

    /// Returns the rows that a run of partition 7 sends, and its statements after them.
    fn sent(run: u64, rows: &RecordBatch) -> [RecordBatch; 2] {
        let input = MemorySourceConfig::try_new_exec(&[vec![]], rows.schema(), None).unwrap();
        let exec = SentExec::new(input, Partitioning::UnknownPartitioning(1), groups()).unwrap();
        let mut sender = Sender {
            sender: 7,
            run,
            schema: exec.schema(),
            partitioning: Partitioning::UnknownPartitioning(1),
            groups: groups(),
            digester: RowDigester::new(&rows.schema()).unwrap(),
            sent: BTreeMap::new(),
        };
        [sender.send(rows).unwrap(), sender.last().unwrap().unwrap()]
    }

    /// Returns the numbers that are received, or the error.
    fn received(batches: &[RecordBatch]) -> crate::Result<Vec<i64>> {
        let schema = batch(0..0).schema();
        let digester = RowDigester::new(&schema)?;
        let mut receiver = Receiver { schema, groups: groups(), digester, senders: HashMap::new() };
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
        let [rows, said] = sent(1, &batch(0..10));
        let [again, said_again] = sent(2, &batch(0..10));
        let all: Vec<i64> = (0..10).collect();
        assert_eq!(received(&[rows.clone(), said.clone()]).unwrap(), all);
        // A part of the other run's rows suffices to test this.
        let mixed = [rows.slice(0, 4), again.slice(0, 6), rows.slice(4, 6), said_again.clone(), said.clone()];
        assert_eq!(received(&mixed).unwrap(), all);
        assert_eq!(received(&[again, rows, said, said_again]).unwrap(), all);
    }

    #[test]
    fn rows_that_are_lost_or_changed_are_found_and_named() {
        let [rows, said] = sent(1, &batch(0..10));
        let wrong = |batches: &[RecordBatch], bucket: &str| {
            let error = received(batches).unwrap_err().to_string();
            assert!(error.contains(bucket) && error.contains("--work-dir"), "{error}");
        };
        // Number 9 is in bucket 0.
        wrong(&[rows.slice(0, 9), said.clone()], "of bucket 0");
        wrong(&[rows.clone(), rows.slice(4, 1), said.clone()], "of bucket 1");
        wrong(std::slice::from_ref(&rows), "of bucket");
        wrong(&[said], "of bucket");
        // The numbers 0 and 3 are both in bucket 0, but have different lists.
        let [other, said] = sent(1, &batch(3..4));
        let [row, _] = sent(1, &batch(0..1));
        wrong(&[row, said], "of bucket 0");
        drop(other);
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
        let gathered = CoalescePartitionsExec::new(input);
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
            let checked = checked_exchange(Arc::new(again.unwrap()), None).unwrap();
            let checked = collect_partitioned(checked, Arc::clone(&context)).await.unwrap();
            for (plain, checked) in plain.iter().zip(&checked) {
                assert_eq!(sorted(plain), sorted(checked));
            }
            let checked = checked_exchange(Arc::new(gathered), None).unwrap();
            let rows = collect(checked, Arc::clone(&context)).await.unwrap();
            assert_eq!(sorted(&rows), (0..100).collect::<Vec<_>>());
        });
    }
}
