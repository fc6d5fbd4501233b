//! Onefold's dataset format, the base of all other crates: feature schema, snapshots, layouts, writer and
//! verification.
//!
//! ```text
//! raw logs ──onefold-ingest──▶ dataset ──onefold-ikjt──▶ batches
//!                              (schema, snapshots, writer)
//! ```
//!
//! A **dataset** is a folder on a local disk or in an object store. It holds Parquet files in Hive-style
//! partition folders, and the snapshots that list these files. A [`Snapshot`] describes one committed state.
//! Only [`DatasetWriter`] writes datasets; its commit creates the next snapshot. A layout stores the lists of
//! every sample, or only the lists that differ from the previous sample's ([`folded`]).
//!
//! Related crates in the same folder: `onefold-storage` (folders on local disks and in object stores),
//! `onefold-raw-logs` (importers and the generator of logs) and `onefold-report` (measures a dataset and
//! draws one HTML page). Related crates in the folder `common`: `onefold-terminal` (the output of the
//! binaries) and `onefold-allocator` (their allocator). Among these, this crate depends only on
//! `onefold-storage`, so programs that use it need no terminal, generator or allocator.
#![forbid(unsafe_code)]

// `folded/samples.rs` uses this name, because the tests of `onefold-report` include that file.
#[cfg(test)]
extern crate self as onefold_datasets;

// Checks the processor at the start of every program that handles datasets.
use onefold_processor as _;

pub mod compact;
mod conform;
mod dense;
pub mod digest;
mod error;
mod extension;
pub mod folded;
pub mod footer;
pub mod forget;
mod identity;
mod ids;
mod instant;
mod lists;
mod names;
mod overlap;
mod partition;
mod partition_column;
mod partition_filter;
mod problem;
mod rewrite;
pub mod scan;
mod schema;
mod snapshot;
mod users;
pub mod vacuum;
pub mod verify;
pub mod vocabulary;
mod writer;

/// Starts `threads` threads, at least one.
///
/// # Errors
///
/// Returns the operating system's error if they cannot be started.
pub fn thread_pool(threads: usize) -> std::io::Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
    pool.map_err(std::io::Error::other)
}

pub use dense::{DENSE_QUANTILES, DenseStatistics};
pub use error::{Error, Result};
pub use identity::{
    Buckets, IDENTITY_SEPARATOR, MOST_BUCKETS, bucket_of_identity, bucket_of_session, session_id,
};
pub use ids::hash_id;
pub use instant::parse_time;
pub use names::{WORK, work_file_name};
pub use onefold_base::names::suggest;
pub use overlap::{overlap, position_of};
pub use partition::PartitionKey;
pub use partition_column::{PartitionColumn, PartitionType};
pub use partition_filter::{PartitionChoice, PartitionFilter};
pub use problem::Problem;
pub use rewrite::RewriteOptions;
pub use schema::{
    BATCH_COLUMNS, FeatureGroup, IdEncoding, KeptColumn, KeptKind, NO_DELAY, SAMPLE_KEY_COLUMN,
    SESSION_COLUMN, Schema, SparseFeature, SparseKind, TIME_COLUMN, delay_label,
};
pub use snapshot::{
    ColumnChanges, Commit, DataFile, FeatureStatistics, FileSet, Layout, MISSING_DENSE, ManifestEntry,
    Operation, Order, Partition, RowGroup, SampleStatistics, Sessions, Snapshot, SnapshotEntry, Statistics,
    TableVersion, WrittenBucket, drop_features, history, missing_column, rename_feature, unless_removed,
    with_name,
};
pub use vocabulary::{
    CountBudget, IdMap, OriginalKind, TextIds, Vocabulary, VocabularyCounter, VocabularyFile,
};
pub use writer::{
    BucketWriter, BucketWriters, ClosingBuckets, ColumnsWriter, DatasetWriter, Decode, Encoders,
    WriterOptions, Written, check_new_location,
};
