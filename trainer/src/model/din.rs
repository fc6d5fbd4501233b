//! Pooling of sequences by how well their elements fit a target.

use tch::Tensor;
use tch::nn::{self, Module};

use super::lists::{Lists, gather, indices, weighted_sum};

/// The local activation unit of DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction"), shared by all
/// features that pool by it: `Σ_j a(q, k_j) k_j` over the elements of a list, with weights from an MLP over
/// `[q, k, q - k, q ∘ k]`.
///
/// As in the paper the weights are not normalised, so that they keep how strong an interest is. Hidden layers have the
/// sigmoid of the authors' program: the Dice of the paper would make a sample's vector depend on its batch.
///
/// The first layer is linear in each part of its input, so with `W = [Wq Wk Wd Wp]`
///
/// ```text
/// W [q, k, q - k, q ∘ k] = (Wq + Wd) q + (Wk - Wd) k + Wp (q ∘ k)
/// ```
///
/// of which the first term is computed once per distinct query, the second once per element of a timeline, and only the last
/// once per pair.
#[derive(Debug)]
pub(super) struct TargetAttention {
    dim: i64,
    layers: Vec<nn::Linear>,
}

impl TargetAttention {
    /// An attention unit with hidden layers of these widths; one of width 1 follows.
    pub(super) fn new(path: &nn::Path<'_>, dim: i64, hidden: &[i64]) -> Self {
        let inputs = std::iter::once(4 * dim).chain(hidden.iter().copied());
        let outputs = hidden.iter().copied().chain(std::iter::once(1));
        let layer = |(i, (from, to)): (usize, (i64, i64))| {
            nn::linear(path / i, from, to, nn::LinearConfig::default())
        };
        Self { dim, layers: inputs.zip(outputs).enumerate().map(layer).collect() }
    }

    /// `[N, D]`, the vector of every list of `vectors` (`[T, D]`); zero for an empty one. List `i` attends with row `targets[i]` of
    /// `queries` (`[U, D]`).
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
        let (first, rest) = self.layers.split_first().expect("the last layer is always there");
        let part = |i: i64| first.ws.narrow(1, i * self.dim, self.dim);
        let of_queries = queries.linear(&(part(0) + part(2)), first.bs.as_ref());
        let of_keys = vectors.matmul(&(part(1) - part(2)).tr());
        let products = gather(queries, &by_position) * gather(vectors, &elements);
        let mut hidden =
            products.matmul(&part(3).tr()) + gather(&of_queries, &by_position) + gather(&of_keys, &elements);
        for layer in rest {
            hidden = layer.forward(&hidden.sigmoid());
        }
        weighted_sum(vectors, &elements, &indices(&lists.starts(), device), &hidden.reshape([-1]))
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, nn};

    use super::super::lists::check_gradients;
    use super::*;

    #[test]
    fn gradients_equal_finite_differences() {
        let mut variables = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(3);
        let unit = TargetAttention::new(&variables.root(), 3, &[4, 2]);
        variables.double();
        let lists = Lists { offsets: vec![0, 1, 4, 2], sizes: vec![3, 2, 0, 1] };
        let targets = [1, 0, 1, 1];
        let inputs = [[5, 3], [2, 3]];
        check_gradients(&variables, &inputs, |inputs| unit.forward(&inputs[0], &inputs[1], &lists, &targets));
    }
}
