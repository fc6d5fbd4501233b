//! Checks of a plan that do not depend on the search that made it: every table occurs once, its shards tile it
//! exactly, and the memory suffices.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use onefold_base::units::{abridged, format_bytes};
use onefold_train_config::check_size;

use crate::TableConfig;
use crate::error::{Error, Result};
use crate::plan::{KIND, Plan, RankPrediction, Shard, ShardingType, TablePlan, no_such_rank};
use crate::prediction::{buffer_bytes, loads_by_rank, memory_bytes};
use crate::table::Table;
use crate::topology::Topology;

/// The tolerance for costs, whose sums may be added in a different order after reading.
const COST_TOLERANCE: f64 = 1e-9;

impl Plan {
    /// Checks that the plan is consistent: its version and topology are valid, no table occurs twice, the shards of
    /// each table tile its rows and columns exactly as its sharding type requires, there is one prediction per rank,
    /// and `max_cost_ms` is the maximum of the predictions.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the first problem found.
    pub fn validate(&self) -> Result<()> {
        if self.format_version != KIND.version {
            let message =
                format!("format version {}, this program reads {}", self.format_version, KIND.version);
            return Err(Error::plan(message));
        }
        self.topology.validate()?;
        let mut names = HashSet::new();
        for table in &self.tables {
            if !names.insert(table.name.as_str()) {
                return Err(Error::plan(format!("table `{}` is listed twice", table.name)));
            }
            check_shards(table, self.topology.ranks)?;
        }
        self.check_predictions()
    }

    /// Checks that the plan places exactly `tables` on `topology`: it is [valid](Self::validate), has each table once
    /// with its rows and dimension, is for the same number of ranks and ranks per machine, and no rank needs more
    /// than its memory in steps of `global_batch_size` samples over all ranks. This batch size may differ from the
    /// plan's own.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the first problem found, or if a table's size in bytes overflows.
    pub fn check(&self, tables: &[Table], topology: &Topology, global_batch_size: u64) -> Result<()> {
        self.validate()?;
        let expected = tables.iter().map(|table| (table.name.as_str(), table.rows, table.dim));
        self.check_tables(expected).map_err(Error::plan)?;
        let shape = |topology: &Topology| (topology.ranks, topology.ranks_per_node);
        if shape(&self.topology) != shape(topology) {
            let (planned, planned_per_node) = shape(&self.topology);
            return Err(Error::plan(format!(
                "it is for {planned} ranks, {planned_per_node} per machine; the topology has {}, {} per machine",
                topology.ranks, topology.ranks_per_node
            )));
        }
        let batch_size = topology.samples_per_rank(global_batch_size);
        let loads = loads_by_rank(tables, &self.tables, topology, batch_size)?;
        let needed = buffer_bytes(&loads);
        let planned = buffer_bytes(&loads_by_rank(tables, &self.tables, topology, self.samples_per_rank())?);
        for (((prediction, loads), needed), planned) in self.ranks.iter().zip(&loads).zip(needed).zip(planned)
        {
            let shards = memory_bytes(loads)?;
            let buffers = needed[0].saturating_add(needed[1]);
            check_memory(prediction.rank, (shards, buffers), topology.memory_of(prediction.rank))?;
            check_figures(prediction, [shards, planned[0], planned[1]])?;
        }
        Ok(())
    }

    /// Checks that the plan is [valid](Self::validate) and has exactly these tables, on any number of ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] that names the tables and the remedy.
    pub fn check_configs(&self, tables: &[TableConfig]) -> Result<()> {
        self.validate()?;
        let expected = tables.iter().map(|table| (table.name.as_str(), table.rows, table.dim));
        let hint = "make a plan for these tables: `onefold-shard tables` with this configuration and dataset, and with \
                    `--warm-start RUN` or `--resume RUN` as the training has them, then `onefold-shard plan` or `replan`";
        self.check_tables(expected)
            .map_err(|message| Error::invalid(format!("the plan is not valid: {message}"), hint))
    }

