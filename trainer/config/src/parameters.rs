//! The number of parameters and bytes of a model.

use serde::Serialize;

use super::{FeatureConfig, Interaction, TableConfig, TableOptimizer, TrainConfig, tables_of};

impl TrainConfig {
    /// Counts the parameters of the model with these sparse features and this number of dense features.
    pub fn parameters(&self, features: &[FeatureConfig], dense_features: usize) -> ParameterCount {
        let dim = self.embedding.dim as i64;
        let (bottom, dense_vectors) = match dense_features as i64 {
            0 => (0, 0),
            width => (mlp_parameters(width, &self.model.bottom_mlp), 1),
        };
        let vectors = features.len() as i64 + dense_vectors;
        let crosses = match self.model.interaction {
            Interaction::Dot => 0,
            Interaction::Dcn => {
                self.model.dcn_num_layers * (2 * self.model.dcn_low_rank_dim + 1) * vectors * dim
            }
        };
        let width = self.model.interaction.width(vectors, dim, dense_vectors > 0);
        let top = mlp_parameters(width, &self.model.top_mlp);
        let blocks = self.model.block_parameters(features, dim);
        let tables = tables_of(features).0;
        let widths = tables.iter().map(|table| table.dim as i64);
        let projections: i64 = widths.filter(|width| *width != dim).map(|width| width * dim).sum();
        let count = ParameterCount {
            dense: (bottom + top + blocks + crosses + projections) as u64,
            embedding: 0,
            table_bytes: 0,
            table_state: 0,
            dense_state: self.optimizer.dense.state_values(),
        };
        count.with_tables(self, &tables)
    }
}

/// Returns the number of parameters of linear layers with these widths, on an input of width `input`.
pub(super) fn mlp_parameters(input: i64, widths: &[i64]) -> i64 {
    let inputs = std::iter::once(&input).chain(widths);
    inputs.zip(widths).map(|(from, to)| (from + 1) * to).sum()
}

/// The number of parameters of a model, and what is needed to compute its size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ParameterCount {
    /// The number of parameters of the MLPs, the cross layers, the blocks that pool sequences and the projections
    /// of narrow tables.
    pub dense: u64,
    /// The number of parameters of the tables.
    pub embedding: u64,
    /// The bytes of the tables' parameters.
    #[serde(skip)]
    table_bytes: u64,
    /// The number of optimizer-state values of the tables.
    #[serde(skip)]
    table_state: u64,
    /// The number of optimizer-state values per dense parameter.
    #[serde(skip)]
    dense_state: u64,
}

impl ParameterCount {
    /// Returns the counts of the same dense part with other tables, or with shards of the tables.
    pub fn with_tables(self, config: &TrainConfig, tables: &[TableConfig]) -> Self {
        let state = |table: &TableConfig| match config.optimizer.tables.kind {
            TableOptimizer::RowWiseAdagrad => table.rows,
            TableOptimizer::Adagrad => table.rows * table.dim,
            TableOptimizer::Sgd => 0,
            TableOptimizer::Adam => 2 * table.rows * table.dim,
        };
        Self {
            embedding: tables.iter().map(|table| table.rows * table.dim).sum(),
            table_bytes: tables.iter().map(|table| table.rows * table.dim * table.dtype.bytes()).sum(),
            table_state: tables.iter().map(state).sum(),
            ..self
        }
    }

    /// Returns the bytes of the parameters and their optimizer state.
    pub fn bytes(&self) -> u64 {
        4 * ((1 + self.dense_state) * self.dense + self.table_state) + self.table_bytes
    }
}
