//! The preprocessing stage: a `preprocess.toml` of steps that a batch goes through, once per distinct row.
//!
//! ```text
//! preprocess.toml ──▶ PreprocessConfig ──Schema──▶ Preprocessor ──run──▶ Batch
//!     (text)           (checked steps)              (a plan)         (one per Batch)
//! ```
//!
//! [`Preprocessor::run`] gives what the steps would give on the expanded batch, sample by sample; the inverse indices
//! are untouched except by `sampling`.
//!
//! ```toml
#![doc = include_str!("example.toml")]
//! ```
//!
//! # Steps
//!
//! Steps run in the order in which they are written. `inputs` are names, or globs in which `*` is any text; a glob
//! matches features of the kinds that the operator takes, generated ones included, and must match one. A feature that
//! several of them match is taken once. Without `output` every input changes; with it there must be one input, which
//! stays as it is, and the outcome is a new feature of that name. "Weights" below are those of weighted id lists.
//!
//! **Lists, id by id** (weights stay with their ids):
//!
//! | `op` | keys | an id becomes |
//! |---|---|---|
//! | `sigrid_hash` | `max` (1 or more), `salt = 0` | [`sigrid_hash(id, salt, max)`](crate::hash::sigrid_hash) |
//! | `positive_modulus` | `modulus` (1 or more) | its floored modulus, in `0..modulus` |
//! | `clamp` | `min`, `max`, or one of them | the nearest id of the range |
//! | `map_id` | `table = [..]` or `table_file` | 0 if negative, or else `table[id mod length]` |
//!
//! A `table_file` has one integer a line; its path is relative to the `preprocess.toml`.
//!
//! **Lists, row by row:**
//!
//! | `op` | keys | a list becomes |
//! |---|---|---|
//! | `firstx` | `count` (1 or more) | its first `count` ids; a weighted list keeps the `count` ids with the highest weights, in their order, of equal weights the earlier (NaN is the lowest) |
//! | `ngram` | `n` (1 or more), `combine = "concat"`, `salt = 0` | `concat`: its windows of `n` ids, one after the other, `(length - n + 1) n` ids with their weights; `hash`: one id per window; empty if it has fewer than `n` ids |
//! | `enumerate` | `start = 0` | the places of its ids, counted from `start`; weights stay |
//! | `fill_null` | `value` | the list `[value]`, with weight 1, if it is empty |
//!
//! The hash of a window `x_1 .. x_n` is `h_n >> 1`, where `h_0 = salt` and `h_i = mix(x_i, h_{i-1})` with
//! [`mix`](crate::hash::mix): a non-negative id that depends on the order. It is refused for weighted lists.
//!
//! **Dense features** (NaN stays NaN, except by `fill_null`):
//!
//! | `op` | keys | x becomes |
//! |---|---|---|
//! | `clamp` | `min`, `max`, or one of them | the nearest number of the range |
//! | `logit` | `epsilon = 1e-6` | `ln(y / (1 - y))` of `y`, which is x clamped to `epsilon ..= 1 - epsilon` |
//! | `boxcox` | `lambda` | `(x^lambda - 1) / lambda`, or `ln x` if `lambda` is 0; x if it is not positive |
//! | `log1p` | | `ln(1 + x)`: NaN below -1 |
//! | `fill_null` | `value` | `value` if it is NaN |
//!
//! **A dense feature or the time, to a sparse feature of one id** (`output` is required):
//!
//! | `op` | keys | the id |
//! |---|---|---|
//! | `bucketize` | `borders` (ascending), `edges = "right"` | how many borders are below x; with `edges = "left"` (as `numpy.digitize`), how many are not above x; 0 for NaN |
//! | `onehot` | `low`, `high`, `buckets` | `trunc((x - low) / ((high - low) / buckets))`, the place of the 1 in the one-hot vector; 0 if it is out of range, or x is NaN |
//! | `get_local_hour` | `zone` (an IANA time zone) | the hour, 0 to 23, of the sample's time in that zone |
//!
//! **Two lists** (`inputs` names both, in this order; `output` is required):
//!
//! | `op` | keys | the output |
//! |---|---|---|
//! | `cartesian` | `max` (1 or more), `salt = 0` | for every id x of the first and y of the second list, x by x, `sigrid_hash(y, mix(x, salt), max)`; the weight is the product of the weights that there are |
//! | `id_list_intersect` | | the ids of the first list that are in the second, in the first's order, each once, with the weight of its first place in the first list |
//! | `compute_score` | `score` | a dense feature: `overlap_count`, the number of distinct ids in both lists, or `jaccard`, that number by the number of distinct ids in either (0 if both are empty); weights do not count |
//!
//! **Samples:** `sampling` with `rate = 0.5`, or with `label = "clicked"` and `keep = { "0" = 0.1 }`, keeps a sample
//! with that probability (1 for values of the label that are not listed), and then, unless `correct_weights = false`,
//! divides the sample's weight by it, which is 1 where the batch has no weights. What is kept depends on `seed = 0`,
//! on how many `sampling` steps stand before, and on the sample's place in the epoch, and not on batches or threads.
//! Rows stay, even where no sample is left for them: expensive steps on a small sample are better done after reading
//! less.
//!
//! # Groups
//!
//! A feature generated from a list lies in the list's group. A feature generated from a dense feature or the time lies
//! in a group `per_sample`, which has a row per sample. A list generated from two features of one group lies in that
//! group; from groups `a` and `b` it lies in a group `a+b` with a row per distinct pair of their rows, in the order in
//! which samples first have them, or a row per sample if one of the two has no inverse index.
//!
//! # What is done once
//!
//! Steps that change ids one by one run once per id of the feature's *buffer*: windows that overlap there stay
//! windows, and slices that no row uses are left out. Without weights, `firstx`, `enumerate` and `fill_null` write
//! offsets and sizes only, and `ngram` keeps overlapping rows overlapping. Consecutive steps of the first kind
//! run as one pass over blocks that fit into the L1 cache, after the `firstx` among them.
//!
//! A step may make at most 2^27 ids of a feature in a batch (1 GiB); more is an error.

