//! Tests the statistics and warnings of a build about its samples.

use std::process::Command;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, DictionaryArray, Float64Array, Int64Array, ListArray, StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::{Int8Type, Int64Type};
use serde_json::{Value, json};

use crate::logs::{Dir, parquet, statistics_of};

/// 2024-06-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_717_200_000_000_000;
const MINUTE: i64 = 60_000_000;
const ROWS: i64 = 200;

fn numbers(of: impl Fn(i64) -> Option<i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter((0..ROWS).map(of)))
}

/// Writes a log with one sample per minute by four users, and with many suspicious values.
fn write_log(dir: &Dir) {
    // Every third list is null, and every other third is empty.
    let list = |row: i64| match row % 3 {
        0 => None,
        1 => Some(Vec::new()),
        _ => Some(vec![Some(row / 10), Some(-5)]),
    };
    let kinds = (0..ROWS).map(|row| (row % 4 != 0).then_some(if row % 4 == 1 { "a" } else { "b" }));
    let columns = vec![
        ("request", numbers(Some)),
        ("user", numbers(|row| Some(row % 4))),
        ("visit", numbers(|row| Some(row / 50))),
        (
            "time",
            Arc::new(TimestampMicrosecondArray::from_iter_values((0..ROWS).map(|row| DAY + row * MINUTE))),
        ),
        ("clicked", numbers(|row| Some(i64::from(row % 8 == 0)))),
        ("bought", numbers(|_| Some(0))),
        ("age", Arc::new(Float64Array::from_iter_values((0..ROWS).map(|row| row as f64 / 4.0 - 3.0)))),
        ("version", numbers(|_| Some(7))),
        ("shop", numbers(|row| Some(row % 20 + 1))),
        ("site", numbers(|_| Some(3))),
        ("code", Arc::new(StringArray::from_iter_values((0..ROWS).map(|row| format!("c{row}"))))),
        ("bag", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>((0..ROWS).map(list)))),
        ("none", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>((0..ROWS).map(|_| Some([]))))),
        ("kind", Arc::new(kinds.collect::<DictionaryArray<Int8Type>>())),
        ("country", numbers(|row| Some(i64::from(row % 100 >= 60)))),
    ];
    dir.write("log.parquet", parquet(columns));
}

/// Writes a configuration. `more` are sections before `[features]`.
fn configure(dir: &Dir, session: &str, more: &str, features: &str) {
    let text = format!(
        "format_version = 1\n[sources]\nlog = \"log.parquet\"\n[samples]\n\
         query = \"SELECT *, TRY_CAST(code AS BIGINT) AS number FROM log\"\n[session]\n{session}\ntime = \"time\"\n{more}\n\
         [features]\nclicked = {{ kind = \"label\" }}\nshop = {{ kind = \"sparse\" }}\n{features}"
    );
    dir.write("dataset.toml", text);
}

const GAP: &str = "user = \"user\"\ngap = \"30m\"";

fn works(dir: &Dir, arguments: &[&str]) -> Value {
    let mut command = dir.program("dataset");
    if arguments[0] != "build" {
        command = Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
        command.args(arguments).args(["--out", "dataset", "--json"]).current_dir(dir.path(""));
    }
    dir.works(command, "dataset").0
}

