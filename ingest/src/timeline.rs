//! Window features that the ETL makes (`[[timelines]]`). Lists are not materialized: all rows are numbered in one
//! sequence, and each sample has the two positions between which its lists lie.
//!
//! Timeline number `N` is the table of all usable, distinct rows of its source. The rows are ordered by the key (`on`),
//! the time, `order` and the values, and numbered ([`POSITION`]). The rows that the samples of one key see are
//! therefore contiguous, and a sample's lists are the values from its start (inclusive) to its end (exclusive):
//!
//! ```text
//! position    0    1    2    3    4    5    6        a sample of user b that sees 3 of 4 rows, length = 2:
//! user        a    a    b    b    b    b    c          start 3, end 5: clicked_items = [40, 50]
//! item       10   20   30   40   50   60   70                          clicked_categories = [4, 5]
//! category    1    2    3    4    5    6    7
//! ```
//!
//! A hash divides keys into classes. The rows of each class are numbered separately, so that no sort has all rows. Each
//! class has its own range of positions.
//!
//! A sample at time t sees the rows of its key with `time + delay < t` and `time >= t - max_age`, and takes the last
//! `length` of them. If start and end are equal, the lists are empty, and the value of the positions has no meaning.
//!
//! **Columns of the samples.** [`Samples::wide`](crate::samples::Samples::wide) and `narrow` have two BIGINT columns
//! per timeline, [`start_column`] and [`end_column`], which are never null.
//!
//! **The rows that samples need.** [`ranges_sql`] divides the samples of each bucket, in the order of the dataset, into
//! runs. [`slices_sql`] returns the union of the windows of each run, a *slice*. The values of a window are contiguous
//! in the slice, and begin at the row with `POSITION = start`. The size of a slice is bounded for any order of the
//! samples, and rows between distant windows are left out.
//!
//! Positions are computed by window functions over one narrow sort of samples and rows together, which can spill. A
//! range join would compare each sample with each row of its key.

use std::sync::Arc;

use datafusion::arrow::array::Int64Array;
use datafusion::arrow::datatypes::DataType;
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::error::Result;
use datafusion::logical_expr::{ColumnarValue, ScalarUDF, Signature, SimpleScalarUDF, Volatility};
use onefold_datasets::hash_id;

use crate::config::TimelineConfig;
use crate::ids::functions::timeline_function_name;
use crate::sql::{enclosed, have_keys, numbered, our_keys, quote, same_keys, table as source_table};

/// The number of a row within its timeline: BIGINT.
pub(crate) const POSITION: &str = "__onefold_position";
/// The number of the first sample of a slice among the samples of its bucket: BIGINT.
pub(crate) const FIRST: &str = "__onefold_first";
/// The prefix of the `order` columns in the tables of a timeline; their number follows.
pub(crate) const ORDER: &str = "__onefold_o";
/// The prefix of the value columns in the tables of a timeline; their number follows.
pub(crate) const VALUE: &str = "__onefold_v";
/// The class of a row's key.
const CLASS: &str = "__onefold_class";
/// The name of [`class_function`] in SQL.
const CLASS_FUNCTION: &str = "__onefold_class_of";
/// The number of classes: many more than threads, so that all threads have about equally many rows.
const CLASSES: i64 = 1 << 12;
/// The number of positions of each class.
const CLASS_POSITIONS: i64 = 1 << 40;
/// Times are clamped to ±2^62 µs, so that no sum of a time and a delay overflows.
const LATEST: i64 = 1 << 62;

/// Returns the samples' column with the position of the first row of their lists in timeline `timeline`: BIGINT, not
/// null.
pub(crate) fn start_column(timeline: usize) -> String {
    format!("__onefold_t{timeline}_start")
}

/// Returns the samples' column with the position after the last row of their lists in timeline `timeline`: BIGINT, not
/// null.
pub(crate) fn end_column(timeline: usize) -> String {
    format!("__onefold_t{timeline}_end")
}

/// Returns the table with the rows of timeline `timeline` as its source has them.
pub(crate) fn log_table(timeline: usize) -> String {
    format!("__onefold_timeline_log{timeline}")
}

/// Returns the table with the numbered rows of timeline `timeline`: [`POSITION`], key, `__onefold_time`, values.
pub(crate) fn table(timeline: usize) -> String {
    format!("__onefold_timeline{timeline}")
}

/// Returns the table with start and end by the key and time of samples.
pub(crate) fn positions_table(timeline: usize) -> String {
    format!("__onefold_positions{timeline}")
}

/// Returns the SQL function that computes the class of a key of any columns: a number from 0 to [`CLASSES`] (exclusive)
/// that is the same on every machine.
pub(crate) fn class_function() -> ScalarUDF {
    let classes = |keys: &[ColumnarValue]| -> Result<ColumnarValue> {
        let keys = ColumnarValue::values_to_arrays(keys)?;
        let fields = keys.iter().map(|key| SortField::new(key.data_type().clone()));
        let rows = RowConverter::new(fields.collect())?.convert_columns(&keys)?;
        let classes = rows.iter().map(|row| hash_id(row.as_ref()) % CLASSES);
        Ok(ColumnarValue::Array(Arc::new(Int64Array::from_iter_values(classes))))
    };
    let signature = Signature::variadic_any(Volatility::Immutable);
    ScalarUDF::from(SimpleScalarUDF::new_with_signature(
        CLASS_FUNCTION,
        signature,
        DataType::Int64,
        Arc::new(classes),
    ))
}

