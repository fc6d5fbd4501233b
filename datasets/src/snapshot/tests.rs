//! Tests of loading valid and damaged snapshots.

use onefold_base::progress::Silent;
use serde_json::{Value, json};

use super::editing::{edit_manifest, edit_snapshot};
use super::*;
use crate::folded::samples::{rows, schema};
use crate::names::HINT;
use crate::partition_column::tests::of_texts;
use crate::vacuum::{VacuumOptions, vacuum};
use crate::verify::{VerifyOptions, verify};
use crate::{Commit, DatasetWriter, PartitionType, WriterOptions};

/// Writes a partition of `samples` equal samples and returns the snapshot.
pub(crate) fn write(root: &Path, commit: Commit, key: &str, samples: usize) -> Snapshot {
    let options = WriterOptions { commit, ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(root, schema(), options).unwrap();
    let key = PartitionKey::parse(key).unwrap();
    writer.set_partition_columns(of_texts(&key)).unwrap();
    let sample = [vec![1], vec![], vec![2], vec![samples as i64]];
    writer.write(&key, &rows(&vec![sample; samples])).unwrap();
    writer.finish().unwrap();
    Snapshot::load(root).unwrap()
}

/// Returns the error message of loading a dataset after `edit`.
fn refused(edit: impl FnOnce(&Path)) -> String {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), Commit::Create, "split=a", 3);
    edit(directory.path());
    let error = Snapshot::load(directory.path()).unwrap_err();
    assert!(matches!(error, Error::Snapshot { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("hint: "), "{error}");
    error
}

fn refused_snapshot(edit: impl FnOnce(&mut Value)) -> String {
    let error = refused(|root| edit_snapshot(root, edit));
    assert!(error.contains("snapshots/00000001.json`: "), "{error}");
    error
}

/// Returns the error message of loading a snapshot whose manifest has an edited first row.
fn refused_row(edit: impl FnOnce(&mut Value)) -> String {
    refused(|root| edit_manifest(root, |manifest| edit(&mut manifest["rows"][0])))
}

#[test]
fn snapshots_that_contradict_themselves_are_refused() {
    for version in [1, 5, 7] {
        let error = refused_snapshot(|json| json["format_version"] = json!(version));
        let message = format!("format version {version}, this program reads 6");
        assert!(error.contains(&message) && error.contains("build it again"), "{error}");
    }
    let error = refused_snapshot(|json| json["manifests"] = json!(1));
    assert!(error.contains("invalid type: integer `1`, expected a sequence"), "{error}");
    assert!(refused_snapshot(|json| json["snapshot"] = json!(7)).contains("it says that it is snapshot 7"));
    assert!(refused_snapshot(|json| json["surprise"] = json!(7)).contains("unknown field `surprise`"));
    let partition = json!({ "key": "", "samples": 0, "sessions": 0, "digest": "0".repeat(32), "files": [] });
    assert!(
        refused_snapshot(|json| json["partitions"] = json!([partition]))
            .contains("unknown field `partitions`")
    );
    for outside in ["../secret.parquet", "/etc/passwd", ""] {
        let error = refused_snapshot(|json| json["manifests"][0]["path"] = json!(outside));
        assert!(error.contains("leaves the dataset"), "{error}");
        let error = refused_row(|row| row["files"][0]["path"] = json!(outside));
        assert!(error.contains("leaves the dataset"), "{error}");
    }
    let error = refused_row(|row| row["samples"] = json!(4));
    assert!(error.contains("the statistics count 3 samples, the manifests 4"), "{error}");
    assert!(refused_row(|row| row["bucket"] = json!(1)).contains("is of bucket 1, but there are 1"));
    assert!(refused_snapshot(|json| json["buckets"] = json!(0)).contains("it has 0 buckets in ranges of 1"));
    let error = refused_snapshot(|json| json["buckets_in_range"] = json!(2));
    assert!(error.contains("it has 1 buckets in ranges of 2"), "{error}");
    let columns = json!([{ "name": "split", "type": "integer" }]);
    let error = refused_snapshot(|json| json["partition_columns"] = columns);
    assert!(error.contains("`split=a` does not fit: the value `a` of `split` is not an integer"), "{error}");
    let error = refused_snapshot(|json| json["partition_columns"] = json!([]));
    assert!(error.contains("`split=a` does not fit: the dataset is not partitioned"), "{error}");
    assert!(
        refused_snapshot(|json| json["partition_columns"] = json!(["split"]))
            .contains("expected struct PartitionColumn")
    );
}

#[test]
fn a_snapshot_without_changed_features_has_no_keys_for_changes() {
    let directory = tempfile::tempdir().unwrap();
    let written = write(directory.path(), Commit::Create, "split=a", 3);
    let text = fs_err::read_to_string(directory.path().join("snapshots/00000001.json")).unwrap();
    assert!(!text.contains("features_since") && !text.contains("changes"), "{text}");
    let sets = serde_json::to_string(&written.partitions[0].files).unwrap();
    assert!(!sets.contains("changes"), "{sets}");
}

#[test]
fn manifests_that_are_not_those_of_the_snapshot_are_refused() {
    let manifest = |root: &Path| root.join(&Snapshot::load_head(root).unwrap().manifests[0].path);
    assert!(refused(|root| fs_err::remove_file(manifest(root)).unwrap()).contains("it is missing"));
    let error = refused(|root| fs_err::write(manifest(root), b"PAR1").unwrap());
    assert!(error.contains("it has 4 bytes, the snapshot says"), "{error}");
    // The checksum covers all bytes except the statistics.
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), Commit::Create, "split=a", 3);
    let entry = Snapshot::load_head(directory.path()).unwrap().manifests.remove(0);
    let path = directory.path().join(&entry.path);
    let bytes = fs_err::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, entry.bytes);
    let storage = Storage::open(directory.path()).unwrap();
    for place in (0..bytes.len()).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[place] ^= 16;
        fs_err::write(&path, damaged).unwrap();
        let snapshot = Snapshot::load(directory.path());
        assert_eq!(snapshot.is_err(), place as u64 >= entry.statistics_bytes, "byte {place}");
        if let Ok(snapshot) = snapshot {
            let error =
                snapshot.statistics_of(&storage, &PartitionFilter::default()).unwrap_err().to_string();
            assert!(error.contains("its bytes do not have the checksum that the snapshot says"), "{error}");
        }
    }
    let error = refused_snapshot_rows(json!([[0, 2]]));
    assert!(error.contains("it has 1 row groups, the snapshot names 0 to 2"), "{error}");
    refused_snapshot_rows(json!([[0, 1], [0, 1]]));
}

