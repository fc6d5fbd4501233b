//! Placement tasks like those of NeuroShard's benchmark.
//!
//! [`pool()`] returns tables with the published statistics of Meta's benchmark data, and [`tasks()`] draws tasks from
//! them. Planning does not need this crate. `onefold-evaluate-plans` compares searches and cost models on the tasks, and
//! `onefold-train-tools profile` measures shards of such tables.
#![forbid(unsafe_code)]

mod pool;
mod tasks;

pub use pool::{POOL_EMPTY_TABLES, POOL_POOLING, POOL_ROWS, POOL_TABLES, PoolTable, pool};
pub use tasks::{TABLES_FILE, TOPOLOGY_FILE, Task, TaskOptions, tasks};
