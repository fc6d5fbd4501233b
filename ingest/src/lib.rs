//! The batch ETL: raw logs in, a session-clustered dataset out.
//!
//! ```text
//! dataset.toml ─▶ Config ─▶ query (samples) ─▶ sessionize ─▶ sort ─▶ assemble ─▶ DatasetWriter
//!                 config      DataFusion SQL     DataFusion windows     assemble     onefold-datasets
//! ```
//!
//! [`Config`] is `dataset.toml`, checked. [`build()`] runs it on DataFusion, which does the joins, windows,
//! sorts and spilling; what is ours is the plan around the user's query ([`sessionize`]) and the conversion
//! of its rows into a dataset ([`assemble`]). The dataset format and its writer live in `onefold-datasets`,
//! which is the only crate of the workspace that this one needs.
#![forbid(unsafe_code)]

pub mod assemble;
mod build;
mod config;
mod error;
mod probe_lists;
pub mod sessionize;
mod sources;

pub use build::{BuildOptions, BuildSummary, build};
pub use config::{Config, FeatureKind, PartitionBy, SessionConfig};
pub use error::{Error, Result};
