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
use crate::config::Config;
use crate::problems::Problems;
use crate::samples::{SkipCounts, plan};

/// The values of a row.
type Values = (i64, i64);

/// A row of the event log: user, time, id, item and kind. There are few different times, so that many events tie.
type Event = [i64; 5];
/// A row of the feature log: request, user and time.
type Sample = [i64; 3];

/// The options of a window.
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
        Config::parse(Path::new("dataset.toml"), &text.replace("delay = \"0us\"", "delay = \"0s\"")).unwrap()
    }

    /// Returns the lists of a sample by definition, as pairs of item and event.
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

/// Registers rows of numbers as the table `name`.
pub(crate) fn register<const N: usize>(
    context: &SessionContext,
    name: &str,
    columns: [&str; N],
    rows: &[[i64; N]],
) {
    let column = |i: usize| Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row[i]))) as _;
    let batch = RecordBatch::try_from_iter(columns.iter().enumerate().map(|(i, name)| (*name, column(i))));
    context.register_batch(name, batch.unwrap()).unwrap();
}

/// Returns the rows of numbers that `sql` selects.
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

/// Returns the lists of each sample, assembled from slices and positions as a build does, and checks the contract of
/// slices. `session` is an SQL expression that orders the samples before their time. Samples are numbered separately in
/// each of `places` places.
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
    let planned = plan(&context, &config, &Problems::default()).await.unwrap();
    for (name, frame) in [("narrow", &planned.narrow), ("wide", &planned.wide)] {
        context.register_table(name, frame.clone().into_view()).unwrap();
    }
    let (start, end) = (start_column(0), end_column(0));
    let windows = |table: &str| format!("SELECT request, {start}, {end} FROM {table} ORDER BY request");
    assert_eq!(rows(&context, &windows("narrow")).await, rows(&context, &windows("wide")).await);
    // Samples that the order does not distinguish are in one slice, and the window of a sample is in one slice.
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
    // A slice has only rows that its samples need, and is not much larger than requested.
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
            // Ids fall from event to event, so that `order` decides between events with equal times.
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
    // The earliest time that the checks allow here, and a time long after the samples.
    let (first, late) = (0, 1_600_000_000_000_000);
    let window = Window { length: 9, delay: 3, max_age: Some(10), only_clicks: false, with_key: true };
    let events = [[1, late, 1, 5, 0], [1, first, 2, 6, 0], [1, 2, 3, 7, 0]];
    let lists = run(&window, &events, &[[1, 1, 10], [2, 1, first], [3, 1, 5]]);
    assert_eq!(lists, BTreeMap::from([(1, vec![(6, 2), (7, 3)]), (2, vec![]), (3, vec![(6, 2)])]));
}

/// Plans samples over events, one of which has no item.
fn planned(sections: &str) -> crate::error::Result<SkipCounts> {
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
            plan(&context, &config, &Problems::default()).await.map(|samples| samples.skipped)
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
