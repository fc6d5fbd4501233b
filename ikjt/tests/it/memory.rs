//! The memory limit.

use onefold_datasets::Layout;
use onefold_datasets::units::parse_bytes;
use onefold_ikjt::{Dedupe, Error, Reader, ReaderOptions, Shuffle};

use crate::dataset::{Log, read, samples_of};

const LOG: Log = Log { sessions: 100, session_size: 8.0, repeat: 0.7, seed: 5 };

/// With room for little more than one row group at a time the samples are the same, only slower.
#[test]
fn a_small_limit_changes_no_batch() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        for dedupe in [Dedupe::Off, Dedupe::Exact, Dedupe::Window] {
            for shuffle in [None, Some(Shuffle { seed: 1, row_groups: 2 })] {
                let options = ReaderOptions {
                    dedupe,
                    shuffle,
                    threads: 4,
                    memory_limit: 400 << 10,
                    ..ReaderOptions::new(60)
                };
                let batches = read(directory.path(), options.clone());
                let samples: usize = batches.iter().map(|batch| samples_of(batch).len()).sum();
                assert_eq!(samples, written.len());
                let roomy = read(directory.path(), ReaderOptions { memory_limit: 1 << 30, ..options });
                assert_eq!(batches, roomy);
            }
        }
    }
}

#[test]
fn a_row_group_that_does_not_fit_is_named() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let options = ReaderOptions { memory_limit: 4 << 10, ..ReaderOptions::new(60) };
    let error =
        Reader::open(directory.path(), options).unwrap().batches().unwrap().next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Options { .. }));
    let text = error.to_string();
    assert!(text.contains("row group 0 of `") && text.contains("4.0 KiB"), "{text}");
    assert!(text.contains("hint: raise the option `memory_limit`"), "{text}");
}

/// Whoever raises the limit to what the error asks for gets further each time, and soon through the whole dataset.
#[test]
fn the_error_says_which_limit_suffices() {
    for shuffle in [None, Some(Shuffle { seed: 1, row_groups: 3 })] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), Layout::Rows);
        let (mut memory_limit, mut raised) = (4 << 10, 0);
        let read = loop {
            let options = ReaderOptions { memory_limit, shuffle, threads: 2, ..ReaderOptions::new(60) };
            let batches = Reader::open(directory.path(), options).unwrap().batches().unwrap();
            match batches.collect::<Result<Vec<_>, Error>>() {
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
        assert_eq!(read.iter().map(|batch| batch.size()).sum::<usize>(), written.len());
    }
}

/// A caller who stops taking batches and goes away leaves no thread behind: dropping would hang.
#[test]
fn a_reader_can_be_dropped_at_any_time() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    for taken in 0..6 {
        for memory_limit in [400 << 10, 1 << 30] {
            let options = ReaderOptions { memory_limit, ..ReaderOptions::new(30) };
            let mut batches = Reader::open(directory.path(), options).unwrap().batches().unwrap();
            for _ in 0..taken {
                batches.next().unwrap().unwrap();
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
            drop(batches);
        }
    }
}
