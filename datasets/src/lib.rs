//! What every other crate of Onefold agrees on: the feature schema, the dataset on disk, and the raw
//! logs that datasets are built from.
//!
//! ```text
//! public logs ──import──▶ raw logs + dataset.toml ──onefold-ingest──▶ dataset ──onefold-ikjt──▶ batches
//! workload   ──generate─▶    (raw_log, generate,                     (schema, manifest,
//!                             movielens, ebnerd)                       writer, commit)
//! ```
//!
//! A **dataset** is a directory: `manifest.json` beside Parquet files in hive-style partition folders.
//! [`Manifest`] describes it, [`DatasetWriter`] is the only code that writes one, and its commit is one
//! atomic rename of the manifest. Its lists stand in every row, or only where they change ([`folded`]).
//! **Raw logs** are what a service would have logged, in arrival order; this crate makes them, from public
//! data ([`movielens`], [`ebnerd`]) or from a seed ([`generate`]).
//!
//! Nothing here depends on another crate of the workspace; `onefold-ingest`, `onefold-ikjt` and
//! `onefold-sharding` build on it.
#![forbid(unsafe_code)]

pub mod allocator;
pub mod commit;
mod conform;
pub mod console;
pub mod digest;
pub mod ebnerd;
mod error;
pub mod folded;
pub mod generate;
mod lists;
mod manifest;
pub mod movielens;
mod overlap;
mod partition;
mod problem;
pub mod raw_log;
pub mod report;
mod scan;
mod schema;
pub mod units;
pub mod verify;
pub mod versioned;
pub mod vocabulary;
mod writer;

pub use error::{Error, Result, suggest};
pub use manifest::{
    DataFile, FeatureStatistics, Layout, MANIFEST_FILE, Manifest, Order, Partition, Statistics,
};
pub use overlap::overlap;
pub use partition::{PartitionFilter, PartitionKey};
pub use problem::Problem;
pub use schema::{FeatureGroup, SESSION_COLUMN, Schema, SparseFeature, SparseKind, TIME_COLUMN};
pub use vocabulary::{CountBudget, Vocabulary, VocabularyCounter, VocabularyFile};
pub use writer::{Commit, DatasetWriter, WriterOptions};
