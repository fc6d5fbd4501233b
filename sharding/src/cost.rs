//! What a rank costs per step: the trait a search asks, and the analytic model.

use crate::{Error, Pooling, Result, Shard, ShardingType, Table, Topology};

/// A shard that stands on a rank, with what its cost depends on.
#[derive(Debug, Clone, Copy)]
pub struct ShardLoad<'a> {
    /// The table.
    pub table: &'a Table,
    /// How the table is sharded.
    pub sharding_type: ShardingType,
    /// The part of it.
    pub shard: &'a Shard,
}

/// What one training step takes on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankCost {
    /// Lookup, pooling and update, forward and backward, in milliseconds.
    pub compute_ms: f64,
    /// Exchange of pooled vectors and their gradients with the other ranks, in milliseconds.
    pub communication_ms: f64,
}

impl RankCost {
    /// Compute and communication one after the other, in milliseconds.
    pub fn total_ms(&self) -> f64 {
        self.compute_ms + self.communication_ms
    }
}

/// Predicts what the shards of a rank cost together.
///
/// It prices a whole rank and not a shard, because a fused lookup of several tables is cheaper than their sum.
pub trait CostModel {
    /// The name that a plan keeps, with a version: another formula gets another id.
    fn id(&self) -> &str;

    /// The cost of one step of a rank that holds `shards`, with `batch_size` samples per rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unpriced`] if the model has no formula for a shard's sharding type.
    fn rank_cost(&self, shards: &[ShardLoad<'_>], topology: &Topology, batch_size: u64) -> Result<RankCost>;
}

/// `analytic_v1`: bytes moved ÷ bandwidth, the table-wise and column-wise formulas of TorchRec's planner
/// (`torchrec/distributed/planner/shard_estimators.py` and `constants.py`, commit a48cef7, October 2025).
///
/// For L ids per sample, B samples per rank, W ranks, a shard of d columns of e bytes each, and memory and
/// exchange bandwidths m and x:
///
/// ```text
/// forward       = (8·L·B·W  +  L·B·W·max(d, 32)·e  +  B·W·d·e) · penalty(d) / m      ids, rows, output
/// backward      = 2 · forward
/// communication = 2 · B·W·d·e / x                                         vectors out, gradients back
/// penalty(d)    = 1 for d ≥ 128, 1.15 for d ≥ 64, else 1.75: how much of a GPU's 128-wide block is idle
/// ```
///
/// Ours are three things. The dedupe factor divides B·W, because distinct rows alone are looked up and sent.
/// A table that pools by attention sends one vector per id, L·B·W·d·e, as TorchRec's unpooled collection
/// does, and the attention itself is not in the cost. A single rank sends nothing.
///
/// The model knows no cache reuse, no launch overhead, no waiting for the slowest rank, and adds tables up.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnalyticCost;

/// Bytes of an id.
const ID_BYTES: f64 = 8.0;
/// A row is read in blocks of at least this many weights.
const MIN_BLOCK: u64 = 32;
/// The columns at which a GPU block (32 threads × 4 weights) is full.
const FULL_BLOCK: u64 = 128;
/// Slow-down of a shard narrower than a full block; TorchRec's measurement.
const HALF_BLOCK_PENALTY: f64 = 1.15;
/// Slow-down of a shard narrower than half a block; TorchRec's measurement.
const QUARTER_BLOCK_PENALTY: f64 = 1.75;
/// The backward pass takes this many times the forward pass; TorchRec's measurement.
const BACKWARD_MULTIPLIER: f64 = 2.0;
const MS_PER_SECOND: f64 = 1e3;

impl CostModel for AnalyticCost {
    fn id(&self) -> &str {
        "analytic_v1"
    }

    fn rank_cost(&self, shards: &[ShardLoad<'_>], topology: &Topology, batch_size: u64) -> Result<RankCost> {
        let mut sum = RankCost::default();
        for load in shards {
            let cost = self.shard_cost(load, topology, batch_size)?;
            sum.compute_ms += cost.compute_ms;
            sum.communication_ms += cost.communication_ms;
        }
        Ok(sum)
    }
}

impl AnalyticCost {
    fn shard_cost(&self, load: &ShardLoad<'_>, topology: &Topology, batch_size: u64) -> Result<RankCost> {
        let table = load.table;
        if !matches!(load.sharding_type, ShardingType::TableWise | ShardingType::ColumnWise) {
            let (model, table) = (self.id().to_owned(), table.name.clone());
            return Err(Error::Unpriced { model, table, sharding_type: load.sharding_type.name() });
        }
        let columns = load.shard.column_count();
        let weight_bytes = table.dtype.bytes() as f64;
        let lists = batch_size as f64 * f64::from(topology.ranks) / table.dedupe_factor;
        let ids = lists * table.pooling_factor;
        let vectors = if table.pooling == Pooling::Attention { ids } else { lists };
        let input_bytes = ids * ID_BYTES;
        let lookup_bytes = ids * columns.max(MIN_BLOCK) as f64 * weight_bytes;
        let output_bytes = vectors * columns as f64 * weight_bytes;

        let moved = (input_bytes + lookup_bytes + output_bytes) * block_penalty(columns);
        let forward_ms = moved / topology.memory_bandwidth_bytes_per_second * MS_PER_SECOND;
        let exchange_ms = match topology.ranks {
            1 => 0.0,
            _ => output_bytes / topology.exchange_bandwidth_bytes_per_second() * MS_PER_SECOND,
        };
        Ok(RankCost {
            compute_ms: forward_ms * (1.0 + BACKWARD_MULTIPLIER),
            communication_ms: exchange_ms * 2.0,
        })
    }
}

fn block_penalty(columns: u64) -> f64 {
    if columns >= FULL_BLOCK {
        1.0
    } else if columns >= FULL_BLOCK / 2 {
        HALF_BLOCK_PENALTY
    } else {
        QUARTER_BLOCK_PENALTY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TorchRec's default topology: 897, 600 and 12.5 GiB per second.
    fn torchrec(ranks: u32) -> Topology {
        let gib = f64::from(1 << 30);
        Topology {
            memory_bandwidth_bytes_per_second: 897.0 * gib,
            intra_node_bandwidth_bytes_per_second: 600.0 * gib,
            inter_node_bandwidth_bytes_per_second: 12.5 * gib,
            ..Topology::h100(ranks, 32 << 30).unwrap()
        }
    }

    fn cost(table: &Table, topology: &Topology) -> RankCost {
        let shard = Shard::whole(table, 0);
        let load = ShardLoad { table, sharding_type: ShardingType::TableWise, shard: &shard };
        AnalyticCost.rank_cost(&[load], topology, 512).unwrap()
    }

    fn assert_close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() <= expected.abs() * 1e-12, "{actual} is not {expected}");
    }

    /// Figures of `test_1_table_perf` in TorchRec's `planner/tests/test_shard_estimators.py`, (`fused`,
    /// `table_wise`): 100 rows of dimension 10, two ranks, batch 512, pooling factor 1.
    #[test]
    fn torchrec_gets_the_same_cost_for_its_one_table_test() {
        let cost = cost(&Table::new("table_0", 100, 10), &torchrec(2));
        assert_close(cost.compute_ms, 0.000327460077428233 + 0.000654920154856466);
        assert_close(cost.communication_ms, 2.0 * 6.357828776041667e-05);
    }

    /// The total of `test_sequence_2_table_perf`, (`fused`, `table_wise`): dimension 32, one id unpooled.
    #[test]
    fn torchrec_gets_the_same_cost_for_its_sequence_test() {
        let table = Table { pooling: Pooling::Attention, ..Table::new("table_0", 128, 32) };
        assert_close(cost(&table, &torchrec(2)).total_ms(), 0.001880471390093715);
    }

    #[test]
    fn deduplication_divides_the_whole_cost() {
        let table = Table { pooling_factor: 20.0, ..Table::new("t", 1000, 64) };
        let deduplicated = Table { dedupe_factor: 4.0, ..table.clone() };
        let (plain, folded) = (cost(&table, &torchrec(4)), cost(&deduplicated, &torchrec(4)));
        assert_close(folded.compute_ms * 4.0, plain.compute_ms);
        assert_close(folded.communication_ms * 4.0, plain.communication_ms);
    }

    #[test]
    fn attention_sends_a_vector_per_id_and_sums_one_per_list() {
        let table = Table { pooling_factor: 50.0, ..Table::new("t", 1000, 64) };
        let attention = Table { pooling: Pooling::Attention, ..table.clone() };
        let (summed, attended) = (cost(&table, &torchrec(4)), cost(&attention, &torchrec(4)));
        assert_close(attended.communication_ms, 50.0 * summed.communication_ms);
    }

    #[test]
    fn one_rank_sends_nothing_and_machines_send_by_the_network() {
        let table = Table::new("t", 1000, 128);
        assert_eq!(cost(&table, &torchrec(1)).communication_ms, 0.0);
        let (one, two) = (cost(&table, &torchrec(8)), cost(&table, &torchrec(16)));
        assert_close(two.communication_ms, one.communication_ms * 2.0 * 600.0 / 12.5);
    }

    #[test]
    fn a_rank_costs_the_sum_of_its_shards_and_an_idle_one_nothing() {
        let table = Table::new("t", 1000, 128);
        let shard = Shard::whole(&table, 0);
        let load = ShardLoad { table: &table, sharding_type: ShardingType::TableWise, shard: &shard };
        let twice = AnalyticCost.rank_cost(&[load, load], &torchrec(2), 512).unwrap();
        assert_close(twice.total_ms(), 2.0 * cost(&table, &torchrec(2)).total_ms());
        assert_eq!(AnalyticCost.rank_cost(&[], &torchrec(2), 512).unwrap(), RankCost::default());
    }

    #[test]
    fn what_has_no_formula_is_refused() {
        let table = Table::new("t", 1000, 128);
        let shard = Shard::whole(&table, 0);
        let load = ShardLoad { table: &table, sharding_type: ShardingType::RowWise, shard: &shard };
        let error = AnalyticCost.rank_cost(&[load], &torchrec(2), 512).unwrap_err().to_string();
        assert!(
            error.starts_with("cost model `analytic_v1` has no formula for the row_wise table `t`\n  hint: "),
            "{error}"
        );
    }
}
