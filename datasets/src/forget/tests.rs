//! Tests of users identified by kept columns, of vocabularies, and of refused requests.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use onefold_base::progress::Silent;

use super::*;
use crate::rewrite::tests::{Sample, columns, how, keys, options, schema, write, write_as};
use crate::verify::{Absence, VerifyOptions, absent, verify};
use crate::{Buckets, DatasetWriter, Error, Layout, Order, Sessions, Snapshot, Vocabulary, WriterOptions};

/// Returns 20 sessions of the users 1 to 4, with four samples each.
fn samples() -> Vec<Sample> {
    let session = |session: i64| {
        (0..4).map(move |number| Sample { country: 1, user: 1 + session % 4, start: session, number })
    };
    (0..20).flat_map(session).collect()
}

fn written() -> WriterOptions {
    options(Layout::Folded, Order::Session, Buckets { number: 8, in_range: 4 }, 1000)
}

fn run(root: &Path, keys: &UserKeys, column: Option<&str>, dry_run: bool, purge: bool) -> Result<Forgotten> {
    let options = ForgetOptions { column: column.map(str::to_owned), how: how(1000), dry_run, purge };
    forget(&Storage::open(root).unwrap(), keys, &options, &Silent)
}

fn look(root: &Path, keys: &UserKeys, column: Option<&str>) -> Absence {
    absent(&Storage::open(root).unwrap(), keys, column, None, &Silent).unwrap()
}

fn texts(texts: &[&str]) -> UserKeys {
    UserKeys { columns: None, rows: texts.iter().map(|text| vec![Some((*text).to_owned())]).collect() }
}

#[track_caller]
fn refused(root: &Path, keys: &UserKeys, column: Option<&str>, parts: &[&str]) {
    let error = run(root, keys, column, false, true).unwrap_err().to_string();
    assert!(parts.iter().all(|part| error.contains(part)) && error.contains("hint: "), "{error}");
}

#[test]
fn a_dry_run_reports_what_a_run_would_remove() {
    let directory = tempfile::tempdir().unwrap();
    let before = write(directory.path(), &written(), &samples());
    let list = keys([2, 9, 2]);
    let dry = run(directory.path(), &list, None, true, true).unwrap();
    assert_eq!((dry.samples_removed, dry.sessions_removed, dry.changed), (20, 5, false));
    assert_eq!((dry.users, dry.users_found, dry.users_not_found.as_slice()), (2, 1, &["9".to_owned()][..]));
    assert_eq!((dry.snapshots_with_users, dry.purged), (Some(vec![1]), None));
    assert_eq!(Snapshot::load(directory.path()).unwrap(), before);
    let done = run(directory.path(), &list, None, false, true).unwrap();
    assert_eq!((done.files_rewritten, done.bytes_rewritten), (dry.files_rewritten, dry.bytes_rewritten));
    assert_eq!((done.samples_removed, done.snapshot, done.changed), (20, 2, true));
    let purged = done.purged.unwrap();
    assert_eq!(purged.snapshots_removed, [1]);
    // The files that were written again, and the manifest of the first commit.
    assert_eq!(purged.files_removed as u64, done.files_rewritten + 1);
    assert!(Snapshot::load_at(directory.path(), Some(1)).is_err());
    assert!(look(directory.path(), &list, None).places.is_empty());
}

#[test]
fn a_kept_column_identifies_users_if_sessions_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let sessions = Some(Sessions::Key(vec!["request".to_owned(), "shop".to_owned()]));
    let options = WriterOptions { sessions, ..written() };
    write(directory.path(), &options, &samples());
    let root = directory.path();
    refused(
        root,
        &texts(&["u3"]),
        None,
        &["`request`, `shop`, not of one column", "CSV or Parquet", "`keep`"],
    );
    let of_column = UserKeys { columns: Some(vec!["user".to_owned()]), ..texts(&["u3"]) };
    refused(root, &of_column, None, &["tells users by `request`, `shop`", "has the columns `user`"]);
    refused(root, &texts(&["u3"]), Some("whom"), &["keeps no column `whom`", "did you mean `who`?"]);
    let no_value = UserKeys { columns: None, rows: vec![vec![None]] };
    refused(root, &no_value, Some("who"), &["user 1 of the list has no value of `who`"]);
    let found = look(root, &texts(&["u3"]), Some("who"));
    assert!(found.places_found > 0 && found.places[0].column.as_deref() == Some("who"), "{found:?}");
    let removed = run(root, &texts(&["u3", "u7"]), Some("who"), false, true).unwrap();
    assert_eq!((removed.samples_removed, removed.users_found), (20, 1));
    assert!(look(root, &texts(&["u3"]), Some("who")).places.is_empty());
}

#[test]
fn a_dataset_that_does_not_record_its_session_columns_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), &WriterOptions { sessions: None, ..written() }, &samples());
    refused(directory.path(), &keys([1]), None, &["does not say what its sessions were made from"]);
}

#[test]
fn sessions_of_several_users_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    // The kept column has no value in one sample of a session.
    let all = samples();
    let mut writer = DatasetWriter::create(directory.path(), schema(), written()).unwrap();
    let rows = columns(&all[..4]);
    let who: ArrayRef = Arc::new(StringArray::from(vec![Some("u1"), Some("u1"), None, Some("u1")]));
    let place = rows.schema().index_of("who").unwrap();
    let mut all = rows.columns().to_vec();
    all[place] = who;
    let names = rows.schema().fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>();
    let rows = RecordBatch::try_from_iter(names.into_iter().zip(all)).unwrap();
    writer.write(&PartitionKey::default(), &rows).unwrap();
    writer.finish().unwrap();
    refused(
        directory.path(),
        &texts(&["u1"]),
        Some("who"),
        &["samples with other values of `who`", "or none"],
    );
}

