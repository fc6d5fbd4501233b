//! Tests of columns that are computed for existing samples. A dataset with added features must equal a dataset that was
//! built with them. A dataset with recomputed labels must equal one that is built from the current events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray, TimestampMicrosecondArray};
use onefold_base::progress::Silent;
use onefold_datasets::verify::{VerifyOptions, verify};
use onefold_datasets::{Commit, PartitionFilter, Snapshot, hash_id};
use onefold_ingest::{ColumnsOptions, ColumnsSummary, ColumnsTask, Config, compute_columns};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::logs::{Dir, parquet};
use crate::merge::{Content, Row, SETUP, Setup, assert_sound, content, rows, setups};

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
const HOUR: i64 = 3_600_000_000;

/// Computes columns for the dataset `out` with the configuration `name`.
fn compute(
    (dir, name, out): (&Dir, &str, &str),
    labels: bool,
    partitions: PartitionFilter,
    allow_missing: bool,
) -> onefold_ingest::Result<ColumnsSummary> {
    let config = Config::load(&dir.path(format!("{name}.toml"))).unwrap();
    let engine = SETUP.options(Commit::Create, "").engine;
    let options = ColumnsOptions { engine, partitions, allow_missing };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let out = dir.path(out);
    let task = if labels { ColumnsTask::Labels } else { ColumnsTask::Features };
    runtime.block_on(compute_columns(task, &config, &out, &options, &Silent))
}

/// Returns the configuration without the features `lacking`.
fn without(setup: &Setup, log: &str, lacking: &[&str]) -> String {
    let timeline = setup.timeline && !lacking.contains(&"clicks");
    let text = Setup { timeline, ..setup.clone() }.text(log);
    let is_left = |line: &&str| !lacking.iter().any(|name| line.starts_with(&format!("{name} = ")));
    text.lines().filter(is_left).map(|line| format!("{line}\n")).collect()
}

/// Sorts the samples of each range by their values, because the order of samples with equal times is not compared.
fn sorted(mut content: Content) -> Content {
    content.values_mut().for_each(|samples| samples.sort());
    content
}

fn digests(dir: &Dir, name: &str) -> Vec<String> {
    let snapshot = Snapshot::load(&dir.path(name)).unwrap();
    snapshot.partitions.iter().map(|partition| partition.digest.to_string()).collect()
}

/// Builds a dataset of the rows of parts 0 and 2 without some features, adds these from a log of parts 0 and 1, and
/// compares the dataset with a build with all features.
fn check(setup: &Setup, rows: &[(Row, u8)], lacking: &[&str]) {
    let setup = &Setup { keyed: true, ..setup.clone() };
    let dir = Dir::new();
    let part = |wanted: &[u8]| -> Vec<Row> {
        rows.iter().filter(|(_, part)| wanted.contains(part)).map(|(row, _)| *row).collect()
    };
    let (built, logged, lost) = (part(&[0, 2]), part(&[0, 1]), part(&[2]));
    if built.is_empty() || logged.is_empty() {
        return;
    }
    setup.write(&dir, "built", &built);
    setup.write(&dir, "logged", &logged);
    setup.works(&dir, "built", "whole", Commit::Create);
    dir.write("first.toml", without(setup, "built.parquet", lacking));
    setup.works(&dir, "first", "filled", Commit::Create);
    let all = PartitionFilter::default;
    // Add the features from a log of all samples, first to one partition.
    let one = Snapshot::load(&dir.path("filled")).unwrap().partitions[0].key.clone();
    if !one.columns().is_empty() {
        let summary = compute((&dir, "built", "filled"), false, PartitionFilter::of_keys([one]), false);
        assert_eq!(summary.unwrap().partitions_written, 1);
        assert_sound(&dir.path("filled"));
    }
    let summary = compute((&dir, "built", "filled"), false, all(), false).unwrap();
    assert_eq!(summary.samples_missing, 0);
    assert_eq!(sorted(content(&dir.path("filled"))), sorted(content(&dir.path("whole"))));
    assert_eq!(digests(&dir, "filled"), digests(&dir, "whole"));
    assert_sound(&dir.path("filled"));
    let again = compute((&dir, "built", "filled"), false, all(), false).unwrap();
    assert!(!again.changed && again.samples == 0 && again.columns.is_empty());

    // Add the features from a log that lacks some of the samples and has others.
    setup.works(&dir, "first", "partial", Commit::Create);
    let before = Snapshot::load(&dir.path("partial")).unwrap();
    if !lost.is_empty() {
        let error = compute((&dir, "logged", "partial"), false, all(), false).unwrap_err().to_string();
        assert!(
            error.contains("the logs do not have ") && error.contains("nothing was committed"),
            "{error}"
        );
        assert_eq!(Snapshot::load(&dir.path("partial")).unwrap(), before);
    }
    let summary = compute((&dir, "logged", "partial"), false, all(), true).unwrap();
    let counts = (summary.samples, summary.samples_missing, summary.samples_ignored);
    assert_eq!(counts, (built.len() as u64, lost.len() as u64, part(&[1]).len() as u64));
    assert_sound(&dir.path("partial"));
    let lost: BTreeSet<i64> = lost.iter().map(|row| hash_id(row.request.to_string().as_bytes())).collect();
    let snapshot = Snapshot::load(&dir.path("partial")).unwrap();
    let floats: Vec<&str> = snapshot.schema.float_columns().collect();
    let lists: Vec<&str> = snapshot.schema.sparse_features().map(|feature| feature.name.as_str()).collect();
    let mut expected = content(&dir.path("whole"));
    let samples = expected.values_mut().flatten();
    for (_, _, _, of_floats, _, of_lists) in samples.filter(|sample| lost.contains(&sample.2.unwrap())) {
        for (value, name) in of_floats.iter_mut().zip(&floats).filter(|(_, name)| lacking.contains(name)) {
            assert_eq!(*name, "age");
            *value = 0;
        }
        let lists = of_lists.iter_mut().zip(&lists).filter(|(_, name)| lacking.contains(name));
        lists.for_each(|(list, _)| list.clear());
    }
    assert_eq!(sorted(content(&dir.path("partial"))), sorted(expected));
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 60, ..onefold_property::cases(7) })]

    #[test]
    fn added_features_are_those_of_a_build(
        setup in setups(),
        rows in rows(),
        lacking in prop_oneof![
            Just(&["age"][..]),
            Just(&["item", "age"][..]),
            Just(&["history"][..]),
            Just(&["history", "item"][..]),
            Just(&["clicks", "history"][..]),
        ],
    ) {
        check(&setup, &rows, lacking);
    }
}

