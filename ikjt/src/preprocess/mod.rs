//! The preprocessing stage: a `preprocess.toml` of steps that a batch goes through, once per distinct row.
//!
//! ```text
//! preprocess.toml ──▶ PreprocessConfig ──Schema──▶ Preprocessor ──run──▶ Batch
//!     (text)           (checked steps)              (a plan)         (one per Batch)
//! ```
//!
//! [`Preprocessor::run`] gives what the steps would give on the expanded batch, sample by sample; the inverse indices
//! are untouched. `sampling` comes first, wherever it stands: what stays depends on no other step.
//!
//! ```toml
#![doc = include_str!("example.toml")]
//! ```
//!
//! # Operators
//!
//! `docs/src/reference/preprocess-toml.md` defines all operators, their keys and defaults, and the groups of the features
//! that they make.
//!
//! # What is done once
//!
//! Steps that change ids one by one run once per id of the feature's *buffer*: windows that overlap there stay
//! windows, and slices that no row uses are left out. `firstx`, `lastx`, `enumerate` and `fill_null` write offsets and
//! sizes only, and `ngram` keeps overlapping rows overlapping. Consecutive steps of the first kind run as one pass over
//! blocks that fit into the L1 cache, after the `firstx` and `lastx` among them.

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

use crate::{Batch, Error, Result};
use layout::SparseAt;
use plan::Plan;
use run::Running;

/// The steps of a [`PreprocessConfig`], bound to a schema.
#[derive(Debug)]
pub struct Preprocessor {
    input: Schema,
    output: Schema,
    plan: Plan,
    needs_timestamps: bool,
}

impl Preprocessor {
    /// Binds the steps to batches of `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`], with the step, for features and labels that there are not, or that are of another kind
    /// than the operator takes; for a generated feature or group whose name is used already; and for more or fewer
    /// inputs than the operator takes.
    pub fn try_new(config: &PreprocessConfig, schema: &Schema) -> Result<Self> {
        let plan = Plan::try_new(config, schema)?;
        let (output, needs_timestamps) = (plan.layout.to_schema(), plan.needs_timestamps());
        Ok(Self { input: schema.clone(), output, plan, needs_timestamps })
    }

    /// The schema of the batches that [`run`](Self::run) gives.
    pub fn schema(&self) -> &Schema {
        &self.output
    }

    /// The dense features that come out as they came in, in order.
    pub fn unchanged_dense(&self) -> Vec<String> {
        let changed = |at: usize| self.plan.actions.iter().any(|(_, action)| action.changes_dense(at));
        let names = self.input.dense.iter().enumerate();
        names.filter(|(at, _)| !changed(*at)).map(|(_, name)| name.clone()).collect()
    }

    /// The sparse features whose lists come out as they came in, in order. `sampling` changes no list.
    pub fn unchanged_sparse(&self) -> Vec<String> {
        let changed = |at: SparseAt| self.plan.actions.iter().any(|(_, action)| action.changes_sparse(at));
        let groups = self.input.groups.iter().enumerate();
        let features = groups.flat_map(|(group, of_group)| {
            let features = of_group.features.iter().enumerate();
            features.map(move |(feature, sparse)| (SparseAt { group, feature }, &sparse.name))
        });
        features.filter(|(at, _)| !changed(*at)).map(|(_, name)| name.clone()).collect()
    }

    /// Whether the batches that come in must have timestamps.
    pub fn needs_timestamps(&self) -> bool {
        self.needs_timestamps
    }

    /// The `sampling` steps, if there are any.
    pub(crate) fn sampler(&self) -> Option<&Sampler> {
        Some(&self.plan.sampler).filter(|sampler| !sampler.is_empty())
    }

    /// The samples of `batch` that the `sampling` steps keep in an epoch, with the weights that correct for the others.
    /// `first` is the place of the batch's first sample in the dataset: the decision depends on the place of a sample,
    /// its label and the epoch alone. The reader calls this before it cuts batches.
    pub fn sample(&self, batch: Batch, epoch: u64, first: u64) -> Batch {
        match self.sampler() {
            Some(sampler) => sampler.run(&batch, epoch, first).1,
            None => batch,
        }
    }

    /// The batch after all steps but `sampling`, which comes [before](Self::sample) them. No value is left that no row
    /// uses.
    ///
    /// Buffers that nobody else holds are changed in place.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the batch is not of the schema, or lacks timestamps; [`Error::Fault`] for times
    /// that a step cannot work on, and for a feature that would have more than 2^27 ids.
    pub fn run(&self, batch: Batch) -> Result<Batch> {
        self.check(&batch)?;
        let mut running = Running::new(batch, &self.plan.layout, self.input.dense.len());
        for (location, action) in &self.plan.actions {
            running.apply(action).map_err(|problem| location.error(problem))?;
        }
        running.finish()
    }

    /// That `batch` is of the input schema.
    fn check(&self, batch: &Batch) -> Result<()> {
        // With the weights that sampling has made.
        batch.check_schema(&self.input, self.output.weight.is_some())?;
        if self.needs_timestamps && batch.timestamps().is_none() {
            let message = "the batch has none, but a step of the preprocessing needs them";
            return Err(Error::invariant("timestamps", message));
        }
        Ok(())
    }
}
