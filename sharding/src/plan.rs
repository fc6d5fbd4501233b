//! `plan.json`: the place of every part of every table, and the predicted cost of each rank.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use onefold_base::units::abridged;
use serde::{Deserialize, Serialize};

use crate::cost::rank_costs;
use crate::files::{self, FileKind};
use crate::table::{has_rows_for, row_blocks};
use crate::{BufferBytes, CostModel, Error, Result, ShardLoad, Table, Topology};

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
    /// Predicts the cost and memory of each rank for the placement `placed`, in steps of `global_batch_size` samples
    /// over all ranks, and returns the plan.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a shard is on a rank that the topology does not have, or belongs to none of `tables`;
    /// errors of the cost model. All other properties are left to [`check`](Self::check).
    pub fn predict(
        search: &str,
        tables: &[Table],
        placed: Vec<TablePlan>,
        topology: &Topology,
        cost_model: &dyn CostModel,
        global_batch_size: u64,
    ) -> Result<Self> {
        let batch_size = topology.samples_per_rank(global_batch_size);
        let loads = loads_by_rank(tables, &placed, topology, batch_size)?;
        let costs = rank_costs(cost_model, &loads, topology)?;
        let buffers = buffer_bytes(&loads);
        let mut ranks = Vec::with_capacity(loads.len());
        for (((rank, loads), cost), [buffer_bytes, reserve_bytes]) in
            (0..).zip(&loads).zip(costs).zip(buffers)
        {
            ranks.push(RankPrediction {
                rank,
                compute_ms: cost.compute_ms,
                communication_ms: cost.communication_ms,
                memory_bytes: memory_bytes(loads)?,
                buffer_bytes,
                reserve_bytes,
            });
        }
        Ok(Self {
            format_version: KIND.version,
            search: search.to_owned(),
            cost_model: cost_model.id().to_owned(),
            global_batch_size,
            topology: topology.clone(),
            max_cost_ms: ranks.iter().map(RankPrediction::cost_ms).fold(0.0, f64::max),
            notes: cost_model.notes(&loads),
            ranks,
            tables: placed,
        })
    }

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

    /// Returns the shards of every rank, in the plan's order of tables.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a shard is on a rank that the plan's topology does not have, or belongs to none of
    /// `tables`.
    pub fn loads<'a>(&'a self, tables: &'a [Table]) -> Result<Vec<Vec<ShardLoad<'a>>>> {
        loads_by_rank(tables, &self.tables, &self.topology, self.samples_per_rank())
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

/// Returns the shards of every rank, in table order, for steps of `batch_size` samples per rank.
pub(crate) fn loads_by_rank<'a>(
    tables: &'a [Table],
    placed: &'a [TablePlan],
    topology: &'a Topology,
    batch_size: u64,
) -> Result<Vec<Vec<ShardLoad<'a>>>> {
    let by_name: HashMap<&str, &Table> = tables.iter().map(|table| (table.name.as_str(), table)).collect();
    let mut loads = vec![Vec::new(); topology.ranks as usize];
    for plan in placed {
        let Some(&table) = by_name.get(plan.name.as_str()) else {
            return Err(Error::plan(format!(
                "it places table `{}`, which is not among the tables",
                plan.name
            )));
        };
        let nodes = || plan.shards.iter().map(|shard| shard.rank / topology.ranks_per_node.max(1));
        let within_node = nodes().min() == nodes().max();
        for shard in &plan.shards {
            let Some(rank) = loads.get_mut(shard.rank as usize) else {
                return Err(no_such_rank(&plan.name, shard.rank, topology.ranks));
            };
            let sharding_type = plan.sharding_type;
            rank.push(ShardLoad { table, sharding_type, shard, topology, batch_size, within_node });
        }
    }
    Ok(loads)
}

pub(crate) fn no_such_rank(table: &str, rank: u32, ranks: u32) -> Error {
    Error::plan(format!(
        "table `{table}` has a shard on rank {rank}, the topology has ranks 0 to {}",
        ranks.saturating_sub(1)
    ))
}

