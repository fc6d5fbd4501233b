//! The SQL around the user's query: which session a sample belongs to, and the order of the samples.
//!
//! A session is identified by the partition columns, the session columns (the key, or the user) and its
//! **start**, the time of its first sample. With a gap, a session begins wherever the user paused for longer
//! (the usual gaps-and-islands query: mark the pauses, sum the marks). Samples of one instant are always in
//! one session, so the result does not depend on how ties were ordered.
//!
//! All of that is found from the session columns and the time alone, in a narrow table that is then joined to the
//! samples. The lists pass through one sort, the last; a window over the samples would be a second one. The user's
//! query is therefore evaluated twice (the first time for the narrow columns only) and must give the same rows.

use std::collections::BTreeSet;

use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema, TimeUnit};
use onefold_datasets::Order;

use crate::config::{SessionConfig, missing_column};
use crate::{Config, Error, PartitionBy, Result};

/// The view that holds the user's query.
pub const SAMPLES_VIEW: &str = "__onefold_samples";
/// A sample's time in microseconds since 1970.
pub const TIME: &str = "__onefold_time";
/// The time of the first sample of a sample's session, likewise.
pub const START: &str = "__onefold_start";
/// Number of a sample's session within its partition, from 0 by start.
pub const SESSION: &str = "__onefold_session";

/// The query that gives the samples of `config` in `order`, with [`TIME`], [`START`] and [`SESSION`] beside the columns
/// that the dataset needs. `columns` are those of the user's query.
///
/// # Errors
///
/// [`Error::Config`] if the configuration names a column that the query does not give; [`Error::Column`] if
/// the time is neither a timestamp nor an integer, or a session or partition column is a list.
pub fn ordered_samples(config: &Config, columns: &ArrowSchema, order: Order) -> Result<String> {
    check_names(config, columns)?;
    check_comparable(config, columns)?;
    let time = time_in_micros(config, columns)?;
    let samples = format!(
        "SELECT {}, {time} AS {TIME} FROM {SAMPLES_VIEW}",
        quoted(&needed_columns(config)).join(", ")
    );
    let mut on = identity(config);
    if matches!(config.session, SessionConfig::Gap { .. }) {
        on.push(TIME.to_owned());
    }
    let equal: Vec<String> = on.iter().map(|column| format!("n.{column} = s.{column}")).collect();
    let joined = format!(
        "SELECT s.*, n.{START}, n.{SESSION} FROM ({}) n RIGHT JOIN ({samples}) s ON {}",
        numbered_sessions(config, &time),
        equal.join(" AND ")
    );
    let bucket = config.partition_by.map(start_of_bucket);
    let place = [quoted(&config.partition_columns), bucket.into_iter().collect()].concat();
    let within = match order {
        Order::Session => vec![SESSION.to_owned(), TIME.to_owned()],
        Order::Arrival => vec![TIME.to_owned()],
    };
    let keys = [place, within, quoted(&config.order), scalar_columns(config, columns)].concat();
    Ok(format!("SELECT * FROM ({joined}) ORDER BY {}", first_of_each(keys).join(", ")))
}

/// The narrow table of sessions: identity, start and number; with a gap one row for every instant of a user.
fn numbered_sessions(config: &Config, time: &str) -> String {
    let identity = identity(config);
    let by = identity.join(", ");
    let narrow = format!("SELECT {by}, {time} AS {TIME} FROM {SAMPLES_VIEW}");
    let starts = match &config.session {
        SessionConfig::Key(_) => format!("SELECT {by}, min({TIME}) AS {START} FROM ({narrow}) GROUP BY {by}"),
        SessionConfig::Gap { gap_micros, .. } => {
            let over = format!("OVER (PARTITION BY {by} ORDER BY {TIME}");
            let pause = format!("CASE WHEN {TIME} - lag({TIME}) {over}) > {gap_micros} THEN 1 ELSE 0 END");
            let marked = format!("SELECT *, {pause} AS pause FROM (SELECT DISTINCT * FROM ({narrow}))");
            let summed =
                format!("SELECT *, sum(pause) {over} ROWS UNBOUNDED PRECEDING) AS pauses FROM ({marked})");
            format!("SELECT *, min({TIME}) OVER (PARTITION BY {by}, pauses) AS {START} FROM ({summed})")
        }
    };
    let place =
        [quoted(&config.partition_columns), config.partition_by.map(start_of_bucket).into_iter().collect()]
            .concat();
    let within = if place.is_empty() { String::new() } else { format!("PARTITION BY {} ", place.join(", ")) };
    format!(
        "SELECT *, CAST(dense_rank() OVER ({within}ORDER BY {START}, {by}) AS BIGINT) - 1 AS {SESSION} FROM ({starts})"
    )
}

