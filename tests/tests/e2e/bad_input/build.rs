//! Configurations, logs and output directories from which no dataset can be built.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, StringArray, TimestampMicrosecondArray,
    UInt64Array,
};
use arrow::datatypes::Int64Type;
use onefold_tests::Dir;

use super::{BUILD, replaced, with_dataset};
use crate::logs::{
    DATASET_CONFIG, EVENTS, REQUESTS, event_columns, expected_samples, feature_columns, with_column,
    write_logs, write_table,
};
use crate::samples::{read_samples, sorted};

/// Runs a build that must fail with `parts` in its error, both for a new dataset and over an existing one, which
/// remains unchanged.
#[track_caller]
fn build_fails(dir: &Dir, parts: &[&str]) {
    dir.command("onefold-ingest build logs/dataset.toml --out other --threads 2").fails(parts);
    dir.command(&format!("{BUILD} --overwrite")).fails(parts);
    assert!(!dir.path("other").exists());
}
#[test]
fn dataset_configurations_that_do_not_fit() {
    let dir = with_dataset();
    let config = "`logs/dataset.toml`: ";
    let gap = "user = \"user\"\ngap = \"30m\"";
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "e.clicked,",
            "e.clickd AS clicked,",
            &[config, "`[samples].query`", "clickd", "write one `SELECT`", "`events`, `features`"],
        ),
        ("JOIN events e", "JOIN event e", &[config, "`[samples].query`", "event", "`events`, `features`"]),
        ("SELECT f.*", "SELEKT f.*", &[config, "`[samples].query`", "SELEKT"]),
        (
            "age = { kind",
            "agee = { kind",
            &[config, "`[features]` names the column `agee`", "did you mean `age`?"],
        ),
        (
            gap,
            "user = \"usr\"\ngap = \"30m\"",
            &[config, "`[session]` names the column `usr`", "did you mean `user`?"],
        ),
        (
            gap,
            "key = [\"visits\"]",
            &[config, "`[session]` names the column `visits`", "did you mean `visit`?"],
        ),
        (gap, "user = \"user\"", &[config, "`[session]` has one of `user` and `gap`", "gap = \"30m\""]),
        ("gap = \"30m\"", "gap = \"30 parsecs\"", &[config, "`[session].gap`", "30 parsecs"]),
        (
            "time = \"time\"",
            "time = \"tim\"",
            &[config, "`[session].time` names the column `tim`", "did you mean `time`?"],
        ),
        (
            "time = \"time\"",
            "time = \"visit\"",
            &["column `visit`", "`[session].time`", "is not a time", "2024-06-01T12:00:00Z"],
        ),
        (
            "order = [\"request\"]",
            "order = [\"rank\"]",
            &[config, "`[session].order` names the column `rank`", "`request`"],
        ),
        (
            "columns = [\"split\"]",
            "columns = [\"spilt\"]",
            &[config, "`[partition].columns` names the column `spilt`", "did you mean `split`?"],
        ),
        ("columns = [\"split\"]", "columns = [\"history\"]", &["column `history`", "partition", "text"]),
        ("by = \"hour\"", "by = \"minute\"", &[config, "line", "minute", "`day` or `hour`"]),
        ("by = \"hour\"", "buy = \"hour\"", &[config, "line", "unknown field `buy`"]),
        (
            "age = { kind = \"dense\" }",
            "age = { kind = \"dens\" }",
            &[config, "`[features].age`", "`dens`", "kinds are"],
        ),
        (
            "group = \"history\"",
            "groop = \"history\"",
            &[config, "`[features].history`", "unknown field `groop`"],
        ),
        (
            "age = { kind = \"dense\" }",
            "visit = { kind = \"dense\" }",
            &["column `visit`", "a number or boolean", "Utf8", "CAST"],
        ),
        (
            "age = { kind = \"dense\" }",
            "age = { kind = \"sparse\" }",
            &["column `age`", "Float64", "ids are integers, texts", "whole_id(age)", "kind = \"dense\""],
        ),
        ("age = { kind = \"dense\" }", "history = { kind = \"dense\" }", &[config, "duplicate key"]),
        (
            "kind = \"sequence\"",
            "kind = \"dense\"",
            &[config, "`[features].history`", "only sparse and sequence features have a `group`"],
        ),
        (
            "city = { kind = \"sparse\"",
            "city = { kind = \"sequence\"",
            &["column `city`", "Int64", "a sequence needs a list", "kind = \"sparse\""],
        ),
        ("clicked = { kind = \"label\" }", "", &[config, "no label"]),
        (
            "clicked = { kind = \"label\" }",
            "time = { kind = \"label\" }",
            &["column `time`", "a number or boolean", "Timestamp"],
        ),
        (
            "format_version = 1",
            "format_version = 2",
            &[config, "`format_version` is 2, this program reads 1"],
        ),
        ("format_version = 1", "format_version = ", &[config, "line 1"]),
        (
            "features/*.parquet",
            "feature/*.parquet",
            &["source `features`", "feature/*.parquet", "there is no such file", "`[sources]`"],
        ),
        ("features/*.parquet", "features/[*.parquet", &["source `features`", "bad pattern", "`[sources]`"]),
        (
            "features/*.parquet",
            "dataset.toml",
            &["source `features`", "logs/dataset.toml", "not a whole Parquet file"],
        ),
    ];
    for (from, to, parts) in cases {
        dir.write("logs/dataset.toml", replaced(DATASET_CONFIG, from, to));
        build_fails(&dir, parts);
    }
    let select = DATASET_CONFIG.split("\"\"\"").nth(1).unwrap();
    dir.write("logs/dataset.toml", replaced(DATASET_CONFIG, select, "DROP TABLE events"));
    build_fails(&dir, &[config, "`[samples].query`", "write one `SELECT`"]);
    dir.command("onefold-ingest build logs/nothing.toml --out other")
        .fails(&["logs/nothing.toml", "check the path"]);
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), sorted(expected_samples()));
}

