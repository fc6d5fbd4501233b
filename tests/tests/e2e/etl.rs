//! The functions of the batch ETL besides a single build: appending, verifying, vocabularies, automatic groups and
//! reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::{AsArray, Float64Array};
use arrow::datatypes::Int64Type;
use onefold_datasets::{Partition, Snapshot, Vocabulary};
use onefold_tests::Dir;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::logs::{REQUESTS, feature_columns, with_column, write_logs, write_table};
use crate::samples::{Sample, assert_only_named_files, read_samples, sorted};

const BUILD: &str = "onefold-ingest build logs/dataset.toml --threads 2 --out";
const APPEND: &str = "onefold-ingest append logs/dataset.toml --threads 2 --out";

/// Returns a directory with the hand-made log.
fn with_logs() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir
}

fn samples(dir: &Dir, dataset: &str) -> Vec<Sample> {
    sorted(read_samples(&dir.path(dataset)))
}

fn partitions(dir: &Dir, dataset: &str) -> Vec<Partition> {
    crate::samples::partitions(&dir.path(dataset))
}

#[test]
fn partitions_appended_one_by_one_are_the_dataset_built_at_once() {
    let dir = with_logs();
    dir.command(&format!("{BUILD} whole")).works();
    let holdout = format!("{APPEND} parts --partition split=holdout");
    let first = dir.command(&holdout).json();
    assert_eq!((first["samples_written"].as_u64(), first["samples"].as_u64()), (Some(3), Some(3)));
    assert!(first["samples_of_other_partitions"].as_u64() > Some(5), "{first}");
    let second = dir.command(&format!("{APPEND} parts --partition split=train")).json();
    assert_eq!(second["samples"], dir.command("onefold-ingest verify whole").json()["samples"]);
    assert_eq!(partitions(&dir, "parts"), partitions(&dir, "whole"));
    assert_eq!(samples(&dir, "parts"), samples(&dir, "whole"));
    assert_eq!((first["snapshot"].as_u64(), second["snapshot"].as_u64()), (Some(1), Some(2)));
    // Another run changes nothing.
    let before = dir.files();
    let again = dir.command(&holdout).json();
    assert_eq!((again["changed"].as_bool(), again["snapshot"].as_u64()), (Some(false), Some(2)));
    assert!(dir.files() == before, "something has changed");
    assert_only_named_files(&dir.path("parts"));
    dir.command("onefold-ingest verify parts").works();
}

/// Grouping all samples by `session_id` gives the sessions, even if the partitions depend on other columns.
#[test]
fn a_session_id_is_unique_in_the_dataset() {
    let dir = with_logs();
    for order in ["session", "session-hash", "arrival"] {
        dir.command(&format!("{BUILD} dataset --overwrite --order {order}")).works();
        let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
        assert!(snapshot.partitions.len() > 1);
        let mut sessions = BTreeMap::<i64, BTreeSet<&str>>::new();
        for partition in &snapshot.partitions {
            for file in &partition.files {
                let bytes = fs_err::File::open(dir.path("dataset").join(file.path())).unwrap();
                for rows in
                    ParquetRecordBatchReaderBuilder::try_new(bytes.into_file()).unwrap().build().unwrap()
                {
                    let rows = rows.unwrap();
                    let ids = rows.column_by_name("session_id").unwrap().as_primitive::<Int64Type>();
                    for id in ids.values() {
                        sessions.entry(*id).or_default().insert(file.path());
                    }
                }
            }
        }
        assert!(sessions.values().all(|files| files.len() == 1), "{order}: {sessions:?}");
        assert_eq!(sessions.len() as u64, snapshot.statistics.sessions, "{order}");
    }
}