#[test]
fn samples_without_keys_are_refused() {
    let (dir, rows) = (Dir::new(), [Row { request: 1, user: 1, minute: 5 }]);
    let setup = Setup { keyed: false, ..SETUP };
    setup.write(&dir, "all", &rows);
    setup.works(&dir, "all", "dataset", Commit::Create);
    let all = PartitionFilter::default;
    for labels in [true, false] {
        let error = compute((&dir, "all", "dataset"), labels, all(), false).unwrap_err().to_string();
        assert!(error.contains("`[samples].key` is not declared") && error.contains("request_id"), "{error}");
    }
    SETUP.write(&dir, "all", &rows);
    for labels in [true, false] {
        let error = compute((&dir, "all", "dataset"), labels, all(), false).unwrap_err().to_string();
        assert!(error.contains("the dataset was built without it"), "{error}");
    }
}

const CONFIG: &str = r#"format_version = 1
[sources]
log = "log.parquet"
events = "events.parquet"
[samples]
source = "log"
key = ["request"]
[join]
source = "events"
on = { request = "of" }
time = "at"
window = "10d"
key = ["of"]
[join.labels]
clicked = { when = "kind = 'click'" }
[sampling]
label = "clicked"
keep = { "0" = 1.0, "1" = 1.0 }
seed = 1
weight = "weight"
[session]
user = "user"
gap = "30m"
time = "time"
[partition]
by = "day"
[features]
clicked = { kind = "label" }
weight = { kind = "weight" }
item = { kind = "sparse", group = "item" }
"#;

/// Writes a log with 12 requests of one user on each of three days.
fn write_log(dir: &Dir) {
    let requests = || 0..36_i64;
    let time = |request: i64| DAY + request / 12 * 24 * HOUR + request % 12 * HOUR;
    let numbers =
        |of: fn(i64) -> i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(requests().map(of))) };
    let times: ArrayRef = Arc::new(TimestampMicrosecondArray::from_iter_values(requests().map(time)));
    let columns = vec![
        ("request", numbers(|request| request)),
        ("user", numbers(|_| 1)),
        ("time", times),
        ("item", numbers(|request| request % 5)),
    ];
    dir.write("log.parquet", parquet(columns));
    dir.write("config.toml", CONFIG);
}

/// Writes a log of events, given as pairs of a request and the hours from the request to the event.
fn write_events(dir: &Dir, events: &[(i64, i64)]) {
    let time = |(of, hours): &(i64, i64)| DAY + of / 12 * 24 * HOUR + (of % 12 + hours) * HOUR;
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("of", Arc::new(Int64Array::from_iter_values(events.iter().map(|(of, _)| *of)))),
        ("at", Arc::new(TimestampMicrosecondArray::from_iter_values(events.iter().map(time)))),
        ("kind", Arc::new(StringArray::from_iter_values(events.iter().map(|_| "click")))),
    ];
    dir.write("events.parquet", parquet(columns));
}

/// Runs a command that must succeed, and returns its JSON summary.
#[track_caller]
fn works(dir: &Dir, arguments: &[&str]) -> Value {
    let output = dir.command(arguments).arg("--json").output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(String::from_utf8_lossy(&output.stdout).lines().last().unwrap()).unwrap()
}

