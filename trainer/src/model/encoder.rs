//! Pooling of sequences by a transformer encoder block.

use tch::Tensor;
use tch::nn::{self, Module};

use super::block::{Block, Features, OfQueries, Pooled};
use super::compute::Compute;
use super::linear::{ZEROS, bias, layer, linear, uniform, with_init, without_key_gradient, xavier_uniform};
use super::lists::{Lists, gather, indices, mean};
use super::padded::Valid;
use crate::Result;

/// An encoder block with normalization before each part (Xiong et al. 2020), shared by all features with this
/// pooling, and the mean over the valid positions: `h = x + MHA(LN x)`, `y = h + FFN(LN h)` with ReLU.
///
/// Parameters have the names, shapes and initial values of
/// `torch.nn.TransformerEncoderLayer(D, heads, hidden, dropout=0, norm_first=True)`. The block has no position
/// embeddings, so the first normalization and the query, key and value projections depend only on the element. They
/// run once per element of a timeline, however many windows share it. (Positions count from the start of a window, so
/// an element would have another vector in every window.) The rest runs once per distinct list; the second layer of
/// the FFN is linear and runs after the mean.
#[derive(Debug)]
pub(super) struct Encoder {
    dim: i64,
    heads: i64,
    norm: [nn::LayerNorm; 2],
    project: (Tensor, Tensor),
    output: nn::Linear,
    hidden: [nn::Linear; 2],
    compute: Compute,
}

impl Encoder {
    /// Creates a block with `heads` heads and a hidden layer of width `hidden`.
    pub(super) fn new(path: &nn::Path<'_>, dim: i64, heads: i64, hidden: i64, compute: &Compute) -> Self {
        let norm = |name: &str| nn::layer_norm(path / name, vec![dim], nn::LayerNormConfig::default());
        let attention = path / "self_attn";
        Self {
            dim,
            heads,
            norm: [norm("norm1"), norm("norm2")],
            project: (
                attention.var("in_proj_weight", &[3 * dim, dim], xavier_uniform(dim, 3 * dim)),
                attention.var("in_proj_bias", &[3 * dim], ZEROS),
            ),
            output: with_init(&attention / "out_proj", dim, dim, uniform(dim), Some(ZEROS)),
            hidden: [linear(path / "linear1", dim, hidden), linear(path / "linear2", hidden, dim)],
            compute: *compute,
        }
    }

    /// Computes the vector of every list of `vectors` (`[T, D]`), `[N, D]`; zero for an empty list.
    pub(super) fn forward(&self, vectors: &Tensor, lists: &Lists) -> Tensor {
        let device = vectors.device();
        let (lists, places) = lists.by_size();
        let projected = self.projections(vectors);
        let attended = self.compute.linear(&self.attend(&projected, &lists), layer(&self.output));
        let residual = gather(vectors, &indices(&lists.elements(), device)) + attended;
        let hidden = self.hidden_layer(&residual);
        let starts = indices(&lists.starts(), device);
        // An empty list has no positions, so the bias must not be added to its mean.
        let occupied: Vec<f32> = lists.sizes.iter().map(|&size| f32::from(u8::from(size > 0))).collect();
        let occupied = Tensor::from_slice(&occupied).to_kind(vectors.kind()).to_device(device).unsqueeze(1);
        let rows = self.last(&mean(&residual, &starts), &mean(&hidden, &starts), &occupied);
        gather(&rows, &indices(&places, device))
    }

    /// Computes queries, keys and values, `[T, 3 D]`.
    fn projections(&self, vectors: &Tensor) -> Tensor {
        let (weights, bias) = &self.project;
        self.compute.linear(&self.norm[0].forward(vectors), (weights, Some(&without_key_gradient(bias))))
    }

    /// Computes the FFN's hidden layer.
    fn hidden_layer(&self, residual: &Tensor) -> Tensor {
        self.compute.layers(&self.norm[1].forward(residual), &[layer(&self.hidden[0])], true)
    }

    /// Computes the output from the means over lists; `occupied`, `[N, 1]`, is 0 for an empty list.
    fn last(&self, residual: &Tensor, hidden: &Tensor, occupied: &Tensor) -> Tensor {
        let layer = &self.hidden[1];
        residual + self.compute.linear(hidden, (&layer.ws, None)) + occupied * bias(layer)
    }

    /// Computes self-attention of every position within its list, `[P, D]`, from queries, keys and values `[T, 3 D]`.
    /// `lists` is ordered by size; lists of similar sizes are padded and computed together.
    fn attend(&self, projected: &Tensor, lists: &Lists) -> Tensor {
        let mut parts = Vec::new();
        let mut start = lists.sizes.iter().take_while(|&&size| size == 0).count();
        while let Some(&smallest) = lists.sizes.get(start) {
            let alike = lists.sizes[start..].iter().take_while(|&&size| size < 2 * smallest).count();
            let range = start..start + alike;
            parts.push(self.attend_padded(projected, &lists.offsets[range.clone()], &lists.sizes[range]));
            start += alike;
        }
        if parts.is_empty() {
            // All lists are empty. The result still depends on the parameters, so that they get a gradient of zero.
            return projected.narrow(0, 0, 0).narrow(1, 0, self.dim);
        }
        Tensor::cat(&parts, 0)
    }

