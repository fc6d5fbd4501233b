//! Tests of the ages that determine removal, and of the files that are never removed.

use std::path::Path;

use super::*;
use crate::names::snapshot_path;
use crate::snapshot::tests::write;
use crate::{Commit, Snapshot};

const DAY: Duration = Duration::from_secs(86_400);

/// Writes a file that was modified `age` ago.
fn put(root: &Path, path: &str, age: Duration) {
    fs_err::create_dir_all(root.join(path).parent().unwrap()).unwrap();
    fs_err::write(root.join(path), b"half").unwrap();
    set_age(root, path, age);
}

fn set_age(root: &Path, path: &str, age: Duration) {
    let file = fs_err::OpenOptions::new().write(true).open(root.join(path)).unwrap();
    file.file().set_modified(SystemTime::now() - age).unwrap();
}

fn set_age_of_all(root: &Path, age: Duration) {
    for object in Storage::open(root).unwrap().list("", None).unwrap() {
        set_age(root, &object.path, age);
    }
}

/// Keeps the newest snapshot, and everything that was superseded or written less than a day ago.
fn run(root: &Path) -> Vacuumed {
    vacuum(&Storage::open(root).unwrap(), &VacuumOptions { keep: 1, ..VacuumOptions::default() }).unwrap()
}

#[test]
fn an_old_snapshot_that_was_superseded_lately_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let first = write(root, Commit::Create, "day=1", 3);
    set_age_of_all(root, DAY * 30);
    write(root, Commit::Overwrite, "day=1", 4);
    let vacuumed = run(root);
    assert_eq!((&vacuumed.snapshots_kept, vacuumed.files_removed), (&vec![1, 2], 0));
    assert_eq!(Snapshot::load_at(root, Some(1)).unwrap(), first);
    assert!(first.file_paths().all(|path| root.join(path).exists()));
    // The next snapshot's modification time determines the age, not the snapshot's own.
    set_age(root, &snapshot_path(1), Duration::ZERO);
    set_age(root, &snapshot_path(2), DAY * 2);
    let vacuumed = run(root);
    assert_eq!((&vacuumed.snapshots_removed, vacuumed.files_removed), (&vec![1], 2));
    assert!(!first.file_paths().any(|path| root.join(path).exists()));
}

#[test]
fn a_snapshot_is_superseded_by_the_next_existing_one() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    for (commit, samples) in [(Commit::Create, 1), (Commit::Append, 2), (Commit::Append, 3)] {
        write(root, commit, "day=1", samples);
    }
    set_age_of_all(root, DAY * 30);
    set_age(root, &snapshot_path(3), DAY / 2);
    fs_err::remove_file(root.join(snapshot_path(2))).unwrap();
    assert_eq!(run(root).snapshots_kept, [1, 3]);
}

#[test]
fn a_file_counts_from_the_commit_that_dropped_it() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let first = write(root, Commit::Create, "day=1", 3);
    let second = write(root, Commit::Append, "day=1", 4);
    write(root, Commit::Append, "day=1", 5);
    set_age_of_all(root, DAY * 30);
    // The first snapshot was superseded three days ago, the second one recently, and the files were copied
    // recently.
    set_age(root, &snapshot_path(2), DAY * 3);
    set_age(root, &snapshot_path(3), DAY / 2);
    let [first, second] = [first, second].map(|snapshot| snapshot.partitions[0].files[0].path().to_owned());
    [&first, &second].into_iter().for_each(|path| set_age(root, path, Duration::ZERO));
    let vacuumed = run(root);
    assert_eq!((&vacuumed.snapshots_removed, vacuumed.files_removed), (&vec![1], 2));
    assert!(!root.join(first).exists() && root.join(second).exists());
}

#[test]
fn a_file_that_no_snapshot_named_counts_from_its_own_time() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, "day=1", 3);
    let names = ["part-00000-0123456789abcdef.parquet", "part-00001-0123456789abcdef.parquet#1"];
    let [old, young] = [("2", DAY * 2), ("3", DAY / 2)].map(|(day, age)| {
        names.map(|name| {
            let path = format!("data/day={day}/{name}");
            put(root, &path, age);
            path
        })
    });
    let vacuumed = run(root);
    assert_eq!((vacuumed.files_removed, vacuumed.young_files_kept), (2, 2));
    assert!(!old.iter().any(|path| root.join(path).exists()));
    assert!(young.iter().all(|path| root.join(path).exists()));
}

