//! The SQL that assigns samples to sessions, and orders the samples.
//!
//! A session is identified by the partition columns, the session columns (the key, or the user) and its **start**, the
//! time of its first sample. With a gap, a session begins after each longer pause of the user. This is the
//! gaps-and-islands problem: the first sample after a pause is marked with its time, and the latest mark is the start,
//! a running maximum that needs the memory of one row. Samples with equal times are always in one session, so the
//! result does not depend on the order of ties.
//!
//! Sessions are computed from the session columns and the time alone, in a narrow table that is then joined to the
//! records of the samples (`cluster`). The query of the samples is therefore evaluated twice, the first time for the
//! narrow columns only, and must return the same rows each time.

use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema};
use onefold_datasets::{Buckets, IDENTITY_SEPARATOR, Order, PartitionColumn, PartitionType, Sessions};

use crate::config::{Config, PartitionBy, RESERVED, missing_column};
use crate::error::{Error, Result};
use crate::session_ids::SESSION_ID;
use crate::sql::{first_of_each, is_float, key_hint, numbered, quote};
use crate::{timeline, times};

/// The view with the samples.
pub(crate) const SAMPLES_VIEW: &str = "__onefold_samples";
/// The view with the narrow columns of the samples: those that determine their sessions and order.
pub(crate) const NARROW_VIEW: &str = "__onefold_narrow";
/// The time of a sample, in microseconds since 1970.
pub(crate) const TIME: &str = "__onefold_time";
/// The time of the first sample of a sample's session, in microseconds since 1970.
pub(crate) const START: &str = "__onefold_start";
/// The id of a sample's session, see [`onefold_datasets::session_id`].
pub(crate) const SESSION: &str = "__onefold_session";
/// The time of the latest event that determines a sample's labels, in microseconds since 1970; null without an event.
/// Samples have this column only if the configuration keeps it.
pub(crate) const EVENT_TIME: &str = "__onefold_event_time";
/// Whether a row of the table of records is not a record, but a part of the totals of its samples.
pub(crate) const TOTALS: &str = "__onefold_totals";
/// The bucket of a record.
pub(crate) const BUCKET: &str = "__onefold_bucket";
/// The hash of a sample's key, see [`onefold_datasets::SAMPLE_KEY_COLUMN`].
pub(crate) const KEY: &str = "__onefold_key";

/// The order of the samples of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampleOrder {
    /// The order within a bucket of a partition.
    pub(crate) order: Order,
    /// The buckets, which are in ascending order.
    pub(crate) buckets: Buckets,
}

/// Returns the SQL expression for the bucket of a session among `buckets` buckets:
/// [`onefold_datasets::bucket_of_session`]. With the number of ranges for `buckets`, it is the session's range.
pub(crate) fn bucket(buckets: u32) -> String {
    bucket_of(SESSION, buckets)
}

fn bucket_of(session: &str, buckets: u32) -> String {
    format!("(({session} >> 47) * {buckets}) >> 16")
}

/// Returns the SQL expression for the bucket of a sample whose session is not known yet.
fn bucket_of_user(config: &Config, buckets: u32) -> String {
    // The bucket depends only on the session columns, which determine the high bits of a session's id.
    let id = format!("{SESSION_ID}({}, '')", whose(config));
    bucket_of(&id, buckets)
}

/// Returns the SQL condition that a sample is in a range of buckets.
pub(crate) fn in_range(config: &Config, buckets: Buckets, range: u32) -> String {
    format!("{} = {range}", bucket_of_user(config, buckets.ranges()))
}

/// Returns the query of the samples of `config`: the columns that the dataset needs, [`TIME`], and [`KEY`] if samples
/// have a key. `columns` are the columns of the samples' view.
///
/// # Errors
///
/// [`Error::Fault`] if the query lacks a column that the configuration names, the type and the configuration of the
/// time do not determine the meaning of its values, or a session or partition column is a list.
pub(crate) fn samples(config: &Config, columns: &ArrowSchema) -> Result<String> {
    check_names(config, columns)?;
    check_comparable(config, columns)?;
    let time = times::micros_sql(config, &config.time, columns)?;
    let key = key_hash(config).map(|hash| format!("{hash} AS {KEY}"));
    let columns =
        [quoted(&needed_columns(config)), position_columns(config), key.into_iter().collect()].concat();
    Ok(format!("SELECT {}, {time} AS {TIME} FROM {SAMPLES_VIEW}", columns.join(", ")))
}

