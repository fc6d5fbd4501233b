//! Helpers for all crates of Onefold that do not depend on the dataset format: sizes and counts as text, progress of
//! long-running work, the time and memory that a process uses, percent-encoding, checks of paths, variable-length
//! integers, versions of configuration files, hints for unknown names, addresses, locks, and errors as values.
#![forbid(unsafe_code)]

pub mod address;
pub mod fault;
pub mod location;
pub mod names;
pub mod percent;
pub mod process;
pub mod progress;
pub mod sync;
pub mod units;
pub mod varint;
pub mod versioned;
