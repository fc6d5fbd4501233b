//! Bad input causes one error that names the place and the remedy, exit status 1, and no change of any file.
//!
//! [`TestCommand::fails`](onefold_tests::TestCommand::fails) checks all of this except for the words.

use onefold_tests::Dir;

use crate::logs::write_logs;

mod build;
mod locations;
mod read;
mod train;

const BUILD: &str = "onefold-ingest build logs/dataset.toml --out dataset --threads 2";
const READ: &str = "onefold-read bench dataset --batch-size 4 --threads 2";
const TRAIN: &str = "onefold-train run logs/train.toml --data dataset --out run --threads 2";
const EVAL: &str = "onefold-train eval run --data dataset --threads 2";

/// Returns a directory with the hand-made log in `logs` and its dataset in `dataset`.
fn with_dataset() -> Dir {
    Dir::made_once("", |dir| {
        write_logs(dir);
        dir.command(BUILD).works();
    })
}

/// Returns a directory like [`with_dataset`], with a trained model in `run`.
fn with_run() -> Dir {
    Dir::made_once("", |dir| {
        write_logs(dir);
        dir.command(BUILD).works();
        dir.command(TRAIN).works();
    })
}

/// Returns `text` with the first `from` replaced. `text` must contain it.
#[track_caller]
fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "no `{from}` in:\n{text}");
    text.replacen(from, to, 1)
}
