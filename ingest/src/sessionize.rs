//! The SQL around the samples: which session a sample belongs to, and the order of the samples.
//!
//! A session is identified by the partition columns, the session columns (the key, or the user) and its
//! **start**, the time of its first sample. With a gap, a session begins wherever the user paused for longer
//! (gaps and islands: mark the first sample after a pause; the last mark so far is the start, a running maximum, which
//! needs no more memory than a row). Samples of one instant are always in one session, so the result does not depend on
//! how ties were ordered.
//!
//! All of that is found from the session columns and the time alone, in a narrow table that is then joined to the
//! records of the samples (`cluster`). A free query is therefore evaluated twice (the first time for the narrow
//! columns only) and must give the same rows.

use std::collections::BTreeSet;

use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema, TimeUnit};
use onefold_datasets::Order;

use crate::config::{SessionConfig, missing_column};
use crate::{Config, Error, PartitionBy, Result, timeline};

/// The view that holds the samples.
pub const SAMPLES_VIEW: &str = "__onefold_samples";
/// The view that holds of the same samples the columns that say where they belong.
pub const NARROW_VIEW: &str = "__onefold_narrow";
/// A sample's time in microseconds since 1970.
pub const TIME: &str = "__onefold_time";
/// The time of the first sample of a sample's session, likewise.
pub const START: &str = "__onefold_start";
/// Number of a sample's session within its partition, from 0 by start.
pub const SESSION: &str = "__onefold_session";

/// The query that gives the samples of `config`: the columns that the dataset needs, and [`TIME`]. `columns` are
/// those of the samples' view.
///
/// # Errors
///
/// [`Error::Config`] if the configuration names a column that the query does not give; [`Error::Column`] if
/// the time is neither a timestamp nor an integer, or a session or partition column is a list.
pub fn samples(config: &Config, columns: &ArrowSchema) -> Result<String> {
    check_names(config, columns)?;
    check_comparable(config, columns)?;
    let time = time_in_micros(config, columns)?;
    let columns = [quoted(&needed_columns(config)), position_columns(config)].concat();
    Ok(format!("SELECT {}, {time} AS {TIME} FROM {SAMPLES_VIEW}", columns.join(", ")))
}

/// The samples' columns that say where their lists lie in timelines: a start and an end for each.
pub fn position_columns(config: &Config) -> Vec<String> {
    (0..config.timelines.len()).flat_map(|i| [timeline::start_column(i), timeline::end_column(i)]).collect()
}

/// The query that gives the rows of timeline `number` that the sessions need, in the order of the sessions; with the
/// columns of [`slices_sql`](timeline::slices_sql), the keys being the partition columns, [`START`] (here the start of the
/// session's partition) and [`SESSION`].
///
/// # Errors
///
/// As [`samples`].
pub fn slices(config: &Config, columns: &ArrowSchema, order: Order, number: usize) -> Result<String> {
    let time = time_in_micros(config, columns)?;
    let bucket = config.partition_by.map_or_else(|| "CAST(0 AS BIGINT)".to_owned(), start_of_bucket);
    let timeline = &config.timelines[number];
    let on: Vec<String> = timeline.on.iter().map(|(ours, _)| ours.clone()).collect();
    let ours = first_of_each([identity_columns(config), on].concat());
    let positions = [timeline::start_column(number), timeline::end_column(number)];
    let samples = format!(
        "SELECT {}, {time} AS {TIME}, {} FROM {NARROW_VIEW}",
        quoted(&ours).join(", "),
        positions.join(", ")
    );
    let columns: Vec<String> = quoted(&ours).iter().map(|column| format!("s.{column}")).collect();
    let sessions = format!(
        "SELECT {}, s.{}, s.{}, {bucket} AS {START}, {SESSION} FROM ({}) n JOIN ({samples}) s ON {}",
        columns.join(", "),
        positions[0],
        positions[1],
        numbered_sessions(config, &time, order),
        same_session(config)
    );
    let keys = [quoted(&config.partition_columns), vec![START.to_owned(), SESSION.to_owned()]].concat();
    Ok(timeline::slices_sql(number, timeline, &sessions, &keys))
}

/// The condition that a sample `s` is one of the session `n`.
fn same_session(config: &Config) -> String {
    let mut on = identity(config);
    if matches!(config.session, SessionConfig::Gap { .. }) {
        on.push(TIME.to_owned());
    }
    on.iter().map(|column| format!("n.{column} = s.{column}")).collect::<Vec<_>>().join(" AND ")
}

/// The query that orders `records`, a table of the [`key_columns`], [`TIME`] and others of the same samples: all of its
/// columns with [`START`] and [`SESSION`]. What `last` names orders samples that nothing else does.
///
/// # Errors
///
/// As [`samples`].
pub fn ordered(
    config: &Config,
    columns: &ArrowSchema,
    order: Order,
    records: &str,
    last: &[&str],
) -> Result<String> {
    let time = time_in_micros(config, columns)?;
    let joined = format!(
        "SELECT s.*, n.{START}, n.{SESSION} FROM ({}) n RIGHT JOIN {records} s ON {}",
        numbered_sessions(config, &time, order),
        same_session(config)
    );
    let bucket = config.partition_by.map(start_of_bucket);
    let place = [quoted(&config.partition_columns), bucket.into_iter().collect()].concat();
    let within = match order {
        Order::Session | Order::SessionHash => vec![SESSION.to_owned(), TIME.to_owned()],
        Order::Arrival => vec![TIME.to_owned()],
    };
    let last = [SESSION].into_iter().chain(last.iter().copied()).map(str::to_owned).collect();
    let keys = [place, within, quoted(&config.order), last].concat();
    Ok(format!("SELECT * FROM ({joined}) ORDER BY {}", first_of_each(keys).join(", ")))
}

