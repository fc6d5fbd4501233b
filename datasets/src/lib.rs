//! The format of Onefold's datasets, which every other crate builds on: feature schema, snapshots, layouts,
//! writer and verification.
//!
//! ```text
//! raw logs ──onefold-ingest──▶ dataset ──onefold-ikjt──▶ batches
//!                              (schema, snapshots, writer)
//! ```
//!
//! A **dataset** is a folder of a local disk or an object store: Parquet files in hive-style partition folders, and the
//! snapshots that name them. A [`Snapshot`] describes one committed state; [`DatasetWriter`] is the only code that
//! writes one, and its commit creates the next snapshot. Lists are stored in every row, or only where they change
//! ([`folded`]).
//!
//! Beside this crate, in the same folder: `onefold-storage` (folders of local disks and object stores),
//! `onefold-raw-logs` (importers and the generator) and `onefold-report` (measures a dataset, draws one HTML page). In
//! the folder `common`: `onefold-terminal` (the output of the binaries) and `onefold-allocator` (their allocator). Of
//! these, this crate depends on `onefold-storage` alone: its users inherit no terminal, generator or allocator.
#![forbid(unsafe_code)]

// For files that the tests of other crates include.
#[cfg(test)]
extern crate self as onefold_datasets;

// Checks the processor at the start of every program that handles datasets.
use onefold_processor as _;

mod conform;
mod dense;
pub mod digest;
mod error;
mod extension;
pub mod folded;
pub mod footer;
mod identity;
mod ids;
mod lists;
mod names;
mod overlap;
mod partition;
mod partition_column;
mod partition_filter;
mod problem;
pub mod scan;
mod schema;
mod snapshot;
pub mod vacuum;
pub mod verify;
pub mod vocabulary;
mod writer;

pub use dense::{DENSE_QUANTILES, DenseStatistics};
pub use error::{Error, Result};
pub use identity::{
    Buckets, IDENTITY_SEPARATOR, MOST_BUCKETS, bucket_of_identity, bucket_of_session, session_id,
};
pub use ids::hash_id;
pub use names::{WORK, work_file_name};
pub use onefold_base::names::suggest;
pub use overlap::overlap;
pub use partition::PartitionKey;
pub use partition_column::{PartitionColumn, PartitionType};
pub use partition_filter::{PartitionChoice, PartitionFilter};
pub use problem::Problem;
pub use schema::{
    FeatureGroup, IdEncoding, KeptColumn, KeptKind, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Schema, SparseFeature,
    SparseKind, TIME_COLUMN,
};
pub use snapshot::{
    ColumnChanges, Commit, DataFile, FeatureStatistics, FileSet, Layout, MISSING_DENSE, ManifestEntry,
    Operation, Order, Partition, RowGroup, SampleStatistics, Sessions, Snapshot, SnapshotEntry, Statistics,
    WrittenBucket, drop_features, history, missing_column, rename_feature, with_name,
};
pub use vocabulary::{
    CountBudget, IdMap, OriginalKind, TextIds, Vocabulary, VocabularyCounter, VocabularyFile,
};
pub use writer::{
    BucketWriter, BucketWriters, ClosingBuckets, DatasetWriter, Decode, Encoders, WriterOptions, Written,
    check_new_location,
};
