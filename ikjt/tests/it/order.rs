//! Tests of the order of samples, of their distribution over ranks, and of resuming.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use onefold_datasets::{Buckets, Layout, Snapshot};
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Batch, Position, Rank, ReadRequest, ReaderOptions, Shuffle, Step, Tail, Within};
use proptest::prelude::*;

use crate::dataset::{Log, Sample, collect, files, open, open_with, read, samples_of, step_digests};

const LOG: Log = Log { sessions: 80, session_size: 8.0, repeat: 0.7, seed: 3 };

fn shuffled(seed: u64, row_groups: usize) -> ReaderOptions {
    let shuffle = Some(Shuffle { seed, row_groups, within: Within::Epoch });
    ReaderOptions { shuffle, ..ReaderOptions::new(32) }
}

fn samples(batches: &[Batch]) -> Vec<Sample> {
    batches.iter().flat_map(samples_of).collect()
}

fn numbers(samples: &[Sample]) -> Vec<i64> {
    samples.iter().map(|sample| sample.dense[1] as i64).collect()
}

fn sorted(mut numbers: Vec<i64>) -> Vec<i64> {
    numbers.sort_unstable();
    numbers
}

#[test]
fn shuffling_keeps_sessions_together_and_loses_nothing() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        let found = samples(&read(directory.path(), shuffled(1, 3)));
        assert_ne!(numbers(&found), numbers(&written));
        let mut ordered = found.clone();
        ordered.sort_by_key(|sample| sample.dense[1] as i64);
        assert_eq!(ordered, written);
        // The order within sessions does not change, and another session follows only at the end of a session (or of
        // a row group that cuts a long session).
        let cuts = numbers(&found).windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
        assert!(
            (LOG.sessions / 2..LOG.sessions + 20).contains(&cuts),
            "{cuts} cuts, {} sessions",
            LOG.sessions
        );
    }
}

#[test]
fn the_seed_and_the_epoch_make_the_order() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let order = |options: ReaderOptions, epoch: u64, threads: usize| {
        let reader = open_with(directory.path(), options, (threads, 1 << 30)).unwrap();
        numbers(&samples(&collect(reader.epoch(epoch).unwrap())))
    };
    let first = order(shuffled(1, 2), 0, 2);
    assert_eq!(first, order(shuffled(1, 2), 0, 3));
    assert_ne!(first, order(shuffled(1, 2), 1, 2));
    assert_ne!(first, order(shuffled(2, 2), 0, 2));
    assert_ne!(first, order(shuffled(1, 5), 0, 2));
    // With the largest window, all row groups are mixed.
    assert_eq!(order(shuffled(1, usize::MAX), 0, 2).len(), first.len());
}

#[test]
fn shuffling_within_partitions_keeps_the_order_of_partitions() {
    let directory = tempfile::tempdir().unwrap();
    let written = LOG.write(directory.path(), Layout::Folded);
    let first = Snapshot::load(directory.path()).unwrap().partitions[0].samples as usize;
    let order = |within| {
        let shuffle = Some(Shuffle { seed: 4, row_groups: 3, within });
        numbers(&samples(&read(directory.path(), ReaderOptions { shuffle, ..ReaderOptions::new(32) })))
    };
    let (anywhere, within) = (order(Within::Epoch), order(Within::Partition));
    assert_ne!(sorted(anywhere[..first].to_vec()), numbers(&written[..first]));
    assert_eq!(sorted(within[..first].to_vec()), numbers(&written[..first]));
    assert_ne!(within[..first], numbers(&written[..first]));
}

/// Returns the steps of every rank in an epoch.
fn steps_by_rank(
    directory: &Path,
    options: &ReaderOptions,
    world_size: usize,
    from: &Position,
) -> Vec<Vec<Step>> {
    let of_rank = |rank| {
        let rank = Rank { rank, world_size };
        let reader = open(directory, ReadRequest { rank, ..options.clone().into() }).unwrap();
        reader.resume(from).unwrap().map(Result::unwrap).collect()
    };
    (0..world_size).map(of_rank).collect()
}

fn orders() -> impl Strategy<Value = Option<Shuffle>> {
    let within = prop_oneof![Just(Within::Epoch), Just(Within::Partition)];
    let shuffle = (any::<u64>(), 1_usize..4, within);
    prop::option::of(shuffle.prop_map(|(seed, row_groups, within)| Shuffle { seed, row_groups, within }))
}

