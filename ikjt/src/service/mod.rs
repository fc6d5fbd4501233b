//! The client of the preprocessing service: a reader's batches come from its workers. The service itself is
//! `onefold-serve`.
//!
//! A [`Reader`](crate::Reader) that is opened with the URL of a service does what any reader does, but for what needs the
//! dataset's files: the service is its [source](crate::reader::Source) of snapshots and of batches. Options, pipelines
//! and positions are checked and steps are counted by the same code in this process.

mod address;
mod client;
mod fetch;
mod network;
pub mod protocol;
#[cfg(test)]
mod same_bytes;
mod security;
mod source;
mod waiting;

pub use address::ServiceAddress;
pub use network::{Failure, Network};
pub use security::{Credentials, Security};
pub use source::connect;
