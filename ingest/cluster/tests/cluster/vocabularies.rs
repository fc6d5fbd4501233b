//! Vocabularies and groups, which a build derives from all samples before it writes them.

use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use onefold_datasets::Snapshot;
use onefold_tests::Dir;
use serde_json::Value;

use crate::fleet::{Fleet, contents};

/// The number of files that the logs are divided into, so that several tasks have samples of the same sessions.
const FILES: usize = 6;

/// Writes the logs of a workload into several files.
pub(crate) fn logs(workload: &str) -> Dir {
    Dir::made_once(workload, |dir| write_logs(dir, workload))
}

fn write_logs(dir: &Dir, workload: &str) {
    dir.command(&format!("onefold-data generate --workload {workload} --samples 1500 --seed 3 --out logs"))
        .works();
    let whole = dir.path("logs/features/part-00000.parquet");
    let reader = ParquetRecordBatchReaderBuilder::try_new(fs_err::File::open(&whole).unwrap().into_file());
    let reader = reader.unwrap().with_batch_size(usize::MAX >> 32).build().unwrap();
    let batches: Vec<_> = reader.map(Result::unwrap).collect();
    let rows: usize = batches.iter().map(|batch| batch.num_rows()).sum();
    let rows_of_file = rows.div_ceil(FILES);
    let all = datafusion::arrow::compute::concat_batches(&batches[0].schema(), &batches).unwrap();
    for (number, start) in (0..rows).step_by(rows_of_file).enumerate() {
        let file = fs_err::File::create(dir.path(format!("logs/features/part-{number:05}.parquet"))).unwrap();
        let mut writer = ArrowWriter::try_new(file.into_file(), all.schema(), None).unwrap();
        writer.write(&all.slice(start, rows_of_file.min(rows - start))).unwrap();
        writer.close().unwrap();
    }
}

/// Adds vocabularies: one of two features, one without rare ids, one of texts, and one without ids.
fn logs_with_vocabularies() -> Dir {
    let dir = logs("rm1");
    let sparse = |feature: &str, vocabulary: &str| {
        let (before, after) = (format!("{feature} = {{ "), format!("{feature} = {{ {vocabulary}, "));
        dir.edit("logs/dataset.toml", &before, &after);
    };
    sparse("item_00", "vocabulary = \"items\"");
    sparse("sequence_00", "vocabulary = \"items\"");
    sparse("user_00", "vocabulary = \"frequency\", min_count = 20");
    sparse("item_01", "vocabulary = \"frequency\", min_count = 1000000");
    let select = "SELECT f.*, CAST(f.item_02 AS VARCHAR[]) AS words, CAST(f.user_01 AS VARCHAR[]) AS texts,";
    dir.edit("logs/dataset.toml", "SELECT f.*,", select);
    let words = "[features]\nwords = { kind = \"sparse\", vocabulary = \"words\" }\n\
                 texts = { kind = \"sparse\", vocabulary = \"words\" }\n";
    dir.edit("logs/dataset.toml", "[features]\n", words);
    let config = dir.text("logs/dataset.toml");
    let vocabularies = "[vocabularies.items]\norder = \"frequency\"\n[vocabularies.words]\nmin_count = 2\n";
    dir.write("logs/dataset.toml", format!("{config}\n{vocabularies}"));
    dir
}

/// Checks that two datasets have the same data files, vocabularies, digests and columns.
#[track_caller]
pub(crate) fn are_equal(dir: &Dir, here: &str, there: &str) {
    let [a, b] = [here, there].map(|dataset| Snapshot::load(&dir.path(dataset)).unwrap());
    assert_eq!(contents(&dir.path(there)), contents(&dir.path(here)));
    assert_eq!(b.schema, a.schema);
    let digests = |snapshot: &Snapshot| -> Vec<_> {
        snapshot.partitions.iter().map(|partition| (partition.key.clone(), partition.digest)).collect()
    };
    assert_eq!(digests(&b), digests(&a));
    let vocabularies = |snapshot: &Snapshot| -> Vec<_> {
        let files = snapshot.vocabularies.iter();
        files.map(|(name, file)| (name.clone(), file.entries, file.sha256.clone())).collect()
    };
    assert_eq!(vocabularies(&b), vocabularies(&a));
    assert!(!dir.path(format!("{there}/work")).exists(), "rows are left in the work folder");
    dir.command(&format!("onefold-ingest verify {there}")).works();
}

