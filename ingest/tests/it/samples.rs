//! Declared steps over logs on disk build the same dataset as a query written by hand.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray,
};
use arrow::compute::{concat_batches, sort_to_indices, take_record_batch};
use arrow::datatypes::Int64Type;
use onefold_datasets::{Snapshot, TIME_COLUMN};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// The number of requests in the feature log.
const REQUESTS: i64 = 6000;
/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
const SECOND: i64 = 1_000_000;
const LIMIT: &str = "--memory-limit 128MiB";

const HEAD: &str = "format_version = 1\n[sources]\nfeatures = \"features.parquet\"\nevents = \"events.parquet\"\nusers = \"users.parquet\"\n\
     [session]\nuser = \"user\"\ngap = \"30m\"\ntime = \"time\"\norder = [\"request\"]\n[partition]\nby = \"hour\"\n\
     [features]\nclicked = { kind = \"label\" }\nweight = { kind = \"weight\" }\nage = { kind = \"dense\" }\n\
     seconds = { kind = \"dense\" }\nclicks = { kind = \"sequence\", group = \"clicks\" }\n\
     watched = { kind = \"sequence\", group = \"clicks\" }\nhistory = { kind = \"sequence\", group = \"history\" }\nitem = { kind = \"sparse\" }\n";

const DECLARED: &str = r#"
[samples]
source = "features"
key = ["request"]
where = "item < 90"

[join]
source = "events"
on = { request = "of" }
time = "at"
window = "10m"
key = ["id"]
[join.labels]
clicked = { when = "is_click" }
seconds = { value = "max(seconds)" }

[[attributes]]
source = "users"
on = ["user"]
time = "since"
columns = ["age"]
missing = "skip"

[sampling]
label = "clicked"
keep = { "0" = 0.25 }
seed = 7
weight = "weight"

[[timelines]]
source = "events"
on = { user = "who" }
time = "at"
where = "is_click"
order = ["id"]
length = 5
delay = "30s"
max_age = "30m"
columns = { clicks = "id", watched = "seconds" }
"#;

/// A query written by hand that is equivalent for this log, in which copies of rows are equal.
const QUERY: &str = r#"
[samples]
query = """
WITH first AS (SELECT DISTINCT * FROM features WHERE item < 90),
labelled AS (
    SELECT f.request, max(CASE WHEN is_click THEN 1 ELSE 0 END) AS clicked, max(e.seconds) AS seconds
    FROM (SELECT DISTINCT * FROM events) e
    JOIN first f ON f.request = e.of AND e.at >= f.time AND e.at <= f.time + INTERVAL '10 minutes'
    GROUP BY f.request
),
past AS (
    SELECT f.request, e.*, row_number() OVER (PARTITION BY f.request ORDER BY e.at DESC, e.id DESC) AS place
    FROM (SELECT DISTINCT * FROM events WHERE is_click) e
    JOIN first f ON f.user = e.who AND e.at + INTERVAL '30 seconds' < f.time AND e.at >= f.time - INTERVAL '30 minutes'
),
windows AS (
    SELECT request, array_agg(id ORDER BY place DESC) AS clicks, array_agg(seconds ORDER BY place DESC) AS watched
    FROM past WHERE place <= 5 GROUP BY request
),
aged AS (
    SELECT f.request, u.age, row_number() OVER (PARTITION BY f.request ORDER BY u.since DESC) AS place
    FROM first f JOIN users u ON u.user = f.user AND u.since <= f.time
)
SELECT f.*, coalesce(l.clicked, 0) AS clicked, coalesce(l.seconds, 0) AS seconds, a.age, w.clicks, w.watched,
    CASE WHEN coalesce(l.clicked, 0) = 1 THEN 1.0 ELSE 4.0 END AS weight
FROM first f JOIN aged a ON a.request = f.request AND a.place = 1 LEFT JOIN labelled l ON l.request = f.request
LEFT JOIN windows w ON w.request = f.request
WHERE coalesce(l.clicked, 0) = 1 OR left(md5('7|' || CAST(f.request AS VARCHAR)), 16) < '4000000000000000'
"""
"#;

