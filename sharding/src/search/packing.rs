//! A packing with backtracking, for problems in which a greedy packing finds no placement.

use crate::search::placement::Placement;
use crate::search::problem::{Capacity, Kind, Problem, Unit};

/// The largest number of places that are tried in total.
const TRIES: usize = 200_000;
/// The largest number of tables. For more tables, either the greedy packing succeeds or backtracking takes too long.
const MOST_UNITS: usize = 256;

/// Returns a placement that fits into the memory of every rank. The search tries all places of units by backtracking,
/// for several divisions of the tables: all whole; then the largest table, the two largest tables, … by rows of all
/// ranks, by rows of one machine, or in halves, quarters, …. Returns `None` if it finds no placement within [`TRIES`].
pub(crate) fn pack(problem: &Problem<'_>) -> Option<Placement> {
    if problem.tables.len() > MOST_UNITS {
        return None;
    }
    let mut tries = TRIES;
    cuts(problem).find_map(|units| Packing::new(problem, units).placed(&mut tries))
}

/// A division of a table.
#[derive(Clone, Copy)]
enum Cut {
    /// Another form.
    Form(Kind),
    /// At most this number of column shards.
    Columns(usize),
}

/// Returns divisions of the tables, beginning with whole tables.
fn cuts(problem: &Problem<'_>) -> impl Iterator<Item = Vec<Unit>> {
    let mut tables: Vec<usize> = (0..problem.tables.len()).collect();
    tables.sort_by_key(|table| std::cmp::Reverse(problem.priced(&problem.whole(*table)).bytes));
    let parts = std::iter::successors(Some(2usize), |parts: &usize| parts.checked_mul(2))
        .take_while(|parts| *parts <= problem.ranks);
    let forms = [Kind::RowsOfAll, Kind::RowsOfNode].map(Cut::Form).into_iter();
    let ways: Vec<Cut> = forms.chain(parts.map(Cut::Columns)).collect();
    let divided =
        (1..=tables.len()).flat_map(move |largest| ways.clone().into_iter().map(move |way| (largest, way)));
    let whole = problem.whole_tables();
    std::iter::once(whole).chain(divided.map(move |(largest, way)| {
        let cut = |(number, table): (usize, &usize)| -> Vec<Unit> {
            let whole = problem.whole(*table);
            match way {
                _ if number >= largest => vec![whole],
                Cut::Form(kind) => {
                    vec![problem.forms(*table).find(|unit| unit.kind == kind).unwrap_or(whole)]
                }
                Cut::Columns(parts) => {
                    let (mut unit, mut pieces) = (whole, 1);
                    while let Some(half) = unit.half().filter(|_| 2 * pieces <= parts) {
                        (unit, pieces) = (half, 2 * pieces);
                    }
                    unit.repeated(pieces).collect()
                }
            }
        };
        tables.iter().enumerate().flat_map(cut).collect()
    }))
}

/// Units, of which the first ones have a place.
struct Packing<'a> {
    problem: &'a Problem<'a>,
    units: Vec<Unit>,
    places: Vec<u32>,
    /// Bytes on every rank, without its request buffers.
    bytes: Vec<u64>,
}

impl<'a> Packing<'a> {
    fn new(problem: &'a Problem<'a>, mut units: Vec<Unit>) -> Self {
        // Large units, and units on many ranks, have few possible places, so they come first.
        let key = |unit: &Unit| (problem.places(unit), std::cmp::Reverse(problem.priced(unit).bytes));
        units.sort_by_key(key);
        Self { problem, places: Vec::with_capacity(units.len()), bytes: vec![0; problem.ranks], units }
    }

    fn placed(mut self, tries: &mut usize) -> Option<Placement> {
        let problem = self.problem;
        let capacity = problem.capacity(&self.units);
        let fits = self.units.len() <= MOST_UNITS && capacity.suffices_to_ask() && self.fill(capacity, tries);
        fits.then(|| Placement::new(problem, self.units.into_iter().zip(self.places).collect()))
    }

