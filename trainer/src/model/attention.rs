//! Pooling of sequences by self-attention.

use onefold_sharding::Pooling;
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

use super::linear::{bias, linear};
use super::padded::Valid;
use crate::embedding::{HostEmbeddings, Lookup};
use crate::kernels::attention::{self, Plan, QueryKey, Sequence};
use crate::tensors;

/// One multi-head self-attention block (Vaswani et al. 2017), shared by all features that pool by it: QKV projection, key
/// padding mask, mean over the valid positions, output projection.
///
/// Only the projections of values and outputs are in the autograd graph; they run once per row. What comes before is
/// [`kernels::attention`](crate::kernels::attention), whose output is a leaf.
#[derive(Debug)]
pub(super) struct SelfAttention {
    dim: i64,
    heads: i64,
    project: nn::Linear,
    output: nn::Linear,
}

/// The block's output, and what its backward pass needs.
#[derive(Debug)]
pub(super) struct Attended {
    /// `[ΣU, D]`, the rows of all features of a batch that pool by attention, in order.
    pub(super) rows: Tensor,
    /// `[ΣU, H, D]`, the leaf.
    means: Tensor,
    weights: QueryKey,
    plan: Plan,
}

fn sequences<'a>(lookups: &'a [Lookup], embeddings: HostEmbeddings<'a>) -> Vec<Sequence<'a>> {
    let all = lookups.iter().flat_map(|lookup| &lookup.sequences);
    let own = all.filter(|lookup| embeddings.all.features()[lookup.feature].pooling == Pooling::Attention);
    own.map(|lookup| embeddings.sequence(lookup)).collect()
}

impl SelfAttention {
    pub(super) fn new(path: &nn::Path<'_>, dim: i64, heads: i64) -> Self {
        let project = linear(path / "qkv", dim, 3 * dim);
        let output = linear(path / "output", dim, dim);
        Self { dim, heads, project, output }
    }

    /// All features of a batch that pool by attention. An empty row has the output of a mean of zero.
    pub(super) fn forward(&self, lookups: &[Lookup], embeddings: HostEmbeddings<'_>) -> Attended {
        let (dim, heads) = (self.dim, self.heads);
        let sequences = sequences(lookups, embeddings);
        let parameters = self.project.ws.detach().contiguous();
        let bias = self.bias().detach().contiguous();
        let weights = QueryKey::new(
            &tensors::as_slice(&parameters)[..2 * (dim * dim) as usize],
            &tensors::as_slice(&bias)[..dim as usize],
            heads as usize,
        );
        let (means, plan) = embeddings.all.install(|| attention::forward(&weights, &sequences, true));
        let means = tensors::from_f32(&means.concat(), &[-1, heads, dim]).set_requires_grad(true);
        let head_dim = dim / heads;
        let values: Vec<Tensor> = (0..heads)
            .map(|head| {
                let weights = self.project.ws.narrow(0, 2 * dim + head * head_dim, head_dim);
                means.select(1, head).matmul(&weights.tr())
            })
            .collect();
        let bias = self.bias().narrow(0, 2 * dim, dim);
        let bias = if sequences.iter().any(|sequence| sequence.sizes.contains(&0)) {
            // A row without elements attends to nothing, and has no value that the bias could be added to.
            let sizes = sequences.iter().flat_map(|sequence| sequence.sizes);
            let occupied: Vec<f32> = sizes.map(|&size| f32::from(u8::from(size > 0))).collect();
            bias * tensors::from_f32(&occupied, &[-1, 1])
        } else {
            bias
        };
        let rows = self.output.forward(&(Tensor::cat(&values, 1) + bias));
        Attended { rows, means, weights, plan }
    }

    /// Queries, keys and values of every element, `[T, 3 D]` from `[T, D]`, for [`forward_padded`](Self::forward_padded). The bias
    /// of keys has no influence, and no gradient: not even rounding's.
    pub(super) fn with_projections(&self, vectors: &Tensor) -> Tensor {
        let part = |i: i64| self.bias().narrow(0, i * self.dim, self.dim);
        vectors.linear(&self.project.ws, Some(Tensor::cat(&[part(0), part(1).detach(), part(2)], 0)))
    }

    /// `[N, D]`, the vector of every list, from projected lists `[N, longest, 3 D]`, with zeros behind their ends, which `sizes` (`[N]`)
    /// tell.
    pub(super) fn forward_padded(&self, lists: &Tensor, sizes: &Tensor) -> Tensor {
        let valid = Valid::new(sizes, lists);
        let (weights, values) = valid.attention(lists, self.heads, self.dim);
        // The mean over the queries is taken of the weights, before they meet the values.
        let means = valid.share.unsqueeze(1).matmul(&weights).matmul(&values);
        self.output.forward(&means.reshape([-1, self.dim]))
    }

    fn bias(&self) -> &Tensor {
        bias(&self.project)
    }

    /// The gradients of the sequences' vectors, by value; adds those of queries and keys to the parameters'.
    /// To be called when `backward` has reached the leaf.
    pub(super) fn backward(
        &self,
        attended: &Attended,
        lookups: &[Lookup],
        embeddings: HostEmbeddings<'_>,
    ) -> Vec<Vec<f32>> {
        let sequences = sequences(lookups, embeddings);
        let upstream = attended.means.grad().contiguous();
        let mut rest = tensors::as_slice(&upstream);
        let size = (self.heads * self.dim) as usize;
        let mut by_sequence = Vec::with_capacity(sequences.len());
        for sequence in &sequences {
            let (own, tail) = rest.split_at(sequence.sizes.len() * size);
            by_sequence.push(own);
            rest = tail;
        }
        let (weights, plan) = (&attended.weights, &attended.plan);
        let gradients =
            embeddings.all.install(|| attention::backward(weights, &sequences, plan, &by_sequence));
        tch::no_grad(|| {
            let dim = self.dim;
            let weights = tensors::from_f32(&gradients.weights, &[2 * dim, dim]);
            let _ = self.project.ws.grad().narrow(0, 0, 2 * dim).g_add_(&weights);
            // The bias of keys has no influence, and no gradient: not even rounding's.
            let bias = tensors::from_f32(&gradients.bias, &[dim]);
            let _ = self.bias().grad().narrow(0, 0, dim).g_add_(&bias);
        });
        debug_assert_eq!(attended.means.kind(), Kind::Float);
        gradients.vectors
    }
}
