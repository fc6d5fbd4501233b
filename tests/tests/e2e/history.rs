//! Appending to, reading, listing and removing the snapshots of a dataset with the binaries.

use onefold_datasets::Snapshot;
use onefold_tests::Dir;
use serde_json::{Value, json};

use crate::logs::{EVENTS, REQUESTS, event_columns, feature_columns, write_logs, write_table};
use crate::samples::{assert_only_named_files, read_samples, read_samples_at, snapshot_numbers, sorted};

const BUILD: &str = "onefold-ingest build logs/dataset.toml --threads 2 --out dataset";
const APPEND: &str = "onefold-ingest append logs/dataset.toml --threads 2 --out dataset";

/// Returns a directory with the dataset of the hand-made log, and a log without request 2, which belongs to
/// `split=train` at 10:00.
fn with_smaller_log() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    let events = EVENTS.iter().filter(|event| event.request != 2);
    let mut kept = Vec::new();
    events.for_each(|event| kept.push(crate::logs::Event { ..*event }));
    write_table(&dir.path("logs/events.parquet"), event_columns(&kept));
    dir
}

/// Returns the number, operation, gained samples and samples of each snapshot, as `history` prints them.
fn history(dir: &Dir, more: &str) -> Vec<Value> {
    let listed = dir.command(&format!("onefold-ingest history dataset{more}")).json();
    let entry = |entry: &Value| {
        json!([entry["snapshot"], entry["operation"], entry["samples_gained"], entry["samples"]])
    };
    listed["snapshots"].as_array().unwrap().iter().map(entry).collect()
}

#[test]
fn an_append_that_would_lose_samples_is_refused() {
    let dir = with_smaller_log();
    let partition = "split=train/date=2024-05-01/hour=10";
    dir.command(APPEND).fails(&[
        &format!("partition `{partition}` has 7 samples, and appending would leave 6"),
        "nothing was committed",
        "`--replace`",
    ]);
    assert_eq!(history(&dir, ""), [json!([1, "create", 12, 12])]);
    // Other partitions of the same log can be appended.
    let other = dir.command(&format!("{APPEND} --partition split=holdout")).json();
    assert_eq!((other["changed"].as_bool(), other["snapshot"].as_u64()), (Some(false), Some(1)));

    let replaced = dir.command(&format!("{APPEND} --replace")).json();
    assert_eq!((replaced["changed"].as_bool(), replaced["samples"].as_u64()), (Some(true), Some(11)));
    assert_eq!(history(&dir, ""), [json!([1, "create", 12, 12]), json!([2, "replace", -1, 11])]);
    // If the log has all samples again, it can be appended.
    write_logs(&dir);
    dir.command(APPEND).works();
    let all = [json!([1, "create", 12, 12]), json!([2, "replace", -1, 11]), json!([3, "append", 1, 12])];
    assert_eq!(history(&dir, ""), all);
    assert_eq!(history(&dir, " --limit 2"), all[1..]);
    let dataset = dir.path("dataset");
    assert_eq!(sorted(read_samples_at(&dataset, 1)), sorted(read_samples(&dataset)));
    assert_only_named_files(&dataset);
}

#[test]
fn every_snapshot_is_read_as_it_was() {
    let dir = with_smaller_log();
    dir.command(&format!("{APPEND} --replace")).works();
    let samples = |command: &str, key: &str| dir.command(command).json()[key].as_u64();
    for (at, expected) in [("", 11), (" --at 1", 12), (" --at 2", 11)] {
        let expected = Some(expected);
        assert_eq!(samples(&format!("onefold-ingest verify dataset{at}"), "samples"), expected, "{at}");
        assert_eq!(samples(&format!("onefold-ingest report dataset{at}"), "samples"), expected, "{at}");
        assert_eq!(samples(&format!("onefold-read bench dataset --batch-size 4{at}"), "samples"), expected);
    }
    let against = "onefold-ingest verify dataset --against logs/dataset.toml";
    assert_eq!(dir.command(against).json()["against"]["samples"].as_u64(), Some(11));
    let older = dir.command(&format!("{against} --at 1")).output();
    let found = String::from_utf8_lossy(&older.stdout);
    assert_eq!(older.status.code(), Some(1));
    assert!(found.contains("the sources have 6 samples, the dataset has 7"), "{found}");
    for command in ["onefold-ingest verify", "onefold-ingest report", "onefold-read head"] {
        let parts = ["`dataset` has no snapshot 3", "snapshots 1 to 2", "`onefold-ingest history`"];
        dir.command(&format!("{command} dataset --at 3")).fails(&parts);
    }
    let train = "onefold-train run logs/train.toml --data dataset --out run --overwrite --threads 2";
    // 9 samples of `split=train` in the first snapshot, 8 in the second, in batches of 4 and two epochs.
    assert_eq!(samples(&format!("{train} --at 1"), "samples"), Some(18));
    assert_eq!(samples(train, "samples"), Some(16));
    dir.command(&format!("{train} --at 7")).fails(&["`dataset` has no snapshot 7"]);
}

