//! The preprocessing stage: applies the steps of a `preprocess.toml` to a batch, once per distinct row.
//!
//! ```text
//! preprocess.toml ──▶ PreprocessConfig ──Schema──▶ Preprocessor ──run──▶ Batch
//!     (text)           (checked steps)              (a plan)         (one per Batch)
//! ```
//!
//! [`Preprocessor::run`] gives the same result as the steps would give on the expanded batch, sample by sample. It
//! does not change inverse indices. `sampling` steps run first, independent of their position in the file, because
//! their decisions do not depend on other steps.
//!
//! ```toml
#![doc = include_str!("example.toml")]
//! ```
//!
//! # Operators
//!
//! `docs/src/reference/preprocess-toml.md` defines all operators, their keys and defaults, and the groups of the features
//! that they generate.
//!
//! # Shared work
//!
//! Operators that map single ids run once per id of the feature's *buffer*: rows that overlap in the buffer keep
//! overlapping, and values that no row uses are removed. `firstx`, `lastx`, `enumerate` and `fill_null` write only
//! offsets and sizes, and `ngram` keeps overlapping rows overlapping. Consecutive steps that map single ids run in
//! one pass over blocks that fit into the L1 cache. The `firstx` and `lastx` steps among them run before this pass.

mod arguments;
mod columns;
mod config;
mod dense;
mod layout;
mod lists;
mod local_hour;
mod pairs;
mod per_value;
mod plan;
mod problem;
mod run;
mod sampling;
#[cfg(test)]
mod tests;

pub use config::PreprocessConfig;
#[cfg(all(test, feature = "service"))]
pub(crate) use config::operator_names;
pub(crate) use sampling::Sampler;

use onefold_datasets::Schema;

use crate::batch::Batch;
use crate::error::{Error, Result};
use layout::SparseAt;
use plan::{Action, Plan};
use run::Running;

/// The steps of a [`PreprocessConfig`], bound to a schema.
#[derive(Debug)]
pub struct Preprocessor {
    input: Schema,
    output: Schema,
    plan: Plan,
}

impl Preprocessor {
    /// Binds the steps to batches of `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`], with the step, if a feature or label does not exist or has a kind that the operator does not
    /// take, if the name of a generated feature or group is already used, or if the number of inputs is not the one
    /// that the operator takes.
    pub fn try_new(config: &PreprocessConfig, schema: &Schema) -> Result<Self> {
        let plan = Plan::try_new(config, schema)?;
        Ok(Self { input: schema.clone(), output: plan.layout.to_schema(), plan })
    }

    /// Returns the schema of the batches that [`run`](Self::run) returns.
    pub fn schema(&self) -> &Schema {
        &self.output
    }

    /// Returns the names of the input's dense features that no step changes, in order.
    pub fn unchanged_dense(&self) -> Vec<String> {
        let changed = |at: usize| self.plan.actions.iter().any(|(_, action)| action.changes_dense(at));
        let names = self.input.dense.iter().enumerate();
        names.filter(|(at, _)| !changed(*at)).map(|(_, name)| name.clone()).collect()
    }

    /// Returns the names of the input's sparse features whose lists no step changes, in order. `sampling` does not
    /// change lists.
    pub fn unchanged_sparse(&self) -> Vec<String> {
        let changed = |at: SparseAt| self.plan.actions.iter().any(|(_, action)| action.changes_sparse(at));
        let groups = self.input.groups.iter().enumerate();
        let features = groups.flat_map(|(group, of_group)| {
            let features = of_group.features.iter().enumerate();
            features.map(move |(feature, sparse)| (SparseAt { group, feature }, &sparse.name))
        });
        features.filter(|(at, _)| !changed(*at)).map(|(_, name)| name.clone()).collect()
    }

    /// Returns whether input batches must have timestamps.
    pub fn needs_timestamps(&self) -> bool {
        self.plan.actions.iter().any(|(_, action)| matches!(action, Action::LocalHour { .. }))
    }

    /// Returns the `sampling` steps, if there are any.
    pub(crate) fn sampler(&self) -> Option<&Sampler> {
        Some(&self.plan.sampler).filter(|sampler| !sampler.is_empty())
    }

    /// Applies all steps except `sampling`, which the reader applies before it cuts batches. The result contains no
    /// values that no row uses.
    ///
    /// Buffers that have no other owner are changed in place.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the batch does not match the schema or lacks timestamps; [`Error::Fault`] for times
    /// that a step cannot process, and for a feature that would have more than 2^27 ids.
    pub fn run(&self, batch: Batch) -> Result<Batch> {
        self.check(&batch)?;
        let mut running = Running::new(batch, &self.plan.layout, self.input.dense.len());
        for (location, action) in &self.plan.actions {
            running.apply(action).map_err(|problem| location.error(problem))?;
        }
        running.finish()
    }

    /// Checks that `batch` matches the input schema.
    fn check(&self, batch: &Batch) -> Result<()> {
        // The batch has weights if sampling has added them, so the output schema decides.
        batch.check_schema(&self.input, self.output.weight.is_some())?;
        if batch.timestamps().is_none() && self.needs_timestamps() {
            let message = "the batch has none, but a step of the preprocessing needs them";
            return Err(Error::invariant("timestamps", message));
        }
        Ok(())
    }
}
