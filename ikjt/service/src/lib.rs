//! The preprocessing service: a master and any number of workers, which make the batches of trainers.
//!
//! ```text
//!                 which worker?      ┌────────┐  I am here
//!            ┌──────────────────────▶│ master │◀──────────────┐
//!            │                       └────────┘               │
//!       ┌─────────┐  blocks of steps                     ┌─────────┐
//!       │ client  │◀─────────────────────────────────────│ workers │◀── dataset
//!       └─────────┘                                      └─────────┘
//!   onefold_ikjt::service                          onefold_ikjt::Reader
//! ```
//!
//! A worker computes a batch with the [reader](onefold_ikjt::Reader) that a trainer would use, so any worker gives the
//! same bytes for a step of a job. The master tells clients which worker to ask for a block of steps. It writes nothing
//! down: workers name themselves every half second, and where a block is computed matters to speed alone. Which steps a
//! trainer has had is in the trainer's checkpoint.
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
mod warnings;
mod worker;

pub use command::PROGRAM;