#[test]
fn an_append_keeps_layout_order_and_buckets() {
    let dir = with_logs();
    let build = format!("{BUILD} dataset --layout rows --order session-hash --buckets 3");
    dir.command(&format!("{build} --partition split=train")).works();
    let appended = dir.command(&format!("{APPEND} dataset --partition split!=train")).json();
    assert_eq!(
        (&appended["layout"], &appended["order"], &appended["buckets"]),
        (&"rows".into(), &"session_hash".into(), &66.into())
    );
    dir.command("onefold-ingest verify dataset").works();
    // There are three ranges of 22 buckets. A new dataset gets the defaults.
    let created = dir.command(&format!("{APPEND} other")).json();
    assert_eq!((&created["layout"], &created["order"]), (&"folded".into(), &"session".into()));
}

#[test]
fn what_does_not_fit_a_dataset_is_not_appended() {
    let dir = with_logs();
    dir.command(&format!("{BUILD} dataset")).works();
    dir.command(&format!("{APPEND} dataset --layout rows")).fails(&["`dataset` has another layout"]);
    dir.command(&format!("{APPEND} dataset --order session-hash")).fails(&["`dataset` has another order"]);
    dir.edit("logs/dataset.toml", "gap = \"30m\"", "gap = \"31m\"");
    dir.command(&format!("{APPEND} dataset")).fails(&["`dataset` has another `[session]`"]);
    dir.edit("logs/dataset.toml", "gap = \"31m\"", "gap = \"30m\"");
    let before = dir.files();
    dir.command(&format!("{APPEND} dataset --partition split=nowhere"))
        .fails(&["no samples", "split=nowhere"]);
    dir.command(&format!("{APPEND} dataset --partition day=1"))
        .fails(&["there is no partition column `day`", "`split`, `date`, `hour`"]);
    dir.command(&format!("{APPEND} logs")).fails(&["`logs` already exists", "not a dataset"]);
    dir.command(&format!("{APPEND} dataset"))
        .with_file_limit(1)
        .fails(&["cannot be written", "is untouched"]);
    assert!(dir.files() == before, "something has changed");
    dir.edit("logs/dataset.toml", "age = { kind = \"dense\" }\n", "");
    dir.command(&format!("{APPEND} dataset")).fails(&["schema"]);
}

