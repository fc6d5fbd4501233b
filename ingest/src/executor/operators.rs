//! The encoding of operators for other machines: a text, the inputs, and a plan of DataFusion's operators for the part
//! that DataFusion can encode.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::FunctionRegistry;
use datafusion::logical_expr::ScalarUDF;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::joins::HashJoinExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, Partitioning};
use datafusion::prelude::SessionContext;
use onefold_datasets::CountBudget;
use serde::{Deserialize, Serialize};

use super::ExecutorMemory;
use crate::cluster::{FoldExec, FoldSpec, SentLists, WriteExec, WriteSpec, WrittenLists};
use crate::ids;
use crate::merge::{OldRowsExec, OldRowsSpec};
use crate::remote::{ReceivedExec, SentExec, WorkRowsExec, WorkRowsSpec};
use crate::sources::{SentScan, refused_function};
use crate::spilling_join::SpillingJoin;
use crate::{session_ids, signed_lengths, timeline, times};

/// An operator of this crate, encoded without its inputs.
#[derive(Debug)]
pub struct Sent {
    /// The description of the operator, as JSON.
    pub text: Vec<u8>,
    /// The part of the operator that DataFusion can encode: a plan of its own operators.
    pub plan: Option<Arc<dyn ExecutionPlan>>,
}

/// The description of an operator.
#[derive(Debug, Serialize, Deserialize)]
enum Operator {
    Fold(Box<FoldSpec>),
    /// The specification, and the list columns.
    Write(Box<WriteSpec>, SentLists),
    WorkRows(WorkRowsSpec),
    /// The part is an exchange with the same partitioning if there are several partitions.
    Sent,
    /// The part is an empty plan with the columns and the keys of the rows.
    Received,
    /// The part is the hash join over empty inputs.
    Join,
    /// The part is the scan of DataFusion's own format.
    Scan(Box<SentScan>),
    /// The specification, and the list columns. The part is an empty plan with the columns of the rows.
    OldRows(Box<OldRowsSpec>, SentLists),
}

