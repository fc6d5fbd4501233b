//! TorchRec's default planner as a baseline: its published formulas, proposers and greedy partitioner.

use crate::cost::analytic::AnalyticCost;
use crate::cost::{CostModel, LinkBytes, RankLoad, ShardLoad, Traffic};
use crate::error::{Error, Result};
use crate::plan::{Plan, ShardingType};
use crate::search::Search;
use crate::search::placement::{Placement, Ranks};
use crate::search::problem::{Kind, Placed, Problem, Unit};
use crate::table::Table;
use crate::topology::Topology;

/// The default behaviour of TorchRec's `EmbeddingShardingPlanner`, for GPU memory only (as of commit a48cef7, October
/// 2025):
///
/// - Options of a table: table-wise, row-wise, row-wise on one machine (`table_row_wise`), data-parallel, and
///   column-wise in shards of at least 128 columns. Each option is priced by TorchRec's own formulas, which have no
///   dedupe factor. They also take all rows as equally likely; here a row-wise table is priced by its busiest shard
///   if the distribution is known. These are all options that its enumerator proposes for GPUs without constraints,
///   except for one (`sharding_types` of `BaseEmbeddingSharder`, `_filter_sharding_types` of `EmbeddingEnumerator`;
///   release 1.6.1): `table_column_wise` puts the column shards of a table on one machine at the price of column-wise
///   shards, so it offers no cheaper plan. On a single machine, `table_row_wise` gives the same placement as
///   row-wise, and both are one option here. For CPUs, TorchRec proposes no row-wise sharding; here it is allowed, so
///   that the baseline is not weaker than the original.
/// - Proposals: the greedy proposer begins with the cheapest option of every table (by the sum of its shards, and by
///   the most expensive shard), and then advances the table with the largest shard to its next option. The uniform
///   proposer gives all tables one sharding type.
/// - Partitioner: row-wise and data-parallel tables come first, then tables by descending bytes. Each shard goes to
///   the cheapest rank with enough memory. The plan with the lowest cost of its most expensive rank wins.
///
/// The grid-search proposer is omitted: TorchRec skips it above 10,000 combinations, which seven tables exceed. No
/// memory is reserved for the dense model, unlike in TorchRec, because the memory in a topology excludes it already.
#[derive(Debug, Clone, Copy, Default)]
pub struct TorchrecDefault;

/// The least number of columns of a column shard (`MIN_CW_DIM`).
const MIN_COLUMNS: u64 = 128;
/// The largest number of proposals that are partitioned.
const MAX_PROPOSALS: usize = 2_000;

impl Search for TorchrecDefault {
    fn id(&self) -> &'static str {
        "torchrec_default"
    }

    fn plan(
        &self,
        tables: &[Table],
        topology: &Topology,
        cost_model: &dyn CostModel,
        global_batch_size: u64,
    ) -> Result<Plan> {
        let plain: Vec<Table> = tables.iter().map(Table::without_deduplication).collect();
        let batch_size = topology.samples_per_rank(global_batch_size);
        let problem = Problem::new(&plain, topology, &TorchrecCost, batch_size)?;
        let best = propose(&problem, MAX_PROPOSALS).ok_or_else(|| does_not_fit(&problem))?;
        let placed = problem.table_plans(&best.placed);
        Plan::predict(self.id(), tables, placed, topology, cost_model, global_batch_size)
    }
}

impl TorchrecDefault {
    /// Returns the planner's placement of another problem's tables, with the costs of that problem. At most
    /// `most_proposals` proposals are tried, and no more than in [`plan`](Search::plan). Returns `None` if no
    /// proposal fits into memory.
    pub(crate) fn units(self, problem: &Problem<'_>, most_proposals: usize) -> Option<Placement> {
        let plain: Vec<Table> = problem.tables.iter().map(Table::without_deduplication).collect();
        let own = Problem::new(&plain, problem.topology, &TorchrecCost, problem.batch_size).ok()?;
        let best = propose(&own, most_proposals.min(MAX_PROPOSALS))?;
        Some(Placement::new(problem, best.placed))
    }
}

