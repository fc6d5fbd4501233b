//! Tests that kept columns are read as written, and that dense features have the statistics of their values.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, Float32Array, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use onefold_base::progress::Silent;

use super::*;
use crate::scan::OpenFiles;
use crate::snapshot::editing::edit_manifest;
use crate::verify::{ExpectedSamples, VerifyOptions, verify};
use crate::{
    Commit, DenseStatistics, KeptColumn, KeptKind, Layout, Order, PartitionFilter, PartitionType,
    WriterOptions,
};

const SAMPLES: i64 = 5000;

fn schema() -> Schema {
    let kept = |name: &str, kind| KeptColumn { name: name.to_owned(), kind };
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec!["x".to_owned(), "y".to_owned()],
        groups: vec![],
        kept: vec![kept("request", KeptKind::Integer), kept("country", KeptKind::Text)],
    }
}

fn x(sample: i64) -> f32 {
    (sample * sample % 977) as f32 / 7.0 - 40.0
}

fn y(sample: i64) -> f32 {
    if sample % 100 == 0 { f32::NAN } else { (sample % 3) as f32 }
}

/// Returns samples in sessions of 10. Session number n is in bucket n modulo 4 of four buckets.
fn rows(samples: &[i64]) -> RecordBatch {
    let session = |sample: &i64| ((sample / 10 % 4) << 61) | (sample / 10);
    let floats = |of: fn(i64) -> f32| -> ArrayRef {
        Arc::new(Float32Array::from_iter_values(samples.iter().map(|sample| of(*sample))))
    };
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("session_id", Arc::new(Int64Array::from_iter_values(samples.iter().map(session)))),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(samples.iter().copied()))),
        ("clicked", floats(|_| 0.0)),
        ("x", floats(x)),
        ("y", floats(y)),
        (
            "request",
            Arc::new(Int64Array::from_iter(samples.iter().map(|s| (s % 5 > 0).then_some(s * 1_000_003 - 7)))),
        ),
        (
            "country",
            Arc::new(StringArray::from_iter(
                samples.iter().map(|s| (s % 7 > 0).then(|| "ö".repeat((s % 4) as usize))),
            )),
        ),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Writes partitions `day=0` and `day=1` of the samples, ordered by bucket if there are four.
fn write(root: &Path, options: WriterOptions, batch: usize, days: &[i64]) -> Snapshot {
    let buckets = i64::from(options.buckets.number);
    let mut writer = DatasetWriter::create(root, schema(), options).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("day", PartitionType::Integer)]).unwrap();
    for day in days {
        let key = PartitionKey::new(vec![("day".to_owned(), day.to_string())]);
        let mut samples: Vec<i64> = (0..SAMPLES).filter(|sample| sample / 10 % 2 == *day).collect();
        samples.sort_by_key(|sample| sample / 10 % buckets);
        for part in samples.chunks(batch) {
            writer.write(&key, &rows(part)).unwrap();
        }
    }
    writer.finish().unwrap();
    Snapshot::load(root).unwrap()
}

fn options(layout: Layout, threads: usize, buckets: u32) -> WriterOptions {
    let buckets = Buckets::with_own_files(buckets);
    let order = WriterOptions::new(Order::Session);
    WriterOptions { layout, threads, buckets, row_group_bytes: 20_000, file_bytes: 20_000, ..order }
}

fn statistics(root: &Path, filter: &str) -> BTreeMap<String, DenseStatistics> {
    let (storage, snapshot) = (Storage::open(root).unwrap(), Snapshot::load(root).unwrap());
    snapshot.statistics_of(&storage, &PartitionFilter::parse(filter).unwrap()).unwrap().dense
}

/// Computes the statistics from the values of all samples at once.
fn expected(of: fn(i64) -> f32, samples: impl Iterator<Item = i64>) -> DenseStatistics {
    DenseStatistics::of([&samples.map(of).collect::<Vec<f32>>()[..]])
}

