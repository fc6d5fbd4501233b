//! Tests of collectives between ranks that are threads, and ranks that are processes started from this program.

#[path = "distributed/operations.rs"]
mod operations;
#[path = "distributed/processes.rs"]
mod processes;
