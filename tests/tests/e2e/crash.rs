//! A writer that is killed at any time leaves all snapshots intact, and can be run again. Of several writers, none
//! loses a commit of another one.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use onefold_datasets::{
    Commit, DatasetWriter, PartitionColumn, PartitionKey, PartitionType, Snapshot, WriterOptions,
};
use onefold_tests::{Dir, TestCommand};

use crate::logs::{expected_samples, write_logs};
use crate::row_groups::session_rows;
use crate::samples::{
    Sample, assert_only_named_files, read_samples, read_samples_at, snapshot_numbers, sorted, unnamed_files,
};

const BUILD: &str = "onefold-ingest build logs/dataset.toml --out dataset --threads 2";
const VERIFY: &str = "onefold-ingest verify dataset";
/// Removes all files that no snapshot names, and all snapshots except the newest.
const VACUUM: &str = "onefold-ingest vacuum dataset --keep 1 --older-than 0s";

/// Returns a directory with a generated log in `logs`, a log with other samples in `new-logs`, and keys of sessions in
/// `users.txt`.
fn with_logs() -> Dir {
    Dir::made_once("", |dir| {
        for (seed, name) in [(1, "logs"), (2, "new-logs")] {
            dir.command(&format!(
                "onefold-data generate --workload rm3 --samples 12000 --seed {seed} --out {name}"
            ))
            .works();
        }
        // Keys of sessions, of which the log has some.
        dir.write("users.txt", (0..=20_000).step_by(2).map(|id| format!("{id}\n")).collect::<String>());
    })
}

/// Starts a command, and kills it as soon as `moment` returns true. Returns whether that happened before the command
/// ended.
pub(crate) fn kill_at(dir: &Dir, command: &str, moment: impl Fn() -> bool) -> bool {
    kill_command_at(dir.command(command), moment)
}

/// Kills an existing command as [`kill_at`] does.
pub(crate) fn kill_command_at(command: TestCommand, moment: impl Fn() -> bool) -> bool {
    let mut child = command.spawn();
    let started = Instant::now();
    let mut came = moment();
    while !came && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(600), "nothing happened within ten minutes");
        std::thread::sleep(Duration::from_micros(200));
        came = moment();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    came
}

/// Returns the paths of all files below a directory whose contents may change at the same time.
pub(crate) fn file_names(folder: &Path) -> BTreeSet<String> {
    let Ok(entries) = fs_err::read_dir(folder) else { return BTreeSet::new() };
    let names = entries.flatten().map(|entry| entry.path()).flat_map(|path| match path.is_dir() {
        true => file_names(&path),
        false => BTreeSet::from([path.to_string_lossy().into_owned()]),
    });
    names.collect()
}

/// Returns a function that returns true after the files below a directory, or their sizes, have changed `times`
/// times.
fn after_changes(folder: &Path, times: usize) -> impl Fn() -> bool {
    let sizes = |folder: &Path| -> Vec<_> {
        file_names(folder)
            .into_iter()
            .map(|name| fs_err::metadata(&name).ok().map(|file| (name, file.len())))
            .collect()
    };
    let folder = folder.to_owned();
    let seen = RefCell::new((sizes(&folder), 0));
    move || {
        let (now, mut seen) = (sizes(&folder), seen.borrow_mut());
        if seen.0 != now {
            *seen = (now, seen.1 + 1);
        }
        seen.1 >= times
    }
}

