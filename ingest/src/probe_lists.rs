//! A rule for DataFusion's optimizer: the side of a hash join that carries lists is streamed, not held.
//!
//! A hash join holds one input in memory. DataFusion chooses it by the size that Parquet footers state, which for lists
//! of ids says little: they are dictionary-encoded on disk and hundreds of times larger decoded. In Onefold's queries
//! one side has the lists (the feature log) and the other only scalars (events, attributes, sessions), and holding the
//! scalars is always right. The records of samples, which are bytes, count as lists.
//!
//! That side is held once, for all partitions of the other. DataFusion would split both sides by a hash of the key, and
//! splitting copies every list.

use std::sync::Arc;

use datafusion::arrow::datatypes::Schema;
use datafusion::common::JoinType;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::config::ConfigOptions;
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::joins::{HashJoinExec, PartitionMode};

/// Swaps the inputs of every hash join that would hold lists although its other side has none, and splits neither.
#[derive(Debug)]
pub(crate) struct ProbeLists;

impl PhysicalOptimizerRule for ProbeLists {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        let arrange = |plan: Arc<dyn ExecutionPlan>| {
            let Some(join) = plan.downcast_ref::<HashJoinExec>() else { return Ok(Transformed::no(plan)) };
            let lists = (has_lists(&join.left().schema()), has_lists(&join.right().schema()));
            let mode = |join_type| match streams_once(join_type) {
                true => PartitionMode::CollectLeft,
                false => *join.partition_mode(),
            };
            match lists {
                (true, false) => Ok(Transformed::yes(join.swap_inputs(mode(join.join_type().swap()))?)),
                (false, true) if *join.partition_mode() == PartitionMode::Partitioned => {
                    let join = join.builder().with_partition_mode(mode(*join.join_type())).build()?;
                    Ok(Transformed::yes(Arc::new(join)))
                }
                _ => Ok(Transformed::no(plan)),
            }
        };
        plan.transform_up(arrange).data()
    }

    fn name(&self) -> &str {
        "probe_lists"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Whether a join of this type, seen from the side that it holds, gives no row for what finds no partner there.
fn streams_once(join_type: JoinType) -> bool {
    matches!(join_type, JoinType::Inner | JoinType::Right | JoinType::RightSemi | JoinType::RightAnti)
}

/// Whether rows are wide: they have lists, or bytes as the records of samples are.
fn has_lists(schema: &Schema) -> bool {
    schema.fields().iter().any(|field| field.data_type().is_nested() || field.data_type().is_binary())
}

#[cfg(test)]
mod tests {
    use datafusion::execution::SessionStateBuilder;
    use datafusion::physical_plan::Partitioning;
    use datafusion::physical_plan::repartition::RepartitionExec;
    use datafusion::prelude::{SessionConfig, SessionContext};

    use super::*;
    use crate::engine::physical_rules;
    use crate::spilling_join::SpillingJoin;

    /// The schema of the side that the plan's only hash join holds. No side with lists may be split.
    fn held(query: &str) -> Vec<String> {
        // Nothing is small enough to be held whole but by our rule.
        let mut config = SessionConfig::new().with_target_partitions(2);
        config.options_mut().optimizer.hash_join_single_partition_threshold = 0;
        config.options_mut().optimizer.hash_join_single_partition_threshold_rows = 0;
        let state = SessionStateBuilder::new()
            .with_default_features()
            .with_config(config)
            .with_physical_optimizer_rules(physical_rules());
        let context = SessionContext::new_with_state(state.build());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let plan = runtime.block_on(async {
            // The lists' side has fewer rows, so DataFusion alone would hold it.
            context.sql("CREATE TABLE lists AS VALUES (1, [1, 2]), (2, [3])").await.unwrap();
            context.sql("CREATE TABLE scalars AS VALUES (1, 10), (2, 20), (3, 30), (4, 40)").await.unwrap();
            context.sql(query).await.unwrap().create_physical_plan().await.unwrap()
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
