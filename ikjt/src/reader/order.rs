//! Which samples an epoch delivers, and in which order: file order or shuffled by session blocks, one rank's shard of
//! them, from a position on. Pure computation: nothing here reads a file.

use std::ops::Range;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Shuffling by session blocks: row groups are shuffled, and the sessions of every few row groups with each other. A
/// session's samples stay together, so a shuffled batch deduplicates as well as an unshuffled one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shuffle {
    /// Same seed and epoch, same order.
    pub seed: u64,
    /// How many row groups' sessions are mixed with each other, at least 1. All of them are in memory together, with what is
    /// left of as many before.
    pub row_groups: usize,
}

/// One of several ranks that share an epoch's samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// This rank, from 0.
    pub rank: usize,
    /// All ranks.
    pub world_size: usize,
}

impl Default for Shard {
    fn default() -> Self {
        Self { rank: 0, world_size: 1 }
    }
}

impl Shard {
    /// The shard's part of `samples` samples in the epoch's order. The shards are disjoint, cover everything, and differ
    /// by at most one sample, so that all ranks take the same number of steps but perhaps for one; up to
    /// `world_size - 1` sessions are divided between neighbours.
    pub fn range(self, samples: u64) -> Range<u64> {
        let bound = |rank: usize| {
            let bound = u128::from(samples) * rank as u128 / self.world_size.max(1) as u128;
            u64::try_from(bound).unwrap_or(samples)
        };
        bound(self.rank)..bound(self.rank + 1)
    }
}

/// Where a reader stopped: enough to resume at the exact next batch. Serialise it into a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Version of this format, 2.
    pub format_version: u32,
    /// The identity of the dataset.
    pub dataset: String,
    /// The number of the snapshot: another one has other files.
    pub snapshot: u64,
    /// The partition filter.
    pub partitions: String,
    /// How the epoch is shuffled.
    pub shuffle: Option<Shuffle>,
    /// Whose samples these are.
    pub shard: Shard,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Samples of the shard delivered so far (before any sampling by preprocessing).
    pub samples: u64,
}

/// The version of [`Position`] that this code writes and reads.
pub(super) const POSITION_VERSION: u32 = 2;

impl Position {
    /// Refuses a position of another dataset, order or shard.
    pub(super) fn check(&self, expected: &Self, shard_samples: u64) -> Result<()> {
        let differs = |what: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            Err(Error::Options {
                message: format!("the position is of {what} {found:?}, this reader's is {expected:?}"),
                hint: "resume with the dataset and the options that the position was taken with, or start an epoch anew"
                    .to_owned(),
            })
        };
        if self.format_version != expected.format_version {
            return differs("format version", &self.format_version, &expected.format_version);
        }
        if self.dataset != expected.dataset {
            return differs("dataset", &self.dataset, &expected.dataset);
        }
        if self.snapshot != expected.snapshot {
            return differs("snapshot", &self.snapshot, &expected.snapshot);
        }
        if self.partitions != expected.partitions {
            return differs("partitions", &self.partitions, &expected.partitions);
        }
        if self.shuffle != expected.shuffle {
            return differs("shuffle", &self.shuffle, &expected.shuffle);
        }
        if self.shard != expected.shard {
            return differs("shard", &self.shard, &expected.shard);
        }
        if self.samples > shard_samples {
            return differs("sample", &self.samples, &shard_samples);
        }
        Ok(())
    }
}

/// Rows of one row group that belong to the epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slice {
    /// Index among the chosen files.
    pub(super) file: usize,
    /// Row group in the file.
    pub(super) row_group: usize,
    /// Its rows.
    pub(super) rows: Range<usize>,
}

/// The chosen files: where each starts in file order.
#[derive(Debug)]
pub(super) struct FileStarts(Vec<u64>);

impl FileStarts {
    pub(super) fn new(samples: impl IntoIterator<Item = u64>) -> Self {
        let mut starts = vec![0];
        let mut end = 0;
        for samples in samples {
            end = u64::saturating_add(end, samples);
            starts.push(end);
        }
        Self(starts)
    }

    /// The files that hold samples of `range`.
    pub(super) fn files(&self, range: &Range<u64>) -> Vec<usize> {
        let holds = |file: &usize| {
            let (start, end) = (self.0[*file], self.0[file + 1]);
            start.max(range.start) < end.min(range.end)
        };
        (0..self.0.len() - 1).filter(holds).collect()
    }

    /// The slices of one file, whose row groups have `rows` rows each.
    pub(super) fn slices(&self, file: usize, rows: &[usize], range: &Range<u64>) -> Vec<Slice> {
        let row_groups = rows.iter().enumerate().map(|(row_group, rows)| (file, row_group, *rows));
        cut(self.0[file], row_groups, range)
    }
}