/// Returns the bytes of a rank's shards with their optimizer state.
pub(crate) fn memory_bytes(loads: &[ShardLoad<'_>]) -> Result<u64> {
    let mut sum = 0u64;
    for load in loads {
        let bytes = load.table.shard_bytes(load.shard.row_count(), load.shard.column_count())?;
        // A saturated sum exceeds every memory limit.
        sum = sum.saturating_add(bytes);
    }
    Ok(sum)
}

/// Returns the buffer bytes of every rank: the average, and the additional bytes for batches above the mean. They
/// include the buffers to serve the rank's own shards, and to request from all shards. A saturated sum exceeds every
/// memory limit.
pub(crate) fn buffer_bytes(ranks: &[Vec<ShardLoad<'_>>]) -> Vec<[u64; 2]> {
    let sums = |of: &dyn Fn(&ShardLoad<'_>) -> BufferBytes| -> Vec<u64> {
        let of_rank =
            |loads: &Vec<ShardLoad<'_>>| loads.iter().map(of).fold(BufferBytes::default(), BufferBytes::plus);
        let of_ranks: Vec<BufferBytes> = ranks.iter().map(of_rank).collect();
        let asking = of_ranks.iter().map(|rank| rank.asking).fold(0, u64::saturating_add);
        of_ranks.iter().map(|rank| rank.serving.saturating_add(asking)).collect()
    };
    let mean = sums(&|load| load.buffers());
    let reserved = sums(&|load| load.reserved_buffers());
    mean.into_iter().zip(reserved).map(|(mean, reserved)| [mean, reserved.saturating_sub(mean)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnalyticCost, Greedy, Search};

    /// Costs that are easy to add up: 1 ms of computation and 0.5 ms of communication per table.
    struct PerShard;

    impl CostModel for PerShard {
        fn id(&self) -> &str {
            "per_shard"
        }

        fn shard_ms(&self, _: &ShardLoad<'_>) -> Result<f64> {
            Ok(1.0)
        }

        fn communication_ms(&self, ranks: &[crate::RankLoad], _: &Topology, _: bool) -> Vec<f64> {
            ranks.iter().map(|rank| 0.5 * rank.compute_ms).collect()
        }
    }

    fn plan() -> Plan {
        let tables = [Table::new("a", 30, 4), Table::new("b", 20, 4), Table::new("c", 10, 4)];
        Greedy::BySize.plan(&tables, &Topology::h100(2, 1 << 20).unwrap(), &PerShard, 16).unwrap()
    }

    #[test]
    fn the_bottleneck_is_the_most_expensive_rank() {
        let plan = plan();
        assert_eq!(plan.max_cost_ms, 3.0);
        assert_eq!(
            plan.bottleneck().unwrap(),
            &RankPrediction {
                rank: 1,
                compute_ms: 2.0,
                communication_ms: 1.0,
                memory_bytes: 600,
                // Each table is requested by one rank and served by the other.
                buffer_bytes: 3 * (8 * (8 + 8 + 2 * 4 * 4)),
                reserve_bytes: 0,
            }
        );
        assert_eq!(plan.ranks[0].memory_bytes, 30 * (4 + 1) * 4);
    }

    /// More ranks divide the samples of a step: the total computation remains the same, and each rank computes less.
    #[test]
    fn a_global_batch_is_divided_among_the_ranks() {
        let tables: Vec<Table> = (0..8).map(|i| Table::new(format!("t{i}"), 10_000, 64)).collect();
        let of = |ranks| {
            let topology = Topology::h100(ranks, 1 << 30).unwrap();
            Greedy::BySize.plan(&tables, &topology, &AnalyticCost, 4_096).unwrap()
        };
        let [two, four] = [2, 4].map(of);
        let compute = |plan: &Plan| plan.ranks.iter().map(|rank| rank.compute_ms).sum::<f64>();
        assert!((compute(&two) / compute(&four) - 1.0).abs() < 1e-9, "{two:?} {four:?}");
        assert!(four.max_cost_ms < 0.6 * two.max_cost_ms, "{two:?} {four:?}");
        assert_eq!([two.samples_per_rank(), four.samples_per_rank()], [2_048, 1_024]);
        // Each rank requests for fewer samples, from more ranks.
        assert!(four.ranks[0].buffer_bytes < two.ranks[0].buffer_bytes, "{two:?} {four:?}");
    }

    #[test]
    fn a_plan_is_loaded_as_stored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.json");
        plan().store(&path).unwrap();
        assert_eq!(Plan::load(&path).unwrap(), plan());
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.json");
        plan().store(&path).unwrap();
        let whole = fs_err::read_to_string(&path).unwrap();
        let refused = |text: &str| {
            fs_err::write(&path, text).unwrap();
            Plan::load(&path).unwrap_err().to_string()
        };
        assert!(refused(&whole[..whole.len() / 2]).contains("plan.json`: EOF while parsing"));
        assert!(
            refused(&whole.replacen("\"format_version\": 2", "\"format_version\": 3", 1))
                .contains("format version 3")
        );
        assert!(refused(&whole.replace("table_wise", "diagonal")).contains("unknown variant `diagonal`"));
        let error = refused(&whole.replacen("\"max_cost_ms\": 3.0", "\"max_cost_ms\": 2.0", 1));
        assert!(error.contains("plan.json`: the plan is not valid: `max_cost_ms` is 2"), "{error}");
        assert!(error.ends_with("\n  hint: make the plan again with `onefold-shard plan`"), "{error}");
    }

    #[test]
    fn a_shard_on_no_rank_cannot_be_priced() {
        let tables = [Table::new("a", 30, 4)];
        let topology = Topology::h100(2, 1 << 20).unwrap();
        let placed = |name: &str, rank| vec![TablePlan::table_wise(&Table::new(name, 30, 4), rank)];
        let error = Plan::predict(
            "test",
            &tables,
            placed("a", 2),
            &topology,
            &PerShard,
            topology.global_batch_size(8),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("table `a` has a shard on rank 2, the topology has ranks 0 to 1"), "{error}");
        let error = Plan::predict(
            "test",
            &tables,
            placed("z", 0),
            &topology,
            &PerShard,
            topology.global_batch_size(8),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("it places table `z`, which is not among the tables"), "{error}");
    }
}
