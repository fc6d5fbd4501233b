//! The low-rank cross layers of DCN-V2.

use tch::Tensor;
use tch::nn;

use super::compute::Compute;
use super::linear::{ZEROS, layer, with_init, xavier_normal};

/// Cross layers `x_{l+1} = x_0 ⊙ (W (V x_l) + b) + x_l` with `V` of shape `[rank, width]` and `W` of shape
/// `[width, rank]` (Wang et al. 2021, like TorchRec's `LowRankCrossNet`).
#[derive(Debug)]
pub(super) struct CrossNet {
    layers: Vec<(nn::Linear, nn::Linear)>,
    compute: Compute,
}

impl CrossNet {
    pub(super) fn new(path: &nn::Path<'_>, width: i64, layers: i64, rank: i64, compute: &Compute) -> Self {
        let layer = |i: i64| {
            // `LowRankCrossNet` initializes both kernels with `xavier_normal_`; its only bias is zero.
            let init = xavier_normal(width, rank);
            let v = with_init(path / i / "v", width, rank, init, None);
            (v, with_init(path / i / "w", rank, width, init, Some(ZEROS)))
        };
        Self { layers: (0..layers).map(layer).collect(), compute: *compute }
    }

    /// Computes `[B, width]` from `[B, width]`.
    pub(super) fn forward(&self, input: &Tensor) -> Tensor {
        let linear = |input: &Tensor, of: &nn::Linear| self.compute.linear(input, layer(of));
        let cross = |x: Tensor, (v, w): &(nn::Linear, nn::Linear)| input * linear(&linear(&x, v), w) + x;
        self.layers.iter().fold(input.shallow_clone(), cross)
    }
}
