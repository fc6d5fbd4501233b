//! What a search is, and the baseline: whole tables by size.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::table::validate_tables;
use crate::{CostModel, Error, Plan, Result, Table, TablePlan, Topology};

/// Decides where tables stand. A search does no I/O, and the same input gives the same plan.
pub trait Search {
    /// The name that a plan keeps.
    fn id(&self) -> &str;

    /// A plan for `tables` on `topology`, with `batch_size` samples per rank and step.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for tables or a topology that cannot exist, [`Error::DoesNotFit`] if the search
    /// finds no rank for a table, and the cost model's errors.
    fn plan(
        &self,
        tables: &[Table],
        topology: &Topology,
        cost_model: &dyn CostModel,
        batch_size: u64,
    ) -> Result<Plan>;
}

/// `greedy_by_size`: the largest table first, each whole onto the rank with the least memory used.
///
/// Tables of one size keep their order, and of ranks with the same use the lowest is taken. This is
/// longest-processing-time-first scheduling (Graham 1969) over bytes. It asks for no cost: the cost model
/// only prices the result, so this is what a search that knows costs has to beat.
#[derive(Debug, Clone, Copy, Default)]
pub struct GreedyBySize;

impl Search for GreedyBySize {
    fn id(&self) -> &str {
        "greedy_by_size"
    }

    fn plan(
        &self,
        tables: &[Table],
        topology: &Topology,
        cost_model: &dyn CostModel,
        batch_size: u64,
    ) -> Result<Plan> {
        validate_tables(tables)?;
        topology.validate()?;
        let ranks = place(tables, topology)?;
        let placed =
            tables.iter().zip(ranks).map(|(table, rank)| TablePlan::table_wise(table, rank)).collect();
        Plan::predict(self.id(), tables, placed, topology, cost_model, batch_size)
    }
}

