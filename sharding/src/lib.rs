//! Decides on which rank every embedding table lives.
//!
//! ```text
//! train.toml + dataset ──tables──▶ TableFile ─┐
//!                                             ├─ Search (asks a CostModel) ──▶ Plan ──▶ onefold-train
//! a machine            ──topology─▶ Topology ─┘
//! ```
//!
//! What comes in: a [`TableFile`] (`tables.json`: how large every table is and how often it is looked up)
//! and a [`Topology`] (`topology.json`: ranks, their memory, their bandwidths). What goes out: a [`Plan`]
//! (`plan.json`: the exact row and column range of every shard, its rank, and what each rank is predicted
//! to cost). A [`Search`] places shards, a [`CostModel`] prices what stands on a rank; neither does I/O, so
//! both are tested without a machine. [`Plan::check`] is independent of both: it proves a plan valid,
//! whoever made it.
//!
//! [`resolve_tables`] turns the `[embedding]` and `[tables]` sections of a training configuration into one
//! [`TableConfig`] per sparse feature; the trainer and the planner share it, so they agree on the tables.
//!
//! ```
//! use onefold_sharding::{AnalyticCost, GreedyBySize, Search, Table, Topology};
//!
//! let tables = [Table::new("user_id", 1_000_000, 64), Table::new("item_id", 50_000, 64)];
//! let topology = Topology::h100(2, 80 << 30)?;
//! let plan = GreedyBySize.plan(&tables, &topology, &AnalyticCost, 2_048)?;
//! plan.check(&tables, &topology)?;
//! assert_eq!(plan.tables[0].shards[0].rank, 0);
//! assert_eq!(plan.tables[1].shards[0].rank, 1);
//! # Ok::<(), onefold_sharding::Error>(())
//! ```
//!
//! This crate builds on `onefold-datasets` (feature schema, manifest, console); `onefold-trainer` builds on
//! this one.
#![forbid(unsafe_code)]

mod check;
mod cost;
mod error;
mod files;
mod greedy;
mod plan;
mod table;
mod tables;
mod topology;

pub use cost::{AnalyticCost, CostModel, RankCost, ShardLoad};
pub use error::{Error, Result};
pub use files::claim_output;
pub use greedy::{GreedyBySize, Search};
pub use plan::{Plan, RankPrediction, Shard, ShardingType, TablePlan};
pub use table::{DataType, Table, TableFile, TableOptimizer};
pub use tables::{EmbeddingConfig, IdPolicy, Pooling, TableConfig, TableOverride, check_ids, resolve_tables};
pub use topology::{MAX_RANKS, Topology};
