//! The blocks that pool sequences, on a device.
//!
//! ```text
//! elements ═▶ work per element ─▶ padded rows ═▶ vectors of rows
//! pooled vectors of targets ═▶ their part ─▶ by sample ═▲ (din)
//! ```
//!
//! A double arrow is a libtorch operation with autograd; a single arrow is one of our kernels, whose output is a
//! leaf.

use std::ops::Range;

use onefold_sharding::Pooling;
use tch::{Kind, Tensor};

use super::super::sequences::Blocks;
use crate::device::{Accelerator, LookedUp, Staged, StagedSequences, Target};
use crate::{Result, shim};

/// The results of the blocks for a batch, and the state that their backward pass needs.
#[derive(Debug)]
pub(super) struct Pooled {
    /// The blocks, in the order of the batch's sequences.
    blocks: Vec<Block>,
    queries: Option<Queries>,
}

/// The leaves of one block, and the tensors that autograd computed from them.
#[derive(Debug)]
struct Block {
    pooling: Pooling,
    /// The elements' vectors, `[T, D]`, a leaf.
    elements: Tensor,
    /// The result of the work per element, `[T, W]`, computed from `elements`.
    shared: Tensor,
    /// The padded rows of `shared`, `[N, longest, W]`, a leaf.
    padded: Tensor,
    /// The vectors of rows, `[N, D]`, computed from `padded`.
    rows: Tensor,
}

/// The vectors of the targets of `din`.
#[derive(Debug)]
struct Queries {
    /// Each target once, and its rows of `vectors`.
    targets: Vec<(Target, Range<i64>)>,
    /// The targets' vectors, `[Q, D]`, a leaf.
    vectors: Tensor,
    /// The targets' part, `[Q, W]`, computed from `vectors` once per distinct row of the target's group.
    shared: Tensor,
    /// The targets' part by feature and sample, `[F B, W]`, a leaf.
    by_sample: Tensor,
}

impl Blocks {
    /// Computes the vectors of all sequences of a batch from the results of its lookup.
    pub(super) fn forward_on_device(
        &self,
        accelerator: &Accelerator,
        batch: &Staged,
        looked_up: &LookedUp,
    ) -> Result<Pooled> {
        let mut pooled = Pooled { blocks: Vec::with_capacity(batch.sequences.len()), queries: None };
        for StagedSequences { pooling, first, elements, rows: jagged } in &batch.sequences {
            let all = looked_up.sequences.as_ref().expect("a batch's sequences have been looked up");
            let elements = all.narrow(0, *first, *elements).detach().set_requires_grad(true);
            let block = &self.blocks[self.place(*pooling)].1;
            let shared = block.of_elements(&elements);
            let padded = accelerator.pad(&shared.detach().contiguous(), jagged)?.set_requires_grad(true);
            let rows = block.of_rows(&padded, &jagged.sizes, &mut |part| {
                let queries = Queries::new(accelerator, batch, looked_up, part)?;
                Ok(pooled.queries.insert(queries).by_sample.shallow_clone())
            })?;
            pooled.blocks.push(Block { pooling: *pooling, elements, shared, padded, rows });
        }
        Ok(pooled)
    }
}

impl Pooled {
    /// Returns the vectors of a block, `[N, D]`, if the batch has sequences with its pooling.
    pub(super) fn rows(&self, pooling: Pooling) -> Option<&Tensor> {
        self.blocks.iter().find(|block| block.pooling == pooling).map(|block| &block.rows)
    }

    /// Computes the gradient of all sequences' elements, `[T, D]`, given the gradients of every block's rows;
    /// `None` without sequences. Adds the gradients of targets to the gradient of the pooled rows, `pooled`.
    pub(super) fn backward<'a>(
        &self,
        accelerator: &Accelerator,
        batch: &Staged,
        gradient_of: impl Fn(Pooling) -> &'a Tensor,
        pooled: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let mut elements = Vec::with_capacity(self.blocks.len());
        for (block, StagedSequences { rows, .. }) in self.blocks.iter().zip(&batch.sequences) {
            shim::backward(&block.rows, gradient_of(block.pooling));
            let padded = block.padded.grad().contiguous();
            let shared = accelerator.unpad(&padded, rows, block.elements.size()[0])?;
            shim::backward(&block.shared, &shared);
            elements.push(block.elements.grad().contiguous());
        }
        if let (Some(queries), Some(pooled)) = (&self.queries, pooled) {
            queries.backward(accelerator, batch, pooled)?;
        }
        Ok(match elements.len() {
            0 | 1 => elements.pop(),
            _ => Some(Tensor::cat(&elements, 0)),
        })
    }
}

