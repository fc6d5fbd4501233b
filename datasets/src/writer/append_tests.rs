//! Tests of appending: the resulting partitions, and concurrent writers.

use std::sync::Arc;

use onefold_base::fault::{Explain, Kind};

use super::tests::{content, in_last_bucket};
use super::*;
use crate::folded::samples::{Sample, rows, schema};
use crate::names::DATA;
use crate::partition_column::tests::of_texts;
use crate::{FeatureStatistics, Layout, Order, Partition, PartitionFilter, PartitionType};

fn options(commit: Commit) -> WriterOptions {
    WriterOptions { commit, layout: Layout::Folded, ..WriterOptions::new(Order::Session) }
}

/// Returns `count` samples with ids from `first` on.
fn samples(count: i64, first: i64) -> RecordBatch {
    let sample = |i: i64| -> Sample { [vec![first], vec![], vec![first, first + i], vec![first + i]] };
    rows(&(0..count).map(sample).collect::<Vec<_>>())
}

fn writer(root: &Path, commit: Commit, partitions: &[(&str, RecordBatch)]) -> DatasetWriter {
    let mut writer = partitioned_by_day(root, schema(), options(commit));
    for (key, rows) in partitions {
        writer.write(&PartitionKey::parse(key).unwrap(), rows).unwrap();
    }
    writer
}

/// Creates a writer of partitions whose column `day` is an integer.
fn partitioned_by_day(root: &Path, schema: Schema, options: WriterOptions) -> DatasetWriter {
    let mut writer = DatasetWriter::create(root, schema, options).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("day", PartitionType::Integer)]).unwrap();
    writer
}

fn of_four_buckets(root: &Path, commit: Commit) -> DatasetWriter {
    partitioned_by_day(
        root,
        schema(),
        WriterOptions { buckets: Buckets::with_own_files(4), ..options(commit) },
    )
}

fn write(root: &Path, commit: Commit, partitions: &[(&str, RecordBatch)]) -> Snapshot {
    finished(root, writer(root, commit, partitions))
}

/// Returns the snapshot that a writer commits, with its partitions.
fn finished(root: &Path, writer: DatasetWriter) -> Snapshot {
    let head = writer.finish().unwrap().snapshot;
    let snapshot = Snapshot::load(root).unwrap();
    assert_eq!(Snapshot { partitions: Vec::new(), ..snapshot.clone() }, head);
    snapshot
}

fn keys(snapshot: &Snapshot) -> Vec<String> {
    snapshot.partitions.iter().map(|partition| partition.key.to_string()).collect()
}

/// Returns the paths of the existing data files.
fn data_files(root: &Path) -> Vec<String> {
    let mut files: Vec<String> =
        Storage::open(root).unwrap().list(DATA, None).unwrap().into_iter().map(|o| o.path).collect();
    files.sort();
    files
}

#[test]
fn snapshots_keep_the_versions_of_tables() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let version = |version| TableVersion { table: "t".to_owned(), version };
    let commit = |kind, day, versions: &[(&str, TableVersion)]| {
        let mut writer = writer(root, kind, &[(day, samples(5, 10))]);
        writer
            .set_table_versions(versions.iter().map(|(name, of)| ((*name).to_owned(), of.clone())).collect());
        let versions = finished(root, writer).table_versions.into_iter();
        versions.map(|(name, of)| (name, of.version)).collect::<Vec<_>>()
    };
    let of = |name: &str, version: u64| (name.to_owned(), version);
    let first = commit(Commit::Create, "day=1", &[("a", version(1)), ("b", version(7))]);
    assert_eq!(first, [of("a", 1), of("b", 7)]);
    assert_eq!(commit(Commit::Append, "day=2", &[("a", version(2))]), [of("a", 2), of("b", 7)]);
    assert_eq!(commit(Commit::Append, "day=3", &[]), [of("a", 2), of("b", 7)]);
    assert_eq!(commit(Commit::Overwrite, "day=1", &[("c", version(0))]), [of("c", 0)]);
}

