//! Tests of columns that are written beside the files of existing samples: missing features, and new labels.

use std::path::Path;
use std::time::Duration;

use arrow::array::RecordBatch;
use onefold_base::progress::Silent;
use onefold_datasets::vacuum::{VacuumOptions, vacuum};
use onefold_datasets::verify::{Verification, VerifyOptions, verify};
use onefold_datasets::{
    Commit, DatasetWriter, Error, FileSet, Layout, Partition, PartitionFilter, Schema, Snapshot,
    WriterOptions, Written, drop_features, rename_feature,
};
use onefold_ikjt::ReaderOptions;
use onefold_storage::Storage;

use crate::dataset::{
    Log, Sample, columns, in_buckets, open, options, read, samples_of, schema, write_sessions,
};

const LOG: Log = Log { sessions: 40, session_size: 8.0, repeat: 0.7, seed: 21 };

fn names<const N: usize>(names: [&str; N]) -> Vec<String> {
    names.map(str::to_owned).into()
}

fn writer(root: &Path, schema: Schema, layout: Layout) -> Result<DatasetWriter, Error> {
    DatasetWriter::create(root, schema, WriterOptions { commit: Commit::Columns, ..options(layout) })
}

/// Writes the columns `wanted` in the partitions that `filter` selects. `samples` has all samples in the order of the
/// dataset.
fn write_columns(
    root: &Path,
    mut writer: DatasetWriter,
    filter: &str,
    wanted: &[String],
    samples: &[(i64, &Sample)],
) -> Result<Written, Error> {
    let snapshot = Snapshot::load(root).unwrap();
    let chosen = snapshot.select(&PartitionFilter::parse(filter).unwrap()).unwrap();
    let mut start = 0;
    for partition in &snapshot.partitions {
        let end = start + partition.samples as usize;
        if chosen.contains(&partition) {
            write_partition(&mut writer, partition, wanted, &columns(&samples[start..end]))?;
        }
        start = end;
    }
    writer.finish()
}

fn write_partition(
    writer: &mut DatasetWriter,
    partition: &Partition,
    wanted: &[String],
    samples: &RecordBatch,
) -> Result<(), Error> {
    let buckets = writer.options().buckets;
    let mut start = 0;
    for sets in partition.ranges(buckets) {
        let range = buckets.range_of(sets[0].bucket);
        let mut columns = writer.columns(&partition.key, range, sets.to_vec(), wanted)?;
        for row_group in sets.iter().flat_map(|set| &set.row_groups) {
            let rows = row_group.samples as usize;
            // Write two batches, the first with a single sample.
            let parts = [samples.slice(start, 1), samples.slice(start + 1, rows - 1)];
            columns.write_row_group(parts.into())?;
            start += rows;
        }
        let (files, bytes) = writer.add_columns(columns)?;
        assert!(files == sets.len() && bytes > 0);
    }
    Ok(())
}

/// Returns the schema without some features.
fn without(names: &[&str]) -> Schema {
    let mut schema = schema();
    schema.dense.retain(|name| !names.contains(&name.as_str()));
    for group in &mut schema.groups {
        group.features.retain(|feature| !names.contains(&feature.name.as_str()));
    }
    schema.groups.retain(|group| !group.features.is_empty());
    schema
}