proptest! {
    #![proptest_config(onefold_property::cases(24))]

    /// Reads uneven streams that may share row groups, with any number of ranks, with or without sampling, and
    /// resumes with another number of ranks. All have the same global batches and the same number of steps on all
    /// ranks, and every sample occurs once.
    #[test]
    fn steps_do_not_depend_on_the_ranks(
        (sessions, log_seed) in (20_usize..60, any::<u64>()),
        folded: bool,
        buckets in prop_oneof![
            Just(Buckets::with_own_files(8)),
            Just(Buckets { number: 12, in_range: 4 }),
            Just(Buckets::of_ranges(1)),
        ],
        streams in 1_usize..=8,
        shuffle in orders(),
        drop_tail: bool,
        rate in prop::option::of(0.2_f64..0.9),
        by_label: bool,
        of_stream in 1_usize..12,
        epoch in 0_u64..3,
        resumed in any::<prop::sample::Index>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let layout = if folded { Layout::Folded } else { Layout::Rows };
        let written = Log { sessions, seed: log_seed, ..LOG }.write_divided(directory.path(), layout, buckets);
        let config = rate.map(|rate| {
            let step = match by_label {
                true => format!("label = 'clicked'\nkeep = {{ '0' = {rate:?} }}"),
                false => format!("rate = {rate:?}"),
            };
            let text = format!("format_version = 1\n[[step]]\nop = 'sampling'\n{step}\n");
            PreprocessConfig::parse(Path::new("preprocess.toml"), &text).unwrap()
        });
        let options = ReaderOptions {
            streams: Some(streams),
            tail: if drop_tail { Tail::Drop } else { Tail::Short },
            shuffle,
            preprocess: config.clone(),
            ..ReaderOptions::new((8 * of_stream).min(written.len()))
        };
        let reader = open(directory.path(), options.clone()).unwrap();
        let plan = reader.plan(epoch).unwrap();
        let start = reader.position(epoch);
        let alone = steps_by_rank(directory.path(), &options, 1, &start);
        prop_assert_eq!(alone[0].len() as u64, plan.steps);
        let expected = step_digests(&alone, &reader);
        let whole = options.global_batch_size;
        let found: Vec<i64> = alone[0].iter().flat_map(|step| numbers(&samples_of(&step.batch))).collect();
        prop_assert_eq!(found.len(), sorted(found.clone()).chunk_by(|a, b| a == b).count());
        if drop_tail {
            prop_assert!(alone[0].iter().all(|step| step.batch.size() == whole));
        } else {
            prop_assert_eq!(found.len() as u64, plan.streams.iter().map(|stream| stream.samples).sum::<u64>());
            prop_assert!(config.is_some() || found.len() == written.len());
        }
        for world_size in [2, 3, 5, 8] {
            let steps = steps_by_rank(directory.path(), &options, world_size, &start);
            prop_assert_eq!(&step_digests(&steps, &reader), &expected);
        }
        if !expected.is_empty() {
            let taken = resumed.index(expected.len());
            let saved = serde_json::to_string(&alone[0][taken].position).unwrap();
            let position: Position = serde_json::from_str(&saved).unwrap();
            let rest = steps_by_rank(directory.path(), &options, 4, &position);
            prop_assert_eq!(&step_digests(&rest, &reader)[..], &expected[taken + 1..]);
        }
    }
}

#[test]
fn every_epoch_samples_anew() {
    let directory = tempfile::tempdir().unwrap();
    let written = LOG.write(directory.path(), Layout::Folded);
    let text = "format_version = 1\n[[step]]\nop = 'sampling'\nrate = 0.5\n";
    let preprocess = Some(PreprocessConfig::parse(Path::new("preprocess.toml"), text).unwrap());
    let order = |epoch: u64, shuffle: Option<Shuffle>| {
        let options = ReaderOptions { shuffle, preprocess: preprocess.clone(), ..ReaderOptions::new(20) };
        let batches = collect(open(directory.path(), options).unwrap().epoch(epoch).unwrap());
        let (last, full) = batches.split_last().unwrap();
        assert!(full.iter().all(|batch| batch.size() == 20) && last.size() <= 20);
        assert!(last.weights().unwrap().iter().all(|weight| *weight == 2.0));
        sorted(numbers(&samples(&batches)))
    };
    let first = order(0, None);
    assert!((written.len() / 3..written.len() * 2 / 3).contains(&first.len()));
    assert_eq!(
        first,
        order(0, shuffled(3, 2).shuffle),
        "whether a sample stays does not depend on its place in the order"
    );
    assert_ne!(first, order(1, None));
}

