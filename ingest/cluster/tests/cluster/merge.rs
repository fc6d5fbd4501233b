//! Merges late samples into datasets that already have samples.

use onefold_tests::Dir;
use serde_json::Value;

use crate::fleet::Fleet;
use crate::timelines::{logs_with_timelines, logs_with_vocabularies};
use crate::vocabularies::are_equal;

const ON: &str = "ON e.request_id = f.request_id";

/// Sets five buckets in the configuration of logs.
fn with_buckets(dir: Dir) -> Dir {
    dir.edit("logs/dataset.toml", "format_version = 1\n", "format_version = 1\n\n[dataset]\nbuckets = 5\n");
    dir
}

/// Appends most samples with the command that `run` runs, then merges all samples, and merges them again.
fn merged(dir: &Dir, run: &dyn Fn(&str) -> Value) -> [Value; 2] {
    let most = format!("{ON}\nWHERE f.request_id % 50 <> 7 AND f.session_id % 9 <> 0");
    dir.edit("logs/dataset.toml", ON, &most);
    run("append logs/dataset.toml");
    dir.edit("logs/dataset.toml", &most, ON);
    [(); 2].map(|()| run("append logs/dataset.toml --merge"))
}

/// Merges in one process and on a cluster, and compares the summaries and the datasets.
fn merges_the_same(dir: &Dir) {
    let here = merged(dir, &|append| dir.command(&format!("onefold-ingest {append} --out here")).json());
    let fleet = Fleet::new(dir, 2);
    let there = merged(dir, &|append| fleet.command(&format!("{append} --out there")).json());
    for (here, there) in here.iter().zip(&there) {
        for what in
            ["samples", "samples_added", "samples_skipped", "ranges_rewritten", "changed", "vocabularies"]
        {
            assert_eq!(there[what], here[what], "{what}");
        }
    }
    let count = |summary: &Value, what: &str| summary[what].as_u64().unwrap();
    assert!(
        count(&there[0], "samples_added") > 100 && count(&there[0], "samples_skipped") > 1000,
        "{}",
        there[0]
    );
    assert!(count(&there[0], "ranges_rewritten") > 1);
    assert_eq!((count(&there[1], "samples_added"), &there[1]["changed"]), (0, &false.into()));
    are_equal(dir, "here", "there");
}

#[test]
fn samples_with_keys_are_added_once() {
    let dir = with_buckets(logs_with_vocabularies());
    dir.edit("logs/dataset.toml", "[samples]\n", "[samples]\nkey = [\"request_id\"]\n");
    merges_the_same(&dir);
}

#[test]
fn samples_without_keys_are_added_once() {
    let dir = with_buckets(logs_with_timelines());
    dir.edit("logs/dataset.toml", "item_00 = {", "item_00 = { vocabulary = \"frequency\",");
    dir.edit("logs/dataset.toml", "key = [\"session_id\"]\ntime", "user = \"user_id\"\ngap = \"2m\"\ntime");
    let split = "SELECT CASE WHEN f.user_id % 3 = 0 THEN 'a' ELSE 'b' END AS split, f.*,";
    dir.edit("logs/dataset.toml", "SELECT f.*,", split);
    dir.edit("logs/dataset.toml", "[partition]\n", "[partition]\ncolumns = [\"split\"]\n");
    merges_the_same(&dir);
}
