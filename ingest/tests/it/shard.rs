//! Logs in segments, from the command line to the dataset.

use std::process::Command;

use serde_json::Value;

use crate::logs::{Dir, ROWS, SELECT, columns, expected, parquet, rows};

/// The log in two files, in the folder `log`.
fn two_files() -> Dir {
    let dir = Dir::new();
    for (part, rows) in rows().chunks(25).enumerate() {
        dir.write(format!("log/part-{part}.parquet"), parquet(columns(rows)));
    }
    dir
}

/// `onefold-ingest shard log --by COLUMN --segments 3 --out segments --json`.
fn program(dir: &Dir, by: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    command.args(["shard", "log", "--by", by, "--segments", "3", "--out", "segments", "--json"]);
    command.current_dir(dir.path("")).env_remove("ONEFOLD_LOG").env("RUST_BACKTRACE", "0");
    command
}

#[test]
fn a_dataset_made_of_segments_is_the_one_made_of_the_log() {
    let dir = two_files();
    let (summary, files): (Value, _) = dir.works(program(&dir, "user"), "segments");
    assert_eq!((&summary["rows"], &summary["segments"], files.len()), (&ROWS.into(), &3.into(), 3));
    assert_eq!((&summary["log_files"], &summary["null_key_rows"]), (&2.into(), &0.into()));
    let bytes: usize = files.values().map(Vec::len).sum();
    assert_eq!(summary["bytes_on_disk"], bytes);
    dir.configure("[sources]\nlog = \"segments\"", SELECT);
    assert!(dir.build("dataset").1 == expected(), "the samples are others");
}

#[test]
fn what_cannot_be_sharded_leaves_nothing() {
    let dir = two_files();
    dir.fails_as(
        program(&dir, "users"),
        &["log/part-0.parquet", "no column `users`", "did you mean `user`?"],
    );
    dir.fails_as(program(&dir, "age"), &["the column `age` is Float64", "a key is an integer or a text"]);
    dir.write("log/part-2.parquet", "half");
    dir.fails_as(program(&dir, "user"), &["log/part-2.parquet", "not a whole Parquet file"]);
    let entries = fs_err::read_dir(dir.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(entries.collect::<Vec<_>>(), ["log"]);
    fs_err::remove_file(dir.path("log/part-2.parquet")).unwrap();
    dir.write("segments/thesis.txt", "years of work");
    dir.fails_as(program(&dir, "user"), &["segments` already exists", "it holds no `_segments.json`"]);
    assert_eq!(fs_err::read(dir.path("segments/thesis.txt")).unwrap(), b"years of work");
}