#[test]
fn an_append_of_new_rows_only_does_not_replace_samples() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let append = |commit, partitions: &[(&str, RecordBatch)]| {
        let mut writer = writer(root, commit, partitions);
        writer.write_only_new();
        writer.finish()
    };
    let error = append(Commit::Append, &[("day=1", samples(6, 10))]).unwrap_err().fault();
    let message = error.message.to_string();
    assert!(message.contains("partition `day=1` has samples of earlier rows"), "{message}");
    // The same samples may be written again.
    let both = [("day=1", samples(5, 10)), ("day=2", samples(7, 20))];
    assert_eq!(append(Commit::Append, &both).unwrap().snapshot.statistics.samples, 12);
    assert!(append(Commit::Replace, &[("day=1", samples(6, 10))]).is_ok());
}

#[test]
fn partitions_written_replace_their_own_and_keep_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let (a, b, c) = (("day=1", samples(5, 10)), ("day=2", samples(7, 20)), ("day=3", samples(3, 30)));
    let first = write(root, Commit::Create, &[c.clone(), a.clone()]);
    assert_eq!((keys(&first), first.snapshot), (vec!["day=1".to_owned(), "day=3".to_owned()], 1));
    let new_c = ("day=3", samples(4, 100));
    let second = write(root, Commit::Append, &[b.clone(), new_c.clone()]);
    assert_eq!((keys(&second).len(), second.snapshot, &second.dataset), (3, 2, &first.dataset));
    assert_eq!(second.partitions[0], first.partitions[0]);
    assert_eq!((second.operation.kind, second.operation.samples_gained), (Commit::Append, 8));
    let item = FeatureStatistics { values: 16, min_id: Some(10), max_id: Some(103), max_length: 1 };
    assert_eq!(second.statistics.features["item"], item);
    // Both snapshots remain readable.
    assert_eq!(Snapshot::load_at(root, Some(1)).unwrap(), first);
    assert_eq!(Snapshot::load(root).unwrap(), second);
    assert_eq!(data_files(root).len(), 4);
    // Writes the same samples at once into an empty location.
    let whole = tempfile::tempdir().unwrap();
    let at_once = write(whole.path(), Commit::Append, &[a, b, new_c]);
    assert_eq!((content(&at_once), &at_once.statistics), (content(&second), &second.statistics));
}

#[test]
fn appending_the_same_again_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let first = write(root, Commit::Append, &[("day=2", samples(7, 20))]);
    let files = data_files(root);
    let again = writer(root, Commit::Append, &[("day=2", samples(7, 20))]).finish().unwrap();
    assert!(!again.changed);
    let head = Snapshot { partitions: Vec::new(), ..first };
    assert_eq!((again.snapshot, data_files(root)), (head.clone(), files));
    let nothing = writer(root, Commit::Append, &[]).finish().unwrap();
    assert_eq!((nothing.changed, nothing.snapshot), (false, head));
}

#[test]
fn a_partition_loses_samples_only_if_it_is_to_be_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let before = write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let fewer = [("day=1", samples(3, 50)), ("day=2", samples(1, 50))];
    let error = writer(root, Commit::Append, &fewer).finish().unwrap_err();
    assert_eq!(error.fault().kind, Kind::Failed);
    assert!(error.to_string().contains("`day=1` has 5 samples, and appending would leave 3"), "{error}");
    assert_eq!(Snapshot::load(root).unwrap(), before);
    assert_eq!(data_files(root), before.file_paths().collect::<Vec<_>>());
    let replaced = write(root, Commit::Replace, &fewer);
    assert_eq!((replaced.statistics.samples, replaced.operation.samples_gained), (4, -1));
    // A dataset without partition columns has one partition, which has no name.
    let whole = tempfile::tempdir().unwrap();
    let of_whole = |commit, count| {
        let mut writer = DatasetWriter::create(whole.path(), schema(), options(commit)).unwrap();
        writer.write(&PartitionKey::default(), &samples(count, 10)).unwrap();
        writer
    };
    of_whole(Commit::Create, 5).finish().unwrap();
    let error = of_whole(Commit::Append, 3).finish().unwrap_err().to_string();
    assert!(error.contains("it has 5 samples, and appending would leave 3"), "{error}");
    let mut of_new_rows = of_whole(Commit::Append, 6);
    of_new_rows.write_only_new();
    let error = of_new_rows.finish().unwrap_err().to_string();
    assert!(error.contains("it has samples of earlier rows, which appending would replace"), "{error}");
}

