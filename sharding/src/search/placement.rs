//! The inner search: the places of units, for a given division of the tables.

use std::cmp::Reverse;

use crate::cost::{RankLoad, Traffic};
use crate::error::Result;
use crate::plan::Plan;
use crate::search::problem::{Capacity, Kind, Placed, Problem, Unit, units_of};

/// The state of every rank, updated as units are added and removed.
#[derive(Clone)]
pub(crate) struct Ranks {
    /// Bytes on every rank, without its request buffers.
    pub(crate) bytes: Vec<u64>,
    pub(crate) traffic: Vec<Traffic>,
    /// Computation of every rank, without its requests.
    pub(crate) compute_ms: Vec<f64>,
    /// The time that every rank spends on requests.
    pub(crate) asking_ms: f64,
}

impl Ranks {
    /// Returns the ranks without units.
    pub(crate) fn new(problem: &Problem<'_>) -> Self {
        Self::of(problem, &[])
    }

    /// Returns the ranks with units at places.
    pub(crate) fn of(problem: &Problem<'_>, placed: &[Placed]) -> Self {
        let mut ranks = Self {
            bytes: vec![0; problem.ranks],
            traffic: vec![Traffic::default(); problem.ranks],
            compute_ms: (0..problem.topology.ranks).map(|rank| problem.model.idle_ms(rank)).collect(),
            asking_ms: 0.0,
        };
        placed.iter().for_each(|(unit, place)| ranks.add(problem, unit, *place));
        ranks
    }

    /// Adds `unit` at `place`.
    pub(crate) fn add(&mut self, problem: &Problem<'_>, unit: &Unit, place: u32) {
        let priced = problem.priced(unit);
        self.asking_ms += priced.asking_ms;
        for rank in problem.ranks_of(unit, place) {
            self.bytes[rank] = self.bytes[rank].saturating_add(priced.bytes);
            self.traffic[rank].add(priced.traffic);
            self.compute_ms[rank] += priced.ms_by_kind[problem.kinds[rank]];
        }
    }

    /// Saves the state of ranks before a change, for [`restore`](Self::restore). Adding and removing a unit may
    /// change the last bits of sums, so it does not restore them exactly.
    pub(crate) fn saved(&self, ranks: impl IntoIterator<Item = usize>) -> Saved {
        let saved = |rank: usize| SavedRank {
            rank,
            bytes: self.bytes[rank],
            traffic: self.traffic[rank],
            compute_ms: self.compute_ms[rank],
        };
        Saved { asking_ms: self.asking_ms, ranks: ranks.into_iter().map(saved).collect() }
    }

    /// Reverts all changes since `saved`, if they affected only the saved ranks.
    pub(crate) fn restore(&mut self, saved: Saved) {
        self.asking_ms = saved.asking_ms;
        for saved in saved.ranks {
            let rank = saved.rank;
            self.bytes[rank] = saved.bytes;
            self.traffic[rank] = saved.traffic;
            self.compute_ms[rank] = saved.compute_ms;
        }
    }

    /// Removes `unit` from `place`.
    pub(crate) fn remove(&mut self, problem: &Problem<'_>, unit: &Unit, place: u32) {
        let priced = problem.priced(unit);
        self.asking_ms -= priced.asking_ms;
        for rank in problem.ranks_of(unit, place) {
            self.bytes[rank] = self.bytes[rank].saturating_sub(priced.bytes);
            self.traffic[rank].subtract(priced.traffic);
            self.compute_ms[rank] -= priced.ms_by_kind[problem.kinds[rank]];
        }
    }

    /// Returns the cost of every rank without the time that it waits for others.
    pub(crate) fn busy_ms(&self, problem: &Problem<'_>) -> Vec<f64> {
        self.costs_ms(problem, false)
    }

    /// Returns the cost of every rank, with the time that it waits for others if `waits`.
    fn costs_ms(&self, problem: &Problem<'_>, waits: bool) -> Vec<f64> {
        let loads = self.compute_ms.iter().zip(&self.traffic);
        let loads: Vec<RankLoad> =
            loads.map(|(&compute_ms, &traffic)| RankLoad { compute_ms, traffic }).collect();
        let communication = problem.model.communication_ms(&loads, problem.topology, waits);
        let costs = self.compute_ms.iter().zip(communication);
        costs.map(|(compute, communication)| compute + self.asking_ms + communication).collect()
    }

    /// Returns the cost of the most expensive rank.
    pub(crate) fn most_ms(&self, problem: &Problem<'_>) -> f64 {
        self.costs_ms(problem, true).into_iter().fold(0.0, f64::max)
    }

