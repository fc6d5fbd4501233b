//! A build that is killed at any moment leaves the old dataset whole, and can be run again.

use std::path::Path;
use std::time::{Duration, Instant};

use onefold_datasets::{DatasetWriter, Manifest};
use onefold_tests::Dir;

use crate::logs::{expected_samples, write_logs};
use crate::samples::{Sample, read_samples, sorted};

const BUILD: &str = "onefold-ingest build logs/dataset.toml --out dataset --threads 2";
/// Held while a dataset is written.
const LOCK_FILE: &str = ".onefold-writing";

/// A folder with a generated log in `logs`, and one of other samples in `new-logs`.
fn with_logs() -> Dir {
    let dir = Dir::new();
    for (seed, name) in [(1, "logs"), (2, "new-logs")] {
        dir.command(&format!(
            "onefold-data generate --workload rm3 --samples 12000 --seed {seed} --out {name}"
        ))
        .works();
    }
    dir
}

/// The files of a dataset: the manifest and what it names. Anything else is a stray.
#[track_caller]
fn assert_no_strays(dir: &Dir, dataset: &str) {
    let manifest = Manifest::load(&dir.path(dataset)).unwrap();
    let mut expected: Vec<_> = manifest.file_paths().collect();
    expected.push("manifest.json".into());
    expected.sort();
    let found: Vec<_> = onefold_tests::files_below(&dir.path(dataset)).into_keys().collect();
    assert_eq!(found, expected);
}

/// Starts a build and kills it as soon as `moment` has come.
fn kill_at(dir: &Dir, build: &str, moment: impl Fn() -> bool) {
    let mut child = dir.command(build).spawn();
    let started = Instant::now();
    while !moment() && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing happened within a minute");
        std::thread::sleep(Duration::from_micros(200));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Whether a data file of this generation is in the dataset.
fn has_part(dataset: &Path, generation: u64) -> bool {
    let suffix = format!("-g{generation}.parquet");
    file_names(dataset).iter().any(|name| name.ends_with(&suffix))
}

/// The names of all files below a folder that may change while it is read.
fn file_names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs_err::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.path()).flat_map(|path| match path.is_dir() {
        true => file_names(&path),
        false => vec![path.to_string_lossy().into_owned()],
    });
    names.collect()
}

/// Kills `write`, which makes the dataset of the commands `whole` of the one that [`BUILD`] makes, at moments all over its
/// run: the old dataset stays whole, and when it is run again it does what it does at once.
fn check_killed_anywhere(write: &str, whole: &[&str]) {
    let dir = with_logs();
    let started = Instant::now();
    dir.command(BUILD).works();
    let duration = started.elapsed();
    let dataset = dir.path("dataset");
    let statistics = Manifest::load(&dataset).unwrap().statistics;
    let old = read_samples(&dataset);
    let is_old = || Manifest::load(&dataset).unwrap().statistics == statistics;
    let killed_at = |moment: &dyn Fn() -> bool| {
        kill_at(&dir, write, moment);
        let killed = is_old();
        if !killed {
            // It was faster; the old dataset is put back.
            dir.command(&format!("{BUILD} --overwrite")).works();
        }
        assert!(read_samples(&dataset) == old, "the old dataset has other samples");
        killed
    };
    let killed = (0..10_u32).filter(|tenth| {
        let started = Instant::now();
        killed_at(&|| started.elapsed() >= duration * *tenth / 10)
    });
    assert!(killed.count() >= 2, "hardly a run was killed in time");
    let half_written = || {
        let next = Manifest::load(&dataset).unwrap().generation + 1;
        killed_at(&|| has_part(&dataset, next)) && has_part(&dataset, next)
    };
    assert!((0..20).any(|_| half_written()), "no run was killed while it wrote");

    dir.command(write).works();
    assert_no_strays(&dir, "dataset");
    whole.iter().for_each(|command| drop(dir.command(command).works()));
    assert!(read_samples(&dataset) == read_samples(&dir.path("whole")), "the rerun gives other samples");
    assert!(read_samples(&dataset) != old);
    dir.command("onefold-ingest verify dataset").works();
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
fn a_killed_first_build_is_no_dataset_and_can_be_run_again() {
    let dir = with_logs();
    let dataset = dir.path("dataset");
    let locked = || dataset.join(LOCK_FILE).exists();
    let writing = || has_part(&dataset, 1);
    for moment in [&locked as &dyn Fn() -> bool, &writing] {
        let killed = (0..20).any(|_| {
            kill_at(&dir, BUILD, moment);
            let committed = dataset.join("manifest.json").exists();
            if committed {
                fs_err::remove_dir_all(&dataset).unwrap();
            }
            !committed && moment()
        });
        assert!(killed, "no build was killed in time");
        dir.command("onefold-read bench dataset").fails(&["`dataset` is not a dataset", "run it again"]);
    }
    let summary = dir.command(BUILD).json();
    assert_eq!(summary["samples"], 12_000);
    assert_no_strays(&dir, "dataset");
    assert_eq!(read_samples(&dataset).len(), 12_000);
}

/// The hand-made dataset with what a crash just before the commit of its second generation leaves behind.
fn with_leftovers() -> (Dir, Vec<Sample>) {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    dir.write("dataset/split=train/date=2024-05-01/hour=10/part-00000-g2.parquet", "half a file");
    dir.write("dataset/split=train/date=2024-05-02/hour=00/part-00000-g2.parquet", "another");
    dir.write("dataset/part-00000-g2.parquet", "one where no partition is");
    dir.write("dataset/.manifest.json.tmp", "{ \"format_version\": 1, \"gener");
    dir.write(Path::new("dataset").join(LOCK_FILE), "");
    (dir, sorted(expected_samples()))
}

#[test]
fn readers_ignore_what_a_crash_left() {
    let (dir, expected) = with_leftovers();
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);
    let bench = dir.command("onefold-read bench dataset --batch-size 5").json();
    assert_eq!(bench["samples"], 12);
    dir.command("onefold-train run logs/train.toml --data dataset --out run").works();
}

