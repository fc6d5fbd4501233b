//! The commands, one a file: arguments checked by clap, and a function that runs them.

pub(crate) mod build;
pub(crate) mod report;
pub(crate) mod shard;
pub(crate) mod verify;
