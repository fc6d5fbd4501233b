//! An optimizer rule for DataFusion: a hash join streams the side with lists, and holds the other side in memory.
//!
//! A hash join holds one input in memory. DataFusion chooses this input by the sizes in Parquet footers. These are
//! misleading for lists of ids, which are dictionary-encoded on disk and hundreds of times larger when decoded. In
//! Onefold's queries one side has the lists (the feature log) and the other side has only scalars (events, attributes,
//! sessions), so the scalars are held. The records of samples, which are byte strings, count as lists.
//!
//! The scalars are held once for all partitions of the other side. DataFusion would split both sides by a hash of the
//! key, and splitting copies each list. On a cluster, each task holds the whole side if its files are small.

use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::common::JoinType;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfig};
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::joins::{HashJoinExec, PartitionMode};

/// Swaps the inputs of each hash join that would hold lists although its other side has none, and splits neither input.
/// `held_bytes` is the largest total file size of a side that is held whole; there is no limit if it is `None`.
pub(crate) fn probe_lists(
    plan: Arc<dyn ExecutionPlan>,
    held_bytes: Option<u64>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let holds = |side: &Arc<dyn ExecutionPlan>| held_bytes.is_none_or(|most| file_bytes(side) <= most);
    let arrange = |plan: Arc<dyn ExecutionPlan>| {
        let Some(join) = plan.downcast_ref::<HashJoinExec>() else { return Ok(Transformed::no(plan)) };
        let lists = (has_lists(&join.left().schema()), has_lists(&join.right().schema()));
        let mode = |join_type, held| match streams_once(join_type) && holds(held) {
            true => PartitionMode::CollectLeft,
            // On a cluster, the only other way to join is to split both sides.
            false if held_bytes.is_some() => PartitionMode::Partitioned,
            false => *join.partition_mode(),
        };
        match lists {
            (true, false) => {
                let mode = mode(join.join_type().swap(), join.right());
                Ok(Transformed::yes(join.swap_inputs(mode)?))
            }
            (false, true) if *join.partition_mode() == PartitionMode::Partitioned => {
                let mode = mode(*join.join_type(), join.left());
                Ok(Transformed::yes(Arc::new(join.builder().with_partition_mode(mode).build()?)))
            }
            _ => Ok(Transformed::no(plan)),
        }
    };
    plan.transform_up(arrange).data()
}

/// Returns the total bytes of the files that a plan reads.
fn file_bytes(plan: &Arc<dyn ExecutionPlan>) -> u64 {
    let scan = plan.downcast_ref::<DataSourceExec>();
    let scan = scan.and_then(|scan| scan.data_source().downcast_ref::<FileScanConfig>());
    let files = scan.iter().flat_map(|scan| &scan.file_groups).flat_map(FileGroup::iter);
    let own: u64 = files
        .map(|file| {
            file.range
                .as_ref()
                .map_or(file.object_meta.size, |range| u64::try_from(range.end - range.start).unwrap_or(0))
        })
        .sum();
    own + plan.children().into_iter().map(file_bytes).sum::<u64>()
}

/// Returns whether a join of this type outputs no rows for held rows without a partner.
fn streams_once(join_type: JoinType) -> bool {
    matches!(join_type, JoinType::Inner | JoinType::Right | JoinType::RightSemi | JoinType::RightAnti)
}

/// Returns whether rows are wide: they have lists, or byte strings such as the records of samples.
fn has_lists(schema: &Schema) -> bool {
    schema.fields().iter().any(|field| is_wide(field.data_type()))
}

/// Returns whether the values of a column are lists, or byte strings such as the records of samples.
pub(crate) fn is_wide(data_type: &DataType) -> bool {
    data_type.is_nested() || data_type.is_binary()
}

#[cfg(test)]
mod tests {
    use datafusion::execution::SessionStateBuilder;
    use datafusion::physical_plan::Partitioning;
    use datafusion::physical_plan::repartition::RepartitionExec;
    use datafusion::prelude::{SessionConfig, SessionContext};
    use onefold_sql::Query as _;

    use super::*;
    use crate::engine::physical_rules;
    use crate::spilling_join::SpillingJoin;

    /// Returns the types of the columns that the only hash join of the plan holds. Checks that no side with lists is
    /// split.
    fn held(query: &str) -> Vec<String> {
        // With these thresholds, only our rule makes a join hold a whole side.
        let mut config = SessionConfig::new().with_target_partitions(2);
        config.options_mut().optimizer.hash_join_single_partition_threshold = 0;
        config.options_mut().optimizer.hash_join_single_partition_threshold_rows = 0;
        let state = SessionStateBuilder::new()
            .with_default_features()
            .with_config(config)
            .with_physical_optimizer_rules(physical_rules(None));
        let context = SessionContext::new_with_state(state.build());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let plan = runtime.block_on(async {
            // The side with lists has fewer rows, so DataFusion alone would hold it.
            context.query("CREATE TABLE lists AS VALUES (1, [1, 2]), (2, [3])").await.unwrap();
            context.query("CREATE TABLE scalars AS VALUES (1, 10), (2, 20), (3, 30), (4, 40)").await.unwrap();
            context.query(query).await.unwrap().create_physical_plan().await.unwrap()
        });
        let mut found = Vec::new();
        let _ = plan.transform_down(|plan| {
            if let Some(split) = plan.downcast_ref::<RepartitionExec>() {
                let by_hash = matches!(split.partitioning(), Partitioning::Hash(..));
                assert!(!by_hash || !has_lists(&split.schema()), "{query}: lists are split");
            }
            if plan.is::<SpillingJoin>() {
                let held = plan.children()[0].schema();
                found.push(held.fields().iter().map(|field| field.data_type().to_string()).collect());
            }
            Ok(Transformed::no(plan))
        });
        assert_eq!(found.len(), 1, "{query}");
        found.remove(0)
    }

    #[test]
    fn the_side_with_lists_is_never_held() {
        let select = "SELECT l.column2, s.column2 FROM";
        for query in [
            format!("{select} lists l JOIN scalars s ON l.column1 = s.column1"),
            format!("{select} scalars s JOIN lists l ON l.column1 = s.column1"),
            format!("{select} lists l LEFT JOIN scalars s ON l.column1 = s.column1"),
        ] {
            assert_eq!(held(&query), ["Int64", "Int64"], "{query}");
        }
    }
}