#[test]
fn verify_names_what_is_wrong() {
    let dir = with_logs();
    dir.command(&format!("{BUILD} dataset")).works();
    let sound = dir.command("onefold-ingest verify dataset").json();
    assert_eq!(sound["samples"].as_u64(), Some(12));
    let file = Snapshot::load(&dir.path("dataset")).unwrap().partitions[0].files[0].path().to_owned();
    let mut bytes = dir.read(format!("dataset/{file}"));
    bytes[100] ^= 1;
    dir.write(format!("dataset/{file}"), &bytes);
    // The problems are the result of the command; the existence of problems is its error.
    let output = dir.command("onefold-ingest verify dataset").output();
    let (found, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
    assert!(found.contains(&file) && found.contains("checksum"), "{found}");
    assert!(error.contains("`dataset` has a problem") && error.contains("hint: "), "{error}");
    dir.command("onefold-ingest verify logs").fails(&["`logs` is not a dataset"]);
}

#[test]
fn a_dataset_is_compared_with_its_sources() {
    let dir = with_logs();
    dir.command(&format!("{BUILD} dataset")).works();
    dir.command(&format!("{BUILD} arrival --layout rows --order arrival")).works();
    let against = |dataset: &str| format!("onefold-ingest verify {dataset} --against logs/dataset.toml");
    for dataset in ["dataset", "arrival"] {
        let same = dir.command(&against(dataset)).json();
        assert_eq!(same["against"]["samples"].as_u64(), Some(12));
        assert_eq!(same["against"]["problems"], serde_json::json!([]));
    }
    dir.command(&against("logs")).fails(&["`logs` is not a dataset"]);

    // One sample is missing, and an age in another partition is different.
    let late = &REQUESTS[5..];
    write_table(&dir.path("logs/features/part-1.parquet"), feature_columns(&late[1..]));
    let early = feature_columns(&REQUESTS[..5]);
    let ages =
        Float64Array::from_iter(REQUESTS[..5].iter().map(|row| row.age + f64::from(row.request == 10)));
    write_table(&dir.path("logs/features/part-0.parquet"), with_column(early, "age", Arc::new(ages)));
    let output = dir.command(&against("dataset")).output();
    let (found, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
    for part in
        ["the sources have 6 samples, the dataset has 7", "its 2 samples are not those of the sources"]
    {
        assert!(found.contains(part), "{found}");
    }
    assert!(found.contains("verified dataset: 12 samples"), "its files are sound: {found}");
    assert!(error.contains("`dataset` has 2 problems"), "{error}");
    let partition = format!("{} --partition split=train", against("dataset"));
    let output = dir.command(&partition).output();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("split=holdout"));

    dir.edit("logs/dataset.toml", "age = { kind = \"dense\" }\n", "");
    dir.command(&against("dataset")).fails(&["`[features]` and `keep` are not the columns of the dataset"]);
}

/// Returns the samples of a dataset, with the original ids of `features` from the vocabulary.
fn originals(dir: &Dir, dataset: &str, vocabulary: &str, features: &[&str]) -> Vec<Sample> {
    let snapshot = Snapshot::load(&dir.path(dataset)).unwrap();
    let ids = Vocabulary::load(&dir.path(dataset), &snapshot, vocabulary).unwrap();
    let mut samples = read_samples(&dir.path(dataset));
    for (name, list) in samples.iter_mut().flat_map(|sample| &mut sample.sparse) {
        if features.contains(&name.as_str()) {
            list.iter_mut().for_each(|id| *id = ids.original(*id).unwrap());
        }
    }
    sorted(samples)
}

#[test]
fn a_vocabulary_ranks_ids_by_frequency_and_can_be_undone() {
    let dir = with_logs();
    dir.command(&format!("{BUILD} plain")).works();
    let mut counts: BTreeMap<i64, u64> = BTreeMap::new();
    for (name, list) in samples(&dir, "plain").iter().flat_map(|sample| &sample.sparse) {
        let shares = matches!(name.as_str(), "history" | "city");
        list.iter().filter(|_| shares).for_each(|id| *counts.entry(*id).or_default() += 1);
    }
    let mut ranked: Vec<(i64, u64)> = counts.into_iter().collect();
    ranked.sort_by_key(|(id, count)| (std::cmp::Reverse(*count), *id));

    dir.edit("logs/dataset.toml", "group = \"history\" }", "group = \"history\", vocabulary = \"ids\" }");
    dir.edit(
        "logs/dataset.toml",
        "city = { kind = \"sparse\",",
        "city = { kind = \"sparse\", vocabulary = \"ids\",",
    );
    let config = dir.text("logs/dataset.toml");
    dir.write("logs/dataset.toml", format!("{config}\n[vocabularies.ids]\norder = \"frequency\"\n"));
    for layout in ["rows", "folded"] {
        let summary = dir.command(&format!("{BUILD} {layout} --layout {layout}")).json();
        assert_eq!(summary["vocabularies"]["ids"].as_u64(), Some(ranked.len() as u64));
        let snapshot = Snapshot::load(&dir.path(layout)).unwrap();
        let ids = Vocabulary::load(&dir.path(layout), &snapshot, "ids").unwrap();
        for (rank, (original, count)) in ranked.iter().enumerate() {
            assert_eq!(ids.original(rank as i64 + 1), Some(*original));
            assert_eq!(ids.count(rank as i64 + 1), Some(*count));
        }
        assert_eq!(originals(&dir, layout, "ids", &["history", "city"]), samples(&dir, "plain"));
        dir.command(&format!("onefold-ingest verify {layout}")).works();
    }
    // If partitions are appended one by one, known ids keep their numbers, and appending the first partition again
    // changes nothing.
    dir.command(&format!("{APPEND} parts --partition split=holdout")).works();
    let first = dir.files();
    dir.command(&format!("{APPEND} parts --partition split=train")).works();
    assert_eq!(originals(&dir, "parts", "ids", &["history", "city"]), samples(&dir, "plain"));
    // It is not a difference if a partition was written before the vocabulary knew all ids.
    dir.command("onefold-ingest verify parts --against logs/dataset.toml").works();
    let all = partitions(&dir, "parts");
    let again = dir.command(&format!("{APPEND} parts --partition split=holdout")).json();
    assert_eq!(again["changed"], false);
    assert_eq!(partitions(&dir, "parts"), all);
    assert_only_named_files(&dir.path("parts"));
    assert!(first.keys().any(|path| path.to_string_lossy().contains("vocabularies")));

    dir.edit("logs/dataset.toml", "order = \"frequency\"", "min_count = 1000");
    dir.command(&format!("{BUILD} rare --layout rows")).works();
    for (name, list) in samples(&dir, "rare").iter().flat_map(|sample| &sample.sparse) {
        let shares = matches!(name.as_str(), "history" | "city");
        assert!(!shares || list.iter().all(|id| *id == 0), "{name}: {list:?}");
    }
    dir.edit("logs/dataset.toml", "[vocabularies.ids]", "[vocabularies.idz]");
    dir.command(&format!("{BUILD} other")).fails(&[
        "`[features].city`",
        "no `[vocabularies.ids]`",
        "did you mean `idz`",
    ]);
}

#[test]
fn groups_are_found_and_kept() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm3 --samples 3000 --seed 1 --out logs").works();
    dir.command(&format!("{BUILD} given")).works();
    let summary = dir.command(&format!("{BUILD} found --groups auto")).json();
    let snapshot = Snapshot::load(&dir.path("found")).unwrap();
    let groups = summary["groups"].as_array().unwrap();
    assert_eq!(groups.len(), snapshot.schema.groups.len());
    assert!(
        groups
            .iter()
            .any(|group| group["deduplicated"] == true && group["dedupe_factor"].as_f64() > Some(1.5))
    );
    assert!(groups.iter().all(|group| !group["why"].as_str().unwrap().is_empty()));
    // The samples do not depend on the groups.
    let by_name = |dataset: &str| {
        let mut samples = read_samples(&dir.path(dataset));
        samples.iter_mut().for_each(|sample| sample.sparse.sort());
        sorted(samples)
    };
    assert!(by_name("found") == by_name("given"));
    // The chosen groups are kept.
    let again = dir.command(&format!("{APPEND} found --groups auto")).json();
    assert_eq!(again["changed"], false);
    assert_eq!(Snapshot::load(&dir.path("found")).unwrap().schema, snapshot.schema);
    dir.command("onefold-ingest verify found").works();
}