#[test]
fn the_next_writer_clears_what_a_crash_left() {
    let (dir, expected) = with_leftovers();
    dir.command(BUILD).fails(&["`dataset` already exists", "`--overwrite`"]);
    dir.command(&format!("{BUILD} --overwrite")).works();
    assert_no_strays(&dir, "dataset");
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);

    // The same where the crash came before the first commit.
    let (dir, expected) = with_leftovers();
    fs_err::remove_file(dir.path("dataset/manifest.json")).unwrap();
    dir.command(BUILD).works();
    assert_no_strays(&dir, "dataset");
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);
}

#[test]
fn a_failed_writer_clears_what_a_crash_left_and_keeps_the_dataset() {
    let (dir, expected) = with_leftovers();
    dir.edit("logs/dataset.toml", "ON f.request = e.request", "ON f.request = -e.request");
    let failed = dir.command(&format!("{BUILD} --overwrite")).output();
    assert_eq!(failed.status.code(), Some(1));
    fs_err::remove_file(dir.path("dataset/.manifest.json.tmp")).unwrap();
    assert_no_strays(&dir, "dataset");
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), expected);
}

#[test]
fn only_one_writer_at_a_time() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    let dataset = dir.path("dataset");
    let manifest = Manifest::load(&dataset).unwrap();
    let options = onefold_datasets::WriterOptions {
        commit: onefold_datasets::Commit::Overwrite,
        ..onefold_datasets::WriterOptions::new(manifest.order)
    };
    let writer = DatasetWriter::create(&dataset, manifest.schema.clone(), options.clone()).unwrap();
    let rebuild = format!("{BUILD} --overwrite");
    dir.command(&rebuild).fails(&["`dataset` is being written by another process", "wait for it to end"]);
    assert_eq!(dir.command("onefold-read bench dataset").json()["samples"], 12);
    drop(writer);
    assert_no_strays(&dir, "dataset");
    dir.command(&rebuild).works();

    // Two first builds at once: one wins, the other says so.
    let first = "onefold-ingest build logs/dataset.toml --out first --threads 1";
    let writer = DatasetWriter::create(&dir.path("first"), manifest.schema, options).unwrap();
    dir.command(first).fails(&["`first` is being written by another process", "wait for it to end"]);
    drop(writer);
    assert!(!dir.path("first").exists());
    dir.command(first).works();
}

/// Writers that start and end all the time: a commit is never lost, nor two made of one generation.
#[test]
fn writers_in_turn_never_lose_a_commit() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    let rebuild = || {
        let output = dir.command(&format!("{BUILD} --overwrite")).output();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() || stderr.contains("is being written by another process"),
            "{stderr}"
        );
        u64::from(output.status.success())
    };
    let commits: u64 = std::thread::scope(|scope| {
        let writers: Vec<_> =
            (0..3).map(|_| scope.spawn(|| (0..8).map(|_| rebuild()).sum::<u64>())).collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).sum()
    });
    let manifest = Manifest::load(&dir.path("dataset")).unwrap();
    assert_eq!(manifest.generation, 1 + commits, "two writers committed the same generation");
    assert_no_strays(&dir, "dataset");
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), sorted(expected_samples()));
}