/// Returns the SQL expression for the hash of a sample's key; `None` if samples have no key.
pub(crate) fn key_hash(config: &Config) -> Option<String> {
    let key = &config.samples.key;
    (!key.is_empty()).then(|| format!("hash_id({})", texts(&quoted(key))))
}

/// Returns the columns of the samples with the positions of their lists in timelines: a start and an end per timeline.
pub(crate) fn position_columns(config: &Config) -> Vec<String> {
    (0..config.timelines.len()).flat_map(|i| [timeline::start_column(i), timeline::end_column(i)]).collect()
}

/// Returns the query of the samples for which slices are made: the bucket of each sample ([`place_columns`]), the
/// columns of [`numbered_by`], and the [`position_columns`] of all timelines. `sessions` is the query of [`sessions`].
pub(crate) fn placed_samples(
    config: &Config,
    columns: &ArrowSchema,
    order: SampleOrder,
    sessions: &str,
) -> Result<String> {
    let time = times::micros_sql(config, &config.time, columns)?;
    let numbered_by = numbered_by(config, columns, order);
    let ours = numbered_by.iter().filter(|name| ![START, SESSION, TIME].contains(&name.as_str())).cloned();
    let ours = first_of_each([identity_columns(config), ours.collect()].concat());
    let positions = position_columns(config).join(", ");
    let samples =
        format!("SELECT {}, {time} AS {TIME}, {positions} FROM {NARROW_VIEW}", quoted(&ours).join(", "));
    let samples = format!(
        "SELECT s.*, n.{START}, n.{SESSION} FROM ({sessions}) n JOIN ({samples}) s ON {}",
        same_session(config)
    );
    let period = config.partition_by.map(start_of_period);
    let bucket = format!("CAST({} AS BIGINT)", bucket(order.buckets.number));
    let place = quoted(&config.partition_columns).into_iter().chain(period).chain([bucket]);
    let place = place.zip(place_columns(config)).map(|(value, name)| format!("{value} AS {name}"));
    let wanted: Vec<String> = place.chain(quoted(&numbered_by)).collect();
    Ok(format!("SELECT {}, {positions} FROM ({samples})", wanted.join(", ")))
}

/// Returns the columns of [`placed_samples`] with the partition and bucket of a sample. No column of the samples has
/// these names.
pub(crate) fn place_columns(config: &Config) -> Vec<String> {
    numbered("__onefold_place", place_of_slices(config).len())
}

/// Returns the query of the rows of timeline `number` that the samples need, by slice, in no order: the columns of
/// [`place_of_slices`], then the columns of [`slices_sql`](timeline::slices_sql). `ranges` is the table of the slices'
/// ranges.
pub(crate) fn slices(config: &Config, number: usize, ranges: &str) -> String {
    let (names, timeline) = (place_columns(config), &config.timelines[number]);
    let slices = timeline::slices_sql(number, timeline, ranges, &names);
    let place = names.iter().zip(place_of_slices(config));
    let place = place.map(|(name, shown)| format!("{name} AS {}", quote(&shown)));
    let rest = [timeline::FIRST, timeline::POSITION].map(str::to_owned);
    let lists = timeline.columns.iter().map(|(list, _)| quote(list));
    let columns: Vec<String> = place.chain(rest).chain(lists).collect();
    format!("SELECT {} FROM ({slices})", columns.join(", "))
}

/// Returns the query of the rows of [`slices`] in the order of the samples.
pub(crate) fn slices_in_order(config: &Config, slices: &str) -> String {
    let order = [place_of_slices(config), [timeline::FIRST, timeline::POSITION].map(str::to_owned).to_vec()];
    format!("SELECT * FROM {slices} ORDER BY {}", quoted(&order.concat()).join(", "))
}

/// Returns the columns of [`slices`] with the partition and bucket of a slice, in the order in which [`sorted`] orders
/// buckets: the partition columns, [`START`] (the start of the day or hour, if samples are partitioned by time) and
/// [`BUCKET`].
pub(crate) fn place_of_slices(config: &Config) -> Vec<String> {
    let period = config.partition_by.map(|_| START);
    let made = period.into_iter().chain([BUCKET]).map(str::to_owned);
    config.partition_columns.iter().cloned().chain(made).collect()
}