fn warnings(summary: &Value) -> Vec<String> {
    summary["warnings"].as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_build_ends_with_statistics_of_every_feature() {
    let dir = Dir::new();
    write_log(&dir);
    configure(
        &dir,
        GAP,
        "",
        "age = { kind = \"dense\" }\nbag = { kind = \"sparse\", group = \"bag\" }\n\
         code = { kind = \"sparse\", ids = \"hash\" }\nkind = { kind = \"sparse\", vocabulary = \"frequency\" }\n",
    );
    let summary = works(&dir, &["build"]);
    let of = |feature: &str| statistics_of(&summary, feature);
    let number = |name: &str, kind: &str, min: f64, max: f64, positive_share: f64| json!({ "name": name, "kind": kind, "min": min, "max": max, "positive_share": positive_share });
    assert_eq!(of("clicked"), number("clicked", "label", 0.0, 1.0, 0.125));
    assert_eq!(of("age"), number("age", "dense", -3.0, 46.75, 187.0 / 200.0));
    let shop = json!({
        "name": "shop", "kind": "sparse", "null_share": 0.0, "empty_share": 0.0, "mean_length": 1.0,
        "distinct_ids": 20, "is_constant": false, "min_id": 1, "max_id": 20,
    });
    assert_eq!(of("shop"), shop);
    let bag = of("bag");
    assert_eq!(
        (bag["null_share"].as_f64(), bag["empty_share"].as_f64()),
        (Some(67.0 / 200.0), Some(67.0 / 200.0))
    );
    assert_eq!((bag["mean_length"].as_f64(), bag["distinct_ids"].as_u64()), (Some(132.0 / 200.0), Some(21)));
    assert_eq!((bag["min_id"].as_i64(), bag["max_id"].as_i64()), (Some(-5), Some(19)));
    // Hashes and texts have no range. Nulls of a dictionary include nulls among its values.
    let (code, kind) = (of("code"), of("kind"));
    assert!(code["distinct_ids"].as_u64().unwrap().abs_diff(200) <= 16, "{code}");
    assert!(code["expected_collisions"].as_f64().unwrap() > 0.0 && code.get("min_id").is_none(), "{code}");
    assert_eq!((kind["null_share"].as_f64(), kind["distinct_ids"].as_u64()), (Some(0.25), Some(2)));
    assert!(kind.get("min_id").is_none() && kind.get("expected_collisions").is_none(), "{kind}");
    assert_eq!(summary["statistics"]["samples"], ROWS);
    assert_eq!(summary["statistics"]["first_time"], "2024-06-01T00:00:00Z");
    assert_eq!(summary["statistics"]["last_time"], "2024-06-01T03:19:00Z");
    assert_eq!(warnings(&summary), [""; 0]);
    // The text output has a table.
    let mut command = dir.program("shown");
    let arguments: Vec<_> =
        command.get_args().filter(|text| *text != "--json").map(ToOwned::to_owned).collect();
    command = Command::new(command.get_program());
    let output = command.args(arguments).current_dir(dir.path("")).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("200 samples read, from 2024-06-01T00:00:00Z to 2024-06-01T03:19:00Z"), "{text}");
    let line = text.lines().find(|line| line.trim_start().starts_with("bag ")).unwrap_or_default();
    let cells: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(cells, ["bag", "sparse", "33.5", "%", "33.5", "%", "0.7", "~21", "-5", "to", "19"], "{text}");
}

/// Writes events of all users, one per minute from `first` minutes after the first sample.
fn write_events(dir: &Dir, first: i64) {
    let columns = vec![
        ("who", numbers(|row| Some(row % 4))),
        (
            "at",
            Arc::new(TimestampMicrosecondArray::from_iter_values(
                (first..first + ROWS).map(|i| DAY + i * MINUTE),
            )) as _,
        ),
        ("item", numbers(|row| Some(1000 + row / 10))),
    ];
    dir.write("events.parquet", parquet(columns));
}

const TIMELINE: &str = "[sources.events]\npath = \"events.parquet\"\n[[timelines]]\nsource = \"events\"\non = { user = \"who\" }\n\
                        time = \"at\"\nlength = 3\ncolumns = { seen = \"item\" }";
const SEEN: &str = "seen = { kind = \"sequence\", group = \"seen\" }\n";