    /// Returns whether the ranks of `unit` at `place` have room for it.
    pub(crate) fn have_room(
        &self,
        problem: &Problem<'_>,
        unit: &Unit,
        place: u32,
        capacity: Capacity<'_>,
    ) -> bool {
        let needed = problem.priced(unit).bytes;
        let mut ranks = problem.ranks_of(unit, place);
        ranks.all(|rank| self.bytes[rank].saturating_add(needed) <= capacity.of(rank))
    }

    /// Returns the bytes that a rank sends.
    fn sent(&self, rank: usize) -> f64 {
        self.traffic[rank].sum()
    }
}

/// Saved states of ranks, and the time that every rank spends on requests.
pub(crate) struct Saved {
    asking_ms: f64,
    ranks: Vec<SavedRank>,
}

struct SavedRank {
    rank: usize,
    bytes: u64,
    traffic: Traffic,
    compute_ms: f64,
}

/// Units and their places.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    pub(crate) placed: Vec<Placed>,
    /// The cost of the most expensive rank, in milliseconds.
    pub(crate) cost_ms: f64,
}

impl Placement {
    /// Returns a placement of units with its cost.
    pub(crate) fn new(problem: &Problem<'_>, placed: Vec<Placed>) -> Self {
        let cost_ms = Ranks::of(problem, &placed).most_ms(problem);
        Self { placed, cost_ms }
    }

    /// Returns the plan of the placement, with exact costs.
    pub(crate) fn plan(&self, problem: &Problem<'_>, search: &str, global_batch_size: u64) -> Result<Plan> {
        let placed = problem.table_plans(&self.placed);
        Plan::predict(search, problem.tables, placed, problem.topology, problem.model, global_batch_size)
    }
}

/// Factors by which the communication of a rank may exceed the mean: the 11 factors of NeuroShard's grid, and no
/// limit.
const GRID: [f64; 12] = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5, f64::INFINITY];

/// Runs NeuroShard's greedy grid search. For every limit on the communication of a rank, it places the units in
/// descending order of cost, each on the rank whose fused computation remains lowest. Returns the best of these
/// placements, or `None` if none fits into memory.
///
/// `step` selects every `step`-th limit, always including the last.
pub(crate) fn grid_search(problem: &Problem<'_>, units: &[Unit], step: usize) -> Option<Placement> {
    let order = by_cost(problem, units);
    let limits = GRID.iter().rev().step_by(step.max(1)).rev();
    let placed = limits.filter_map(|limit| greedy(problem, units, &order, *limit));
    placed.reduce(|best, other| if other.cost_ms < best.cost_ms { other } else { best })
}

/// Returns the indices of units in placement order: units on all ranks first, then by descending separate cost, and
/// ties by index.
fn by_cost(problem: &Problem<'_>, units: &[Unit]) -> Vec<usize> {
    let everywhere = |unit: &Unit| matches!(unit.kind, Kind::RowsOfAll | Kind::Copies);
    let mut order: Vec<usize> = (0..units.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&units[*a], &units[*b]);
        let cost = || problem.priced(b).ms.total_cmp(&problem.priced(a).ms);
        everywhere(b).cmp(&everywhere(a)).then_with(cost)
    });
    order
}

fn greedy(problem: &Problem<'_>, units: &[Unit], order: &[usize], limit: f64) -> Option<Placement> {
    let total: f64 = units
        .iter()
        .map(|unit| problem.priced(unit).traffic.sum() * problem.ranks_of(unit, 0).len() as f64)
        .sum();
    // The tolerance covers sums that are added in a different order.
    let most_sent = limit * total / problem.ranks as f64 * (1.0 + 1e-9);
    let capacity = problem.capacity(units);
    if !capacity.suffices_to_ask() {
        return None;
    }
    let mut ranks = Ranks::new(problem);
    let mut placed: Vec<Placed> = units.iter().map(|unit| (*unit, 0)).collect();
    let mut taken = vec![Vec::new(); problem.tables.len()];
    for &i in order {
        let unit = &units[i];
        let place = best_place(problem, &ranks, unit, (capacity, most_sent), &taken[unit.table])?;
        ranks.add(problem, unit, place);
        placed[i].1 = place;
        taken[unit.table].push(place);
    }
    Some(Placement { placed, cost_ms: ranks.most_ms(problem) })
}

/// Returns the place at which the slowest of the unit's ranks remains fastest. Two column shards of one table never
/// share a rank, where they would be one wider shard.
fn best_place(
    problem: &Problem<'_>,
    ranks: &Ranks,
    unit: &Unit,
    (capacity, most_sent): (Capacity<'_>, f64),
    taken: &[u32],
) -> Option<u32> {
    let priced = problem.priced(unit);
    let sent = priced.traffic.sum();
    let everywhere = matches!(unit.kind, Kind::RowsOfAll | Kind::Copies);
    let compute_ms = |rank: usize| ranks.compute_ms[rank] + priced.ms_by_kind[problem.kinds[rank]];
    let mut best: Option<(f64, u32)> = None;
    for place in 0..problem.places(unit) {
        let mut its_ranks = problem.ranks_of(unit, place);
        let may_send = |rank: usize| everywhere || ranks.sent(rank) + sent <= most_sent;
        let is_open = !taken.contains(&place) && ranks.have_room(problem, unit, place, capacity);
        if !is_open || !its_ranks.clone().all(may_send) {
            continue;
        }
        let cost = match everywhere {
            true => 0.0,
            false if its_ranks.len() == 1 => compute_ms(its_ranks.next().unwrap_or_default()),
            false => its_ranks.map(compute_ms).fold(0.0, f64::max),
        };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, place));
        }
    }
    best.map(|(_, place)| place)
}