#[test]
fn a_damaged_old_snapshot_is_removed_and_a_damaged_newest_one_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let first = write(root, Commit::Create, "day=1", 3);
    write(root, Commit::Overwrite, "day=1", 4);
    set_age_of_all(root, DAY * 2);
    put(root, &snapshot_path(1), DAY * 2);
    let vacuumed = run(root);
    assert_eq!((&vacuumed.snapshots_removed, vacuumed.files_removed), (&vec![1], 2));
    assert!(!first.file_paths().any(|path| root.join(path).exists()));
    put(root, &snapshot_path(2), DAY * 2);
    let error = vacuum(&Storage::open(root).unwrap(), &VacuumOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Snapshot(_)), "{error}");
}

#[test]
fn files_of_others_are_never_removed() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let snapshot = write(root, Commit::Create, "day=1", 3);
    let foreign = [
        "data/dataset.toml",
        "data/notes.txt#1",
        "data/.notes.txt.tmp",
        "data/day=1/part-00000.parquet",
        "data/events/part-00000-0123456789abcdef.parquet",
        "vocabularies/words.txt",
        "work/thesis.tex",
        "snapshots/photo.json",
        "manifests/first.parquet",
        "README.md",
    ];
    foreign.into_iter().for_each(|path| put(root, path, DAY * 30));
    let ours = [
        "data/part-00000-0123456789abcdef.parquet",
        "vocabularies/words-0123456789abcdef.parquet",
        "work/records-0123456789abcdef.parquet#1",
        "manifests/0123456789abcdef.parquet",
        "snapshots/.00000002.json.0123456789abcdef.tmp",
        "snapshots/.latest.tmp",
    ];
    ours.into_iter().for_each(|path| put(root, path, DAY * 30));
    let vacuumed = run(root);
    // The vacuum does not look at files directly in the dataset's own folder.
    assert_eq!((vacuumed.files_removed, vacuumed.foreign_files_kept), (ours.len(), foreign.len() - 1));
    assert!(foreign.into_iter().all(|path| root.join(path).exists()));
    assert!(!ours.into_iter().any(|path| root.join(path).exists()));
    assert_eq!(Snapshot::load(root).unwrap(), snapshot);
}

#[test]
fn a_dry_run_reports_reasons() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let first = write(root, Commit::Create, "day=1", 3);
    write(root, Commit::Overwrite, "day=1", 4);
    let left = "data/day=2/part-00000-0123456789abcdef.parquet";
    put(root, left, DAY * 3);
    set_age(root, &snapshot_path(2), DAY * 2);
    let storage = Storage::open(root).unwrap();
    let modified = |path: &str| utc(storage.head(path).unwrap().unwrap().modified);
    let superseded = modified(&snapshot_path(2));
    let options = VacuumOptions { keep: 1, dry_run: true, ..VacuumOptions::default() };
    let removals = vacuum(&storage, &options).unwrap().would_remove;
    let told: Vec<_> = removals.iter().map(|r| (r.path.as_str(), r.reason, r.since.as_str())).collect();
    let (file, manifest) = (first.partitions[0].files[0].path(), first.manifests[0].path.as_str());
    let left_since = modified(left);
    assert_eq!(
        told,
        [
            (snapshot_path(1).as_str(), Reason::Superseded, superseded.as_str()),
            (file, Reason::Superseded, superseded.as_str()),
            (left, Reason::NotCommitted, left_since.as_str()),
            (manifest, Reason::Superseded, superseded.as_str()),
        ]
    );
    assert_eq!(removals[2].bytes, 4);
    assert!([file, left].iter().all(|path| root.join(path).exists()), "a dry run removes nothing");
    assert_eq!(run(root).would_remove, []);
}

/// Files that others may have put into the dataset's folders do not disturb a vacuum, and it follows no links.
#[test]
fn odd_names_and_linked_folders_are_kept() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = directory.path();
    let written = write(root, Commit::Create, "day=1", 3);
    let file = "day=2/part-00000-0123456789abcdef.parquet";
    put(other.path(), file, DAY * 30);
    fs_err::create_dir(other.path().join("day=2/empty")).unwrap();
    fs_err::os::unix::fs::symlink(other.path().join("day=2"), root.join("data/day=2")).unwrap();
    fs_err::os::unix::fs::symlink(root, root.join("data/loop")).unwrap();
    for name in [&b"caf\xe9.txt"[..], b"a\tb"] {
        fs_err::write(root.join("data").join(OsStr::from_bytes(name)), b"1").unwrap();
    }
    let options = VacuumOptions { older_than: Duration::ZERO, ..VacuumOptions::default() };
    let vacuumed = vacuum(&Storage::open(root).unwrap(), &options).unwrap();
    assert_eq!((vacuumed.files_removed, vacuumed.foreign_files_kept), (0, 2));
    assert!(other.path().join(file).exists() && other.path().join("day=2/empty").exists());
    assert_eq!(Snapshot::load(root).unwrap(), written);
}