impl Queries {
    fn new(
        accelerator: &Accelerator,
        batch: &Staged,
        looked_up: &LookedUp,
        part: &dyn Fn(&Tensor) -> Tensor,
    ) -> Result<Self> {
        let pooled = looked_up.pooled.as_ref().expect("a target pools by sum or mean");
        let (mut targets, mut end): (Vec<(Target, _)>, _) = (Vec::new(), 0);
        for target in &batch.targets {
            if targets.iter().all(|(other, _)| other != target) {
                let rows = batch.groups[target.group].rows;
                targets.push((*target, end..end + rows));
                end += rows;
            }
        }
        let vectors: Vec<_> = targets.iter().map(|(target, _)| vectors_of(batch, *target, pooled)).collect();
        let vectors = Tensor::cat(&vectors, 0).detach().set_requires_grad(true);
        let shared = part(&vectors);
        let (samples, width) = (batch.size, shared.size()[1]);
        let by_sample = accelerator.empty(&[samples * batch.targets.len() as i64, width], Kind::Float)?;
        let mut queries = Self { targets, vectors, shared, by_sample };
        let values = queries.shared.detach().contiguous();
        for (target, first) in batch.targets.iter().zip((0..).map(|i| i * samples)) {
            let rows = queries.rows_of(*target);
            let own = values.narrow(0, rows.start, rows.end - rows.start);
            let index = batch.groups[target.group].inverse.as_ref().map(|(inverse, _)| inverse);
            accelerator.expand(&own, index, &queries.by_sample.narrow(0, first, samples))?;
        }
        queries.by_sample = queries.by_sample.set_requires_grad(true);
        Ok(queries)
    }

    fn rows_of(&self, target: Target) -> Range<i64> {
        let own = self.targets.iter().find(|(other, _)| *other == target);
        own.expect("every target is among them").1.clone()
    }

    /// Adds the gradient of the targets' vectors to the gradient of all pooled rows, after `backward` has reached
    /// the leaf of the samples.
    fn backward(&self, accelerator: &Accelerator, batch: &Staged, pooled: &Tensor) -> Result<()> {
        let (samples, width) = (batch.size, self.shared.size()[1]);
        let (by_sample, total) = (self.by_sample.grad().contiguous(), self.shared.detach().zeros_like());
        for (target, first) in batch.targets.iter().zip((0..).map(|i| i * samples)) {
            let rows = self.rows_of(*target);
            let own = accelerator.empty(&[rows.end - rows.start, width], Kind::Float)?;
            let sums = batch.groups[target.group].inverse.as_ref().map(|(_, sums)| sums);
            accelerator.fold(&by_sample.narrow(0, first, samples), sums, &own)?;
            let _ = total.narrow(0, rows.start, rows.end - rows.start).g_add_(&own);
        }
        shim::backward(&self.shared, &total);
        let gradient = self.vectors.grad();
        for (target, rows) in &self.targets {
            let own = gradient.narrow(0, rows.start, rows.end - rows.start);
            let _ = vectors_of(batch, *target, pooled).g_add_(&own);
        }
        Ok(())
    }
}

/// Returns a view of a target's vectors among all pooled rows, `[U, D]`.
fn vectors_of(batch: &Staged, target: Target, pooled: &Tensor) -> Tensor {
    let (group, dim) = (&batch.groups[target.group], pooled.size()[1]);
    let own = pooled.narrow(0, group.first_bag, group.rows * group.pooled);
    own.view([group.rows, group.pooled, dim]).select(1, target.feature)
}