/// Returns the query that makes [`table`] from [`log_table`].
pub(crate) fn numbered_sql(timeline: usize, config: &TimelineConfig) -> String {
    let keys = numbered("__onefold_k", config.on.len());
    let values = numbered(VALUE, config.columns.len());
    let order = [
        keys.clone(),
        vec!["__onefold_time".to_owned()],
        numbered(ORDER, config.order.len()),
        values.clone(),
    ];
    let keys = keys.join(", ");
    let classed = format!(
        "SELECT *, {CLASS_FUNCTION}({keys}) AS {CLASS} FROM {} WHERE NOT __onefold_unusable AND __onefold_row = 1",
        log_table(timeline),
    );
    format!(
        "SELECT CAST(row_number() OVER (PARTITION BY {CLASS} ORDER BY {}) AS BIGINT) - 1 + {CLASS} * {CLASS_POSITIONS} \
         AS {POSITION}, {keys}, __onefold_time, {} FROM ({classed})",
        order.concat().join(", "),
        values.join(", "),
    )
}

/// Returns the query that counts the values of a column of timeline `timeline`: the value and its count, both BIGINT.
pub(crate) fn counts_sql(timeline: usize, column: usize) -> String {
    format!("SELECT {VALUE}{column}, count(*) FROM {} GROUP BY {VALUE}{column}", table(timeline))
}

/// Returns the query of the distinct texts in a column of timeline `timeline`: the id that the timeline's function
/// returns (BIGINT), and the text. The query may also return texts of rows that are not in the timeline.
pub(crate) fn texts_sql(timeline: usize, config: &TimelineConfig, column: usize) -> String {
    let value = quote(&config.columns[column].1);
    let filter = config.condition.as_deref().map(|sql| format!(" WHERE {}", enclosed(sql)));
    format!(
        "SELECT DISTINCT {}({value}), {value} FROM {}{}",
        timeline_function_name(timeline, column),
        source_table(&config.source),
        filter.unwrap_or_default(),
    )
}

/// Returns the query of start and end in [`table`] for each key and time of `samples` (narrow, with `__onefold_time`):
/// the columns `__onefold_k0 …`, `__onefold_at`, [`start_column`] and [`end_column`].
///
/// Rows and samples are sorted together by key and by `__onefold_seen`. For a row, this is its time plus the delay; for
/// a sample, it is the microsecond before its time. The rows up to a sample are the rows that it sees.
pub(crate) fn positions_sql(timeline: usize, config: &TimelineConfig, samples: &str) -> String {
    let keys = numbered("__onefold_k", config.on.len()).join(", ");
    let within = |time: &str| format!("greatest(least({time}, {LATEST}), -{LATEST})");
    let probes = format!(
        "SELECT DISTINCT {}, __onefold_time AS __onefold_at, {} - 1 AS __onefold_seen, \
         CAST(NULL AS BIGINT) AS {POSITION} FROM ({samples}) WHERE {}",
        our_keys(&config.on),
        within("__onefold_time"),
        have_keys(&config.on)
    );
    let rows = format!(
        "SELECT {keys}, CAST(NULL AS BIGINT) AS __onefold_at, {} + {} AS __onefold_seen, {POSITION} FROM {}",
        within("__onefold_time"),
        config.delay_micros,
        table(timeline)
    );
    let window = |reach: &str| {
        format!(
            "OVER (PARTITION BY {keys} ORDER BY __onefold_seen RANGE BETWEEN {reach} PRECEDING AND CURRENT ROW)"
        )
    };
    // A row is young enough if its time is at least the sample's time less `max_age`. Here both times are expressed in
    // terms of `__onefold_seen`.
    let young = match config.max_age_micros {
        Some(age) => window(&(age - config.delay_micros - 1).to_string()),
        None => window("UNBOUNDED"),
    };
    let ranked = format!(
        "SELECT {keys}, __onefold_at, {POSITION}, max({POSITION}) {} AS __onefold_last, \
         count({POSITION}) {young} AS __onefold_young FROM ({probes} UNION ALL {rows})",
        window("UNBOUNDED")
    );
    format!(
        "SELECT {keys}, __onefold_at, coalesce(__onefold_last + 1, 0) - least(__onefold_young, {}) AS {}, \
         coalesce(__onefold_last + 1, 0) AS {} FROM ({ranked}) WHERE {POSITION} IS NULL",
        config.length,
        start_column(timeline),
        end_column(timeline),
    )
}

