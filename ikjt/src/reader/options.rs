//! How a dataset is read.

use onefold_base::fault::{Text, option, text};
use onefold_datasets::PartitionFilter;
use serde::{Deserialize, Serialize};

use super::checks::Checks;
use super::position::{Rank, Shuffle, Tail};
use crate::preprocess::PreprocessConfig;
use crate::{Error, Result};

/// Whether rows are deduplicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Dedupe {
    /// Every sample carries its lists: plain KJTs.
    #[value(help = "Every sample carries and computes its lists")]
    Off,
    /// Every distinct row of a deduplicated group once per batch: IKJTs.
    #[value(help = "Every distinct row of a feature group once per batch")]
    Exact,
    /// Every distinct row once per batch, as with `Exact`, and rows that overlap share their ids: partial IKJTs. There
    /// are never more rows or ids than with `Exact`. From `folded`, rows share the ids that they share in the file;
    /// from `rows`, each distinct row is compared with the one before it.
    #[value(help = "The same, and rows that overlap share their ids")]
    Window,
}

/// A request to a reader.
///
/// Options alone become a request of one rank, with the checks that are always made:
///
/// ```
/// use onefold_ikjt::{Dedupe, ReadRequest, ReaderOptions};
///
/// let request = ReadRequest::from(ReaderOptions { dedupe: Dedupe::Exact, ..ReaderOptions::new(2048) });
/// assert!(request.checks.verify && request.rank.world_size == 1);
/// ```
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// Options that decide the bytes of batches.
    pub options: ReaderOptions,
    /// Checks while batches are read.
    pub checks: Checks,
    /// Which of the processes that read the epoch together this one is.
    pub rank: Rank,
}

impl From<ReaderOptions> for ReadRequest {
    fn from(options: ReaderOptions) -> Self {
        Self { options, checks: Checks::default(), rank: Rank::default() }
    }
}

impl ReadRequest {
    /// The same with other options.
    pub fn with(self, change: impl FnOnce(ReaderOptions) -> ReaderOptions) -> Self {
        Self { options: change(self.options), ..self }
    }

    /// The number of streams: as many as there are ranks, if none is given.
    pub fn streams(&self) -> usize {
        self.options.streams.unwrap_or(self.rank.world_size)
    }

    /// Refuses numbers that a dataset of `buckets` buckets cannot be read with. But for a rank that does not exist, all
    /// ranks refuse or none.
    pub(super) fn check(&self, buckets: u32) -> Result<()> {
        let wrong = |message: String, hint: Text| Err(Error::options(message, hint));
        let (streams, size) = (self.streams(), self.options.global_batch_size);
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
        if streams < world_size {
            return wrong(
                format!("{streams} streams cannot be divided among {world_size} ranks"),
                text![
                    "give at least as many ",
                    option("streams"),
                    " as there are ranks: each rank reads some"
                ],
            );
        }
        if streams > buckets as usize {
            let hint = format!(
                " and ranks may be at most {buckets}, or build the dataset with at least {streams} `buckets`"
            );
            return wrong(
                format!("the dataset's {buckets} buckets cannot be divided into {streams} streams"),
                text![option("streams"), hint],
            );
        }
        if size < streams {
            return wrong(
                format!("a global batch of {size} samples cannot be divided among {streams} streams"),
                text![
                    option("global_batch_size"),
                    format!(" must be at least {streams}: each stream gives a sample")
                ],
            );
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

/// Options that decide the bytes of batches: jobs with equal options have equal batches, and share them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReaderOptions {
    /// Samples of a step, over all ranks. Every stream gives a part of them, according to the number of its buckets; the
    /// last steps of an epoch may have fewer.
    pub global_batch_size: usize,
    /// Into how many streams the dataset's buckets are divided, at most as many as there are; the ranks share them. Steps
    /// and positions depend on this number and not on that of the ranks. If `None`, as many as there are ranks.
    pub streams: Option<usize>,
    /// Treatment of the last samples.
    pub tail: Tail,
    /// Shuffling by sessions; file order if `None`.
    pub shuffle: Option<Shuffle>,
    /// Whether rows are deduplicated.
    pub dedupe: Dedupe,
    /// The number of the snapshot that is read; the newest one if `None`.
    pub snapshot: Option<u64>,
    /// Which partitions are read.
    pub partitions: PartitionFilter,
    /// Which sparse features are read; all if `None`. Others are neither read nor decoded.
    pub features: Option<Vec<String>>,
    /// A pipeline that every batch goes through.
    pub preprocess: Option<PreprocessConfig>,
    /// Whether batches carry their samples' times.
    pub timestamps: bool,
    /// Which of the dataset's [kept columns](onefold_datasets::Schema::kept) batches carry, in this order; `session_id`
    /// may be among them. Others are not decoded.
    pub kept: Vec<String>,
}

impl ReaderOptions {
    /// Everything in file order, every distinct row once, and rows that overlap share their ids.
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
            kept: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_back_from_json() {
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
