//! Multi-layer perceptrons.

use tch::Tensor;
use tch::nn::{self, Module};

use super::linear::linear;

/// Linear layers with ReLU between them.
#[derive(Debug)]
pub(super) struct Mlp {
    layers: Vec<nn::Linear>,
    activate_last: bool,
}

impl Mlp {
    /// Layers of the given widths on an input of width `input`; ReLU also after the last one if `activate_last`.
    pub(super) fn new(path: &nn::Path<'_>, input: i64, widths: &[i64], activate_last: bool) -> Self {
        let inputs = std::iter::once(&input).chain(widths);
        let layer = |(i, (from, to)): (usize, (&i64, &i64))| linear(path / i, *from, *to);
        Self { layers: inputs.zip(widths).enumerate().map(layer).collect(), activate_last }
    }

    /// `[B, input]` to `[B, last width]`.
    pub(super) fn forward(&self, input: &Tensor) -> Tensor {
        self.forward_after_first(&self.first().forward(input))
    }

    /// The first layer.
    pub(super) fn first(&self) -> &nn::Linear {
        self.layers.first().expect("a configuration without layers is refused")
    }

    /// The rest of the layers: from the first one's output, `[B, first width]`, to `[B, last width]`.
    pub(super) fn forward_after_first(&self, first: &Tensor) -> Tensor {
        let activate = |value: Tensor, layer: usize| {
            if self.activate_last || layer + 1 < self.layers.len() { value.relu() } else { value }
        };
        let rest = self.layers.iter().enumerate().skip(1);
        rest.fold(activate(first.shallow_clone(), 0), |value, (i, layer)| activate(layer.forward(&value), i))
    }
}
