//! Tests of datasets of any size that any number of ranks read, with the buckets that a build chooses.

use std::path::Path;

use onefold_datasets::{
    Buckets, DatasetWriter, Layout, PartitionColumn, PartitionKey, PartitionType, Snapshot, WriterOptions,
    bucket_of_session, session_id,
};
use onefold_ikjt::{Position, Rank, ReadRequest, Reader, ReaderOptions, Shuffle, Step, Tail, Within};
use proptest::prelude::*;

use crate::dataset::{Log, Sample, columns, open, options, samples_of, schema, step_digests};

const RANKS: [usize; 8] = [1, 2, 3, 5, 6, 7, 12, 64];
const BUCKETS: usize = 64;

/// A sample as it was written: its partition, the id of its session, and its number.
#[derive(Debug, Clone, Copy)]
struct Written {
    partition: usize,
    session: i64,
    number: i64,
}

/// Writes the first `most` samples of a log to `partitions` partitions, with hashed session ids. Returns the samples
/// in the dataset's order.
fn write(directory: &Path, log: Log, most: usize, partitions: usize, layout: Layout) -> Vec<Written> {
    let buckets = Buckets::of_samples(3000);
    assert_eq!((buckets.number as usize, buckets.ranges()), (BUCKETS, 1));
    let how = WriterOptions { buckets, ..options(layout) };
    let mut writer = DatasetWriter::create(directory, schema(), how).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("part", PartitionType::Integer)]).unwrap();
    let (mut left, mut written) = (most, Vec::new());
    let mut of_partitions: Vec<Vec<(i64, Vec<Sample>)>> = vec![Vec::new(); partitions];
    for (number, mut session) in log.samples().into_iter().enumerate() {
        session.truncate(left);
        left -= session.len();
        of_partitions[number % partitions].push((session_id(&format!("u{number}"), ""), session));
    }
    for (partition, mut sessions) in of_partitions.into_iter().enumerate() {
        sessions.sort_by_key(|(session, _)| bucket_of_session(*session, buckets.number));
        let samples: Vec<(i64, &Sample)> = sessions
            .iter()
            .flat_map(|(session, samples)| samples.iter().map(move |sample| (*session, sample)))
            .collect();
        let key = PartitionKey::new(vec![("part".to_owned(), partition.to_string())]);
        for some in samples.chunks(50) {
            writer.write(&key, &columns(some)).unwrap();
        }
        let as_written =
            |(session, sample): (i64, &Sample)| Written { partition, session, number: number(sample) };
        written.extend(samples.into_iter().map(as_written));
    }
    writer.finish().unwrap();
    written
}

/// Returns the number of a sample in its log.
fn number(sample: &Sample) -> i64 {
    sample.dense[1] as i64
}

fn bucket(sample: &Written) -> usize {
    bucket_of_session(sample.session, BUCKETS as u32) as usize
}

/// Returns the numbers of the samples, `[steps][streams][samples]`, of an epoch in file order, computed from the
/// definition.
fn naive_steps(written: &[Written], streams: usize, size: usize) -> Vec<Vec<Vec<i64>>> {
    let mut steps: Vec<Vec<Vec<i64>>> = Vec::new();
    for stream in 0..streams {
        let (first, end) = (stream * BUCKETS / streams, (stream + 1) * BUCKETS / streams);
        let each = 1 + end * (size - streams) / BUCKETS - first * (size - streams) / BUCKETS;
        let mut samples: Vec<&Written> =
            written.iter().filter(|sample| (first..end).contains(&bucket(sample))).collect();
        samples.sort_by_key(|sample| (sample.partition, bucket(sample)));
        for (step, samples) in samples.chunks(each).enumerate() {
            if steps.len() <= step {
                steps.resize(step + 1, vec![Vec::new(); streams]);
            }
            steps[step][stream] = samples.iter().map(|sample| sample.number).collect();
        }
    }
    steps
}

fn of_rank(directory: &Path, options: &ReaderOptions, rank: Rank) -> Reader {
    open(directory, ReadRequest { rank, ..options.clone().into() }).unwrap()
}

/// Returns the steps of every rank from a position on.
fn steps_by_rank(directory: &Path, options: &ReaderOptions, ranks: usize, from: &Position) -> Vec<Vec<Step>> {
    let read = |rank| {
        let reader = of_rank(directory, options, Rank { rank, world_size: ranks });
        let steps: Vec<Step> = reader.resume(from).unwrap().map(Result::unwrap).collect();
        assert_eq!(
            steps.len() as u64,
            reader.steps(from.epoch).unwrap() - from.step,
            "known before the first"
        );
        steps
    };
    (0..ranks).map(read).collect()
}

