//! Explains the placement of a table by the cost of the plan if the table was placed elsewhere.

use std::cmp::Reverse;

use onefold_base::units::format_bytes;
use rayon::prelude::*;

use crate::plan::Plan;
use crate::search::local::cheapest_with;
use crate::search::placement::Placement;
use crate::search::problem::{Kind, Placed, Problem, units_of};

/// The number of tables that are explained: the largest and the most expensive ones.
const EXPLAINED: usize = 12;

/// Returns the plan of a placement with a sentence for each large or expensive table, if there are several ranks.
pub(crate) fn explained(problem: &Problem<'_>, placement: &Placement, mut plan: Plan) -> Plan {
    if problem.ranks > 1 {
        let tables = chosen(problem);
        let reasons: Vec<String> =
            tables.par_iter().map(|table| reason(problem, placement, *table)).collect();
        for (table, reason) in tables.into_iter().zip(reasons) {
            plan.tables[table].reason = Some(reason);
        }
    }
    plan
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

fn reason(problem: &Problem<'_>, placement: &Placement, table: usize) -> String {
    let placed = placement.placed.iter().copied();
    let (own, others): (Vec<Placed>, Vec<Placed>) = placed.partition(|(unit, _)| unit.table == table);
    let whole = problem.whole(table);
    let is_whole = own.iter().any(|(unit, _)| *unit == whole);
    let needed = problem.priced(&whole).bytes;
    // A whole table is one shard to request from.
    let most = problem.capacity(units_of(&others).chain([&whole])).most();
    if !is_whole && needed > most {
        let (needed, most) = (format_bytes(needed), format_bytes(most));
        return format!("{}: whole it needs {needed}, a rank has {most}", how(&own));
    }
    let is_elsewhere = |placed: &[Placed]| placed.last().is_some_and(|whole| !own.contains(whole));
    let elsewhere = cheapest_with(problem, &[whole], &others, f64::INFINITY, &is_elsewhere);
    let elsewhere = elsewhere.and_then(|other| Some((other.placed.last()?.1, other.cost_ms)));
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

fn how(own: &[Placed]) -> String {
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
