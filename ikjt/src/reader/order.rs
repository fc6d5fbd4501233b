//! The order of an epoch: which samples it delivers, in which order, and in which step. This module only computes; it
//! does not read files.
//!
//! The buckets of a dataset are divided into streams. A stream has the rows of its buckets in row groups, in an order
//! of its own. A shuffled stream also moves sessions: session `j` of the stream's rows in row group `g` gets the key
//! `p + h(g, j)`, where `p` is the number of samples of the stream before the row group, and `h` is distributed
//! uniformly over the next few row groups. Sorted by their keys, sessions move within a window that slides with the
//! row groups. To find the samples of a step, only the row groups of one window are needed.

use std::ops::Range;

use onefold_datasets::digest::scramble;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::position::{Shuffle, Tail, Within};

/// The increment of SplitMix64, which generates the keys of the sessions.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The rows of a row group that belong to the buckets of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// The index of the file set among the chosen ones.
    pub(super) file: usize,
    /// The number of the row group in the file.
    pub(super) row_group: usize,
    /// The index of its partition.
    pub(super) partition: usize,
    /// The index of the row group's first sample among the chosen samples of the dataset.
    pub(super) first: u64,
    /// The Parquet rows of the part.
    pub(super) rows: Range<u64>,
}

impl Part {
    /// Returns the number of rows.
    pub(super) fn len(&self) -> u64 {
        self.rows.end - self.rows.start
    }
}

/// A part with samples to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) part: Part,
    /// The number of samples of its rows after sampling.
    pub(super) samples: u64,
}

/// The row groups of a stream in the order of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StreamOrder {
    pub(super) items: Vec<Item>,
    /// The number of samples of the stream before each row group, followed by the total, `[items + 1]`.
    pub(super) starts: Vec<u64>,
    mixing: Option<Mixing>,
}

/// The movement of sessions by a shuffle.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mixing {
    /// The seed of the random numbers, independent for every (seed, epoch, stream).
    state: u64,
    /// For each row group, the exclusive upper bound of its sessions' keys, as a number of samples.
    ends: Vec<u64>,
}

impl StreamOrder {
    /// Creates the order of the row groups `items`, which must be in the order of the files. Row groups without
    /// samples are dropped.
    pub(super) fn new(items: Vec<Item>, shuffle: Option<Shuffle>, epoch: u64, stream: usize) -> Self {
        let mut items = items;
        items.retain(|item| item.samples > 0);
        let mut segments = Vec::new();
        if let Some(shuffle) = shuffle {
            let mut generator = generator(shuffle.seed, epoch, stream as u64);
            let mut start = 0;
            for segment in items
                .chunk_by_mut(|a, b| shuffle.within == Within::Epoch || a.part.partition == b.part.partition)
            {
                segment.shuffle(&mut generator);
                segments.push(start..start + segment.len());
                start += segment.len();
            }
        }
        let mut starts = Vec::with_capacity(items.len() + 1);
        starts.push(0);
        for item in &items {
            starts.push(starts[starts.len() - 1] + item.samples);
        }
        let mixing = shuffle.map(|shuffle| {
            let state = [shuffle.seed, epoch, stream as u64]
                .into_iter()
                .fold(0, |state: u64, number| scramble(state.wrapping_add(GOLDEN) ^ number));
            let end = |segment: Range<usize>| {
                let starts = &starts;
                segment
                    .clone()
                    .map(move |i| starts[i.saturating_add(shuffle.row_groups.max(1)).min(segment.end)])
            };
            Mixing { state, ends: segments.into_iter().flat_map(end).collect() }
        });
        Self { items, starts, mixing }
    }

    /// Returns the number of samples of the stream.
    pub(super) fn samples(&self) -> u64 {
        self.starts[self.items.len()]
    }

    pub(super) fn is_shuffled(&self) -> bool {
        self.mixing.is_some()
    }

    /// Returns the row group at which reading must begin so that sample `sample` of the stream can be delivered, and
    /// the number of samples from there that precede it.
    pub(super) fn find(&self, sample: u64) -> (usize, u64) {
        // All samples of the row groups before this one precede `sample`: in a shuffled stream, the keys of their
        // sessions are at most `sample`. The order of the remaining samples does not depend on them.
        let ends = self.mixing.as_ref().map_or(&self.starts[1..], |mixing| &mixing.ends);
        let item = ends.partition_point(|end| *end <= sample);
        (item, sample - self.starts[item].min(sample))
    }

    /// Returns the key of a session in a shuffled stream. `session` is its number in the row group with index `item`
    /// in the order.
    pub(super) fn key(&self, item: usize, session: usize) -> u64 {
        let Some(mixing) = &self.mixing else { return self.starts[item] };
        // A row group has fewer than 2^31 sessions.
        let number = (item as u64) << 32 | session as u64;
        let bits = scramble(mixing.state.wrapping_add(number.wrapping_add(1).wrapping_mul(GOLDEN)));
        let width = mixing.ends[item] - self.starts[item];
        self.starts[item] + ((u128::from(bits) * u128::from(width)) >> 64) as u64
    }
}