#[test]
fn vocabularies_of_the_users_lose_their_originals() {
    let directory = tempfile::tempdir().unwrap();
    let mut schema = schema();
    schema.groups[0].features[0].vocabulary = Some("user".to_owned());
    // The users 1 to 4 have the ids 1 to 4. The id 5 belongs to a user without samples.
    let users = Vocabulary::from_counts((1..=5).map(|user| (user, 10 - user as u64)), 1);
    write_as(directory.path(), schema, Some(&users), &written(), &samples());
    let list = keys([3, 5]);
    let found = look(directory.path(), &list, None);
    let of_vocabulary = found.places.iter().filter(|place| place.path.starts_with("vocabularies/"));
    assert_eq!(of_vocabulary.count(), 2, "{found:?}");
    let removed = run(directory.path(), &list, None, false, false).unwrap();
    assert_eq!((removed.users_found, removed.vocabulary_entries_removed), (2, 2));
    let snapshot = Snapshot::load(directory.path()).unwrap();
    assert_eq!(snapshot.operation.kind, Commit::Forget);
    let now = Vocabulary::load(directory.path(), &snapshot, "user").unwrap();
    assert_eq!((now.apply(&[1, 2, 3, 4, 5]), now.len()), (vec![1, 2, 0, 4, 0], 5));
    // Models that were trained before the removal are still compatible.
    let former = FormerOriginals { entries: 5, digest: users.digest(5).unwrap() };
    assert_eq!(snapshot.vocabularies["user"].former, std::slice::from_ref(&former));
    assert_ne!(now.digest(5).unwrap(), former.digest);
    assert!(!run(directory.path(), &list, None, false, true).unwrap().changed);
    assert!(look(directory.path(), &list, None).places.is_empty());
}

#[test]
fn statistics_that_cover_removed_samples_are_rewritten() {
    let directory = tempfile::tempdir().unwrap();
    // The users 1 and 2 on the first day, 3 and 4 on the second.
    let session = |session: i64| {
        let (day, user) = (session % 2, 1 + session % 4);
        let user = if (user > 2) == (day == 1) { user } else { 5 - user };
        (0..4).map(move |number| Sample { country: 0, user, start: 24 * day + session / 2, number })
    };
    let all: Vec<Sample> = (0..20).flat_map(session).collect();
    assert!(all.iter().all(|sample| (sample.user > 2) == (sample.start >= 24)));
    write(directory.path(), &written(), &all);
    let second: Vec<Sample> = all.into_iter().filter(|sample| sample.user == 2).collect();
    write(directory.path(), &WriterOptions { commit: Commit::Replace, ..written() }, &second);
    let at =
        |number| absent(&Storage::open(directory.path()).unwrap(), &keys([1]), None, Some(number), &Silent);
    let found = at(2).unwrap().places;
    assert!(!found.is_empty() && found.iter().all(|place| place.path.starts_with("manifests/")), "{found:?}");
    let removed = run(directory.path(), &keys([1]), None, false, true).unwrap();
    assert_eq!((removed.samples_removed, removed.manifests_with_users, removed.changed), (0, 1, true));
    assert_eq!(removed.snapshots_with_users, Some(vec![1, 2]));
    assert!(look(directory.path(), &keys([1]), None).places.is_empty());
    assert!(!run(directory.path(), &keys([1]), None, false, true).unwrap().changed);
}

/// Supersedes the first snapshot, and purges it, as soon as a stage begins.
struct Purging<'a>(&'a Path);

impl Reporter for Purging<'_> {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {
        write(self.0, &WriterOptions { commit: Commit::Overwrite, ..written() }, &samples()[..4]);
        purge(&Storage::open(self.0).unwrap(), &[1]).unwrap();
    }

    fn advance(&self, _: u64) {}

    fn note(&self, _: &str) {}

    fn end(&self) {}
}

#[test]
fn work_with_a_snapshot_that_is_purged_does_not_call_the_dataset_damaged() {
    let works: [fn(&Path) -> Option<Error>; 3] = [
        |root| verify(root, &VerifyOptions::new(1), &Purging(root)).err(),
        |root| {
            let options = ForgetOptions { column: None, how: how(1000), dry_run: false, purge: false };
            forget(&Storage::open(root).unwrap(), &keys([2]), &options, &Purging(root)).err()
        },
        |root| {
            let options = WriterOptions { commit: Commit::Replace, ..written() };
            let mut writer = DatasetWriter::create(root, schema(), options).unwrap();
            let key = PartitionKey::parse("country=NO/date=2024-05-01").unwrap();
            writer.write(&key, &columns(&samples()[..4])).unwrap();
            Purging(root).begin("", None, "");
            writer.finish().err()
        },
    ];
    for (number, work) in works.into_iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &written(), &samples());
        let error = work(directory.path()).unwrap();
        assert!(matches!(error, Error::NoSnapshot(_)), "{number}: {error}");
        assert!(error.to_string().contains("removed snapshot 1 while it was used"), "{number}: {error}");
    }
}
