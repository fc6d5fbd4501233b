//! Builds with little memory: joins that do not fit are sorted, rows that cannot be spilled are an error, and logs in
//! any order and with sessions of any size give the same samples.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, BooleanArray, Int64Array, RecordBatch, TimestampMicrosecondArray, UInt32Array,
};
use arrow::compute::{concat_batches, take_record_batch};
use arrow::datatypes::Int64Type;
use onefold_datasets::Snapshot;
use onefold_tests::Dir;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::logs::write_table;
use crate::samples::{partitions, read_samples, sorted};

/// The number of rows of both logs. The keys of one of them do not fit into the memory that [`SMALL`] leaves for a
/// join.
const ROWS: i64 = 400_000;
const SMALL: &str = "--memory-limit 64MiB --threads 2";

const CONFIG: &str = r#"format_version = 1

[sources]
features = "features.parquet"
events = "events.parquet"

[samples]
query = "SELECT f.*, e.clicked FROM features f JOIN events e ON f.request = e.of_request"

[session]
user = "user"
gap = "30m"
time = "time"
order = ["request"]

[partition]
by = "day"

[features]
clicked = { kind = "label" }
item = { kind = "sparse" }
"#;

/// Returns a long log of narrow rows, whose events are in a different order.
fn with_long_log() -> Dir {
    let dir = Dir::new();
    let numbers = |number: fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..ROWS).map(number)))
    };
    // From 2024-05-01, one request every 0.3 seconds.
    let times = (0..ROWS).map(|i| 1_714_521_600_000_000 + 300_000 * i);
    write_table(
        &dir.path("logs/features.parquet"),
        vec![
            ("request", numbers(|i| i)),
            ("user", numbers(|i| i * 7919 % 3001)),
            ("time", Arc::new(TimestampMicrosecondArray::from_iter_values(times))),
            ("item", numbers(|i| i % 97)),
        ],
    );
    let clicked = BooleanArray::from_iter((0..ROWS).map(|i| Some(i % 5 == 0)));
    write_table(
        &dir.path("logs/events.parquet"),
        vec![("of_request", numbers(|i| i * 7919 % ROWS)), ("clicked", Arc::new(clicked))],
    );
    dir.write("logs/dataset.toml", CONFIG);
    dir
}

#[test]
fn joins_that_do_not_fit_are_sorted() {
    let dir = with_long_log();
    let build = "onefold-ingest build logs/dataset.toml";
    let large = dir.command(&format!("{build} --out large --threads 2")).json();
    assert_eq!((large["sorted_joins"].as_bool(), large["samples"].as_i64()), (Some(false), Some(ROWS)));
    let small = dir.command(&format!("{build} --out small {SMALL}")).json();
    assert_eq!((small["sorted_joins"].as_bool(), small["samples"].as_i64()), (Some(true), Some(ROWS)));
    let partitions = |dataset: &str| partitions(&dir.path(dataset));
    assert_eq!(partitions("small"), partitions("large"), "files and digests differ");
    let verify = format!("onefold-ingest verify small --against logs/dataset.toml {SMALL}");
    assert_eq!(dir.command(&verify).json()["against"]["samples"].as_i64(), Some(ROWS));
}

#[test]
fn what_cannot_be_spilled_is_an_error() {
    let dir = with_long_log();
    dir.write("spill/here", "");
    dir.command(&format!(
        "onefold-ingest build logs/dataset.toml --out dataset {SMALL} --spill-directory spill"
    ))
    .with_file_limit(256)
    .fails(&["rows that do not fit into memory cannot be written to disk", "spill directory"]);
    dir.command(&format!("onefold-ingest build logs/dataset.toml --out dataset {SMALL} --spill-limit 1MiB"))
        .fails(&["rows that do not fit into memory reached the spill limit", "raise `--spill-limit`"]);
    assert!(!dir.path("dataset").exists());
    dir.command(&format!(
        "onefold-ingest build logs/dataset.toml --out dataset {SMALL} --spill-directory spill/here"
    ))
    .fails(&["spill/here"]);
}

/// The number of samples of [`with_wide_log`]. Their decoded lists take 100 MB.
const SAMPLES: usize = 12_000;