/// Returns the snapshots, before and after a merge into the last bucket, of a dataset with samples in its
/// first and last bucket.
fn merged_into_last_bucket(root: &Path, create: impl Fn(Commit) -> DatasetWriter) -> [Snapshot; 2] {
    let key = PartitionKey::parse("day=1").unwrap();
    let mut writer = create(Commit::Create);
    writer.write(&key, &samples(5, 10)).unwrap();
    writer.write(&key, &in_last_bucket(&samples(5, 20))).unwrap();
    let before = finished(root, writer);
    let mut writer = create(Commit::Merge);
    writer.write(&key, &in_last_bucket(&samples(7, 100))).unwrap();
    [before, finished(root, writer)]
}

#[test]
fn a_merge_keeps_the_buckets_that_it_does_not_write() {
    let directory = tempfile::tempdir().unwrap();
    let create = |commit| of_four_buckets(directory.path(), commit);
    let key = PartitionKey::parse("day=1").unwrap();
    let [before, merged] = merged_into_last_bucket(directory.path(), create);
    let samples_of = |snapshot: &Snapshot| {
        snapshot.partitions[0].files.iter().map(|set| (set.bucket, set.samples)).collect::<Vec<_>>()
    };
    assert_eq!(samples_of(&before), [(0, 5), (3, 5)]);
    assert_eq!(samples_of(&merged), [(0, 5), (3, 7)]);
    assert_eq!(merged.partitions[0].files[0], before.partitions[0].files[0]);
    let mut writer = create(Commit::Merge);
    writer.replaces(&key, 0).unwrap();
    assert_eq!(samples_of(&finished(directory.path(), writer)), [(3, 7)]);
}

#[test]
fn a_merge_replaces_the_range_of_the_buckets_that_it_writes() {
    let directory = tempfile::tempdir().unwrap();
    // Buckets 0 and 1 share files, and so do buckets 2 and 3.
    let buckets = Buckets { number: 4, in_range: 2 };
    let create =
        |commit| partitioned_by_day(directory.path(), schema(), WriterOptions { buckets, ..options(commit) });
    let key = PartitionKey::parse("day=1").unwrap();
    let [before, merged] = merged_into_last_bucket(directory.path(), create);
    assert_eq!((merged.division(), merged.partitions[0].samples), (buckets, 12));
    assert_eq!(merged.partitions[0].files[0], before.partitions[0].files[0]);
    let paths: Vec<_> = merged.file_paths().map(|path| path.rsplit_once('/').unwrap().0).collect();
    assert_eq!(paths, ["data/day=1/bucket=000", "data/day=1/bucket=002"]);
    let mut writer = create(Commit::Merge);
    writer.replaces(&key, 0).unwrap();
    assert_eq!(finished(directory.path(), writer).partitions[0].samples, 7);
    let error = create(Commit::Merge).replaces(&key, 2).unwrap_err().to_string();
    assert!(error.contains("there is no range 2 of buckets, only 2"), "{error}");
}