/// Places units in descending order of bytes, each where the most memory is free. Units that do not fit are halved,
/// or divided by rows. Costs are not considered: the purpose is to find a placement if memory is tight.
///
/// # Errors
///
/// The unit that does not fit, the rank with the most free memory, and the bytes in use on that rank.
pub(crate) fn by_memory(problem: &Problem<'_>, units: &[Unit]) -> Result<Placement, (Unit, u32, u64)> {
    let mut waiting: Vec<Unit> = units.to_vec();
    waiting.sort_by_key(|unit| (problem.priced(unit).bytes, Reverse(unit.table)));
    let mut ranks = Ranks::new(problem);
    let mut taken = vec![Vec::new(); problem.tables.len()];
    let mut placed: Vec<Placed> = Vec::new();
    let mut capacity = problem.capacity(&waiting);
    while let Some(unit) = waiting.pop() {
        let left = |place: u32| {
            problem.ranks_of(&unit, place).map(|rank| problem.left(rank, ranks.bytes[rank])).min()
        };
        let free = (0..problem.places(&unit)).filter(|place| !taken[unit.table].contains(place));
        let place = free.min_by_key(|place| (Reverse(left(*place)), *place));
        if let Some(place) = place.filter(|place| ranks.have_room(problem, &unit, *place, capacity)) {
            ranks.add(problem, &unit, place);
            taken[unit.table].push(place);
            placed.push((unit, place));
            continue;
        }
        let rows = problem.form(unit.table, Kind::RowsOfAll);
        let pieces = 1 + taken[unit.table].len() + waiting.iter().filter(|w| w.table == unit.table).count();
        if let Some(halves) = unit.halves().filter(|_| pieces < problem.ranks) {
            for half in halves {
                let bytes = problem.priced(&half).bytes;
                let at = waiting.partition_point(|other| problem.priced(other).bytes <= bytes);
                waiting.insert(at, half);
            }
            // The capacity decreases, because requests go to more shards.
            capacity = problem.capacity(waiting.iter().chain(units_of(&placed)));
        } else if unit.kind == Kind::Columns && problem.get(&rows).is_some() {
            // The rows of the table replace all of its shards.
            waiting.retain(|other| other.table != unit.table);
            for (other, place) in placed.extract_if(.., |(other, _)| other.table == unit.table) {
                ranks.remove(problem, &other, place);
            }
            taken[unit.table].clear();
            waiting.push(rows);
            capacity = problem.capacity(waiting.iter().chain(units_of(&placed)));
        } else {
            let left = |rank: &usize| Reverse(problem.left(*rank, ranks.bytes[*rank]));
            let rank = (0..problem.ranks).min_by_key(left).unwrap_or_default();
            return Err((unit, rank as u32, ranks.bytes[rank].saturating_add(capacity.asking)));
        }
    }
    match capacity.exceeded(&ranks.bytes) {
        None => Ok(Placement::new(problem, placed)),
        // Units that were placed before others were divided no longer fit.
        Some(rank) => Err((placed[placed.len() - 1].0, rank as u32, problem.topology.memory_of(rank as u32))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::model_file::ModelFile;
    use crate::cost::several::LearnedCosts;
    use crate::table::Table;
    use crate::topology::Topology;

    #[test]
    fn restoring_a_placement_undoes_a_tried_change() {
        let tables: Vec<Table> = (0..4).map(|i| Table::new(format!("t{i}"), 10_000, 64)).collect();
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let model = LearnedCosts::new(vec![ModelFile::shipped("cpu").unwrap()], &topology, true).unwrap();
        let problem = Problem::new(&tables, &topology, &model, 256).unwrap();
        let mut ranks =
            Ranks::of(&problem, &(0..4).map(|i| (problem.whole(i), i as u32)).collect::<Vec<_>>());
        let (before, unit) = (ranks.busy_ms(&problem), problem.whole(0));
        for place in 0..4 {
            let saved = ranks.saved(problem.ranks_of(&unit, place));
            ranks.add(&problem, &unit, place);
            assert_ne!(ranks.busy_ms(&problem), before);
            ranks.restore(saved);
            assert_eq!(ranks.busy_ms(&problem), before);
        }
    }
}