#[test]
fn vocabularies_are_those_of_one_process() {
    let dir = logs_with_vocabularies();
    let build = "build logs/dataset.toml --buckets 5 --out";
    let here = dir.command(&format!("onefold-ingest {build} here --threads 2")).json();
    let fleet = Fleet::new(&dir, 2);
    let there = fleet.command(&format!("{build} there")).json();
    let entries = |name: &str| there["vocabularies"][name].as_u64().unwrap();
    assert_eq!(there["vocabularies"], here["vocabularies"]);
    assert_eq!(entries("item_01"), 0);
    assert!(entries("items") > 1000 && entries("words") > 500 && entries("user_00") > 100, "{there}");
    are_equal(&dir, "here", "there");
    // Files that a failed build left behind do not hinder the next one, and a vacuum removes them.
    dir.write("again/work/records-0123456789abcdef.parquet", "half a file");
    fleet.command(&format!("{build} again")).json();
    dir.command("onefold-ingest vacuum again --older-than 0s").works();
    are_equal(&dir, "here", "again");
}

/// Runs two appends with the command that `run` runs. The second one has other samples and ids.
fn appended(dir: &Dir, run: &dyn Fn(&str) -> Value) -> Vec<Value> {
    let on = "ON e.request_id = f.request_id";
    let parts = ["WHERE f.session_id % 3 = 0", "WHERE f.session_id % 3 > 0"];
    let append = |part: &&str| {
        dir.edit("logs/dataset.toml", on, &format!("{on}\n{part}"));
        let summary = run("append logs/dataset.toml --out");
        dir.edit("logs/dataset.toml", &format!("{on}\n{part}"), on);
        summary
    };
    parts.iter().map(append).collect()
}

#[test]
fn vocabularies_are_extended_by_appends() {
    let dir = logs_with_vocabularies();
    dir.edit("logs/dataset.toml", "format_version = 1\n", "format_version = 1\n\n[dataset]\nbuckets = 5\n");
    dir.edit("logs/dataset.toml", "[partition]\n", "[partition]\ncolumns = [\"split\"]\n");
    let split = "SELECT CASE WHEN f.session_id % 3 = 0 THEN 'a' ELSE 'b' END AS split, f.*,";
    dir.edit("logs/dataset.toml", "SELECT f.*,", split);
    let fleet = Fleet::new(&dir, 2);
    let here = appended(&dir, &|append| dir.command(&format!("onefold-ingest {append} here")).json());
    let there = appended(&dir, &|append| fleet.command(&format!("{append} there")).json());
    for (here, there) in here.iter().zip(&there) {
        assert_eq!(there["vocabularies"], here["vocabularies"]);
        assert_eq!(there["changed"], true);
    }
    for name in ["items", "words", "user_00"] {
        let entries = |summary: &Value| summary["vocabularies"][name].as_u64().unwrap();
        assert!(entries(&there[1]) > entries(&there[0]) && entries(&there[0]) > 0, "{name}");
    }
    are_equal(&dir, "here", "there");
    // The samples exist already, but ids of the first part that were rare before now have numbers.
    let changed = |summaries: Vec<Value>| -> Vec<Value> {
        summaries.into_iter().map(|summary| summary["changed"].clone()).collect()
    };
    let here =
        changed(appended(&dir, &|append| dir.command(&format!("onefold-ingest {append} here")).json()));
    let there = changed(appended(&dir, &|append| fleet.command(&format!("{append} there")).json()));
    assert_eq!((&there, &there[1]), (&here, &false.into()));
    are_equal(&dir, "here", "there");
}

#[test]
fn groups_are_found_and_kept() {
    for workload in ["rm1", "rm3"] {
        let dir = logs(workload);
        let build = "build logs/dataset.toml --buckets 5 --groups auto --out";
        let here = dir.command(&format!("onefold-ingest {build} here --threads 2")).json();
        let fleet = Fleet::new(&dir, 2);
        let there = fleet.command(&format!("{build} there")).json();
        let groups = |summary: &Value| -> Vec<Value> {
            let groups = summary["groups"].as_array().unwrap().iter();
            groups.map(|group| serde_json::json!([group["name"], group["features"]])).collect()
        };
        assert!(groups(&there).len() > 1, "{there}");
        assert_eq!(groups(&there), groups(&here));
        are_equal(&dir, "here", "there");
        let again = fleet.command("append logs/dataset.toml --groups auto --out there").json();
        assert_eq!((&again["changed"], &again["snapshot"]), (&false.into(), &1.into()));
    }
}

#[test]
fn no_samples_are_an_error_that_leaves_nothing() {
    let dir = logs_with_vocabularies();
    let on = "ON e.request_id = f.request_id";
    dir.edit("logs/dataset.toml", on, &format!("{on}\nWHERE f.session_id < 0"));
    let fleet = Fleet::new(&dir, 1);
    fleet.command("build logs/dataset.toml --out there").fails(&["`WHERE`"]);
    assert!(!dir.path("there").exists());
}