/// The parts of row groups, one after the other from sample `start` on, that lie in `range`.
fn cut(
    start: u64,
    row_groups: impl IntoIterator<Item = (usize, usize, usize)>,
    range: &Range<u64>,
) -> Vec<Slice> {
    let mut slices = Vec::new();
    let mut start = start;
    for (file, row_group, rows) in row_groups {
        let end = start + rows as u64;
        let (first, last) = (start.max(range.start), end.min(range.end));
        if first < last {
            slices.push(Slice { file, row_group, rows: (first - start) as usize..(last - start) as usize });
        }
        start = end;
    }
    slices
}

/// The slices of a shuffled shard, in chunks whose sessions are mixed. `rows[file]` are the file's row groups.
pub(super) fn shuffled(
    rows: &[Vec<usize>],
    shuffle: Shuffle,
    epoch: u64,
    range: &Range<u64>,
) -> Vec<Vec<Slice>> {
    let mut row_groups: Vec<(usize, usize, usize)> = Vec::new();
    for (file, rows) in rows.iter().enumerate() {
        row_groups.extend(rows.iter().enumerate().map(|(row_group, rows)| (file, row_group, *rows)));
    }
    row_groups.shuffle(&mut generator(shuffle.seed, epoch, 0));
    let slices = cut(0, row_groups, range);
    slices.chunks(shuffle.row_groups.max(1)).map(<[_]>::to_vec).collect()
}

/// The blocks of one chunk in their shuffled order; `first` is the chunk's first sample in the shard, which tells chunks
/// apart.
pub(super) fn shuffle_blocks<T>(blocks: &mut [T], shuffle: Shuffle, epoch: u64, first: u64) {
    blocks.shuffle(&mut generator(shuffle.seed, epoch, first + 1));
}

/// Independent random numbers for every (epoch, stream) of a seed.
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

    fn samples(slices: &[Slice]) -> Vec<(usize, usize, usize)> {
        slices.iter().flat_map(|s| s.rows.clone().map(|row| (s.file, s.row_group, row))).collect()
    }

    fn files() -> impl Strategy<Value = Vec<Vec<usize>>> {
        prop::collection::vec(prop::collection::vec(1_usize..7, 1..4), 1..5)
    }

    proptest! {
        #[test]
        fn shards_are_disjoint_and_complete(
            rows in files(), world_size in 1_usize..6, seed: u64, row_groups in 1_usize..4
        ) {
            let total: usize = rows.iter().flatten().sum();
            let starts = FileStarts::new(rows.iter().map(|file| file.iter().sum::<usize>() as u64));
            let (mut ordered, mut mixed) = (Vec::new(), Vec::new());
            for rank in 0..world_size {
                let range = Shard { rank, world_size }.range(total as u64);
                prop_assert!((range.end - range.start).abs_diff((total / world_size) as u64) <= 1);
                for file in starts.files(&range) {
                    ordered.extend(samples(&starts.slices(file, &rows[file], &range)));
                }
                let chunks = shuffled(&rows, Shuffle { seed, row_groups }, 0, &range);
                prop_assert!(chunks.iter().all(|chunk| chunk.len() <= row_groups));
                mixed.extend(samples(&chunks.concat()));
            }
            let all: Vec<_> = (0..rows.len())
                .flat_map(|file| starts.slices(file, &rows[file], &(0..total as u64)))
                .collect();
            prop_assert_eq!(&ordered, &samples(&all));
            mixed.sort_unstable();
            prop_assert_eq!(&mixed, &ordered);
        }

        #[test]
        fn any_start_gives_the_rest(rows in files(), start in 0_u64..40) {
            let total: u64 = rows.iter().flatten().map(|rows| *rows as u64).sum();
            let starts = FileStarts::new(rows.iter().map(|file| file.iter().sum::<usize>() as u64));
            let read = |range: Range<u64>| -> Vec<_> {
                starts.files(&range)
                    .into_iter()
                    .flat_map(|file| samples(&starts.slices(file, &rows[file], &range)))
                    .collect()
            };
            let start = start.min(total);
            prop_assert_eq!(&read(start..total), &read(0..total)[start as usize..]);
        }
    }

    #[test]
    fn seeds_and_epochs_give_other_orders_and_the_same_ones_again() {
        let rows = vec![vec![1; 50]; 2];
        let order = |seed, epoch| shuffled(&rows, Shuffle { seed, row_groups: 4 }, epoch, &(0..100));
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), order(1, 1));
        let blocks = |first| {
            let mut blocks: Vec<usize> = (0..100).collect();
            shuffle_blocks(&mut blocks, Shuffle { seed: 1, row_groups: 4 }, 0, first);
            blocks
        };
        assert_eq!(blocks(0), blocks(0));
        assert_ne!(blocks(0), blocks(8));
    }
}
