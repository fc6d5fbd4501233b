//! Tests of training that follows a dataset to which partitions are appended: kills, several ranks, changed partitions.

use std::cell::Cell;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use onefold_datasets::{
    Buckets, Commit, DatasetWriter, FeatureGroup, Order, PartitionColumn, PartitionKey, PartitionType,
    SESSION_COLUMN, Schema, Snapshot, SparseFeature, SparseKind, TIME_COLUMN, WriterOptions,
};
use onefold_tests::{Dir, S3Server};
use serde_json::Value;

use crate::crash::kill_at;
use crate::logs::write_logs;
use crate::ranks::{assert_near, losses};

const CONFIG: &str = r#"format_version = 1

[data]
label = "clicked"
streams = 2

[train]
batch_size = 16
seed = 1
log_every_steps = 3

[model]
bottom_mlp = [8, 4]
top_mlp = [8, 1]

[embedding]
rows = 50
ids = "hashed"

[optimizer.tables]
kind = "adagrad"
learning_rate = 0.01
eps = 0.1

[optimizer.dense]
kind = "adagrad"
learning_rate = 0.01
eps = 0.1

[checkpoint]
every_steps = 2
keep = 3
full_every = 2
"#;
const FOLLOW: &str = "onefold-train follow train.toml --data dataset --threads 1 --look-every 50ms";
/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
/// The number of sessions of an hour in each of two buckets, and the number of samples of each session.
const SESSIONS: i64 = 4;
const SAMPLES: i64 = 6;

fn name(hour: i64) -> String {
    format!("date=2024-05-01/hour={hour:02}")
}

/// Commits the 48 samples (3 batches) of an hour. They depend on `seed`.
fn commit_hour(dir: &Dir, hour: i64, seed: i64, commit: Commit) {
    commit_with(dir, hour, seed, commit, &[]);
}

