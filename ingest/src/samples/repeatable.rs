//! Detects queries that may return different rows each time they are evaluated.
//!
//! A query is evaluated several times: for the sessions, for the samples, and when a dataset is compared with its
//! logs. If the rows differ between evaluations, they get wrong sessions, and the dataset cannot be reproduced.

use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::logical_expr::{Distinct, Expr, LogicalPlan, Volatility};

use crate::config::RESERVED;
use crate::error::MessageAndHint;

/// Functions whose result depends on the time of the call.
const OF_NOW: [&str; 3] = ["now", "current_date", "current_time"];
/// Functions whose result depends on the order of the rows.
const OF_ORDER: [&str; 9] = [
    "row_number",
    "ntile",
    "lag",
    "lead",
    "first_value",
    "last_value",
    "nth_value",
    "array_agg",
    "string_agg",
];

/// Returns why a query may return different rows each time, and a hint; `None` if no part of the query is known to
/// vary.
pub(super) fn why_plan_varies(plan: &LogicalPlan) -> Result<Option<MessageAndHint>> {
    let mut found = None;
    plan.apply_with_subqueries(|node| {
        found = of_node(node);
        if found.is_none() {
            node.apply_expressions(|expression| {
                found = why_varies(expression)?;
                Ok(if found.is_some() { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
            })?;
        }
        Ok(if found.is_some() { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// Returns why an expression may have a different value each time, and a hint.
pub(super) fn why_varies(expression: &Expr) -> Result<Option<MessageAndHint>> {
    let mut found = None;
    expression.apply(|part| {
        found = of_part(part);
        Ok(if found.is_some() { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

fn of_node(node: &LogicalPlan) -> Option<MessageAndHint> {
    match node {
        LogicalPlan::Limit(limit) if !is_ordered(&limit.input) => Some((
            "`LIMIT` without `ORDER BY` takes other rows each time".to_owned(),
            "add an `ORDER BY` of columns that tell all rows apart, or choose rows by a condition, as \
             `WHERE hash_id(request) % 100 < 10`"
                .to_owned(),
        )),
        LogicalPlan::Distinct(Distinct::On(distinct)) if distinct.sort_expr.is_none() => Some((
            "`DISTINCT ON` without `ORDER BY` takes other rows each time".to_owned(),
            "add an `ORDER BY` that begins with its columns and tells all rows apart".to_owned(),
        )),
        _ => None,
    }
}

/// Whether the query defines the order of the rows of a plan.
fn is_ordered(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Sort(_) => true,
        LogicalPlan::Projection(projection) => is_ordered(&projection.input),
        LogicalPlan::SubqueryAlias(alias) => is_ordered(&alias.input),
        LogicalPlan::Limit(limit) => is_ordered(&limit.input),
        // The result has only one row.
        LogicalPlan::Aggregate(aggregate) => aggregate.group_expr.is_empty(),
        LogicalPlan::EmptyRelation(_) => true,
        _ => false,
    }
}

fn of_part(part: &Expr) -> Option<MessageAndHint> {
    match part {
        Expr::ScalarFunction(call) => {
            let name = call.func.name();
            if OF_NOW.contains(&name) {
                return Some((
                    format!("`{name}()` is another time each time"),
                    "write the time, as `TIMESTAMP '2024-06-01T12:00:00'`; `[checks].not_after` leaves out later samples"
                        .to_owned(),
                ));
            }
            let varies =
                call.func.signature().volatility == Volatility::Volatile && !name.starts_with(RESERVED);
            varies.then(|| {
                let hint = "take a part of the samples with `[sampling]`, or by the hash of a column, as `WHERE \
                            hash_id(request) % 100 < 10`";
                (format!("`{name}()` is another value each time"), hint.to_owned())
            })
        }
        Expr::WindowFunction(window) if window.params.order_by.is_empty() => {
            of_order(window.fun.name(), "(…) OVER (ORDER BY …)")
        }
        Expr::AggregateFunction(call) if call.params.order_by.is_empty() => {
            of_order(call.func.name(), "(… ORDER BY …)")
        }
        _ => None,
    }
}

fn of_order(function: &str, ordered: &str) -> Option<MessageAndHint> {
    OF_ORDER.contains(&function).then(|| {
        let hint = format!(
            "state the order: `{function}{ordered}`, with columns that tell all rows apart; where the log has none, \
             `row_number = \"n\"` under `[sources]` numbers the rows of each file"
        );
        (format!("`{function}` without `ORDER BY` depends on the order of rows, which is another one each time"), hint)
    })
}

#[cfg(test)]
mod tests {
    use datafusion::prelude::SessionContext;
    use onefold_sql::Query as _;

    use super::*;

    /// Returns the message about a query over a table `t` with the columns `a` and `b`.
    fn message(sql: &str) -> Option<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let context = SessionContext::new();
            let rows = context.query("SELECT * FROM (VALUES (1, 2)) v(a, b)").await.unwrap();
            context.register_table("t", rows.into_view()).unwrap();
            let planned = context.query(sql).await.unwrap();
            why_plan_varies(planned.logical_plan()).unwrap().map(|(message, _)| message)
        })
    }

    #[test]
    fn nondeterministic_functions_are_found_anywhere_in_a_query() {
        for (sql, part) in [
            ("SELECT * FROM t WHERE random() < 0.5", "`random()`"),
            ("SELECT *, uuid() AS id FROM t", "`uuid()`"),
            ("SELECT * FROM t WHERE a IN (SELECT b FROM t WHERE random() < 0.5)", "`random()`"),
            ("SELECT * FROM t UNION ALL SELECT * FROM (SELECT * FROM t LIMIT 3)", "`LIMIT`"),
            ("SELECT * FROM t LIMIT 3", "`LIMIT`"),
            ("SELECT * FROM t OFFSET 3", "`LIMIT`"),
            ("SELECT *, row_number() OVER () AS n FROM t", "`row_number`"),
            ("SELECT *, lag(a) OVER (PARTITION BY b) AS n FROM t", "`lag`"),
            ("SELECT a, array_agg(b) AS n FROM t GROUP BY a", "`array_agg`"),
            ("SELECT a, first_value(b) AS n FROM t GROUP BY a", "`first_value`"),
            ("SELECT DISTINCT ON (a) * FROM t", "`DISTINCT ON`"),
            ("SELECT *, now() AS at FROM t", "`now()`"),
            (
                "WITH c AS (SELECT * FROM t WHERE random() < 0.5) SELECT * FROM c JOIN t ON c.a = t.a",
                "`random()`",
            ),
        ] {
            let message = message(sql);
            assert!(message.as_ref().is_some_and(|message| message.contains(part)), "{sql}: {message:?}");
        }
    }

    #[test]
    fn queries_that_state_their_order_are_accepted() {
        for sql in [
            "SELECT * FROM t ORDER BY a, b LIMIT 3",
            "SELECT a FROM (SELECT * FROM t ORDER BY a, b LIMIT 3)",
            "SELECT *, row_number() OVER (PARTITION BY b ORDER BY a) AS n FROM t",
            "SELECT a, array_agg(b ORDER BY b) AS n, count(*), max(b) FROM t GROUP BY a",
            "SELECT *, rank() OVER (PARTITION BY b) AS n, sum(a) OVER () AS s FROM t",
            "SELECT DISTINCT ON (a) * FROM t ORDER BY a, b",
            "SELECT DISTINCT a FROM t",
            "SELECT a, md5('x') FROM t WHERE b % 10 < 3",
        ] {
            assert_eq!(message(sql), None, "{sql}");
        }
    }
}