/// TorchRec's original formulas: the analytic model of this crate, except for the all-reduce of a data-parallel
/// table.
struct TorchrecCost;

impl CostModel for TorchrecCost {
    fn id(&self) -> &str {
        "torchrec"
    }

    fn shard_ms(&self, load: &ShardLoad<'_>) -> Result<f64> {
        AnalyticCost.shard_ms(load)
    }

    fn traffic(&self, load: &ShardLoad<'_>) -> Traffic {
        let topology = load.topology;
        if load.sharding_type != ShardingType::DataParallel || topology.ranks == 1 {
            return load.traffic();
        }
        let rounds = match topology.nodes() {
            1 => 1.0,
            2 => 2.0,
            _ => 4.0,
        };
        let ranks = f64::from(topology.ranks);
        let reduced = load.gradient_bytes() * rounds * (ranks - 1.0) / ranks;
        Traffic { backward: LinkBytes::slowest(topology, reduced), ..Traffic::default() }
    }

    fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology, waits: bool) -> Vec<f64> {
        AnalyticCost.communication_ms(ranks, topology, waits)
    }
}

/// A division of a table.
#[derive(Debug, Clone)]
struct Choice {
    units: Vec<Unit>,
    highest_ms: f64,
    sum_ms: f64,
}

fn propose(problem: &Problem<'_>, most_proposals: usize) -> Option<Placement> {
    let options: Vec<Vec<Choice>> = (0..problem.tables.len()).map(|table| choices(problem, table)).collect();
    let mut best: Option<Placement> = None;
    let mut try_proposal = |chosen: &[usize]| {
        let proposal: Vec<&Choice> =
            options.iter().zip(chosen).map(|(options, chosen)| &options[*chosen]).collect();
        if let Some(placement) = partition(problem, &proposal)
            && best.as_ref().is_none_or(|best| placement.cost_ms < best.cost_ms)
        {
            best = Some(placement);
        }
    };
    let mut left = most_proposals;
    for by_sum in [false, true] {
        greedy_proposals(problem, &options, by_sum, &mut left, &mut try_proposal);
    }
    for kind in [Kind::Columns, Kind::RowsOfAll, Kind::RowsOfNode, Kind::Copies] {
        let of_kind = |options: &Vec<Choice>| options.iter().position(|choice| choice.units[0].kind == kind);
        if let Some(chosen) = options.iter().map(of_kind).collect::<Option<Vec<_>>>() {
            try_proposal(&chosen);
        }
    }
    best
}

/// Advances the table whose largest shard has the most bytes to its next option, until no table has another one.
fn greedy_proposals(
    problem: &Problem<'_>,
    options: &[Vec<Choice>],
    by_sum: bool,
    left: &mut usize,
    try_proposal: &mut impl FnMut(&[usize]),
) {
    let ranked: Vec<Vec<usize>> = options
        .iter()
        .map(|options| {
            let cost = |i: &usize| if by_sum { options[*i].sum_ms } else { options[*i].highest_ms };
            let mut order: Vec<usize> = (0..options.len()).collect();
            order.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
            order
        })
        .collect();
    // Bytes of the largest shard, and of all shards.
    let bytes = |table: usize, choice: usize| -> (u64, u64) {
        let units = &options[table][choice].units;
        let largest = units.iter().map(|unit| problem.priced(unit).bytes).max();
        (largest.unwrap_or(0), total_bytes(problem, units))
    };
    let mut at = vec![0; options.len()];
    while *left > 0 {
        *left -= 1;
        let chosen: Vec<usize> = at.iter().zip(&ranked).map(|(at, order)| order[*at]).collect();
        try_proposal(&chosen);
        let open = (0..options.len()).filter(|table| at[*table] + 1 < ranked[*table].len());
        let Some(table) = open.max_by_key(|table| (bytes(*table, chosen[*table]), std::cmp::Reverse(*table)))
        else {
            break;
        };
        at[table] += 1;
    }
}