/// The columns that identify a session, apart from its start.
fn identity(config: &Config) -> Vec<String> {
    first_of_each([quoted(&config.partition_columns), quoted(&config.session_columns())].concat())
}

/// Lists cannot be compared as keys.
fn check_comparable(config: &Config, columns: &ArrowSchema) -> Result<()> {
    let names = config.partition_columns.iter().map(String::as_str).chain(config.session_columns());
    for name in names {
        if let Some(data_type) =
            columns.field_with_name(name).ok().map(|field| field.data_type()).filter(|t| t.is_nested())
        {
            return Err(Error::Column {
                column: name.to_owned(),
                message: format!("a session or partition column cannot be a {data_type}"),
                hint: "use a column of numbers, text or times".to_owned(),
            });
        }
    }
    Ok(())
}

/// Every column that configuration names must be one of the query.
fn check_names(config: &Config, columns: &ArrowSchema) -> Result<()> {
    let known: Vec<&str> = columns.fields().iter().map(|field| field.name().as_str()).collect();
    let features = config.feature_columns().map(|(name, _)| ("`[features]`", name));
    let session = config.session_columns().into_iter().map(|name| ("`[session]`", name));
    let order = config.order.iter().map(|name| ("`[session].order`", name.as_str()));
    let partition = config.partition_columns.iter().map(|name| ("`[partition].columns`", name.as_str()));
    let time = [("`[session].time`", config.time.as_str())];
    for (place, name) in features.chain(session).chain(order).chain(partition).chain(time) {
        if !known.contains(&name) {
            return Err(missing_column(config, place, name, &known));
        }
    }
    Ok(())
}

/// The columns of the user's query that the dataset is made from, each once.
fn needed_columns(config: &Config) -> Vec<String> {
    let features = config.feature_columns().map(|(name, _)| name.to_owned());
    let session = config.session_columns().into_iter().map(str::to_owned);
    let rest = config.partition_columns.iter().chain(&config.order).cloned();
    first_of_each(features.chain(session).chain(rest).collect())
}

/// Columns that break the ties that are left after `[session].order`: every scalar one, so that equal input
/// gives equal bytes. Lists are left out, because sorting by them would copy them.
fn scalar_columns(config: &Config, columns: &ArrowSchema) -> Vec<String> {
    let is_scalar =
        |name: &String| columns.field_with_name(name).is_ok_and(|field| !field.data_type().is_nested());
    quoted(&needed_columns(config).into_iter().filter(is_scalar).collect::<Vec<_>>())
}

fn time_in_micros(config: &Config, columns: &ArrowSchema) -> Result<String> {
    let data_type = columns.field_with_name(&config.time).map(|field| field.data_type().clone());
    let column = quote(&config.time);
    match data_type {
        Ok(DataType::Timestamp(unit, _)) => Ok(match unit {
            TimeUnit::Second => format!("CAST({column} AS BIGINT) * 1000000"),
            TimeUnit::Millisecond => format!("CAST({column} AS BIGINT) * 1000"),
            TimeUnit::Microsecond => format!("CAST({column} AS BIGINT)"),
            TimeUnit::Nanosecond => format!("CAST({column} AS BIGINT) / 1000"),
        }),
        Ok(other) if other.is_integer() => Ok(format!("CAST({column} AS BIGINT)")),
        other => Err(Error::Column {
            column: config.time.clone(),
            message: format!(
                "`[session].time` must be a timestamp or an integer of microseconds, but the column is {}",
                other.map_or_else(|_| "missing".to_owned(), |data_type| data_type.to_string())
            ),
            hint: "convert it in the query, for example with `to_timestamp(…)`".to_owned(),
        }),
    }
}

