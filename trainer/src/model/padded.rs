//! Padded lists of vectors, with which blocks on a device compute.

use tch::{Kind, Tensor};

/// The value that is subtracted from the scores of padding keys. In an empty list, all keys are padding and get the
/// same weights, but [`Valid::share`] is 0 for its queries.
const MASKED: f64 = 1e30;

/// The positions of padded lists that contain elements.
#[derive(Debug)]
pub(super) struct Valid {
    /// `[N, 1, longest]`: 1 / size at the positions of elements, 0 after the end of a list.
    pub(super) share: Tensor,
    /// `[N, 1]`: 0 for an empty list, and 1 for others.
    pub(super) occupied: Tensor,
    /// `[N, 1, longest]`: the value that is added to scores, 0 or `-MASKED`.
    mask: Tensor,
}

impl Valid {
    /// Computes the positions for lists `[N, longest, W]` with `sizes` `[N]`.
    pub(super) fn new(sizes: &Tensor, lists: &Tensor) -> Self {
        let (longest, kind) = (lists.size()[1], lists.kind());
        let positions = Tensor::arange(longest, (Kind::Int, lists.device())).unsqueeze(0);
        let valid = positions.lt_tensor(&sizes.unsqueeze(1)).to_kind(kind);
        Self {
            share: (&valid / sizes.clamp_min(1).unsqueeze(1)).unsqueeze(1),
            occupied: sizes.clamp_max(1).to_kind(kind).unsqueeze(1),
            mask: ((valid - 1.0) * MASKED).unsqueeze(1),
        }
    }

    /// Computes the weights of self-attention, `[N heads, longest, longest]`, and the values,
    /// `[N heads, longest, D / heads]`, both of type `kind`, from concatenated queries, keys and values,
    /// `[N, longest, 3 D]`.
    pub(super) fn attention(&self, lists: &Tensor, heads: i64, kind: Kind) -> (Tensor, Tensor) {
        let (count, longest, head_dim) = (lists.size()[0], lists.size()[1], lists.size()[2] / 3 / heads);
        // One copy makes the vectors of each head contiguous; its backward pass is one copy too.
        let parts = lists.view([count, longest, 3, heads, head_dim]).permute([2, 0, 3, 1, 4]).contiguous();
        let parts = parts.to_kind(kind).view([3, count * heads, longest, head_dim]).unbind(0);
        let queries = &parts[0] * (1.0 / (head_dim as f64).sqrt());
        let mask = by_head(&self.mask, heads).to_kind(kind);
        let scores = mask.baddbmm(&queries, &parts[1].transpose(1, 2), 1.0, 1.0);
        (scores.softmax(2, kind), parts[2].shallow_clone())
    }

    /// Computes the mean of every list over its queries, `[N, D]`, from the result of
    /// [`attention`](Self::attention). Averages the weights first, and then multiplies them by the values.
    pub(super) fn mean_attended(&self, (weights, values): &(Tensor, Tensor), heads: i64) -> Tensor {
        let share = by_head(&self.share, heads).to_kind(weights.kind());
        share.bmm(weights).bmm(values).view([self.share.size()[0], heads * values.size()[2]])
    }
}

/// Returns `[N heads, 1, longest]` from `[N, 1, longest]`.
fn by_head(values: &Tensor, heads: i64) -> Tensor {
    let (count, longest) = (values.size()[0], values.size()[2]);
    values.expand([count, heads, longest], false).reshape([count * heads, 1, longest])
}