#[test]
fn of_two_merges_into_one_partition_the_first_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let create = |commit| of_four_buckets(directory.path(), commit);
    let key = PartitionKey::parse("day=1").unwrap();
    let mut writer = create(Commit::Create);
    writer.write(&key, &samples(5, 10)).unwrap();
    writer.finish().unwrap();
    let [mut first, mut second, mut other] = [(); 3].map(|()| create(Commit::Merge));
    first.write(&key, &samples(6, 10)).unwrap();
    // The second merge conflicts even though it writes another bucket, because it was based on the old
    // partition.
    second.write(&key, &in_last_bucket(&samples(7, 100))).unwrap();
    other.write(&PartitionKey::parse("day=2").unwrap(), &samples(1, 7)).unwrap();
    first.finish().unwrap();
    let error = second.finish().unwrap_err().to_string();
    assert!(error.contains("another writer changed the partition `day=1` meanwhile (snapshot 2)"), "{error}");
    let merged = finished(directory.path(), other);
    assert_eq!((merged.snapshot, merged.operation.kind), (3, Commit::Merge));
    assert_eq!(merged.partitions.iter().map(|partition| partition.samples).collect::<Vec<_>>(), [6, 1]);
}

#[test]
fn writers_of_different_partitions_both_succeed() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let first = writer(root, Commit::Append, &[("day=2", samples(7, 20))]);
    let second = writer(root, Commit::Append, &[("day=3", samples(9, 30))]);
    let same = writer(root, Commit::Append, &[("day=3", samples(11, 40))]);
    let whole = writer(root, Commit::Overwrite, &[("day=9", samples(1, 1))]);
    first.finish().unwrap();
    let second = finished(root, second);
    assert_eq!((second.snapshot, keys(&second).len(), second.statistics.samples), (3, 3, 21));
    let error = same.finish().unwrap_err().to_string();
    assert!(error.contains("another writer changed the partition `day=3` meanwhile (snapshot 3)"), "{error}");
    let error = whole.finish().unwrap_err();
    assert!(error.to_string().contains(" meanwhile (snapshot 2)"), "{error}");
    assert_eq!(error.fault().kind, Kind::Failed);
    assert_eq!(Snapshot::load(root).unwrap(), second);
    assert_eq!(data_files(root).len(), 3, "the writers that failed leave nothing");
}

#[test]
fn a_commit_never_takes_the_number_of_a_removed_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let slow = writer(root, Commit::Append, &[("day=2", samples(7, 20))]);
    write(root, Commit::Append, &[("day=2", samples(9, 30))]);
    let newest = write(root, Commit::Append, &[("day=3", samples(11, 40))]);
    // A purge removes older snapshots, of any age.
    fs_err::remove_file(root.join(crate::names::snapshot_path(2))).unwrap();
    let error = slow.finish().unwrap_err();
    assert!(
        error.to_string().contains("snapshots that other writers committed meanwhile were removed"),
        "{error}"
    );
    assert_eq!(error.fault().kind, Kind::Failed);
    assert_eq!(Snapshot::load(root).unwrap(), newest);
    assert!(!root.join(crate::names::snapshot_path(2)).exists());
}

#[test]
fn of_two_writers_of_a_new_dataset_one_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let [first, second] = [1, 2].map(|i| writer(root, Commit::Create, &[("day=1", samples(i, 10))]));
    let first = finished(root, first);
    let error = second.finish().unwrap_err();
    assert!(error.to_string().contains("another writer created the dataset meanwhile"), "{error}");
    assert_eq!(Snapshot::load(root).unwrap(), first);
    let error = DatasetWriter::create(root, schema(), options(Commit::Create)).unwrap_err();
    assert!(error.to_string().contains("` already exists\n"), "{error}");
}

/// Returns the sizes of the existing manifests in bytes, by path.
fn manifests(root: &Path) -> BTreeMap<String, u64> {
    let listed = Storage::open(root).unwrap().list(crate::names::MANIFESTS, None).unwrap();
    listed.into_iter().map(|object| (object.path, object.bytes)).collect()
}

