//! Where the parts of tables are, and what is stored of them.

use std::ops::Range;

use onefold_sharding::{FeatureConfig, Plan, TableConfig, tables_of};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// A rectangle of a table on a rank; the ends of the ranges are exclusive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// The table, by number: as [`tables_of`] the features gives them.
    pub table: usize,
    /// The rank that holds it.
    pub rank: u32,
    /// Its rows.
    pub rows: Range<u64>,
    /// Its columns.
    pub columns: Range<u64>,
}

impl Shard {
    /// All of a table on a rank.
    pub fn whole(table: usize, config: &TableConfig, rank: u32) -> Self {
        Self { table, rank, rows: 0..config.rows, columns: 0..config.dim }
    }

    /// The shards of a plan, in the order of the tables of `features`.
    ///
    /// # Errors
    ///
    /// [`onefold_sharding::Error::Invalid`] if the plan is not valid or not one of exactly these tables.
    pub fn of_plan(plan: &Plan, features: &[FeatureConfig]) -> onefold_sharding::Result<Vec<Self>> {
        let (tables, _) = tables_of(features);
        plan.check_configs(&tables)?;
        let mut shards = Vec::new();
        for (table, config) in tables.iter().enumerate() {
            for planned in plan.tables.iter().filter(|planned| planned.name == config.name) {
                shards.extend(planned.shards.iter().map(|shard| Self {
                    table,
                    rank: shard.rank,
                    rows: shard.rows.clone(),
                    columns: shard.columns.clone(),
                }));
            }
        }
        Ok(shards)
    }

    /// Whether it is all of its table.
    pub fn is_whole(&self, config: &TableConfig) -> bool {
        self.rows == (0..config.rows) && self.columns == (0..config.dim)
    }

    /// Whether it holds the same numbers as `other`, which is then a replica on another rank.
    pub fn is_replica_of(&self, other: &Self) -> bool {
        (self.table, &self.rows, &self.columns) == (other.table, &other.rows, &other.columns)
    }
}

/// One of a shard's buffers as a checkpoint holds it: `[rows, columns]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// `weight`, or the name of the optimizer's state.
    pub name: &'static str,
    /// Type of a value.
    pub dtype: Dtype,
    /// Values per row.
    pub columns: usize,
    /// Whether a row has values for each of its columns (one or several after each other), and not one for all of them.
    pub by_column: bool,
}

impl Buffer {
    /// How rows are used, a byte of bits for each.
    pub(super) const USAGE: Self = Self { name: "usage", dtype: Dtype::U8, columns: 1, by_column: false };

    /// Whether it says how rows are used.
    pub(crate) fn is_usage(&self) -> bool {
        *self == Self::USAGE
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.size()
    }
}

/// Rows of a shard, counted from its first one.
#[derive(Debug, Clone, Copy)]
pub enum RowSet<'a> {
    /// All.
    All,
    /// So many from the first one on.
    First(usize),
    /// These.
    Chosen(&'a [u32]),
}
