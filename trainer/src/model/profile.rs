//! The time of each stage of a step.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The stages of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The lookup: ids to table rows, lookup and pooling.
    Lookup,
    /// Waiting for the requests of other ranks.
    Exchange,
    /// The blocks that pool sequences: attention, DIN, encoder.
    Attention,
    /// The interaction: the products of all pairs of vectors, including the expansion of rows to samples.
    Interaction,
    /// The bottom and top MLP, and the loss.
    Mlps,
    /// The backward pass of the MLPs.
    MlpsBackward,
    /// The backward pass of the interaction.
    InteractionBackward,
    /// The backward pass of the blocks that pool sequences.
    AttentionBackward,
    /// The dense part's optimizer.
    DenseUpdate,
    /// The gradients by id, and the update of the tables.
    TableUpdate,
}

/// The time of each stage.
#[derive(Debug, Default)]
pub struct Profile(RefCell<Vec<(Stage, Duration)>>);

impl Profile {
    /// Runs `work` and adds its time to `stage`.
    pub fn measure<T>(&self, stage: Stage, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        let elapsed = started.elapsed();
        let mut stages = self.0.borrow_mut();
        match stages.iter_mut().find(|(other, _)| *other == stage) {
            Some((_, total)) => *total += elapsed,
            None => stages.push((stage, elapsed)),
        }
        result
    }

    /// Returns the stages that ran since the last call, with their times, in the order of [`Stage`].
    pub fn take(&self) -> Vec<(Stage, Duration)> {
        let mut stages = std::mem::take(&mut *self.0.borrow_mut());
        stages.sort_by_key(|(stage, _)| *stage);
        stages
    }
}
