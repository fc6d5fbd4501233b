//! Writes that the system refuses, as on a full disk, cause an error that says what to do, and the old dataset
//! remains intact.
//!
//! These tests limit the size of files instead of filling a disk; `datasets/src/writer` tests each file with
//! `/dev/full`.

use onefold_tests::Dir;

use crate::samples::{assert_only_named_files, read_samples, sorted};

const BUILD: &str = "onefold-ingest build logs/dataset.toml --out dataset --threads 2";

fn with_logs() -> Dir {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm3 --samples 3000 --seed 1 --out logs").works();
    dir
}

#[test]
fn a_build_that_does_not_fit_leaves_the_old_dataset() {
    let dir = with_logs();
    // The output does not exist, before or after the command.
    dir.command(BUILD).with_file_limit(64).fails(&[
        "`dataset/data/date=",
        "cannot be written",
        "`ulimit -f`",
    ]);
    assert!(!dir.path("dataset").exists());
    let build = dir.command(BUILD).json();
    let bytes = build["bytes_on_disk"].as_u64().unwrap();
    let before = sorted(read_samples(&dir.path("dataset")));
    let rebuild = format!("{BUILD} --overwrite --layout folded");
    dir.command(&rebuild).with_file_limit(4).fails(&[
        "`dataset/data/date=",
        ".parquet` cannot be written",
        "is untouched",
    ]);
    dir.command(&rebuild).with_file_limit(100).fails(&["/part-00000-", ".parquet` cannot be written"]);
    assert!(sorted(read_samples(&dir.path("dataset"))) == before);
    // With enough space, the build succeeds.
    dir.command(&rebuild).with_file_limit(bytes / 1024 + 64).works();
    assert!(sorted(read_samples(&dir.path("dataset"))) == before);
    assert_only_named_files(&dir.path("dataset"));
}
