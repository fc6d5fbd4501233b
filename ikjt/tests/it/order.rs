//! In which order samples come, to which rank, and how reading goes on where it stopped.

use onefold_datasets::Layout;
use onefold_ikjt::{Batch, Position, Reader, ReaderOptions, Shard, Shuffle};

use crate::dataset::{Log, Sample, read, samples_of};

const LOG: Log = Log { sessions: 80, session_size: 8.0, repeat: 0.7, seed: 3 };

fn shuffled(seed: u64, row_groups: usize) -> ReaderOptions {
    ReaderOptions { shuffle: Some(Shuffle { seed, row_groups }), ..ReaderOptions::new(32) }
}

fn samples(batches: &[Batch]) -> Vec<Sample> {
    batches.iter().flat_map(samples_of).collect()
}

fn numbers(samples: &[Sample]) -> Vec<i64> {
    samples.iter().map(|sample| sample.dense[1] as i64).collect()
}

#[test]
fn shuffling_keeps_sessions_together_and_loses_nothing() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        let found = samples(&read(directory.path(), shuffled(1, 3)));
        assert_ne!(numbers(&found), numbers(&written));
        let mut sorted = found.clone();
        sorted.sort_by_key(|sample| sample.dense[1] as i64);
        assert_eq!(sorted, written);
        // Within a session the order stays, and sessions change only where one ends (or a row group cuts a long one).
        let cuts = numbers(&found).windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
        assert!(
            (LOG.sessions / 2..LOG.sessions + 20).contains(&cuts),
            "{cuts} cuts, {} sessions",
            LOG.sessions
        );
        let sessions = found.iter().map(|sample| (sample.lists[4][1], sample.dense[1] as i64 >= 320));
        let mut blocks: Vec<_> = sessions.collect();
        blocks.dedup();
        assert!(blocks.len() <= LOG.sessions + 20);
    }
}

#[test]
fn the_seed_and_the_epoch_make_the_order() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let order = |options: ReaderOptions, epoch: u64| {
        let reader = Reader::open(directory.path(), options).unwrap();
        let batches: Vec<Batch> = reader.epoch(epoch).unwrap().map(Result::unwrap).collect();
        numbers(&samples(&batches))
    };
    let first = order(shuffled(1, 2), 0);
    assert_eq!(first, order(ReaderOptions { threads: 3, ..shuffled(1, 2) }, 0));
    assert_ne!(first, order(shuffled(1, 2), 1));
    assert_ne!(first, order(shuffled(2, 2), 0));
    assert_ne!(first, order(shuffled(1, 5), 0));
    // Everything mixed with everything.
    assert_eq!(order(shuffled(1, usize::MAX), 0).len(), first.len());
}

#[test]
fn ranks_share_the_samples() {
    let directory = tempfile::tempdir().unwrap();
    let written = LOG.write(directory.path(), Layout::Folded);
    for shuffle in [None, Some(Shuffle { seed: 9, row_groups: 2 })] {
        for world_size in [2, 3, 7] {
            let shards: Vec<Vec<i64>> = (0..world_size)
                .map(|rank| {
                    let shard = Shard { rank, world_size };
                    let options = ReaderOptions { shard, shuffle, ..ReaderOptions::new(20) };
                    let reader = Reader::open(directory.path(), options.clone()).unwrap();
                    let found = numbers(&samples(&read(directory.path(), options)));
                    assert_eq!(found.len() as u64, reader.samples());
                    assert!(found.len().abs_diff(written.len() / world_size) <= 1);
                    found
                })
                .collect();
            let mut all = shards.concat();
            if shuffle.is_some() {
                all.sort_unstable();
            }
            assert_eq!(all, numbers(&written));
        }
    }
}

#[test]
fn a_reader_resumes_at_the_exact_next_batch() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        LOG.write(directory.path(), layout);
        for options in [
            ReaderOptions::new(32),
            ReaderOptions { shard: Shard { rank: 1, world_size: 2 }, ..ReaderOptions::new(25) },
            shuffled(5, 1),
            shuffled(5, 3),
            ReaderOptions { shard: Shard { rank: 1, world_size: 3 }, ..shuffled(5, 2) },
        ] {
            let reader = Reader::open(directory.path(), options.clone()).unwrap();
            let whole: Vec<Batch> = reader.epoch(2).unwrap().map(Result::unwrap).collect();
            for taken in 0..=whole.len() {
                let mut batches = reader.epoch(2).unwrap();
                for batch in &whole[..taken] {
                    assert_eq!(&batches.next().unwrap().unwrap(), batch);
                }
                let saved = serde_json::to_string(&batches.position()).unwrap();
                drop(batches);
                let position: Position = serde_json::from_str(&saved).unwrap();
                // Another process, with other threads.
                let other = ReaderOptions { threads: 1, ..options.clone() };
                let other = Reader::open(directory.path(), other).unwrap();
                let rest: Vec<Batch> = other.resume(&position).unwrap().map(Result::unwrap).collect();
                assert_eq!(rest, whole[taken..], "{layout:?}, {taken} batches taken, {options:?}");
            }
        }
    }
}

#[test]
fn positions_of_something_else_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    let reader = Reader::open(directory.path(), shuffled(1, 2)).unwrap();
    let position = reader.batches().unwrap().position();
    let refused = |options: ReaderOptions, position: &Position| {
        let error =
            Reader::open(directory.path(), options).unwrap().resume(position).unwrap_err().to_string();
        assert!(error.contains("hint: "), "{error}");
        error
    };
    assert!(refused(shuffled(2, 2), &position).contains("shuffle"));
    assert!(refused(ReaderOptions::new(32), &position).contains("shuffle"));
    let shard = Shard { rank: 0, world_size: 2 };
    assert!(refused(ReaderOptions { shard, ..shuffled(1, 2) }, &position).contains("shard"));
    let partitions = "split=a".parse().unwrap();
    assert!(refused(ReaderOptions { partitions, ..shuffled(1, 2) }, &position).contains("partitions"));
    let older = Position { snapshot: 7, ..position.clone() };
    assert!(refused(shuffled(1, 2), &older).contains("the position is of snapshot 7"));
    let other = Position { dataset: "another".to_owned(), ..position.clone() };
    assert!(refused(shuffled(1, 2), &other).contains("the position is of dataset \"another\""));
    let newer = Position { format_version: position.format_version + 1, ..position.clone() };
    assert!(refused(shuffled(1, 2), &newer).contains("format version"));
    let beyond = Position { samples: 1 << 40, ..position };
    assert!(refused(shuffled(1, 2), &beyond).contains("sample"));
}
