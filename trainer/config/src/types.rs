//! The types of table weights, and the optimizers of tables.

use serde::{Deserialize, Serialize};

/// The type of a table's weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataType {
    /// IEEE 754 single precision.
    #[default]
    Fp32,
    /// IEEE 754 half precision.
    Fp16,
    /// bfloat16: the upper 16 bits of a single-precision number.
    Bf16,
}

impl DataType {
    /// Returns the number of bytes of one weight.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Fp32 => 4,
            Self::Fp16 | Self::Bf16 => 2,
        }
    }
}

/// The optimization algorithm of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableOptimizer {
    /// Stochastic gradient descent, without state.
    Sgd,
    /// Adagrad, with a sum of squared gradients per weight.
    Adagrad,
    /// Row-wise Adagrad, with one sum of squared gradients per row.
    #[default]
    RowWiseAdagrad,
    /// Adam, with two moments per weight.
    Adam,
}

impl TableOptimizer {
    /// Returns the number of state values for a row of `columns` columns, or `None` on overflow.
    pub fn state_values(self, columns: u64) -> Option<u64> {
        match self {
            Self::Sgd => Some(0),
            Self::Adagrad => Some(columns),
            Self::RowWiseAdagrad => Some(1),
            Self::Adam => columns.checked_mul(2),
        }
    }
}
