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
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::Arc;

    use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch};
    use datafusion::arrow::datatypes::Int64Type;
    use datafusion::prelude::SessionContext;
    use onefold_base::fault::{Explain, Kind};
    use onefold_sql::Query as _;
    use proptest::prelude::*;

    use super::*;

    /// The values of a row.
    type Values = (i64, i64);
    use crate::Config;
    use crate::samples::{SkipCounts, plan};

    /// A row of the event log: user, time, id, item and kind; times are few, so that many tie.
    type Event = [i64; 5];
    /// A row of the feature log: request, user and time.
    type Sample = [i64; 3];

    /// How the window of a test looks.
    #[derive(Debug, Clone)]
    struct Window {
        length: usize,
        delay: i64,
        max_age: Option<i64>,
        only_clicks: bool,
        with_key: bool,
    }

    impl Window {
        fn config(&self) -> Config {
            let max_age = self.max_age.map(|age| format!("max_age = \"{age}us\"\n")).unwrap_or_default();
            let condition = if self.only_clicks { "where = \"kind = 1\"\n" } else { "" };
            let key = if self.with_key { "key = [\"event\"]\n" } else { "" };
            let text = format!(
                "format_version = 1\n[sources]\nfeatures = \"x\"\nevents = \"x\"\n[samples]\nsource = \"features\"\n\
                 key = [\"request\"]\n[session]\nkey = [\"user\"]\n\
                 time = {{ column = \"time\", unit = \"us\", not_before = 1970-01-01 }}\n[[timelines]]\nsource = \"events\"\n\
                 on = {{ user = \"who\" }}\n\
                 time = {{ column = \"at\", unit = \"us\", not_before = 1970-01-01 }}\norder = [\"event\"]\nlength = {}\ndelay = \"{}us\"\n{max_age}\
                 {condition}{key}columns = {{ items = \"item\", events = \"event\" }}\n[features]\nrequest = {{ kind = \"label\" }}\n\
                 items = {{ kind = \"sequence\" }}\nevents = {{ kind = \"sequence\" }}\n",
                self.length, self.delay
            );
            Config::parse(Path::new("dataset.toml"), &text.replace("delay = \"0us\"", "delay = \"0s\""))
                .unwrap()
        }

        /// The lists of a sample by definition: pairs of item and event.
        fn lists(&self, events: &[Event], [_, user, time]: Sample) -> Vec<(i64, i64)> {
            let mut seen: Vec<Event> = events
                .iter()
                .copied()
                .filter(|[who, at, _, _, kind]| {
                    *who == user
                        && at + self.delay < time
                        && self.max_age.is_none_or(|age| *at >= time - age)
                        && (!self.only_clicks || *kind == 1)
                })
                .collect();
            seen.sort_by_key(|[_, at, event, item, kind]| (*at, *event, *item, *kind));
            seen.dedup();
            let first = seen.len().saturating_sub(self.length);
            seen[first..].iter().map(|[_, _, event, item, _]| (*item, *event)).collect()
        }
    }

    /// Makes rows of numbers the table `name`.
    pub(crate) fn register<const N: usize>(
        context: &SessionContext,
        name: &str,
        columns: [&str; N],
        rows: &[[i64; N]],
    ) {
        let column = |i: usize| Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row[i]))) as _;
        let batch =
            RecordBatch::try_from_iter(columns.iter().enumerate().map(|(i, name)| (*name, column(i))));
        context.register_batch(name, batch.unwrap()).unwrap();
    }

    /// The rows of numbers that `sql` gives.
    pub(crate) async fn rows(context: &SessionContext, sql: &str) -> Vec<Vec<i64>> {
        let mut rows = Vec::new();
        for batch in context.query(sql).await.unwrap().collect().await.unwrap() {
            let columns: Vec<&Int64Array> =
                batch.columns().iter().map(|column| column.as_primitive::<Int64Type>()).collect();
            rows.extend(
                (0..batch.num_rows()).map(|row| columns.iter().map(|column| column.value(row)).collect()),
            );
        }
        rows
    }

    /// Every sample's lists, put together from slices and positions as a build does; checks the contract on the way.
    /// `session` is an SQL expression by which the samples are ordered, before their time; so many `places` are numbered
    /// for themselves.
    async fn built(
        window: &Window,
        events: &[Event],
        samples: &[Sample],
        (session, places): (&str, usize),
        slice_rows: usize,
    ) -> BTreeMap<i64, Vec<(i64, i64)>> {
        let context = SessionContext::new();
        register(&context, "events", ["who", "at", "event", "item", "kind"], events);
        register(&context, "features", ["request", "user", "time"], samples);
        let config = window.config();
        let planned = plan(&context, &config).await.unwrap();
        for (name, frame) in [("narrow", &planned.narrow), ("wide", &planned.wide)] {
            context.register_table(name, frame.clone().into_view()).unwrap();
        }
        let (start, end) = (start_column(0), end_column(0));
        let windows = |table: &str| format!("SELECT request, {start}, {end} FROM {table} ORDER BY request");
        assert_eq!(rows(&context, &windows("narrow")).await, rows(&context, &windows("wide")).await);
        // Samples that the order does not tell apart are in one slice, and so is a sample's window.
        let instants =
            samples.iter().map(|[_, _, time]| samples.iter().filter(|other| other[2] == *time).count());
        let most_at_once = (1 + instants.max().unwrap_or(0)) * window.length;
        let ordered =
            format!("SELECT *, {session} AS \"a session\", \"user\" % {places} AS \"a place\" FROM narrow");
        let place = ["\"a place\"".to_owned()];
        let order = ["\"a session\"".to_owned(), "\"time\"".to_owned()];
        let ranges = ranges_sql(0, &format!("({ordered})"), (&place, &order), slice_rows);
        let sql = slices_sql(0, &config.timelines[0], &format!("({ranges})"), &place);
        let mut by_first: BTreeMap<[i64; 2], Vec<(i64, Values)>> = BTreeMap::new();
        for row in
            rows(&context, &format!("SELECT * FROM ({sql}) ORDER BY \"a place\", {FIRST}, {POSITION}")).await
        {
            by_first.entry([row[0], row[1]]).or_default().push((row[2], (row[3], row[4])));
        }
        for slice in by_first.values() {
            assert!(slice.is_sorted_by(|a, b| a.0 < b.0), "a slice has a row twice");
        }
        let samples = rows(
            &context,
            &format!(
                "SELECT request, \"a place\", CAST(rank() OVER (PARTITION BY \"a place\" ORDER BY {}) AS BIGINT), \
                 {start}, {end} FROM ({ordered})",
                order.join(", ")
            ),
        )
        .await;
        let mut needed: BTreeMap<[i64; 2], std::collections::BTreeSet<i64>> = BTreeMap::new();
        let mut lists = BTreeMap::new();
        for sample in samples {
            let [request, place, number, start, end] = sample[..] else { unreachable!() };
            let none = Vec::new();
            let until = by_first.range([place, 0]..=[place, number]).next_back();
            let (slice_number, slice) = until.map_or(([place, 0], &none), |(first, slice)| (*first, slice));
            needed.entry(slice_number).or_default().extend(start..end);
            let first = slice.partition_point(|(position, _)| *position < start);
            let list = &slice[first.min(slice.len())..][..(end - start) as usize];
            assert!(list.iter().zip(start..).all(|((position, _), wanted)| *position == wanted));
            assert_eq!(lists.insert(request, list.iter().map(|(_, values)| *values).collect()), None);
        }
        // Nothing is read that no sample of the slice needs, and no slice is much larger than asked for.
        for (first, slice) in by_first {
            let positions: Vec<i64> = slice.iter().map(|(position, _)| *position).collect();
            assert_eq!(needed.remove(&first).unwrap().into_iter().collect::<Vec<_>>(), positions);
            assert!(positions.len() <= slice_rows + most_at_once, "{} rows", positions.len());
        }
        lists
    }

    fn windows() -> impl Strategy<Value = Window> {
        let max_age = proptest::option::of(4i64..30);
        (1usize..5, 0i64..4, max_age, any::<bool>(), any::<bool>()).prop_map(
            |(length, delay, max_age, only_clicks, with_key)| Window {
                length,
                delay,
                max_age,
                only_clicks,
                with_key,
            },
        )
    }

    fn logs() -> impl Strategy<Value = (Vec<Event>, Vec<Sample>)> {
        let event = (0i64..3, 0i64..40, 0i64..2).prop_map(|(user, at, kind)| [user, at, 0, 0, kind]);
        let sample = (0i64..4, 0i64..45).prop_map(|(user, time)| [0, user, time]);
        let events = proptest::collection::vec((event, 1usize..3), 0..40).prop_map(|events| {
            let numbered = events.into_iter().enumerate();
            let copies = numbered.flat_map(|(i, ([user, at, _, _, kind], copies))| {
                // Ids fall as others rise, so that `order` decides between events of one time.
                std::iter::repeat_n([user, at, 100 - i as i64, 7 * i as i64 % 5, kind], copies)
            });
            copies.collect()
        });
        let samples = proptest::collection::vec(sample, 1..30).prop_map(|samples| {
            samples.into_iter().enumerate().map(|(i, [_, user, time])| [i as i64, user, time]).collect()
        });
        (events, samples)
    }

    proptest! {
        #![proptest_config(onefold_property::cases(48))]

        #[test]
        fn lists_are_the_last_rows_before_the_sample(
            window in windows(),
            (events, samples) in logs(),
            session in prop_oneof![Just("\"user\" * 10 + time / 10"), Just("time / 15"), Just("\"user\""), Just("0")],
            places in 1..4_usize,
            slice_rows in prop_oneof![1..10_usize, Just(1 << 20)],
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let lists = runtime.block_on(built(&window, &events, &samples, (session, places), slice_rows));
            prop_assert_eq!(lists.len(), samples.len());
            for sample in samples {
                prop_assert_eq!(&lists[&sample[0]], &window.lists(&events, sample), "{:?}", sample);
            }
        }
    }

    fn run(window: &Window, events: &[Event], samples: &[Sample]) -> BTreeMap<i64, Vec<(i64, i64)>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(built(window, events, samples, ("\"user\"", 1), 8))
    }

    #[test]
    fn neither_a_later_event_nor_one_of_the_same_instant_is_seen() {
        let window = Window { length: 9, delay: 0, max_age: None, only_clicks: false, with_key: true };
        let events = [[1, 10, 1, 5, 0], [1, 20, 2, 6, 0], [1, 30, 3, 7, 0], [2, 5, 4, 8, 0]];
        let samples = [[1, 1, 10], [2, 1, 20], [3, 1, 21], [4, 2, 100], [5, 3, 100]];
        let lists = run(&window, &events, &samples);
        let expected =
            [(1, vec![]), (2, vec![(5, 1)]), (3, vec![(5, 1), (6, 2)]), (4, vec![(8, 4)]), (5, vec![])];
        assert_eq!(lists, BTreeMap::from(expected));
        let late = run(&Window { delay: 1, ..window }, &events, &samples);
        assert_eq!(late[&3], [(5, 1)], "an event of the microsecond before is not visible yet");
    }

    #[test]
    fn times_at_the_ends_of_the_range_leak_nothing() {
        // The first moment that checks allow here, and one long after the samples.
        let (first, late) = (0, 1_600_000_000_000_000);
        let window = Window { length: 9, delay: 3, max_age: Some(10), only_clicks: false, with_key: true };
        let events = [[1, late, 1, 5, 0], [1, first, 2, 6, 0], [1, 2, 3, 7, 0]];
        let lists = run(&window, &events, &[[1, 1, 10], [2, 1, first], [3, 1, 5]]);
        assert_eq!(lists, BTreeMap::from([(1, vec![(6, 2), (7, 3)]), (2, vec![]), (3, vec![(6, 2)])]));
    }

    /// Plans over events of which one has no item.
    fn planned(sections: &str) -> crate::Result<SkipCounts> {
        let window = Window { length: 9, delay: 0, max_age: None, only_clicks: false, with_key: true };
        let mut config = window.config();
        config.checks = (!sections.is_empty()).then(|| crate::config::ChecksConfig {
            null_keys: crate::config::Policy::Skip,
            ..crate::config::ChecksConfig::default()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let context = SessionContext::new();
            register(&context, "features", ["request", "user", "time"], &[[1, 1, 10]]);
            let events = "CREATE TABLE events AS SELECT column1 AS who, column2 AS at, column3 AS event, column4 AS item \
                          FROM (VALUES (1, 5, 1, 7), (1, 6, 2, NULL), (1, 5, 1, 7), (NULL, 5, 3, 7))";
            context.query(events).await.unwrap();
            plan(&context, &config).await.map(|samples| samples.skipped)
        })
    }

    #[test]
    fn events_without_user_or_value_are_refused_or_counted() {
        let error = planned("").unwrap_err();
        assert_eq!(error.fault().kind, Kind::Data);
        assert!(
            error
                .to_string()
                .contains("2 rows of `events` have no value in a column that `[[timelines]]` 1 needs"),
            "{error}"
        );
        let skipped = planned("skip").unwrap();
        assert_eq!(skipped, SkipCounts { null_key_rows: 2, duplicate_events: 1, ..SkipCounts::default() });
    }
}
