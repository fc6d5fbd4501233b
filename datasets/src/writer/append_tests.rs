//! Tests of appending: which partitions a dataset has, and what their figures are.

use std::collections::BTreeMap;

use super::*;
use crate::folded::samples::{Sample, rows, schema};
use crate::{FeatureStatistics, Layout, Order};

fn options(commit: Commit) -> WriterOptions {
    WriterOptions { commit, layout: Layout::Folded, ..WriterOptions::new(Order::Session) }
}

/// As many samples, with ids from `first` on.
fn samples(count: i64, first: i64) -> RecordBatch {
    let sample = |i: i64| -> Sample { [vec![first], vec![], vec![first, first + i], vec![first + i]] };
    rows(&(0..count).map(sample).collect::<Vec<_>>())
}

fn write(root: &Path, commit: Commit, partitions: &[(&str, RecordBatch)]) -> Manifest {
    let mut writer = DatasetWriter::create(root, schema(), options(commit)).unwrap();
    for (key, rows) in partitions {
        writer.write(&PartitionKey::parse(key).unwrap(), rows).unwrap();
    }
    writer.finish().unwrap()
}

/// Partitions by key, without what tells one commit from another.
fn content(manifest: &Manifest) -> Vec<Partition> {
    let mut partitions = manifest.partitions.clone();
    for file in partitions.iter_mut().flat_map(|partition| &mut partition.files) {
        let (start, generation) = file.path.rsplit_once("-g").unwrap();
        assert!(generation.ends_with(".parquet"), "{generation}");
        file.path = start.to_owned();
    }
    partitions
}

/// What is in the directory besides the manifest.
fn data_files(root: &Path) -> Vec<PathBuf> {
    let folders = fs_err::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let files = folders.filter(|path| path.is_dir()).flat_map(|folder| {
        fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    });
    let mut files: Vec<_> = files.map(|path| path.strip_prefix(root).unwrap().to_owned()).collect();
    files.sort();
    files
}

#[test]
fn partitions_written_replace_their_own_and_keep_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let (a, b, c) = (("day=1", samples(5, 10)), ("day=2", samples(7, 20)), ("day=3", samples(9, 30)));
    let first = write(root, Commit::Create, &[c.clone(), a.clone()]);
    let keys =
        |manifest: &Manifest| manifest.partitions.iter().map(|p| p.key.to_string()).collect::<Vec<_>>();
    assert_eq!(keys(&first), ["day=1", "day=3"]);

    let new_c = ("day=3", samples(4, 100));
    let second = write(root, Commit::Append, &[b.clone(), new_c.clone()]);
    assert_eq!(keys(&second), ["day=1", "day=2", "day=3"]);
    assert_eq!(second.partitions[0], first.partitions[0]);
    assert_eq!((second.generation, second.statistics.samples), (2, 5 + 7 + 4));
    let item = FeatureStatistics { values: 16, min_id: Some(10), max_id: Some(103), max_length: 1 };
    assert_eq!(second.statistics.features["item"], item);
    let named: Vec<_> = second.file_paths().collect();
    assert_eq!(data_files(root), named);

    // The same at once, into nothing.
    let whole = tempfile::tempdir().unwrap();
    let at_once = write(whole.path(), Commit::Append, &[a, b, new_c]);
    assert_eq!(content(&at_once), content(&second));
    assert_eq!(at_once.statistics, second.statistics);
}

#[test]
fn appending_the_same_again_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let append = || write(root, Commit::Append, &[("day=2", samples(7, 20))]);
    let (first, second) = (append(), append());
    assert_eq!((content(&first), &first.statistics), (content(&second), &second.statistics));
    assert_eq!((first.generation, second.generation), (2, 3));
    assert_eq!(data_files(root), second.file_paths().collect::<Vec<_>>());
    // Nothing is appended at all.
    let third = write(root, Commit::Append, &[]);
    assert_eq!((third.partitions, third.statistics), (second.partitions, second.statistics));
}

#[test]
fn an_append_that_does_not_finish_leaves_the_dataset() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let before = write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let mut writer = DatasetWriter::create(root, schema(), options(Commit::Append)).unwrap();
    assert_eq!(writer.appended_to(), Some(&before));
    writer.write(&PartitionKey::parse("day=1").unwrap(), &samples(3, 50)).unwrap();
    drop(writer);
    assert_eq!(Manifest::load(root).unwrap(), before);
    assert_eq!(data_files(root), before.file_paths().collect::<Vec<_>>());
}

#[test]
fn what_does_not_fit_is_not_appended() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let before = write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let refused = |schema: Schema, options: WriterOptions, part: &str| {
        let error = DatasetWriter::create(root, schema, options).unwrap_err();
        assert!(matches!(error, Error::Schema { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
        assert!(
            error.to_string().contains("hint: ") && error.to_string().contains("`--overwrite`"),
            "{error}"
        );
    };
    let append = || options(Commit::Append);
    let mut other = schema();
    other.groups[0].deduplicated = false;
    refused(other, append(), "has another schema");
    refused(schema(), WriterOptions { layout: Layout::Rows, ..append() }, "has another layout");
    refused(schema(), WriterOptions { order: Order::Arrival, ..append() }, "has another order");

    let mut writer = DatasetWriter::create(root, schema(), append()).unwrap();
    let error =
        writer.write(&PartitionKey::parse("hour=1").unwrap(), &samples(1, 1)).unwrap_err().to_string();
    assert!(error.contains("the partition `hour=1` does not fit beside `day=1`"), "{error}");
    drop(writer);

    // A dataset of version 2 has no figures by partition.
    let mut old = before.clone();
    old.format_version = 2;
    old.partitions[0].features = BTreeMap::new();
    old.partitions[0].digest = None;
    old.store(root).unwrap();
    refused(schema(), append(), "is of format version 2, whose partitions (`day=1`) have no figures");
    assert_eq!(Manifest::load(root).unwrap(), old);
}

/// `/dev/full` fails every write as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_dataset_and_says_so() {
    for commit in [Commit::Append, Commit::Overwrite] {
        for full in ["day=2/part-00000-g2.parquet", ".manifest.json.tmp"] {
            let directory = tempfile::tempdir().unwrap();
            let root = directory.path();
            let before = write(root, Commit::Create, &[("day=1", samples(5, 10))]);
            let mut writer = DatasetWriter::create(root, schema(), options(commit)).unwrap();
            fs_err::create_dir_all(root.join("day=2")).unwrap();
            fs_err::os::unix::fs::symlink("/dev/full", root.join(full)).unwrap();
            writer.write(&PartitionKey::parse("day=2").unwrap(), &samples(700, 50)).unwrap();
            let error = writer.finish().unwrap_err().to_string();
            let named = if full.starts_with("day") { full } else { MANIFEST_FILE };
            assert!(error.contains(&format!("{named}` cannot be written: ")), "{error}");
            assert!(error.contains("hint: the disk is full: free space on it"), "{error}");
            assert_eq!(Manifest::load(root).unwrap(), before);
            assert_eq!(data_files(root), before.file_paths().collect::<Vec<_>>());
            let names = fs_err::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = names.collect();
            names.sort();
            assert_eq!(names, ["day=1", MANIFEST_FILE], "{full}");
        }
    }
}