/// Returns the error message of loading a snapshot with these `rows` in its manifest entry.
fn refused_snapshot_rows(rows: Value) -> String {
    refused(|root| edit_snapshot(root, |json| json["manifests"][0]["rows"] = rows))
}

#[test]
fn a_folder_without_snapshots_is_no_dataset() {
    let directory = tempfile::tempdir().unwrap();
    for location in [directory.path(), &directory.path().join("nowhere")] {
        let error = Snapshot::load(location).unwrap_err();
        assert!(matches!(error, Error::NotADataset(_)), "{error}");
    }
}

#[test]
fn the_error_for_a_removed_snapshot_lists_the_existing_ones() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), Commit::Create, "day=1", 3);
    write(directory.path(), Commit::Append, "day=2", 3);
    let error = Snapshot::load_at(directory.path(), Some(9)).unwrap_err().to_string();
    assert!(error.contains("has no snapshot 9") && error.contains("has snapshots 1 to 2"), "{error}");
}

#[test]
fn the_newest_snapshot_is_found_without_a_hint_and_with_a_wrong_one() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, "day=1", 3);
    let newest = write(root, Commit::Append, "day=2", 3);
    for hint in [Some("1"), Some("2"), Some("900"), Some("rubbish"), None] {
        match hint {
            Some(text) => fs_err::write(root.join(HINT), text).unwrap(),
            None => fs_err::remove_file(root.join(HINT)).unwrap(),
        }
        assert_eq!(Snapshot::load(root).unwrap(), newest, "{hint:?}");
    }
}

#[test]
fn history_lists_what_each_commit_did() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, "day=1", 3);
    write(root, Commit::Append, "day=2", 5);
    write(root, Commit::Replace, "day=1", 1);
    let storage = Storage::open(root).unwrap();
    let all = history(&storage, None).unwrap();
    let kinds: Vec<_> =
        all.iter().map(|entry| (entry.snapshot, entry.operation.name(), entry.samples_gained)).collect();
    assert_eq!(kinds, [(1, "create", 3), (2, "append", 5), (3, "replace", -2)]);
    assert_eq!(all[2].partitions_written, ["day=1"]);
    assert_eq!(history(&storage, Some(1)).unwrap(), all[2..]);
}

