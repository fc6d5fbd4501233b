//! `plan.json`: the place of every part of every table, and the predicted cost of each rank.

use std::ops::Range;
use std::path::Path;

use onefold_base::units::abridged;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files::{self, FileKind};
use crate::table::{Table, has_rows_for, row_blocks};
use crate::topology::Topology;

pub(crate) const KIND: FileKind = FileKind {
    name: files::PLAN,
    version: 2,
    hint: "make the plan again with `onefold-shard plan --tables FILE --topology FILE --out FILE`",
};

/// An assignment of tables, or of parts of them, to ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of this format.
    pub format_version: u32,
    /// The search that made the plan.
    pub search: String,
    /// The name of the cost model that made the predictions.
    pub cost_model: String,
    /// The number of samples of a step, over all ranks, for which the predictions are made.
    pub global_batch_size: u64,
    /// The ranks for which the plan is made.
    pub topology: Topology,
    /// The predicted cost of the most expensive rank, which all others wait for, in milliseconds per step.
    pub max_cost_ms: f64,
    /// Caveats about the predictions, for example that a shard is outside of the measured range.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The predictions, ordered by rank.
    pub ranks: Vec<RankPrediction>,
    /// The tables, in feature order.
    pub tables: Vec<TablePlan>,
}

/// The predictions for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankPrediction {
    /// The rank.
    pub rank: u32,
    /// Time of lookup, pooling and update, forward and backward, in milliseconds per step.
    pub compute_ms: f64,
    /// Time of the exchange with the other ranks, in milliseconds per step.
    pub communication_ms: f64,
    /// Bytes of the rank's shards with their optimizer state.
    pub memory_bytes: u64,
    /// Bytes of the buffers in which ids, vectors and gradients are exchanged with the other ranks, on average.
    #[serde(default)]
    pub buffer_bytes: u64,
    /// Additional buffer bytes for batches above the mean.
    #[serde(default)]
    pub reserve_bytes: u64,
}

impl RankPrediction {
    /// Returns the bytes of shards, optimizer state, buffers and reserve.
    pub fn total_bytes(&self) -> u64 {
        self.memory_bytes.saturating_add(self.buffer_bytes).saturating_add(self.reserve_bytes)
    }

    /// Returns the sum of computation and communication, in milliseconds per step.
    pub fn cost_ms(&self) -> f64 {
        self.compute_ms + self.communication_ms
    }
}

/// The placement of one table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TablePlan {
    /// The table's name.
    pub name: String,
    /// The name of the table in TorchRec, if it differs from [the usual one](crate::torchrec::table_name).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torchrec_name: Option<String>,
    /// Rows of the whole table.
    pub rows: u64,
    /// Embedding dimension of the whole table.
    pub dim: u64,
    /// How the table is divided.
    pub sharding_type: ShardingType,
    /// The shards of the table.
    pub shards: Vec<Shard>,
    /// The reason for this placement, for the largest and most expensive tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl TablePlan {
    /// Describes the placement, such as `column_wise on 0 (columns 0–31), 3 (columns 32–63)`.
    pub fn described(&self) -> String {
        format!("{} on {}", self.sharding_type.name(), self.described_ranks())
    }

    /// Describes the ranks of the shards: `3`, `0–7`, or `0 (columns 0–31), 3 (columns 32–63)`.
    pub fn described_ranks(&self) -> String {
        let has_columns = self.sharding_type == ShardingType::ColumnWise;
        if let ([first, .., last], false) = (&self.shards[..], has_columns)
            && self.shards.windows(2).all(|pair| pair[0].rank.checked_add(1) == Some(pair[1].rank))
        {
            return format!("{}–{}", first.rank, last.rank);
        }
        let shard = |Shard { rank, columns, .. }: &Shard| match has_columns {
            true => format!("{rank} (columns {}–{})", columns.start, columns.end.saturating_sub(1)),
            false => rank.to_string(),
        };
        abridged(&self.shards.iter().map(shard).collect::<Vec<_>>()).join(", ")
    }
}

/// The ways to divide a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardingType {
    /// One shard holds the whole table.
    TableWise,
    /// Every shard holds all rows and some of the columns.
    ColumnWise,
    /// Every shard holds all columns and some of the rows.
    RowWise,
    /// Every rank holds the whole table.
    DataParallel,
}