    /// Checks that the plan has exactly these tables, given as `(name, rows, dim)`. The error is a sentence with the
    /// differences.
    fn check_tables<'a>(&self, expected: impl Iterator<Item = (&'a str, u64, u64)>) -> Result<(), String> {
        let mut planned: HashMap<&str, &TablePlan> =
            self.tables.iter().map(|table| (table.name.as_str(), table)).collect();
        let mut missing = Vec::new();
        let mut faults = Vec::new();
        for (name, rows, dim) in expected {
            match planned.remove(name) {
                None => missing.push(name),
                Some(table) if (table.rows, table.dim) != (rows, dim) => faults.push(format!(
                    "table `{name}` is {} rows × {} columns in the plan and should be {rows} × {dim}",
                    table.rows, table.dim
                )),
                Some(_) => {}
            }
        }
        let extra: Vec<&str> = self
            .tables
            .iter()
            .map(|table| table.name.as_str())
            .filter(|name| planned.contains_key(name))
            .collect();
        faults.extend((!missing.is_empty()).then(|| format!("it lacks {}", listed(&missing))));
        faults.extend(
            (!extra.is_empty()).then(|| format!("it places {}, which should not be there", listed(&extra))),
        );
        if faults.is_empty() { Ok(()) } else { Err(abridged(&faults).join("; ")) }
    }

    fn check_predictions(&self) -> Result<()> {
        if self.ranks.len() != self.topology.ranks as usize {
            let message =
                format!("it has predictions for {} ranks of {}", self.ranks.len(), self.topology.ranks);
            return Err(Error::plan(message));
        }
        for (rank, prediction) in (0..).zip(&self.ranks) {
            if prediction.rank != rank {
                return Err(Error::plan(format!(
                    "the prediction of rank {} is in the place of rank {rank}",
                    prediction.rank
                )));
            }
            for (name, ms) in
                [("compute_ms", prediction.compute_ms), ("communication_ms", prediction.communication_ms)]
            {
                if !ms.is_finite() || ms < 0.0 {
                    return Err(Error::plan(format!("`{name}` of rank {rank} is {ms}")));
                }
            }
        }
        let max = self.ranks.iter().map(RankPrediction::cost_ms).fold(0.0, f64::max);
        if (self.max_cost_ms - max).abs() <= COST_TOLERANCE * max {
            Ok(())
        } else {
            Err(Error::plan(format!(
                "`max_cost_ms` is {}, the most expensive rank costs {max}",
                self.max_cost_ms
            )))
        }
    }
}

fn check_memory(rank: u32, (shards, buffers): (u64, u64), limit: u64) -> Result<()> {
    let total = shards.saturating_add(buffers);
    if total > limit {
        let (has, over) = (format_bytes(limit), format_bytes(total - limit));
        let (shards, buffers) = (format_bytes(shards), format_bytes(buffers));
        return Err(Error::plan(format!(
            "rank {rank} would hold {shards} of tables and {buffers} of buffers and has {has}: {over} too much"
        )));
    }
    Ok(())
}

/// Checks that the plan's memory figures for a rank equal the bytes that its shards and their buffers need for the
/// plan's batch size.
fn check_figures(prediction: &RankPrediction, needed: [u64; 3]) -> Result<()> {
    let RankPrediction { rank, memory_bytes, buffer_bytes, reserve_bytes, .. } = *prediction;
    let said = [memory_bytes, buffer_bytes, reserve_bytes];
    let names = ["memory_bytes", "buffer_bytes", "reserve_bytes"];
    match (0..said.len()).find(|i| said[*i] != needed[*i]) {
        None => Ok(()),
        Some(i) => Err(Error::plan(format!(
            "`{}` of rank {rank} is {}, its shards need {}",
            names[i], said[i], needed[i]
        ))),
    }
}

/// Checks that the shards of a table fit its sharding type and tile the table exactly.
fn check_shards(table: &TablePlan, ranks: u32) -> Result<()> {
    let wrong = |message: String| Err(Error::plan(message));
    let name = &table.name;
    if let Err(message) = check_size(table.rows, table.dim) {
        return wrong(format!("table `{name}`: {message}"));
    }
    for shard in &table.shards {
        if shard.rank >= ranks {
            return Err(no_such_rank(name, shard.rank, ranks));
        }
        check_bounds(name, "rows", &shard.rows, table.rows)?;
        check_bounds(name, "columns", &shard.columns, table.dim)?;
    }
    let (all_rows, all_columns) = (0..table.rows, 0..table.dim);
    let kind = table.sharding_type.name();
    let keeps_rows = table.sharding_type != ShardingType::RowWise;
    let keeps_columns = table.sharding_type != ShardingType::ColumnWise;
    for Shard { rank, rows, columns } in &table.shards {
        if (keeps_rows && *rows != all_rows) || (keeps_columns && *columns != all_columns) {
            let part = format!("rows {rows:?}, columns {columns:?} of {all_rows:?}, {all_columns:?}");
            return wrong(format!("the {kind} table `{name}` has a shard of {part} on rank {rank}"));
        }
    }
    match table.sharding_type {
        ShardingType::TableWise if table.shards.len() == 1 => Ok(()),
        ShardingType::TableWise => {
            wrong(format!("the {kind} table `{name}` has {} shards instead of one", table.shards.len()))
        }
        ShardingType::ColumnWise => check_tiling(table, "columns", table.dim, |shard| &shard.columns),
        ShardingType::RowWise => check_tiling(table, "rows", table.rows, |shard| &shard.rows),
        ShardingType::DataParallel => check_copies(table, ranks),
    }
}