/// Reads a dataset with one stream per rank, and compares each batch with the definition.
#[track_caller]
fn check_ranks(directory: &Path, written: &[Written], ranks: usize, size: usize) {
    let size = size.clamp(ranks, written.len().max(ranks));
    let options = ReaderOptions::new(size);
    let from = of_rank(directory, &options, Rank { rank: 0, world_size: ranks }).position(0);
    assert_eq!(from.streams, ranks);
    let expected = naive_steps(written, ranks, size);
    let steps = steps_by_rank(directory, &options, ranks, &from);
    for (rank, steps) in steps.iter().enumerate() {
        let found: Vec<Vec<i64>> =
            steps.iter().map(|step| samples_of(&step.batch).iter().map(number).collect()).collect();
        let expected: Vec<Vec<i64>> = expected.iter().map(|step| step[rank].clone()).collect();
        assert_eq!(found, expected, "rank {rank} of {ranks}, batches of {size}");
    }
    let mut numbers: Vec<i64> = expected.into_iter().flatten().flatten().collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..written.len() as i64).collect::<Vec<_>>());
}

/// Reads a dataset in `options.streams` streams with different numbers of ranks, from the start and from the middle.
fn check_streams(directory: &Path, options: &ReaderOptions, taken: prop::sample::Index) {
    let streams = options.streams.unwrap();
    let reader = of_rank(directory, options, Rank::default());
    let start = reader.position(1);
    let steps = reader.steps(1).unwrap();
    let alone = steps_by_rank(directory, options, 1, &start);
    if steps == 0 {
        assert!(options.tail == Tail::Drop && alone[0].is_empty());
        return;
    }
    let expected = step_digests(&alone, &reader);
    let taken = taken.index(steps as usize);
    let position = &alone[0][taken].position;
    // Ranks share streams if there are more of them than streams.
    for ranks in RANKS.into_iter().filter(|ranks| *ranks <= options.global_batch_size) {
        let of_ranks = (0..ranks).map(|rank| of_rank(directory, options, Rank { rank, world_size: ranks }));
        assert_eq!(of_ranks.map(|reader| reader.samples()).sum::<u64>(), reader.samples());
        let whole = steps_by_rank(directory, options, ranks, &start);
        assert_eq!(step_digests(&whole, &reader), expected, "{streams} streams, {ranks} ranks");
        let rest = steps_by_rank(directory, options, ranks, position);
        assert_eq!(
            step_digests(&rest, &reader)[..],
            expected[taken + 1..],
            "{streams} streams, {ranks} ranks"
        );
    }
}

fn log(sessions: usize, seed: u64) -> Log {
    Log { sessions, session_size: 8.0, repeat: 0.7, seed }
}

#[test]
fn any_number_of_ranks_reads_a_dataset_of_any_size() {
    for (most, partitions) in [(1_usize, 1), (2, 1), (63, 1), (500, 2), (3000, 1), (3000, 3)] {
        for layout in [Layout::Rows, Layout::Folded] {
            let directory = tempfile::tempdir().unwrap();
            let written = write(directory.path(), log(most.div_ceil(4), 7), most, partitions, layout);
            assert!(written.len() <= most);
            for ranks in RANKS {
                for size in [1, 257] {
                    check_ranks(directory.path(), &written, ranks, size);
                }
            }
        }
    }
}

/// Takes a position with the default streams of one or two ranks, and resumes it with more ranks.
#[test]
fn a_position_resumes_with_more_ranks_than_streams() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), log(60, 5), 400, 1, Layout::Folded);
    for (before, after) in [(1, 4), (2, 3), (2, 64)] {
        let options = ReaderOptions::new(96);
        let start = of_rank(directory.path(), &options, Rank { rank: 0, world_size: before }).position(0);
        let whole = steps_by_rank(directory.path(), &options, before, &start);
        let position = &whole[0][0].position;
        let options = ReaderOptions { streams: Some(position.streams), ..options };
        let rest = steps_by_rank(directory.path(), &options, after, position);
        let reader = of_rank(directory.path(), &options, Rank::default());
        assert_eq!(step_digests(&rest, &reader)[..], step_digests(&whole, &reader)[1..]);
        let sizes: Vec<usize> = rest.iter().map(|steps| steps[0].batch.size()).collect();
        assert!(sizes.iter().sum::<usize>() == 96 && !sizes.contains(&0), "{sizes:?}");
    }
}