#[test]
fn a_vacuum_keeps_what_kept_snapshots_name() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let first = write(root, Commit::Create, "day=1", 3);
    write(root, Commit::Append, "day=2", 5);
    let third = write(root, Commit::Append, "day=1", 4);
    // Files that a killed writer left.
    let left_over = [
        "data/day=1/part-00000-0123456789abcdef.parquet",
        "data/day=3/part-00000-0123456789abcdef.parquet#1",
    ];
    for path in left_over {
        fs_err::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs_err::write(root.join(path), b"half").unwrap();
    }
    let storage = Storage::open(root).unwrap();
    let young = vacuum(&storage, &VacuumOptions { keep: 1, ..VacuumOptions::default() }).unwrap();
    assert_eq!((young.snapshots_removed, young.files_removed, young.young_files_kept), (vec![], 0, 2));
    let now = VacuumOptions { keep: 1, older_than: std::time::Duration::ZERO, dry_run: true };
    let planned = vacuum(&storage, &now).unwrap();
    assert_eq!((planned.snapshots_kept, &planned.snapshots_removed), (vec![3], &vec![1, 2]));
    assert!(root.join(first.partitions[0].files[0].path()).exists(), "a dry run removes nothing");
    let done = vacuum(&storage, &VacuumOptions { dry_run: false, ..now }).unwrap();
    // The two left-over files, the replaced data file, and the manifest of the first commit, which has no row
    // groups left.
    assert_eq!((done.snapshots_removed, done.files_removed), (vec![1, 2], 4));
    assert_eq!(Snapshot::load(root).unwrap(), third);
    let mut there: Vec<String> =
        storage.list("data", None).unwrap().into_iter().map(|object| object.path).collect();
    there.sort();
    assert_eq!(there, third.file_paths().collect::<Vec<_>>());
    assert!(!root.join("data/day=3").exists());
    assert!(matches!(Snapshot::load_at(root, Some(1)), Err(Error::NoSnapshot(_))));
    // The next commit continues the numbering.
    assert_eq!(write(root, Commit::Append, "day=4", 1).snapshot, 4);
}

#[test]
fn a_snapshot_that_is_removed_while_it_is_read_is_not_called_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, "day=1", 3);
    let head = Snapshot::load_head(root).unwrap();
    write(root, Commit::Overwrite, "day=1", 4);
    let storage = Storage::open(root).unwrap();
    let options = VacuumOptions { keep: 1, older_than: std::time::Duration::ZERO, dry_run: false };
    vacuum(&storage, &options).unwrap();
    let error = head.with_partitions(&storage).unwrap_err();
    assert!(matches!(error, Error::NoSnapshot(_)), "{error}");
    assert!(error.to_string().contains("removed snapshot 1 while it was used"), "{error}");
}

#[test]
fn many_small_manifests_are_merged() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    for day in 0..100 {
        let snapshot = write(root, Commit::Append, &format!("day={day:03}"), 2 + day % 3);
        assert!(snapshot.manifests.len() <= 40, "{} manifests", snapshot.manifests.len());
    }
    let all = Snapshot::load(root).unwrap();
    assert_eq!(all.partitions.len(), 100);
    assert_eq!(Snapshot::load_at(root, Some(30)).unwrap().partitions, all.partitions[..30]);
    // A part of a merged manifest is replaced.
    let replaced = write(root, Commit::Replace, "day=001", 1);
    assert_eq!(replaced.statistics.samples, all.statistics.samples - 2);
    assert_eq!(replaced.partitions[2..], all.partitions[2..]);
    let verified = verify(root, &VerifyOptions::new(1), &Silent).unwrap();
    assert_eq!((verified.problems, verified.partitions), (vec![], 100));
}

#[test]
fn a_replaced_partition_needs_the_statistics_of_few_others() {
    let item = |snapshot: &Snapshot| snapshot.statistics.features["item"];
    let dataset = || {
        let directory = tempfile::tempdir().unwrap();
        (1..=3).for_each(|day| drop(write(directory.path(), Commit::Append, &format!("day={day}"), 3)));
        directory
    };
    let expected =
        |values, max_id| FeatureStatistics { values, min_id: Some(2), max_id: Some(max_id), max_length: 1 };
    let directory = dataset();
    let entry = Snapshot::load_head(directory.path()).unwrap().manifests.remove(0);
    let path = directory.path().join(&entry.path);
    let mut bytes = fs_err::read(&path).unwrap();
    bytes[entry.statistics_bytes as usize / 2] ^= 1;
    fs_err::write(&path, bytes).unwrap();
    // The second partition has the same ids as the third one had.
    assert_eq!(item(&write(directory.path(), Commit::Replace, "day=3", 2)), expected(8, 3));
    // Only the third partition has the largest id.
    let directory = dataset();
    write(directory.path(), Commit::Replace, "day=2", 2);
    assert_eq!(item(&write(directory.path(), Commit::Replace, "day=3", 7)), expected(12, 7));
    assert_eq!(item(&write(directory.path(), Commit::Replace, "day=3", 1)).max_id, Some(3));
}

