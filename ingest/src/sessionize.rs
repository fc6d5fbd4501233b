//! The SQL around the user's query: which session a sample belongs to, and the order of the samples.
//!
//! A session is identified by the partition columns, the session columns (the key, or the user) and its
//! **start**, the time of its first sample. With a gap, a session begins wherever the user paused for longer
//! (the usual gaps-and-islands query: mark the pauses, sum the marks). Samples of one instant are always in
//! one session, so the result does not depend on how ties were ordered.

use std::collections::BTreeSet;

use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema, TimeUnit};
use onefold_datasets::Order;

use crate::config::{SessionConfig, missing_column};
use crate::{Config, Error, PartitionBy, Result};

/// The view that holds the user's query.
pub(crate) const SAMPLES_VIEW: &str = "__onefold_samples";
/// A sample's time in microseconds since 1970.
pub(crate) const TIME: &str = "__onefold_time";
/// The time of the first sample of a sample's session, likewise.
pub(crate) const START: &str = "__onefold_start";
/// Number of a sample's session within its partition; only computed for [`Order::Arrival`], because in
/// session order counting the changes does it.
pub(crate) const SESSION: &str = "__onefold_session";

/// The query that gives the samples of `config` in `order`, with [`TIME`], [`START`] and (in arrival order)
/// [`SESSION`] beside the columns that the dataset needs. `columns` are those of the user's query.
///
/// # Errors
///
/// [`Error::Config`] if the configuration names a column that the query does not give; [`Error::Column`] if
/// the time is neither a timestamp nor an integer.
pub fn ordered_samples(config: &Config, columns: &ArrowSchema, order: Order) -> Result<String> {
    check_names(config, columns)?;
    let partition = quoted(&config.partition_columns);
    let identity = [partition.clone(), quoted(&config.session_columns())].concat();
    let mut sql = format!(
        "SELECT {}, {} AS {TIME} FROM {SAMPLES_VIEW}",
        quoted(&needed_columns(config)).join(", "),
        time_in_micros(config, columns)?
    );
    let mut session = identity.clone();
    if let SessionConfig::Gap { gap_micros, .. } = &config.session {
        let over = format!("OVER (PARTITION BY {} ORDER BY {TIME}", identity.join(", "));
        sql = format!(
            "SELECT *, CASE WHEN {TIME} - lag({TIME}) {over}) > {gap_micros} THEN 1 ELSE 0 END AS __onefold_pause FROM ({sql})"
        );
        sql = format!(
            "SELECT *, sum(__onefold_pause) {over} RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS __onefold_pauses FROM ({sql})"
        );
        session.push("__onefold_pauses".to_owned());
    }
    sql = format!("SELECT *, min({TIME}) OVER (PARTITION BY {}) AS {START} FROM ({sql})", session.join(", "));

    let bucket = config.partition_by.map(start_of_bucket);
    let ties = [quoted(&config.order), scalar_columns(config, columns)].concat();
    let keys = match order {
        Order::Session => {
            let session = [vec![START.to_owned()], quoted(&config.session_columns())].concat();
            [partition, session, vec![TIME.to_owned()], ties].concat()
        }
        Order::Arrival => {
            let place: Vec<String> = partition.into_iter().chain(bucket).collect();
            let within = if place.is_empty() { String::new() } else { format!("PARTITION BY {} ", place.join(", ")) };
            let by = [vec![START.to_owned()], identity].concat().join(", ");
            sql = format!("SELECT *, CAST(dense_rank() OVER ({within}ORDER BY {by}) AS BIGINT) - 1 AS {SESSION} FROM ({sql})");
            [place, vec![TIME.to_owned()], ties].concat()
        }
    };
    Ok(format!("SELECT * FROM ({sql}) ORDER BY {}", first_of_each(keys).join(", ")))
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
    let is_scalar = |name: &String| columns.field_with_name(name).is_ok_and(|field| !field.data_type().is_nested());
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
