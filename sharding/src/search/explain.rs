//! Explains the placement of a table by the cost of the plan if the table was placed elsewhere.

use std::cmp::Reverse;

use onefold_base::units::format_bytes;

use crate::search::placement::{Placement, Ranks};
use crate::search::problem::{Capacity, Kind, Problem, Unit};

/// The number of tables that are explained: the largest and the most expensive ones.
const EXPLAINED: usize = 12;
/// The number of ranks that are tried as another place for a table, the cheapest ones first.
const ALTERNATIVES: usize = 8;

/// Returns a sentence for each large or expensive table, indexed by table. It is `None` for the other tables, and if
/// there is only one rank.
pub(crate) fn reasons(problem: &Problem<'_>, placement: &Placement) -> Vec<Option<String>> {
    let mut ranks = Ranks::of(problem, &placement.units, &placement.places);
    let mut reasons = vec![None; problem.tables.len()];
    if problem.ranks == 1 {
        return reasons;
    }
    for table in chosen(problem) {
        reasons[table] = Some(reason(problem, placement, &mut ranks, table));
    }
    reasons
}

fn chosen(problem: &Problem<'_>) -> Vec<usize> {
    let mut tables: Vec<usize> = (0..problem.tables.len()).collect();
    let whole = |table: &usize| problem.priced(&problem.whole(*table));
    tables.sort_by_key(|table| Reverse(whole(table).bytes));
    let mut chosen: Vec<usize> = tables.iter().take(EXPLAINED).copied().collect();
    tables.sort_by(|a, b| whole(b).ms.total_cmp(&whole(a).ms).then(a.cmp(b)));
    chosen.extend(tables.iter().take(EXPLAINED));
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

fn reason(problem: &Problem<'_>, placement: &Placement, ranks: &mut Ranks, table: usize) -> String {
    let own: Vec<(Unit, u32)> = placement
        .units
        .iter()
        .zip(&placement.places)
        .filter(|(unit, _)| unit.table == table)
        .map(|(unit, place)| (*unit, *place))
        .collect();
    let whole = problem.whole(table);
    let is_whole = own.iter().any(|(unit, _)| *unit == whole);
    let needed = problem.priced(&whole).bytes;
    // A whole table is one shard to request from.
    let others = placement.units.iter().filter(|unit| unit.table != table);
    let capacity = problem.capacity(others.chain([&whole]));
    if !is_whole && needed > capacity.most() {
        return format!(
            "{}: whole it needs {}, a rank has {}",
            how(&own),
            format_bytes(needed),
            format_bytes(capacity.most())
        );
    }
    for (unit, place) in &own {
        ranks.remove(problem, unit, *place);
    }
    let elsewhere = best_elsewhere(problem, ranks, (&whole, capacity), &own);
    for (unit, place) in &own {
        ranks.add(problem, unit, *place);
    }
    let now = placement.cost_ms;
    match elsewhere {
        None if is_whole => {
            format!("{}: no other rank has room for its {}", how(&own), format_bytes(needed))
        }
        None => format!("{}: no rank has room for all {} of it", how(&own), format_bytes(needed)),
        Some((rank, cost)) if cost > now * NOTABLE => {
            let (other, more) = (if is_whole { "on" } else { "whole on" }, 100.0 * (cost / now - 1.0));
            format!("{}: {other} rank {rank} the plan would cost {more:.1} % more ({cost:.4} ms)", how(&own))
        }
        Some((rank, _)) => {
            format!("{}: rank {rank} would do as well, the bottleneck is elsewhere", how(&own))
        }
    }
}

/// The factor above which the cost of a plan differs notably from the cost of another one.
const NOTABLE: f64 = 1.0005;

fn how(own: &[(Unit, u32)]) -> String {
    match own {
        [(unit, place)] => match unit.kind {
            Kind::Columns => format!("whole on rank {place}"),
            Kind::RowsOfNode => format!("rows on every rank of node {place}"),
            Kind::RowsOfAll => "rows on every rank".to_owned(),
            Kind::Copies => "a copy on every rank".to_owned(),
        },
        _ => format!("{} column shards", own.len()),
    }
}

/// Returns the cheapest other rank for the whole table, and the cost of that plan in milliseconds.
fn best_elsewhere(
    problem: &Problem<'_>,
    ranks: &mut Ranks,
    (whole, capacity): (&Unit, Capacity<'_>),
    own: &[(Unit, u32)],
) -> Option<(u32, f64)> {
    let mut places: Vec<u32> = (0..problem.topology.ranks)
        .filter(|place| ranks.have_room(problem, whole, *place, capacity))
        .filter(|place| !own.contains(&(*whole, *place)))
        .collect();
    places.sort_by(|a, b| ranks.compute_ms[*a as usize].total_cmp(&ranks.compute_ms[*b as usize]));
    let mut best: Option<(u32, f64)> = None;
    for place in places.into_iter().take(ALTERNATIVES) {
        ranks.add(problem, whole, place);
        let cost = ranks.most_ms(problem);
        ranks.remove(problem, whole, place);
        if best.is_none_or(|(_, least)| cost < least) {
            best = Some((place, cost));
        }
    }
    best
}