/// Checks that a plan needs no data file, and that its splits contain every row of the epoch once.
#[test]
fn a_plan_needs_no_data_file() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write_buckets(directory.path(), Layout::Folded, 4);
    let options = ReaderOptions { streams: Some(2), ..shuffled(1, 2) };
    let reader = open(directory.path(), options).unwrap();
    let hidden: BTreeMap<_, _> = files(directory.path())
        .into_iter()
        .map(|path| {
            let hidden = path.with_extension("hidden");
            fs_err::rename(&path, &hidden).unwrap();
            (path, hidden)
        })
        .collect();
    let plan = reader.plan(3).unwrap();
    hidden.iter().for_each(|(path, hidden)| fs_err::rename(hidden, path).unwrap());
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<onefold_ikjt::Plan>(&json).unwrap(), plan);
    let splits = || plan.streams.iter().flat_map(|stream| &stream.splits);
    let row_groups: BTreeSet<_> = splits().map(|split| (&split.path, split.row_group)).collect();
    assert_eq!(row_groups.len(), splits().count());
    let read: usize = collect(reader.epoch(3).unwrap()).iter().map(Batch::size).sum();
    assert_eq!(splits().map(|split| split.rows.end - split.rows.start).sum::<u64>(), read as u64);
}

#[test]
fn a_reader_resumes_at_the_exact_next_batch() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        LOG.write_buckets(directory.path(), layout, 2);
        let rank = Rank { rank: 1, world_size: 2 };
        for request in [
            ReadRequest::from(ReaderOptions::new(32)),
            ReadRequest { rank, ..ReaderOptions::new(26).into() },
            shuffled(5, 1).into(),
            shuffled(5, 3).into(),
            ReadRequest { rank, ..shuffled(5, 2).into() },
        ] {
            let reader = open(directory.path(), request.clone()).unwrap();
            let whole: Vec<Step> = reader.epoch(2).unwrap().map(Result::unwrap).collect();
            for taken in 0..whole.len() {
                // Resumes with another reader that has another number of threads.
                let other = open_with(directory.path(), request.clone(), (1, 1 << 30)).unwrap();
                let rest = collect(other.resume(&whole[taken].position).unwrap());
                let expected: Vec<Batch> = whole[taken + 1..].iter().map(|step| step.batch.clone()).collect();
                assert_eq!(rest, expected, "{layout:?}, {taken} batches taken, {request:?}");
            }
        }
    }
}

#[test]
fn waiting_for_a_step_does_not_skip_it() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write_buckets(directory.path(), Layout::Rows, 2);
    let reader = open(directory.path(), ReaderOptions::new(32)).unwrap();
    let expected = collect(reader.epoch(0).unwrap());
    let mut batches = reader.epoch(0).unwrap();
    let mut found = Vec::new();
    loop {
        // `wait` may be called again, including after the step has arrived.
        while !(batches.wait(Duration::from_millis(1)) && batches.wait(Duration::ZERO)) {}
        let Some(step) = batches.next() else { break };
        found.push(step.unwrap().batch);
    }
    assert_eq!(found, expected);
    assert!(batches.wait(Duration::ZERO), "no step is left to wait for");
}

#[test]
fn positions_of_other_options_and_datasets_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write_buckets(directory.path(), Layout::Rows, 2);
    let position = open(directory.path(), shuffled(1, 2)).unwrap().position(0);
    let refused = |options: ReaderOptions, position: &Position| {
        let reader = open(directory.path(), options).unwrap();
        let error = reader.resume(position).unwrap_err().to_string();
        assert!(error.contains("hint: "), "{error}");
        assert_eq!(reader.check(position).unwrap_err().to_string(), error);
        error
    };
    assert!(refused(shuffled(2, 2), &position).contains("shuffle"));
    assert!(refused(ReaderOptions::new(32), &position).contains("shuffle"));
    assert!(refused(ReaderOptions { streams: Some(2), ..shuffled(1, 2) }, &position).contains("streams 1"));
    assert!(
        refused(ReaderOptions { global_batch_size: 30, ..shuffled(1, 2) }, &position)
            .contains("batch size 32")
    );
    assert!(refused(ReaderOptions { tail: Tail::Drop, ..shuffled(1, 2) }, &position).contains("tail Short"));
    let partitions = "split=a".parse().unwrap();
    assert!(refused(ReaderOptions { partitions, ..shuffled(1, 2) }, &position).contains("partitions"));
    let text = "format_version = 1\n[[step]]\nop = 'sampling'\nrate = 0.5\n";
    let preprocess = Some(PreprocessConfig::parse(Path::new("preprocess.toml"), text).unwrap());
    assert!(refused(ReaderOptions { preprocess, ..shuffled(1, 2) }, &position).contains("sampling"));
    let older = Position { snapshot: 7, ..position.clone() };
    assert!(refused(shuffled(1, 2), &older).contains("the position is of snapshot 7"));
    let other = Position { dataset: "another".to_owned(), ..position.clone() };
    assert!(refused(shuffled(1, 2), &other).contains("the position is of dataset \"another\""));
    let newer = Position { format_version: position.format_version + 1, ..position.clone() };
    assert!(refused(shuffled(1, 2), &newer).contains("format version"));
    let beyond = Position { step: 1 << 40, ..position };
    assert!(refused(shuffled(1, 2), &beyond).contains("at step 1099511627776 of an epoch of"));
}
