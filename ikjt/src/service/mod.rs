//! The client of the preprocessing service: a reader's batches come from its workers. The service itself is
//! `onefold-serve`.
//!
//! A [`Reader`](crate::Reader) that is opened with the URL of a service does what any reader does, but for what needs the
//! dataset's files: the snapshot comes from a worker, and so do batches. Options, pipelines and positions are checked
//! and steps are counted by the same code in this process.

mod address;
mod client;
mod fetch;
mod network;
pub mod protocol;
mod security;

pub use address::ServiceAddress;
pub(crate) use client::Service;
pub(crate) use fetch::{Fetch, block_bytes, wrong_batch};
pub use network::{Failure, Network};
pub use security::{Credentials, Security};
