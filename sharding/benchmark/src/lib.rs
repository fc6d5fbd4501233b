//! Placement tasks like those of NeuroShard's benchmark, and all searches on the same tasks.
//!
//! [`pool()`] has tables with the published marginals of Meta's benchmark data, [`tasks()`] draws tasks from it, and
//! [`compare()`] runs searches on them. Planning needs none of it: it is for those who judge a search or a cost model,
//! and for `onefold-train-tools profile`, which measures shards of such tables.
#![forbid(unsafe_code)]

mod compare;
mod pool;
mod tasks;

pub use compare::{Comparison, MethodFigures, compare};
pub use pool::{POOL_EMPTY_TABLES, POOL_POOLING, POOL_ROWS, POOL_TABLES, PoolTable, pool};
pub use tasks::{TABLES_FILE, TOPOLOGY_FILE, Task, TaskOptions, tasks};
