//! Local search from a new placement, or from the placement of an old plan: it moves load off the busiest rank as
//! long as that helps.

use std::collections::HashSet;

use crate::search::placement::{Placement, Ranks};
use crate::search::problem::{Capacity, Kind, Placed, Problem, Unit, units_of};

/// The largest number of rounds. Each round changes the placement once.
const MAX_ROUNDS: usize = 400;
/// The number of changes that are priced exactly in a round, in the order of their estimates.
const TRIED: usize = 12;
/// The number of ranks that may receive units, the cheapest ones first.
const TARGETS: usize = 16;
/// The least relative improvement.
const GAIN: f64 = 1e-9;
/// The number of the busiest rank's tables that are tried in another form, the most expensive ones first.
const TABLES: usize = 8;
/// The largest number of changes of a table's form.
const FORMS: usize = 32;

/// A change of the placement. `usize` numbers are indices of units, `u32` numbers are places.
#[derive(Debug, Clone, Copy)]
enum Move {
    /// The unit moves to another place.
    To(usize, u32),
    /// Two units change places.
    Swap(usize, usize),
    /// The unit is halved. The first half stays, and the second half moves to the place.
    Split(usize, u32),
}

/// The order in which changes are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Changes with the lowest cost of the two ranks come first.
    ByCost,
    /// Changes with the largest improvement per moved byte come first.
    ByCostPerByte,
}

/// Improves a placement through placements that `allowed` accepts. In each round, a unit of the busiest rank moves to
/// another rank, changes places with another unit, or is halved and shared, whichever reduces the higher cost of the two
/// ranks most. The search ends when no change helps. The cost of a rank excludes the time that it waits for other ranks.
pub(crate) fn improve(
    problem: &Problem<'_>,
    placement: Placement,
    order: Order,
    allowed: &dyn Fn(&[Placed]) -> bool,
) -> Placement {
    let mut state = State::new(problem, placement);
    for _ in 0..MAX_ROUNDS {
        if !state.round(order, allowed) {
            break;
        }
    }
    state.best
}

/// Improves a placement like [`improve`], and also changes the form of the busiest rank's tables: whole, divided by rows,
/// or copied.
pub(crate) fn improve_forms(
    problem: &Problem<'_>,
    placement: Placement,
    order: Order,
    allowed: &dyn Fn(&[Placed]) -> bool,
) -> Placement {
    let mut best = improve(problem, placement, order, allowed);
    for _ in 0..FORMS {
        let Some(other) = other_form(problem, &best, allowed) else { break };
        best = improve(problem, other, order, allowed);
    }
    best
}

/// Returns the cheapest placement in which one table of the busiest rank has another form, or `None` if no such
/// placement is cheaper.
fn other_form(
    problem: &Problem<'_>,
    now: &Placement,
    allowed: &dyn Fn(&[Placed]) -> bool,
) -> Option<Placement> {
    let costs = Ranks::of(problem, &now.placed).busy_ms(problem);
    let worst = (0..costs.len()).reduce(|a, b| if costs[b] > costs[a] { b } else { a })?;
    let is_on_worst = |(unit, place): &&Placed| problem.ranks_of(unit, *place).contains(&worst);
    let mut tables: Vec<usize> = now.placed.iter().filter(is_on_worst).map(|(unit, _)| unit.table).collect();
    let alone = |table: usize| problem.priced(&problem.whole(table)).ms;
    tables.sort_by(|a, b| alone(*b).total_cmp(&alone(*a)).then(a.cmp(b)));
    tables.dedup();
    let mut best: Option<Placement> = None;
    for table in tables.into_iter().take(TABLES) {
        let kept = now.placed.iter().filter(|(unit, _)| unit.table != table);
        let kept: Vec<Placed> = kept.copied().collect();
        let least = best.as_ref().map_or(now.cost_ms, |best| best.cost_ms) * (1.0 - GAIN);
        let forms: Vec<Unit> = std::iter::once(problem.whole(table)).chain(problem.forms(table)).collect();
        best = cheapest_with(problem, &forms, &kept, least, allowed).or(best);
    }
    best
}