    /// Computes the same for lists of similar sizes, none of which is empty.
    fn attend_padded(&self, projected: &Tensor, offsets: &[i64], sizes: &[i64]) -> Tensor {
        let (device, count) = (projected.device(), sizes.len() as i64);
        let length = sizes.iter().copied().max().unwrap_or(0);
        let (mut elements, mut valid, mut mask) = (Vec::new(), Vec::new(), Vec::new());
        for (&offset, &size) in offsets.iter().zip(sizes) {
            for position in 0..length {
                if position < size {
                    valid.push(elements.len() as i64);
                }
                // Positions after the end of a list contain an arbitrary element; the mask hides them.
                elements.push(offset + position.min(size - 1));
                mask.push(if position < size { 0.0 } else { f32::NEG_INFINITY });
            }
        }
        let padded = valid.len() < elements.len();
        let mask = Tensor::from_slice(&mask).reshape([count, 1, 1, length]).to_kind(projected.kind());
        let mask = padded.then(|| mask.to_device(device));
        let head = self.dim / self.heads;
        let parts =
            gather(projected, &indices(&elements, device)).reshape([count, length, 3, self.heads, head]);
        let part = |i: i64| parts.select(2, i).transpose(1, 2);
        let attended =
            Tensor::scaled_dot_product_attention(&part(0), &part(1), &part(2), mask, 0.0, false, None, false);
        let attended = attended.transpose(1, 2).reshape([-1, self.dim]);
        if padded { gather(&attended, &indices(&valid, device)) } else { attended }
    }
}

impl Block for Encoder {
    fn pool(&self, features: &Features<'_>) -> Box<dyn Pooled> {
        features.pool_rows(|vectors, lists| self.forward(vectors, lists))
    }

    /// Concatenates every element's queries, keys and values with the element, `[T, 4 D]`.
    fn of_elements(&self, elements: &Tensor) -> Tensor {
        Tensor::cat(&[&self.projections(elements), elements], 1)
    }

    fn of_rows(&self, lists: &Tensor, sizes: &Tensor, _: &mut OfQueries<'_>) -> Result<Tensor> {
        let valid = Valid::new(sizes, lists);
        let parts = lists.split_with_sizes([3 * self.dim, self.dim], 2);
        let (weights, values) =
            valid.attention(&parts[0].contiguous(), self.heads, self.compute.kind_of(lists));
        let (longest, head_dim) = (lists.size()[1], self.dim / self.heads);
        let attended = weights.bmm(&values).view([-1, self.heads, longest, head_dim]).transpose(1, 2);
        let attended = attended.reshape([-1, longest, self.dim]);
        let residual = &parts[1] + self.compute.linear(&attended, layer(&self.output));
        let mean = |values: &Tensor| valid.share.matmul(values).squeeze_dim(1);
        Ok(self.last(&mean(&residual), &mean(&self.hidden_layer(&residual)), &valid.occupied))
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, nn};

    use super::super::tests::lists::{check_gradients, pad};
    use super::*;
    use crate::{Precision, tensors};

    #[test]
    fn gradients_equal_finite_differences() {
        let mut variables = nn::VarStore::new(Device::Cpu);
        let block =
            tensors::seeded(4, || Encoder::new(&variables.root(), 4, 2, 5, &Compute::new(Precision::Fp32)));
        variables.double();
        // Lists of several sizes, so that some are padded; some overlap, and one is empty.
        let lists = Lists { offsets: vec![0, 1, 4, 2, 3], sizes: vec![3, 2, 0, 1, 3] };
        check_gradients(&variables, &[[6, 4]], |inputs| block.forward(&inputs[0], &lists));
    }

    #[test]
    fn padded_lists_have_the_vectors_of_lists() {
        let variables = nn::VarStore::new(Device::Cpu);
        let (block, vectors) = tensors::seeded(12, || {
            let block = Encoder::new(&variables.root(), 8, 2, 16, &Compute::new(Precision::Fp32));
            (block, Tensor::randn([12, 8], (tch::Kind::Float, Device::Cpu)))
        });
        let lists = Lists { offsets: vec![0, 3, 10, 0, 7], sizes: vec![5, 6, 0, 12, 1] };
        let padded = pad(&block.of_elements(&vectors), &lists);
        let sizes = Tensor::from_slice(&lists.sizes).to_kind(tch::Kind::Int);
        let found = block.of_rows(&padded, &sizes, &mut |_| unreachable!("there are no queries")).unwrap();
        let difference = found - block.forward(&vectors, &lists);
        assert!(difference.abs().max().double_value(&[]) < 1e-5);
    }

    #[test]
    fn a_list_does_not_depend_on_those_beside_it() {
        let variables = nn::VarStore::new(Device::Cpu);
        let (block, vectors) = tensors::seeded(40, || {
            let block = Encoder::new(&variables.root(), 8, 2, 16, &Compute::new(Precision::Fp32));
            (block, Tensor::randn([40, 8], (tch::Kind::Float, Device::Cpu)))
        });
        let lists = Lists { offsets: vec![0, 3, 10, 0, 7], sizes: vec![5, 6, 0, 40, 1] };
        let together = block.forward(&vectors, &lists);
        for list in 0..5 {
            let alone = Lists { offsets: vec![lists.offsets[list]], sizes: vec![lists.sizes[list]] };
            let difference = (block.forward(&vectors, &alone).get(0) - together.get(list as i64)).abs().max();
            assert!(difference.double_value(&[]) < 1e-5, "list {list}: {difference}");
        }
        assert_eq!(together.get(2).abs().max().double_value(&[]), 0.0);
    }
}
