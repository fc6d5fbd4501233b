//! Restores a model and its training state from a checkpoint, or from the run whose model is trained further.

use std::path::Path;

use safetensors::Dtype;

use super::Progress;
use super::state::Sums;
use crate::Result;
use crate::checkpoint::tensor_file::Entry;
use crate::checkpoint::{Checkpoint, DenseFile, damaged};
use crate::model::Model;
use crate::optimizer::DenseOptimizer;
use crate::run::Stored;

/// Restores parameters, optimizer state and metrics.
pub(super) fn restore(
    checkpoint: &Checkpoint<Progress>,
    model: &mut Model,
    optimizer: &mut DenseOptimizer,
    sums: &mut Sums,
) -> Result<()> {
    restore_model(checkpoint, model, optimizer)?;
    let restored = sums.restore(&checkpoint.state()?, &**model.embeddings.collectives());
    let hint = "the checkpoint is damaged; remove its directory to resume from the one before it";
    restored.map_err(|fault| fault.at(&checkpoint.location(), hint))
}

/// Restores parameters and optimizer state.
pub(super) fn restore_model(
    checkpoint: &Checkpoint<Progress>,
    model: &mut Model,
    optimizer: &mut DenseOptimizer,
) -> Result<()> {
    checkpoint.tables()?.restore(&mut model.embeddings, usize::MAX)?;
    restore_dense(&checkpoint.dense()?, checkpoint.progress().optimizer_steps, model, optimizer)
}

/// Restores the dense part and its optimizer's state. Both optimizers have taken `steps` steps.
fn restore_dense(
    dense: &DenseFile,
    steps: u64,
    model: &mut Model,
    optimizer: &mut DenseOptimizer,
) -> Result<()> {
    model.embeddings.set_steps(steps);
    dense.restore(model)?;
    optimizer
        .restore(steps, |parameter, state, values| dense.read_into(&state_name(parameter, state), values))
}

/// Loads the model of an earlier run. Its tables may have fewer rows: additional rows keep their initial
/// values.
pub(super) fn take_over(
    location: &Path,
    stored: &Stored,
    model: &mut Model,
    optimizer: &mut DenseOptimizer,
    sums: &mut Sums,
) -> Result<()> {
    stored.tables.restore_grown(&mut model.embeddings)?;
    model.embeddings.clear_touched();
    restore_dense(&stored.dense, stored.trained.optimizer_steps, model, optimizer)?;
    sums.take_earlier(&stored.metrics).map_err(|fault| damaged(location, fault))
}

/// Returns the dense optimizer's state as entries of a file.
pub(super) fn optimizer_entries(optimizer: &DenseOptimizer) -> Vec<Entry<'static>> {
    let entries = optimizer.state().map(|(parameter, state, values)| {
        Entry::owned(state_name(parameter, state), Dtype::F32, vec![values.len()], &values)
    });
    entries.collect()
}

/// Returns the name of a state tensor of the dense optimizer in a file.
fn state_name(parameter: &str, state: &str) -> String {
    format!("optimizer.{parameter}.{state}")
}