#[test]
fn sources_that_are_damaged_or_disagree() {
    let dir = with_dataset();
    let late = "logs/features/part-1.parquet";
    let whole = dir.read(late);
    for bytes in [&whole[..whole.len() / 2], b"", b"{\"json\": true}\n"] {
        dir.write(late, bytes);
        let parts = ["source `features`", "part-1.parquet", "not a whole Parquet file", "write it again"];
        build_fails(&dir, &parts);
    }
    let mut holed = whole.clone();
    holed[4..300].fill(0xff);
    dir.write(late, holed);
    build_fails(&dir, &["source `features`", "part-1.parquet", "the file is damaged", "write it again"]);

    let columns = feature_columns(REQUESTS);
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["x"; REQUESTS.len()]));
    write_table(&dir.path(late), with_column(columns, "age", texts));
    let types = "the column `age` is Utf8 here and Float64 in";
    build_fails(&dir, &["source `features`", "part-1.parquet", types, "part-0.parquet", "`CAST`"]);
    dir.write(late, &whole);
    dir.command(&format!("{BUILD} --overwrite")).works();
}

/// Raw logs have no checksums, so a flipped byte may remain unnoticed. But it must not cause a panic of the program,
/// although some decoders panic on such data.
#[test]
fn flipped_bytes_of_a_source_are_no_panic() {
    let dir = with_dataset();
    let late = "logs/features/part-1.parquet";
    let whole = dir.read(late);
    let build = "onefold-ingest build logs/dataset.toml --out flipped --overwrite --threads 1";
    let mut errors = 0;
    for place in (4..whole.len()).step_by(40) {
        let mut flipped = whole.clone();
        flipped[place] ^= 0x10;
        dir.write(late, flipped);
        let output = dir.command(build).output();
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let told = stderr.starts_with("error: ") && stderr.contains("\n  hint: ");
            assert!(output.status.code() == Some(1) && told, "byte {place}: {} {stderr}", output.status);
            errors += 1;
        }
    }
    assert!(errors > 10, "only {errors} flipped bytes were noticed");
}

#[test]
fn logs_without_samples() {
    let dir = with_dataset();
    let nothing = ["gives no samples", "`logs/dataset.toml`", "check that the logs are not empty"];
    write_table(&dir.path("logs/events.parquet"), event_columns(&[]));
    build_fails(&dir, &nothing);
    let strangers = Arc::new(Int64Array::from_iter_values((0..EVENTS.len() as i64).map(|i| 1000 + i)));
    write_table(&dir.path("logs/events.parquet"), with_column(event_columns(EVENTS), "request", strangers));
    build_fails(&dir, &nothing);
}

