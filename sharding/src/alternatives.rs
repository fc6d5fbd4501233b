//! Predicts the cost of a plan in which one table is placed differently.

use crate::cost::CostModel;
use crate::error::{Error, Result};
use crate::plan::{Plan, RankPrediction, TablePlan};
use crate::search::problem::{Placed, Problem, Unit};
use crate::table::Table;

/// A different placement of a table, and the predictions for the plan that contains it.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// The placement of the table.
    pub placed: TablePlan,
    /// The predicted cost of the most expensive rank, in milliseconds per step.
    pub max_cost_ms: f64,
    /// The largest number of bytes that a rank lacks; 0 if all ranks have enough memory.
    pub missing_bytes: u64,
}

impl Plan {
    /// Returns all other placements of the table `name` that are considered: whole on each rank; its columns in two,
    /// four, … parts on the ranks that cost least without it; its rows on all ranks, or on the ranks of one machine;
    /// and a copy on every rank. Placements that fit into memory come first, and cheaper ones come before more
    /// expensive ones. All other tables keep their places.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no such table or a table is invalid, and the errors of [`predict`](Self::predict).
    pub fn alternatives(
        &self,
        name: &str,
        tables: &[Table],
        cost_model: &dyn CostModel,
    ) -> Result<Vec<Alternative>> {
        let found = tables.iter().position(|table| table.name == name);
        let place = self.tables.iter().position(|table| table.name == name);
        let (Some(found), Some(place)) = (found, place) else {
            let hint = onefold_datasets::suggest(name, tables.iter().map(|table| table.name.as_str()));
            return Err(Error::invalid(format!("there is no table `{name}`"), hint));
        };
        let problem = Problem::new(tables, &self.topology, cost_model, self.samples_per_rank())?;
        let with = |placed: Option<&TablePlan>| {
            let mut all = self.tables.clone();
            match placed {
                Some(placed) => all[place] = placed.clone(),
                None => drop(all.remove(place)),
            }
            Self::predict(&self.search, tables, all, &self.topology, cost_model, self.global_batch_size)
        };
        let mut order = with(None)?.ranks;
        order.sort_by(|a, b| a.cost_ms().total_cmp(&b.cost_ms()));
        let ranks: Vec<u32> = order.iter().map(|rank| rank.rank).collect();
        let now = &self.tables[place];
        let mut alternatives = Vec::new();
        for placed in placements(&problem, found, &ranks) {
            if (placed.sharding_type, &placed.shards) == (now.sharding_type, &now.shards) {
                continue;
            }
            let plan = with(Some(&placed))?;
            let missing =
                |rank: &RankPrediction| rank.total_bytes().saturating_sub(self.topology.memory_of(rank.rank));
            alternatives.push(Alternative {
                placed,
                max_cost_ms: plan.max_cost_ms,
                missing_bytes: plan.ranks.iter().map(missing).max().unwrap_or(0),
            });
        }
        alternatives.sort_by(|a, b| {
            let room = |alternative: &Alternative| alternative.missing_bytes > 0;
            room(a).cmp(&room(b)).then(a.max_cost_ms.total_cmp(&b.max_cost_ms))
        });
        Ok(alternatives)
    }
}

/// Returns the possible placements of a table. Column shards are placed on the first of `ranks`.
fn placements(problem: &Problem<'_>, table: usize, ranks: &[u32]) -> Vec<TablePlan> {
    let whole = problem.whole(table);
    let everywhere = |unit: Unit| (0..problem.places(&unit)).map(move |place| vec![(unit, place)]);
    let parts = |unit: Unit| whole.columns / unit.columns;
    let by_columns = std::iter::successors(whole.half(), |unit| unit.half())
        .take_while(|unit| parts(*unit) <= ranks.len() as u64)
        .map(|unit| unit.repeated(parts(unit) as usize).zip(ranks.iter().copied()).collect::<Vec<Placed>>());
    let placed = everywhere(whole).chain(by_columns).chain(problem.forms(table).flat_map(everywhere));
    placed.map(|placed| problem.table_plan(&problem.tables[table], &placed)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::plan::ShardingType;
    use crate::search::Search;
    use crate::search::beam::Beam;
    use crate::topology::Topology;

    fn tables() -> Vec<Table> {
        vec![
            Table { first: crate::lookups::Lookups::of(20.0), ..Table::new("large", 50_000, 64) },
            Table { first: crate::lookups::Lookups::of(5.0), ..Table::new("middle", 20_000, 32) },
            Table::new("small", 10, 6),
        ]
    }

    #[test]
    fn alternatives_are_whole_plans() {
        let (tables, topology) =
            (tables(), Topology { ranks_per_node: 2, ..Topology::h100(4, 1 << 30).unwrap() });
        let plan =
            Beam::Full.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(512)).unwrap();
        let found = plan.alternatives("large", &tables, &AnalyticCost).unwrap();
        // Whole on four ranks, two and four column parts, rows on all ranks and on each machine, and copies, minus
        // the current placement.
        assert_eq!(found.len(), 4 + 2 + 3 + 1 - 1, "{plan:?}");
        assert!(found.windows(2).all(|pair| pair[0].max_cost_ms <= pair[1].max_cost_ms));
        for alternative in &found {
            assert_eq!(alternative.missing_bytes, 0);
            let mut other = plan.clone();
            other.tables[0] = alternative.placed.clone();
            let Plan { search, tables: placed, topology, global_batch_size, .. } = other;
            let other =
                Plan::predict(&search, &tables, placed, &topology, &AnalyticCost, global_batch_size).unwrap();
            other.check(&tables, &topology, other.global_batch_size).unwrap();
            assert_eq!(other.max_cost_ms, alternative.max_cost_ms);
        }
        // Six columns cannot be divided into parts whose width is a multiple of four.
        let small = plan.alternatives("small", &tables, &AnalyticCost).unwrap();
        assert!(small.iter().all(|other| other.placed.sharding_type != ShardingType::ColumnWise));
        let error = plan.alternatives("smal", &tables, &AnalyticCost).unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no table `smal`\n  hint: did you mean `small`? Known names: `large`, `middle`, `small`"
        );
    }

    #[test]
    fn places_without_room_come_last_and_say_what_is_missing() {
        let tables = tables();
        // The large table takes 12.4 MiB, and a rank has 10 MiB.
        let topology = Topology::h100(2, 10 << 20).unwrap();
        let plan =
            Beam::Full.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(64)).unwrap();
        let found = plan.alternatives("large", &tables, &AnalyticCost).unwrap();
        let (room, full): (Vec<_>, Vec<_>) = found.iter().partition(|other| other.missing_bytes == 0);
        assert!(!room.is_empty());
        assert!(found[room.len()..].iter().all(|other| other.missing_bytes > 0));
        let whole = full.iter().filter(|other| other.placed.sharding_type == ShardingType::TableWise);
        assert_eq!(whole.count(), 2);
    }

    #[test]
    fn one_rank_has_no_alternative() {
        let tables = tables();
        let plan = Beam::Full.plan(&tables, &Topology::h100(1, 1 << 30).unwrap(), &AnalyticCost, 64).unwrap();
        assert_eq!(plan.alternatives("large", &tables, &AnalyticCost).unwrap(), []);
    }
}