#[test]
fn a_commit_writes_one_manifest_of_what_it_writes() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let day = |day: i64| format!("day={day:04}");
    let year: Vec<_> = (0..365).map(|i| (day(i), samples(1, i))).collect();
    let year: Vec<(&str, RecordBatch)> =
        year.iter().map(|(key, rows)| (key.as_str(), rows.clone())).collect();
    let whole = write(root, Commit::Create, &year);
    assert_eq!(
        (whole.statistics.partitions, whole.statistics.files, whole.statistics.samples),
        (365, 365, 365)
    );
    let mut before = manifests(root);
    assert_eq!(before.len(), 1);
    let head_bytes =
        |snapshot: u64| fs_err::metadata(root.join(crate::names::snapshot_path(snapshot))).unwrap().len();
    for i in 365..385 {
        let head = writer(root, Commit::Append, &[(&day(i), samples(1, i))]).finish().unwrap().snapshot;
        assert_eq!(Snapshot::load_head(root).unwrap(), head);
        let after = manifests(root);
        let new: Vec<&u64> =
            after.iter().filter(|(path, _)| !before.contains_key(*path)).map(|(_, b)| b).collect();
        // A manifest with one row group, including the statistics of three features, is smaller than 20,000
        // bytes.
        assert!(matches!(new[..], [bytes] if *bytes < 20_000), "{new:?}");
        before = after;
    }
    // Each commit adds one manifest entry to the snapshot.
    assert!(head_bytes(21) - head_bytes(2) < 19 * 800, "{} bytes, then {}", head_bytes(2), head_bytes(21));
    // Replaces a partition of the first manifest. No sample is lost or duplicated.
    let replaced = write(root, Commit::Append, &[(&day(3), samples(2, 7))]);
    assert_eq!((replaced.partitions.len(), replaced.statistics.samples), (385, 386));
    assert_eq!(replaced.manifests[0].rows, [(0, 3), (4, 365)]);
    assert!(replaced.partitions.is_sorted_by_key(|partition| partition.key.clone()));
    let sum = replaced.statistics_of(&Storage::open(root).unwrap(), &PartitionFilter::default()).unwrap();
    assert_eq!(replaced.statistics.features, sum.features);
    assert_eq!(replaced.statistics.partitions, 385);
    assert_eq!(replaced.statistics.sessions, replaced.partitions.iter().map(|p| p.sessions).sum::<u64>());
    assert_eq!(
        replaced.statistics.bytes_on_disk,
        replaced.partitions.iter().map(Partition::bytes_on_disk).sum::<u64>()
    );
}

#[test]
fn a_writer_that_does_not_finish_leaves_the_dataset() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let before = write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    drop(writer(root, Commit::Append, &[("day=1", samples(8, 50))]));
    assert_eq!(Snapshot::load(root).unwrap(), before);
    assert_eq!(data_files(root), before.file_paths().collect::<Vec<_>>());
}

#[test]
fn appends_with_another_schema_or_other_options_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    write(root, Commit::Create, &[("day=1", samples(5, 10))]);
    let refused = |schema: Schema, options: WriterOptions, part: &str| {
        let error = DatasetWriter::create(root, schema, options).unwrap_err();
        assert_eq!(error.fault().kind, Kind::Options);
        assert!(error.to_string().contains(part) && error.to_string().contains("hint: "), "{error}");
    };
    let append = || options(Commit::Append);
    let mut other = schema();
    other.groups[0].deduplicated = false;
    refused(other, append(), "has another schema");
    refused(schema(), WriterOptions { layout: Layout::Rows, ..append() }, "has another layout");
    refused(schema(), WriterOptions { order: Order::Arrival, ..append() }, "has another order");
    // The dataset's partition columns and types apply even if the writer does not set them.
    let mut writer = DatasetWriter::create(root, schema(), append()).unwrap();
    for (key, expected) in [
        ("hour=1", "the dataset is partitioned by `day` (integer)"),
        ("", "the dataset is partitioned by `day` (integer)"),
        ("day=unknown", "the value `unknown` of `day` is not an integer"),
    ] {
        let key = PartitionKey::parse(key).unwrap();
        let error = writer.write(&key, &samples(1, 1)).unwrap_err().to_string();
        let expected = format!("the partition `{key}` does not fit: {expected}\n  hint: ");
        assert!(error.starts_with(&expected), "{error}");
    }
    for columns in [
        vec![],
        vec![PartitionColumn::new("day", PartitionType::Text)],
        vec![PartitionColumn::new("hour", PartitionType::Integer)],
    ] {
        let error = writer.set_partition_columns(columns).unwrap_err().to_string();
        assert!(
            error.starts_with("the dataset is partitioned by `day` (integer), but the samples"),
            "{error}"
        );
    }
    writer.write(&PartitionKey::parse("day=2").unwrap(), &samples(1, 1)).unwrap();
    assert_eq!(keys(&finished(root, writer)), ["day=1", "day=2"]);
}

