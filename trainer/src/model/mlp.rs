//! Multi-layer perceptrons.

use tch::Tensor;
use tch::nn;

use super::compute::Compute;
use super::linear::{layer, linear};

/// Linear layers with a ReLU between them.
#[derive(Debug)]
pub(super) struct Mlp {
    layers: Vec<nn::Linear>,
    activate_last: bool,
    compute: Compute,
}

impl Mlp {
    /// Creates layers of the given widths for an input of width `input`; the last layer also has a ReLU if
    /// `activate_last`.
    pub(super) fn new(
        path: &nn::Path<'_>,
        input: i64,
        widths: &[i64],
        activate_last: bool,
        compute: &Compute,
    ) -> Self {
        let inputs = std::iter::once(&input).chain(widths);
        let layer = |(i, (from, to)): (usize, (&i64, &i64))| linear(path / i, *from, *to);
        let layers = inputs.zip(widths).enumerate().map(layer).collect();
        Self { layers, activate_last, compute: *compute }
    }

    /// Returns the bias of the last layer.
    pub(super) fn last_bias(&self) -> Option<&Tensor> {
        self.layers.last()?.bs.as_ref()
    }

    /// Computes `[B, last width]` from `[B, input]`.
    pub(super) fn forward(&self, input: &Tensor) -> Tensor {
        let layers: Vec<_> = self.layers.iter().map(layer).collect();
        self.compute.layers(input, &layers, self.activate_last)
    }
}
