//! The execution of tasks by an executor.

use std::collections::HashSet;
use std::sync::Arc;

use ballista_core::JobId;
use ballista_core::execution_plans::ShuffleReaderExec;
use ballista_core::execution_plans::sort_shuffle::SortShuffleWriterExec;
use ballista_core::serde::scheduler::PartitionLocation;
use ballista_executor::execution_engine::{DefaultExecutionEngine, ExecutionEngine, QueryStageExecutor};
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionConfig;
use onefold_ingest::executor::of_run;

use crate::identity::identify;

/// Ballista's engine with three additions: it reads each output of a stage once, tells the operators of
/// `onefold-ingest` which partition and run they belong to, and limits the memory of exchanges.
pub(crate) struct Engine {
    inner: DefaultExecutionEngine,
    exchange_bytes: usize,
}

impl Engine {
    /// Makes an engine in which an exchange holds up to `exchange_bytes` bytes of rows per task before it writes them.
    pub(crate) fn new(exchange_bytes: u64) -> Self {
        let exchange_bytes = usize::try_from(exchange_bytes).unwrap_or(usize::MAX);
        Self { inner: DefaultExecutionEngine::new(), exchange_bytes }
    }
}

impl ExecutionEngine for Engine {
    fn create_query_stage_exec(
        &self,
        job: JobId,
        stage: usize,
        task: usize,
        partitions: Vec<usize>,
        plan: Arc<dyn ExecutionPlan>,
        work_dir: &str,
        config: &SessionConfig,
    ) -> Result<Arc<dyn QueryStageExecutor>> {
        let plan = of_run(each_output_once(plan)?, task as u64, &identify)?;
        let plan = match plan.downcast_ref::<SortShuffleWriterExec>() {
            Some(writer) => Arc::new(SortShuffleWriterExec::try_new(
                job.clone(),
                stage,
                Arc::clone(plan.children()[0]),
                work_dir.to_owned(),
                writer.shuffle_output_partitioning().clone(),
                writer.config().clone().with_memory_limit_per_task_bytes(self.exchange_bytes),
            )?),
            None => plan,
        };
        self.inner.create_query_stage_exec(job, stage, task, partitions, plan, work_dir, config)
    }
}

/// Rewrites a plan so that it reads the output of each task of an earlier stage once.
///
/// When an executor is lost, Ballista runs the stages again whose input it held. In Ballista 55 the stages that read
/// their output also receive the locations of the earlier run. A stage numbers its tasks by the parts of its input, so
/// a task's number and a partition identify an output. Only the last location of each such pair is kept.
fn each_output_once(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let once = |plan: Arc<dyn ExecutionPlan>| {
        let Some(reader) = plan.downcast_ref::<ShuffleReaderExec>() else { return Ok(Transformed::no(plan)) };
        let mut partitions = reader.partition.clone();
        partitions.iter_mut().for_each(keep_last);
        if partitions.iter().map(Vec::len).eq(reader.partition.iter().map(Vec::len)) {
            return Ok(Transformed::no(plan));
        }
        // This copies the reader. The engine sets the work folder of the copy later.
        let mut reader = reader.with_work_dir(String::new());
        reader.partition = partitions;
        Ok(Transformed::yes(Arc::new(reader) as _))
    };
    Ok(plan.transform(once)?.data)
}

/// Keeps the last output of each pair of task number and partition.
fn keep_last(outputs: &mut Vec<PartitionLocation>) {
    let mut seen = HashSet::new();
    outputs.reverse();
    outputs.retain(|output| seen.insert((output.partition_id.partition_id, output.map_partition_id)));
    outputs.reverse();
}

#[cfg(test)]
mod tests {
    use ballista_core::serde::scheduler::{
        ExecutorMetadata, ExecutorOperatingSystemSpecification, ExecutorSpecification, PartitionId,
        PartitionStats,
    };
    use datafusion::arrow::datatypes::Schema;
    use datafusion::physical_plan::Partitioning;

    use super::*;

    /// Returns the location of a partition that a task wrote on an executor.
    fn output(executor: &str, task: usize, partition: usize) -> PartitionLocation {
        PartitionLocation {
            map_partition_id: task,
            partition_id: PartitionId::new(&JobId::from("job".to_owned()), 1, partition),
            executor_meta: ExecutorMetadata {
                id: executor.to_owned(),
                host: "127.0.0.1".to_owned(),
                port: 1,
                grpc_port: 1,
                specification: ExecutorSpecification::default(),
                os_info: ExecutorOperatingSystemSpecification::default(),
            },
            partition_stats: PartitionStats::default(),
            file_id: Some(task as u64),
            is_sort_shuffle: true,
        }
    }

    /// Returns the executor, task and partition of each output that is read, per partition of the reader.
    fn read(partitions: Vec<Vec<PartitionLocation>>) -> Vec<Vec<(String, usize, usize)>> {
        let partitioning = Partitioning::UnknownPartitioning(partitions.len());
        let reader =
            ShuffleReaderExec::try_new(1, partitions, Arc::new(Schema::empty()), partitioning).unwrap();
        let plan = each_output_once(Arc::new(reader)).unwrap();
        let reader = plan.downcast_ref::<ShuffleReaderExec>().unwrap();
        let of = |at: &PartitionLocation| {
            (at.executor_meta.id.clone(), at.map_partition_id, at.partition_id.partition_id)
        };
        reader.partition.iter().map(|outputs| outputs.iter().map(of).collect()).collect()
    }

    #[test]
    fn the_last_of_two_outputs_of_a_task_is_read() {
        let partition = |number| {
            let before = [output("a", 1, number), output("a", 2, number)];
            let again = [output("b", 0, number), output("a", 1, number), output("b", 2, number)];
            before.into_iter().chain(again).collect::<Vec<_>>()
        };
        let expected = |number| {
            ["b", "a", "b"]
                .into_iter()
                .zip(0..)
                .map(|(id, task)| (id.to_owned(), task, number))
                .collect::<Vec<_>>()
        };
        assert_eq!(read(vec![partition(0), partition(1)]), vec![expected(0), expected(1)]);
    }

    #[test]
    fn the_partitions_of_a_task_are_all_read() {
        let outputs = vec![output("a", 0, 0), output("a", 0, 1), output("b", 1, 0), output("b", 1, 1)];
        assert_eq!(read(vec![outputs])[0].len(), 4);
    }
}
