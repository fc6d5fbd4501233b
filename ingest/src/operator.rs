//! Code that all operators of this crate share.

use std::sync::Arc;

use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::{ExecutionPlan, Partitioning, PlanProperties};

/// Implements the methods of `ExecutionPlan` for an operator with a field `properties` and the given inputs. The
/// operator has no expressions for optimizer rules, and does not benefit from more partitions of its inputs. The last
/// argument makes a copy of an operator with one input over another input.
macro_rules! operator_methods {
    ($name:literal) => {
        $crate::operator::operator_methods!($name, |_operator| Vec::new());

        fn with_new_children(
            self: std::sync::Arc<Self>,
            _: Vec<std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>>,
        ) -> datafusion::error::Result<std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>> {
            Ok(self)
        }
    };
    ($name:literal, |$operator:ident| $inputs:expr, |$input:ident| $anew:expr) => {
        $crate::operator::operator_methods!($name, |$operator| $inputs);

        fn with_new_children(
            self: std::sync::Arc<Self>,
            children: Vec<std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>>,
        ) -> datafusion::error::Result<std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>> {
            let ($operator, $input) = (&self, $crate::operator::only(children)?);
            let _ = $operator;
            $anew
        }
    };
    ($name:literal, |$operator:ident| $inputs:expr) => {
        fn name(&self) -> &str {
            $name
        }

        fn properties(&self) -> &std::sync::Arc<datafusion::physical_plan::PlanProperties> {
            &self.properties
        }

        fn children(&self) -> Vec<&std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>> {
            let $operator = self;
            $inputs
        }

        fn benefits_from_input_partitioning(&self) -> Vec<bool> {
            vec![false; self.children().len()]
        }

        fn apply_expressions(
            &self,
            _: &mut dyn FnMut(
                &std::sync::Arc<dyn datafusion::physical_expr::PhysicalExpr>,
            )
                -> datafusion::error::Result<datafusion::common::tree_node::TreeNodeRecursion>,
        ) -> datafusion::error::Result<datafusion::common::tree_node::TreeNodeRecursion> {
            Ok(datafusion::common::tree_node::TreeNodeRecursion::Continue)
        }
    };
}

/// Implements the display of an operator in plans: its name, followed by this format.
macro_rules! shown_as {
    ($type:ident, |$operator:ident| $format:literal $(, $value:expr)*) => {
        impl datafusion::physical_plan::DisplayAs for $type {
            fn fmt_as(
                &self,
                _: datafusion::physical_plan::DisplayFormatType,
                f: &mut std::fmt::Formatter<'_>,
            ) -> std::fmt::Result {
                let $operator = self;
                write!(f, concat!(stringify!($type), $format) $(, $value)*)
            }
        }
    };
}

pub(crate) use operator_methods;
pub(crate) use shown_as;

/// Returns the only input that an operator is given.
///
/// # Errors
///
/// If there is not exactly one input.
pub(crate) fn only(inputs: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
    match <[_; 1]>::try_from(inputs) {
        Ok([input]) => Ok(input),
        Err(_) => {
            datafusion::common::internal_err!("an operator of one input is given another number of them")
        }
    }
}

/// Returns the properties of an operator that emits rows incrementally, in no order, in `partitions` partitions.
pub(crate) fn plan_properties(schema: &SchemaRef, partitions: usize) -> Arc<PlanProperties> {
    Arc::new(PlanProperties::new(
        EquivalenceProperties::new(Arc::clone(schema)),
        Partitioning::UnknownPartitioning(partitions),
        EmissionType::Incremental,
        Boundedness::Bounded,
    ))
}
