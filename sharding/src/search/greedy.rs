//! The baselines: whole tables, placed by one property of the tables or at random.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cost::CostModel;
use crate::error::Result;
use crate::plan::{Plan, TablePlan};
use crate::search::Search;
use crate::search::problem::Problem;
use crate::table::Table;
use crate::topology::Topology;

/// A greedy baseline. It takes the tables in descending order of one property, and places each whole table on the
/// rank with the smallest sum of the property, among the ranks with enough memory. Ties go to the first table and
/// rank. This is longest-processing-time-first scheduling (Graham 1969).
///
/// The properties are those of the heuristics with which NeuroShard is compared. They do not use the cost model,
/// which only prices the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Greedy {
    /// Bytes, including the optimizer state.
    BySize,
    /// The dimension, which is proportional to the bytes sent.
    ByDimension,
    /// Dimension × pooling factor, which is proportional to the bytes read.
    ByLookups,
    /// Dimension × pooling factor × log10 of the number of rows.
    BySizeTimesLookups,
    /// No property: tables are placed in table order, each on a random rank with enough memory.
    Random {
        /// The seed of the random choice.
        seed: u64,
    },
}

impl Search for Greedy {
    fn id(&self) -> &'static str {
        match self {
            Self::BySize => "greedy_by_size",
            Self::ByDimension => "greedy_by_dimension",
            Self::ByLookups => "greedy_by_lookups",
            Self::BySizeTimesLookups => "greedy_by_size_times_lookups",
            Self::Random { .. } => "random",
        }
    }

    fn plan(
        &self,
        tables: &[Table],
        topology: &Topology,
        cost_model: &dyn CostModel,
        global_batch_size: u64,
    ) -> Result<Plan> {
        let batch_size = topology.samples_per_rank(global_batch_size);
        let ranks = self.place(&Problem::new(tables, topology, cost_model, batch_size)?)?;
        let placed =
            tables.iter().zip(ranks).map(|(table, rank)| TablePlan::table_wise(table, rank)).collect();
        Plan::predict(self.id(), tables, placed, topology, cost_model, global_batch_size)
    }
}

impl Greedy {
    fn figure(self, table: &Table) -> Result<f64> {
        let dim = table.dim as f64;
        let ids = || table.lookups().map(|lookups| lookups.pooling_factor).sum::<f64>();
        Ok(match self {
            Self::BySize => table.memory_bytes()? as f64,
            Self::ByDimension => dim,
            Self::ByLookups => dim * ids(),
            Self::BySizeTimesLookups => dim * ids() * (table.rows as f64).log10(),
            Self::Random { .. } => 0.0,
        })
    }