#[test]
fn dense_statistics_are_those_of_the_values_on_any_number_of_threads() {
    let mut partitions = Vec::new();
    for (threads, batch) in [(1, 7), (3, 1000), (2, 4096)] {
        let directory = tempfile::tempdir().unwrap();
        let snapshot = write(directory.path(), options(Layout::Folded, threads, 4), batch, &[0, 1]);
        let first = &snapshot.partitions[0];
        assert!(first.files.len() > 2 && first.ranges(snapshot.division()).count() == 2);
        partitions.push(super::tests::content(&snapshot));
        for (filter, day) in [("", None), ("day=0", Some(0)), ("day=1", Some(1))] {
            let samples = || (0..SAMPLES).filter(move |s| day.is_none_or(|day| s / 10 % 2 == day));
            let found = statistics(directory.path(), filter);
            assert_eq!(found["x"], expected(x, samples()));
            assert_eq!(found["y"], expected(y, samples()));
            assert_eq!(found["y"].not_finite(), samples().filter(|s| y(*s).is_nan()).count() as u64);
        }
        let verified = verify(directory.path(), &VerifyOptions::new(2), &Silent).unwrap();
        assert!(verified.is_sound(), "{:?}", verified.problems);
    }
    assert!(partitions.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn appending_and_merging_keep_dense_statistics() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let new = options(Layout::Rows, 2, 4);
    let (whole, parts) = (whole.path(), parts.path());
    write(whole, new.clone(), 999, &[0, 1]);
    write(parts, new.clone(), 999, &[0]);
    write(parts, WriterOptions { commit: Commit::Append, ..new.clone() }, 999, &[1]);
    assert_eq!(statistics(parts, ""), statistics(whole, ""));
    // Merges one bucket of a partition with fewer samples than before.
    let commit = WriterOptions { commit: Commit::Merge, ..new };
    let mut writer = DatasetWriter::create(parts, schema(), commit).unwrap();
    let key = PartitionKey::new(vec![("day".to_owned(), "0".to_owned())]);
    let bucket: Vec<i64> = (0..SAMPLES).filter(|sample| sample / 10 % 4 == 2 && *sample < 2000).collect();
    writer.write(&key, &rows(&bucket)).unwrap();
    writer.finish().unwrap();
    let left = (0..SAMPLES).filter(|s| s / 10 % 4 == 0 || bucket.contains(s));
    assert_eq!(statistics(parts, "day=0")["x"], expected(x, left));
    assert_eq!(statistics(parts, "day=1"), statistics(whole, "day=1"));
}

#[test]
fn verifying_finds_statistics_of_other_values() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), options(Layout::Rows, 1, 1), 999, &[0]);
    edit_manifest(directory.path(), |manifest| {
        let of_row_group = &mut manifest["statistics"][1]["dense"][1];
        let stored: DenseStatistics = serde_json::from_value(of_row_group.take()).unwrap();
        let values =
            (0..stored.finite()).map(|i| (i % 4) as f32).chain((0..stored.not_finite()).map(|_| f32::NAN));
        let other = DenseStatistics::of([&values.collect::<Vec<_>>()[..]]);
        *of_row_group = serde_json::to_value(other).unwrap();
    });
    let verified = verify(directory.path(), &VerifyOptions::new(1), &Silent).unwrap();
    let problems: Vec<String> = verified.problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("column `y`") && problems[0].contains("from 0 to 2"), "{problems:?}");
    assert!(problems[0].contains("from 0 to 3"), "{problems:?}");
}

#[test]
fn kept_columns_come_back_and_are_part_of_the_digest() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let snapshot = write(directory.path(), options(layout, 2, 1), 333, &[0]);
        let storage = Storage::open(directory.path()).unwrap();
        let samples: Vec<i64> = (0..SAMPLES).filter(|sample| sample / 10 % 2 == 0).collect();
        let expected = rows(&samples);
        let mut first = 0;
        for file in &snapshot.partitions[0].files {
            let open = OpenFiles::open(&storage, &snapshot, file).unwrap();
            for group in 0..open.row_groups() {
                for column in &schema().kept {
                    let values = open.kept(group, column).unwrap();
                    assert_eq!(&values, &expected[column.name.as_str()].slice(first, values.len()));
                }
                first += file.row_groups[group].samples as usize;
            }
        }
        assert_eq!(first, samples.len());
        let verified = verify(directory.path(), &VerifyOptions::new(2), &Silent).unwrap();
        assert!(verified.is_sound(), "{:?}", verified.problems);
        assert_eq!(verified.digest, Some(snapshot.partitions[0].digest));

        let same = |batch: &RecordBatch| {
            let mut compared = ExpectedSamples::new(&storage, &snapshot, 1).unwrap();
            compared.add(&snapshot.partitions[0].key, batch).unwrap();
            compared.problems(&PartitionFilter::default()).unwrap().is_empty()
        };
        assert!(same(&expected));
        for (name, changed) in [
            ("request", Arc::new(Int64Array::from(vec![Some(1); samples.len()])) as ArrayRef),
            ("country", Arc::new(StringArray::from(vec![None::<&str>; samples.len()]))),
        ] {
            let index = expected.schema_ref().index_of(name).unwrap();
            let mut columns = expected.columns().to_vec();
            columns[index] = changed;
            let names = expected.schema_ref().fields().iter().map(|field| field.name().clone());
            assert!(!same(&RecordBatch::try_from_iter(names.zip(columns)).unwrap()), "{name}");
        }
    }
}
