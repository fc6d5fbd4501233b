//! What a model takes, known before anything is allocated.

use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use serde::Serialize;

use crate::config::ParameterCount;
use crate::{Error, Result};

/// Parameters of a model and the memory of training it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ModelSize {
    /// Parameters.
    pub parameters: ParameterCount,
    /// Bytes of the parameters, their optimizer state, the dense part's gradient, and a bit per table row.
    pub model_bytes: u64,
    /// The bytes that the reader may take: row groups and batches.
    pub reader_bytes: u64,
}

impl ModelSize {
    /// The size of a model with tables of `rows` rows in all; the reader gets what `limit` leaves, 1 GiB at most.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] if the model does not fit into `limit`.
    pub(crate) fn within(parameters: ParameterCount, rows: u64, limit: Option<u64>) -> Result<Self> {
        let model_bytes = parameters.bytes() + 4 * parameters.dense + rows.div_ceil(8);
        let left = limit.map_or(Ok(DEFAULT_MEMORY_LIMIT), |limit| {
            let left = limit.checked_sub(model_bytes).filter(|left| *left > 0);
            left.ok_or(Error::Memory { needed: model_bytes, limit })
        });
        Ok(Self { parameters, model_bytes, reader_bytes: left?.min(DEFAULT_MEMORY_LIMIT) })
    }
}
