//! Tests of added features, recomputed labels and merged files, with writers that are killed at several moments or that
//! run at the same time.

use onefold_datasets::Snapshot;
use onefold_tests::{BUCKET, Dir, Fault, S3Server, TestCommand, When};
use serde_json::Value;

use crate::crash::{file_names, kill_at};
use crate::samples::{assert_only_named_files, read_samples, sorted};
use crate::transfers::chunk_bytes;

const ADD: &str = "onefold-ingest add-features logs/dataset.toml --out dataset --threads 2";
const RELABEL: &str = "onefold-ingest relabel logs/dataset.toml --out dataset --threads 2";
const COMPACT: &str = "onefold-ingest compact dataset --threads 2";
const VACUUM: &str = "onefold-ingest vacuum dataset --keep 1 --older-than 0s";

/// Creates a directory with a log of `samples` samples, and two configurations: `logs/first.toml` lacks two features of
/// `logs/dataset.toml`, and has other labels.
fn with_logs(samples: u32) -> Dir {
    Dir::made_once(&samples.to_string(), |dir| {
        let generate =
            format!("onefold-data generate --workload rm3 --samples {samples} --seed 4 --out logs");
        dir.command(&generate).works();
        dir.edit("logs/dataset.toml", "[samples]\n", "[samples]\nkey = [\"request_id\"]\n");
        let text = dir.text("logs/dataset.toml");
        let lacking = further_features(&text);
        let first: Vec<&str> = text.lines().filter(|line| !lacking.contains(line)).collect();
        dir.write("logs/first.toml", first.join("\n").replace("e.label", "1 - e.label AS label"));
    })
}

/// Returns the lines of a configuration for the dense and the sparse feature that the first dataset lacks.
fn further_features(text: &str) -> [&str; 2] {
    ["dense", "sparse"].map(|kind| {
        let kind = format!("kind = \"{kind}\"");
        text.lines().find(|line| line.contains(&kind)).unwrap()
    })
}

/// Builds `dataset`, which lacks two features and has other labels, and `whole`, which has all features and the right
/// labels.
fn with_datasets() -> Dir {
    Dir::made_once("", |dir| {
        let logs = with_logs(12_000);
        logs.files().into_iter().for_each(|(name, bytes)| dir.write(name, bytes));
        dir.command("onefold-ingest build logs/first.toml --out dataset --threads 2").works();
        dir.command("onefold-ingest build logs/dataset.toml --out whole --threads 2").works();
    })
}

fn digest(dir: &Dir, dataset: &str) -> String {
    let verified = dir.command(&format!("onefold-ingest verify {dataset}")).json();
    assert_eq!(verified["problems"], serde_json::json!([]));
    verified["digest"].as_str().unwrap().to_owned()
}

/// Runs a command repeatedly, and kills each run at a later moment, until a run has committed.
fn kill_anywhere(dir: &Dir, command: &str) {
    let dataset = dir.path("dataset");
    let number = || Snapshot::load(&dataset).unwrap().snapshot;
    let (before, digest_before) = (number(), digest(dir, "dataset"));
    for folder in ["dataset", "dataset/data", "dataset/manifests", "dataset/snapshots"] {
        let known = file_names(&dir.path(folder));
        kill_at(dir, command, || !file_names(&dir.path(folder)).is_subset(&known));
        if number() != before {
            return;
        }
        // The digest is computed from all samples.
        assert_eq!(digest(dir, "dataset"), digest_before, "it was changed without a commit");
    }
    dir.command(command).works();
    assert_eq!(number(), before + 1);
}

#[test]
fn killed_writers_of_columns_and_of_merged_files_leave_the_old_dataset_whole() {
    let dir = with_datasets();
    assert_ne!(digest(&dir, "dataset"), digest(&dir, "whole"));
    kill_anywhere(&dir, ADD);
    kill_anywhere(&dir, RELABEL);
    kill_anywhere(&dir, COMPACT);
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "whole"));
    // Samples with equal times may be in another order.
    let [found, expected] = ["dataset", "whole"].map(|name| sorted(read_samples(&dir.path(name))));
    assert!(found == expected);
    // A vacuum removes the older snapshots and the files that the killed runs left.
    dir.command(VACUUM).works();
    assert_only_named_files(&dir.path("dataset"));
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "whole"));
}

