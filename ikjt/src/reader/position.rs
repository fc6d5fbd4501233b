//! The configuration of the reading order, and the position at which a reader stopped.

use std::fmt::Debug;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Shuffling by sessions: the row groups of a stream are shuffled, and the sessions of neighbouring row groups are
/// mixed. The samples of a session within a row group stay together, so a shuffled batch deduplicates as well as an
/// unshuffled one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shuffle {
    /// The seed. Equal seeds and epochs give equal orders.
    pub seed: u64,
    /// The number of row groups over which a row group's sessions are spread, at least 1. This number of row groups
    /// is in memory at the same time.
    pub row_groups: usize,
    /// The range within which samples are moved.
    #[serde(default)]
    pub within: Within,
}

/// The range within which a shuffle moves samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Within {
    /// The whole epoch.
    #[default]
    #[value(help = "The whole epoch")]
    Epoch,
    /// The partition of the samples. Partitions stay in order, so that time still advances.
    #[value(help = "The partition of the samples, so that time advances")]
    Partition,
}

/// One of several processes that read an epoch together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rank {
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
}

impl Rank {
    /// Returns the streams that the rank reads, of `streams` in total.
    pub(super) fn streams(self, streams: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        (self.rank % streams..streams).step_by(self.world_size)
    }

    /// Returns the rank's share of each of its streams, of `streams` in total.
    pub(super) fn share(self, streams: usize) -> Share {
        let Self { rank, world_size } = self;
        Share {
            index: (rank / streams) as u64,
            ranks: ((world_size - 1 - rank % streams) / streams + 1) as u64,
        }
    }
}

/// The part of a stream's samples that one of several ranks takes, if there are more ranks than streams.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    index: u64,
    /// The number of ranks that read the stream.
    ranks: u64,
}

impl Share {
    /// Returns the rank's part of the `samples` samples that the stream contributes to a step.
    pub(super) fn of(self, samples: u64) -> Range<u64> {
        let start = |index: u64| (u128::from(samples) * u128::from(index) / u128::from(self.ranks)) as u64;
        start(self.index)..start(self.index + 1)
    }
}

impl Default for Rank {
    fn default() -> Self {
        Self { rank: 0, world_size: 1 }
    }
}

/// The treatment of the last samples of an epoch, if streams have different numbers of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// Every sample is delivered. A stream that has ended contributes nothing to the last global batches, so these
    /// are smaller.
    #[default]
    #[value(help = "Every sample is read; the last steps may have fewer samples")]
    Short,
    /// The epoch ends with the stream that can fill the fewest batches, so every global batch is complete. An epoch of
    /// too few samples has no step.
    #[value(help = "Only complete steps are read; the epoch ends with the shortest stream")]
    Drop,
}

/// A position in an epoch at which reading can resume: the next step. Serialize it into a checkpoint.
///
/// It depends only on the samples that are read and on their order. Therefore any number of ranks can resume from it,
/// with other numbers of threads, another deduplication and other features. Their reader must have the position's
/// number of streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// The version of this format, 3.
    pub format_version: u32,
    /// The identity of the dataset.
    pub dataset: String,
    /// The number of the snapshot. Another snapshot may have other files.
    pub snapshot: u64,
    /// The partition filter.
    pub partitions: String,
    /// A description of the `sampling` steps of the preprocessing, which affect the samples of a step; empty if there
    /// are none.
    pub sampling: String,
    /// The shuffle of the epoch.
    pub shuffle: Option<Shuffle>,
    /// The number of streams.
    pub streams: usize,
    /// The number of samples of a step, over all ranks.
    pub global_batch_size: usize,
    /// The treatment of the last samples.
    pub tail: Tail,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The number of completed steps of the epoch, which is the number of the next step.
    pub step: u64,
}

/// The version of [`Position`] that this code writes and reads.
pub(super) const POSITION_VERSION: u32 = 3;

impl Position {
    /// Returns an error for a position of another dataset or order.
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

    /// Returns an error for a position behind the end of its epoch, which has `steps` steps.
    pub(super) fn check_step(&self, steps: u64) -> Result<()> {
        match self.step <= steps {
            true => Ok(()),
            false => {
                Err(wrong(format!("the position is at step {} of an epoch of {steps} steps", self.step)))
            }
        }
    }
}

/// Returns an error for a position with `found` if the reader expects something else.
fn same<T: Debug + PartialEq>(what: &str, found: &T, expected: &T) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(wrong(format!("the position is of {what} {found:?}, this reader's is {expected:?}"))),
    }
}

fn wrong(message: String) -> Error {
    Error::options(
        message,
        "resume with the dataset and the options that the position was taken with, or start an epoch anew",
    )
}
