//! Tests of batches that another process makes; here it is another reader.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use onefold_datasets::{Layout, PartitionFilter, SampleStatistics, Snapshot};
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::reader::{Asked, Deliver, IsGone, Source, Wanted};
use onefold_ikjt::{
    Batch, Checks, Dedupe, Error, Position, Rank, ReadRequest, Reader, ReaderOptions, Result, Shuffle, Step,
    Within, Workers, load_snapshot, load_statistics,
};

use crate::dataset::{Log, open};

const LOG: Log = Log { sessions: 60, session_size: 6.0, repeat: 0.7, seed: 5 };

/// A source that reads a dataset with its own reader.
#[derive(Debug)]
struct Elsewhere {
    directory: PathBuf,
    batches: Gives,
    /// How often samples were counted.
    counted: AtomicUsize,
    /// Whether epochs do not end after their last batch.
    lingers: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Gives {
    Batches,
    /// Batches with twice the requested number of samples.
    Large,
    Nothing,
}

impl Elsewhere {
    fn reader(&self, asked: &Asked) -> Result<Reader> {
        let Asked { options, rank, .. } = asked.clone();
        open(&self.directory, ReadRequest { options, rank, checks: Checks::default() })
    }
}

impl Source for Elsewhere {
    fn location(&self) -> &str {
        self.directory.to_str().unwrap()
    }

    fn snapshot(&self, number: Option<u64>) -> Result<Snapshot> {
        load_snapshot(&self.directory, number)
    }

    fn statistics(&self, number: u64, partitions: &PartitionFilter) -> Result<SampleStatistics> {
        load_statistics(&self.directory, &self.snapshot(Some(number))?, partitions)
    }

    fn sample_counts(&self, asked: &Asked, epoch: u64) -> Result<Vec<Vec<u64>>> {
        self.counted.fetch_add(1, Relaxed);
        Ok(self.reader(asked)?.sample_counts(epoch)?.map(Arc::unwrap_or_clone).unwrap_or_default())
    }

    fn batches(
        &self,
        asked: &Asked,
        wanted: Wanted,
        deliver: &mut Deliver<'_>,
        is_gone: &IsGone<'_>,
    ) -> Result<()> {
        if self.batches == Gives::Nothing {
            while !is_gone() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Ok(());
        }
        let mut asked = asked.clone();
        if self.batches == Gives::Large {
            asked.options.global_batch_size *= 2;
        }
        let reader = self.reader(&asked)?;
        let position = Position { step: wanted.steps.start, ..reader.position(wanted.epoch) };
        let steps = wanted.steps.end - wanted.steps.start;
        for step in reader.resume_packed_every(1, &position)?.take(steps as usize) {
            if deliver(step?.batch).is_none() {
                break;
            }
        }
        while self.lingers.load(Relaxed) && !is_gone() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn elsewhere(directory: &Path, batches: Gives) -> Arc<Elsewhere> {
    let (directory, counted) = (directory.to_owned(), AtomicUsize::new(0));
    Arc::new(Elsewhere { directory, batches, counted, lingers: AtomicBool::new(false) })
}

fn open_source(source: &Arc<Elsewhere>, request: impl Into<ReadRequest>) -> Reader {
    Reader::of_source(Arc::clone(source) as _, request, &Workers::new(2, 1 << 28).unwrap()).unwrap()
}

fn open_elsewhere(directory: &Path, batches: Gives, request: ReadRequest) -> Reader {
    open_source(&elsewhere(directory, batches), request)
}

fn sampling() -> Option<PreprocessConfig> {
    let text = "format_version = 1\n[[step]]\nop = 'sampling'\nlabel = 'clicked'\nkeep = { '0' = 0.5 }\n";
    Some(PreprocessConfig::parse(Path::new("preprocess.toml"), text).unwrap())
}

fn read(reader: &Reader, epoch: u64, step: u64) -> Vec<(Batch, Position)> {
    let steps = reader.resume(&Position { step, ..reader.position(epoch) }).unwrap().map(Result::unwrap);
    steps.map(|Step { batch, position }| (batch, position)).collect()
}

#[test]
fn batches_of_a_source_equal_those_of_a_local_reader() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write_buckets(directory.path(), Layout::Folded, 4);
    let shuffle = Some(Shuffle { seed: 5, row_groups: 2, within: Within::Epoch });
    let preprocess = sampling();
    let rank = Rank { rank: 1, world_size: 2 };
    let four = || ReaderOptions { streams: Some(4), ..ReaderOptions::new(16) };
    for request in [
        ReadRequest::from(four()),
        ReadRequest { rank, ..ReaderOptions { dedupe: Dedupe::Exact, shuffle, ..four() }.into() },
        ReadRequest { rank, ..ReaderOptions { preprocess, ..four() }.into() },
    ] {
        let local = open(directory.path(), request.clone()).unwrap();
        let elsewhere = open_elsewhere(directory.path(), Gives::Batches, request.clone());
        assert_eq!(elsewhere.plan(2).unwrap(), local.plan(2).unwrap());
        for (epoch, step) in [(0, 0), (2, 3), (2, local.steps(2).unwrap())] {
            assert_eq!(read(&elsewhere, epoch, step), read(&local, epoch, step), "{request:?}");
        }
    }
}

/// Checks that the samples of an epoch are counted once, also by several threads and in alternating epochs.
#[test]
fn samples_of_an_epoch_are_counted_once() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let source = elsewhere(directory.path(), Gives::Batches);
    let reader = open_source(&source, ReaderOptions { preprocess: sampling(), ..ReaderOptions::new(16) });
    let (threads, epochs) = (8, 3);
    for epoch in 0..epochs {
        let together = Barrier::new(threads);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    together.wait();
                    reader.steps(epoch).unwrap()
                });
            }
        });
    }
    for epoch in 0..epochs {
        reader.steps(epoch).unwrap();
    }
    assert_eq!(source.counted.load(Relaxed) as u64, epochs);
}

