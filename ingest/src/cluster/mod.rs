//! Clustering: sorts samples from the order of a log into contiguous sessions.
//!
//! ```text
//! query ──convert──▶ delta-encode by session ──records──▶ join with sessions, ──▶ cut, decode, encode ──▶ buckets
//!   (lists)            (encode, statistics)               divide by bucket, sort   (WriteExec, by row group)
//!                                                         (the engine, spills)
//! ```
//!
//! A log repeats a user's lists in every sample, and a sort would move, spill and merge every copy. So samples are
//! delta-encoded *before* the sort: each sample is compared with the previous sample of its session in the log and
//! becomes a record of the changes ([`record`]). The engine sorts records. After the sort, the samples of a session
//! are contiguous, and their lists are decoded as slices of shared ids ([`decode`]). A sample is stored whole if
//! its session has not been seen for a long time or if the sample is far out of time order ([`chains`]).
//!
//! The encoder reads every sample once, before anything is written. Therefore it also computes the digests, counts
//! ids for vocabularies, and counts which lists change together ([`statistics`], [`history`]).
//!
//! **Folding** samples means converting them to delta records and **totals** (number, digest and statistics of the
//! samples). A **chain** is a run of records of one session in which each record except the first one refers to the
//! previous one. A **slice** is a part of a timeline that contains the windows of some consecutive samples.

mod bucket_files;
mod by_bucket;
mod chains;
mod clustering;
mod columns;
mod convert;
mod counts;
mod cut;
mod decode;
mod distinct;
mod encode;
mod fold;
mod generations;
mod history;
mod kept;
mod last_lists;
mod merging;
mod options;
mod origin;
mod partitions;
mod record;
mod record_batches;
mod reuse;
mod slices;
mod statistics;
#[cfg(test)]
mod tests;
mod timelines;
mod totals;
mod unfold;
mod write;
mod written_lists;

pub(crate) use self::bucket_files::{Lacks, WriteSpec};
pub(crate) use self::clustering::{Clustering, WrittenSamples};
pub(crate) use self::counts::{ListCounts, NumberCounts};
pub(crate) use self::decode::ListColumn;
pub(crate) use self::encode::SampleTotals;
pub(crate) use self::fold::{DIGEST, FoldExec, FoldSpec, RECORD};
pub(crate) use self::kept::kept_columns;
pub(crate) use self::merging::{LateSamples, MergedQueries, fold_old_samples};
pub(crate) use self::options::{ClusterOptions, list_names};
pub(crate) use self::origin::{
    OLD_SESSION, ORIGIN, Origin, PARTITION, SEQUENCE, float_column, kept_column, list_column,
    partition_column,
};
pub(crate) use self::partitions::Partitions;
pub(crate) use self::statistics::SampleStatistics;
pub(crate) use self::totals::same_hash;
pub(crate) use self::unfold::DecodedSamples;
pub(crate) use self::write::WriteExec;
pub(crate) use self::written_lists::{SentLists, WrittenLists};
