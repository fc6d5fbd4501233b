//! A rule for DataFusion's optimizer: the side of a hash join that carries lists is streamed, not held.
//!
//! A hash join holds one input in memory. DataFusion chooses it by the size that Parquet footers state, which for lists
//! of ids says little: they are dictionary-encoded on disk and hundreds of times larger decoded. In Onefold's queries
//! one side has the lists (the feature log) and the other only scalars (events, attributes, sessions), and holding the
//! scalars is always right.

use std::sync::Arc;

use datafusion::arrow::datatypes::Schema;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::config::ConfigOptions;
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::joins::HashJoinExec;

/// Swaps the inputs of every hash join that would hold lists although its other side has none.
#[derive(Debug)]
struct ProbeLists;

/// DataFusion's own rules, with this one right after the rule that chooses joins' sides.
pub(crate) fn physical_rules() -> Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> {
    let mut rules = PhysicalOptimizer::new().rules;
    let after = rules.iter().position(|rule| rule.name() == "join_selection").map_or(0, |place| place + 1);
    rules.insert(after, Arc::new(ProbeLists));
    rules
}

impl PhysicalOptimizerRule for ProbeLists {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        let swap = |plan: Arc<dyn ExecutionPlan>| match plan.downcast_ref::<HashJoinExec>() {
            Some(join) if has_lists(&join.left().schema()) && !has_lists(&join.right().schema()) => {
                Ok(Transformed::yes(join.swap_inputs(*join.partition_mode())?))
            }
            _ => Ok(Transformed::no(plan)),
        };
        plan.transform_up(swap).data()
    }

    fn name(&self) -> &str {
        "probe_lists"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

fn has_lists(schema: &Schema) -> bool {
    schema.fields().iter().any(|field| field.data_type().is_nested())
}