mod arguments;
mod columns;
mod config;
mod dense;
mod layout;
mod lists;
mod local_hour;
#[cfg(test)]
mod model;
mod pairs;
mod per_value;
mod plan;
mod problem;
mod run;
mod sampling;
#[cfg(test)]
mod tests;

pub use config::PreprocessConfig;

use onefold_datasets::Schema;

use crate::{Batch, Error, Result};
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
    /// [`Error::Preprocess`], with the step, for features and labels that there are not, or that are of another kind
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

    /// Whether the batches that come in must have timestamps.
    pub fn needs_timestamps(&self) -> bool {
        self.needs_timestamps
    }

    /// The batch after all steps. `start` is the place of the batch's first sample in the epoch, on which only
    /// `sampling` depends.
    ///
    /// Buffers that nobody else holds are changed in place.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the batch is not of the schema, or lacks timestamps; [`Error::Preprocess`] for weighted
    /// lists and times that a step cannot work on, and for a feature that would have more than 2^27 ids.
    pub fn run(&self, batch: Batch, start: u64) -> Result<Batch> {
        self.check(&batch)?;
        let mut running = Running::new(batch, &self.plan.layout, self.input.dense.len());
        for (place, action) in &self.plan.actions {
            running.apply(action, start).map_err(|problem| place.error(problem))?;
        }
        running.finish()
    }

    /// That `batch` is of the input schema.
    fn check(&self, batch: &Batch) -> Result<()> {
        let schema = &self.input;
        let expect = |place: &str, expected: usize, found: usize| match expected == found {
            true => Ok(()),
            false => Err(Error::invariant(place, format!("the schema has {expected}, the batch {found}"))),
        };
        if batch.size() > 0 {
            expect("dense features", schema.dense.len(), batch.dense_width())?;
            expect("labels", schema.labels.len(), batch.label_width())?;
        }
        expect("sample weights", schema.weight.iter().len(), batch.weights().iter().len())?;
        if self.needs_timestamps && batch.timestamps().is_none() {
            let message = "the batch has none, but a step of the preprocessing needs them";
            return Err(Error::invariant("timestamps", message));
        }
        expect("groups", schema.groups.len(), batch.groups().len())?;
        for (expected, group) in schema.groups.iter().zip(batch.groups()) {
            let names = expected.features.iter().map(|feature| feature.name.as_str());
            if expected.name != group.name() || !names.eq(group.features().iter().map(|f| f.name())) {
                let message = format!("the batch has `{}`, or other features than the schema", group.name());
                return Err(Error::invariant(format!("group `{}`", expected.name), message));
            }
        }
        Ok(())
    }
}