#[test]
fn figures_of_partitions_add_up() {
    let of = |values, min_id, max_id, max_length| FeatureStatistics { values, min_id, max_id, max_length };
    let mut all = FeatureStatistics::default();
    for (part, sum) in [
        (of(0, None, None, 0), of(0, None, None, 0)),
        (of(3, Some(-2), Some(5), 2), of(3, Some(-2), Some(5), 2)),
        (of(0, None, None, 0), of(3, Some(-2), Some(5), 2)),
        (of(4, Some(1), Some(9), 1), of(7, Some(-2), Some(9), 2)),
    ] {
        all.merge(&part);
        assert_eq!(all, sum);
    }
}

#[test]
fn a_filter_without_a_partition_lists_the_existing_partitions() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = write(directory.path(), Commit::Create, "split=a", 3);
    let error = snapshot.select(&PartitionFilter::parse("split=b").unwrap()).unwrap_err().to_string();
    assert!(error.contains("no partition matches") && error.contains("`split=a`"), "{error}");
    let directory = tempfile::tempdir().unwrap();
    let snapshot = write(directory.path(), Commit::Create, "city=Paris,%20%22TX%22", 3);
    let error = snapshot.select(&PartitionFilter::parse("city=Paris").unwrap()).unwrap_err().to_string();
    let hint = error.rsplit_once("the dataset holds ").unwrap().1.trim_matches('`');
    assert_eq!(snapshot.chosen_samples(&PartitionFilter::parse(hint).unwrap()).unwrap(), 3);
}

/// Writes partitions with one sample each.
fn write_hours(root: &Path, kind: PartitionType, hours: &[&str]) -> Result<Snapshot> {
    let options = WriterOptions { commit: Commit::Append, ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(root, schema(), options)?;
    writer.set_partition_columns(vec![PartitionColumn::new("hour", kind)])?;
    for hour in hours {
        let key = PartitionKey::new(vec![("hour".to_owned(), (*hour).to_owned())]);
        writer.write(&key, &rows(&[[vec![1], vec![], vec![2], vec![3]]]))?;
    }
    writer.finish()?;
    Snapshot::load(root)
}

#[test]
fn a_partition_with_another_type_does_not_change_what_a_filter_chooses() {
    let (directory, hours) = (tempfile::tempdir().unwrap(), (0..24).map(|hour: u32| hour.to_string()));
    let (root, hours) = (directory.path(), hours.collect::<Vec<_>>());
    let hours: Vec<&str> = hours.iter().map(String::as_str).collect();
    let write = |kind, hours: &[&str]| write_hours(root, kind, hours);
    let early = |snapshot: &Snapshot| -> Vec<String> {
        let chosen = snapshot.select(&PartitionFilter::parse("hour<9").unwrap()).unwrap();
        chosen.into_iter().map(|partition| partition.key.get("hour").unwrap().to_owned()).collect()
    };
    let before = write(PartitionType::Integer, &hours).unwrap();
    assert_eq!(before.partition_columns, [PartitionColumn::new("hour", PartitionType::Integer)]);
    assert_eq!(early(&before), hours[..9]);
    let refused = |kind, parts: &[&str]| {
        let error = write(kind, &["unknown"]).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part) && error.contains("hint: "), "{error}");
        }
    };
    refused(PartitionType::Integer, &["`hour=unknown`", "the value `unknown` of `hour` is not an integer"]);
    refused(PartitionType::Text, &["partitioned by `hour` (integer)", "partitioned by `hour` (text)"]);
    let after = Snapshot::load(root).unwrap();
    assert_eq!((after.snapshot, early(&after)), (1, early(&before)));
    // A different integer has the same type.
    assert_eq!(early(&write(PartitionType::Integer, &["24"]).unwrap()), hours[..9]);
}

#[test]
fn hours_of_a_text_column_are_not_ordered_as_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot =
        write_hours(directory.path(), PartitionType::Text, &["0", "10", "8", "9", "unknown"]).unwrap();
    let samples = |filter: &str| snapshot.chosen_samples(&PartitionFilter::parse(filter).unwrap());
    let error = samples("hour<9").unwrap_err().to_string();
    assert!(error.contains("the values of `hour` are texts") && error.contains("`hour<\"9\"`"), "{error}");
    assert_eq!(samples("hour<\"9\"").unwrap(), 3);
    assert_eq!(samples("hour!=unknown").unwrap(), 4);
}
