//! Builds in little memory: joins that do not fit are sorted, and what cannot be spilled is an error.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, TimestampMicrosecondArray};
use onefold_tests::Dir;

use crate::logs::write_table;
use crate::samples::partitions;

/// Rows of both logs: the keys of one of them do not fit into what [`SMALL`] leaves for a join.
const ROWS: i64 = 400_000;
const SMALL: &str = "--memory-limit 40MiB --threads 2";

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

/// A long log of narrow rows, whose events come in another order.
fn with_long_log() -> Dir {
    let dir = Dir::new();
    let numbers = |number: fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..ROWS).map(number)))
    };
    // 2024-05-01, a request every 0.3 seconds.
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
        .fails(&["rows that do not fit into memory reached the spill limit", "raise the spill limit"]);
    assert!(!dir.path("dataset").exists());
    dir.command(&format!(
        "onefold-ingest build logs/dataset.toml --out dataset {SMALL} --spill-directory spill/here"
    ))
    .fails(&["spill/here"]);
}
