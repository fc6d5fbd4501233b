//! Who reads what, in which order, and where a reader stopped.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Shuffling by sessions: the row groups of a stream are shuffled, and the sessions of every few row groups are mixed
/// with each other. A session's samples of a row group stay together, so a shuffled batch deduplicates as well as an
/// unshuffled one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shuffle {
    /// Same seed and epoch, same order.
    pub seed: u64,
    /// Over how many row groups a row group's sessions are spread, at least 1. So many are in memory together.
    pub row_groups: usize,
    /// How far samples are moved.
    #[serde(default)]
    pub within: Within,
}

/// How far a shuffle moves samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Within {
    /// Anywhere in the epoch.
    #[default]
    Epoch,
    /// Within their partition: partitions come one after the other, so that time still moves on.
    Partition,
}

/// One of several processes that read an epoch together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rank {
    /// This process, from 0.
    pub rank: usize,
    /// All processes.
    pub world_size: usize,
}

impl Default for Rank {
    fn default() -> Self {
        Self { rank: 0, world_size: 1 }
    }
}

/// Treatment of the last samples of an epoch, where streams have different numbers of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// Every sample is delivered: a stream that has ended gives nothing to the last global batches, which are short.
    #[default]
    Short,
    /// The epoch ends with the stream that can fill the fewest batches: every global batch is whole.
    Drop,
}

/// Where to go on: the next step of an epoch. Serialise it into a checkpoint.
///
/// It depends on what is read, and on nothing else: any number of ranks up to the number of streams may go on from it,
/// with other threads, another deduplication and other features.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Version of this format, 3.
    pub format_version: u32,
    /// The identity of the dataset.
    pub dataset: String,
    /// The number of the snapshot: another one has other files.
    pub snapshot: u64,
    /// The partition filter.
    pub partitions: String,
    /// The `sampling` steps of the preprocessing, which decide what a step has; empty if there are none.
    pub sampling: String,
    /// How the epoch is shuffled.
    pub shuffle: Option<Shuffle>,
    /// The number of streams.
    pub streams: usize,
    /// Samples of a step, over all ranks.
    pub global_batch_size: usize,
    /// How the epoch ends.
    pub tail: Tail,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The steps of the epoch that are done: the next one.
    pub step: u64,
}

/// The version of [`Position`] that this code writes and reads.
pub(super) const POSITION_VERSION: u32 = 3;

impl Position {
    /// Refuses a position of another dataset or order.
    pub(super) fn check(&self, expected: &Self) -> Result<()> {
        same("format version", &self.format_version, &expected.format_version)?;
        same("dataset", &self.dataset, &expected.dataset)?;
        same("snapshot", &self.snapshot, &expected.snapshot)?;
        same("partitions", &self.partitions, &expected.partitions)?;
        same("sampling", &self.sampling, &expected.sampling)?;
        same("shuffle", &self.shuffle, &expected.shuffle)?;
        same("streams", &self.streams, &expected.streams)?;
        same("global batch size", &self.global_batch_size, &expected.global_batch_size)?;
        same("tail", &self.tail, &expected.tail)
    }
}

fn same<T: Debug + PartialEq>(what: &str, found: &T, expected: &T) -> Result<()> {
    if found == expected { Ok(()) } else { Err(wrong_position(what, found, expected)) }
}

/// The error for a position that has `found` where this reader has `expected`.
pub(super) fn wrong_position(what: &str, found: &dyn Debug, expected: &dyn Debug) -> Error {
    Error::options(
        format!("the position is of {what} {found:?}, this reader's is {expected:?}"),
        "resume with the dataset and the options that the position was taken with, or start an epoch anew",
    )
}