#[test]
fn batches_of_other_requests_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    let error = |gives: Gives, checks: Checks| -> Error {
        let request = ReadRequest { checks, ..ReaderOptions::new(16).into() };
        let mut batches = open_elsewhere(directory.path(), gives, request).batches().unwrap();
        batches.find_map(Result::err).expect("an error")
    };
    let text = error(Gives::Large, Checks::default()).to_string();
    assert!(text.contains("it says that it has 32 samples, of at most 16"), "{text}");
    let table_rows = BTreeMap::from([("city".to_owned(), 4)]);
    let text = error(Gives::Batches, Checks { table_rows, ..Checks::default() }).to_string();
    assert!(text.contains("of a batch, column `city`: id 4 is outside the table's 4 rows"), "{text}");
    let label_ranges = BTreeMap::from([("clicked".to_owned(), 0.0..=0.5)]);
    let text = error(Gives::Batches, Checks { label_ranges, ..Checks::default() }).to_string();
    assert!(text.contains("of a batch, column `clicked`: the label is 1"), "{text}");
}

/// Checks that dropping the batches of a source that sends nothing does not wait for a batch.
#[test]
fn dropping_the_batches_of_a_silent_source_does_not_wait() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    let reader = open_elsewhere(directory.path(), Gives::Nothing, ReaderOptions::new(16).into());
    drop(reader.batches().unwrap());
}

/// Checks that a caller can wait for the end of an epoch in slices, and that ranks, which wait together, do not wait
/// for it.
#[test]
fn the_end_of_a_source_is_waited_for_in_slices() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    let source = elsewhere(directory.path(), Gives::Batches);
    source.lingers.store(true, Relaxed);
    let mut batches = open_source(&source, ReaderOptions::new(16)).batches().unwrap();
    for _ in 0..batches.steps() {
        batches.next().unwrap().unwrap();
    }
    assert!(!batches.wait_for_next(Duration::from_millis(1)));
    assert!(batches.wait(Duration::ZERO));
    source.lingers.store(false, Relaxed);
    while !batches.wait_for_next(Duration::from_millis(1)) {}
    assert!(batches.next().is_none() && batches.wait_for_next(Duration::ZERO));
}