/// The start of the day or hour in which the session starts; a remainder that is never negative.
fn start_of_bucket(by: PartitionBy) -> String {
    let width = bucket_micros(by);
    format!("({START} - (({START} % {width} + {width}) % {width}))")
}

/// The length of a partition in time.
pub(crate) fn bucket_micros(by: PartitionBy) -> i64 {
    match by {
        PartitionBy::Day => 86_400_000_000,
        PartitionBy::Hour => 3_600_000_000,
    }
}

fn first_of_each(columns: Vec<String>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    columns.into_iter().filter(|column| seen.insert(column.clone())).collect()
}

fn quoted(columns: &[impl AsRef<str>]) -> Vec<String> {
    columns.iter().map(|column| quote(column.as_ref())).collect()
}

fn quote(column: &str) -> String {
    format!("\"{}\"", column.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use datafusion::arrow::util::pretty::pretty_format_batches;
    use datafusion::prelude::SessionContext;

    use super::*;

    /// The ordered samples of rows `(user, seconds, item)` under a `[session]` section, as a text table of item,
    /// session number and start in seconds.
    fn ordered(rows: &str, session: &str, order: Order) -> String {
        let text = format!(
            "format_version = 1\n[sources]\nlog = \"x\"\n[samples]\nquery = \"\"\n[session]\ntime = \"time\"\n{session}\n\
             [features]\nitem = {{ kind = \"label\" }}\nx = {{ kind = \"dense\" }}\n"
        );
        let config = Config::parse(Path::new("dataset.toml"), &text).unwrap();
        let context = SessionContext::new();
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        runtime.block_on(async {
            let view = format!(
                "CREATE VIEW {SAMPLES_VIEW} AS SELECT column1 AS user, column2 * 1000000 AS time, column3 AS item, \
                 0.5 AS x FROM (VALUES {rows})"
            );
            context.sql(&view).await.unwrap();
            let columns = context.table(SAMPLES_VIEW).await.unwrap().schema().as_arrow().clone();
            let sql = ordered_samples(&config, &columns, order).unwrap();
            let start = format!("{START} / 1000000 AS start");
            let shown = ["item", &format!("{SESSION} AS session"), &start];
            let samples = context.sql(&sql).await.unwrap().select_exprs(&shown).unwrap();
            let batches = samples.collect().await.unwrap();
            pretty_format_batches(&batches).unwrap().to_string()
        })
    }

    const LOG: &str =
        "('b', 5, 1), ('a', 0, 2), ('a', 90, 3), ('a', 30, 4), ('b', 5, 5), ('a', 61, 6), ('a', 200, 7)";

    #[test]
    fn a_pause_beyond_the_gap_begins_a_session() {
        // User a: 0 and 30 are 30 s apart, which is no more than the gap; 61 is 31 s after 30, 90 is 29 s after 61.
        let table = ordered(LOG, "user = \"user\"\ngap = \"30s\"", Order::Session);
        let expected = "\
+------+---------+-------+
| item | session | start |
+------+---------+-------+
| 2    | 0       | 0     |
| 4    | 0       | 0     |
| 1    | 1       | 5     |
| 5    | 1       | 5     |
| 6    | 2       | 61    |
| 3    | 2       | 61    |
| 7    | 3       | 200   |
+------+---------+-------+";
        assert_eq!(table, expected);
    }

    #[test]
    fn arrival_order_keeps_the_sessions_numbers() {
        let table = ordered(LOG, "key = [\"user\"]", Order::Arrival);
        let expected = "\
+------+---------+-------+
| item | session | start |
+------+---------+-------+
| 2    | 0       | 0     |
| 1    | 1       | 5     |
| 5    | 1       | 5     |
| 4    | 0       | 0     |
| 6    | 0       | 0     |
| 3    | 0       | 0     |
| 7    | 0       | 0     |
+------+---------+-------+";
        assert_eq!(table, expected);
    }
}