#[test]
fn values_that_cannot_be_trained_on() {
    let dir = with_dataset();
    // All other values are equal, because the statistics of such a column hide a NaN.
    let floats = |bad: f64| {
        Arc::new(Float64Array::from_iter_values((0..REQUESTS.len()).map(|i| if i == 1 { bad } else { 1.0 })))
    };
    let ids = |bad: Option<i64>| {
        Int64Array::from_iter((0..REQUESTS.len()).map(|i| if i == 1 { bad } else { Some(1) }))
    };
    let lists = (0..REQUESTS.len()).map(|i| Some(vec![Some(1), (i != 1).then_some(2)]));
    let times = (0..REQUESTS.len()).map(|i| (i != 1).then_some(1_714_521_600_000_000));
    let stamps = |bad: i64| -> ArrayRef {
        let times = (0..REQUESTS.len()).map(|i| if i == 1 { bad } else { 1_714_521_600_000_000 });
        Arc::new(TimestampMicrosecondArray::from_iter_values(times))
    };
    let huge = (0..REQUESTS.len()).map(|i| if i == 1 { u64::MAX } else { 1 });
    let features: Vec<(&str, ArrayRef, &[&str])> = vec![
        ("age", floats(f64::NAN), &["column `age`: 1 samples", "not a finite", "CASE WHEN abs(age) < 1e38"]),
        ("age", floats(1e300), &["column `age`: 1 samples", "not a finite"]),
        (
            "history",
            Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists)),
            &["column `history`: 1 items of its lists are null", "array_compact(history)"],
        ),
        (
            "time",
            Arc::new(TimestampMicrosecondArray::from_iter(times)),
            &["column `time`", "no value", "IS NOT NULL"],
        ),
        (
            "time",
            stamps(i64::MAX),
            &["column `time`", "1 samples have a time", "in the future", "unit of the time"],
        ),
        (
            "time",
            stamps(0),
            &["column `time`", "1 samples have a time", "before 1990-01-01", "unit of the time"],
        ),
        (
            "time",
            Arc::new(ids(Some(1_714_521_600))),
            &["`[session].time`: `time` is Int64", "which unit", "unit = \"s\""],
        ),
        ("user", Arc::new(ids(None)), &["column `user`", "no value", "IS NOT NULL"]),
        (
            "city",
            Arc::new(UInt64Array::from_iter_values(huge)),
            &["column `city`", "18446744073709551615 does not fit into 63 bits", "hint: "],
        ),
    ];
    for (name, values, parts) in features {
        fs_err::remove_file(dir.path("logs/features/part-0.parquet")).ok();
        write_table(
            &dir.path("logs/features/part-1.parquet"),
            with_column(feature_columns(REQUESTS), name, values),
        );
        build_fails(&dir, parts);
    }
    // Timestamps are numbers of a known unit.
    let unit = replaced(DATASET_CONFIG, "time = \"time\"", "time = { column = \"time\", unit = \"us\" }");
    dir.write("logs/dataset.toml", unit);
    for (bad, side) in [(i64::MAX, "in the future"), (1_714_521_600, "before 1990-01-01")] {
        let times = (0..REQUESTS.len()).map(|i| if i == 1 { bad } else { 1_714_521_600_000_000 });
        let times = Arc::new(Int64Array::from_iter_values(times));
        let columns = with_column(feature_columns(REQUESTS), "time", times);
        write_table(&dir.path("logs/features/part-1.parquet"), columns);
        build_fails(&dir, &["column `time`", "1 samples have a time", side, "unit of the time column"]);
    }
    write_logs(&dir);
    let clicked = Arc::new(BooleanArray::from_iter((0..EVENTS.len()).map(|i| (i != 1).then_some(true))));
    let split = Arc::new(StringArray::from_iter((0..EVENTS.len()).map(|i| (i != 1).then_some("train"))));
    let events: Vec<(&str, ArrayRef, &[&str])> = vec![
        ("clicked", clicked, &["column `clicked`", "samples have no value", "COALESCE(clicked, 0)"]),
        ("split", split, &["column `split`", "no value", "IS NOT NULL"]),
    ];
    for (name, values, parts) in events {
        write_table(&dir.path("logs/events.parquet"), with_column(event_columns(EVENTS), name, values));
        build_fails(&dir, parts);
    }
}

#[test]
fn places_where_no_dataset_may_go() {
    let dir = with_dataset();
    dir.command(BUILD).fails(&["`dataset` already exists", "`--overwrite`"]);
    dir.write("letters/dear.txt", "dear");
    for overwrite in ["", " --overwrite"] {
        let line = "onefold-ingest build logs/dataset.toml --out letters";
        dir.command(&format!("{line}{overwrite}")).fails(&[
            "`letters` already exists",
            "not a dataset",
            "another location",
        ]);
    }
    // The directory of the logs has the same name as a dataset's directory of data files.
    dir.write("project/data/log.csv", "a,b");
    dir.command("onefold-ingest build logs/dataset.toml --out project").fails(&[
        "`project` already exists",
        "not a dataset",
        "`data/log.csv`",
        "another location",
    ]);
    // The output is a project that contains the logs.
    let parts =
        ["`.` already exists", "not a dataset", "files that belong to no dataset", "another location"];
    dir.command("onefold-ingest build logs/dataset.toml --out .").fails(&parts);
    dir.command("onefold-ingest build logs/dataset.toml --out letters/dear.txt").fails(&["letters/dear.txt"]);
    dir.command("onefold-ingest build logs/dataset.toml --out letters/dear.txt/deeper")
        .fails(&["letters/dear.txt"]);
    let limit = ["the memory limit does not suffice", "raise `--memory-limit`"];
    dir.command("onefold-ingest build logs/dataset.toml --out other --memory-limit 1KiB").fails(&limit);
}
