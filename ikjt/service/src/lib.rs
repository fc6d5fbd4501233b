//! The preprocessing service: a master, and any number of workers that make batches for trainers.
//!
//! ```text
//!                 which worker?      ┌────────┐  heartbeat
//!            ┌──────────────────────▶│ master │◀──────────────┐
//!            │                       └────────┘               │
//!       ┌─────────┐  blocks of steps                     ┌─────────┐
//!       │ client  │◀─────────────────────────────────────│ workers │◀── dataset
//!       └─────────┘                                      └─────────┘
//!   onefold_ikjt::service                          onefold_ikjt::Reader
//! ```
//!
//! A worker computes a batch with the same [reader](onefold_ikjt::Reader) that a trainer would use, so all workers
//! give the same bytes for a step of a job. The master tells clients which worker to ask for a block of steps. It
//! stores no state: workers report to it every half second, and the assignment of blocks to workers affects only the
//! speed. The trainer's checkpoint records which steps it has received.
#![forbid(unsafe_code)]

mod autoscale;
mod blocks;
mod command;
mod flight;
mod http;
mod jobs;
mod local;
mod master;
mod messages;
mod placement;
mod rates;
mod schedule;
mod security;
mod sending;
mod server;
mod warnings;
mod worker;

pub use command::PROGRAM;