/// Kills `write` at its start and after some of the first changes of the dataset's files. The old dataset, which
/// [`BUILD`] makes, remains intact, and so does the new one if it was committed. Another run of `write` succeeds and
/// has the same result as the commands `whole`.
fn check_killed_anywhere(write: &str, whole: &[&str]) {
    let dir = with_logs();
    dir.command(BUILD).works();
    whole.iter().for_each(|command| drop(dir.command(command).works()));
    let dataset = dir.path("dataset");
    let (old, new) = (read_samples(&dataset), read_samples(&dir.path("whole")));
    assert!(old != new);
    let newest = || Snapshot::load(&dataset).unwrap().snapshot;
    // Returns whether the command was killed before it committed.
    let killed_at = |moment: &dyn Fn() -> bool| {
        let before = newest();
        kill_at(&dir, write, moment);
        let committed = newest();
        assert!(read_samples_at(&dataset, before) == old, "the old snapshot has other samples");
        assert_eq!(dir.command(VERIFY).json()["snapshot"].as_u64(), Some(committed));
        if committed != before {
            assert_eq!(committed, before + 1);
            assert!(read_samples(&dataset) == new, "it was committed with other samples");
            dir.command(&format!("{BUILD} --overwrite")).works();
            assert!(read_samples(&dataset) == old, "the old dataset has other samples");
        }
        committed == before
    };
    for changes in [0, 2, 4, 8] {
        killed_at(&after_changes(&dataset, changes));
    }
    let half_written = || {
        let before = file_names(&dataset.join("data"));
        let writes = || !file_names(&dataset.join("data")).is_subset(&before);
        killed_at(&writes) && writes()
    };
    assert!((0..20).any(|_| half_written()), "no run was killed while it wrote");

    dir.command(write).works();
    assert!(read_samples(&dataset) == new, "the rerun gives other samples");
    let left = unnamed_files(&dataset);
    assert!(!left.is_empty());
    let warnings = dir.command(VERIFY).json()["warnings"].as_array().map(Vec::len);
    assert!(warnings.is_some_and(|warnings| warnings <= left.len()), "{warnings:?} {left:?}");
    // The files are too young to be removed.
    let kept = dir.command("onefold-ingest vacuum dataset").json();
    assert_eq!((kept["files_removed"].as_u64(), kept["young_files_kept"].as_u64()), {
        (Some(0), Some(left.len() as u64))
    });
    assert_eq!(unnamed_files(&dataset), left);
    dir.command(VACUUM).works();
    assert_only_named_files(&dataset);
    assert_eq!(snapshot_numbers(&dataset), [newest()]);
    assert!(read_samples(&dataset) == new);
    assert_eq!(dir.command(VERIFY).json()["warnings"], serde_json::json!([]));
}

#[test]
fn a_killed_build_leaves_the_old_dataset_whole() {
    check_killed_anywhere(
        "onefold-ingest build new-logs/dataset.toml --out dataset --threads 2 --overwrite",
        &["onefold-ingest build new-logs/dataset.toml --out whole --threads 2"],
    );
}

#[test]
fn a_killed_append_leaves_the_old_dataset_whole() {
    check_killed_anywhere(
        "onefold-ingest append new-logs/dataset.toml --out dataset --threads 2",
        &[
            "onefold-ingest build logs/dataset.toml --out whole --threads 2",
            "onefold-ingest append new-logs/dataset.toml --out whole --threads 2",
        ],
    );
}

#[test]
fn a_killed_forget_leaves_the_old_dataset_whole() {
    check_killed_anywhere(
        "onefold-ingest forget dataset --users users.txt --threads 2",
        &[
            "onefold-ingest build logs/dataset.toml --out whole --threads 2",
            "onefold-ingest forget whole --users users.txt --threads 2",
        ],
    );
}

#[test]
fn a_killed_first_build_is_no_dataset_and_can_be_run_again() {
    let dir = with_logs();
    let dataset = dir.path("dataset");
    let begun = || dataset.exists();
    let writing = || !file_names(&dataset.join("data")).is_empty();
    for moment in [&begun as &dyn Fn() -> bool, &writing] {
        let killed = (0..20).any(|_| {
            // Files of an earlier round would be mistaken for those of this one.
            fs_err::remove_dir_all(&dataset).ok();
            kill_at(&dir, BUILD, moment);
            snapshot_numbers(&dataset).is_empty() && moment()
        });
        assert!(killed, "no build was killed in time");
        dir.command("onefold-read bench dataset").fails(&["`dataset` is not a dataset", "run it again"]);
    }
    assert!(!unnamed_files(&dataset).is_empty());
    let summary = dir.command(BUILD).json();
    assert_eq!((summary["samples"].as_u64(), summary["snapshot"].as_u64()), (Some(12_000), Some(1)));
    dir.command(VACUUM).works();
    assert_only_named_files(&dataset);
    assert_eq!(read_samples(&dataset).len(), 12_000);
    dir.command(VERIFY).works();
}