/// Returns the SQL expressions that order partitions and buckets.
fn place(config: &Config, order: SampleOrder) -> Vec<String> {
    let period = config.partition_by.map(start_of_period);
    let buckets = order.buckets.number;
    let bucket = (buckets > 1).then(|| bucket(buckets));
    [quoted(&config.partition_columns), period.into_iter().chain(bucket).collect()].concat()
}

/// Returns the columns that order the samples of a bucket.
fn within(config: &Config, order: Order) -> Vec<String> {
    let first: &[&str] = match order {
        Order::Session => &[START, SESSION, TIME],
        Order::SessionHash => &[SESSION, TIME],
        Order::Arrival => &[TIME],
    };
    let first = first.iter().map(|name| (*name).to_owned());
    first_of_each(first.chain(config.order.iter().cloned()).chain([SESSION.to_owned()]))
}

/// Returns the columns by which the samples of a bucket are numbered for [`slices`]: the columns that order them, up to
/// the first one that the narrow view lacks. Samples with equal values in these columns have the same number.
pub(crate) fn numbered_by(config: &Config, columns: &ArrowSchema, order: SampleOrder) -> Vec<String> {
    let is_narrow =
        |name: &String| columns.field_with_name(name).map_or(true, |field| !field.data_type().is_nested());
    within(config, order.order).into_iter().take_while(is_narrow).collect()
}

/// Returns the SQL condition that a sample `s` belongs to the session `n`.
pub(crate) fn same_session(config: &Config) -> String {
    let mut on = identity(config);
    if matches!(config.session, Sessions::Gap { .. }) {
        on.push(TIME.to_owned());
    }
    on.iter().map(|column| format!("n.{column} = s.{column}")).collect::<Vec<_>>().join(" AND ")
}

/// Returns the query of `records` with their [`START`] and [`SESSION`]. `records` is a table of the [`key_columns`],
/// [`TIME`], [`TOTALS`] and other columns of the samples. `sessions` is the query of [`sessions`].
pub(crate) fn with_sessions(config: &Config, sessions: &str, records: &str) -> String {
    format!(
        "SELECT s.*, n.{START}, n.{SESSION} FROM ({sessions}) n RIGHT JOIN {records} s ON {}",
        same_session(config)
    )
}

/// Returns the query that [sorts](sorted) `records` and finds their sessions from the records themselves. `records` is
/// a table that has all records of each user.
pub(crate) fn ordered_with_sessions(
    config: &Config,
    order: SampleOrder,
    records: &str,
    last: &[&str],
) -> String {
    // One sort of the records by session columns and time serves all windows, which then need the memory of one row.
    let over = format!("OVER (PARTITION BY {} ORDER BY {TIME}", identity(config).join(", "));
    let started = match &config.session {
        Sessions::Key(_) => {
            format!("SELECT *, min({TIME}) {over} ROWS UNBOUNDED PRECEDING) AS {START} FROM {records}")
        }
        Sessions::Gap { gap_micros, .. } => starts_by_pauses(&over, *gap_micros, records),
    };
    let samples = format!("SELECT *, {} AS {SESSION} FROM ({started})", session_id(config, START));
    sorted(config, order, &format!("({samples})"), None, last)
}

/// Returns the query of `records` with their [`BUCKET`]. Totals are in bucket 0.
pub(crate) fn with_buckets(config: &Config, buckets: u32, records: &str) -> String {
    let bucket = bucket_of_user(config, buckets);
    format!("SELECT *, CASE WHEN {TOTALS} THEN 0 ELSE {bucket} END AS {BUCKET} FROM {records}")
}

/// Returns the query of `records` with known [`SESSION`] and with their [`BUCKET`]. Totals are in bucket 0.
pub(crate) fn with_known_buckets(buckets: u32, records: &str) -> String {
    let bucket = bucket(buckets);
    format!("SELECT *, CASE WHEN {TOTALS} THEN 0 ELSE {bucket} END AS {BUCKET} FROM {records}")
}

