//! Lists of vectors side by side, as long as the longest: what pooling on a device computes with.

use tch::{Kind, Tensor};

/// What is added to the score of a key that a list does not have; a list without elements has no key, and a sum of
/// nothing.
const MASKED: f64 = 1e30;

/// Which positions of padded lists hold elements.
#[derive(Debug)]
pub(super) struct Valid {
    /// `[N, 1, longest]`: at every position of a list one part in its size, behind its end zero.
    pub(super) share: Tensor,
    /// `[N, 1]`: 0 for an empty list, and 1 for others.
    pub(super) occupied: Tensor,
    /// `[N, 1, 1, longest]`: what is added to scores.
    mask: Tensor,
}

impl Valid {
    /// Of lists `[N, longest, W]` whose sizes are `[N]`.
    pub(super) fn new(sizes: &Tensor, lists: &Tensor) -> Self {
        let (count, longest, kind) = (lists.size()[0], lists.size()[1], lists.kind());
        let positions = Tensor::arange(longest, (Kind::Int, lists.device())).unsqueeze(0);
        let valid = positions.lt_tensor(&sizes.unsqueeze(1)).to_kind(kind);
        Self {
            share: (&valid / sizes.clamp_min(1).unsqueeze(1)).unsqueeze(1),
            occupied: sizes.clamp_max(1).to_kind(kind).unsqueeze(1),
            mask: ((valid - 1.0) * MASKED).view([count, 1, 1, longest]),
        }
    }

    /// The weights of self-attention, `[N, heads, longest, longest]`, and the values, `[N, heads, longest, D / heads]`,
    /// from queries, keys and values side by side, which are the first 3 D columns.
    pub(super) fn attention(&self, lists: &Tensor, heads: i64, dim: i64) -> (Tensor, Tensor) {
        let (count, longest, head_dim) = (lists.size()[0], lists.size()[1], dim / heads);
        let part = |i: i64| {
            let part = lists.narrow(2, i * dim, dim);
            part.reshape([count, longest, heads, head_dim]).transpose(1, 2)
        };
        let [queries, keys, values] = [0, 1, 2].map(part);
        let scores = queries.matmul(&keys.transpose(2, 3)) / (head_dim as f64).sqrt() + &self.mask;
        (scores.softmax(3, lists.kind()), values)
    }
}
