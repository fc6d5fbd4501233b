//! Window features made by the ETL (`[[timelines]]`), without the lists: one numbered sequence of all rows, and for
//! every sample the two positions between which its lists lie.
//!
//! The **timeline** `N` is the table of all usable, distinct rows of its source, ordered by the key (`on`), then the
//! time, then `order` and the values, and numbered ([`POSITION`]). The rows that one key's samples see are thus
//! contiguous, and a sample's lists are the values from its start to before its end:
//!
//! ```text
//! position    0    1    2    3    4    5    6        a sample of user b, after 3 of his 4 rows, length = 2:
//! user        a    a    b    b    b    b    c          start 3, end 5: clicked_items = [40, 50]
//! item       10   20   30   40   50   60   70                          clicked_categories = [4, 5]
//! category    1    2    3    4    5    6    7
//! ```
//!
//! Keys are divided into classes by a hash. The rows of a class are numbered for themselves, so that no sort has all
//! rows; the positions of a class begin where no other class reaches.
//!
//! A sample at time t sees the rows of its key with `time + delay < t`, strictly; of these, those with `time >= t -
//! max_age`; of these, the last `length`. Equal starts and ends mean empty lists; nothing else is said by them then.
//!
//! **What the samples have.** [`Samples::wide`](crate::samples::Samples::wide) and `narrow` have two BIGINT columns per
//! timeline, [`start_column`] and [`end_column`], never null.
//!
//! **The rows that samples need.** [`ranges_sql`] divides the samples of each bucket, in the order of the dataset, into
//! runs, and [`slices_sql`] gives for each run the union of its samples' windows: a *slice*. The values of a window are contiguous in
//! the slice, and begin where the row with `POSITION = start` is. A slice is bounded whatever the order of the samples,
//! and rows between windows that lie far apart are left out.
//!
//! Positions come from one narrow sort of samples and rows together and window functions, which spill; a join by range
//! would compare every sample with every row of its key.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array};
use datafusion::arrow::datatypes::DataType;
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::error::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use onefold_datasets::hash_id;

use crate::config::TimelineConfig;
use crate::ids::functions::timeline_function_name;
use crate::sql::{enclosed, equal, numbered, quote, table as source_table};

/// Number of a row within its timeline: BIGINT.
pub const POSITION: &str = "__onefold_position";
/// The number of the first sample of a slice among the samples of its bucket: BIGINT.
pub const FIRST: &str = "__onefold_first";
/// What the columns of `order` are called in the tables of a timeline, with their number.
pub(crate) const ORDER: &str = "__onefold_o";
/// What the values are called there, likewise.
pub(crate) const VALUE: &str = "__onefold_v";
/// The class of a row's key.
const CLASS: &str = "__onefold_class";
/// The name of [`class_function`] in SQL.
const CLASS_FUNCTION: &str = "__onefold_class_of";
/// The number of classes: many more than threads, so that all of these have about as many rows.
const CLASSES: i64 = 1 << 12;
/// The positions that each class has.
const CLASS_POSITIONS: i64 = 1 << 40;
/// Times are kept within ±2^62 µs, so that no sum of a time and a delay overflows.
const LATEST: i64 = 1 << 62;

/// The samples' column with the position of the first row of their lists in timeline `timeline`: BIGINT, not null.
pub fn start_column(timeline: usize) -> String {
    format!("__onefold_t{timeline}_start")
}

/// The samples' column with the position after the last row of their lists in timeline `timeline`: BIGINT, not null.
pub fn end_column(timeline: usize) -> String {
    format!("__onefold_t{timeline}_end")
}

/// The table with the rows of timeline `timeline` as its source has them.
pub(crate) fn log_table(timeline: usize) -> String {
    format!("__onefold_timeline_log{timeline}")
}

/// The table with the numbered rows of timeline `timeline`: [`POSITION`], key, `__onefold_time`, values.
pub(crate) fn table(timeline: usize) -> String {
    format!("__onefold_timeline{timeline}")
}

/// The table with start and end by key and time of a sample.
pub(crate) fn positions_table(timeline: usize) -> String {
    format!("__onefold_positions{timeline}")
}

/// The SQL function that gives the class of a key of any columns: a number from 0 to before [`CLASSES`] that is the same
/// on every machine.
pub(crate) fn class_function() -> ScalarUDF {
    ScalarUDF::from(ClassOf(Signature::variadic_any(Volatility::Immutable)))
}

/// See [`class_function`].
#[derive(Debug, PartialEq, Eq, Hash)]
struct ClassOf(Signature);

impl ScalarUDFImpl for ClassOf {
    fn name(&self) -> &str {
        CLASS_FUNCTION
    }

    fn signature(&self) -> &Signature {
        &self.0
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Int64)
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let keys: Vec<ArrayRef> =
            arguments.args.iter().map(|key| key.to_array(arguments.number_rows)).collect::<Result<_>>()?;
        let fields = keys.iter().map(|key| SortField::new(key.data_type().clone()));
        let rows = RowConverter::new(fields.collect())?.convert_columns(&keys)?;
        let classes = rows.iter().map(|row| hash_id(row.as_ref()) % CLASSES);
        Ok(ColumnarValue::Array(Arc::new(Int64Array::from_iter_values(classes))))
    }
}

