//! Onefold's batch ETL on a cluster of machines, on the engine Ballista.
//!
//! ```text
//! onefold-cluster build ──plan──▶ onefold-cluster scheduler ──tasks──▶ onefold-cluster executor, on each machine
//!        ▲                                                               reads the logs, exchanges records,
//!        └──────────── what was written, row by row ◀────────────────────  writes the dataset's files
//! ```
//!
//! The client plans as `onefold-ingest build` does and commits the snapshot. Everything between is done by the
//! executors, which have the ETL's operators and SQL functions.
#![forbid(unsafe_code)]

mod client;
mod codec;
pub mod command;
mod engine;
mod executor;
mod identity;
mod results;
mod scheduler;
mod tls;

/// The most bytes of a message between processes: a plan names every file that it reads.
const MESSAGE_BYTES: u32 = 256 << 20;