#[test]
fn a_history_says_what_was_written_and_when() {
    let dir = with_smaller_log();
    dir.command(&format!("{APPEND} --replace")).works();
    let listed = dir.command("onefold-ingest history dataset").json();
    let newest = Snapshot::load(&dir.path("dataset")).unwrap();
    let entry = &listed["snapshots"][1];
    assert_eq!(entry["committed"].as_str(), Some(newest.committed.as_str()));
    assert!(listed["snapshots"][0]["committed"].as_str() <= Some(newest.committed.as_str()));
    assert_eq!(entry["bytes_on_disk"].as_u64(), Some(newest.statistics.bytes_on_disk));
    assert_eq!(entry["sessions"].as_u64(), Some(7));
    let partitions = entry["partitions_written"].as_array().unwrap();
    assert_eq!(partitions.len(), 5);
    assert!(partitions.contains(&"split=holdout/date=2024-05-01/hour=23".into()), "{partitions:?}");
    let shown = dir.command("onefold-ingest history dataset").works();
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), 3, "{shown}");
    for part in [" 2 ", &newest.committed, " replace ", " 11 ", " -1 ", "(5)"] {
        assert!(lines[2].contains(part), "`{part}` in {shown}");
    }
    dir.command("onefold-ingest history logs").fails(&["`logs` is not a dataset"]);
    let misused = dir.command("onefold-ingest history dataset --limit 0").output();
    assert_eq!(misused.status.code(), Some(2));
}

#[test]
fn a_vacuum_removes_old_snapshots_and_what_only_they_name() {
    let dir = Dir::new();
    write_logs(&dir);
    let dataset = dir.path("dataset");
    for number in 1..=4 {
        assert_eq!(dir.command(&format!("{BUILD} --overwrite")).json()["snapshot"], number);
    }
    // Two snapshots share all partitions but one.
    let (early, _) = REQUESTS.split_at(5);
    write_table(&dir.path("logs/features/part-1.parquet"), feature_columns(early));
    fs_err::remove_file(dir.path("logs/features/part-0.parquet")).unwrap();
    dir.command(&format!("{APPEND} --replace --partition split=train")).works();
    assert_eq!(snapshot_numbers(&dataset), [1, 2, 3, 4, 5]);
    let read = |number| sorted(read_samples_at(&dataset, number));
    let (fourth, fifth) = (read(4), read(5));
    assert_ne!(fourth, fifth);

    // By default, the last ten snapshots and all that are younger than a day are kept.
    for options in ["", " --keep 1", " --keep 5 --older-than 0s", " --keep 9 --older-than 0s"] {
        let before = dir.files();
        let vacuumed = dir.command(&format!("onefold-ingest vacuum dataset{options}")).json();
        assert_eq!(vacuumed["snapshots_kept"], json!([1, 2, 3, 4, 5]), "{options}");
        assert_eq!(vacuumed["files_removed"], 0, "{options}");
        assert!(dir.files() == before, "{options}");
    }
    let before = dir.files();
    let vacuum = "onefold-ingest vacuum dataset --keep 2 --older-than 0s";
    let shown = dir.command(&format!("{vacuum} --dry-run")).works();
    assert!(shown.contains("would remove 3 snapshots and 18 files"), "{shown}");
    assert_eq!(shown.matches(": superseded since 20").count(), 21, "{shown}");
    let dry = dir.command(&format!("{vacuum} --dry-run")).json();
    let listed = dry["would_remove"].as_array().unwrap();
    assert_eq!(listed.len(), 21, "{listed:?}");
    assert_eq!(listed[0]["path"], "snapshots/00000001.json");
    assert!(listed.iter().all(|removal| removal["reason"] == "superseded"), "{listed:?}");
    assert!(dir.files() == before, "a dry run has changed something");
    let vacuumed = dir.command(vacuum).json();
    assert_eq!((&dry["dry_run"], &vacuumed["dry_run"]), (&json!(true), &json!(false)));
    for result in [&dry, &vacuumed] {
        assert_eq!(result["snapshots_removed"], json!([1, 2, 3]));
        assert_eq!(result["snapshots_kept"], json!([4, 5]));
        // Five partitions with one file each, and a manifest.
        assert_eq!((&result["files_removed"], &result["young_files_kept"]), (&json!(18), &json!(0)));
    }
    let after = dir.files();
    let bytes = |files: &std::collections::BTreeMap<_, Vec<u8>>| files.values().map(Vec::len).sum::<usize>();
    assert_eq!(vacuumed["bytes_removed"].as_u64(), Some((bytes(&before) - bytes(&after)) as u64));
    assert_only_named_files(&dataset);
    assert_eq!(snapshot_numbers(&dataset), [4, 5]);
    assert_eq!((read(4), read(5)), (fourth, fifth));
    for at in [4, 5] {
        dir.command(&format!("onefold-ingest verify dataset --at {at}")).works();
    }
    dir.command("onefold-read head dataset --at 3").fails(&["has no snapshot 3", "snapshots 4 to 5"]);
    // The next commit continues the numbering.
    write_logs(&dir);
    assert_eq!(dir.command(APPEND).json()["snapshot"], 6);
    for misuse in ["--keep 0", "--older-than soon", "--older-than -1s"] {
        let output = dir.command(&format!("onefold-ingest vacuum dataset {misuse}")).output();
        assert_eq!(output.status.code(), Some(2), "{misuse}");
    }
    assert_eq!(snapshot_numbers(&dataset), [4, 5, 6]);
}
