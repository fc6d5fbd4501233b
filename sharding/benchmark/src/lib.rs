//! Placement tasks like those of NeuroShard's benchmark, and a comparison of all searches on the same tasks.
//!
//! [`pool()`] returns tables with the published statistics of Meta's benchmark data, [`tasks()`] draws tasks from
//! them, and [`compare()`] runs searches on the tasks. Planning does not need this crate. It serves to evaluate a
//! search or a cost model, and `onefold-train-tools profile` measures shards of such tables.
#![forbid(unsafe_code)]

mod compare;
mod pool;
mod tasks;

pub use compare::{MethodFigures, compare};
pub use pool::{POOL_EMPTY_TABLES, POOL_POOLING, POOL_ROWS, POOL_TABLES, PoolTable, pool};
pub use tasks::{TABLES_FILE, TOPOLOGY_FILE, Task, TaskOptions, tasks};
