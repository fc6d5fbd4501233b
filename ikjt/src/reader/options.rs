//! The options of reading a dataset.

use onefold_base::fault::{Text, option, text};
use onefold_datasets::PartitionFilter;
use serde::{Deserialize, Serialize};

use super::checks::Checks;
use super::position::{Rank, Shuffle, Tail};
use crate::error::{Error, Result};
use crate::preprocess::PreprocessConfig;

/// How rows are deduplicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Dedupe {
    /// Every sample stores its own lists: plain KJTs.
    #[value(help = "Every sample stores its own lists")]
    Off,
    /// Every distinct row of a deduplicated group is stored once per batch: IKJTs.
    #[value(help = "Every distinct row of a feature group is stored once per batch")]
    Exact,
    /// Every distinct row is stored once per batch, as with `Exact`, and rows that overlap share their ids: partial
    /// IKJTs. There are never more rows or ids than with `Exact`. From `folded`, rows share the ids that they share
    /// in the file; from `rows`, each distinct row is compared with the previous one.
    #[value(help = "As `exact`, and overlapping rows share their ids")]
    Window,
}

/// A request to a reader.
///
/// Options alone convert to a request of one rank with the default checks:
///
/// ```
/// use onefold_ikjt::{Dedupe, ReadRequest, ReaderOptions};
///
/// let request = ReadRequest::from(ReaderOptions { dedupe: Dedupe::Exact, ..ReaderOptions::new(2048) });
/// assert!(request.checks.verify && request.rank.world_size == 1);
/// ```
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// The options that determine the bytes of batches.
    pub options: ReaderOptions,
    /// The checks that run while batches are read.
    pub checks: Checks,
    /// The rank of this process among the processes that read the epoch together.
    pub rank: Rank,
}

impl From<ReaderOptions> for ReadRequest {
    fn from(options: ReaderOptions) -> Self {
        Self { options, checks: Checks::default(), rank: Rank::default() }
    }
}

impl ReadRequest {
    /// Returns the request with changed options.
    pub fn with(self, change: impl FnOnce(ReaderOptions) -> ReaderOptions) -> Self {
        Self { options: change(self.options), ..self }
    }

    /// Returns the number of streams, which defaults to the number of ranks, as far as the dataset has this number of
    /// buckets.
    pub(super) fn streams(&self, buckets: u32) -> usize {
        self.options.streams.unwrap_or(self.rank.world_size.min(buckets as usize))
    }

    /// Returns an error for numbers with which a dataset of `buckets` buckets cannot be read. All ranks return the
    /// same result, except for a rank that does not exist.
    pub(super) fn check(&self, buckets: u32) -> Result<()> {
        let wrong = |message: String, hint: Text| Err(Error::options(message, hint));
        let (streams, size) = (self.streams(buckets), self.options.global_batch_size);
        let Rank { rank, world_size } = self.rank;
        if size == 0 || i32::try_from(size).is_err() {
            return wrong(
                format!("cannot read batches of {size} samples"),
                "a batch has at least 1 and fewer than 2^31 samples".into(),
            );
        }
        if rank >= world_size {
            return wrong(format!("there is no rank {rank} of {world_size}"), "ranks count from 0".into());
        }
        if streams == 0 || streams > buckets as usize {
            let hint = format!(" must be 1 to {buckets}; build the dataset with more `buckets` to have more");
            return wrong(
                format!("the dataset's {buckets} buckets cannot be divided into {streams} streams"),
                text![option("streams"), hint],
            );
        }
        for (parts, name) in [(streams, "streams"), (world_size, "ranks")] {
            if size < parts {
                return wrong(
                    format!("a global batch of {size} samples cannot be divided among {parts} {name}"),
                    text![
                        option("global_batch_size"),
                        format!(" must be at least {parts}: each gives a sample")
                    ],
                );
            }
        }
        if self.options.shuffle.is_some_and(|shuffle| shuffle.row_groups == 0) {
            return wrong(
                "cannot shuffle over 0 row groups".to_owned(),
                "mix at least one row group's sessions".into(),
            );
        }
        Ok(())
    }
}

/// The options that determine the bytes of batches. Jobs with equal options have equal batches, and can share them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReaderOptions {
    /// The number of samples of a step, over all ranks. Every stream contributes a part of them in proportion to its
    /// number of buckets. The last steps of an epoch may have fewer samples.
    pub global_batch_size: usize,
    /// The number of streams into which the dataset's buckets are divided, at most the number of buckets. The ranks
    /// share the streams. Steps and positions depend on this number, but not on the number of ranks. `None` is the
    /// number of ranks, or of buckets if these are fewer.
    pub streams: Option<usize>,
    /// The treatment of the last samples of an epoch.
    pub tail: Tail,
    /// The shuffle of sessions, or `None` for file order.
    pub shuffle: Option<Shuffle>,
    /// How rows are deduplicated.
    pub dedupe: Dedupe,
    /// The number of the snapshot to read, or `None` for the newest one.
    pub snapshot: Option<u64>,
    /// The partitions to read.
    pub partitions: PartitionFilter,
    /// The sparse features to read, or `None` for all. Other features are neither read nor decoded.
    pub features: Option<Vec<String>>,
    /// The preprocessing of every batch.
    pub preprocess: Option<PreprocessConfig>,
    /// Whether batches include the times of their samples.
    pub timestamps: bool,
    /// The time, in microseconds since 1970, as of which batches have the labels that have a
    /// [delay](onefold_datasets::delay_label): a label that was final only later is 0. `None` is now. Batches then also
    /// include the times of their samples.
    pub labels_as_of: Option<i64>,
    /// The dataset's [kept columns](onefold_datasets::Schema::kept) that batches include, in this order. May contain
    /// `session_id`. Other kept columns are not decoded.
    pub kept: Vec<String>,
}

impl ReaderOptions {
    /// Returns options that read everything in file order, with [`Dedupe::Window`].
    pub fn new(global_batch_size: usize) -> Self {
        Self {
            global_batch_size,
            streams: None,
            tail: Tail::default(),
            shuffle: None,
            dedupe: Dedupe::Window,
            snapshot: None,
            partitions: PartitionFilter::default(),
            features: None,
            preprocess: None,
            timestamps: false,
            labels_as_of: None,
            kept: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsing_restores_serialized_options() {
        let options = ReaderOptions {
            shuffle: Some(super::super::Shuffle {
                seed: u64::MAX,
                row_groups: 4,
                within: Default::default(),
            }),
            partitions: "split=train".parse().unwrap(),
            ..ReaderOptions::new(2048)
        };
        let written = serde_json::to_string(&options).unwrap();
        let read: ReaderOptions = serde_json::from_str(&written).unwrap();
        assert_eq!(format!("{read:?}"), format!("{options:?}"));
    }
}