fn check_bounds(table: &str, axis: &str, range: &Range<u64>, extent: u64) -> Result<()> {
    if range.start < range.end && range.end <= extent {
        return Ok(());
    }
    Err(Error::plan(format!(
        "a shard of table `{table}` has {axis} {range:?}, the table has {axis} 0..{extent}"
    )))
}

/// Checks that ranges within `0..extent` cover it without a gap or an overlap.
fn check_tiling(
    table: &TablePlan,
    axis: &str,
    extent: u64,
    range: impl Fn(&Shard) -> &Range<u64>,
) -> Result<()> {
    let name = &table.name;
    let mut shards: Vec<&Shard> = table.shards.iter().collect();
    shards.sort_by_key(|shard| range(shard).start);
    let mut covered = 0;
    let mut before = None;
    for shard in shards {
        let range = range(shard);
        if range.start > covered {
            return Err(Error::plan(format!(
                "{axis} {covered}..{} of table `{name}` are in no shard",
                range.start
            )));
        }
        if let Some(other) = before.filter(|_| range.start < covered) {
            let twice = range.start..covered.min(range.end);
            let rank = shard.rank;
            return Err(Error::plan(format!(
                "{axis} {twice:?} of table `{name}` are in two shards, on ranks {other} and {rank}"
            )));
        }
        covered = range.end;
        before = Some(shard.rank);
    }
    if covered < extent {
        return Err(Error::plan(format!("{axis} {covered}..{extent} of table `{name}` are in no shard")));
    }
    Ok(())
}

/// Checks that every rank has exactly one copy.
fn check_copies(table: &TablePlan, ranks: u32) -> Result<()> {
    let mut holders = HashSet::new();
    for shard in &table.shards {
        if !holders.insert(shard.rank) {
            return Err(Error::plan(format!(
                "the data_parallel table `{}` has two copies on rank {}",
                table.name, shard.rank
            )));
        }
    }
    match (0..ranks).find(|rank| !holders.contains(rank)) {
        None => Ok(()),
        Some(rank) => {
            Err(Error::plan(format!("the data_parallel table `{}` has no copy on rank {rank}", table.name)))
        }
    }
}