/// Commits the samples of an hour, as [`commit_hour`] does, with additional features.
fn commit_with(dir: &Dir, hour: i64, seed: i64, commit: Commit, further: &[&str]) {
    let group = |name: &str, deduplicated, kind| FeatureGroup {
        name: name.to_owned(),
        deduplicated,
        features: vec![SparseFeature::new(name, kind)],
    };
    let mut groups =
        vec![group("history", true, SparseKind::Sequence), group("item", false, SparseKind::Sparse)];
    groups.extend(further.iter().map(|name| group(name, false, SparseKind::Sparse)));
    let schema = Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec!["age".to_owned()],
        kept: Vec::new(),
        groups,
    };
    let samples = || 0..2 * SESSIONS * SAMPLES;
    // The 16 highest of the 63 bits of a session's id determine the bucket.
    let session = |i: i64| {
        let (number, bucket) = (i / SAMPLES, i / (SESSIONS * SAMPLES));
        ((bucket * 65_536 + 65_535) / 2) << 47 | (100 * hour + number)
    };
    let random = |i: i64, of: i64| {
        let mixed = (i + 1_000 * hour + 100_000 * seed + 7).wrapping_mul(0x5851_f42d_4c95_7f2d);
        (mixed >> 33).rem_euclid(of)
    };
    let lists = |list: &dyn Fn(i64) -> Vec<i64>| -> ArrayRef {
        let lists = samples().map(|i| Some(list(i).into_iter().map(Some).collect::<Vec<_>>()));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let floats = |value: &dyn Fn(i64) -> f32| -> ArrayRef {
        Arc::new(Float32Array::from_iter_values(samples().map(value)))
    };
    let mut columns: Vec<(&str, ArrayRef)> = vec![
        (SESSION_COLUMN, Arc::new(Int64Array::from_iter_values(samples().map(session)))),
        (
            TIME_COLUMN,
            Arc::new(TimestampMicrosecondArray::from_iter_values(
                samples().map(|i| DAY + hour * 3_600_000_000 + i * 1_000_000),
            )),
        ),
        ("clicked", floats(&|i| f32::from(u8::from(random(i, 5) < 2)))),
        ("age", floats(&|i| (random(i / SAMPLES, 40) + hour) as f32)),
        ("history", lists(&|i| (0..i % SAMPLES).map(|place| random(i / SAMPLES + place, 30)).collect())),
        ("item", lists(&|i| vec![random(i, 40)])),
    ];
    columns.extend(further.iter().map(|name| (*name, lists(&|i| vec![random(i, 3)]))));
    let rows = RecordBatch::try_from_iter(columns).unwrap();
    let options =
        WriterOptions { commit, buckets: Buckets::with_own_files(2), ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(&dir.path("dataset"), schema, options).unwrap();
    let columns = [("date", PartitionType::Date), ("hour", PartitionType::Integer)]
        .map(|(name, kind)| PartitionColumn::new(name, kind));
    writer.set_partition_columns(columns.to_vec()).unwrap();
    writer.write(&PartitionKey::parse(&name(hour)).unwrap(), &rows).unwrap();
    writer.finish().unwrap();
}

/// Sets all labels of an hour to 1, as `relabel` does.
fn relabel_hour(dir: &Dir, hour: i64) {
    let location = dir.path("dataset");
    let snapshot = Snapshot::load(&location).unwrap();
    let options = WriterOptions {
        commit: Commit::Columns,
        buckets: Buckets::with_own_files(2),
        ..WriterOptions::new(Order::Session)
    };
    let mut writer = DatasetWriter::create(&location, snapshot.schema.clone(), options).unwrap();
    let key = PartitionKey::parse(&name(hour)).unwrap();
    let partition = snapshot.partitions.iter().find(|partition| partition.key == key).unwrap();
    for sets in partition.ranges(snapshot.division()) {
        let range = snapshot.division().range_of(sets[0].bucket);
        let mut columns = writer.columns(&key, range, sets.to_vec(), &["clicked".to_owned()]).unwrap();
        for row_group in sets.iter().flat_map(|set| &set.row_groups) {
            let ones = Float32Array::from(vec![1.0; row_group.samples as usize]);
            let rows = RecordBatch::try_from_iter([("clicked", Arc::new(ones) as ArrayRef)]).unwrap();
            columns.write_row_group(vec![rows]).unwrap();
        }
        writer.add_columns(columns).unwrap();
    }
    writer.finish().unwrap();
}

/// Creates a directory with the configuration and a dataset of this number of hours.
fn with_hours(hours: i64) -> Dir {
    let dir = Dir::new();
    dir.write("train.toml", CONFIG);
    (0..hours).for_each(|hour| commit_hour(&dir, hour, 0, Commit::Append));
    dir
}

/// Returns the lines of a run's `follow.jsonl`.
fn lines(dir: &Dir, run: &str) -> Vec<Value> {
    let text = dir.text(format!("{run}/follow.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the name of each partition in the order of the lines, with the figures that must be equal in equal runs.
fn parts(dir: &Dir, run: &str) -> Vec<(String, Vec<Option<f64>>)> {
    let figures = [
        "step",
        "samples",
        "training_samples",
        "training_loss",
        "loss",
        "ne",
        "auc",
        "calibration",
        "psi",
        "sparse_psi",
    ];
    let all = lines(dir, run).into_iter().filter(|line| line["partition"].is_string());
    all.map(|line| {
        let values = figures.map(|figure| line[figure].as_f64()).to_vec();
        (line["partition"].as_str().unwrap().to_owned(), values)
    })
    .collect()
}

#[track_caller]
fn assert_same_parts(found: &[(String, Vec<Option<f64>>)], expected: &[(String, Vec<Option<f64>>)]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for ((name, values), (expected_name, expected)) in found.iter().zip(expected) {
        assert_eq!(name, expected_name);
        for (a, b) in values.iter().zip(expected) {
            // Figures from a checkpoint were rounded by JSON.
            let same = a == b || a.zip(*b).is_some_and(|(a, b)| (a - b).abs() <= 1e-12 * b.abs());
            assert!(same, "{name}: {values:?} {expected:?}");
        }
    }
}

/// Returns whether a file exists and contains a text.
fn has(dir: &Dir, file: &str, text: &str) -> bool {
    fs_err::read_to_string(dir.path(file)).is_ok_and(|found| found.contains(text))
}

/// Returns the names of the checkpoints of a run.
fn checkpoints(dir: &Dir, run: &str) -> Vec<String> {
    let Ok(entries) = fs_err::read_dir(dir.path(format!("{run}/checkpoints"))) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_dataset_is_followed_through_kills() {
    const HOURS: i64 = 11;
    let dir = with_hours(2);
    let follow = format!("{FOLLOW} --export-every 3 --out");
    let first = dir.command(&format!("{follow} run --stop-after 2")).json();
    assert_eq!((&first["ended"], first["steps"].as_u64()), (&"partitions".into(), Some(6)));
    // The first hour has no evaluation before training, and no earlier hour to compute a PSI against.
    let second = &lines(&dir, "run")[1];
    assert!(second["ne"].is_f64() && second["psi_by_feature"]["age"].as_f64() > Some(0.0), "{second}");
    for feature in ["history", "item"] {
        assert!(second["sparse_psi_by_feature"][feature].as_f64() > Some(0.0), "{second}");
    }
    assert!(lines(&dir, "run")[0]["ne"].is_null() && lines(&dir, "run")[0]["psi"].is_null());
    assert!(lines(&dir, "run")[0]["sparse_psi"].is_null());

    for hour in 2..HOURS {
        let (committed, before) = (Cell::new(hour % 2 == 0), checkpoints(&dir, "run"));
        if committed.get() {
            commit_hour(&dir, hour, 0, Commit::Append);
        }
        let moment = || {
            if !committed.replace(true) {
                // The training waits for a partition, or is about to wait.
                commit_hour(&dir, hour, 0, Commit::Append);
            }
            match hour % 3 {
                // Kill it before, during or after the training on this hour.
                0 => has(&dir, "run/metrics.jsonl", &name(hour)),
                1 => checkpoints(&dir, "run").last() > before.last(),
                _ => has(&dir, "run/follow.jsonl", &name(hour)),
            }
        };
        assert!(kill_at(&dir, &format!("{follow} run"), moment), "it ended by itself at {hour}");
    }
    let last = dir.command(&format!("{follow} run --stop-after {HOURS}")).json();
    let whole = dir.command(&format!("{follow} whole --stop-after {HOURS}")).json();
    assert_eq!((losses(&last), last["steps"].as_u64()), (losses(&whole), Some(3 * HOURS as u64)));
    assert!(dir.read("run/metrics.jsonl") == dir.read("whole/metrics.jsonl"));
    assert_same_parts(&parts(&dir, "run"), &parts(&dir, "whole"));
    let names: Vec<String> = parts(&dir, "run").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, (0..HOURS).map(name).collect::<Vec<_>>());

    // The model is exported after every third hour, and `latest` names the last export.
    for run in ["run", "whole"] {
        assert_eq!(dir.text(format!("{run}/exports/latest")), "step-000000000027\n");
        let exported: Vec<_> =
            lines(&dir, run).into_iter().filter(|line| line["export"].is_string()).collect();
        assert_eq!(exported.len(), 3, "{exported:?}");
        for line in exported {
            let folder = format!("{run}/exports/{}", line["export"].as_str().unwrap());
            assert!(line["freshness_seconds"].as_f64() > Some(0.0), "{line}");
            let figures: Value = serde_json::from_str(&dir.text(format!("{folder}/figures.json"))).unwrap();
            assert_eq!(figures["partition"], line["partition"]);
            let whole = folder.replace(run, "whole") + "/model.safetensors";
            assert!(dir.read(format!("{folder}/model.safetensors")) == dir.read(whole), "{folder}");
        }
    }
    // Other commands read the run like any other.
    dir.command("onefold-train eval run --data dataset --partitions hour=3").works();
    dir.command("onefold-train report run --html report.html").works();
    let page = dir.text("report.html");
    for part in ["Partition by partition", "stability of dense", "stability of sparse", "Freshness", "Lag"] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn ranks_follow_together() {
    let dir = with_hours(3);
    let ranks =
        "onefold-train launch --ranks 2 -- follow train.toml --data dataset --look-every 50ms --timeout 300";
    let job = dir.command(&format!("{ranks} --out ranks")).spawn_with_stderr();
    let started = Instant::now();
    while !has(&dir, "ranks/follow.jsonl", &name(2)) {
        assert!(started.elapsed() < Duration::from_secs(600), "nothing happened within ten minutes");
        std::thread::sleep(Duration::from_millis(20));
    }
    // The job waits for a partition when it is stopped.
    assert!(Command::new("kill").args(["-TERM", &job.id().to_string()]).status().unwrap().success());
    let output = job.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(parts(&dir, "ranks").len(), 3);
    commit_hour(&dir, 3, 0, Commit::Append);
    commit_hour(&dir, 4, 0, Commit::Append);
    let resumed = dir.command(&format!("{ranks} --out ranks --stop-after 5")).json();
    assert_eq!(resumed["ranks"], 2);
    let whole = dir.command(&format!("{ranks} --out whole --stop-after 5")).json();
    assert_eq!(losses(&resumed), losses(&whole));
    assert_same_parts(&parts(&dir, "ranks"), &parts(&dir, "whole"));
    let alone = dir.command(&format!("{FOLLOW} --out alone --stop-after 5")).json();
    assert_near("alone", &losses(&whole), &losses(&alone));
    assert_eq!(parts(&dir, "alone").len(), 5);
}

#[test]
fn a_partition_that_is_changed_is_reported_once_and_not_trained_on_again() {
    let dir = with_hours(3);
    let follow = format!("{FOLLOW} --out run --stop-after");
    dir.command(&format!("{follow} 3")).works();
    commit_hour(&dir, 1, 1, Commit::Replace);
    commit_hour(&dir, 3, 0, Commit::Append);
    let output = dir.command(&format!("{follow} 4")).output();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    assert!(
        told.contains(&format!("the partition `{}` was changed after it was trained on", name(1))),
        "{told}"
    );
    commit_hour(&dir, 4, 0, Commit::Append);
    let output = dir.command(&format!("{follow} 5")).output();
    assert!(output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("was changed"));
    let changed = changes(&dir, "run");
    assert_eq!(changed.len(), 1, "{changed:?}");
    assert_eq!((&changed[0]["changed"], changed[0]["samples"].as_u64()), (&name(1).into(), Some(48)));
    let names: Vec<String> = parts(&dir, "run").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, (0..5).map(name).collect::<Vec<_>>());
    dir.command("onefold-train report run --html report.html").works();
    assert!(dir.text("report.html").contains("changed after"));

    // A run that starts from this one begins with the first partition that this one has not trained on.
    commit_hour(&dir, 5, 0, Commit::Append);
    let next = "--out next --warm-start run --new-partitions --stop-after 1";
    let next = dir.command(&format!("{FOLLOW} {next}")).json();
    assert_eq!((next["samples"].as_u64(), next["lifetime"]["samples"].as_u64()), (Some(48), Some(6 * 48)));
    assert_eq!(parts(&dir, "next")[0].0, name(5));
}

/// Returns the lines about partitions that were changed.
fn changes(dir: &Dir, run: &str) -> Vec<Value> {
    lines(dir, run).into_iter().filter(|line| !line["changed"].is_null()).collect()
}

#[test]
fn late_labels_are_trained_on_again_if_that_is_asked_for() {
    let dirs = [with_hours(3), with_hours(3)];
    let follow = format!("{FOLLOW} --late-labels --out run");
    for dir in &dirs {
        dir.command(&format!("{follow} --stop-after 3")).works();
        relabel_hour(dir, 1);
    }
    let [killed, whole] = &dirs;
    let before = checkpoints(killed, "run");
    // It is killed while it trains on the partition again.
    let moment = || checkpoints(killed, "run").last() > before.last();
    assert!(kill_at(killed, &follow, moment), "it ended by itself");
    for dir in &dirs {
        dir.command(&format!("{follow} --stop-after 4")).works();
        let line = lines(dir, "run").pop().unwrap();
        assert_eq!((&line["partition"], &line["late_labels"]), (&name(1).into(), &true.into()));
        // Merging files changes no label.
        dir.command("onefold-ingest compact dataset").works();
        commit_hour(dir, 3, 0, Commit::Append);
        dir.command(&format!("{follow} --stop-after 5")).works();
        let line = lines(dir, "run").pop().unwrap();
        assert!(line["psi"].is_f64() && line["late_labels"].is_null(), "{line}");
        assert!(changes(dir, "run").is_empty());
    }
    let names: Vec<String> = parts(killed, "run").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, [0, 1, 2, 1, 3].map(name));
    assert_same_parts(&parts(killed, "run"), &parts(whole, "run"));
    killed.command("onefold-train report run --html report.html").works();
    assert!(killed.text("report.html").contains("trained on again, with later labels"));
    // A partition that was replaced is only reported, and so are late labels without the option.
    commit_hour(killed, 2, 1, Commit::Replace);
    commit_hour(killed, 4, 0, Commit::Append);
    killed.command(&format!("{follow} --stop-after 6")).works();
    relabel_hour(killed, 0);
    commit_hour(killed, 5, 0, Commit::Append);
    killed.command(&format!("{FOLLOW} --out run --stop-after 7")).works();
    let changed: Vec<Value> = changes(killed, "run").iter().map(|line| line["changed"].clone()).collect();
    assert_eq!(changed, [2, 0].map(|hour| Value::from(name(hour))));
    assert_eq!(parts(killed, "run").len(), 7);
}

#[test]
fn partitions_are_trained_on_when_their_labels_are_old_enough() {
    let dir = with_hours(4);
    dir.edit("train.toml", "streams = 2", "streams = 2\nlabel_age = \"2h\"");
    let run = "onefold-train run train.toml --data dataset --threads 1";
    let samples = |command: String| dir.command(&command).json()["samples"].as_u64().unwrap();
    assert_eq!(samples(format!("{run} --out first")), 2 * 48);
    dir.command(&format!("{FOLLOW} --out run --stop-after 2")).works();
    commit_hour(&dir, 4, 0, Commit::Append);
    assert_eq!(samples(format!("{run} --out second --warm-start first --new-partitions")), 48);
    dir.command(&format!("{FOLLOW} --out run --stop-after 3")).works();
    let names: Vec<String> = parts(&dir, "run").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, [0, 1, 2].map(name));
    dir.edit("train.toml", "\"2h\"", "\"1d\"");
    dir.command(&format!("{run} --out other")).fails(&["too young", "label_age"]);
    dir.edit("train.toml", "label_age = \"1d\"", "labels_as_of = \"2024-05-01T03:00:00Z\"");
    dir.command(&format!("{FOLLOW} --out other")).fails(&["`[data].labels_as_of` is one time", "label_age"]);
}

/// Checks that features that are added to the dataset later are not read, and that snapshots of earlier training may be
/// removed.
#[test]
fn a_run_goes_on_when_the_dataset_has_moved_on() {
    let (dir, other) = (with_hours(2), with_hours(4));
    let follow =
        |dir: &Dir, run: &str, more: &str| dir.command(&format!("{FOLLOW} --out {run} {more}")).json();
    follow(&dir, "run", "--stop-after 2");
    commit_with(&dir, 2, 0, Commit::Append, &["region"]);
    dir.command("onefold-ingest vacuum dataset --keep 1 --older-than 0s").works();
    follow(&dir, "run", "--stop-after 3");
    commit_with(&dir, 3, 0, Commit::Append, &["region"]);
    let found = follow(&dir, "run", "--stop-after 4");
    let expected = follow(&other, "run", "--stop-after 4");
    assert_eq!(losses(&found), losses(&expected));
    assert_same_parts(&parts(&dir, "run"), &parts(&other, "run"));
    // A new run reads the added features.
    follow(&dir, "new", "--stop-after 1");
    assert!(has(&dir, "new/run.json", "region") && !has(&dir, "run/run.json", "region"));
}

#[test]
fn a_store_is_followed_from_any_machine() {
    let (dir, server) = (Dir::new(), S3Server::start());
    write_logs(&dir);
    dir.edit("logs/train.toml", "eval = \"split=holdout\"\n", "");
    for (key, value) in [("epochs", "1"), ("batch_size", "2")] {
        dir.set("logs/train.toml", key, value);
    }
    let append = |location: &str, hours: &str| {
        let append = format!("onefold-ingest append logs/dataset.toml --threads 2 --out {location}");
        dir.command(&format!("{append} --partition split=train,hour{hours}")).with_s3(&server).works();
    };
    let follow = |location: &str, more: &str| {
        let follow =
            format!("onefold-train follow logs/train.toml --threads 2 --look-every 50ms --data {location}");
        dir.command(&format!("{follow} {more}")).with_s3(&server).json()
    };
    for location in ["local", "s3://data/ds"] {
        append(location, "<12");
    }
    follow("s3://data/ds", "--out here --checkpoints s3://data/run --export-every 1 --stop-after 2");
    for location in ["local", "s3://data/ds"] {
        append(location, "=12");
    }
    let found =
        follow("s3://data/ds", "--out there --checkpoints s3://data/run --export-every 1 --stop-after 3");
    let expected = follow("local", "--out run --stop-after 3");
    assert!(found["resumed_from_step"].is_u64() && losses(&found) == losses(&expected), "{found}");
    // The lines that the first machine wrote are lost, except the line of the last checkpoint.
    assert_eq!((parts(&dir, "here").len(), parts(&dir, "there").len()), (2, 2));
    assert!(has(&dir, "there/exports/latest", "step-"));
    dir.command("onefold-train eval s3://data/run --data local").with_s3(&server).works();
}

#[test]
fn following_obeys_until_min_samples_max_wait_and_stop_after() {
    let dir = with_hours(5);
    let until = |time: &str, more: &str| {
        dir.command(&format!("{FOLLOW} --out run --until date=2024-05-01{time} {more}")).works();
        parts(&dir, "run").len()
    };
    assert_eq!(until("/hour=01", ""), 2);
    // If the last hour exists already, the command does not wait.
    assert_eq!(until("/hour=02", "--min-samples 1000000"), 3);
    let waited = format!("{FOLLOW} --out run --min-samples 1000000 --max-wait 100ms --stop-after 4");
    dir.command(&waited).works();
    let drifted = format!("{FOLLOW} --out run --min-samples 1000000 --max-drift 0.01 --stop-after 5");
    dir.command(&drifted).works();
    assert_eq!(until("", ""), 5);

    let refused =
        |more: &str, parts: &[&str]| dir.command(&format!("{FOLLOW} --out other {more}")).fails(parts);
    refused("--until week=3", &["`--until` is `week=3`", "date", "hour"]);
    dir.command(&format!("{FOLLOW} --out other --until week")).is_misused(&["not a partition"]);
    let rarely = FOLLOW.replace("--look-every 50ms", "--look-every 2h");
    dir.command(&format!("{rarely} --out other")).is_misused(&["more than an hour"]);
    dir.edit("train.toml", "seed = 1", "seed = 1\nepochs = 2");
    refused("", &["`[train].epochs` is 2", "set `epochs = 1`"]);
    dir.edit("train.toml", "seed = 1\nepochs = 2", "seed = 1");
    dir.command("onefold-train run train.toml --data dataset --out plain --threads 1").works();
    let plain = dir.command(&format!("{FOLLOW} --out plain"));
    plain.fails(&["plain`", "the run was begun with another command, so it"]);
    assert!(!dir.path("other").exists());
}
