//! What a model takes, known before anything is allocated.

use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_sharding::{FeatureConfig, TableConfig, tables_of};
use serde::Serialize;

use crate::config::ParameterCount;
use crate::embedding::Placement;
use crate::{Error, Result, TrainConfig};

/// Parameters of a model and the memory of training it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ModelSize {
    /// Parameters.
    pub parameters: ParameterCount,
    /// Bytes of the parameters that this rank has, their optimizer state, the dense part's gradient, and a bit per table row.
    pub model_bytes: u64,
    /// The bytes that the reader may take: row groups and batches.
    pub reader_bytes: u64,
}

impl ModelSize {
    /// The size of one rank's part of a model; the reader gets what `limit` leaves, 1 GiB at most.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] if the part does not fit into `limit`.
    pub(crate) fn within(
        config: &TrainConfig,
        parameters: ParameterCount,
        features: &[FeatureConfig],
        placement: &Placement,
        limit: Option<u64>,
    ) -> Result<Self> {
        let (tables, _) = tables_of(features);
        let own = placement.shards.iter().filter(|shard| shard.rank == placement.collectives.rank());
        let shards: Vec<TableConfig> = own
            .map(|shard| TableConfig {
                rows: shard.rows.end - shard.rows.start,
                dim: shard.columns.end - shard.columns.start,
                ..tables[shard.table].clone()
            })
            .collect();
        let rows: u64 = shards.iter().map(|shard| shard.rows).sum();
        let model_bytes =
            parameters.with_tables(config, &shards).bytes() + 4 * parameters.dense + rows.div_ceil(8);
        let left = limit.map_or(Ok(DEFAULT_MEMORY_LIMIT), |limit| {
            let left = limit.checked_sub(model_bytes).filter(|left| *left > 0);
            left.ok_or(Error::Memory { needed: model_bytes, limit })
        });
        Ok(Self { parameters, model_bytes, reader_bytes: left?.min(DEFAULT_MEMORY_LIMIT) })
    }
}