fn numbers(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

fn times(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(TimestampMicrosecondArray::from_iter_values(values))
}

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let file = fs_err::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file.into_file(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Writes logs in which every seventh request and every fifth event is delivered twice.
fn write_logs(folder: &Path) {
    let delivered: Vec<i64> = (0..REQUESTS).chain((0..REQUESTS).step_by(7)).collect();
    let all = || delivered.iter().copied();
    let time = |request: i64| DAY + request * 3 * SECOND;
    let history = |request: i64| Some((0..40).map(move |i| Some(request / 50 % 11 * 1000 + i)));
    write(
        &folder.join("features.parquet"),
        vec![
            ("request", numbers(all())),
            ("user", numbers(all().map(|request| request % 37))),
            ("time", times(all().map(time))),
            ("item", numbers(all().map(|request| request * 31 % 100))),
            ("history", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(all().map(history)))),
        ],
    );
    let events: Vec<i64> = (0..REQUESTS).chain((0..REQUESTS).step_by(5)).collect();
    let all = || events.iter().copied();
    let of = |id: i64| id * 17 % (REQUESTS + 500);
    write(
        &folder.join("events.parquet"),
        vec![
            ("id", numbers(all())),
            ("of", numbers(all().map(of))),
            ("who", numbers(all().map(|id| of(id) % 37))),
            ("at", times(all().map(|id| time(of(id)) + (id % 900 - 100) * SECOND))),
            ("is_click", Arc::new(BooleanArray::from_iter(all().map(|id| Some(id % 3 == 0))))),
            ("seconds", numbers(all().map(|id| id % 60))),
        ],
    );
    let changes: Vec<(i64, i64)> =
        (0..35).flat_map(|user| (0..5).map(move |change| (user, change))).collect();
    write(
        &folder.join("users.parquet"),
        vec![
            ("user", numbers(changes.iter().map(|(user, _)| *user))),
            ("since", times(changes.iter().map(|(user, change)| DAY + (change * 3600 + user) * SECOND))),
            ("age", numbers(changes.iter().map(|(user, change)| 20 + user + 50 * change))),
        ],
    );
}

fn build(folder: &Path, steps: &str, out: &str) -> Output {
    // The query joins each event with all clicks of its user, which needs more memory.
    let limit = if steps == QUERY { "--memory-limit 1GiB" } else { LIMIT };
    build_config(folder, &format!("{HEAD}{steps}"), limit, out)
}

/// Builds the dataset `out` with the configuration `text`.
fn build_config(folder: &Path, text: &str, options: &str, out: &str) -> Output {
    let config = folder.join(format!("{out}.toml"));
    fs_err::write(&config, text).unwrap();
    Command::new(env!("CARGO_BIN_EXE_onefold-ingest"))
        .args(["build", "--threads", "2", "--layout", "rows"])
        .args(options.split_whitespace())
        .arg("--out")
        .arg(folder.join(out))
        .arg(config)
        .output()
        .unwrap()
}

/// Reads all samples of a dataset, in the order of its partitions and files.
pub(crate) fn read(dataset: &Path) -> RecordBatch {
    let snapshot = Snapshot::load(dataset).unwrap();
    let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let read = |path: &Path| {
        let file = fs_err::File::open(path).unwrap().into_file();
        let rows = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
        rows.collect::<Result<Vec<_>, _>>().unwrap()
    };
    let batches: Vec<RecordBatch> = files.flat_map(|set| read(&dataset.join(set.path()))).collect();
    concat_batches(&batches[0].schema(), &batches).unwrap()
}

#[test]
fn declared_steps_build_what_a_query_by_hand_builds() {
    let folder = tempfile::tempdir().unwrap();
    write_logs(folder.path());
    for (steps, out) in [(DECLARED, "declared"), (QUERY, "query")] {
        let output = build(folder.path(), steps, out);
        assert!(output.status.success(), "{out}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let (mut declared, query) = (read(&folder.path().join("declared")), read(&folder.path().join("query")));
    // The declared key is stored as its hash, in a column that the dataset of the query lacks.
    let keys = declared.remove_column(declared.schema().index_of("sample_key").unwrap());
    let distinct: std::collections::BTreeSet<i64> =
        keys.as_primitive::<Int64Type>().values().iter().copied().collect();
    assert_eq!(distinct.len(), declared.num_rows());
    assert!((1000..REQUESTS as usize).contains(&query.num_rows()), "{} samples", query.num_rows());
    assert_eq!(declared.schema(), query.schema());
    for (field, (ours, theirs)) in
        query.schema().fields().iter().zip(declared.columns().iter().zip(query.columns()))
    {
        assert!(ours == theirs, "{} differs", field.name());
    }
    let windows = query.column_by_name("clicks").unwrap().as_list::<i32>();
    let full = windows.iter().filter(|list| list.as_ref().is_some_and(|list| list.len() == 5)).count();
    assert!(full > 500 && full < windows.len(), "{full} full windows of {}", windows.len());
}

#[test]
fn windows_do_not_depend_on_the_order_of_samples() {
    let folder = tempfile::tempdir().unwrap();
    write_logs(folder.path());
    // Requests are three seconds apart, so times identify samples.
    let by_time = |dataset: &str| {
        let samples = read(&folder.path().join(dataset));
        let order = sort_to_indices(samples.column_by_name(TIME_COLUMN).unwrap(), None, None).unwrap();
        take_record_batch(&samples, &order).unwrap()
    };
    let mut expected = None;
    for order in ["session", "session-hash", "arrival"] {
        for buckets in [1, 4] {
            let options = format!("{LIMIT} --order {order} --buckets {buckets}");
            let out = format!("{order}-{buckets}");
            let output = build_config(folder.path(), &format!("{HEAD}{DECLARED}"), &options, &out);
            assert!(output.status.success(), "{out}: {}", String::from_utf8_lossy(&output.stderr));
            let samples = by_time(&out);
            assert!(samples == *expected.get_or_insert_with(|| samples.clone()), "{out} has other samples");
        }
    }
    let expected = expected.unwrap();
    let sessions = expected.column(0).as_primitive::<Int64Type>().values();
    let changes = sessions.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(2 * changes > sessions.len(), "in order of arrival the sessions must interleave");
}

#[test]
fn sources_may_be_queries_over_files() {
    let folder = tempfile::tempdir().unwrap();
    write_logs(folder.path());
    // The same logs, but each step reads a query.
    let queries = "[sources]\nraw = \"events.parquet\"\nlog = \"features.parquet\"\npeople = \"users.parquet\"\n\
         features = { query = \"SELECT * FROM log\" }\nusers = { query = \"SELECT * FROM people\" }\n\
         events = { query = \"SELECT * FROM raw WHERE id % 2 = 0 UNION ALL SELECT * FROM raw WHERE id % 2 = 1\" }\n";
    let (_, rest) = HEAD.split_once("[session]").unwrap();
    let config = format!("format_version = 1\n{queries}[session]{rest}{DECLARED}");
    for (config, out) in [(config, "queries"), (format!("{HEAD}{DECLARED}"), "files")] {
        let output = build_config(folder.path(), &config, LIMIT, out);
        assert!(output.status.success(), "{out}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let (queries, files) = (read(&folder.path().join("queries")), read(&folder.path().join("files")));
    assert!(files.num_rows() > 1000);
    assert!(queries == files, "samples of queries differ from those of files");

    let config = format!("format_version = 1\n{}[session]{rest}{DECLARED}", queries_over("nothing"));
    let output = build_config(folder.path(), &config, LIMIT, "wrong");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in ["`[sources].events.query`", "nothing", "hint: ", "`raw`"] {
        assert!(error.contains(part), "{error}\nlacks {part}");
    }
}

/// Returns sources in which the events are a query that selects all rows of `table`.
fn queries_over(table: &str) -> String {
    format!(
        "[sources]\nraw = \"events.parquet\"\nfeatures = \"features.parquet\"\nusers = \"users.parquet\"\n\
         events = {{ query = \"SELECT * FROM {table}\" }}\n"
    )
}

#[test]
fn a_build_with_forbidden_rows_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    write_logs(folder.path());
    let strict = DECLARED.replace("where = \"item < 90\"", "duplicates = \"error\"");
    let output = build(folder.path(), &strict, "strict");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in ["`[samples].duplicates`: 858 rows have the key of an earlier row", "request = 0", "hint: "] {
        assert!(error.contains(part), "{error}\nlacks {part}");
    }
    assert!(!folder.path().join("strict").exists());
}