impl ShardingType {
    /// Returns the name in `plan.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::TableWise => "table_wise",
            Self::ColumnWise => "column_wise",
            Self::RowWise => "row_wise",
            Self::DataParallel => "data_parallel",
        }
    }
}

/// A range of rows and columns of a table on one rank. The ends of the ranges are exclusive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// The rank that holds the shard.
    pub rank: u32,
    /// The rows of the shard.
    pub rows: Range<u64>,
    /// The columns of the shard.
    pub columns: Range<u64>,
}

impl Shard {
    /// Returns the whole of `table` as a shard on `rank`.
    pub fn whole(table: &Table, rank: u32) -> Self {
        Self { rank, rows: 0..table.rows, columns: 0..table.dim }
    }

    /// Returns the number of rows, or 0 for a reversed range.
    pub fn row_count(&self) -> u64 {
        self.rows.end.saturating_sub(self.rows.start)
    }

    /// Returns the number of columns, or 0 for a reversed range.
    pub fn column_count(&self) -> u64 {
        self.columns.end.saturating_sub(self.columns.start)
    }
}

/// Returns the shards of a table whose rows are divided into [equal blocks](row_blocks) on these ranks.
pub(crate) fn row_shards(table: &Table, ranks: Range<usize>) -> Vec<Shard> {
    let blocks = row_blocks(table.rows, ranks.len() as u64);
    let shard = |(rows, rank)| Shard { rank: rank as u32, rows, columns: 0..table.dim };
    blocks.zip(ranks).map(shard).collect()
}

impl TablePlan {
    /// Places `table` whole on one rank.
    pub fn table_wise(table: &Table, rank: u32) -> Self {
        Self::new(table, ShardingType::TableWise, vec![Shard::whole(table, rank)])
    }

    /// Places `table` in equal blocks of rows on the first `ranks` ranks. The last block may be shorter. Returns
    /// `None` if no row is left for the last block.
    pub fn row_wise(table: &Table, ranks: u32) -> Option<Self> {
        let shards = || row_shards(table, 0..ranks as usize);
        has_rows_for(table.rows, u64::from(ranks)).then(|| Self::new(table, ShardingType::RowWise, shards()))
    }

    /// Places a copy of `table` on each of the first `ranks` ranks.
    pub fn data_parallel(table: &Table, ranks: u32) -> Self {
        let shards = (0..ranks).map(|rank| Shard::whole(table, rank)).collect();
        Self::new(table, ShardingType::DataParallel, shards)
    }

    pub(crate) fn new(table: &Table, sharding_type: ShardingType, shards: Vec<Shard>) -> Self {
        let Table { rows, dim, .. } = *table;
        let (name, torchrec_name) = (table.name.clone(), table.torchrec_name.clone());
        Self { name, torchrec_name, rows, dim, sharding_type, shards, reason: None }
    }
}

impl Plan {
    /// Reads a plan and checks that it is consistent.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing, malformed or of another version, or if [`validate`](Self::validate)
    /// rejects the plan.
    pub fn load(path: &Path) -> Result<Self> {
        let plan: Self = files::load(path, &KIND)?;
        plan.validate().map_err(|error| error.in_file(path))?;
        Ok(plan)
    }

    /// Writes the plan atomically.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written. An old plan remains unchanged.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store(path, self)
    }

    /// Returns the largest number of samples of a step that a rank processes.
    pub fn samples_per_rank(&self) -> u64 {
        self.topology.samples_per_rank(self.global_batch_size)
    }

    /// Returns the rank that uses the largest share of its memory.
    pub fn fullest(&self) -> Option<&RankPrediction> {
        let part = |rank: &RankPrediction| {
            rank.total_bytes() as f64 / self.topology.memory_of(rank.rank).max(1) as f64
        };
        self.ranks.iter().max_by(|a, b| part(a).total_cmp(&part(b)))
    }

    /// Returns the rank with the highest predicted cost, the first one of equal ranks.
    pub fn bottleneck(&self) -> Option<&RankPrediction> {
        self.ranks.iter().reduce(|worst, rank| if rank.cost_ms() > worst.cost_ms() { rank } else { worst })
    }
}

pub(crate) fn no_such_rank(table: &str, rank: u32, ranks: u32) -> Error {
    Error::plan(format!(
        "table `{table}` has a shard on rank {rank}, the topology has ranks 0 to {}",
        ranks.saturating_sub(1)
    ))
}