/// Returns the query that sorts `samples` into the order of a dataset, after the totals. `samples` is a table or a
/// query in parentheses with the [`key_columns`], [`TIME`], [`TOTALS`], [`START`] and [`SESSION`]. The column `first`
/// orders samples with equal times before the columns of the configuration do. The columns `last` order samples that no
/// other column orders.
pub(crate) fn sorted(
    config: &Config,
    order: SampleOrder,
    samples: &str,
    first: Option<&str>,
    last: &[&str],
) -> String {
    let mut within = quoted(&within(config, order.order));
    let time = within.iter().position(|column| *column == quote(TIME)).map_or(0, |place| place + 1);
    if let Some(first) = first {
        within.insert(time, first.to_owned());
    }
    let last = last.iter().copied().map(str::to_owned).collect();
    let keys = [vec![format!("{TOTALS} DESC")], place(config, order), within, last].concat();
    format!("SELECT * FROM {samples} ORDER BY {}", first_of_each(keys).join(", "))
}

/// Returns the columns of the samples, besides [`TIME`], that [`with_sessions`] and the following sort need in their
/// records.
pub(crate) fn key_columns(config: &Config) -> Vec<String> {
    let columns = [&config.partition_columns[..], &session_columns(config), &config.order];
    first_of_each(columns.concat())
}

/// Returns the columns that a sample's record has besides its time, digest and lists: the [`key_columns`], and [`KEY`]
/// if samples have a key.
pub(crate) fn record_columns(config: &Config) -> Vec<String> {
    let key = (!config.samples.key.is_empty()).then(|| KEY.to_owned());
    key_columns(config).into_iter().chain(key).collect()
}

/// Returns the columns that identify a session together with its start.
pub(crate) fn identity_columns(config: &Config) -> Vec<String> {
    first_of_each([&config.partition_columns[..], &session_columns(config)].concat())
}

/// Returns the columns of the session's key, or of the user.
pub(crate) fn session_columns(config: &Config) -> Vec<String> {
    config.session_columns().into_iter().map(str::to_owned).collect()
}

/// Returns the partition columns of the dataset, with the types of their values. `columns` are the columns of the
/// samples' view.
pub(crate) fn partition_columns(config: &Config, columns: &ArrowSchema) -> Vec<PartitionColumn> {
    let of_samples = |name: &String| {
        let data_type = columns.field_with_name(name).ok().map(|field| match field.data_type() {
            DataType::Dictionary(_, values) => &**values,
            other => other,
        });
        let kind = match data_type {
            Some(DataType::Date32) => PartitionType::Date,
            Some(integer) if integer.is_integer() => PartitionType::Integer,
            Some(number) if number.is_numeric() => PartitionType::Number,
            _ => PartitionType::Text,
        };
        PartitionColumn::new(name, kind)
    };
    let made = match config.partition_by {
        None => &[][..],
        Some(PartitionBy::Day) => &[("date", PartitionType::Date)][..],
        Some(PartitionBy::Hour) => &[("date", PartitionType::Date), ("hour", PartitionType::Integer)][..],
    };
    let made = made.iter().map(|(name, kind)| PartitionColumn::new(*name, *kind));
    config.partition_columns.iter().map(of_samples).chain(made).collect()
}

/// Returns the fraction of samples to take, about `wanted` of `all`, and the SQL condition that takes them; no
/// condition if all samples are taken. The condition takes whole sessions, or all sessions of a user if a pause ends a
/// session.
pub(crate) fn taken(config: &Config, wanted: u64, all: u64) -> (f64, Option<String>) {
    const STEPS: u64 = 1 << 32;
    let steps =
        (u128::from(wanted) * u128::from(STEPS) / u128::from(all.max(1))).min(u128::from(STEPS)) as u64;
    if steps == STEPS || all == 0 {
        return (1.0, None);
    }
    let steps = steps.max(1);
    // Hexadecimal texts of equal length compare like the numbers that they represent.
    let condition = format!("substr({}, 1, 8) < '{steps:08x}'", identity_hash(config));
    (steps as f64 / STEPS as f64, Some(condition))
}

/// Returns the SQL expression for a hash of a session's identity, as hexadecimal text.
fn identity_hash(config: &Config) -> String {
    let texts: Vec<String> =
        identity(config).iter().map(|column| format!("CAST({column} AS VARCHAR)")).collect();
    format!("md5(concat_ws('/', {}))", texts.join(", "))
}

/// Returns the query of the identities and times ([`TIME`]) of all samples.
pub(crate) fn instants(config: &Config, columns: &ArrowSchema) -> Result<String> {
    let time = times::micros_sql(config, &config.time, columns)?;
    Ok(format!("SELECT {}, {time} AS {TIME} FROM {NARROW_VIEW}", identity(config).join(", ")))
}