/// Returns the feature log of rm1, whose samples have lists with 1,100 ids in total.
fn with_wide_log() -> (Dir, RecordBatch) {
    let dir = Dir::new();
    dir.command(&format!("onefold-data generate --workload rm1 --samples {SAMPLES} --seed 3 --out logs"))
        .works();
    let rows = rows(&dir.path("logs/features/part-00000.parquet"));
    assert_eq!(rows.num_rows(), SAMPLES);
    (dir, rows)
}

fn rows(path: &Path) -> RecordBatch {
    let file = fs_err::File::open(path).unwrap().into_file();
    let batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batches = batches.collect::<Result<Vec<_>, _>>().unwrap();
    concat_batches(&batches[0].schema(), &batches).unwrap()
}

/// Returns the rows with other session ids.
fn with_sessions(rows: &RecordBatch, session: impl Fn(usize, i64) -> i64) -> RecordBatch {
    let column = rows.schema().index_of("session_id").unwrap();
    let ids = rows.column(column).as_primitive::<Int64Type>().values();
    let mut columns = rows.columns().to_vec();
    columns[column] =
        Arc::new(Int64Array::from_iter_values(ids.iter().enumerate().map(|(row, id)| session(row, *id))));
    RecordBatch::try_new(rows.schema(), columns).unwrap()
}

/// Writes the rows as the feature log.
fn set_log(dir: &Dir, rows: &RecordBatch) {
    let schema = rows.schema();
    let columns = schema.fields().iter().zip(rows.columns());
    let columns = columns.map(|(field, column)| (field.name().as_str(), Arc::clone(column))).collect();
    write_table(&dir.path("logs/features/part-00000.parquet"), columns);
}

#[test]
fn logs_in_any_order_and_sessions_of_any_size_make_the_same_samples() {
    let (dir, in_order) = with_wide_log();
    dir.command("onefold-ingest build logs/dataset.toml --out expected --layout rows --threads 2").works();
    let expected = sorted(read_samples(&dir.path("expected")));
    let newest_first = UInt32Array::from_iter_values((0..SAMPLES as u32).rev());
    let shuffled = UInt32Array::from_iter_values((0..SAMPLES as u32).map(|i| i * 1_237 % SAMPLES as u32));
    let reordered = |order: &UInt32Array| take_record_batch(&in_order, order).unwrap();
    let sessions = Snapshot::load(&dir.path("expected")).unwrap().statistics.sessions;
    // Every order is used with two of the logs.
    let logs = [
        ("newest first", reordered(&newest_first), sessions, &["session", "arrival"][..]),
        ("shuffled", reordered(&shuffled), sessions, &["session-hash"][..]),
        ("one session", with_sessions(&in_order, |_, _| 7), 1, &["arrival"][..]),
        (
            "half of the samples in one session",
            with_sessions(&in_order, |row, id| if row % 2 == 0 { -1 } else { id }),
            0,
            &["session", "session-hash"][..],
        ),
    ];
    for (log, rows, sessions, orders) in logs {
        set_log(&dir, &rows);
        let small =
            "onefold-ingest build logs/dataset.toml --overwrite --out small --memory-limit 64MiB --threads 2";
        // The memory limit has an effect: these samples do not fit into it.
        if log == "newest first" {
            dir.command(&format!("{small} --order arrival --spill-limit 64KiB"))
                .fails(&["reached the spill limit"]);
        }
        for order in orders {
            let built = dir.command(&format!("{small} --order {order}")).json();
            assert_eq!(built["samples"].as_u64(), Some(SAMPLES as u64), "{log}, {order}");
            if sessions > 0 {
                assert_eq!(built["sessions"].as_u64(), Some(sessions), "{log}, {order}");
            }
            assert!(
                sorted(read_samples(&dir.path("small"))) == expected,
                "{log}, {order}: the samples differ"
            );
        }
    }
    // The last dataset is compared with its log in the same memory.
    let verify = "onefold-ingest verify small --against logs/dataset.toml --memory-limit 64MiB";
    let verified = dir.command(verify).json();
    assert_eq!(verified["against"]["samples"].as_u64(), Some(SAMPLES as u64));
}