/// The columns of the samples that [`ordered`] needs of their records, beside [`TIME`].
pub fn key_columns(config: &Config) -> Vec<String> {
    let columns = [&config.partition_columns[..], &session_columns(config), &config.order];
    first_of_each(columns.concat())
}

/// The columns that identify a session, apart from its start.
pub fn identity_columns(config: &Config) -> Vec<String> {
    first_of_each([&config.partition_columns[..], &session_columns(config)].concat())
}

fn session_columns(config: &Config) -> Vec<String> {
    config.session_columns().into_iter().map(str::to_owned).collect()
}

/// The condition by which about `wanted` of `all` samples are taken, in whole sessions (of whole users, where a pause ends a
/// session), and the share of them; no condition if all are.
pub fn taken(config: &Config, wanted: u64, all: u64) -> (f64, Option<String>) {
    const STEPS: u64 = 1 << 32;
    let steps =
        (u128::from(wanted) * u128::from(STEPS) / u128::from(all.max(1))).min(u128::from(STEPS)) as u64;
    if steps == STEPS || all == 0 {
        return (1.0, None);
    }
    let steps = steps.max(1);
    // Text compares as the number that it stands for.
    let condition = format!("substr({}, 1, 8) < '{steps:08x}'", identity_hash(config));
    (steps as f64 / STEPS as f64, Some(condition))
}

/// A hash of what identifies a session, as hexadecimal text.
fn identity_hash(config: &Config) -> String {
    let texts: Vec<String> =
        identity(config).iter().map(|column| format!("CAST({column} AS VARCHAR)")).collect();
    format!("md5(concat_ws('/', {}))", texts.join(", "))
}

/// The narrow table of sessions: identity, start and number; with a gap one row for every instant of a user.
fn numbered_sessions(config: &Config, time: &str, order: Order) -> String {
    let identity = identity(config);
    let by = identity.join(", ");
    let narrow = format!("SELECT {by}, {time} AS {TIME} FROM {NARROW_VIEW}");
    let starts = match &config.session {
        SessionConfig::Key(_) => format!("SELECT {by}, min({TIME}) AS {START} FROM ({narrow}) GROUP BY {by}"),
        SessionConfig::Gap { gap_micros, .. } => {
            let over = format!("OVER (PARTITION BY {by} ORDER BY {TIME}");
            let before =
                format!("SELECT *, lag({TIME}) {over}) AS before FROM (SELECT DISTINCT * FROM ({narrow}))");
            let begins = format!("CASE WHEN {TIME} - before <= {gap_micros} THEN NULL ELSE {TIME} END");
            format!(
                "SELECT {by}, {TIME}, max({begins}) {over} ROWS UNBOUNDED PRECEDING) AS {START} FROM ({before})"
            )
        }
    };
    let place =
        [quoted(&config.partition_columns), config.partition_by.map(start_of_bucket).into_iter().collect()]
            .concat();
    let within = if place.is_empty() { String::new() } else { format!("PARTITION BY {} ", place.join(", ")) };
    let hash = match order {
        Order::SessionHash => format!("{}, ", identity_hash(config)),
        _ => String::new(),
    };
    format!(
        "SELECT *, CAST(dense_rank() OVER ({within}ORDER BY {hash}{START}, {by}) AS BIGINT) - 1 AS {SESSION} \
         FROM ({starts})"
    )
}

/// The columns that identify a session, apart from its start, as SQL.
fn identity(config: &Config) -> Vec<String> {
    quoted(&identity_columns(config))
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
    let features = logged_features(config).map(|name| ("`[features]`", name));
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

/// The features that the samples' view has columns for: not those that timelines make.
fn logged_features(config: &Config) -> impl Iterator<Item = &str> {
    let features = config.feature_columns().map(|(name, _)| name);
    features.filter(|name| config.timeline_of(name).is_none())
}

/// The columns of the samples' view that the dataset is made from, each once.
fn needed_columns(config: &Config) -> Vec<String> {
    let features = logged_features(config).map(str::to_owned);
    let session = config.session_columns().into_iter().map(str::to_owned);
    let rest = config.partition_columns.iter().chain(&config.order).cloned();
    first_of_each(features.chain(session).chain(rest).collect())
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
    fn shown(rows: &str, session: &str, order: Order) -> String {
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
            let narrow = context.table(SAMPLES_VIEW).await.unwrap().into_view();
            context.register_table(NARROW_VIEW, narrow).unwrap();
            let columns = context.table(SAMPLES_VIEW).await.unwrap().schema().as_arrow().clone();
            let records = format!("({})", samples(&config, &columns).unwrap());
            let sql = ordered(&config, &columns, order, &records, &["item"]).unwrap();
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
        let table = shown(LOG, "user = \"user\"\ngap = \"30s\"", Order::Session);
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
        let table = shown(LOG, "key = [\"user\"]", Order::Arrival);
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

    #[test]
    fn hashed_sessions_are_another_order_of_the_same() {
        let table = shown(LOG, "key = [\"user\"]", Order::SessionHash);
        let expected = "\
+------+---------+-------+
| item | session | start |
+------+---------+-------+
| 2    | 0       | 0     |
| 4    | 0       | 0     |
| 6    | 0       | 0     |
| 3    | 0       | 0     |
| 7    | 0       | 0     |
| 1    | 1       | 5     |
| 5    | 1       | 5     |
+------+---------+-------+";
        assert_eq!(table, expected);
    }
}