/// Returns the query of the narrow table of sessions: identity, [`START`] and [`SESSION`]. With a gap, it has a row per
/// instant of a user.
pub(crate) fn sessions(config: &Config, columns: &ArrowSchema) -> Result<String> {
    let by = identity(config).join(", ");
    let narrow = instants(config, columns)?;
    let starts = match &config.session {
        Sessions::Key(_) => format!("SELECT {by}, min({TIME}) AS {START} FROM ({narrow}) GROUP BY {by}"),
        Sessions::Gap { gap_micros, .. } => starts_after_gaps(&by, *gap_micros, &narrow),
    };
    Ok(format!("SELECT *, {} AS {SESSION} FROM ({starts})", session_id(config, START)))
}

/// Returns the query of the distinct rows of `instants` with the [`START`] of their sessions. A pause of more than
/// `gap_micros` microseconds between rows with equal values of the columns `by` ends a session.
fn starts_after_gaps(by: &str, gap_micros: i64, instants: &str) -> String {
    let over = format!("OVER (PARTITION BY {by} ORDER BY {TIME}");
    starts_by_pauses(&over, gap_micros, &format!("(SELECT DISTINCT * FROM ({instants}))"))
}

/// Returns the query of `rows` with the [`START`] of their sessions. `over` is the beginning of a window over the rows
/// of a user by time.
fn starts_by_pauses(over: &str, gap_micros: i64, rows: &str) -> String {
    let before = format!("SELECT *, lag({TIME}) {over}) AS __onefold_before FROM {rows}");
    let begins = format!("CASE WHEN {TIME} - __onefold_before <= {gap_micros} THEN NULL ELSE {TIME} END");
    format!(
        "SELECT * EXCLUDE (__onefold_before), max({begins}) {over} ROWS UNBOUNDED PRECEDING) AS {START} FROM ({before})"
    )
}

/// Returns the query of the number of sessions that partition columns cut: sessions that would be one session if the
/// partition columns had equal values. Returns `None` if partition columns cannot cut a session.
pub(crate) fn cut_sessions(config: &Config, columns: &ArrowSchema) -> Result<Option<String>> {
    let whose = session_columns(config);
    let cutting = config.partition_columns.iter().filter(|column| !whose.contains(column));
    let differ = |column: &String| format!("min({0}) <> max({0})", quote(column));
    let conditions: Vec<String> = cutting.map(differ).collect();
    if conditions.is_empty() {
        return Ok(None);
    }
    let by = quoted(&whose).join(", ");
    let instants = instants(config, columns)?;
    let (rows, by) = match &config.session {
        Sessions::Key(_) => (instants, by),
        Sessions::Gap { gap_micros, .. } => {
            (starts_after_gaps(&by, *gap_micros, &instants), format!("{by}, {START}"))
        }
    };
    let conditions = conditions.join(" OR ");
    Ok(Some(format!(
        "SELECT count(*) AS sessions FROM (SELECT {by} FROM ({rows}) GROUP BY {by} HAVING {conditions})"
    )))
}

/// Returns the SQL expression for the id of the session that begins at the time in column `start`.
pub(crate) fn session_id(config: &Config, start: &str) -> String {
    let which = texts(&[identity(config), vec![start.to_owned()]].concat());
    format!("{SESSION_ID}({}, {which})", whose(config))
}

/// Returns the SQL expression for the session columns as one text. It determines the high bits of a session's id, and
/// the bucket.
pub(crate) fn whose(config: &Config) -> String {
    texts(&quoted(&session_columns(config)))
}

/// Returns the SQL expression for columns as one text, in the form that [`onefold_datasets::session_id`] needs.
fn texts(columns: &[String]) -> String {
    let texts: Vec<String> = columns.iter().map(|column| format!("CAST({column} AS VARCHAR)")).collect();
    format!("concat_ws(chr({}), {})", u32::from(IDENTITY_SEPARATOR), texts.join(", "))
}

/// Returns the columns that identify a session together with its start, quoted for SQL.
pub(crate) fn identity(config: &Config) -> Vec<String> {
    quoted(&identity_columns(config))
}

