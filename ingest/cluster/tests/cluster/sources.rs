//! Logs that are not Parquet files, and logs with numbered rows.

use std::fmt::Write as _;

use onefold_tests::Dir;

use crate::fleet::Fleet;
use crate::vocabularies::{are_equal, logs};

const CONFIG: &str = r#"format_version = 1
[sources]
log = { path = "log/*.csv", ragged = "skip" }
events = { path = "events.csv", ragged = "skip" }
others = { path = "events.csv", ragged = "skip" }

[samples]
source = "log"
key = ["request"]

[join]
source = "events"
on = { request = "of" }
time = { column = "at", unit = "s" }
window = "1h"
key = ["of"]
[join.labels]
clicked = { when = "is_click = 1" }

[session]
key = ["user"]
time = { column = "time", unit = "s" }

[dataset]
buckets = 3

[features]
clicked = { kind = "label" }
item = { kind = "sparse" }
"#;

/// The beginning of a configuration that keeps the columns with the position of a row.
const KEEP: &str = "format_version = 1\nkeep = [\"n\", \"f\", \"k\"]\n";

/// Returns rows of a CSV file. After every `ragged`th row follows a row with one value too many.
fn csv(header: &str, rows: impl Iterator<Item = String>, ragged: usize) -> String {
    let mut text = format!("{header}\n");
    for (number, row) in rows.enumerate() {
        writeln!(text, "{row}").unwrap();
        if number % ragged == 0 {
            writeln!(text, "{row},1").unwrap();
        }
    }
    text
}

/// Writes three log files, each with 10 rows that have one value too many, and a file of events with 4 such rows.
fn write_text(dir: &Dir) {
    let second = |request: usize| 1_714_521_600 + request;
    let row = |request: usize| format!("{request},{},{},{}", request % 17, second(request), request % 29);
    for file in 0..3 {
        let rows = (file * 400..(file + 1) * 400).map(row);
        dir.write(format!("log/{file}.csv"), csv("request,user,time,item", rows, 40 + file));
    }
    let events = (0..1200).step_by(3).map(|of| format!("{of},{},{}", second(of + 1), of % 2));
    dir.write("events.csv", csv("of,at,is_click", events, 100));
}

#[test]
fn rows_that_are_left_out_are_counted_once() {
    let dir = Dir::new();
    write_text(&dir);
    dir.write("dataset.toml", CONFIG);
    let here = dir.command("onefold-ingest build dataset.toml --out here --threads 2").json();
    // 10 rows of each log file, and 4 events. No query reads `others`.
    assert_eq!(here["ragged_rows_skipped"], 34);
    let fleet = Fleet::new(&dir, 2);
    let there = fleet.command("build dataset.toml --out there").json();
    assert_eq!((&there["ragged_rows_skipped"], &there["samples"]), (&34.into(), &1200.into()));
    are_equal(&dir, "here", "there");
    // Other sources still fail, with an error that names the file and the line.
    dir.edit("dataset.toml", "events.csv\", ragged = \"skip\" }\nothers", "events.csv\" }\nothers");
    fleet.command("build dataset.toml --out refused").fails(&["events.csv", "line 3"]);
}

#[test]
fn rows_have_the_numbers_that_they_have_in_one_process() {
    let dir = logs("rm1");
    dir.edit("logs/dataset.toml", "format_version = 1\n", KEEP);
    let numbered = "row_number = \"n\", file_name = \"f\", file_number = \"k\"";
    let source = format!("features = {{ path = \"features/*.parquet\", {numbered} }}");
    dir.edit("logs/dataset.toml", "features = \"features/*.parquet\"", &source);
    dir.command("onefold-ingest build logs/dataset.toml --buckets 3 --out here --threads 2").works();
    let fleet = Fleet::new(&dir, 2);
    fleet.command("build logs/dataset.toml --buckets 3 --out there").works();
    are_equal(&dir, "here", "there");
    // Rows of text files are numbered where they are read.
    let dir = Dir::new();
    write_text(&dir);
    dir.write("dataset.toml", CONFIG);
    dir.edit("dataset.toml", "format_version = 1\n", KEEP);
    dir.edit("dataset.toml", "\"log/*.csv\"", &format!("\"log/*.csv\", {numbered}"));
    dir.command("onefold-ingest build dataset.toml --out here --threads 2").works();
    Fleet::new(&dir, 2).command("build dataset.toml --out there").works();
    are_equal(&dir, "here", "there");
}