/// Returns the range of buckets of one of `streams` streams; there are `buckets` in total. The lengths of the ranges
/// differ by at most 1.
pub(super) fn buckets_of_stream(stream: usize, streams: usize, buckets: u32) -> Range<u32> {
    let start = |stream: usize| (stream as u64 * u64::from(buckets) / streams as u64) as u32;
    start(stream)..start(stream + 1)
}

/// Returns the number of samples that a stream contributes to every step of `size` samples: one sample, and a part of
/// the others in proportion to its number of buckets. Therefore streams end at about the same step, although some
/// have one bucket more.
pub(super) fn samples_of_step(stream: usize, streams: usize, buckets: u32, size: usize) -> u64 {
    let shared = size.saturating_sub(streams) as u64;
    let before = |bucket: u32| u64::from(bucket) * shared / u64::from(buckets.max(1));
    let Range { start, end } = buckets_of_stream(stream, streams, buckets);
    1 + before(end) - before(start)
}

/// Returns the number of steps of an epoch. `streams` has, per stream, its number of samples and its samples per
/// step.
pub(super) fn steps(streams: impl Iterator<Item = (u64, u64)>, tail: Tail) -> u64 {
    match tail {
        Tail::Short => streams.map(|(samples, each)| samples.div_ceil(each)).max(),
        Tail::Drop => streams.map(|(samples, each)| samples / each).min(),
    }
    .unwrap_or(0)
}