/// Checks the types of session and partition columns. Lists cannot be compared as keys, and one floating-point number
/// can stand for several large integers.
fn check_comparable(config: &Config, columns: &ArrowSchema) -> Result<()> {
    for name in config.session_columns() {
        if let Ok(field) = columns.field_with_name(name)
            && is_float(field.data_type())
        {
            let message = format!("a session column cannot be a {}", field.data_type());
            return Err(Error::column(name, message, key_hint(name, field.data_type())));
        }
    }
    let names = config.partition_columns.iter().map(String::as_str).chain(config.session_columns());
    for name in names {
        if let Some(data_type) =
            columns.field_with_name(name).ok().map(|field| field.data_type()).filter(|t| t.is_nested())
        {
            return Err(Error::column(
                name,
                format!("a session or partition column cannot be a {data_type}"),
                "use a column of numbers, text or times",
            ));
        }
    }
    Ok(())
}

/// Checks that the query has each column that the configuration names.
fn check_names(config: &Config, columns: &ArrowSchema) -> Result<()> {
    let known: Vec<&str> = columns.fields().iter().map(|field| field.name().as_str()).collect();
    let places = position_columns(config);
    let is_made = |name: &str| name == EVENT_TIME || places.iter().any(|place| place == name);
    let is_reserved = |name: &&&str| name.starts_with(RESERVED) && !is_made(name);
    if let Some(name) = known.iter().find(is_reserved) {
        return Err(Error::config(
            &config.path,
            format!("the query gives a column `{name}`; names that begin with `{RESERVED}` are reserved"),
            "rename the column",
        ));
    }
    if let Some(name) = config.time.columns().find(|name| !known.contains(name)) {
        return Err(missing_column(config, &config.time.place, name, &known));
    }
    check_columns(config, &known)
}

/// Checks that the samples have each column that the configuration names, besides the time. `known` are their columns.
///
/// # Errors
///
/// [`Error::Fault`] that names the section and, for a wrong name, suggests the most similar correct one.
pub(crate) fn check_columns(config: &Config, known: &[&str]) -> Result<()> {
    let features = logged_features(config).map(|name| ("`[features]`", name));
    let session = config.session_columns().into_iter().map(|name| ("`[session]`", name));
    let order = config.order.iter().map(|name| ("`[session].order`", name.as_str()));
    let partition = config.partition_columns.iter().map(|name| ("`[partition].columns`", name.as_str()));
    let kept = config.keep.iter().map(|name| ("`keep`", name.as_str()));
    for (place, name) in features.chain(session).chain(order).chain(partition).chain(kept) {
        if !known.contains(&name) {
            return Err(missing_column(config, place, name, known));
        }
    }
    Ok(())
}

/// Returns the features that are columns of the samples' view: all except those that timelines make.
fn logged_features(config: &Config) -> impl Iterator<Item = &str> {
    let features = config.feature_columns().map(|(name, _)| name);
    features.filter(|name| config.timeline_of(name).is_none())
}

/// Returns the columns of the samples' view that the dataset is made from, without repetitions.
fn needed_columns(config: &Config) -> Vec<String> {
    let features = logged_features(config).map(str::to_owned);
    let session = config.session_columns().into_iter().map(str::to_owned);
    let rest = config.partition_columns.iter().chain(&config.order).chain(&config.keep).cloned();
    first_of_each(features.chain(session).chain(rest))
}

/// Returns the SQL expression for the start of the day or hour in which the session starts. The remainder in it is
/// never negative.
pub(crate) fn start_of_period(by: PartitionBy) -> String {
    let width = period_micros(by);
    format!("({START} - (({START} % {width} + {width}) % {width}))")
}

/// Returns the duration of a partition, in microseconds.
pub(crate) fn period_micros(by: PartitionBy) -> i64 {
    match by {
        PartitionBy::Day => 86_400_000_000,
        PartitionBy::Hour => 3_600_000_000,
    }
}

