//! Pooling of sequences by self-attention.

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::embedding::Sequence;

/// One multi-head self-attention block (Vaswani et al. 2017), shared by all sequence features: QKV projection, key
/// padding mask, mean over the valid positions, output projection.
#[derive(Debug)]
pub(super) struct SelfAttention {
    heads: i64,
    project: nn::Linear,
    output: nn::Linear,
}

impl SelfAttention {
    pub(super) fn new(path: &nn::Path<'_>, dim: i64, heads: i64) -> Self {
        let project = nn::linear(path / "qkv", dim, 3 * dim, nn::LinearConfig::default());
        let output = nn::linear(path / "output", dim, dim, nn::LinearConfig::default());
        Self { heads, project, output }
    }

    /// `[U, L, D]` to `[U, D]`. An empty row gives what a mean of zero gives.
    pub(super) fn forward(&self, sequence: &Sequence) -> Tensor {
        let (rows, length, dim) = sequence.vectors.size3().unwrap_or((0, 1, 1));
        let heads =
            self.project.forward(&sequence.vectors).reshape([rows, length, 3, self.heads, dim / self.heads]);
        let head = |i: i64| heads.select(2, i).transpose(1, 2);
        let positions = Tensor::arange(length, (Kind::Float, Device::Cpu));
        let valid = positions.lt_tensor(&sequence.lengths.unsqueeze(1));
        // A row without any key would be a softmax over nothing: it attends to its zeros, which the mean then drops.
        let keys =
            positions.lt_tensor(&sequence.lengths.clamp_min(1.0).unsqueeze(1)).reshape([rows, 1, 1, length]);
        let attended = Tensor::scaled_dot_product_attention(
            &head(0),
            &head(1),
            &head(2),
            Some(&keys),
            0.0,
            false,
            None,
            false,
        );
        let attended = attended.transpose(1, 2).reshape([rows, length, dim]);
        let valid = valid.to_kind(Kind::Float).unsqueeze(2);
        let sum = (attended * valid).sum_dim_intlist([1_i64].as_slice(), false, Kind::Float);
        self.output.forward(&(sum / sequence.lengths.clamp_min(1.0).unsqueeze(1)))
    }
}