/// Reads fewer samples than a batch: as one short batch, or none if only complete ones are wanted.
#[test]
fn a_dataset_may_have_fewer_samples_than_a_batch() {
    let directory = tempfile::tempdir().unwrap();
    let written = write(directory.path(), log(20, 8), 100, 1, Layout::Folded);
    for (tail, size, expected) in [
        (Tail::Short, written.len() + 1, vec![written.len()]),
        (Tail::Drop, written.len(), vec![written.len()]),
        (Tail::Drop, written.len() + 1, Vec::new()),
    ] {
        let options = ReaderOptions { tail, ..ReaderOptions::new(size) };
        let reader = open(directory.path(), options).unwrap();
        let sizes: Vec<usize> = reader.batches().unwrap().map(|step| step.unwrap().batch.size()).collect();
        assert_eq!(sizes, expected, "{tail:?}");
        assert_eq!(reader.steps(0).unwrap(), expected.len() as u64);
    }
}

/// More ranks than buckets read a dataset with as many streams as it has buckets.
#[test]
fn there_may_be_more_ranks_than_buckets() {
    let directory = tempfile::tempdir().unwrap();
    let written = write(directory.path(), log(60, 6), 400, 1, Layout::Rows);
    let options = ReaderOptions::new(200);
    let start = of_rank(directory.path(), &options, Rank { rank: 99, world_size: 100 }).position(0);
    assert_eq!(start.streams, BUCKETS);
    let steps = steps_by_rank(directory.path(), &options, 100, &start);
    let sizes = steps.iter().flatten().map(|step| step.batch.size());
    assert_eq!(sizes.sum::<usize>(), written.len());
}

#[test]
fn buckets_share_files() {
    let directory = tempfile::tempdir().unwrap();
    let written = write(directory.path(), log(400, 3), 3000, 1, Layout::Folded);
    let snapshot = Snapshot::load(directory.path()).unwrap();
    let row_groups = snapshot.partitions[0].files.iter().flat_map(|set| &set.row_groups);
    assert!(row_groups.clone().any(|row_group| !row_group.bucket_starts.is_empty()));
    assert_eq!(row_groups.map(|row_group| row_group.samples).sum::<u64>(), written.len() as u64);
    // If a row group belongs to several streams, it is in the plan of each of them.
    let plan = open(directory.path(), ReaderOptions { streams: Some(64), ..ReaderOptions::new(64) });
    let plan = plan.unwrap().plan(0).unwrap();
    let mut splits: Vec<_> = plan.streams.into_iter().flat_map(|stream| stream.splits).collect();
    splits.sort_by_key(|split| (split.path.clone(), split.row_group, split.rows.start));
    let same = |pair: &[onefold_ikjt::Split]| {
        (&pair[0].path, pair[0].row_group) == (&pair[1].path, pair[1].row_group)
    };
    assert!(splits.windows(2).filter(|pair| same(pair)).count() > 10);
    assert!(splits.windows(2).filter(|pair| same(pair)).all(|pair| pair[0].rows.end == pair[1].rows.start));
}

proptest! {
    #![proptest_config(onefold_property::cases(6))]

    #[test]
    fn global_batches_do_not_depend_on_the_ranks(
        (sessions, seed) in (1_usize..120, any::<u64>()),
        partitions in 1_usize..3,
        folded: bool,
        streams in 1_usize..=BUCKETS,
        size in 1_usize..300,
        shuffle in prop::option::of((any::<u64>(), 1_usize..3, any::<bool>())),
        drop_tail: bool,
        taken: prop::sample::Index,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let layout = if folded { Layout::Folded } else { Layout::Rows };
        let written = write(directory.path(), log(sessions, seed), usize::MAX, partitions, layout);
        let shuffle = shuffle.map(|(seed, row_groups, epoch)| Shuffle {
            seed,
            row_groups,
            within: if epoch { Within::Epoch } else { Within::Partition },
        });
        let options = ReaderOptions {
            streams: Some(streams),
            shuffle,
            tail: if drop_tail { Tail::Drop } else { Tail::Short },
            ..ReaderOptions::new(size.clamp(streams, written.len().max(streams)))
        };
        check_streams(directory.path(), &options, taken);
    }
}