pub(crate) fn quoted(columns: &[impl AsRef<str>]) -> Vec<String> {
    columns.iter().map(|column| quote(column.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use datafusion::arrow::array::AsArray;
    use datafusion::arrow::compute::concat_batches;
    use datafusion::arrow::datatypes::Int64Type;
    use datafusion::prelude::SessionContext;
    use onefold_sql::Query as _;

    use super::*;

    /// Orders the samples of rows `(user, seconds, item)` with a `[session]` section. Returns the item, session id and
    /// start in seconds of each sample.
    fn ordered_samples(rows: &str, session: &str, order: Order) -> Vec<(i64, i64, i64)> {
        let text = format!(
            "format_version = 1\n[sources]\nlog = \"x\"\n[samples]\nquery = \"\"\n[session]\ntime = {{ column = \"time\", unit = \"us\" }}\n{session}\n\
             [features]\nitem = {{ kind = \"label\" }}\nx = {{ kind = \"dense\" }}\n"
        );
        let config = Config::parse(Path::new("dataset.toml"), &text).unwrap();
        let context = SessionContext::new();
        context.register_udf(times::function());
        context.register_udf(crate::session_ids::function());
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        runtime.block_on(async {
            let view = format!(
                "CREATE VIEW {SAMPLES_VIEW} AS SELECT column1 AS user, column2 * 1000000 AS time, column3 AS item, \
                 0.5 AS x FROM (VALUES {rows})"
            );
            context.query(&view).await.unwrap();
            let narrow = context.table(SAMPLES_VIEW).await.unwrap().into_view();
            context.register_table(NARROW_VIEW, narrow).unwrap();
            let columns = context.table(SAMPLES_VIEW).await.unwrap().schema().as_arrow().clone();
            let samples = samples(&config, &columns).unwrap();
            let records = format!("(SELECT *, FALSE AS {TOTALS} FROM ({samples}))");
            let order = SampleOrder { order, buckets: Buckets::with_own_files(1) };
            let sessions = sessions(&config, &columns).unwrap();
            let joined = format!("({})", with_sessions(&config, &sessions, &records));
            let sql = sorted(&config, order, &joined, None, &["item"]);
            let start = format!("{START} / 1000000 AS start");
            let shown = ["item", &format!("{SESSION} AS session"), &start];
            let samples = context.query(&sql).await.unwrap().select_exprs(&shown).unwrap();
            let batches = samples.collect().await.unwrap();
            let schema = batches[0].schema();
            let rows = concat_batches(&schema, &batches).unwrap();
            let column = |i: usize| rows.column(i).as_primitive::<Int64Type>().values().to_vec();
            column(0).into_iter().zip(column(1)).zip(column(2)).map(|((item, id), start)| (item, id, start)).collect()
        })
    }

    const LOG: &str =
        "('b', 5, 1), ('a', 0, 2), ('a', 90, 3), ('a', 30, 4), ('b', 5, 5), ('a', 61, 6), ('a', 200, 7)";

    /// Returns the items and starts, and the number of sessions.
    fn shown(rows: &str, session: &str, order: Order) -> (Vec<(i64, i64)>, usize) {
        let samples = ordered_samples(rows, session, order);
        let ids: BTreeSet<i64> = samples.iter().map(|(_, id, _)| *id).collect();
        (samples.iter().map(|(item, _, start)| (*item, *start)).collect(), ids.len())
    }

    #[test]
    fn a_pause_beyond_the_gap_begins_a_session() {
        // User a: 0 and 30 are 30 s apart, which does not exceed the gap; 61 is 31 s after 30, and 90 is 29 s after 61.
        let samples = shown(LOG, "user = \"user\"\ngap = \"30s\"", Order::Session);
        let expected = vec![(2, 0), (4, 0), (1, 5), (5, 5), (6, 61), (3, 61), (7, 200)];
        assert_eq!(samples, (expected, 4));
    }

    #[test]
    fn arrival_order_is_that_of_times() {
        let samples = shown(LOG, "key = [\"user\"]", Order::Arrival);
        assert_eq!(samples, (vec![(2, 0), (1, 5), (5, 5), (4, 0), (6, 0), (3, 0), (7, 0)], 2));
    }

    #[test]
    fn hashed_sessions_ascend_by_their_ids() {
        let samples = ordered_samples(LOG, "key = [\"user\"]", Order::SessionHash);
        assert!(samples.is_sorted_by_key(|(_, id, _)| *id));
        let of_a: Vec<i64> =
            samples.iter().filter(|(_, _, start)| *start == 0).map(|(item, ..)| *item).collect();
        assert_eq!(of_a, [2, 4, 6, 3, 7]);
    }

    #[test]
    fn ids_are_those_of_the_format() {
        let samples = ordered_samples("('u1', 7, 1)", "key = [\"user\"]", Order::Session);
        let id = onefold_datasets::session_id("u1", "u1\u{1f}7000000");
        assert_eq!(samples, [(1, id, 7)]);
    }
}