/// The query that makes [`table`] from [`log_table`].
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

/// The query that counts the values of a column of timeline `timeline`: the value and its count, both BIGINT.
pub(crate) fn counts_sql(timeline: usize, column: usize) -> String {
    format!("SELECT {VALUE}{column}, count(*) FROM {} GROUP BY {VALUE}{column}", table(timeline))
}

/// The query of the distinct values of a column of timeline `timeline` whose ids stand for texts: the id that the
/// timeline's function gives (BIGINT), and the value. Other rows than those of the timeline may have some of them.
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

/// The query that gives, for every key and time of `samples` (narrow, with `__onefold_time`), start and end in
/// [`table`]: columns `__onefold_k0 …`, `__onefold_at`, [`start_column`] and [`end_column`].
///
/// Rows and samples are sorted together, by key and the last instant at which a row is visible: that of a row is its
/// time plus the delay, that of a sample the microsecond before its time. The rows before a sample are those it sees.
pub(crate) fn positions_sql(timeline: usize, config: &TimelineConfig, samples: &str) -> String {
    let keys = numbered("__onefold_k", config.on.len());
    let ours: Vec<String> =
        config.on.iter().zip(&keys).map(|((ours, _), key)| format!("{} AS {key}", quote(ours))).collect();
    let present: Vec<String> =
        config.on.iter().map(|(ours, _)| format!("{} IS NOT NULL", quote(ours))).collect();
    let keys = keys.join(", ");
    let within = |time: &str| format!("greatest(least({time}, {LATEST}), -{LATEST})");
    let probes = format!(
        "SELECT DISTINCT {}, __onefold_time AS __onefold_at, {} - 1 AS __onefold_seen, \
         CAST(NULL AS BIGINT) AS {POSITION} FROM ({samples}) WHERE {}",
        ours.join(", "),
        within("__onefold_time"),
        present.join(" AND ")
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
    // A row is young enough if its time is at least the sample's less `max_age`; both are shifted to `__onefold_seen`
    // here.
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

/// `samples` (with `__onefold_time`) and their [`start_column`] and [`end_column`].
pub(crate) fn placed_sql(timeline: usize, config: &TimelineConfig, samples: &str) -> String {
    let keys = config.on.iter().enumerate();
    let on = equal(keys.map(|(i, (ours, _))| (format!("n.__onefold_k{i}"), format!("s.{}", quote(ours)))));
    let place = |column: &str| format!("COALESCE(n.{column}, 0) AS {column}");
    format!(
        "SELECT s.*, {}, {} FROM {} n RIGHT JOIN ({samples}) s ON {on} AND n.__onefold_at = s.__onefold_time",
        place(&start_column(timeline)),
        place(&end_column(timeline)),
        positions_table(timeline),
    )
}

/// The most rows of a block, by which [`slices_sql`] joins ranges of positions with rows.
const MOST_BLOCK_ROWS: usize = 256;

/// The query that divides the positions of timeline `timeline` that samples need into slices.
///
/// `samples` is a query with a row for every sample: the columns `place`, of which there is one at least, those that
/// `order` names, and [`start_column`] and [`end_column`]. `place` tells apart the samples that are numbered for
/// themselves, and no slice has rows for two such places; `order` are the expressions that order the samples of a place.
/// Samples that they do not tell apart have one number (SQL's `rank()`, from 1) and are in one slice. A slice ends when
/// its samples need about `rows` rows.
///
/// The result has the columns `place`, [`FIRST`] (the number of the slice's first sample), `low` and `high`: a range of
/// positions that the slice needs, from `low` to before `high`. The ranges of a slice, islands of overlapping windows,
/// neither overlap nor touch. A slice of which no row is needed is left out.
pub fn ranges_sql(
    timeline: usize,
    samples: &str,
    (place, order): (&[String], &[String]),
    rows: usize,
) -> String {
    let (start, end) = (start_column(timeline), end_column(timeline));
    let (place, order) = (place.join(", "), order.join(", "));
    // Of samples of one number, the one before is always the same, so the query gives the same slices each time.
    let before = format!("OVER (PARTITION BY {place} ORDER BY {order}, {start}, {end})");
    let ranked = format!(
        "SELECT {place}, {start} AS low, {end} AS high, \
         CAST(rank() OVER (PARTITION BY {place} ORDER BY {order}) AS BIGINT) AS number, \
         lag({start}) {before} AS low_before, lag({end}) {before} AS high_before FROM {samples}"
    );
    // Rows that the sample before does not need, if its window overlaps; windows of a user's samples mostly do.
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

/// The query that gives the rows of timeline `timeline` in `ranges`, which is a table or a query in parentheses as
/// [`ranges_sql`] makes it with these columns `place`.
///
/// The result has the columns `place`, [`FIRST`], [`POSITION`] (BIGINT), then the lists' values (BIGINT, without nulls),
/// each under its feature's name in the order of `[timelines.columns]`. It is in no order.
///
/// The rows of a range are found by blocks of positions, so that no range is compared with all rows.
pub fn slices_sql(timeline: usize, config: &TimelineConfig, ranges: &str, place: &[String]) -> String {
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
