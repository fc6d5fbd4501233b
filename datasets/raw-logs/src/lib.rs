//! Raw logs as a service writes them, in order of arrival. This crate makes them from public data ([`movielens`],
//! [`ebnerd`]) or from a seed ([`generate`]). `onefold-ingest` builds datasets from them.
//!
//! ```text
//! public logs ──import──▶ raw logs: Parquet tables + dataset.toml + train.toml ──onefold-ingest──▶ dataset
//! workload   ──generate─▶
//! ```
#![forbid(unsafe_code)]

pub mod command;
pub mod ebnerd;
mod error;
pub mod generate;
pub mod movielens;
pub mod raw_log;

pub use onefold_datasets::{Error, Result};