/// Places one of `candidates` in addition to other units, and returns the cheapest placement that fits into memory,
/// is `allowed` and costs less than `below`. Returns `None` if there is no such place. Shards of one table never
/// share a rank.
pub(crate) fn cheapest_with(
    problem: &Problem<'_>,
    candidates: &[Unit],
    others: &[Placed],
    mut below: f64,
    allowed: &dyn Fn(&[Placed]) -> bool,
) -> Option<Placement> {
    let mut ranks = Ranks::of(problem, others);
    let mut best = None;
    let mut least_own = f64::INFINITY;
    for unit in candidates {
        let capacity = problem.capacity(units_of(others).chain([unit]));
        let of_table = others.iter().filter(|(other, _)| other.table == unit.table);
        let taken: Vec<u32> = of_table.map(|(_, place)| *place).collect();
        for place in (0..problem.places(unit)).filter(|place| !taken.contains(place)) {
            let saved = ranks.saved(problem.ranks_of(unit, place));
            ranks.add(problem, unit, place);
            let has_room = capacity.exceeded(&ranks.bytes).is_none();
            let cost_ms = if has_room { ranks.most_ms(problem) } else { f64::INFINITY };
            // If places have equal cost, the one whose ranks compute least is best.
            let its_ranks = problem.ranks_of(unit, place);
            let own = its_ranks.map(|rank| ranks.compute_ms[rank]).fold(0.0, f64::max);
            ranks.restore(saved);
            let is_better = cost_ms < below || (best.is_some() && cost_ms == below && own < least_own);
            if !has_room || !is_better {
                continue;
            }
            let placed = [others, &[(*unit, place)]].concat();
            if allowed(&placed) {
                (below, least_own) = (cost_ms, own);
                best = Some(Placement { placed, cost_ms });
            }
        }
    }
    best
}

struct State<'a> {
    problem: &'a Problem<'a>,
    placed: Vec<Placed>,
    ranks: Ranks,
    /// The cost of every rank, without the time that it waits for others.
    costs: Vec<f64>,
    /// The memory of ranks for units: see [`Problem::capacity`].
    capacity: Capacity<'a>,
    /// Pairs of a table and a rank that has a column shard of it.
    taken: HashSet<(usize, u32)>,
    best: Placement,
}

/// Returns the pairs of a table and a rank that has a column shard of it.
fn taken(placed: &[Placed]) -> HashSet<(usize, u32)> {
    placed.iter().map(|(unit, place)| (unit.table, *place)).collect()
}

impl<'a> State<'a> {
    fn new(problem: &'a Problem<'a>, placement: Placement) -> Self {
        let ranks = Ranks::of(problem, &placement.placed);
        Self {
            problem,
            costs: ranks.busy_ms(problem),
            ranks,
            capacity: problem.capacity(units_of(&placement.placed)),
            taken: taken(&placement.placed),
            placed: placement.placed.clone(),
            best: placement,
        }
    }

    /// Makes one change that reduces the cost. Returns false if there is none.
    fn round(&mut self, order: Order, allowed: &dyn Fn(&[Placed]) -> bool) -> bool {
        let Some(worst) =
            (0..self.costs.len()).reduce(|a, b| if self.costs[b] > self.costs[a] { b } else { a })
        else {
            return false;
        };
        let mut moves = self.moves(worst);
        let before = self.costs[worst];
        let key = |(cost, change): &(f64, Move)| match order {
            Order::ByCost => *cost,
            Order::ByCostPerByte => (cost - before) / self.bytes_of(*change).max(1) as f64,
        };
        moves.sort_by(|a, b| key(a).total_cmp(&key(b)));
        moves.truncate(TRIED);
        for (_, change) in moves {
            let target = self.target(change);
            let placed = self.changed(change);
            let saved = self.ranks.saved([worst, target]);
            self.move_ranks(&placed);
            let costs = self.ranks.busy_ms(self.problem);
            let most = costs.iter().copied().fold(0.0, f64::max);
            // A split adds a shard, and thus request buffers on all ranks.
            let has_room = || self.problem.capacity(units_of(&placed)).exceeded(&self.ranks.bytes).is_none();
            // Other ranks may still be as expensive as before, but no rank may become more expensive.
            if costs[worst] < before * (1.0 - GAIN)
                && most <= before
                && costs[target] < before * (1.0 - GAIN)
                && (placed.len() == self.placed.len() || has_room())
                && allowed(&placed)
            {
                (self.costs, self.placed) = (costs, placed);
                self.capacity = self.problem.capacity(units_of(&self.placed));
                self.taken = taken(&self.placed);
                let cost_ms = self.ranks.most_ms(self.problem);
                if cost_ms < self.best.cost_ms {
                    self.best = Placement { placed: self.placed.clone(), cost_ms };
                }
                return true;
            }
            self.ranks.restore(saved);
        }
        false
    }

    /// Returns the bytes of the units that a change moves.
    fn bytes_of(&self, change: Move) -> u64 {
        let bytes = |i: usize| self.problem.priced(&self.placed[i].0).bytes;
        match change {
            Move::To(i, _) => bytes(i),
            Move::Swap(i, j) => bytes(i).saturating_add(bytes(j)),
            Move::Split(i, _) => bytes(i) / 2,
        }
    }

    /// Returns the rank that receives a unit.
    fn target(&self, change: Move) -> usize {
        match change {
            Move::To(_, place) | Move::Split(_, place) => place as usize,
            Move::Swap(_, other) => self.placed[other].1 as usize,
        }
    }

