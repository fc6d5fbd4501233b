//! Onefold's batch ETL on a cluster of machines, on the engine Ballista.
//!
//! ```text
//! onefold-cluster build ──plan──▶ onefold-cluster scheduler ──tasks──▶ onefold-cluster executor, on each machine
//!        ▲                                                               reads the logs, exchanges records,
//!        └──────────── rows that describe the files ◀───────────────────  writes the dataset's files
//! ```
//!
//! The client plans the build as `onefold-ingest build` does, and commits the snapshot. The executors do all work
//! between these steps with the ETL's operators and SQL functions.
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

/// The largest message between processes, in bytes. It is large because a plan names every file that it reads.
const MESSAGE_BYTES: u32 = 256 << 20;
