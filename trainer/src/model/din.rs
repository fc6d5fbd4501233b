//! Pooling of sequences with attention to a target.

use tch::Tensor;
use tch::nn;

use super::block::{Block, Features, OfQueries, Pooled};
use super::compute::Compute;
use super::linear::{layer, linear};
use super::lists::{Lists, gather, indices, weighted_sum};
use crate::Result;

/// The local activation unit of DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction"),
/// shared by all features with this pooling: `Σ_j a(q, k_j) k_j` over the elements of a list, with weights from an
/// MLP over `[q, k, q - k, q ∘ k]`.
///
/// As in the paper, the weights are not normalized, so they express the strength of an interest. Hidden layers use
/// the sigmoid of the authors' program. The Dice activation of the paper would make a sample's vector depend on its
/// batch.
///
/// The first layer is linear in each part of its input, so with `W = [Wq Wk Wd Wp]`
///
/// ```text
/// W [q, k, q - k, q ∘ k] = (Wq + Wd) q + (Wk - Wd) k + Wp (q ∘ k)
/// ```
///
/// The first term is computed once per distinct query, the second once per element of a timeline, and only the last
/// once per pair.
#[derive(Debug)]
pub(super) struct TargetAttention {
    dim: i64,
    layers: Vec<nn::Linear>,
    compute: Compute,
}

impl TargetAttention {
    /// Creates an attention unit with hidden layers of these widths, followed by a layer of width 1.
    pub(super) fn new(path: &nn::Path<'_>, dim: i64, hidden: &[i64], compute: &Compute) -> Self {
        let inputs = std::iter::once(4 * dim).chain(hidden.iter().copied());
        let outputs = hidden.iter().copied().chain(std::iter::once(1));
        let layer = |(i, (from, to)): (usize, (i64, i64))| linear(path / i, from, to);
        Self { dim, layers: inputs.zip(outputs).enumerate().map(layer).collect(), compute: *compute }
    }

    /// Computes the vector of every list of `vectors` (`[T, D]`), `[N, D]`; zero for an empty list. List `i`
    /// attends with row `targets[i]` of `queries` (`[U, D]`).
    pub(super) fn forward(
        &self,
        vectors: &Tensor,
        queries: &Tensor,
        lists: &Lists,
        targets: &[i64],
    ) -> Tensor {
        let device = vectors.device();
        let elements = indices(&lists.elements(), device);
        let by_list = targets.iter().zip(&lists.sizes);
        let by_position: Vec<i64> =
            by_list.flat_map(|(&target, &size)| std::iter::repeat_n(target, size as usize)).collect();
        let by_position = indices(&by_position, device);
        let (of_queries, of_keys) = (self.of_queries(queries), self.of_keys(vectors));
        let products = gather(queries, &by_position) * gather(vectors, &elements);
        let weights =
            self.weights(&products, &gather(&of_queries, &by_position), &gather(&of_keys, &elements));
        weighted_sum(vectors, &elements, &indices(&lists.starts(), device), &weights.reshape([-1]))
    }

    /// Concatenates every query and its part of the first layer, `[U, D + H]` from `[U, D]`.
    fn with_queries(&self, queries: &Tensor) -> Tensor {
        Tensor::cat(&[queries, &self.of_queries(queries)], 1)
    }

    /// Returns the columns of the first layer's weights for part `i` of its input, `[…, D]`.
    fn part(&self, i: i64) -> Tensor {
        self.layers[0].ws.narrow(1, i * self.dim, self.dim)
    }

    /// Computes the queries' part of the first layer, `[U, H]`.
    fn of_queries(&self, queries: &Tensor) -> Tensor {
        self.compute.linear(queries, (&(self.part(0) + self.part(2)), self.layers[0].bs.as_ref()))
    }

    /// Computes the elements' part of the first layer, `[T, H]`.
    fn of_keys(&self, vectors: &Tensor) -> Tensor {
        self.compute.linear(vectors, (&(self.part(1) - self.part(2)), None))
    }

    /// Computes the weight of every pair, `[…, 1]`, from `q ∘ k`, `[…, D]`, and the first layer's parts of q and k,
    /// `[…, H]`.
    fn weights(&self, products: &Tensor, of_queries: &Tensor, of_keys: &Tensor) -> Tensor {
        let mut hidden = self.compute.linear(products, (&self.part(3), None)) + of_queries + of_keys;
        for next in &self.layers[1..] {
            hidden = self.compute.linear(&hidden.sigmoid(), layer(next));
        }
        hidden
    }
}

impl Block for TargetAttention {
    fn by_sample(&self) -> bool {
        true
    }

    fn pool(&self, features: &Features<'_>) -> Box<dyn Pooled> {
        features.pool_pairs(|vectors, queries, lists, targets| self.forward(vectors, queries, lists, targets))
    }

    /// Concatenates every element and its part of the first layer, `[T, D + H]`.
    fn of_elements(&self, elements: &Tensor) -> Tensor {
        Tensor::cat(&[elements, &self.of_keys(elements)], 1)
    }

    fn of_rows(&self, lists: &Tensor, _: &Tensor, queries: &mut OfQueries<'_>) -> Result<Tensor> {
        let hidden = lists.size()[2] - self.dim;
        let parts = |all: &Tensor| {
            let parts = all.split_with_sizes([self.dim, hidden], 2);
            (parts[0].shallow_clone(), parts[1].shallow_clone())
        };
        let ((vectors, of_keys), (queries, of_queries)) =
            (parts(lists), parts(&queries(&|vectors| self.with_queries(vectors))?.unsqueeze(1)));
        let weights = self.weights(&(queries * &vectors), &of_queries, &of_keys);
        // Vectors after the end of a list are zero, so their weights do not matter.
        Ok(weights.transpose(1, 2).matmul(&vectors).squeeze_dim(1))
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
        let unit = tensors::seeded(3, || {
            TargetAttention::new(&variables.root(), 3, &[4, 2], &Compute::new(Precision::Fp32))
        });
        variables.double();
        let lists = Lists { offsets: vec![0, 1, 4, 2], sizes: vec![3, 2, 0, 1] };
        let targets = [1, 0, 1, 1];
        let inputs = [[5, 3], [2, 3]];
        check_gradients(&variables, &inputs, |inputs| unit.forward(&inputs[0], &inputs[1], &lists, &targets));
    }

    #[test]
    fn padded_lists_have_the_vectors_of_lists() {
        let variables = nn::VarStore::new(Device::Cpu);
        let (unit, [vectors, queries]) = tensors::seeded(5, || {
            let unit = TargetAttention::new(&variables.root(), 3, &[4, 2], &Compute::new(Precision::Fp32));
            (unit, [5, 2].map(|n| Tensor::randn([n, 3], (tch::Kind::Float, Device::Cpu))))
        });
        let lists = Lists { offsets: vec![0, 1, 4, 2], sizes: vec![3, 2, 0, 1] };
        let targets = [1, 0, 1, 1];
        let keys = pad(&unit.of_elements(&vectors), &lists);
        let sizes = Tensor::from_slice(&lists.sizes);
        let rows = indices(&targets, Device::Cpu);
        let found = unit.of_rows(&keys, &sizes, &mut |part| Ok(gather(&part(&queries), &rows))).unwrap();
        let expected = unit.forward(&vectors, &queries, &lists, &targets);
        assert!((found - expected).abs().max().double_value(&[]) < 1e-6);
    }
}