    /// Places the units that have no place yet. Without success, it restores the state.
    fn fill(&mut self, capacity: Capacity<'_>, tries: &mut usize) -> bool {
        let problem = self.problem;
        let Some(unit) = self.units.get(self.places.len()).copied() else { return true };
        let needed = problem.priced(&unit).bytes;
        let mut options = Vec::new();
        let mut empty = Vec::new();
        for place in 0..problem.places(&unit) {
            let ranks = problem.ranks_of(&unit, place);
            let left = |rank: usize| capacity.of(rank).checked_sub(self.bytes[rank].saturating_add(needed));
            let Some(left) = ranks.map(left).try_fold(u64::MAX, |least, left| Some(left?.min(least))) else {
                continue;
            };
            if self
                .units
                .iter()
                .zip(&self.places)
                .any(|(other, at)| other.table == unit.table && *at == place)
            {
                continue;
            }
            // One of the empty ranks with equal memory is enough.
            let is_empty = unit.kind == Kind::Columns && self.bytes[place as usize] == 0;
            if is_empty && empty.contains(&left) {
                continue;
            }
            if is_empty {
                empty.push(left);
            }
            options.push((left, place));
        }
        // The fullest rank is tried first, which keeps free memory on other ranks together.
        options.sort_unstable();
        for (_, place) in options {
            if *tries == 0 {
                return false;
            }
            *tries -= 1;
            let ranks = problem.ranks_of(&unit, place);
            ranks.clone().for_each(|rank| self.bytes[rank] += needed);
            self.places.push(place);
            if self.fill(capacity, tries) {
                return true;
            }
            self.places.pop();
            ranks.for_each(|rank| self.bytes[rank] -= needed);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::search::Search;
    use crate::search::beam::Beam;
    use crate::table::Table;
    use crate::topology::{RankGroup, Topology};

    fn table(i: usize) -> impl Strategy<Value = Table> {
        crate::search::tests::drawn_table(i, &[4, 8, 12, 64])
    }

    /// Returns whether whole tables fit, by trying all placements.
    fn whole_tables_fit(problem: &Problem<'_>) -> bool {
        let units = problem.whole_tables();
        let capacity = problem.capacity(&units);
        (0..problem.ranks.pow(units.len() as u32)).any(|code| {
            let mut bytes = vec![0; problem.ranks];
            for (i, unit) in units.iter().enumerate() {
                bytes[code / problem.ranks.pow(i as u32) % problem.ranks] += problem.priced(unit).bytes;
            }
            capacity.exceeded(&bytes).is_none()
        })
    }

    proptest! {
        #![proptest_config(onefold_property::cases(128))]

        /// If whole tables fit, however tightly, the search finds a plan.
        #[test]
        fn a_plan_is_found_where_whole_tables_fit(
            tables in (1usize..7).prop_flat_map(|count| (0..count).map(table).collect::<Vec<_>>()),
            ranks in 1u32..4, spare in 1.0..1.3f64,
        ) {
            let roomy = Topology::h100(ranks, 1 << 40).unwrap();
            let problem = Problem::new(&tables, &roomy, &AnalyticCost, 16).unwrap();
            let units = problem.whole_tables();
            let all: u64 = units.iter().map(|unit| problem.priced(unit).bytes).sum();
            let memory_bytes = problem.capacity(&units).asking + (all as f64 / f64::from(ranks) * spare) as u64;
            let topology = Topology { memory_bytes: memory_bytes.max(1), ..roomy.clone() };
            let problem = Problem::new(&tables, &topology, &AnalyticCost, 16).unwrap();
            if whole_tables_fit(&problem) {
                prop_assert!(pack(&problem).is_some());
                let batch = topology.global_batch_size(16);
                let plan = Beam::Full.plan(&tables, &topology, &AnalyticCost, batch).unwrap();
                prop_assert!(plan.check(&tables, &topology, batch).is_ok());
            }
        }
    }

    /// Columns cannot be divided, and the ranks of one machine are too small for their part of the rows.
    #[test]
    fn rows_on_one_machine_are_tried() {
        let group =
            |memory_bytes| RankGroup { ranks: 2, memory_bytes: Some(memory_bytes), ..RankGroup::default() };
        let topology = Topology {
            ranks_per_node: 2,
            groups: vec![group(60_000), group(200_000)],
            ..Topology::h100(4, 1).unwrap()
        };
        let tables = [Table::new("t", 10_000, 6)];
        let problem = Problem::new(&tables, &topology, &AnalyticCost, 1).unwrap();
        let found = pack(&problem).unwrap();
        assert_eq!((found.placed[0].0.kind, found.placed[0].1), (Kind::RowsOfNode, 1));
        Beam::Full.plan(&tables, &topology, &AnalyticCost, 4).unwrap();
    }

    /// Three, three, two, two and two twelfths: if the largest table always goes to the rank with the most free
    /// memory, the last table does not fit as a whole.
    #[test]
    fn a_perfect_packing_is_found() {
        let table = |(i, size): (usize, u64)| Table::new(format!("t{i}"), size * 1_000, 2);
        let tables: Vec<Table> = [3, 3, 2, 2, 2].into_iter().enumerate().map(table).collect();
        let all: u64 = tables.iter().map(|table| table.memory_bytes().unwrap()).sum();
        let topology = Topology { memory_bytes: all / 2 + 2_000, ..Topology::h100(2, 1 << 30).unwrap() };
        let problem = Problem::new(&tables, &topology, &AnalyticCost, 1).unwrap();
        let placement = pack(&problem).unwrap();
        assert_eq!(placement.placed.len(), 5);
        Beam::Full.plan(&tables, &topology, &AnalyticCost, 2).unwrap();
    }
}