/// Writes the samples without some features, in two partitions.
fn write_without(root: &Path, layout: Layout, lacking: &[&str]) {
    let sessions = LOG.samples();
    write_sessions(&sessions, root, options(layout));
    // The samples stay, and the schema loses the features.
    let storage = Storage::open(root).unwrap();
    drop_features(&storage, &lacking.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
}

/// Returns the samples in the order of the dataset.
fn in_order(sessions: &[Vec<Sample>]) -> Vec<(i64, &Sample)> {
    let (first, second) = sessions.split_at(sessions.len() / 2);
    [first, second]
        .into_iter()
        .flat_map(|half| in_buckets(half, options(Layout::Rows).buckets.number))
        .collect()
}

fn sound(root: &Path) -> Verification {
    let verified = verify(root, &VerifyOptions::new(2), &Silent).unwrap();
    assert_eq!(verified.problems, []);
    verified
}

fn samples(root: &Path, options: ReaderOptions) -> Vec<Sample> {
    read(root, options).iter().flat_map(samples_of).collect()
}

fn sets(snapshot: &Snapshot) -> impl Iterator<Item = &FileSet> {
    snapshot.partitions.iter().flat_map(|partition| &partition.files)
}

/// Checks that a dataset with features written beside the others equals a dataset that was written with all features.
#[test]
fn features_are_filled_in_beside_others() {
    const LACKING: [&str; 4] = ["age", "tags", "views", "item"];
    for layout in [Layout::Rows, Layout::Folded] {
        let [filled, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (filled, whole) = (filled.path(), whole.path());
        let sessions = LOG.samples();
        let written = write_sessions(&sessions, whole, options(layout));
        write_without(filled, layout, &LACKING);
        assert_eq!(Snapshot::load(filled).unwrap().schema, without(&LACKING));
        let (samples_in_order, wanted) = (in_order(&sessions), names(LACKING));
        // At first, only one partition gets the features.
        let first = writer(filled, schema(), layout).unwrap();
        write_columns(filled, first, "split=b", &wanted, &samples_in_order).unwrap();
        let half = Snapshot::load(filled).unwrap();
        assert_eq!((&half.schema, half.features_since.len()), (&schema(), 4));
        assert_eq!(half.operation.kind, Commit::Columns);
        sound(filled);
        let views = ReaderOptions { features: Some(names(["views"])), ..ReaderOptions::new(40) };
        let found = samples(filled, views.clone());
        let filled_in = half.partitions[0].samples as usize;
        assert!(found[..filled_in].iter().all(|sample| sample.lists == [Vec::<i64>::new()]));
        assert_eq!(found[filled_in..], samples(whole, views)[filled_in..]);
        let second = writer(filled, schema(), layout).unwrap();
        write_columns(filled, second, "split=a", &wanted, &samples_in_order).unwrap();
        assert_eq!(samples(filled, ReaderOptions::new(40)), written);
        // The files still have the dropped columns, under the names of the new ones.
        let snapshot = Snapshot::load(filled).unwrap();
        assert!(sets(&snapshot).all(|set| set.files.len() == 2 && set.changes.in_files("tags") == "tags~2"));
        let [found, expected] = [sound(filled), sound(whole)];
        assert_eq!((found.digest, found.digests), (expected.digest, expected.digests));
        let of_both = [filled, whole].map(|root| {
            let (storage, snapshot) = (Storage::open(root).unwrap(), Snapshot::load(root).unwrap());
            let statistics = snapshot.statistics_of(&storage, &PartitionFilter::default()).unwrap();
            let digests: Vec<_> = snapshot.partitions.iter().map(|partition| partition.digest).collect();
            (statistics, snapshot.statistics.features, digests)
        });
        assert_eq!(of_both[0], of_both[1]);
        // A vacuum removes no file of the newest snapshot, and features can be altered as before.
        let storage = Storage::open(filled).unwrap();
        let all = VacuumOptions { keep: 1, older_than: Duration::ZERO, dry_run: false };
        vacuum(&storage, &all).unwrap();
        assert_eq!(samples(filled, ReaderOptions::new(40)), written);
        rename_feature(&storage, "tags", "topics").unwrap();
        drop_features(&storage, &names(["age"])).unwrap();
        let topics = ReaderOptions { features: Some(names(["topics"])), ..ReaderOptions::new(40) };
        let tags = ReaderOptions { features: Some(names(["tags"])), ..ReaderOptions::new(40) };
        let lists = |samples: Vec<Sample>| samples.into_iter().map(|sample| sample.lists).collect::<Vec<_>>();
        assert_eq!(lists(samples(filled, topics)), lists(samples(whole, tags)));
        sound(filled);
    }
}

/// Checks that labels can be replaced several times, and that older snapshots keep the older labels.
#[test]
fn labels_are_replaced() {
    for layout in [Layout::Rows, Layout::Folded] {
        let [root, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (root, whole) = (root.path(), whole.path());
        let mut sessions = LOG.samples();
        let original = write_sessions(&sessions, root, options(layout));
        let mut bytes = Vec::new();
        for round in 2..=4 {
            for (number, sample) in sessions.iter_mut().flatten().enumerate() {
                sample.clicked = if number % round == 0 { 1.0 - sample.clicked } else { sample.clicked };
            }
            let labels = writer(root, schema(), layout).unwrap();
            let written = write_columns(root, labels, "", &names(["clicked"]), &in_order(&sessions)).unwrap();
            assert!(written.changed && written.snapshot.snapshot == round as u64);
            bytes.push(written.snapshot.statistics.bytes_on_disk);
        }
        let expected = write_sessions(&sessions, whole, options(layout));
        assert_eq!(samples(root, ReaderOptions::new(40)), expected);
        let snapshot = Snapshot::load(root).unwrap();
        // The snapshot does not keep the file with the previous labels.
        assert!(sets(&snapshot).all(|set| set.files.len() == 2 && set.changes.unused == ["clicked"]));
        assert!(bytes[2].abs_diff(bytes[0]) < bytes[0] / 10, "{bytes:?}");
        assert_eq!(sound(root).digest, sound(whole).digest);
        let first = ReaderOptions { snapshot: Some(1), ..ReaderOptions::new(40) };
        assert_eq!(samples(root, first), original);
        // Writing the same labels again changes nothing.
        let labels = writer(root, schema(), layout).unwrap();
        let written = write_columns(root, labels, "", &names(["clicked"]), &in_order(&sessions)).unwrap();
        assert!(!written.changed && Snapshot::load(root).unwrap().snapshot == 4);
        assert_eq!(sound(root).warnings, []);
    }
}

#[test]
fn columns_of_a_changed_partition_are_not_committed() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let mut sessions = LOG.samples();
    write_sessions(&sessions, root, options(Layout::Folded));
    sessions.iter_mut().flatten().for_each(|sample| sample.clicked = 1.0 - sample.clicked);
    let samples = in_order(&sessions);
    let [first, second, other] = [(); 3].map(|()| writer(root, schema(), Layout::Folded).unwrap());
    let clicked = names(["clicked"]);
    write_columns(root, first, "split=a", &clicked, &samples).unwrap();
    // A writer of another partition succeeds; a writer of the same partition fails.
    write_columns(root, other, "split=b", &clicked, &samples).unwrap();
    let snapshot = Snapshot::load(root).unwrap();
    let error = write_columns(root, second, "split=a", &clicked, &samples).unwrap_err().to_string();
    assert!(error.contains("another writer changed the partition `split=a` meanwhile"), "{error}");
    assert_eq!(Snapshot::load(root).unwrap(), snapshot);
    assert_eq!(sound(root).warnings, []);
    // Columns of only some row groups are refused, too.
    let mut partial = writer(root, schema(), Layout::Folded).unwrap();
    let partition = &snapshot.partitions[0];
    let sets = partition.ranges(snapshot.division()).next().unwrap();
    let columns = partial.columns(&partition.key, 0, sets.to_vec(), &clicked).unwrap();
    let error = partial.add_columns(columns).unwrap_err().to_string();
    assert!(error.contains("were not written"), "{error}");
    drop(partial);
    let nothing = tempfile::tempdir().unwrap();
    let error = writer(nothing.path(), schema(), Layout::Folded).unwrap_err().to_string();
    assert!(error.contains("is not a dataset"), "{error}");
    assert!(open(root, ReaderOptions::new(40)).is_ok());
}