fn choices(problem: &Problem<'_>, table: usize) -> Vec<Choice> {
    let whole = problem.whole(table);
    let mut cuts = vec![vec![whole]];
    let narrow =
        std::iter::successors(Some(whole), |unit| unit.half().filter(|half| half.columns >= MIN_COLUMNS))
            .last()
            .unwrap_or(whole);
    if narrow != whole && whole.columns / narrow.columns <= problem.ranks as u64 {
        cuts.push(narrow.repeated((whole.columns / narrow.columns) as usize).collect());
    }
    cuts.extend(problem.forms(table).map(|unit| vec![unit]));
    let choice = |units: Vec<Unit>| {
        let cost = |unit: &Unit| shard_ms(problem, unit, problem.priced(unit).ms);
        let sum = units.iter().map(|unit| cost(unit) * problem.ranks_of(unit, 0).len() as f64).sum::<f64>();
        let highest_ms = units.iter().map(cost).fold(0.0, f64::max);
        Choice { units, highest_ms, sum_ms: sum }
    };
    cuts.into_iter().map(choice).collect()
}

/// Returns the sum of computation and communication of a shard, as TorchRec computes it.
fn shard_ms(problem: &Problem<'_>, unit: &Unit, compute_ms: f64) -> f64 {
    let load = RankLoad { compute_ms, traffic: problem.priced(unit).traffic };
    compute_ms + TorchrecCost.communication_ms(&[load], problem.topology, true)[0]
}

/// Returns the bytes of all shards.
fn total_bytes(problem: &Problem<'_>, units: &[Unit]) -> u64 {
    let of_unit =
        |unit: &Unit| problem.priced(unit).bytes.saturating_mul(problem.ranks_of(unit, 0).len() as u64);
    units.iter().map(of_unit).fold(0, u64::saturating_add)
}

/// Runs TorchRec's `GreedyPerfPartitioner`. Returns `None` if a shard does not fit into memory.
fn partition(problem: &Problem<'_>, proposal: &[&Choice]) -> Option<Placement> {
    let everywhere = |unit: &Unit| matches!(unit.kind, Kind::RowsOfAll | Kind::Copies);
    let mut order: Vec<usize> = (0..proposal.len()).collect();
    order.sort_by_cached_key(|table| {
        let choice = proposal[*table];
        (!everywhere(&choice.units[0]), std::cmp::Reverse(total_bytes(problem, &choice.units)), *table)
    });
    let capacity = problem.capacity(proposal.iter().flat_map(|choice| &choice.units));
    if !capacity.suffices_to_ask() {
        return None;
    }
    let mut costs = vec![0.0; problem.ranks];
    let mut ranks = Ranks::new(problem);
    let mut placed: Vec<Placed> = Vec::new();
    for table in order {
        let first = placed.len();
        for unit in &proposal[table].units {
            let highest =
                |place: u32| problem.ranks_of(unit, place).map(|rank| costs[rank]).fold(0.0, f64::max);
            let has_room = |place: &u32| ranks.have_room(problem, unit, *place, capacity);
            // Two column shards of one table on the same rank would be one wider shard.
            let free = |place: &u32| placed[first..].iter().all(|(_, other)| other != place);
            let open = (0..problem.places(unit)).filter(has_room).filter(free);
            let place = open.min_by(|a, b| highest(*a).total_cmp(&highest(*b)))?;
            let priced = problem.priced(unit);
            let added: Vec<f64> = priced.ms_by_kind.iter().map(|ms| shard_ms(problem, unit, *ms)).collect();
            problem.ranks_of(unit, place).for_each(|rank| costs[rank] += added[problem.kinds[rank]]);
            ranks.add(problem, unit, place);
            placed.push((*unit, place));
        }
    }
    let cost_ms = ranks.most_ms(problem);
    Some(Placement { placed, cost_ms })
}

fn does_not_fit(problem: &Problem<'_>) -> Error {
    let units = problem.whole_tables();
    let capacity = problem.capacity(&units);
    if let Some(error) = problem.topology.cannot_ask(capacity.asking) {
        return error;
    }
    let largest = units.iter().max_by_key(|unit| problem.priced(unit).bytes).unwrap_or(&units[0]);
    problem.does_not_fit(largest, capacity, &vec![0; problem.ranks], true)
}
