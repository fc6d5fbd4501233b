//! Where the time of a step goes.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The stages of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Ids to table rows, lookup and pooling.
    Lookup,
    /// Waiting for the requests of other ranks.
    Exchange,
    /// Sequences through the blocks that pool them: attention, DIN, encoder.
    Attention,
    /// Products of all pairs of vectors, with the expansion of rows to samples inside it.
    Interaction,
    /// Bottom and top MLP and the loss.
    Mlps,
    /// The same backward.
    MlpsBackward,
    /// The interaction backward.
    InteractionBackward,
    /// The blocks that pool sequences backward.
    AttentionBackward,
    /// The dense part's optimizer.
    DenseUpdate,
    /// Gradients by id, and the update of the tables.
    TableUpdate,
}

/// The time of each stage.
#[derive(Debug, Default)]
pub struct Profile(RefCell<Vec<(Stage, Duration)>>);

impl Profile {
    /// Runs `work` and counts its time as `stage`'s.
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

    /// The stages that ran since the last call and their times, in the order of [`Stage`].
    pub fn take(&self) -> Vec<(Stage, Duration)> {
        let mut stages = std::mem::take(&mut *self.0.borrow_mut());
        stages.sort_by_key(|(stage, _)| *stage);
        stages
    }
}