#[test]
fn a_report_is_one_page_that_needs_nothing_else() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm3 --samples 3000 --seed 1 --out logs").works();
    dir.command(&format!("{BUILD} dataset")).works();
    let before = dir.files();
    let whole = dir.command("onefold-ingest report dataset --html page.html").json();
    let page = dir.text("page.html");
    assert!(page.contains("<svg") && page.contains("</html>"));
    for outside in ["http://", "https://", "<script", "src="] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(whole["samples"].as_u64(), Some(3000));
    let logs = dir
        .command("onefold-ingest report --from-logs logs/dataset.toml --samples 1000 --html logs.html")
        .json();
    let share = logs["sampled"].as_f64().unwrap();
    assert!((0.3..0.4).contains(&share), "{share}");
    let samples = logs["samples"].as_f64().unwrap();
    assert!((500.0..1600.0).contains(&samples), "{samples}");
    // Reports sample whole sessions, so the session lengths remain the same.
    let length = |report: &serde_json::Value| report["samples_per_session"]["mean"].as_f64().unwrap();
    assert!((length(&logs) / length(&whole) - 1.0).abs() < 0.2, "{} and {}", length(&logs), length(&whole));
    let mut after = dir.files();
    after.retain(|path, _| before.contains_key(path));
    assert!(after == before, "the dataset or the logs have changed");
    dir.command("onefold-ingest report").fails(&["neither a dataset nor logs", "--from-logs"]);
    dir.command("onefold-ingest report --from-logs nowhere.toml").fails(&["nowhere.toml"]);
}
