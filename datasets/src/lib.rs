//! The format of Onefold's datasets, which every other crate builds on: feature schema, snapshots, layouts,
//! writer and verification.
//!
//! ```text
//! raw logs ──onefold-ingest──▶ dataset ──onefold-ikjt──▶ batches
//!                              (schema, snapshots, writer, storage)
//! ```
//!
//! A **dataset** is a folder of a local disk or an object store: Parquet files in hive-style partition folders, and the
//! snapshots that name them. A [`Snapshot`] describes one committed state; [`DatasetWriter`] is the only code that
//! writes one, and its commit creates the next snapshot. Lists are stored in every row, or only where they change
//! ([`folded`]).
//!
//! Beside this crate, in the same folder: `onefold-raw-logs` (importers and the generator), `onefold-report` (measures
//! a dataset, draws one HTML page), `onefold-terminal` (what the binaries print) and `onefold-allocator` (theirs). This
//! crate depends on none of them: its users inherit no terminal, generator or allocator.
#![forbid(unsafe_code)]

// For files that the tests of other crates include.
#[cfg(test)]
extern crate self as onefold_datasets;

// Checks the processor at the start of every program that handles datasets.
use onefold_processor as _;

pub mod commit;
mod conform;
mod dense;
pub mod digest;
mod error;
pub mod folded;
mod identity;
mod ids;
mod lists;
mod overlap;
mod partition;
mod partition_filter;
pub mod percent;
mod problem;
pub mod process;
pub mod progress;
pub mod scan;
mod schema;
mod snapshot;
pub mod storage;
pub mod units;
pub mod vacuum;
pub mod verify;
pub mod versioned;
pub mod vocabulary;
mod writer;

pub use dense::{DENSE_QUANTILES, DenseStatistics};
pub use error::{Error, Result, suggest};
pub use identity::{
    IDENTITY_SEPARATOR, MOST_BUCKETS, bucket_of_identity, bucket_of_session, default_buckets, session_id,
};
pub use ids::{hash_id, with_decimal};
pub use overlap::overlap;
pub use partition::PartitionKey;
pub use partition_filter::{PartitionChoice, PartitionFilter, PartitionType, PartitionTypes};
pub use problem::Problem;
pub use schema::{
    FeatureGroup, IdEncoding, KeptColumn, KeptKind, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Schema, SparseFeature,
    SparseKind, TIME_COLUMN,
};
pub use snapshot::{
    Bucket, DataFile, FeatureStatistics, Layout, Operation, OperationKind, Order, Partition, PartitionList,
    RowGroup, Sessions, Snapshot, SnapshotEntry, Statistics, history,
};
pub use vocabulary::{
    CountBudget, IdMap, OriginalKind, TextIds, Vocabulary, VocabularyCounter, VocabularyFile,
};
pub use writer::{
    BucketWriter, BucketWriters, ClosingBuckets, Commit, DatasetWriter, Decode, Encoders, WORK,
    WriterOptions, Written, WrittenBucket,
};

/// A random name of 16 hexadecimal digits, for files that no two writers may both write.
pub fn random_name() -> String {
    use std::hash::{BuildHasher, Hasher};
    // The keys of a `RandomState` come from the operating system, and differ with every one that is made.
    let random = || std::hash::RandomState::new().build_hasher().finish();
    format!("{:016x}", random() ^ u64::from(std::process::id()).rotate_left(32))
}