    /// Returns the rank of each table, in table order.
    pub(crate) fn place(self, problem: &Problem<'_>) -> Result<Vec<u32>> {
        let units = problem.whole_tables();
        let mut order = Vec::with_capacity(units.len());
        for (table, unit) in problem.tables.iter().zip(&units) {
            order.push((self.figure(table)?, unit));
        }
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.table.cmp(&b.1.table)));

        let mut random = match self {
            Self::Random { seed } => Some(ChaCha8Rng::seed_from_u64(seed)),
            _ => None,
        };
        // Every rank sends requests for every table.
        let capacity = problem.capacity(&units);
        if let Some(error) = problem.topology.cannot_ask(capacity.asking) {
            return Err(error);
        }
        let mut used = vec![0u64; problem.ranks];
        let mut sums = vec![0.0f64; problem.ranks];
        let mut placed = vec![0; units.len()];
        for (figure, unit) in order {
            let needed = problem.priced(unit).bytes;
            let has_room = |rank: &usize| used[*rank].saturating_add(needed) <= capacity.of(*rank);
            let fits: Vec<usize> = (0..problem.ranks).filter(has_room).collect();
            let chosen = match &mut random {
                Some(rng) if !fits.is_empty() => Some(fits[rng.random_range(0..fits.len())]),
                // `min_by` returns the first of equal ranks.
                _ => fits.into_iter().min_by(|a, b| sums[*a].total_cmp(&sums[*b])),
            };
            let rank = chosen.ok_or_else(|| problem.does_not_fit(unit, capacity, &used, false))?;
            used[rank] += needed;
            sums[rank] += figure;
            placed[unit.table] = rank as u32;
        }
        Ok(placed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::cmp::Reverse;

    use super::*;
    use crate::buffers::BufferBytes;
    use crate::cost::ShardLoad;
    use crate::cost::analytic::AnalyticCost;
    use crate::error::Error;
    use crate::plan::Shard;

    fn ranks(plan: &Plan) -> Vec<u32> {
        plan.tables.iter().map(|table| table.shards[0].rank).collect()
    }

    #[test]
    fn the_largest_goes_first_to_the_emptiest_rank() {
        let tables =
            [Table::new("a", 10, 4), Table::new("b", 40, 4), Table::new("c", 30, 4), Table::new("d", 10, 4)];
        let plan =
            Greedy::BySize.plan(&tables, &Topology::h100(2, 1 << 20).unwrap(), &AnalyticCost, 16).unwrap();
        // b (800 B) → 0, c (600 B) → 1, a (200 B) → 1, d (200 B) → 0, which is the lower of two equal ranks.
        assert_eq!(ranks(&plan), [1, 0, 1, 0]);
        assert_eq!(plan.ranks[0].memory_bytes, 1000);
        assert_eq!(plan.ranks[1].memory_bytes, 800);
    }

    #[test]
    fn a_rank_can_be_filled_to_its_last_byte_and_no_further() {
        let tables = [Table::new("a", 10, 4), Table::new("b", 10, 4)];
        let fits = Topology::h100(1, 400).unwrap();
        assert!(Greedy::BySize.plan(&tables, &fits, &AnalyticCost, fits.global_batch_size(8)).is_ok());
        let short = Topology::h100(1, 399).unwrap();
        assert_eq!(
            Greedy::BySize
                .plan(&tables, &short, &AnalyticCost, short.global_batch_size(8))
                .unwrap_err()
                .to_string(),
            "table `b` fits on no rank: it needs 200 B, rank 0 has the most left with 199 B of 399 B, so 1 B are \
             missing\n  hint: add ranks or raise `memory_bytes` in the topology, or lower `rows` or `dim` of the tables"
        );
    }

    #[test]
    fn a_table_larger_than_a_rank_is_not_helped_by_more_ranks() {
        let topology = Topology::h100(8, 399).unwrap();
        let error = Greedy::BySize
            .plan(&[Table::new("a", 20, 4)], &topology, &AnalyticCost, topology.global_batch_size(8))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(
                "hint: it is larger than a whole rank and this search does not split tables; plan with the option `search = beam`"
            ),
            "{error}"
        );
    }

    #[test]
    fn invalid_tables_and_topologies_are_refused() {
        let topology = Topology::h100(2, 1 << 20).unwrap();
        assert!(Greedy::BySize.plan(&[], &topology, &AnalyticCost, topology.global_batch_size(8)).is_err());
        let twice = [Table::new("a", 10, 4), Table::new("a", 10, 4)];
        assert!(
            Greedy::BySize.plan(&twice, &topology, &AnalyticCost, topology.global_batch_size(8)).is_err()
        );
        let nobody = Topology { ranks: 0, ..topology };
        assert!(
            Greedy::BySize.plan(&twice[..1], &nobody, &AnalyticCost, nobody.global_batch_size(8)).is_err()
        );
    }

    /// Compares a complete plan with its file. Values of rank 0 by hand: 4 lists of 1 id, (4·8 + 4·128·4 + 4·128·4)
    /// bytes · 3 ÷ 1e6 B/s = 12.384 ms of computation, and 2 · 4·128·4 bytes of exchange = 4.096 ms; (128 +
    /// 1)·4 rows·4 bytes of memory. The buffers take 2·8·2 + 2·2·128·4 bytes for `user`, which one rank requests from
    /// the other, and (1 + 4)·8 + 2·32·4 bytes for `history`.
    #[test]
    fn a_small_plan_has_the_expected_placement() {
        let topology = Topology {
            memory_bandwidth_bytes_per_second: 1e6,
            intra_node_bandwidth_bytes_per_second: 1e6,
            inter_node_bandwidth_bytes_per_second: 1e6,
            ..Topology::h100(2, 16_384).unwrap()
        };
        let history = Table {
            first: crate::Lookups {
                pooling_factor: 4.0,
                dedupe_factor: 2.0,
                ..crate::lookups::Lookups::default()
            },
            ..Table::new("history", 10, 32)
        };
        let tables = [Table::new("user", 4, 128), history];
        let plan =
            Greedy::BySize.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(2)).unwrap();
        let text = serde_json::to_string_pretty(&plan).unwrap();
        assert_eq!(text, include_str!("../../tests/data/small_plan.json").trim_end());
    }

    fn table(i: usize) -> impl Strategy<Value = Table> {
        let dims = prop::sample::select(vec![4u64, 8, 16, 64, 128]);
        (1u64..2000, dims, 0.0..50.0f64, 1.0..20.0f64).prop_map(
            move |(rows, dim, pooling_factor, dedupe_factor)| Table {
                first: crate::Lookups { pooling_factor, dedupe_factor, ..crate::lookups::Lookups::default() },
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

    /// Returns the ranks of the tables by the definition, with plain scans: the next largest table goes to the least
    /// used rank.
    fn by_definition(tables: &[Table], topology: &Topology) -> Option<Vec<u32>> {
        let mut order: Vec<usize> = (0..tables.len()).collect();
        order.sort_by_key(|i| Reverse(tables[*i].memory_bytes().unwrap()));
        let buffers = |table: &Table| -> BufferBytes {
            ShardLoad::table_wise(table, &Shard::whole(table, 0), topology, 64).reserved_buffers()
        };
        let asking: u64 = tables.iter().map(|table| buffers(table).asking).sum();
        let mut used = vec![asking; topology.ranks as usize];
        let mut sizes = vec![0; used.len()];
        let mut ranks = vec![0; tables.len()];
        for i in order {
            let size = tables[i].memory_bytes().unwrap();
            let bytes = size + buffers(&tables[i]).serving;
            let fits = (0..used.len()).filter(|rank| used[*rank] + bytes <= topology.memory_bytes);
            let rank = fits.min_by_key(|rank| sizes[*rank])?;
            used[rank] += bytes;
            sizes[rank] += size;
            ranks[i] = rank as u32;
        }
        Some(ranks)
    }

    proptest! {
        /// Every plan passes the check, keeps the memory limit, follows the definition, and is the same in a second
        /// run.
        #[test]
        fn plans_are_valid_and_keep_the_memory_limit((tables, topology) in problem()) {
            let expected = by_definition(&tables, &topology);
            match Greedy::BySize.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(64)) {
                Ok(plan) => {
                    prop_assert!(plan.check(&tables, &topology, plan.global_batch_size).is_ok());
                    prop_assert!(plan.ranks.iter().all(|rank| rank.total_bytes() <= topology.memory_bytes));
                    prop_assert_eq!(Some(ranks(&plan)), expected);
                    prop_assert_eq!(Greedy::BySize.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(64)).unwrap(), plan);
                }
                Err(Error::NoRoom(fault)) => {
                    prop_assert!(fault.message.to_string().contains("` fits on no rank: "), "{fault}");
                    prop_assert_eq!(expected, None);
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
        }

        /// A plan from which something is removed, or to which something is added, or in which something is moved, is
        /// rejected.
        #[test]
        fn mutated_plans_are_rejected((tables, topology) in problem(), kind in 0usize..8, pick in any::<prop::sample::Index>()) {
            let Ok(mut plan) = Greedy::BySize.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(64)) else { return Ok(()) };
            let i = pick.index(plan.tables.len());
            match kind {
                0 => drop(plan.tables.remove(i)),
                1 => plan.tables.push(plan.tables[i].clone()),
                2 => plan.tables[i].shards.clear(),
                3 => plan.tables[i].shards[0].rows.end -= 1,
                4 => plan.tables[i].shards[0].columns.start += 1,
                5 => plan.tables[i].shards[0].rank += topology.ranks,
                6 => plan.tables[i].rows += 1,
                // The shard moves to another rank, whose predicted memory is then wrong (or, with one rank, to a rank
                // that does not exist).
                _ => plan.tables[i].shards[0].rank = (plan.tables[i].shards[0].rank + 1) % topology.ranks.max(2),
            }
            prop_assert!(plan.check(&tables, &topology, plan.global_batch_size).is_err());
        }
    }
}