    /// Returns changes with an estimate of the higher cost of the two ranks, if it is below the present cost.
    fn moves(&self, worst: usize) -> Vec<(f64, Move)> {
        let problem = self.problem;
        let on_worst = |i: &usize| {
            let (unit, place) = self.placed[*i];
            unit.kind == Kind::Columns && place as usize == worst
        };
        let mine: Vec<usize> = (0..self.placed.len()).filter(on_worst).collect();
        let mut pieces = vec![0; problem.tables.len()];
        units_of(&self.placed).for_each(|unit| pieces[unit.table] += 1);
        let mut cheapest: Vec<usize> = (0..problem.ranks).filter(|rank| *rank != worst).collect();
        cheapest.sort_by(|a, b| self.costs[*a].total_cmp(&self.costs[*b]));
        cheapest.truncate(TARGETS);
        let mut moves = Vec::new();
        let mut keep = |estimate: Option<f64>, change| {
            if let Some(cost) = estimate.filter(|cost| *cost < self.costs[worst]) {
                moves.push((cost, change));
            }
        };
        for &i in &mine {
            let (unit, _) = self.placed[i];
            for &rank in &cheapest {
                let place = rank as u32;
                if self.taken.contains(&(unit.table, place)) {
                    continue;
                }
                keep(self.estimate(worst, &[unit], &[], rank), Move::To(i, place));
                if let Some(half) = unit.half().filter(|_| pieces[unit.table] < problem.ranks) {
                    keep(self.estimate_split(worst, unit, half, rank), Move::Split(i, place));
                }
            }
        }
        for (j, (other, place)) in self.placed.iter().enumerate() {
            let place = *place as usize;
            if other.kind != Kind::Columns
                || !cheapest.contains(&place)
                || self.taken.contains(&(other.table, worst as u32))
            {
                continue;
            }
            for &i in &mine {
                let (unit, _) = self.placed[i];
                if unit != *other && !self.taken.contains(&(unit.table, place as u32)) {
                    keep(self.estimate(worst, &[unit], &[*other], place), Move::Swap(i, j));
                }
            }
        }
        moves
    }

    /// Returns the higher cost of the ranks `from` and `to` after the units `go` move to `to` and the units `come`
    /// move back, or `None` if they do not fit into memory.
    fn estimate(&self, from: usize, go: &[Unit], come: &[Unit], to: usize) -> Option<f64> {
        let gone = self.after(from, go, come, 0.0)?;
        let got = self.after(to, come, go, 0.0)?;
        Some(gone.max(got))
    }

    fn estimate_split(&self, from: usize, unit: Unit, half: Unit, to: usize) -> Option<f64> {
        // Requests go to two shards instead of one.
        let [whole, part] = [unit, half].map(|unit| self.problem.priced(&unit).asking_ms);
        let asking = 2.0 * part - whole;
        Some(self.after(from, &[unit], &[half], asking)?.max(self.after(to, &[], &[half], asking)?))
    }

    /// Returns the cost of a rank that loses and gains units and spends `longer_ms` more on requests. Its
    /// communication is taken to be proportional to the bytes that it sends.
    fn after(&self, rank: usize, lost: &[Unit], gained: &[Unit], longer_ms: f64) -> Option<f64> {
        let problem = self.problem;
        let mut compute = self.ranks.compute_ms[rank];
        let mut traffic = self.ranks.traffic[rank];
        let mut bytes = self.ranks.bytes[rank];
        for unit in lost {
            let priced = problem.priced(unit);
            compute -= priced.ms_by_kind[problem.kinds[rank]];
            traffic.subtract(priced.traffic);
            bytes = bytes.saturating_sub(priced.bytes);
        }
        for unit in gained {
            let priced = problem.priced(unit);
            compute += priced.ms_by_kind[problem.kinds[rank]];
            traffic.add(priced.traffic);
            bytes = bytes.saturating_add(priced.bytes);
        }
        if bytes > self.capacity.of(rank) {
            return None;
        }
        let asking = self.ranks.asking_ms;
        let old = self.ranks.traffic[rank];
        let ratio = if old.sum() > 0.0 { traffic.sum() / old.sum() } else { 1.0 };
        Some(compute + asking + longer_ms + (self.costs[rank] - self.ranks.compute_ms[rank] - asking) * ratio)
    }

    /// Returns the placement after a change.
    fn changed(&self, change: Move) -> Vec<Placed> {
        let mut placed = self.placed.clone();
        match change {
            Move::To(i, place) => placed[i].1 = place,
            Move::Swap(i, j) => (placed[i].1, placed[j].1) = (placed[j].1, placed[i].1),
            Move::Split(i, place) => {
                if let Some([stays, goes]) = placed[i].0.halves() {
                    placed[i].0 = stays;
                    placed.push((goes, place));
                }
            }
        }
        placed
    }

    /// Changes the state of the ranks to that of another placement.
    fn move_ranks(&mut self, placed: &[Placed]) {
        for (old, new) in self.placed.iter().zip(placed).filter(|(old, new)| old != new) {
            self.ranks.remove(self.problem, &old.0, old.1);
            self.ranks.add(self.problem, &new.0, new.1);
        }
        for (unit, place) in &placed[self.placed.len()..] {
            self.ranks.add(self.problem, unit, *place);
        }
    }
}