/// Creates a random generator that is independent for every (seed, epoch, stream).
fn generator(seed: u64, epoch: u64, stream: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    let mut generator = ChaCha8Rng::from_seed(key);
    generator.set_stream(stream);
    generator
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Generates row groups: the number of samples of each session, and the partition.
    fn row_groups() -> impl Strategy<Value = Vec<(Vec<u64>, usize)>> {
        let row_group = (prop::collection::vec(1_u64..5, 0..5), 0_usize..2);
        prop::collection::vec(row_group, 0..8).prop_map(|mut row_groups| {
            let mut partition = 0;
            for (_, step) in &mut row_groups {
                partition += *step;
                *step = partition;
            }
            row_groups
        })
    }

    fn items(row_groups: &[(Vec<u64>, usize)]) -> Vec<Item> {
        let item = |(i, (sessions, partition)): (usize, &(Vec<u64>, usize))| Item {
            part: Part {
                file: i / 2,
                row_group: i % 2,
                partition: *partition,
                first: 0,
                rows: 0..sessions.iter().sum(),
            },
            samples: sessions.iter().sum(),
        };
        row_groups.iter().enumerate().map(item).collect()
    }

    fn shuffles() -> impl Strategy<Value = Option<Shuffle>> {
        let within = prop_oneof![Just(Within::Epoch), Just(Within::Partition)];
        let shuffle = (any::<u64>(), 1_usize..4, within);
        prop::option::of(shuffle.prop_map(|(seed, row_groups, within)| Shuffle { seed, row_groups, within }))
    }

    /// Returns the sessions from row group `from` of the order on, as (index in the order, number in the row group,
    /// samples), sorted by their keys as the definition says.
    fn sessions(
        order: &StreamOrder,
        row_groups: &[(Vec<u64>, usize)],
        from: usize,
    ) -> Vec<(usize, usize, u64)> {
        let mut sessions = Vec::new();
        for (i, item) in order.items.iter().enumerate().skip(from) {
            let samples = &row_groups[item.part.file * 2 + item.part.row_group].0;
            sessions.extend(samples.iter().enumerate().map(|(j, samples)| (i, j, *samples)));
        }
        sessions.sort_by_key(|&(i, j, _)| (order.key(i, j), i, j));
        sessions
    }

    /// Returns one entry per sample.
    fn expanded(sessions: &[(usize, usize, u64)]) -> Vec<(usize, usize, u64)> {
        sessions.iter().flat_map(|&(i, j, samples)| (0..samples).map(move |sample| (i, j, sample))).collect()
    }

    proptest! {
        #[test]
        fn a_stream_can_be_entered_anywhere(row_groups in row_groups(), shuffle in shuffles(), epoch in 0_u64..3) {
            let order = StreamOrder::new(items(&row_groups), shuffle, epoch, 1);
            let all = expanded(&sessions(&order, &row_groups, 0));
            prop_assert_eq!(all.len() as u64, order.samples());
            for sample in 0..=order.samples() {
                let (item, skip) = order.find(sample);
                let rest = expanded(&sessions(&order, &row_groups, item));
                prop_assert_eq!(&rest[skip as usize..], &all[sample as usize..]);
                if shuffle.is_none() {
                    prop_assert!(order.items.get(item).is_none_or(|item| skip < item.samples));
                }
            }
        }

        #[test]
        fn a_window_slides_over_the_row_groups(row_groups in row_groups(), shuffle in shuffles()) {
            let order = StreamOrder::new(items(&row_groups), shuffle, 0, 0);
            let window = shuffle.map_or(1, |shuffle| shuffle.row_groups);
            let mut mixed = Vec::new();
            for (i, _, _) in sessions(&order, &row_groups, 0) {
                mixed.push(i);
            }
            for (place, i) in mixed.iter().enumerate() {
                let furthest = mixed[..place].iter().max().copied().unwrap_or(0);
                prop_assert!(i + window > furthest, "{mixed:?}");
            }
            if shuffle.is_none_or(|shuffle| shuffle.within == Within::Partition) {
                prop_assert!(mixed.iter().map(|i| order.items[*i].part.partition).is_sorted());
            }
        }

        #[test]
        fn every_sample_is_in_one_step(streams in prop::collection::vec((0_u64..50, 1_u64..9), 1..5)) {
            let short = steps(streams.iter().copied(), Tail::Short);
            prop_assert!(streams.iter().all(|(samples, each)| short * each >= *samples));
            prop_assert!(short == 0 || streams.iter().any(|(samples, each)| (short - 1) * each < *samples));
            let drop = steps(streams.iter().copied(), Tail::Drop);
            prop_assert!(streams.iter().all(|(samples, each)| drop * each <= *samples));
            prop_assert!(streams.iter().any(|(samples, each)| (drop + 1) * each > *samples));
        }

        #[test]
        fn any_number_of_streams_divides_buckets_and_batches(
            (buckets, streams) in (1_u32..300).prop_flat_map(|buckets| (Just(buckets), 1..=buckets as usize)),
            more in 0_usize..5000,
        ) {
            let size = streams + more;
            let ranges: Vec<_> = (0..streams).map(|i| buckets_of_stream(i, streams, buckets)).collect();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!((ranges[0].start, ranges[streams - 1].end), (0, buckets));
            let least = buckets as usize / streams;
            prop_assert!(ranges.iter().all(|range| (least..=least + 1).contains(&range.len())));
            let each: Vec<u64> = (0..streams).map(|i| samples_of_step(i, streams, buckets, size)).collect();
            prop_assert_eq!(each.iter().sum::<u64>(), size as u64);
            for (range, each) in ranges.iter().zip(each) {
                let fair = 1.0 + more as f64 * range.len() as f64 / f64::from(buckets);
                prop_assert!((each as f64 - fair).abs() <= 1.0, "{each} for {fair}");
                let is_whole = (buckets as usize).is_multiple_of(streams) && size.is_multiple_of(streams);
                prop_assert!(!is_whole || each == (size / streams) as u64);
            }
        }
    }

    #[test]
    fn seeds_epochs_and_streams_give_other_orders_and_the_same_ones_again() {
        let row_groups = vec![(vec![1; 20], 0); 40];
        let order = |seed, epoch, stream| {
            let shuffle = Some(Shuffle { seed, row_groups: 4, within: Within::Epoch });
            let order = StreamOrder::new(items(&row_groups), shuffle, epoch, stream);
            let sessions = sessions(&order, &row_groups, 0);
            (order.items, sessions)
        };
        assert_eq!(order(1, 0, 0), order(1, 0, 0));
        for other in [order(2, 0, 0), order(1, 1, 0), order(1, 0, 1)] {
            assert_ne!(order(1, 0, 0).0, other.0);
            assert_ne!(order(1, 0, 0).1, other.1);
        }
    }

    #[test]
    fn sessions_of_a_window_are_well_mixed() {
        let row_groups = vec![(vec![1; 100], 0); 40];
        let shuffle = Some(Shuffle { seed: 7, row_groups: 4, within: Within::Epoch });
        let order = StreamOrder::new(items(&row_groups), shuffle, 0, 0);
        let mixed = sessions(&order, &row_groups, 0);
        // In the middle of the stream, any 100 consecutive sessions come from at least four row groups.
        for stretch in mixed[1000..3000].chunks(100) {
            let from: std::collections::BTreeSet<usize> = stretch.iter().map(|(i, _, _)| *i).collect();
            assert!(from.len() >= 4, "{from:?}");
        }
        let moved: Vec<f64> =
            mixed.iter().enumerate().map(|(place, (i, j, _))| place as f64 - (i * 100 + j) as f64).collect();
        let spread =
            (moved.iter().map(|distance| distance * distance).sum::<f64>() / moved.len() as f64).sqrt();
        assert!((80.0..250.0).contains(&spread), "{spread}");
    }
}