/// Encodes an operator of this crate; returns `None` for other operators.
///
/// # Errors
///
/// If no other machine can execute the operator.
pub fn write_operator(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Sent>> {
    let (operator, part) = if let Some(fold) = plan.downcast_ref::<FoldExec>() {
        (Operator::Fold(Box::new(fold.spec().clone())), None)
    } else if let Some(write) = plan.downcast_ref::<WriteExec>() {
        let (spec, WrittenLists::InFiles(lists, _)) = write.parts() else {
            return datafusion::common::internal_err!("the lists that a cluster writes are in memory");
        };
        (Operator::Write(Box::new(spec.clone()), lists.clone()), None)
    } else if let Some(rows) = plan.downcast_ref::<WorkRowsExec>() {
        (Operator::WorkRows(rows.spec.clone()), None)
    } else if let Some(sent) = plan.downcast_ref::<SentExec>() {
        let exchange = match &sent.partitioning {
            Partitioning::Hash(..) => Some(partitioned(sent.children()[0], &sent.partitioning)?),
            _ => None,
        };
        (Operator::Sent, exchange)
    } else if plan.is::<ReceivedExec>() {
        (Operator::Received, Some(partitioned(plan, plan.output_partitioning())?))
    } else if let Some(join) = plan.downcast_ref::<SpillingJoin>() {
        let inputs = join.children().into_iter().map(empty).collect();
        (Operator::Join, Some(join.hash_join()?.builder().with_new_children(inputs)?.build_exec()?))
    } else if let Some((scan, plan)) = SentScan::of(plan)? {
        (Operator::Scan(Box::new(scan)), Some(plan))
    } else if let Some(rows) = plan.downcast_ref::<OldRowsExec>() {
        let (spec, WrittenLists::InFiles(lists, _)) = rows.parts() else {
            return datafusion::common::internal_err!("the lists that a cluster reads are in memory");
        };
        (Operator::OldRows(Box::new(spec.clone()), lists.clone()), Some(empty(plan)))
    } else {
        return Ok(None);
    };
    let text = serde_json::to_vec(&operator).map_err(unreadable)?;
    Ok(Some(Sent { text, plan: part }))
}

/// Decodes an operator, and puts it over its inputs.
///
/// # Errors
///
/// If the text does not describe an operator of this crate, or a part is missing.
pub fn read_operator(
    sent: Sent,
    inputs: &[Arc<dyn ExecutionPlan>],
    memory: Option<&ExecutorMemory>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let operator: Operator = serde_json::from_slice(&sent.text).map_err(unreadable)?;
    let input = || inputs.first().cloned().ok_or_else(|| missing("an input"));
    let part = || sent.plan.clone().ok_or_else(|| missing("a plan"));
    Ok(match operator {
        Operator::Fold(mut spec) => {
            // The machine that folds sets the memory. A process that executes nothing, such as the scheduler, needs
            // none.
            let (state_bytes, budget) = match memory {
                Some(memory) => memory.of_fold(spec.counts_ids()),
                None => (0, CountBudget::new(0)),
            };
            spec.set_memory(state_bytes, &budget);
            Arc::new(FoldExec::new(*spec, budget, input()?)?)
        }
        Operator::Write(spec, lists) => {
            let maps = memory.map_or_else(Arc::default, |memory| Arc::clone(&memory.maps));
            let encoders = memory.map(|memory| memory.encoders.clone());
            let lists = WrittenLists::InFiles(lists, maps);
            Arc::new(WriteExec::new(Arc::new(*spec), lists, inputs.to_vec(), encoders))
        }
        Operator::WorkRows(spec) => Arc::new(WorkRowsExec::new(spec, input()?)),
        Operator::Sent => {
            let partitioning = match &sent.plan {
                Some(exchange) => exchange.output_partitioning().clone(),
                None => Partitioning::UnknownPartitioning(1),
            };
            Arc::new(SentExec::new(input()?, partitioning)?)
        }
        Operator::Received => {
            let (input, rows) = (input()?, part()?);
            Arc::new(ReceivedExec::new(input, rows.schema(), rows.output_partitioning()))
        }
        Operator::Join => {
            let plan = part()?;
            let join = plan.downcast_ref::<HashJoinExec>().ok_or_else(|| missing("a hash join"))?;
            let join =
                join.builder().with_new_children(inputs.to_vec())?.recompute_properties().build_exec()?;
            Arc::new(SpillingJoin::new(join))
        }
        Operator::Scan(scan) => scan.read(&part()?)?,
        Operator::OldRows(spec, lists) => {
            let maps = memory.map_or_else(Arc::default, |memory| Arc::clone(&memory.maps));
            let lists = WrittenLists::InFiles(lists, maps);
            Arc::new(OldRowsExec::new(Arc::new(*spec), lists, &part()?.schema(), input()?))
        }
    })
}

/// A function that returns a number which identifies a partition of an operator in the whole plan.
pub type Identify<'a> = dyn Fn(&Arc<dyn ExecutionPlan>, usize) -> Result<u64> + 'a;

/// Prepares a part of a plan for one run on a machine. `identify` returns the same number for a partition of an
/// operator in each run.
///
/// # Errors
///
/// The errors of `identify`.
pub fn of_run(
    plan: Arc<dyn ExecutionPlan>,
    run: u64,
    identify: &Identify<'_>,
) -> Result<Arc<dyn ExecutionPlan>> {
    plan.transform_down(|plan| {
        let Some(sent) = plan.downcast_ref::<SentExec>() else { return Ok(Transformed::no(plan)) };
        let input = sent.children()[0];
        let partitions = 0..input.output_partitioning().partition_count();
        let partitions = partitions.map(|partition| identify(input, partition)).collect::<Result<_>>()?;
        Ok(Transformed::yes(Arc::new(sent.of_run(partitions, run)) as Arc<dyn ExecutionPlan>))
    })
    .data()
}

/// Returns the SQL functions of this crate that executors need.
///
/// # Errors
///
/// If DataFusion lacks a function that one of these replaces.
pub fn functions() -> Result<Vec<Arc<ScalarUDF>>> {
    let context = SessionContext::new();
    signed_lengths::register(&context)?;
    context.register_udf(session_ids::function());
    context.register_udf(times::function());
    context.register_udf(times::change_function());
    context.register_udf(timeline::class_function());
    ids::functions::register(&context);
    context.register_udf(refused_function());
    let names = context.udfs();
    names.iter().map(|name| context.udf(name)).collect()
}

/// Encodes an SQL function that is made for one configuration; returns `None` for functions that every machine knows by
/// name.
///
/// # Errors
///
/// If the function cannot be encoded.
pub fn write_function(function: &ScalarUDF) -> Result<Option<Vec<u8>>> {
    ids::functions::write_timeline_function(function)
}

/// Decodes an SQL function.
///
/// # Errors
///
/// If [`write_function`] did not encode it.
pub fn read_function(sent: &[u8]) -> Result<Arc<ScalarUDF>> {
    ids::functions::read_timeline_function(sent).map(Arc::new)
}

/// Returns a plan without rows that has the columns and the number of partitions of `plan`.
fn empty(plan: &Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
    let partitions = plan.output_partitioning().partition_count();
    Arc::new(EmptyExec::new(plan.schema()).with_partitions(partitions))
}

/// Returns a plan without rows that has the columns of `plan` and the keys of `partitioning`, if it has keys.
fn partitioned(plan: &Arc<dyn ExecutionPlan>, partitioning: &Partitioning) -> Result<Arc<dyn ExecutionPlan>> {
    Ok(match partitioning {
        Partitioning::Hash(..) => Arc::new(RepartitionExec::try_new(empty(plan), partitioning.clone())?),
        _ => empty(plan),
    })
}

fn unreadable(error: serde_json::Error) -> DataFusionError {
    DataFusionError::External(format!("an operator cannot be sent: {error}").into())
}

fn missing(what: &str) -> DataFusionError {
    DataFusionError::Internal(format!("an operator was sent without {what}"))
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::datatypes::{DataType, Field, Schema};
    use datafusion::physical_expr::expressions::Column;

    use super::*;
    use crate::remote::checked_exchange;

    #[test]
    fn a_receiver_keeps_its_keys() {
        let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, false)]));
        let rows: Arc<dyn ExecutionPlan> = Arc::new(EmptyExec::new(schema).with_partitions(3));
        let by_id = Partitioning::Hash(vec![Arc::new(Column::new("id", 0))], 5);
        let exchange: Arc<dyn ExecutionPlan> =
            Arc::new(RepartitionExec::try_new(rows, by_id.clone()).unwrap());
        let received = checked_exchange(&exchange).unwrap();
        let sent = write_operator(&received).unwrap().unwrap();
        // On an executor, the rows come from elsewhere.
        let elsewhere = EmptyExec::new(received.children()[0].schema()).with_partitions(5);
        let read = read_operator(sent, &[Arc::new(elsewhere)], None).unwrap();
        assert_eq!((read.schema(), read.output_partitioning()), (received.schema(), &by_id));
    }
}
