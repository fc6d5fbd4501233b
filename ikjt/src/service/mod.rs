//! The client of the preprocessing service: a reader receives its batches from the service's workers. The service
//! itself is `onefold-serve`.
//!
//! A [`Reader`](crate::Reader) that is opened with the URL of a service behaves like any other reader, but does not
//! read the dataset's files: the service is its [source](crate::reader::Source) of snapshots and batches. This
//! process checks options, pipelines and positions and counts steps with the same code as other readers.

mod address;
mod certificate;
mod client;
mod fetch;
mod network;
mod pace;
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
