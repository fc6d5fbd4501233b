//! The ranks of a job together: threads, and processes that this program starts as itself.

#[path = "distributed/operations.rs"]
mod operations;
#[path = "distributed/processes.rs"]
mod processes;
