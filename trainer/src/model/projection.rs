//! Projections of the vectors of narrow tables to the common dimension: mixed-dimension embeddings (Ginart et al.
//! 2019).

use onefold_sharding::TableConfig;
use tch::{Tensor, nn};

use super::compute::Compute;
use super::linear::xavier_uniform;
use crate::embedding::Lookup;
use crate::{shim, tensors};

/// A linear layer without bias for every table that is narrower than the model's vectors. It is applied to the
/// pooled vectors of each feature of the table, once per row of a group.
#[derive(Debug)]
pub(super) struct Projections {
    /// For each table, the weights `[D, d]`, or `None` if its vectors have the common dimension D.
    weights: Vec<Option<Tensor>>,
    compute: Compute,
}

/// The vectors of a lookup at the common dimension.
#[derive(Debug)]
pub(super) struct Projected {
    /// The pooled vectors of the tables, `[U, W]`, a leaf of autograd.
    pooled: Tensor,
    /// The vectors that interact, `[U, F, D]`.
    pub(super) rows: Tensor,
}

impl Projections {
    /// Creates the projections of `tables` to `dim` values, with the initial weights of the authors' program.
    pub(super) fn new(path: &nn::Path<'_>, tables: &[TableConfig], dim: i64, compute: &Compute) -> Self {
        let of_table = |(number, table): (usize, &TableConfig)| {
            let own = table.dim as i64;
            (own != dim).then(|| (path / number).var("weight", &[dim, own], xavier_uniform(own, dim)))
        };
        Self { weights: tables.iter().enumerate().map(of_table).collect(), compute: *compute }
    }

    /// Projects the pooled vectors of a lookup. Returns `None` if no table of the lookup is narrow.
    pub(super) fn forward(&self, lookup: &Lookup) -> Option<Projected> {
        let features = &lookup.pooled_features;
        if features.iter().all(|feature| self.weights[feature.table].is_none()) {
            return None;
        }
        let shape = [(lookup.pooled.len() / lookup.width()) as i64, lookup.width() as i64];
        let pooled = tensors::from_f32(&lookup.pooled, &shape).set_requires_grad(true);
        let widths: Vec<i64> = lookup.columns.iter().map(|columns| columns.len() as i64).collect();
        // The gradient of one split is one concatenation. That of a `narrow` per feature would be a sum of as many
        // tensors of the size of `pooled`.
        let vectors =
            features.iter().zip(pooled.split_with_sizes(widths.as_slice(), 1)).map(|(feature, own)| {
                match &self.weights[feature.table] {
                    Some(weights) => self.compute.linear(&own, (weights, None)),
                    None => own,
                }
            });
        let rows = Tensor::stack(&vectors.collect::<Vec<_>>(), 1);
        Some(Projected { pooled, rows })
    }
}

impl Projected {
    /// Returns the gradients of the pooled vectors, `[U, W]`, given those of [`rows`](Self::rows). Adds the
    /// gradients of the weights to those of the parameters.
    pub(super) fn backward(&self, gradients: &[f32]) -> Vec<f32> {
        shim::backward(&self.rows, &tensors::from_f32(gradients, &self.rows.size()));
        tensors::to_vec(&self.pooled.grad())
    }
}
