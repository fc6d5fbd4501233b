//! Tests that span several crates, with the binaries that a person runs: the whole path, training with and without
//! deduplication, bad input, crashes, and a dataset that an earlier build wrote.

mod bad_input;
mod checkpoints;
mod columns;
mod commands;
mod commits;
mod crash;
mod daily;
mod dense;
mod digest;
mod etl;
mod fleet;
mod follow;
mod forget;
mod full_disk;
mod golden;
mod history;
mod logs;
mod memory;
mod moto;
mod outage;
mod parity;
mod path;
mod planner;
mod predict;
mod ranks;
mod reference;
mod remote;
mod row_groups;
mod samples;
mod service;
mod tied;
mod torchrec;
mod training;
mod transfers;
mod umbrella;
