//! The interaction: the input of the cross layers or of the top MLP from the vectors of a batch, and its backward
//! pass.

use onefold_kernels::interaction::{Form, Interaction, Source};
use tch::Tensor;

use super::{Model, Stage};
use crate::tensors::{self, written};

impl Model {
    /// Computes the interaction of a batch of `size` samples, `[B, width]`, a leaf: the bottom MLP's output and the
    /// strict lower triangle of the dot products, or all vectors concatenated if cross layers follow.
    pub(super) fn interact(&self, sources: &[Source<'_>], size: usize) -> Tensor {
        let interaction = self.interaction(sources);
        let shape = [size as i64, interaction.width() as i64];
        // Linear layers would round it in the same way. Cross layers add to it, so it is not rounded for them.
        let leaf = self.profile.measure(Stage::Interaction, || match interaction.rounded {
            false => written::<f32>(&shape, |output| self.embeddings.install(|| interaction.forward(output))),
            true => written::<u16>(&shape, |output| self.embeddings.install(|| interaction.forward(output))),
        });
        leaf.set_requires_grad(true)
    }

    /// Returns the gradients of every source's rows, after `backward` has reached the leaf.
    pub(super) fn interact_backward(&self, leaf: &Tensor, sources: &[Source<'_>]) -> Vec<Vec<f32>> {
        let gradient = leaf.grad().contiguous();
        // SAFETY: the backward pass that wrote the gradient has ended, and only the leaf shares it.
        let gradient = unsafe { tensors::elements(&gradient) };
        let interaction = self.interaction(sources);
        self.profile.measure(Stage::InteractionBackward, || {
            self.embeddings.install(|| interaction.backward(gradient))
        })
    }

    fn interaction<'a>(&self, sources: &'a [Source<'a>]) -> Interaction<'a> {
        let form = match self.crosses {
            None => Form::Dot { keep_first: self.bottom.is_some() },
            Some(_) => Form::Concat,
        };
        let rounded = self.compute.is_bf16() && self.crosses.is_none();
        Interaction { sources, dim: self.dim as usize, form, rounded }
    }
}