/// The rank of each table, in table order.
fn place(tables: &[Table], topology: &Topology) -> Result<Vec<u32>> {
    let mut largest_first = Vec::with_capacity(tables.len());
    for (i, table) in tables.iter().enumerate() {
        largest_first.push((Reverse(table.memory_bytes()?), i, table));
    }
    largest_first.sort_by_key(|(bytes, i, _)| (*bytes, *i));

    // The top is the rank with the least memory used, of equal ones the lowest.
    let mut emptiest: BinaryHeap<Reverse<(u64, u32)>> =
        (0..topology.ranks).map(|rank| Reverse((0, rank))).collect();
    let mut placed = Vec::with_capacity(tables.len());
    for (Reverse(needed), i, table) in largest_first {
        let Some(Reverse((used, rank))) = emptiest.pop() else { continue };
        let left = topology.memory_bytes.saturating_sub(used);
        if needed > left {
            return Err(Error::DoesNotFit {
                table: table.name.clone(),
                needed_bytes: needed,
                rank,
                left_bytes: left,
                capacity_bytes: topology.memory_bytes,
            });
        }
        emptiest.push(Reverse((used + needed, rank)));
        placed.push((i, rank));
    }
    placed.sort_unstable();
    Ok(placed.into_iter().map(|(_, rank)| rank).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::AnalyticCost;

    fn ranks(plan: &Plan) -> Vec<u32> {
        plan.tables.iter().map(|table| table.shards[0].rank).collect()
    }

    #[test]
    fn the_largest_goes_first_to_the_emptiest_rank() {
        let tables =
            [Table::new("a", 10, 4), Table::new("b", 40, 4), Table::new("c", 30, 4), Table::new("d", 10, 4)];
        let plan =
            GreedyBySize.plan(&tables, &Topology::h100(2, 1 << 20).unwrap(), &AnalyticCost, 8).unwrap();
        // b (800 B) → 0, c (600 B) → 1, a (200 B) → 1, d (200 B) → 0, the lower of two equal ranks.
        assert_eq!(ranks(&plan), [1, 0, 1, 0]);
        assert_eq!(plan.ranks[0].memory_bytes, 1000);
        assert_eq!(plan.ranks[1].memory_bytes, 800);
    }

    #[test]
    fn a_rank_can_be_filled_to_its_last_byte_and_no_further() {
        let tables = [Table::new("a", 10, 4), Table::new("b", 10, 4)];
        let fits = Topology::h100(1, 400).unwrap();
        assert!(GreedyBySize.plan(&tables, &fits, &AnalyticCost, 8).is_ok());
        let short = Topology::h100(1, 399).unwrap();
        assert_eq!(
            GreedyBySize.plan(&tables, &short, &AnalyticCost, 8).unwrap_err().to_string(),
            "table `b` fits on no rank: it needs 200 B, rank 0 has the most left with 199 B of 399 B, so 1 B are \
             missing\n  hint: add ranks or raise `memory_bytes` in the topology, or lower `rows` or `dim` of the tables"
        );
    }

    #[test]
    fn a_table_larger_than_a_rank_is_not_helped_by_more_ranks() {
        let topology = Topology::h100(8, 399).unwrap();
        let error = GreedyBySize
            .plan(&[Table::new("a", 20, 4)], &topology, &AnalyticCost, 8)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(
                "hint: it is larger than a whole rank and this search does not split tables; raise"
            ),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_exist_is_not_planned() {
        let topology = Topology::h100(2, 1 << 20).unwrap();
        assert!(GreedyBySize.plan(&[], &topology, &AnalyticCost, 8).is_err());
        let twice = [Table::new("a", 10, 4), Table::new("a", 10, 4)];
        assert!(GreedyBySize.plan(&twice, &topology, &AnalyticCost, 8).is_err());
        let nobody = Topology { ranks: 0, ..topology };
        assert!(GreedyBySize.plan(&twice[..1], &nobody, &AnalyticCost, 8).is_err());
    }

    /// A whole plan as it stands in the file. By hand, rank 0: 4 lists of 1 id, (4·8 + 4·128·4 + 4·128·4) bytes · 3 ÷
    /// 1e6 B/s = 12.384 ms, and 2 · 4·128·4 bytes to exchange = 4.096 ms; (128 + 1)·4 rows·4 bytes of memory.
    #[test]
    fn a_small_plan_looks_like_this() {
        let topology = Topology {
            memory_bandwidth_bytes_per_second: 1e6,
            intra_node_bandwidth_bytes_per_second: 1e6,
            inter_node_bandwidth_bytes_per_second: 1e6,
            ..Topology::h100(2, 4096).unwrap()
        };
        let history = Table { pooling_factor: 4.0, dedupe_factor: 2.0, ..Table::new("history", 10, 32) };
        let tables = [Table::new("user", 4, 128), history];
        let plan = GreedyBySize.plan(&tables, &topology, &AnalyticCost, 2).unwrap();
        let text = serde_json::to_string_pretty(&plan).unwrap();
        assert_eq!(text, include_str!("../tests/data/small_plan.json").trim_end());
    }

    fn table(i: usize) -> impl Strategy<Value = Table> {
        let dims = prop::sample::select(vec![4u64, 8, 16, 64, 128]);
        (1u64..2000, dims, 0.0..50.0f64, 1.0..20.0f64).prop_map(
            move |(rows, dim, pooling_factor, dedupe_factor)| Table {
                pooling_factor,
                dedupe_factor,
                ..Table::new(format!("table_{i}"), rows, dim)
            },
        )
    }

    fn problem() -> impl Strategy<Value = (Vec<Table>, Topology)> {
        let tables = (1usize..30).prop_flat_map(|count| (0..count).map(table).collect::<Vec<_>>());
        let topology =
            (1u32..9, 1u64..4_000_000).prop_map(|(ranks, memory)| Topology::h100(ranks, memory).unwrap());
        (tables, topology)
    }

    /// Where the tables stand by the definition: the next largest, the least used rank, by plain scans.
    fn by_definition(tables: &[Table], topology: &Topology) -> Option<Vec<u32>> {
        let mut order: Vec<usize> = (0..tables.len()).collect();
        order.sort_by_key(|i| Reverse(tables[*i].memory_bytes().unwrap()));
        let mut used = vec![0; topology.ranks as usize];
        let mut ranks = vec![0; tables.len()];
        for i in order {
            let bytes = tables[i].memory_bytes().unwrap();
            let fits = (0..used.len()).filter(|rank| used[*rank] + bytes <= topology.memory_bytes);
            let rank = fits.min_by_key(|rank| used[*rank])?;
            used[rank] += bytes;
            ranks[i] = rank as u32;
        }
        Some(ranks)
    }

    proptest! {
        /// Every plan passes the check, keeps the memory limit, is what the definition says, and is the same twice.
        #[test]
        fn plans_are_valid_and_keep_the_memory_limit((tables, topology) in problem()) {
            let expected = by_definition(&tables, &topology);
            match GreedyBySize.plan(&tables, &topology, &AnalyticCost, 64) {
                Ok(plan) => {
                    prop_assert!(plan.check(&tables, &topology).is_ok());
                    prop_assert!(plan.ranks.iter().all(|rank| rank.memory_bytes <= topology.memory_bytes));
                    prop_assert_eq!(Some(ranks(&plan)), expected);
                    prop_assert_eq!(GreedyBySize.plan(&tables, &topology, &AnalyticCost, 64).unwrap(), plan);
                }
                Err(Error::DoesNotFit { needed_bytes, left_bytes, .. }) => {
                    prop_assert!(needed_bytes > left_bytes);
                    prop_assert_eq!(expected, None);
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
        }

        /// A plan that lost, gained or moved anything no longer passes.
        #[test]
        fn mutated_plans_are_rejected((tables, topology) in problem(), kind in 0usize..8, pick in any::<prop::sample::Index>()) {
            let Ok(mut plan) = GreedyBySize.plan(&tables, &topology, &AnalyticCost, 64) else { return Ok(()) };
            let i = pick.index(plan.tables.len());
            match kind {
                0 => drop(plan.tables.remove(i)),
                1 => plan.tables.push(plan.tables[i].clone()),
                2 => plan.tables[i].shards.clear(),
                3 => plan.tables[i].shards[0].rows.end -= 1,
                4 => plan.tables[i].shards[0].columns.start += 1,
                5 => plan.tables[i].shards[0].rank += topology.ranks,
                6 => plan.tables[i].rows += 1,
                // Onto another rank, where the predicted memory no longer holds (or, with one rank, to none).
                _ => plan.tables[i].shards[0].rank = (plan.tables[i].shards[0].rank + 1) % topology.ranks.max(2),
            }
            prop_assert!(plan.check(&tables, &topology).is_err());
        }
    }
}
