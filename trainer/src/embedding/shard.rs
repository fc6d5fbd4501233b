//! The placement of the parts of tables, and their buffers in checkpoints.

use std::ops::Range;

use onefold_sharding::{FeatureConfig, Plan, TableConfig, tables_of};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// A rectangle of a table on a rank; the ends of the ranges are exclusive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// The index of the table in the order of [`tables_of`].
    pub table: usize,
    /// The rank that holds it.
    pub rank: u32,
    /// The range of its rows.
    pub rows: Range<u64>,
    /// The range of its columns.
    pub columns: Range<u64>,
}

impl Shard {
    /// Returns a shard with all of a table.
    pub fn whole(table: usize, config: &TableConfig, rank: u32) -> Self {
        Self { table, rank, rows: 0..config.rows, columns: 0..config.dim }
    }

    /// Returns the shards of a plan, in the order of the tables of `features`.
    ///
    /// # Errors
    ///
    /// [`onefold_sharding::Error::Invalid`] if the plan is not valid or does not contain exactly these tables.
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

    /// Returns whether the shard contains all of its table.
    pub fn is_whole(&self, config: &TableConfig) -> bool {
        self.rows == (0..config.rows) && self.columns == (0..config.dim)
    }

    /// Returns whether the shard has the same table, rows and columns as `other`: then they are replicas.
    pub fn is_replica_of(&self, other: &Self) -> bool {
        (self.table, &self.rows, &self.columns) == (other.table, &other.rows, &other.columns)
    }
}

/// A buffer of a shard in a checkpoint: `[rows, columns]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// `weight`, or the name of the optimizer's state.
    pub name: &'static str,
    /// The type of a value.
    pub dtype: Dtype,
    /// The number of values per row.
    pub columns: usize,
    /// Whether a row has one or several values per column of the shard, instead of one value for all columns.
    pub by_column: bool,
}

impl Buffer {
    /// The usage of rows, a byte per row.
    pub(super) const USAGE: Self = Self { name: "usage", dtype: Dtype::U8, columns: 1, by_column: false };

    /// Returns whether this buffer contains the usage of rows.
    pub(crate) fn is_usage(&self) -> bool {
        *self == Self::USAGE
    }

    /// Returns the number of bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.size()
    }
}

/// A set of rows of a shard, relative to its first row.
#[derive(Debug, Clone, Copy)]
pub enum RowSet<'a> {
    /// All rows.
    All,
    /// The first rows, as many as given.
    First(usize),
    /// The given rows.
    Chosen(&'a [u32]),
}
