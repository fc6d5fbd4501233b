//! Replanning of a running job: a cheaper plan that moves few bytes from the old one.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;

use onefold_base::units::{format_bytes, format_least_bytes};

use crate::cost::CostModel;
use crate::diff::moved;
use crate::error::{Error, Result};
use crate::plan::{Plan, ShardingType, TablePlan, row_shards};
use crate::search::beam::Beam;
use crate::search::explain::explained;
use crate::search::local::{Order, cheapest_with, improve_forms};
use crate::search::placement::{Placement, Ranks};
use crate::search::problem::{Kind, Placed, Problem, Unit, units_of};
use crate::table::Table;
use crate::topology::Topology;

/// A plan from scratch must be cheaper by this factor than one that starts at the old plan, because it moves more.
const WORTH_MOVING: f64 = 0.995;

/// A plan that replaces an old one.
#[derive(Debug, Clone, PartialEq)]
pub struct Replanned {
    /// The new plan.
    pub plan: Plan,
    /// The cost of the most expensive rank if only the required moves are made, in milliseconds per step.
    pub kept_cost_ms: f64,
    /// Bytes of weights and optimizer state that a rank holds in the new plan but not in the old one.
    pub moved_bytes: u64,
    /// The part of `moved_bytes` that is required, because a rank no longer exists or no longer has enough memory.
    pub required_bytes: u64,
}

/// Plans `tables` on `topology`, for steps of `global_batch_size` samples over all ranks, by a local search that
/// starts at `before`. The new plan moves at most `budget_bytes` of weights and optimizer state between ranks. New
/// tables, and rows that a table has gained, do not count as moved.
///
/// Required moves are made first: shards on ranks that no longer exist, rows over another number of ranks, and shards
/// that do not fit on their ranks. Then shards of the busiest rank move to other ranks, change places or are halved,
/// and tables change between whole, divided and copied, as long as that makes the plan cheaper. The search runs
/// twice, once ordered by the improvement of a change and once by its improvement per moved byte, and the cheaper
/// plan is used. The plan of [`Beam::Full`] replaces it if the budget allows that and it is cheaper by half a
/// percent, or if tables do not fit beside those that stay.
///
/// # Errors
///
/// [`Error::Invalid`] if the required moves exceed the budget, if no plan fits, and for invalid tables or an invalid
/// topology; errors of the cost model.
pub fn replan(
    before: &Plan,
    tables: &[Table],
    topology: &Topology,
    cost_model: &dyn CostModel,
    global_batch_size: u64,
    budget_bytes: u64,
) -> Result<Replanned> {
    let problem = Problem::new(tables, topology, cost_model, topology.samples_per_rank(global_batch_size))?;
    let old: HashMap<&str, &TablePlan> =
        before.tables.iter().map(|table| (table.name.as_str(), table)).collect();
    let counted = RefCell::new(vec![Counted::default(); tables.len()]);
    let search = Replan { problem: &problem, old, counted };
    let allowed = |placed: &[Placed]| search.moved_bytes(placed).is_ok_and(|moved| moved <= budget_bytes);
    let predict = |placement: &Placement| placement.plan(&problem, "replan", global_batch_size);
    // Returns the bytes that must move for a placement, if the budget allows that.
    let required = |placed: &[Placed]| match search.moved_bytes(placed)? {
        bytes if bytes <= budget_bytes => Ok(bytes),
        bytes => Err(over_budget(bytes, budget_bytes)),
    };
    let start = match search.start() {
        Ok(start) => start,
        // Tables that need not move have to make room.
        Err(error) => {
            let (plan, placement) = Beam::Full.cheapest(&problem, predict).map_err(|_| error)?;
            let moved_bytes = required(&placement.placed)?;
            let kept_cost_ms = plan.max_cost_ms;
            let plan = explained(&problem, &placement, plan);
            return Ok(Replanned { plan, kept_cost_ms, moved_bytes, required_bytes: moved_bytes });
        }
    };
    let required_bytes = required(&start.placed)?;
    let (mut plan, mut best) = (predict(&start)?, start.clone());
    let kept_cost_ms = plan.max_cost_ms;
    for order in [Order::ByCost, Order::ByCostPerByte] {
        let found = improve_forms(&problem, start.clone(), order, &allowed);
        let of_found = predict(&found)?;
        if of_found.max_cost_ms < plan.max_cost_ms {
            (plan, best) = (of_found, found);
        }
    }
    if let Ok(fresh) = Beam::Full.cheapest(&problem, predict)
        && fresh.0.max_cost_ms < WORTH_MOVING * plan.max_cost_ms
        && allowed(&fresh.1.placed)
    {
        (plan, best) = fresh;
    }
    let moved_bytes = search.moved_bytes(&best.placed)?;
    let plan = explained(&problem, &best, plan);
    Ok(Replanned { plan, kept_cost_ms, moved_bytes, required_bytes })
}