#[test]
fn a_new_dataset_has_the_partition_columns_that_were_set() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = DatasetWriter::create(directory.path(), schema(), options(Commit::Create)).unwrap();
    let key = PartitionKey::parse("day=1").unwrap();
    let error = writer.write(&key, &samples(1, 1)).unwrap_err().to_string();
    assert!(error.contains("the partition `day=1` does not fit: the dataset is not partitioned"), "{error}");
    writer.set_partition_columns(of_texts(&key)).unwrap();
    writer.write(&key, &samples(1, 1)).unwrap();
    writer.finish().unwrap();
    let text = fs_err::read_to_string(directory.path().join(crate::names::snapshot_path(1))).unwrap();
    let snapshot: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(snapshot["partition_columns"], serde_json::json!([{ "name": "day", "type": "text" }]));
}

/// Returns the samples with a key each, starting at `first`.
fn keyed(samples: &RecordBatch, first: i64) -> RecordBatch {
    let keys = arrow::array::Int64Array::from_iter_values(first..first + samples.num_rows() as i64);
    let columns = samples
        .schema_ref()
        .fields()
        .iter()
        .map(|field| field.name().clone())
        .zip(samples.columns().to_vec());
    let key = (crate::SAMPLE_KEY_COLUMN.to_owned(), Arc::new(keys) as arrow::array::ArrayRef);
    RecordBatch::try_from_iter(columns.chain([key])).unwrap()
}

#[test]
fn keys_of_samples_are_no_part_of_their_digest() {
    let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let options = |commit, layout| WriterOptions { sample_keys: true, layout, ..options(commit) };
    let plain = write(without.path(), Commit::Create, &[("day=1", samples(5, 10))]);
    assert!(!plain.sample_keys);
    let key = PartitionKey::parse("day=1").unwrap();
    for layout in [Layout::Rows, Layout::Folded] {
        let root = with.path().join(format!("{layout:?}"));
        let mut writer = partitioned_by_day(&root, schema(), options(Commit::Create, layout));
        writer.write(&key, &keyed(&samples(5, 10), 100)).unwrap();
        let snapshot = finished(&root, writer);
        assert!(snapshot.sample_keys);
        assert_eq!(snapshot.partitions[0].digest, plain.partitions[0].digest);
        let verified = crate::verify::verify(
            &root,
            &crate::verify::VerifyOptions::new(1),
            &onefold_base::progress::Silent,
        );
        assert_eq!(verified.unwrap().problems, []);
        let (storage, set) = (Storage::open(&root).unwrap(), &snapshot.partitions[0].files[0]);
        let file = crate::scan::OpenFiles::open(&storage, &snapshot, set).unwrap();
        let keys = file.numbers::<Int64Type>(0, crate::SAMPLE_KEY_COLUMN).unwrap();
        assert_eq!(keys.to_vec(), [100, 101, 102, 103, 104]);
        // A dataset with sample keys keeps them, regardless of the writer's options.
        let append = WriterOptions { sample_keys: false, ..options(Commit::Append, layout) };
        let mut writer = DatasetWriter::create(&root, schema(), append).unwrap();
        let error = writer.write(&key, &samples(6, 10)).unwrap_err().to_string();
        assert!(error.contains("column `sample_key`: it is missing"), "{error}");
    }
    let mut reserved = schema();
    reserved.labels[0] = crate::SAMPLE_KEY_COLUMN.to_owned();
    let error =
        DatasetWriter::create(&with.path().join("x"), reserved, options(Commit::Create, Layout::Rows));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("`sample_key` is reserved for the hashes of the samples' keys")
    );
}

