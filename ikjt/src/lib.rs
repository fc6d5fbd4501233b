//! Deduplicated batches, and a reader that makes them from a dataset.
//!
//! ```text
//! dataset ─decode─▶ row groups ─cut─▶ B samples ─deduplicate─▶ Batch ─preprocess─▶ Batch ─▶ onefold-trainer
//! (onefold-datasets, reader)  operations          dedupe, window       preprocess
//! ```
//!
//! [`preprocess`] turns a batch into the form that a model needs, once per distinct row.
//!
//! # A batch, from samples to rows
//!
//! Five samples with two features that change together, `user` and `history`, are one [`Group`] with two
//! distinct rows:
//!
//! ```text
//! sample   user  history          inverse       row   user  history
//!   0       [7]  [31, 32]            0           0     [7]  [31, 32]
//!   1       [7]  [31, 32]            0           1     [8]  [40]
//!   2       [8]  [40]         ─▶     1
//!   3       [7]  [31, 32]            0     history: values  [31, 32, 40]
//!   4       [8]  [40]                1              offsets [0, 2]   sizes [2, 1]
//! ```
//!
//! The **inverse index** maps a sample to its row, and row `u` of a [`Feature`] is
//! `values[offsets[u] .. offsets[u] + sizes[u]]`. This is an IKJT. A group without an inverse index is a plain KJT: row
//! `u` is sample `u`. One type represents both, so no conversion is needed.
//!
//! ```
//! use onefold_ikjt::{Feature, Group, deduplicate};
//!
//! let user = Feature::from_rows("user", &[[7], [7], [8], [7], [8]])?;
//! let (a, b) = (vec![31, 32], vec![40]);
//! let history = Feature::from_rows("history", &[&a, &a, &b, &a, &b])?;
//! let group = Group::try_new("user", None, vec![user, history])?;
//! let folded = deduplicate(&group);
//! assert_eq!(folded.rows(), 2);
//! assert_eq!(folded.inverse().unwrap()[..], [0, 0, 1, 0, 1]);
//! assert_eq!(folded.features()[1].values()[..], [31, 32, 40]);
//! assert_eq!(folded.expand(), group);
//! # Ok::<(), onefold_ikjt::Error>(())
//! ```
//!
//! # Operations
//!
//! | task | function or type |
//! |---|---|
//! | deduplicate rows exactly | [`deduplicate`] |
//! | make rows share overlapping values, and reverse it | [`fold_windows`], [`deduplicate`] |
//! | cut and concatenate batches | [`Batch::slice`], [`Batch::concat`] |
//! | measure the savings of deduplication | [`Statistics`] |
//! | check that two ways of reading give the same samples | [`digest`] |
//! | convert batches to Arrow | [`Batch::to_record_batch`] |
//! | copy a batch into one allocation | [`PackedBatch`] |
//!
//! Every operation processes distinct rows, and gives the same result as if it processed the
//! [expanded](Batch::expand) batch.
//!
//! The `try_new` constructors check the invariants, and other code relies on them. Data from files always passes
//! through `try_new`.
//!
//! # Modules
//!
//! Imports between modules go in one direction: `batch` and `hash`, [`preprocess`], [`cache`], [`reader`], the client
//! of the preprocessing service (with the feature `service`), and the functions that open datasets.
#![forbid(unsafe_code)]

mod batch;
pub mod cache;
pub mod command;
mod error;
pub mod hash;
mod open;
pub mod preprocess;
pub mod reader;
#[cfg(feature = "service")]
pub mod service;

pub use batch::{
    Batch, BatchParts, Feature, FeaturePlaces, Figures, GROUP_KEY, Group, GroupPlaces, GroupStatistics,
    KEPT_KEY, KeptPlaces, KeptValues, PackedBatch, Places, SentBatch, Statistics, deduplicate, digest,
    fold_windows,
};
pub use error::{Error, Result};
pub use open::{load_snapshot, load_statistics, stored_at};
pub use reader::{
    Batches, Checks, Dedupe, Horizon, Plan, PlannedStream, Position, Rank, ReadRequest, Reader,
    ReaderOptions, Shuffle, Split, StageFigures, Step, Tail, Within, Workers,
};