/// Files that a writer leaves behind if it is killed just before its commit. A name that ends with `#1` belongs to an
/// incomplete file.
const LEFTOVERS: [(&str, &str); 6] = [
    ("data/split=train/date=2024-05-01/hour=10/part-00000-00000000deadbeef.parquet", "a file"),
    ("data/split=train/date=2024-05-02/hour=00/part-00000-00000000deadbeef.parquet#1", "half of one"),
    ("data/part-00000-00000000deadbeef.parquet", "one where no partition is"),
    ("vocabularies/ids-00000000deadbeef.parquet", "a vocabulary"),
    ("manifests/00000000deadbeef.parquet", "a manifest"),
    ("snapshots/.00000002.json.00000000deadbeef.tmp", "{ \"format_version\": 6, \"data"),
];

/// Returns the hand-made dataset with [`LEFTOVERS`] in it.
fn with_leftovers() -> (Dir, Vec<Sample>) {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    for (name, content) in LEFTOVERS {
        dir.write(Path::new("dataset").join(name), content);
    }
    (dir, sorted(expected_samples()))
}

/// Checks that the files which no snapshot names are [`LEFTOVERS`].
#[track_caller]
fn assert_leftovers(dir: &Dir) {
    let expected = LEFTOVERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(unnamed_files(&dir.path("dataset")), expected);
}

#[test]
fn readers_ignore_what_a_crash_left() {
    let (dir, expected) = with_leftovers();
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);
    let bench = dir.command("onefold-read bench dataset --batch-size 5").json();
    assert_eq!(bench["samples"], 12);
    dir.command("onefold-train run logs/train.toml --data dataset --out run").works();
    let verified = dir.command(VERIFY).json();
    assert_eq!(verified["problems"], serde_json::json!([]));
    // It warns about complete files in the directories of data, vocabularies and manifests.
    let warnings = verified["warnings"].as_array().unwrap();
    let warned: Vec<_> = warnings.iter().map(|warning| warning.to_string()).collect();
    assert_eq!(warned.len(), 4, "{warned:?}");
    for (name, _) in [LEFTOVERS[0], LEFTOVERS[2], LEFTOVERS[3], LEFTOVERS[4]] {
        assert!(warned.iter().any(|warning| warning.contains(name)), "{name}: {warned:?}");
    }
}

#[test]
fn a_vacuum_clears_what_a_crash_left() {
    let (dir, expected) = with_leftovers();
    dir.command(BUILD).fails(&["`dataset` already exists", "`--overwrite`"]);
    dir.command(&format!("{BUILD} --overwrite")).works();
    // The files may belong to a running writer, so neither another writer nor a vacuum removes them.
    assert_leftovers(&dir);
    dir.command("onefold-ingest vacuum dataset").works();
    assert_leftovers(&dir);
    let dry = dir.command(&format!("{VACUUM} --dry-run")).json();
    let listed = dry["would_remove"].as_array().unwrap();
    let left = listed.iter().filter(|removal| removal["reason"] == "not_committed");
    let left: BTreeSet<String> = left.map(|removal| removal["path"].as_str().unwrap().to_owned()).collect();
    assert_eq!(left, LEFTOVERS.iter().map(|(name, _)| (*name).to_owned()).collect::<BTreeSet<_>>());
    assert_leftovers(&dir);
    let vacuumed = dir.command(VACUUM).json();
    for key in ["snapshots_kept", "snapshots_removed", "files_removed", "bytes_removed", "young_files_kept"] {
        assert_eq!(dry[key], vacuumed[key], "{key}");
    }
    assert_eq!(vacuumed["snapshots_removed"], serde_json::json!([1]));
    // The five data files and the manifest of the first snapshot are removed, too.
    assert_eq!(vacuumed["files_removed"].as_u64(), Some(6 + LEFTOVERS.len() as u64));
    assert_only_named_files(&dir.path("dataset"));
    assert!(!dir.path("dataset/data/split=train/date=2024-05-02").exists());
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);

    // The crash may also occur before the first commit.
    let (dir, expected) = with_leftovers();
    fs_err::remove_file(dir.path("dataset/snapshots/00000001.json")).unwrap();
    dir.command("onefold-ingest vacuum dataset --older-than 0s").fails(&["`dataset` is not a dataset"]);
    dir.command(BUILD).works();
    dir.command(VACUUM).works();
    assert_only_named_files(&dir.path("dataset"));
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);
}