/// Creates a writer of a dataset whose features `item` and `city` each have a vocabulary of the same name.
fn with_vocabularies(
    root: &Path,
    commit: Commit,
    key: &str,
    vocabularies: &[(&str, &Vocabulary)],
) -> DatasetWriter {
    let mut schema = schema();
    schema.groups[0].features[0].vocabulary = Some("city".to_owned());
    schema.groups[1].features[0].vocabulary = Some("item".to_owned());
    let mut writer = partitioned_by_day(root, schema, options(commit));
    writer.write(&PartitionKey::parse(key).unwrap(), &samples(2, 0)).unwrap();
    for (name, vocabulary) in vocabularies {
        writer.add_vocabulary(name, vocabulary).unwrap();
    }
    writer
}

/// Returns the file of the vocabulary `name` in a snapshot.
fn vocabulary_of(snapshot: &Snapshot, name: &str) -> VocabularyFile {
    snapshot.vocabularies[name].clone()
}

#[test]
fn appends_that_extend_no_vocabulary_do_not_conflict() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let (small, large) =
        (Vocabulary::from_counts([(70, 9)], 1), Vocabulary::from_counts([(70, 9), (80, 3)], 1));
    let both = [("city", &small), ("item", &small)];
    let first = with_vocabularies(root, Commit::Create, "day=1", &both).finish().unwrap().snapshot;
    // Writers add all vocabularies with new paths, even vocabularies that they do not extend.
    let extends = with_vocabularies(root, Commit::Append, "day=2", &[("city", &small), ("item", &large)]);
    let later: [(&str, &[(&str, &Vocabulary)]); 3] =
        [("day=3", &both), ("day=4", &[]), ("day=5", &[("city", &large)])];
    let [same, none, other] =
        later.map(|(day, vocabularies)| with_vocabularies(root, Commit::Append, day, vocabularies));
    let second = extends.finish().unwrap().snapshot;
    assert_eq!(vocabulary_of(&second, "city"), vocabulary_of(&first, "city"));
    assert_eq!(vocabulary_of(&second, "item").entries, 2);
    // Commits without new vocabulary entries keep the existing vocabulary files.
    for writer in [same, none] {
        let snapshot = writer.finish().unwrap().snapshot;
        assert_eq!(snapshot.vocabularies, second.vocabularies);
    }
    let last = finished(root, other);
    assert_eq!((keys(&last).len(), last.snapshot), (5, 5));
    assert_eq!(vocabulary_of(&last, "item"), vocabulary_of(&second, "item"));
    assert_eq!(vocabulary_of(&last, "city").sha256, vocabulary_of(&second, "item").sha256);
    // The files of vocabularies that were added unchanged have been removed.
    let files = Storage::open(root).unwrap().list(crate::names::VOCABULARIES, None).unwrap();
    assert_eq!(files.len(), 4, "{files:?}");
}

#[test]
fn of_two_appends_that_extend_one_vocabulary_the_first_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let of = |counts: &[(i64, u64)]| Vocabulary::from_counts(counts.iter().copied(), 1);
    let (small, large, other) = (of(&[(70, 9)]), of(&[(70, 9), (80, 3)]), of(&[(70, 9), (90, 3)]));
    with_vocabularies(root, Commit::Create, "day=1", &[("city", &small), ("item", &small)]).finish().unwrap();
    let [first, same, different] = [("day=2", &large), ("day=3", &large), ("day=4", &other)]
        .map(|(day, items)| with_vocabularies(root, Commit::Append, day, &[("item", items)]));
    first.finish().unwrap();
    let second = finished(root, same);
    assert_eq!((second.snapshot, vocabulary_of(&second, "item").entries), (3, 2));
    let error = different.finish().unwrap_err().to_string();
    assert!(error.contains("another writer extended the vocabulary `item` meanwhile"), "{error}");
    assert_eq!(Snapshot::load(root).unwrap(), second);
}
