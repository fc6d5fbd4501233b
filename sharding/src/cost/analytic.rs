//! An analytic cost model, bytes moved ÷ bandwidth, by TorchRec's published formulas.

use crate::cost::{CostModel, LinkBytes, RankLoad, ShardLoad};
use crate::error::Result;
use crate::plan::ShardingType;
use crate::table::ID_BYTES;
use crate::topology::Topology;

/// The cost model `analytic_v2`: bytes moved ÷ bandwidth, with the formulas of TorchRec's planner
/// (`torchrec/distributed/planner/shard_estimators.py` and `constants.py`, commit a48cef7, October 2025).
///
/// For L ids per sample, B samples per rank, W ranks, a shard with d columns of e bytes each, memory bandwidth m and
/// exchange bandwidth x:
///
/// ```text
/// table_wise, column_wise
///   forward       = (8·L·B·W  +  L·B·W·max(d, 32)·e  +  B·W·d·4) · penalty(d) / m      ids, rows, output
///   backward      = 2 · forward
///   communication = 2 · B·W·d·4 / x                                         vectors out, gradients back
///   penalty(d)    = 1 for d ≥ 128, 1.15 for d ≥ 64, else 1.75: how much of a GPU's 128-wide block is idle
/// row_wise over n ranks
///   forward       = (8·L·B·W/n  +  L·B·W/n·d·e  +  B·W·d·4) / m
///   backward      = 2 · forward  +  2.455 · B·W·d·4 / m                     gradients are copied together
///   communication = 2 · B·W·d·4 / x
/// data_parallel
///   forward       = (8·L·B  +  L·B·d·e  +  B·d·4) / m
///   backward      = 2 · forward  +  9.22 · rows·d·e / m                     a dense update
///   communication = 2 · rows·d·4 · (W-1)/W / x                             an all-reduce on a ring
/// ```
///
/// The model differs from TorchRec's in six points:
///
/// - TorchRec's cost of an all-reduce is half of what a ring sends on one machine, the same on two machines, and
///   twice as much on more.
/// - Dedupe factors divide B in the terms for lists, and L·B in the terms for ids, because only distinct lists are
///   looked up and sent.
/// - If several features share a table, ids, looked-up rows and vectors are summed over the features. The dense
///   update of the table is counted once.
/// - A table that pools by attention sends one vector per id, L·B·W·d·4 bytes, as TorchRec's unpooled collection
///   does. The cost of the attention itself is not included.
/// - A row-wise table within one of several machines sends the bytes that [`ShardLoad::traffic`] describes.
/// - A single rank sends nothing.
///
/// The model ignores cache reuse, launch overhead and the waiting for the slowest rank, and adds up the costs of
/// tables.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnalyticCost;

/// The least number of weights that a read of a row transfers.
const MIN_BLOCK: u64 = 32;
/// The number of columns that fills a GPU block (32 threads × 4 weights).
const FULL_BLOCK: u64 = 128;
/// The slow-down of a shard that is narrower than a full block, as measured by TorchRec.
const HALF_BLOCK_PENALTY: f64 = 1.15;
/// The slow-down of a shard that is narrower than half a block, as measured by TorchRec.
const QUARTER_BLOCK_PENALTY: f64 = 1.75;
/// The time of the backward pass ÷ the time of the forward pass, as measured by TorchRec.
const BACKWARD_MULTIPLIER: f64 = 2.0;
/// The cost of copying the gradients of a row-wise table into one tensor, in passes over them, as measured by
/// TorchRec.
const BATCHED_COPY_FACTOR: f64 = 2.455;
/// The cost of the dense update of a data-parallel table, in passes over it, as measured by TorchRec.
const ELEMENTWISE_FACTOR: f64 = 9.22;
const MS_PER_SECOND: f64 = 1e3;

impl CostModel for AnalyticCost {
    fn id(&self) -> &str {
        "analytic_v2"
    }

    fn shard_ms(&self, load: &ShardLoad<'_>) -> Result<f64> {
        let work = load.work();
        let columns = load.shard.column_count();
        let weight_bytes = load.table.dtype.bytes() as f64;
        let output_bytes = work.vectors * columns as f64 * 4.0;
        let (read_columns, penalty, extra_bytes) = match load.sharding_type {
            ShardingType::TableWise | ShardingType::ColumnWise => {
                (columns.max(MIN_BLOCK), block_penalty(columns), 0.0)
            }
            ShardingType::RowWise => (columns, 1.0, BATCHED_COPY_FACTOR * output_bytes),
            ShardingType::DataParallel => {
                let table_bytes = load.table.rows as f64 * columns as f64 * weight_bytes;
                (columns, 1.0, ELEMENTWISE_FACTOR * table_bytes)
            }
        };
        let forward_bytes =
            (work.ids * ID_BYTES + work.ids * read_columns as f64 * weight_bytes + output_bytes) * penalty;
        let ms = |bytes: f64| bytes / load.topology.memory_bandwidth_of(load.shard.rank) * MS_PER_SECOND;
        Ok(ms(forward_bytes) * (1.0 + BACKWARD_MULTIPLIER) + ms(extra_bytes))
    }

    fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology, _: bool) -> Vec<f64> {
        let ms = |rank: &RankLoad| {
            link_ms(rank.traffic.forward, topology) + link_ms(rank.traffic.backward, topology)
        };
        ranks.iter().map(ms).collect()
    }
}

/// Returns bytes ÷ bandwidth in milliseconds. The two kinds of links are used one after the other.
pub(crate) fn link_ms(bytes: LinkBytes, topology: &Topology) -> f64 {
    let seconds = bytes.intra / topology.intra_node_bandwidth_bytes_per_second
        + bytes.inter / topology.inter_node_bandwidth_bytes_per_second;
    seconds * MS_PER_SECOND
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
    use crate::Pooling;
    use crate::cost::{RankCost, rank_costs};
    use crate::lookups::FeatureLookups;
    use crate::plan::Shard;
    use crate::search::searches;
    use crate::table::Table;

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

    fn placed(table: &Table, sharding_type: ShardingType, shard: Shard, topology: &Topology) -> RankCost {
        let within_node = topology.nodes() == 1 || sharding_type == ShardingType::TableWise;
        let whole = ShardLoad::table_wise(table, &shard, topology, 512);
        let load = ShardLoad { sharding_type, within_node, ..whole };
        rank_costs(&AnalyticCost, &[vec![load]], topology).unwrap()[0]
    }

    fn total_ms(cost: RankCost) -> f64 {
        cost.compute_ms + cost.communication_ms
    }

    fn cost(table: &Table, topology: &Topology) -> RankCost {
        placed(table, ShardingType::TableWise, Shard::whole(table, 0), topology)
    }

    fn assert_close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() <= expected.abs() * 1e-12, "{actual} is not {expected}");
    }

    /// The expected values are from `test_1_table_perf` in TorchRec's `planner/tests/test_shard_estimators.py`
    /// (`fused`, `table_wise`): 100 rows of dimension 10, two ranks, batch size 512, pooling factor 1.
    #[test]
    fn torchrec_gets_the_same_cost_for_its_one_table_test() {
        let cost = cost(&Table::new("table_0", 100, 10), &torchrec(2));
        assert_close(cost.compute_ms, 0.000327460077428233 + 0.000654920154856466);
        assert_close(cost.communication_ms, 2.0 * 6.357828776041667e-05);
    }

    /// The expected total is from `test_sequence_2_table_perf` (`fused`, `table_wise`): dimension 32, one id,
    /// unpooled.
    #[test]
    fn torchrec_gets_the_same_cost_for_its_sequence_test() {
        let table = Table {
            first: crate::Lookups { pooling: Pooling::Attention, ..crate::lookups::Lookups::default() },
            ..Table::new("table_0", 128, 32)
        };
        assert_close(total_ms(cost(&table, &torchrec(2))), 0.001880471390093715);
    }

    #[test]
    fn deduplication_divides_the_whole_cost() {
        let table = Table { first: crate::lookups::Lookups::of(20.0), ..Table::new("t", 1000, 64) };
        let deduplicated =
            Table { first: crate::Lookups { dedupe_factor: 4.0, ..table.first.clone() }, ..table.clone() };
        let (plain, folded) = (cost(&table, &torchrec(4)), cost(&deduplicated, &torchrec(4)));
        assert_close(folded.compute_ms * 4.0, plain.compute_ms);
        assert_close(folded.communication_ms * 4.0, plain.communication_ms);
    }

    #[test]
    fn attention_sends_a_vector_per_id_and_sums_one_per_list() {
        let table = Table { first: crate::lookups::Lookups::of(50.0), ..Table::new("t", 1000, 64) };
        let attention = Table {
            first: crate::Lookups { pooling: Pooling::Attention, ..table.first.clone() },
            ..table.clone()
        };
        let (summed, attended) = (cost(&table, &torchrec(4)), cost(&attention, &torchrec(4)));
        assert_close(attended.communication_ms, 50.0 * summed.communication_ms);
    }

    /// The lookups and traffic of two features add up; costs of the table itself count once.
    #[test]
    fn a_shared_table_costs_what_its_features_ask_for() {
        let history = Table {
            first: crate::Lookups {
                pooling: Pooling::Attention,
                pooling_factor: 20.0,
                ..crate::lookups::Lookups::default()
            },
            ..Table::new("history", 1000, 64)
        };
        let item = Table {
            first: crate::Lookups {
                pooling_factor: 1.0,
                dedupe_factor: 2.0,
                ..crate::lookups::Lookups::default()
            },
            ..Table::new("item", 1000, 64)
        };
        let mut shared = Table { name: "items".into(), feature: Some("history".into()), ..history.clone() };
        shared.further_features.push(FeatureLookups { feature: "item".into(), lookups: item.first.clone() });
        let topology = torchrec(4);
        let of = |table: &Table| cost(table, &topology);
        assert_close(of(&shared).compute_ms, of(&history).compute_ms + of(&item).compute_ms);
        assert_close(
            of(&shared).communication_ms,
            of(&history).communication_ms + of(&item).communication_ms,
        );
        let copied =
            |table: &Table| placed(table, ShardingType::DataParallel, Shard::whole(table, 0), &topology);
        assert_close(copied(&shared).communication_ms, copied(&item).communication_ms);
        assert!(copied(&shared).compute_ms < copied(&history).compute_ms + copied(&item).compute_ms);

        // Every search places the table exactly once.
        let tables = [shared, Table::new("city", 500, 64)];
        for search in searches(1) {
            let plan =
                search.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(512)).unwrap();
            plan.check(&tables, &topology, plan.global_batch_size).unwrap();
            let names: Vec<_> = plan.tables.iter().map(|table| table.name.as_str()).collect();
            assert_eq!(names, ["items", "city"]);
        }
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
        let topology = torchrec(2);
        let load = ShardLoad::table_wise(&table, &shard, &topology, 512);
        let costs = rank_costs(&AnalyticCost, &[vec![load, load], vec![]], &topology).unwrap();
        assert_close(total_ms(costs[0]), 2.0 * total_ms(cost(&table, &topology)));
        assert_eq!(costs[1], RankCost::default());
    }

    /// The expected values are computed by hand: 100 ids·(8 + 64·4) + 512·64·4 … with bandwidths of 1 GB/s.
    #[test]
    fn rows_and_copies_cost_what_the_formulas_say() {
        let topology = Topology {
            memory_bandwidth_bytes_per_second: 1e9,
            intra_node_bandwidth_bytes_per_second: 1e9,
            inter_node_bandwidth_bytes_per_second: 1e8,
            ..Topology::h100(4, 1 << 30).unwrap()
        };
        let table = Table { first: crate::lookups::Lookups::of(3.0), ..Table::new("t", 1000, 64) };
        let quarter = Shard { rank: 0, rows: 0..250, columns: 0..64 };
        let rows = placed(&table, ShardingType::RowWise, quarter.clone(), &topology);
        let (lists, ids) = (2048.0, 2048.0 * 3.0 / 4.0);
        let output = lists * 64.0 * 4.0;
        let forward: f64 = ids * 8.0 + ids * 64.0 * 4.0 + output;
        assert_close(rows.compute_ms, (3.0 * forward + 2.455 * output) / 1e6);
        assert_close(rows.communication_ms, 2.0 * output / 1e6);
        let copy = placed(&table, ShardingType::DataParallel, Shard::whole(&table, 0), &topology);
        let (ids, bytes) = (512.0 * 3.0, 1000.0 * 64.0 * 4.0);
        let forward: f64 = ids * 8.0 + ids * 64.0 * 4.0 + 512.0 * 64.0 * 4.0;
        assert_close(copy.compute_ms, (3.0 * forward + 9.22 * bytes) / 1e6);
        assert_close(copy.communication_ms, 2.0 * bytes * 0.75 / 1e6);

        // With two machines of two ranks, only half of the bytes use the network if the table is within one machine.
        let two = Topology { ranks_per_node: 2, ..topology };
        let half = Shard { rank: 0, rows: 0..500, columns: 0..64 };
        let whole = ShardLoad::table_wise(&table, &half, &two, 512);
        let load = ShardLoad { sharding_type: ShardingType::RowWise, ..whole };
        let inside = rank_costs(&AnalyticCost, &[vec![load]], &two).unwrap()[0];
        assert_close(inside.communication_ms, 2.0 * (output / 1e6 + output / 2.0 / 1e5));
        let across = placed(&table, ShardingType::RowWise, quarter, &two);
        assert_close(across.communication_ms, 2.0 * output / 1e5);
    }
}
