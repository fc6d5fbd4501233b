//! The types of weights, and the optimizers of tables.

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
    /// The upper half of a single-precision number.
    Bf16,
}

impl DataType {
    /// Whether this is the default type.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Bytes of one weight.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Fp32 => 4,
            Self::Fp16 | Self::Bf16 => 2,
        }
    }
}

/// The optimizer of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableOptimizer {
    /// Keeps no state.
    Sgd,
    /// Keeps a sum of squares per weight.
    Adagrad,
    /// Keeps one sum of squares per row.
    #[default]
    RowWiseAdagrad,
    /// Keeps two moments per weight.
    Adam,
}

impl TableOptimizer {
    /// The number of values that it keeps for a row of `columns` columns; `None` if they cannot be counted.
    pub fn state_values(self, columns: u64) -> Option<u64> {
        match self {
            Self::Sgd => Some(0),
            Self::Adagrad => Some(columns),
            Self::RowWiseAdagrad => Some(1),
            Self::Adam => columns.checked_mul(2),
        }
    }
}
