//! The differences between two plans.

use std::collections::HashMap;

use crate::plan::{Plan, TablePlan};

/// A table that two plans place differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    /// The table's name.
    pub table: String,
    /// The placement in the first plan, such as `table_wise on 3`; `None` if that plan does not have the table.
    pub before: Option<String>,
    /// The placement in the second plan; `None` if that plan does not have the table.
    pub after: Option<String>,
    /// The number of elements of the table that a rank holds in the second plan but not in the first.
    pub moved_elements: u128,
}

/// The differences between two plans.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanDiff {
    /// The costs of the most expensive rank in the first and in the second plan, in milliseconds per step.
    pub max_cost_ms: (f64, f64),
    /// The tables that are placed differently, in the order of the first plan, followed by the tables that only the
    /// second plan has.
    pub changes: Vec<TableChange>,
    /// The number of tables that are placed identically.
    pub unchanged: usize,
}

/// Compares two plans table by table.
pub fn diff(before: &Plan, after: &Plan) -> PlanDiff {
    let others: HashMap<&str, &TablePlan> =
        after.tables.iter().map(|table| (table.name.as_str(), table)).collect();
    let known: HashMap<&str, &TablePlan> =
        before.tables.iter().map(|table| (table.name.as_str(), table)).collect();
    let mut changes = Vec::new();
    let mut unchanged = 0;
    for table in &before.tables {
        match others.get(table.name.as_str()) {
            Some(other) if same(table, other) => unchanged += 1,
            other => changes.push(TableChange {
                table: table.name.clone(),
                before: Some(table.described()),
                after: other.map(|other| other.described()),
                moved_elements: other.map_or(0, |other| moved(Some(table), other)),
            }),
        }
    }
    for table in after.tables.iter().filter(|table| !known.contains_key(table.name.as_str())) {
        changes.push(TableChange {
            table: table.name.clone(),
            before: None,
            after: Some(table.described()),
            moved_elements: moved(None, table),
        });
    }
    PlanDiff { max_cost_ms: (before.max_cost_ms, after.max_cost_ms), changes, unchanged }
}

fn same(a: &TablePlan, b: &TablePlan) -> bool {
    let sorted = |table: &TablePlan| {
        let mut shards = table.shards.clone();
        shards.sort_by_key(|shard| (shard.rank, shard.rows.start, shard.columns.start));
        shards
    };
    (a.rows, a.dim, a.sharding_type) == (b.rows, b.dim, b.sharding_type) && sorted(a) == sorted(b)
}

/// Returns the number of elements that ranks hold in `after` but not in `before`.
pub(crate) fn moved(before: Option<&TablePlan>, after: &TablePlan) -> u128 {
    let overlap = |a: &std::ops::Range<u64>, b: &std::ops::Range<u64>| {
        u128::from(a.end.min(b.end).saturating_sub(a.start.max(b.start)))
    };
    let mut elements = 0;
    for shard in &after.shards {
        elements += u128::from(shard.row_count()) * u128::from(shard.column_count());
        let old = before.iter().flat_map(|table| &table.shards).filter(|old| old.rank == shard.rank);
        for old in old {
            elements -= overlap(&old.rows, &shard.rows) * overlap(&old.columns, &shard.columns);
        }
    }
    elements
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::plan::{Shard, ShardingType};
    use crate::table::Table;
    use crate::topology::Topology;

    fn plan(place: impl Fn(&Table) -> TablePlan, names: &[&str]) -> Plan {
        let tables: Vec<Table> = names.iter().map(|name| Table::new(*name, 10, 8)).collect();
        let placed = tables.iter().map(place).collect();
        let topology = Topology::h100(2, 1 << 30).unwrap();
        Plan::predict("test", &tables, placed, &topology, &AnalyticCost, topology.global_batch_size(4))
            .unwrap()
    }

    #[test]
    fn moved_split_new_and_dropped_tables_are_named() {
        let before = plan(|table| TablePlan::table_wise(table, 0), &["same", "moved", "split", "gone"]);
        let after = plan(
            |table| match table.name.as_str() {
                "same" => TablePlan::table_wise(table, 0),
                "split" => {
                    let shard = |rank, columns| Shard { rank, rows: 0..10, columns };
                    let shards = vec![shard(0, 0..4), shard(1, 4..8)];
                    TablePlan {
                        sharding_type: ShardingType::ColumnWise,
                        shards,
                        ..TablePlan::table_wise(table, 0)
                    }
                }
                _ => TablePlan::table_wise(table, 1),
            },
            &["same", "moved", "split", "new"],
        );
        let found = diff(&before, &after);
        assert_eq!(found.unchanged, 1);
        let change = |table: &str, before: Option<&str>, after: Option<&str>, moved_elements| TableChange {
            table: table.into(),
            before: before.map(str::to_owned),
            after: after.map(str::to_owned),
            moved_elements,
        };
        let whole = Some("table_wise on 0");
        assert_eq!(
            found.changes,
            [
                change("moved", whole, Some("table_wise on 1"), 80),
                change("split", whole, Some("column_wise on 0 (columns 0–3), 1 (columns 4–7)"), 40),
                change("gone", whole, None, 0),
                change("new", None, Some("table_wise on 1"), 80),
            ]
        );
        assert!(diff(&before, &before).changes.is_empty());
    }
}
