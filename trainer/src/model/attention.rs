//! Pooling of sequences by self-attention.

use onefold_kernels::attention::{self, Plan, QueryKey, Sequence};
use onefold_sharding::Pooling;
use tch::nn;
use tch::{Kind, Tensor};

use super::block::{Block, Features, OfQueries, Pooled, Read};
use super::compute::Compute;
use super::linear::{bias, layer, linear, without_key_gradient};
use super::padded::Valid;
use crate::{Result, tensors};

/// A multi-head self-attention block (Vaswani et al. 2017), shared by all features with this pooling: QKV
/// projection, key padding mask, mean over the valid positions, output projection.
///
/// In host memory, only the value and output projections are in the autograd graph; they run once per row.
/// [`onefold_kernels::attention`] computes the part before them; its output is a leaf.
#[derive(Debug)]
pub(super) struct SelfAttention {
    dim: i64,
    heads: i64,
    project: nn::Linear,
    output: nn::Linear,
    compute: Compute,
}

/// The block's output, and the state that its backward pass needs.
#[derive(Debug)]
struct Attended {
    /// The vectors of the rows of all features of a batch that use the block, in order, `[ΣU, D]`.
    rows: Tensor,
    /// The weights and bias of the QKV projection.
    project: [Tensor; 2],
    /// The attended means, `[ΣU, H, D]`, a leaf of autograd.
    means: Tensor,
    weights: QueryKey,
    plan: Plan,
}

fn sequences<'a>((lookups, embeddings): Read<'a>) -> Vec<Sequence<'a>> {
    let all = lookups.iter().flat_map(|lookup| &lookup.sequences);
    let own = all.filter(|lookup| embeddings.all.features()[lookup.feature].pooling == Pooling::Attention);
    own.map(|lookup| embeddings.sequence(lookup)).collect()
}

impl SelfAttention {
    pub(super) fn new(path: &nn::Path<'_>, dim: i64, heads: i64, compute: &Compute) -> Self {
        let project = linear(path / "qkv", dim, 3 * dim);
        let output = linear(path / "output", dim, dim);
        Self { dim, heads, project, output, compute: *compute }
    }

    fn bias(&self) -> &Tensor {
        bias(&self.project)
    }
}

impl Block for SelfAttention {
    /// Pools all features of a batch that use the block. An empty row gets the output projection of a zero mean.
    fn pool(&self, features: &Features<'_>) -> Box<dyn Pooled> {
        let (dim, heads) = (self.dim, self.heads);
        let sequences = sequences(features.read);
        let weights = QueryKey::new(
            &tensors::to_vec(&self.project.ws.narrow(0, 0, 2 * dim)),
            &tensors::to_vec(&self.bias().narrow(0, 0, dim)),
            heads as usize,
        );
        let (means, plan) = features.read.1.all.install(|| attention::forward(&weights, &sequences, true));
        let means = tensors::from_f32(&means.concat(), &[-1, heads, dim]).set_requires_grad(true);
        let head_dim = dim / heads;
        let values: Vec<Tensor> = (0..heads)
            .map(|head| {
                let weights = self.project.ws.narrow(0, 2 * dim + head * head_dim, head_dim);
                self.compute.linear(&means.select(1, head), (&weights, None))
            })
            .collect();
        let bias = self.bias().narrow(0, 2 * dim, dim);
        let bias = if sequences.iter().any(|sequence| sequence.sizes.contains(&0)) {
            // An empty row attends to nothing, so the value bias must not be added to its mean.
            let sizes = sequences.iter().flat_map(|sequence| sequence.sizes);
            let occupied: Vec<f32> = sizes.map(|&size| f32::from(u8::from(size > 0))).collect();
            bias * tensors::from_f32(&occupied, &[-1, 1])
        } else {
            bias
        };
        let rows = self.compute.linear(&(Tensor::cat(&values, 1) + bias), layer(&self.output));
        let project = [&self.project.ws, self.bias()].map(Tensor::shallow_clone);
        Box::new(Attended { rows, project, means, weights, plan })
    }

    /// Computes queries, keys and values of every element, `[T, 3 D]`.
    fn of_elements(&self, elements: &Tensor) -> Tensor {
        self.compute.linear(elements, (&self.project.ws, Some(&without_key_gradient(self.bias()))))
    }

    fn of_rows(&self, lists: &Tensor, sizes: &Tensor, _: &mut OfQueries<'_>) -> Result<Tensor> {
        let valid = Valid::new(sizes, lists);
        let attention = valid.attention(lists, self.heads, self.compute.kind_of(lists));
        Ok(self.compute.linear(&valid.mean_attended(&attention, self.heads), layer(&self.output)))
    }
}

impl Pooled for Attended {
    fn rows(&self) -> &Tensor {
        &self.rows
    }

    /// Also adds the gradients of the query and key projections to their parameters' gradients.
    fn gradients(&self, read: Read<'_>, _: &mut [Vec<f32>]) -> Vec<Vec<f32>> {
        let sequences = sequences(read);
        let upstream = tensors::to_vec(&self.means.grad());
        let mut rest = &upstream[..];
        let (heads, dim) = (self.means.size()[1], self.means.size()[2]);
        let size = (heads * dim) as usize;
        let mut by_sequence = Vec::with_capacity(sequences.len());
        for sequence in &sequences {
            let (own, tail) = rest.split_at(sequence.sizes.len() * size);
            by_sequence.push(own);
            rest = tail;
        }
        let Self { weights, plan, project: [parameters, bias], .. } = self;
        let gradients = read.1.all.install(|| attention::backward(weights, &sequences, plan, &by_sequence));
        tch::no_grad(|| {
            let weights = tensors::from_f32(&gradients.weights, &[2 * dim, dim]);
            let _ = parameters.grad().narrow(0, 0, 2 * dim).g_add_(&weights);
            // The key bias has no influence on the result, so its gradient stays exactly zero.
            let _ = bias.grad().narrow(0, 0, dim).g_add_(&tensors::from_f32(&gradients.bias, &[dim]));
        });
        debug_assert_eq!(self.means.kind(), Kind::Float);
        gradients.vectors
    }
}