/// Returns the query of `samples` (with `__onefold_time`) with their [`start_column`] and [`end_column`].
pub(crate) fn placed_sql(timeline: usize, config: &TimelineConfig, samples: &str) -> String {
    let on = same_keys(&config.on);
    let place = |column: &str| format!("COALESCE(n.{column}, 0) AS {column}");
    format!(
        "SELECT s.*, {}, {} FROM {} n RIGHT JOIN ({samples}) s ON {on} AND n.__onefold_at = s.__onefold_time",
        place(&start_column(timeline)),
        place(&end_column(timeline)),
        positions_table(timeline),
    )
}

/// The largest number of positions of a block, by which [`slices_sql`] joins ranges of positions with rows.
const MOST_BLOCK_ROWS: usize = 256;

/// Returns the query that divides the positions of timeline `timeline` that samples need into slices.
///
/// `samples` is a query with a row per sample: the columns `place` (at least one), the columns that `order` names, and
/// [`start_column`] and [`end_column`]. Samples are numbered separately for each value of `place`, and no slice has
/// rows of two such values. The expressions `order` order the samples of a place. Samples with equal values of them
/// have the same number (SQL's `rank()`, from 1) and are in the same slice. A slice ends when its samples need about
/// `rows` rows.
///
/// The result has the columns `place`, [`FIRST`] (the number of the slice's first sample), `low` (inclusive) and `high`
/// (exclusive): a range of positions that the slice needs. The ranges of a slice are the islands of its overlapping
/// windows, so they neither overlap nor touch. Slices that need no rows are left out.
pub(crate) fn ranges_sql(
    timeline: usize,
    samples: &str,
    (place, order): (&[String], &[String]),
    rows: usize,
) -> String {
    let (start, end) = (start_column(timeline), end_column(timeline));
    let (place, order) = (place.join(", "), order.join(", "));
    // Also ordering by start and end makes the predecessor of each sample unique, so that the query returns the same
    // slices each time.
    let before = format!("OVER (PARTITION BY {place} ORDER BY {order}, {start}, {end})");
    let ranked = format!(
        "SELECT {place}, {start} AS low, {end} AS high, \
         CAST(rank() OVER (PARTITION BY {place} ORDER BY {order}) AS BIGINT) AS number, \
         lag({start}) {before} AS low_before, lag({end}) {before} AS high_before FROM {samples}"
    );
    // The rows that the previous sample does not need, if its window overlaps, as the windows of a user's samples
    // mostly do.
    let added = "CASE WHEN low >= low_before AND low <= high_before THEN greatest(high - high_before, 0) ELSE high - low END";
    let summed = format!(
        "SELECT {place}, low, high, number, sum({added}) OVER (PARTITION BY {place} ORDER BY number) / {rows} AS slice \
         FROM ({ranked})"
    );
    let first =
        format!("min(number) OVER (PARTITION BY {place}, slice ORDER BY number ROWS UNBOUNDED PRECEDING)");
    let windows = format!("SELECT {place}, low, high, {first} AS {FIRST} FROM ({summed})");
    let over = format!("OVER (PARTITION BY {place}, {FIRST} ORDER BY low, high ROWS");
    let reached = format!(
        "SELECT *, max(high) {over} BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached \
         FROM (SELECT DISTINCT {place}, {FIRST}, low, high FROM ({windows}) WHERE high > low)"
    );
    let begins = "CASE WHEN low <= reached THEN 0 ELSE 1 END";
    let islands = format!("SELECT *, sum({begins}) {over} UNBOUNDED PRECEDING) AS island FROM ({reached})");
    format!(
        "SELECT {place}, {FIRST}, min(low) AS low, max(high) AS high FROM ({islands}) GROUP BY {place}, {FIRST}, island"
    )
}

/// Returns the query of the rows of timeline `timeline` in `ranges`: a table, or a query in parentheses, of the form
/// that [`ranges_sql`] returns, with the columns `place`.
///
/// The result has the columns `place`, [`FIRST`], [`POSITION`] (BIGINT), then the values of the lists (BIGINT, without
/// nulls), each under its feature's name in the order of `[timelines.columns]`. It has no order.
///
/// The rows of a range are found by blocks of positions, so that no range is compared with all rows.
pub(crate) fn slices_sql(timeline: usize, config: &TimelineConfig, ranges: &str, place: &[String]) -> String {
    let block = config.length.clamp(16, MOST_BLOCK_ROWS);
    let blocks =
        format!("SELECT *, unnest(range(low / {block}, (high - 1) / {block} + 1)) AS block FROM {ranges}");
    let values: Vec<String> = config
        .columns
        .iter()
        .enumerate()
        .map(|(i, (feature, _))| format!("t.{VALUE}{i} AS {}", quote(feature)))
        .collect();
    format!(
        "SELECT {}, {FIRST}, t.{POSITION}, {} FROM ({blocks}) r JOIN {} t ON r.block = t.{POSITION} / {block} \
         AND t.{POSITION} >= r.low AND t.{POSITION} < r.high",
        place.join(", "),
        values.join(", "),
        table(timeline),
    )
}

#[cfg(test)]
pub(crate) mod tests;
