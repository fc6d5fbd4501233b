//! Compares builds on clusters of local processes with builds in one process.

mod builds;
mod faults;
mod fleet;
mod merge;
mod secure;
mod sources;
mod timelines;
mod vocabularies;
