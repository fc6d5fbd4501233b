//! Tests of the memory limit.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use onefold_base::fault::{Explain, Kind};
use onefold_base::units::parse_bytes;
use onefold_datasets::{
    DatasetWriter, FeatureGroup, Layout, Order, Schema, SparseFeature, SparseKind, WriterOptions,
};
use onefold_ikjt::{Dedupe, Error, Reader, ReaderOptions, Shuffle, Within, Workers};

use crate::dataset::{Log, collect, open_with, samples_of};

const LOG: Log = Log { sessions: 100, session_size: 8.0, repeat: 0.7, seed: 5 };

/// With memory for little more than one row group at a time, the batches are the same, but reading is slower.
#[test]
fn a_small_limit_changes_no_batch() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        for dedupe in [Dedupe::Off, Dedupe::Exact, Dedupe::Window] {
            for shuffle in [None, Some(Shuffle { seed: 1, row_groups: 2, within: Within::Epoch })] {
                let options = ReaderOptions { dedupe, shuffle, ..ReaderOptions::new(60) };
                let read = |memory_limit| {
                    let reader = open_with(directory.path(), options.clone(), (4, memory_limit)).unwrap();
                    collect(reader.batches().unwrap())
                };
                let batches = read(400 << 10);
                let samples: usize = batches.iter().map(|batch| samples_of(batch).len()).sum();
                assert_eq!(samples, written.len());
                assert_eq!(batches, read(1 << 30));
            }
        }
    }
}

#[test]
fn a_row_group_that_does_not_fit_is_named() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let reader = open_with(directory.path(), ReaderOptions::new(60), (2, 4 << 10)).unwrap();
    let error = reader.batches().unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.fault().kind, Kind::Options);
    let text = error.to_string();
    assert!(text.contains("row group 0 of `") && text.contains("4.0 KiB"), "{text}");
    assert!(text.contains("hint: raise the option `memory_limit`"), "{text}");
}

/// Raises the limit to the value that the error names, until the whole dataset can be read.
#[test]
fn the_error_says_which_limit_suffices() {
    for shuffle in [None, Some(Shuffle { seed: 1, row_groups: 3, within: Within::Epoch })] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), Layout::Rows);
        let (mut memory_limit, mut raised) = (4 << 10, 0);
        let read = loop {
            let options = ReaderOptions { shuffle, ..ReaderOptions::new(60) };
            let reader = open_with(directory.path(), options, (2, memory_limit)).unwrap();
            match reader.batches().unwrap().collect::<Result<Vec<_>, Error>>() {
                Ok(batches) => break batches,
                Err(error) => {
                    let text = error.to_string();
                    let (_, asked) = text.split_once("it must be at least ").expect(&text);
                    let asked = parse_bytes(asked.lines().next().unwrap()).unwrap();
                    assert!(asked > memory_limit, "{memory_limit}: {text}");
                    (memory_limit, raised) = (asked, raised + 1);
                }
            }
        };
        assert!((1..=12).contains(&raised), "the limit was raised {raised} times, to {memory_limit}");
        assert_eq!(read.iter().map(|step| step.batch.size()).sum::<usize>(), written.len());
    }
}

/// Drops a reader after some batches. Dropping would hang if a thread did not end.
#[test]
fn a_reader_can_be_dropped_at_any_time() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    for taken in 0..6 {
        for memory_limit in [400 << 10, 1 << 30] {
            let reader = open_with(directory.path(), ReaderOptions::new(30), (2, memory_limit)).unwrap();
            let mut batches = reader.batches().unwrap();
            for _ in 0..taken {
                batches.next().unwrap().unwrap();
            }
            // Half of the readers are dropped after the next batch is ready, the others while it is being made.
            if taken % 2 == 0 {
                assert!(batches.wait(std::time::Duration::from_secs(120)));
            }
            drop(batches);
        }
    }
}

/// One thread reads several epochs in turns. They share the memory, and none waits for another.
#[test]
fn many_epochs_share_one_limit() {
    let directory = tempfile::tempdir().unwrap();
    let written = LOG.write(directory.path(), Layout::Folded);
    let workers = Workers::new(2, 400 << 10).unwrap();
    let readers: Vec<Reader> =
        (0..20).map(|_| Reader::open(directory.path(), ReaderOptions::new(50), &workers).unwrap()).collect();
    let mut epochs: Vec<_> = readers.iter().map(|reader| (reader.batches().unwrap(), 0)).collect();
    let mut open = true;
    while open {
        open = false;
        for (batches, samples) in &mut epochs {
            if let Some(step) = batches.next() {
                *samples += step.unwrap().batch.size();
                open = true;
            }
        }
    }
    assert!(epochs.iter().all(|(_, samples)| *samples == written.len()));
}

/// A window that slides over 30,000 ids takes memory for the stored ids, not for copies of the ids in all rows.
#[test]
fn windows_count_what_they_store() {
    let directory = tempfile::tempdir().unwrap();
    let key = onefold_datasets::PartitionKey::default();
    let schema = Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec![],
        kept: Vec::new(),
        groups: vec![FeatureGroup {
            name: "past".to_owned(),
            deduplicated: true,
            features: vec![SparseFeature::new("history", SparseKind::Sequence)],
        }],
    };
    let (samples, window) = (2_000, 10_000);
    let options = WriterOptions { layout: Layout::Folded, ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(directory.path(), schema, options).unwrap();
    for first in (0..samples).step_by(100) {
        let lists = (first..first + 100).map(|i| Some((i..i + window).map(Some).collect::<Vec<_>>()));
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("session_id", Arc::new(Int64Array::from_iter_values((0..100).map(|_| 7)))),
            ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(first..first + 100))),
            ("clicked", Arc::new(Float32Array::from_iter_values((0..100).map(|_| 1.0)))),
            ("history", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))),
        ];
        writer.write(&key, &RecordBatch::try_from_iter(columns).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let options = |dedupe| ReaderOptions { dedupe, ..ReaderOptions::new(samples as usize) };
    let reader = open_with(directory.path(), options(Dedupe::Window), (1, 24 << 20)).unwrap();
    let batches = collect(reader.batches().unwrap());
    assert_eq!(batches.iter().map(|batch| batch.size()).sum::<usize>(), samples as usize);
    assert_eq!(batches[0].groups()[0].features()[0].row(1_999).last(), Some(&(samples + window - 2)));
    let reader = open_with(directory.path(), options(Dedupe::Exact), (1, 24 << 20)).unwrap();
    let error = reader.batches().unwrap().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("a batch of 2000 samples takes up to"), "{error}");
}