#[test]
fn the_bytes_written_are_those_of_the_columns() {
    let dir = with_datasets();
    let text = dir.text("logs/dataset.toml");
    let further = further_features(&text).map(|line| line.split(' ').next().unwrap());
    let added_chunks = chunk_bytes(&dir.path("whole"), |name| further.contains(&name));
    let label_chunks = chunk_bytes(&dir.path("whole"), |name| name == "label");
    let added = dir.command(ADD).json();
    let labels = dir.command(RELABEL).json();
    let number = |of: &serde_json::Value, name: &str| of[name].as_u64().unwrap();
    assert_eq!((number(&added, "samples"), number(&labels, "samples")), (12_000, 12_000));
    assert_eq!(labels["labels_changed"]["label"].as_u64(), Some(12_000));
    // The labels are columns of the log, so no events are known.
    assert_eq!(number(&labels, "samples_changed_without_event"), 12_000);
    // The commands write two of 39 features, and the labels. The footer of a file with so few labels adds more than a
    // fifth.
    let bytes = number(&added, "bytes_written");
    assert!((added_chunks..=added_chunks * 11 / 10).contains(&bytes), "{bytes} bytes for {added_chunks}");
    let bytes = number(&labels, "bytes_written");
    assert!(
        (label_chunks..=label_chunks * 6 / 5 + 1000).contains(&bytes),
        "{bytes} bytes for {label_chunks}"
    );
    assert_eq!(dir.command(ADD).json()["changed"], false);
}

#[test]
fn of_two_writers_of_the_same_columns_one_commits() {
    let dir = with_datasets();
    let running: Vec<_> = (0..2).map(|_| dir.command(ADD).spawn()).collect();
    let ended: Vec<bool> = running.into_iter().map(|mut child| child.wait().unwrap().success()).collect();
    assert!(ended.contains(&true), "{ended:?}");
    let added = dir.command(ADD).json();
    assert_eq!((added["changed"].as_bool(), added["snapshot"].as_u64()), (Some(false), Some(2)));
    dir.command(RELABEL).works();
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "whole"));
}

/// Creates a dataset at `location`, and changes it with each command that changes datasets. Returns a part of each
/// command's result, which must not depend on the location.
fn changed(dir: &Dir, location: &str, command: &dyn Fn(&str) -> TestCommand) -> Vec<Value> {
    let text = dir.text("logs/dataset.toml");
    let [dense, sparse] = further_features(&text).map(|line| line.split(' ').next().unwrap());
    let lines = [
        ("build logs/first.toml --out DATASET --threads 2".to_owned(), "snapshot"),
        ("add-features logs/dataset.toml --out DATASET --threads 2".to_owned(), "files_written"),
        ("relabel logs/dataset.toml --out DATASET --threads 2".to_owned(), "labels_changed"),
        (format!("rename-feature DATASET {sparse} renamed"), "features"),
        ("vacuum DATASET --keep 1 --older-than 0s".to_owned(), "files_removed"),
        (format!("drop-features DATASET {dense}"), "features"),
        ("compact DATASET --threads 2".to_owned(), "bytes_on_disk"),
        ("forget DATASET --users users.txt --purge --threads 2".to_owned(), "samples_removed"),
        ("verify DATASET --absent users.txt --threads 2".to_owned(), "digest"),
    ];
    let run = |(line, key): &(String, &str)| {
        command(&format!("onefold-ingest {}", line.replace("DATASET", location))).json()[*key].clone()
    };
    lines.iter().map(run).collect()
}

#[test]
fn changes_in_a_store_that_fails_are_those_on_a_local_disk() {
    let dir = with_logs(1000);
    // The even keys of sessions.
    dir.write("users.txt", (0..2000).step_by(2).map(|key| format!("{key}\n")).collect::<String>());
    let local = changed(&dir, "dataset", &|line| dir.command(line));
    assert!(local[4].as_u64() > Some(0) && local[7].as_u64() > Some(100), "{local:?}");
    let server = S3Server::start();
    for (fault, seed) in [Fault::SlowDown, Fault::Reset, Fault::LoseAnswer].into_iter().zip(1..) {
        server.inject("", fault, When::Chance { probability: 0.05, seed });
    }
    let remote = changed(&dir, "s3://data/ds", &|line| dir.command(line).with_s3(&server));
    assert_eq!(remote, local);
    assert!(server.counters().faults > 5, "{:?}", server.counters());
    assert_only_named_files(&dir.path("dataset"));
    assert_only_named_files(&server.file(BUCKET, "ds"));
}