fn over_budget(required_bytes: u64, budget_bytes: u64) -> Error {
    let (needed, budget) = (format_bytes(required_bytes), format_bytes(budget_bytes));
    Error::invalid(
        format!(
            "{needed} must move to other ranks, as ranks or tables are not those of the old plan, and the budget is {budget}"
        ),
        // The text is never less than what is needed.
        format!(
            "raise the budget to {} or more, or make a new plan with `onefold-shard plan`",
            format_least_bytes(required_bytes)
        ),
    )
}

struct Replan<'a> {
    problem: &'a Problem<'a>,
    /// The old plan of each table, by table name.
    old: HashMap<&'a str, &'a TablePlan>,
    /// The moved bytes of each table, cached.
    counted: RefCell<Vec<Counted>>,
}

impl Replan<'_> {
    /// Returns the old plan with the required changes.
    fn start(&self) -> Result<Placement> {
        let problem = self.problem;
        let (mut placed, mut waiting, mut homeless) = (Vec::new(), Vec::new(), Vec::new());
        for (number, table) in problem.tables.iter().enumerate() {
            let standing = self.old.get(table.name.as_str()).and_then(|old| self.standing(number, old));
            let Some(standing) = standing else {
                waiting.push(number);
                continue;
            };
            for (unit, place) in standing {
                if (place as usize) < problem.ranks {
                    placed.push((unit, place));
                } else {
                    homeless.push(unit);
                }
            }
        }
        self.make_room(&mut placed)?;
        homeless.sort_by_key(|unit| Reverse(problem.priced(unit).bytes));
        for unit in homeless {
            if waiting.contains(&unit.table) {
                continue;
            }
            match cheapest_with(problem, &[unit], &placed, f64::INFINITY, &|_| true) {
                Some(with) => placed = with.placed,
                None => {
                    // If one of its shards fits nowhere, the whole table is placed again.
                    placed.retain(|(other, _): &Placed| other.table != unit.table);
                    waiting.push(unit.table);
                }
            }
        }
        waiting.sort_by_key(|table| Reverse(problem.priced(&problem.whole(*table)).bytes));
        for table in waiting {
            let forms: Vec<Unit> =
                std::iter::once(problem.whole(table)).chain(problem.forms(table)).collect();
            let with = cheapest_with(problem, &forms, &placed, f64::INFINITY, &|_| true);
            placed = with.ok_or_else(|| self.no_room(table))?.placed;
        }
        self.make_room(&mut placed)?;
        Ok(Placement::new(problem, placed))
    }

    /// Returns the units of a table with their ranks in the old plan, some of which may no longer exist. Returns
    /// `None` if the table cannot keep its shards.
    fn standing(&self, number: usize, old: &TablePlan) -> Option<Vec<Placed>> {
        let (problem, table) = (self.problem, &self.problem.tables[number]);
        if old.dim != table.dim {
            return None;
        }
        let form = |kind| problem.form(number, kind);
        let known = |unit: Unit, place| problem.get(&unit).is_some().then_some((unit, place));
        match old.sharding_type {
            ShardingType::TableWise | ShardingType::ColumnWise => {
                let of = |shard: &crate::plan::Shard| {
                    let (start, columns) = (shard.columns.start, shard.column_count());
                    known(Unit { start, columns, ..problem.whole(number) }, shard.rank)
                };
                old.shards.iter().map(of).collect()
            }
            ShardingType::DataParallel => {
                let is_everywhere = old.shards.len() == problem.ranks;
                is_everywhere.then(|| known(form(Kind::Copies), 0))?.map(|one| vec![one])
            }
            ShardingType::RowWise => {
                let kinds = [Kind::RowsOfAll, Kind::RowsOfNode];
                let ways = kinds.into_iter().flat_map(|kind| {
                    let unit = form(kind);
                    (0..problem.places(&unit)).map(move |place| (unit, place))
                });
                let ranks = |shards: &[crate::plan::Shard]| {
                    let mut ranks: Vec<u32> = shards.iter().map(|shard| shard.rank).collect();
                    ranks.sort_unstable();
                    ranks
                };
                let same = |(unit, place): &(Unit, u32)| {
                    problem.get(unit).is_some()
                        && ranks(&row_shards(table, problem.ranks_of(unit, *place))) == ranks(&old.shards)
                };
                ways.into_iter().find(same).map(|one| vec![one])
            }
        }
    }

    /// Moves column shards from ranks that exceed their memory to the ranks with the most free memory.
    fn make_room(&self, placed: &mut [Placed]) -> Result<()> {
        let problem = self.problem;
        for _ in 0..=placed.len() {
            let ranks = Ranks::of(problem, placed);
            let capacity = problem.capacity(units_of(placed));
            let Some(full) = capacity.exceeded(&ranks.bytes) else {
                return Ok(());
            };
            let excess = ranks.bytes[full] - capacity.of(full);
            let bytes = |i: &usize| problem.priced(&placed[*i].0).bytes;
            let mut movable: Vec<usize> = (0..placed.len())
                .filter(|i| placed[*i].0.kind == Kind::Columns && placed[*i].1 as usize == full)
                .collect();
            // The smallest shard that is large enough comes first, then the largest of the others.
            movable.sort_by_key(|i| {
                (bytes(i) < excess, if bytes(i) < excess { u64::MAX - bytes(i) } else { bytes(i) })
            });
            let to = |i: usize| {
                let free = |rank: &usize| {
                    let shares =
                        |(unit, place): &Placed| unit.table == placed[i].0.table && *place as usize == *rank;
                    *rank != full && !placed.iter().any(shares)
                };
                let left = |rank: &usize| Reverse(problem.left(*rank, ranks.bytes[*rank]));
                let emptiest = (0..problem.ranks).filter(free).min_by_key(left)?;
                (ranks.bytes[emptiest].saturating_add(bytes(&i)) <= capacity.of(emptiest))
                    .then_some((i, emptiest as u32))
            };
            let Some((i, rank)) = movable.iter().find_map(|i| to(*i)) else {
                let is_on_full = |i: &usize| problem.ranks_of(&placed[*i].0, placed[*i].1).contains(&full);
                let largest = (0..placed.len()).filter(is_on_full).max_by_key(bytes);
                return Err(self.no_room(largest.map_or(0, |i| placed[i].0.table)));
            };
            placed[i].1 = rank;
        }
        Err(self.no_room(placed.first().map_or(0, |(unit, _)| unit.table)))
    }

    fn no_room(&self, table: usize) -> Error {
        Error::invalid(
            format!(
                "table `{}` does not fit beside the tables that do not move",
                self.problem.tables[table].name
            ),
            "make a new plan with `onefold-shard plan`, or raise `memory_bytes` in the topology",
        )
    }

    /// Returns the bytes of weights and optimizer state that a rank has in a placement but not in the old plan.
    fn moved_bytes(&self, placed: &[Placed]) -> Result<u64> {
        let mut counted = self.counted.borrow_mut();
        let mut sum = 0u64;
        for (table, placed) in self.problem.by_table(placed).into_iter().enumerate() {
            // Usually only one or two of thousands of tables have moved since the last call.
            if counted[table].placed != placed {
                let bytes = self.moved_of(table, &placed)?;
                counted[table] = Counted { placed, bytes };
            }
            sum = sum.saturating_add(counted[table].bytes);
        }
        Ok(sum)
    }

    /// Returns the moved bytes of one table, whose units are at these places.
    fn moved_of(&self, table: usize, placed: &[Placed]) -> Result<u64> {
        let table = &self.problem.tables[table];
        let Some(old) = self.old.get(table.name.as_str()).filter(|old| old.dim == table.dim) else {
            return Ok(0);
        };
        let mut plan = self.problem.table_plan(table, placed);
        for shard in &mut plan.shards {
            // Rows that the old plan does not have are new and do not count.
            shard.rows = shard.rows.start.min(old.rows)..shard.rows.end.min(old.rows);
        }
        let elements = moved(Some(old), &plan);
        let row_bytes = table.shard_bytes(1, table.dim)?;
        let bytes = elements * u128::from(row_bytes) / u128::from(table.dim);
        Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// The moved bytes of a table, for the placement of the last call.
#[derive(Debug, Clone, Default)]
struct Counted {
    placed: Vec<Placed>,
    bytes: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::cost::model_file::ModelFile;
    use crate::cost::several::LearnedCosts;
    use crate::search::Search;
    use crate::search::greedy::Greedy;

    fn table(i: usize) -> impl Strategy<Value = Table> {
        let dims = prop::sample::select(vec![4u64, 8, 16, 64]);
        (1u64..2000, dims, 0.1..50.0f64).prop_map(move |(rows, dim, pooling_factor)| Table {
            first: crate::lookups::Lookups::of(pooling_factor),
            ..Table::new(format!("table_{i}"), rows, dim)
        })
    }

    /// Returns the sharding type and the shards of every table.
    fn shards(plan: &Plan) -> Vec<(ShardingType, Vec<crate::plan::Shard>)> {
        plan.tables.iter().map(|table| (table.sharding_type, table.shards.clone())).collect()
    }

    proptest! {
        #![proptest_config(onefold_property::cases(64))]
        /// A new plan is valid, costs at most as much as another new plan if all bytes may move, never costs more
        /// than the old one, moves the stated bytes, and keeps the budget.
        #[test]
        fn budgets_are_kept(
            tables in (2usize..12).prop_flat_map(|count| (0..count).map(table).collect::<Vec<_>>()),
            ranks in 2u32..6, share in 0.0..1.2f64,
        ) {
            let topology = Topology::h100(ranks, 1 << 30).unwrap();
            let before = Greedy::Random { seed: 3 }.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(256)).unwrap();
            let all: u64 = tables.iter().map(|table| table.memory_bytes().unwrap()).sum();
            let budget = (all as f64 * share) as u64;
            let found = replan(&before, &tables, &topology, &AnalyticCost, topology.global_batch_size(256), budget).unwrap();
            found.plan.check(&tables, &topology, found.plan.global_batch_size).unwrap();
            prop_assert!(found.moved_bytes <= budget && found.required_bytes == 0);
            prop_assert!((found.kept_cost_ms / before.max_cost_ms - 1.0).abs() < 1e-9);
            prop_assert!(found.plan.max_cost_ms <= before.max_cost_ms * (1.0 + 1e-9));
            let moved: u64 = tables.iter().zip(&before.tables).zip(&found.plan.tables)
                .map(|((table, old), new)| {
                    let row = u128::from(table.shard_bytes(1, table.dim).unwrap());
                    (moved(Some(old), new) * row / u128::from(table.dim)) as u64
                })
                .sum();
            prop_assert_eq!(moved, found.moved_bytes);
            if budget == 0 {
                prop_assert_eq!(shards(&found.plan), shards(&before));
            }
            let free = replan(&before, &tables, &topology, &AnalyticCost, topology.global_batch_size(256), u64::MAX);
            let new = Beam::Full.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(256)).unwrap();
            prop_assert!(free.unwrap().plan.max_cost_ms <= 1.01 * new.max_cost_ms);
        }
    }

    fn tables() -> Vec<Table> {
        (0..8)
            .map(|i| Table {
                first: crate::lookups::Lookups::of(10.0),
                ..Table::new(format!("t{i}"), 10_000, 64)
            })
            .collect()
    }

    #[test]
    fn a_plan_with_all_on_one_rank_is_spread_as_far_as_the_budget_goes() {
        let (tables, topology) = (tables(), Topology::h100(4, 1 << 30).unwrap());
        let placed = tables.iter().map(|table| TablePlan::table_wise(table, 0)).collect();
        let before =
            Plan::predict("test", &tables, placed, &topology, &AnalyticCost, topology.global_batch_size(512))
                .unwrap();
        let one = tables[0].memory_bytes().unwrap();
        let cost = |budget| {
            let found =
                replan(&before, &tables, &topology, &AnalyticCost, topology.global_batch_size(512), budget)
                    .unwrap();
            assert!(found.moved_bytes <= budget, "{found:?}");
            found.plan.max_cost_ms
        };
        let costs = [0, one, 3 * one, 5 * one, 100 * one].map(cost);
        assert!(costs.windows(2).all(|pair| pair[1] < pair[0]), "{costs:?}");
        let new =
            Beam::Full.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(512)).unwrap();
        assert!(costs[4] <= 1.05 * new.max_cost_ms, "{costs:?} {}", new.max_cost_ms);
    }

    /// An idle rank waits for the rank that has all tables, and must not be considered as busy as that rank.
    #[test]
    fn ranks_that_wait_for_others_are_given_tables() {
        let tables: Vec<Table> = (0..40)
            .map(|i| Table {
                first: crate::lookups::Lookups::of(f64::from(1 + i % 7)),
                ..Table::new(format!("t{i}"), 10_000, 16)
            })
            .collect();
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let model = LearnedCosts::new(vec![ModelFile::shipped("cpu").unwrap()], &topology, true).unwrap();
        let new = Beam::Full.plan(&tables, &topology, &model, topology.global_batch_size(4096)).unwrap();
        let placed = tables.iter().map(|table| TablePlan::table_wise(table, 0)).collect();
        let before =
            Plan::predict("test", &tables, placed, &topology, &model, topology.global_batch_size(4096))
                .unwrap();
        assert!(before.max_cost_ms > 1.9 * new.max_cost_ms, "{} {}", before.max_cost_ms, new.max_cost_ms);
        let found =
            replan(&before, &tables, &topology, &model, topology.global_batch_size(4096), u64::MAX).unwrap();
        let cost_ms = found.plan.max_cost_ms;
        assert!(cost_ms <= 1.05 * new.max_cost_ms, "{cost_ms} {}", new.max_cost_ms);
    }

    /// Column shards that are not in the order of their ranks move one by one.
    #[test]
    fn a_column_shard_that_moves_takes_no_other_with_it() {
        let table = Table { first: crate::lookups::Lookups::of(10.0), ..Table::new("t", 10_000, 64) };
        let topology = Topology::h100(5, 1 << 30).unwrap();
        let batch = topology.global_batch_size(512);
        let of = |ranks: [u32; 4]| {
            let shard = |(number, rank): (u64, u32)| crate::Shard {
                rank,
                rows: 0..table.rows,
                columns: 16 * number..16 * (number + 1),
            };
            let shards = (0..).zip(ranks).map(shard).collect();
            let placed = TablePlan::new(&table, ShardingType::ColumnWise, shards);
            let tables = std::slice::from_ref(&table);
            Plan::predict("test", tables, vec![placed], &topology, &AnalyticCost, batch).unwrap()
        };
        let tables = [table.clone()];
        let found = replan(&of([2, 1, 0, 3]), &tables, &topology, &AnalyticCost, batch, 0).unwrap();
        assert_eq!((found.required_bytes, found.moved_bytes), (0, 0));
        // The rank of the first shard no longer exists, so at least a quarter of the table moves.
        let fewer = Topology::h100(4, 1 << 30).unwrap();
        let four = replan(&of([4, 1, 0, 3]), &tables, &fewer, &AnalyticCost, batch, 1 << 30).unwrap();
        let quarter = table.memory_bytes().unwrap() / 4;
        assert_eq!(four.required_bytes, quarter);
    }

    /// New tables are placed by costs that are not affected by previous tries.
    #[test]
    fn new_tables_are_spread_over_all_ranks() {
        let topology = Topology::h100(16, 1 << 30).unwrap();
        let model = LearnedCosts::new(vec![ModelFile::shipped("cpu").unwrap()], &topology, true).unwrap();
        let batch = topology.global_batch_size(4096);
        let table =
            |i| Table { first: crate::lookups::Lookups::of(5.0), ..Table::new(format!("t{i}"), 50_000, 16) };
        let mut tables: Vec<Table> = (0..32).map(table).collect();
        let before = Beam::Full.plan(&tables, &topology, &model, batch).unwrap();
        tables.extend((32..64).map(table));
        let found = replan(&before, &tables, &topology, &model, batch, 0).unwrap();
        let on_upper_half = |plan: &Plan| {
            let new = plan.tables[32..].iter().flat_map(|table| &table.shards);
            new.filter(|shard| shard.rank >= 8).count()
        };
        assert!(on_upper_half(&found.plan) >= 8, "{:?}", shards(&found.plan));
    }

    /// A plan that fits is found although a table that could be copied before has no room for its copies.
    #[test]
    fn tables_that_do_not_fit_beside_the_others_are_planned_anew() {
        let tables = |rows| {
            [
                Table { first: crate::lookups::Lookups::of(1.0), ..Table::new("t", rows, 64) },
                Table::new("u", 9, 4),
            ]
        };
        let [before, after] = [10_000, 30_000].map(tables);
        let topology = Topology::h100(2, 6_000_000).unwrap();
        let batch = topology.global_batch_size(64);
        let copies = |table: &Table| {
            let shard = |rank| crate::Shard { rank, rows: 0..table.rows, columns: 0..table.dim };
            TablePlan::new(table, ShardingType::DataParallel, (0..2).map(shard).collect())
        };
        let placed = before.iter().map(copies).collect();
        let before = Plan::predict("test", &before, placed, &topology, &AnalyticCost, batch).unwrap();
        let found = replan(&before, &after, &topology, &AnalyticCost, batch, u64::MAX).unwrap();
        found.plan.check(&after, &topology, batch).unwrap();
        assert_eq!(found.moved_bytes, found.required_bytes);
        // Nothing fits into less than a half.
        let small = Topology::h100(2, 3_000_000).unwrap();
        let error = replan(&before, &after, &small, &AnalyticCost, batch, u64::MAX).unwrap_err().to_string();
        assert!(error.contains("table `t` does not fit beside the tables that do not move"), "{error}");
    }

    #[test]
    fn ranks_that_are_gone_and_tables_that_grew_must_move() {
        let (mut tables, topology) = (tables(), Topology::h100(4, 1 << 30).unwrap());
        let before =
            Greedy::BySize.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(512)).unwrap();
        let fewer = Topology::h100(3, 1 << 30).unwrap();
        let on_last = 2 * tables[0].memory_bytes().unwrap();
        let error = replan(&before, &tables, &fewer, &AnalyticCost, fewer.global_batch_size(512), 1000)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("5.0 MiB must move to other ranks"), "{error}");
        assert!(error.contains("raise the budget to 5079KiB or more"), "{error}");
        let found =
            replan(&before, &tables, &fewer, &AnalyticCost, fewer.global_batch_size(512), on_last).unwrap();
        assert_eq!((found.required_bytes, found.moved_bytes), (on_last, on_last));
        found.plan.check(&tables, &fewer, found.plan.global_batch_size).unwrap();
        // New rows and new tables do not count as moves.
        tables[0].rows += 500;
        tables.push(Table::new("new", 100, 16));
        let found =
            replan(&before, &tables, &topology, &AnalyticCost, topology.global_batch_size(512), 0).unwrap();
        assert_eq!((found.required_bytes, found.moved_bytes), (0, 0));
        found.plan.check(&tables, &topology, found.plan.global_batch_size).unwrap();
        // A rank that lacks memory for its additional rows moves a shard away.
        let topology = Topology::h100(4, 13_000_000).unwrap();
        tables[0].rows = 30_000;
        let found =
            replan(&before, &tables, &topology, &AnalyticCost, topology.global_batch_size(512), 1 << 30)
                .unwrap();
        assert!(found.required_bytes > 0, "{found:?}");
        found.plan.check(&tables, &topology, found.plan.global_batch_size).unwrap();
        let small = Topology::h100(4, 4 << 20).unwrap();
        let error = replan(&before, &tables, &small, &AnalyticCost, small.global_batch_size(512), 1 << 30)
            .unwrap_err()
            .to_string();
        assert!(error.contains("does not fit beside the tables that do not move"), "{error}");
    }
}