#[test]
fn the_windows_of_timelines_have_statistics() {
    let dir = Dir::new();
    write_log(&dir);
    // Sample and event number n belong to the same user. The events of the first 100 minutes precede the first sample.
    write_events(&dir, -100);
    configure(&dir, GAP, TIMELINE, SEEN);
    let summary = works(&dir, &["build"]);
    let seen = json!({
        "name": "seen", "kind": "sequence", "null_share": 0.0, "empty_share": 0.0, "mean_length": 3.0,
        "distinct_ids": 12, "is_constant": false, "min_id": 1008, "max_id": 1019,
    });
    assert_eq!(statistics_of(&summary, "seen"), seen, "the last 12 of the tens of events lie in windows");
    assert_eq!(warnings(&summary), [""; 0]);
    write_events(&dir, ROWS);
    fs_err::remove_dir_all(dir.path("dataset")).unwrap();
    let summary = works(&dir, &["build"]);
    assert_eq!(statistics_of(&summary, "seen")["empty_share"], 1.0);
    let [warning] = &warnings(&summary)[..] else { panic!("{summary}") };
    assert!(
        warning.starts_with("sequence `seen`: the windows of all 200 samples are empty; check that the keys")
    );
}

const MISTAKES: &str = "bought = { kind = \"label\" }\nversion = { kind = \"dense\" }\nage = { kind = \"dense\" }\n\
                        site = { kind = \"sparse\" }\nnumber = { kind = \"sparse\" }\nnone = { kind = \"sparse\" }\n\
                        bag = { kind = \"sparse\" }\n";

#[test]
fn suspicious_statistics_give_warnings() {
    let dir = Dir::new();
    write_log(&dir);
    configure(&dir, GAP, "[partition]\nby = \"day\"\n", MISTAKES);
    let summary = works(&dir, &["build"]);
    let expected = [
        "label `bought`: no sample is positive; check the condition",
        "dense feature `version`: all samples have the value 7",
        "sparse feature `site`: all samples have the same single id",
        "sparse feature `number`: all 200 samples have a null; check the name of the column, and casts",
        "sparse feature `none`: the lists of all 200 samples are empty",
    ];
    let found = warnings(&summary);
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for beginning in expected {
        assert!(found.iter().any(|warning| warning.starts_with(beginning)), "no `{beginning}` in {found:#?}");
    }
    assert_eq!(statistics_of(&summary, "number")["null_share"], 1.0);
    assert_eq!(statistics_of(&summary, "none")["empty_share"], 1.0);
    // A few late samples may have equal values, so only columns without values give warnings.
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    dir.write("late.toml", text.replace("FROM log", "FROM log WHERE request < 6"));
    let summary = works(&dir, &["append", "late.toml", "--merge"]);
    assert_eq!(
        (summary["statistics"]["samples"].as_u64(), summary["samples_skipped"].as_u64()),
        (Some(6), Some(6))
    );
    let found = warnings(&summary);
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found.iter().all(|warning| warning.contains("`number`") || warning.contains("`none`")),
        "{found:#?}"
    );
}

#[test]
fn sessions_that_partition_columns_cut_are_counted() {
    let dir = Dir::new();
    write_log(&dir);
    // A gap of 5 minutes divides no session: each user has one session of 200 minutes. The country changes at minutes
    // 60, 100 and 160.
    let partition = "[partition]\ncolumns = [\"country\"]";
    for (session, cut) in
        [("user = \"user\"\ngap = \"5m\"", 4), ("key = [\"visit\"]", 2), ("user = \"user\"\ngap = \"3m\"", 0)]
    {
        configure(&dir, session, partition, "");
        let summary = works(&dir, &["build"]);
        assert_eq!(summary["cut_sessions"], cut, "{session}");
        let found = warnings(&summary);
        let message =
            format!("the partition columns `country` cut {cut} sessions into one session per value");
        assert_eq!(found.len(), usize::from(cut > 0), "{found:#?}");
        assert!(found.iter().all(|warning| warning.starts_with(&message)), "{found:#?}");
        fs_err::remove_dir_all(dir.path("dataset")).unwrap();
    }
    // A country that is part of the key cuts no session, and neither do partitions by time.
    for (session, partition) in
        [("key = [\"visit\", \"country\"]", partition), (GAP, "[partition]\nby = \"hour\"")]
    {
        configure(&dir, session, partition, "");
        let summary = works(&dir, &["build"]);
        assert_eq!((summary["cut_sessions"].as_u64(), warnings(&summary).len()), (Some(0), 0), "{session}");
        fs_err::remove_dir_all(dir.path("dataset")).unwrap();
    }
}