/// Lists names: ``table `a` ``, or ``tables `a`, `b` ``.
fn listed(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    format!("{} {}", if names.len() == 1 { "table" } else { "tables" }, abridged(&quoted).join(", "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::search::Search;
    use crate::search::greedy::Greedy;

    fn tables() -> Vec<Table> {
        vec![Table::new("user", 40, 8), Table::new("item", 30, 8), Table::new("city", 20, 8)]
    }

    fn topology(ranks: u32) -> Topology {
        Topology::h100(ranks, 1 << 20).unwrap()
    }

    fn plan(ranks: u32) -> Plan {
        Greedy::BySize
            .plan(&tables(), &topology(ranks), &AnalyticCost, topology(ranks).global_batch_size(16))
            .unwrap()
    }

    /// Returns the error for a plan for two ranks after `change`.
    fn fault(change: impl FnOnce(&mut Plan)) -> String {
        let mut plan = plan(2);
        change(&mut plan);
        plan.check(&tables(), &topology(2), plan.global_batch_size).unwrap_err().to_string()
    }

    #[track_caller]
    fn assert_fault(fault: String, expected: &str) {
        let expected = format!(
            "the plan is not valid: {expected}\n  hint: make the plan again with `onefold-shard plan`"
        );
        assert_eq!(fault, expected);
    }

    #[test]
    fn tables_must_be_there_exactly_once() {
        assert_fault(fault(|plan| drop(plan.tables.remove(1))), "it lacks table `item`");
        assert_fault(fault(|plan| plan.tables.clear()), "it lacks tables `user`, `item`, `city`");
        assert_fault(fault(|plan| plan.tables.push(plan.tables[0].clone())), "table `user` is listed twice");
        let extra = |plan: &mut Plan| plan.tables.push(TablePlan::table_wise(&Table::new("age", 3, 8), 0));
        assert_fault(fault(extra), "it places table `age`, which should not be there");
        let resized = |plan: &mut Plan| plan.tables[2] = TablePlan::table_wise(&Table::new("city", 20, 4), 0);
        assert_fault(fault(resized), "table `city` is 20 rows × 4 columns in the plan and should be 20 × 8");
    }

    #[test]
    fn shards_must_be_what_their_type_says() {
        let shard = |change: fn(&mut Shard)| fault(move |plan| change(&mut plan.tables[0].shards[0]));
        assert_fault(
            shard(|shard| shard.rank = 2),
            "table `user` has a shard on rank 2, the topology has ranks 0 to 1",
        );
        assert_fault(
            shard(|shard| shard.rows.end = 41),
            "a shard of table `user` has rows 0..41, the table has rows 0..40",
        );
        assert_fault(
            shard(|shard| shard.columns.end = 0),
            "a shard of table `user` has columns 0..0, the table has columns 0..8",
        );
        assert_fault(
            shard(|shard| shard.rows.start = 1),
            "the table_wise table `user` has a shard of rows 1..40, columns 0..8 of 0..40, 0..8 on rank 0",
        );
        let twice = |plan: &mut Plan| {
            let shard = plan.tables[0].shards[0].clone();
            plan.tables[0].shards.push(shard);
        };
        assert_fault(fault(twice), "the table_wise table `user` has 2 shards instead of one");
        assert_fault(
            fault(|plan| plan.tables[0].shards.clear()),
            "the table_wise table `user` has 0 shards instead of one",
        );
    }

    /// Returns the error for a plan for two ranks in which the table `user` has these column shards, on rank 0 and 1
    /// alternately.
    fn column_fault(columns: &[Range<u64>]) -> String {
        fault(|plan| {
            let shard = |(i, columns): (usize, &Range<u64>)| Shard {
                rank: i as u32 % 2,
                rows: 0..40,
                columns: columns.clone(),
            };
            plan.tables[0].sharding_type = ShardingType::ColumnWise;
            plan.tables[0].shards = columns.iter().enumerate().map(shard).collect();
        })
    }

    #[test]
    fn gaps_and_overlaps_are_named() {
        assert_fault(column_fault(&[0..4, 5..8]), "columns 4..5 of table `user` are in no shard");
        assert_fault(column_fault(&[4..6, 6..8]), "columns 0..4 of table `user` are in no shard");
        assert_fault(column_fault(&[0..2, 2..4]), "columns 4..8 of table `user` are in no shard");
        assert_fault(
            column_fault(&[0..5, 4..8]),
            "columns 4..5 of table `user` are in two shards, on ranks 0 and 1",
        );
        assert_fault(
            column_fault(&[0..8, 2..3]),
            "columns 2..3 of table `user` are in two shards, on ranks 0 and 1",
        );
        let rows = |plan: &mut Plan| {
            plan.tables[0].sharding_type = ShardingType::RowWise;
            plan.tables[0].shards = vec![Shard { rank: 0, rows: 0..39, columns: 0..8 }];
        };
        assert_fault(fault(rows), "rows 39..40 of table `user` are in no shard");
    }

    #[test]
    fn data_parallel_tables_have_a_copy_on_every_rank() {
        let copies = |ranks: &'static [u32]| {
            move |plan: &mut Plan| {
                let shard = |rank: &u32| Shard { rank: *rank, rows: 0..40, columns: 0..8 };
                plan.tables[0].sharding_type = ShardingType::DataParallel;
                plan.tables[0].shards = ranks.iter().map(shard).collect();
            }
        };
        assert_fault(fault(copies(&[0])), "the data_parallel table `user` has no copy on rank 1");
        assert_fault(fault(copies(&[0, 0])), "the data_parallel table `user` has two copies on rank 0");
        // With both copies, only the predicted bytes are wrong.
        assert_fault(fault(copies(&[1, 0])), "`buffer_bytes` of rank 0 is 3840, its shards need 4240");
    }

    #[test]
    fn predictions_must_be_of_these_ranks() {
        assert_fault(fault(|plan| plan.ranks.truncate(1)), "it has predictions for 1 ranks of 2");
        assert_fault(
            fault(|plan| plan.ranks.swap(0, 1)),
            "the prediction of rank 1 is in the place of rank 0",
        );
        assert_fault(fault(|plan| plan.ranks[1].compute_ms = f64::NAN), "`compute_ms` of rank 1 is NaN");
        assert!(fault(|plan| plan.max_cost_ms *= 1.01).contains("`max_cost_ms` is"));
        assert!(fault(|plan| plan.max_cost_ms = f64::NAN).contains("`max_cost_ms` is NaN"));
        assert_fault(
            fault(|plan| plan.ranks[0].memory_bytes += 1),
            "`memory_bytes` of rank 0 is 1441, its shards need 1440",
        );
    }

    #[test]
    fn a_plan_is_checked_against_the_given_topology() {
        let error = plan(2)
            .check(&tables(), &topology(4), topology(2).global_batch_size(16))
            .unwrap_err()
            .to_string();
        assert_fault(error, "it is for 2 ranks, 2 per machine; the topology has 4, 4 per machine");
        let smaller = Topology::h100(2, 1500).unwrap();
        let error =
            plan(2).check(&tables(), &smaller, topology(2).global_batch_size(16)).unwrap_err().to_string();
        assert_fault(
            error,
            "rank 0 would hold 1.4 KiB of tables and 3.8 KiB of buffers and has 1.5 KiB: 3.7 KiB too much",
        );
    }

    fn configs() -> Vec<TableConfig> {
        let config = |Table { name, rows, dim, dtype, .. }| TableConfig { name, rows, dim, dtype };
        tables().into_iter().map(config).collect()
    }

    #[test]
    fn a_plan_for_other_tables_is_refused() {
        assert!(plan(1).check_configs(&configs()).is_ok());
        let mut others = configs();
        others[0].rows = 41;
        others[1].name = "brand".into();
        assert_eq!(
            plan(1).check_configs(&others).unwrap_err().to_string(),
            "the plan is not valid: table `user` is 40 rows × 8 columns in the plan and should be 41 × 8; \
             it lacks table `brand`; it places table `item`, which should not be there\n  hint: make a plan for these \
             tables: `onefold-shard tables` with this configuration and dataset, and with `--warm-start RUN` or `--resume RUN` as \
             the training has them, then `onefold-shard plan` or `replan`"
        );
    }

    proptest! {
        /// The tiling check agrees with counting the shards over every column.
        #[test]
        fn tiling_agrees_with_counting(cuts in prop::collection::vec((0u64..9, 0u64..9), 0..6)) {
            let shards: Vec<Shard> = cuts.iter().map(|(a, b)| Shard { rank: 0, rows: 0..3, columns: *a..*b }).collect();
            let sound = cuts.iter().all(|(a, b)| a < b && *b <= 8);
            let once = (0..8).all(|column| shards.iter().filter(|shard| shard.columns.contains(&column)).count() == 1);
            let sharding_type = ShardingType::ColumnWise;
            let table = TablePlan { name: "t".into(), torchrec_name: None, rows: 3, dim: 8, sharding_type, shards, reason: None };
            prop_assert_eq!(check_shards(&table, 1).is_ok(), sound && once);
        }

        /// A partition of the rows at any cuts is valid, and moving one bound of one shard makes it invalid.
        #[test]
        fn a_moved_bound_is_detected(
            cuts in prop::collection::btree_set(1u64..40, 0..6),
            pick in any::<prop::sample::Index>(),
            end in any::<bool>(),
            shift in prop_oneof![-3i64..0, 1i64..4],
        ) {
            let bounds: Vec<u64> = [0].into_iter().chain(cuts).chain([40]).collect();
            let shards = bounds.windows(2).map(|pair| Shard { rank: 0, rows: pair[0]..pair[1], columns: 0..8 }).collect();
            let sharding_type = ShardingType::RowWise;
            let mut table = TablePlan { name: "t".into(), torchrec_name: None, rows: 40, dim: 8, sharding_type, shards, reason: None };
            prop_assert!(check_shards(&table, 1).is_ok());
            let shard = pick.index(table.shards.len());
            let rows = &mut table.shards[shard].rows;
            let bound = if end { &mut rows.end } else { &mut rows.start };
            *bound = bound.wrapping_add_signed(shift);
            prop_assert!(check_shards(&table, 1).is_err());
        }
    }
}