fn digest(dir: &Dir, dataset: &str) -> String {
    let verified = verify(&dir.path(dataset), &VerifyOptions::new(2), &Silent).unwrap();
    assert!(verified.is_sound() && verified.warnings.is_empty(), "{verified:?}");
    verified.digest.unwrap().to_string()
}

#[test]
fn relabel_computes_labels_from_the_current_events() {
    let dir = Dir::new();
    write_log(&dir);
    write_events(&dir, &[(0, 1), (13, 2)]);
    works(&dir, &["build", "config.toml", "--out", "dataset"]);
    // Events of the first two days arrive late, and one event has been removed.
    write_events(&dir, &[(0, 1), (2, 30), (3, 2), (14, 60)]);
    let files = || -> BTreeMap<String, Vec<usize>> {
        let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
        let of = |sets: &[onefold_datasets::FileSet]| sets.iter().map(|set| set.files.len()).collect();
        snapshot
            .partitions
            .iter()
            .map(|partition| (partition.key.to_string(), of(&partition.files)))
            .collect()
    };
    let one = works(&dir, &["relabel", "config.toml", "--out", "dataset", "--partition", "date=2024-05-01"]);
    assert_eq!(one["labels_changed"], json!({ "clicked": 2, "weight": 0 }));
    assert_eq!(one["samples_changed_by_day"], json!({ "0": 1, "1": 1 }));
    assert_eq!((&one["samples_ignored"], &one["partitions_written"]), (&json!(24), &json!(1)));
    let rest = works(&dir, &["relabel", "config.toml", "--out", "dataset"]);
    assert_eq!(rest["labels_changed"], json!({ "clicked": 2, "weight": 0 }));
    assert_eq!(rest["samples_changed_by_day"], json!({ "2": 1 }));
    assert_eq!((&rest["samples_changed_without_event"], &rest["snapshot"]), (&json!(1), &json!(3)));
    let days = ["date=2024-05-01", "date=2024-05-02", "date=2024-05-03"].map(str::to_owned);
    assert!(files().into_iter().eq(days.into_iter().zip([vec![2], vec![2], vec![1]])), "{:?}", files());
    works(&dir, &["build", "config.toml", "--out", "whole"]);
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "whole"));
    let again = works(&dir, &["relabel", "config.toml", "--out", "dataset"]);
    assert_eq!(
        (&again["changed"], &again["files_written"], &again["snapshot"]),
        (&json!(false), &json!(0), &json!(3))
    );
    // Other commands accept the dataset, and `vacuum` can remove files that are no longer needed.
    works(&dir, &["verify", "dataset", "--against", "config.toml"]);
    works(&dir, &["report", "dataset"]);
    let append = works(&dir, &["append", "config.toml", "--out", "dataset"]);
    assert_eq!(append["changed"], json!(false));
    works(&dir, &["vacuum", "dataset", "--keep", "1", "--older-than", "0s"]);
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "whole"));
    // Features are added first, and labels recomputed afterwards.
    dir.write("more.toml", format!("{CONFIG}user = {{ kind = \"sparse\", group = \"user\" }}\n"));
    let added = works(&dir, &["add-features", "more.toml", "--out", "dataset"]);
    assert_eq!((&added["columns"], &added["labels_changed"]), (&json!(["user"]), &Value::Null));
    write_events(&dir, &[(30, 5)]);
    works(&dir, &["relabel", "more.toml", "--out", "dataset"]);
    works(&dir, &["build", "more.toml", "--out", "whole", "--overwrite"]);
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "whole"));
    let history = works(&dir, &["history", "dataset"]);
    let operations = history["snapshots"].as_array().unwrap().iter().map(|entry| entry["operation"].clone());
    assert_eq!(operations.collect::<Vec<_>>(), ["columns", "columns", "columns"]);
}

/// Checks that `add-features` refuses configurations that do more than add features, as `append` does.
#[test]
fn features_that_the_configuration_changes_are_refused() {
    let dir = Dir::new();
    write_log(&dir);
    write_events(&dir, &[(0, 1)]);
    works(&dir, &["build", "config.toml", "--out", "dataset"]);
    let item = "item = { kind = \"sparse\", group = \"item\" }";
    let changes = [
        ("", "the samples do not have its features `item`"),
        ("item = { kind = \"sequence\", group = \"item\" }", "the samples have it as a sequence feature"),
        (
            "item = { kind = \"sparse\", group = \"item\", ids = \"hash\" }",
            "the vocabularies of features, or their `ids`",
        ),
    ];
    for (changed, part) in changes {
        for further in ["user = { kind = \"sparse\" }\n", "request = { kind = \"dense\" }\n"] {
            dir.write("changed.toml", CONFIG.replace(item, changed) + further);
            let command = dir.command(&["add-features", "changed.toml", "--out", "dataset"]);
            dir.fails_as(command, &["another schema", part]);
        }
    }
    assert_eq!(Snapshot::load(&dir.path("dataset")).unwrap().snapshot, 1);
}
