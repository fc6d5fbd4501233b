//! Identifies a partition of an operator in the whole plan, on an executor that has only a part of the plan.
//!
//! Ballista gives a task the files and exchanged rows that it reads, renumbered from 0. A task that is tried again gets
//! the same ones, on any machine, so they identify the partition.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ballista_core::execution_plans::ShuffleReaderExec;
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::physical_expr::Distribution;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};

/// Returns a number that identifies partition `partition` of `plan`.
///
/// # Errors
///
/// If the plan redistributes rows among partitions within a task.
pub(crate) fn identify(plan: &Arc<dyn ExecutionPlan>, partition: usize) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    describe(plan, partition, &mut hasher)?;
    Ok(hasher.finish())
}

fn describe(plan: &Arc<dyn ExecutionPlan>, partition: usize, hasher: &mut DefaultHasher) -> Result<()> {
    if plan.is::<CoalescePartitionsExec>() {
        // Its single partition holds the rows of all input partitions in every task.
        return Ok(());
    }
    if plan.is::<RepartitionExec>() {
        return datafusion::common::internal_err!("a task deals rows out to partitions");
    }
    if let Some(reader) = plan.downcast_ref::<ShuffleReaderExec>() {
        let first = reader.partition.get(partition).and_then(|locations| locations.first());
        (reader.stage_id, first.map(|location| location.partition_id.partition_id)).hash(hasher);
        return Ok(());
    }
    if let Some(scan) = plan.downcast_ref::<DataSourceExec>() {
        let scan = scan.data_source().downcast_ref::<FileScanConfig>();
        for file in
            scan.and_then(|scan| scan.file_groups.get(partition)).iter().flat_map(|group| group.iter())
        {
            let range = file.range.as_ref().map(|range| (range.start, range.end));
            (file.object_meta.location.as_ref(), range).hash(hasher);
        }
        return Ok(());
    }
    if plan.is::<UnionExec>() {
        let mut first = 0;
        for (number, input) in plan.children().into_iter().enumerate() {
            let partitions = input.output_partitioning().partition_count();
            if partition < first + partitions {
                number.hash(hasher);
                return describe(input, partition - first, hasher);
            }
            first += partitions;
        }
        return datafusion::common::internal_err!("a union has no partition {partition}");
    }
    let requirements = plan.input_distribution_requirements();
    let distributions: Vec<_> = requirements.per_child_distributions().collect();
    for (number, input) in plan.children().into_iter().enumerate() {
        // An input that every task reads whole does not identify the partition.
        if !matches!(distributions.get(number), Some(Distribution::SinglePartition)) {
            number.hash(hasher);
            describe(input, partition, hasher)?;
        }
    }
    Ok(())
}