#[test]
fn a_failed_writer_leaves_only_what_was_there() {
    let (dir, expected) = with_leftovers();
    let config = dir.text("logs/dataset.toml");
    dir.edit("logs/dataset.toml", "ON f.request = e.request", "ON f.request = -e.request");
    dir.command(&format!("{BUILD} --overwrite")).fails(&["no samples"]);
    dir.write("logs/dataset.toml", config);
    // The limit is below the size of any file.
    dir.command(&format!("{BUILD} --overwrite --layout rows"))
        .with_file_limit(2)
        .fails(&["cannot be written"]);
    assert_leftovers(&dir);
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);
}

/// Writes a partition of other samples with `commit`, starting before `meanwhile` and ending after it. Returns the
/// error, if there is one.
#[track_caller]
fn write_meanwhile(dataset: &Path, commit: Commit, meanwhile: impl FnOnce()) -> Option<String> {
    let (schema, rows) = session_rows(&[3, 5, 2]);
    let base = Snapshot::load(dataset).map_or(onefold_datasets::Order::Session, |snapshot| snapshot.order);
    let options = WriterOptions { commit, ..WriterOptions::new(base) };
    let mut writer = DatasetWriter::create(dataset, schema, options).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("part", PartitionType::Text)]).unwrap();
    writer.write(&PartitionKey::new(vec![("part".to_owned(), "a".to_owned())]), &rows).unwrap();
    meanwhile();
    writer.finish().err().map(|error| error.to_string())
}

#[test]
fn of_two_writers_of_the_same_samples_the_first_commits() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    let dataset = dir.path("dataset");
    let rebuild = format!("{BUILD} --overwrite");
    let error = write_meanwhile(&dataset, Commit::Overwrite, || {
        assert_eq!(dir.command("onefold-read bench dataset").json()["samples"], 12);
        assert_eq!(dir.command(&rebuild).json()["snapshot"], 2);
    });
    let error = error.expect("another writer was faster");
    for part in ["nothing was committed", "another writer", "(snapshot 2)", "hint: run this again"] {
        assert!(error.contains(part), "{error}");
    }
    assert_only_named_files(&dataset);
    assert_eq!(sorted(read_samples(&dataset)), sorted(expected_samples()));
    assert_eq!(dir.command(&rebuild).json()["snapshot"], 3);

    // If two first builds run at the same time, one succeeds and the other one reports it.
    let first = "onefold-ingest build logs/dataset.toml --out first --threads 1";
    let error = write_meanwhile(&dir.path("first"), Commit::Create, || drop(dir.command(first).works()));
    assert!(error.is_some_and(|error| error.contains("created the dataset meanwhile (snapshot 1)")));
    assert_only_named_files(&dir.path("first"));
    assert_eq!(sorted(read_samples(&dir.path("first"))), sorted(expected_samples()));
    // A writer that gives up leaves no files at a location without a dataset.
    let (schema, rows) = session_rows(&[3]);
    let mut writer = DatasetWriter::create(
        &dir.path("none"),
        schema,
        WriterOptions::new(onefold_datasets::Order::Session),
    )
    .unwrap();
    writer.write(&PartitionKey::default(), &rows).unwrap();
    drop(writer);
    assert!(!dir.path("none").exists());
}

/// Writers start and end continually, also at the same time. No commit is lost, and no two commits get the same
/// number.
#[test]
fn writers_at_once_never_lose_a_commit() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    // Returns the number of the snapshot that it committed.
    let rebuild = || {
        let output = dir.command(&format!("{BUILD} --overwrite --json")).output();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            assert!(stderr.contains("nothing was committed, because another writer"), "{stderr}");
            assert!(stderr.contains("hint: run this again"), "{stderr}");
            return None;
        }
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["changed"], true);
        summary["snapshot"].as_u64()
    };
    let mut commits: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> =
            (0..3).map(|_| scope.spawn(|| (0..6).filter_map(|_| rebuild()).collect::<Vec<_>>())).collect();
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    commits.sort_unstable();
    let newest = Snapshot::load(&dir.path("dataset")).unwrap().snapshot;
    assert_eq!(commits, (2..=newest).collect::<Vec<_>>(), "two writers committed the same snapshot");
    assert!(newest > 2, "only one writer ever committed");
    assert_eq!(snapshot_numbers(&dir.path("dataset")), (1..=newest).collect::<Vec<_>>());
    assert_only_named_files(&dir.path("dataset"));
    let expected = sorted(expected_samples());
    for number in 1..=newest {
        assert_eq!(sorted(read_samples_at(&dir.path("dataset"), number)), expected);
    }
    dir.command(VERIFY).works();
}
