//! The format of Onefold's datasets, which every other crate builds on: feature schema, snapshots, layouts,
//! writer and verification.
//!
//! ```text
//! raw logs ──onefold-ingest──▶ dataset ──onefold-ikjt──▶ batches
//!                              (schema, manifest, writer, commit)
//! ```
//!
//! A **dataset** is a directory: `manifest.json` beside Parquet files in hive-style partition folders.
//! [`Manifest`] describes it, [`DatasetWriter`] is the only code that writes one, and its commit is one
//! atomic rename of the manifest. Its lists stand in every row, or only where they change ([`folded`]).
//!
//! Beside this crate, in the same folder: `onefold-raw-logs` (importers and the generator), `onefold-report` (measures a
//! dataset, draws one HTML page) and `onefold-terminal` (what the binaries print, and their allocator). This crate
//! depends on none of them: its users inherit no terminal, generator or allocator.
#![forbid(unsafe_code)]

// For files that the tests of other crates include.
#[cfg(test)]
extern crate self as onefold_datasets;

pub mod commit;
mod conform;
pub mod digest;
mod error;
pub mod folded;
mod lists;
mod manifest;
mod overlap;
mod partition;
mod problem;
pub mod process;
pub mod progress;
pub mod scan;
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
