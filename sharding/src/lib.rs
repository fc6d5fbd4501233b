//! Decides which rank holds each embedding table, or each part of it.
//!
//! ```text
//! train.toml + dataset ──tables──▶ TableFile ─┐
//!                                             ├─ Search (asks a CostModel) ──▶ Plan ──▶ onefold-train
//! a machine            ──topology─▶ Topology ─┘
//! ```
//!
//! The inputs are a [`TableFile`] (`tables.json`: the size of every table and how often it is looked up) and a
//! [`Topology`] (`topology.json`: the ranks, their memory and bandwidths). The output is a [`Plan`] (`plan.json`: the
//! row and column range and the rank of every shard, and the predicted cost of each rank). A [`Search`] places
//! shards, and a [`CostModel`] predicts the cost of the shards on a rank. Neither of them does I/O, so both are
//! tested without a machine. [`Plan::check`] is independent of both: it proves that a plan is valid, whichever search
//! made it.
//!
//! `onefold-train-config` converts the `[embedding]` and `[tables]` sections of a training configuration into one
//! [`FeatureConfig`] per sparse feature, and [`tables_of`] returns the tables that these features look up. The
//! trainer and the planner use the same functions, so they agree on the tables.
//!
//! ```
//! use onefold_sharding::{AnalyticCost, Beam, Search, Table, Topology};
//!
//! let tables = [Table::new("user_id", 1_000_000, 64), Table::new("item_id", 50_000, 64)];
//! let topology = Topology::h100(2, 80 << 30)?;
//! let plan = Beam::Full.plan(&tables, &topology, &AnalyticCost, 4_096)?;
//! plan.check(&tables, &topology, 4_096)?;
//! assert!(plan.ranks.iter().all(|rank| rank.total_bytes() <= topology.memory_bytes));
//! # Ok::<(), onefold_sharding::Error>(())
//! ```
//!
//! This crate builds on `onefold-train-config` (types of tables); `onefold-trainer` builds on this one.
#![forbid(unsafe_code)]

mod access;
mod alternatives;
mod buffers;
mod check;
mod cost;
mod costs;
mod diff;
mod error;
mod files;
mod lookups;
mod nn;
mod plan;
mod prediction;
mod pretrain;
mod search;
mod shares;
mod statistics;
mod table;
mod topology;
pub mod torchrec;

pub use access::{ACCESS_BATCH, ACCESS_BINS, AccessBins};
pub use alternatives::Alternative;
pub use buffers::BufferBytes;
pub use cost::analytic::AnalyticCost;
pub use cost::features::{AskedFeatures, ShardFeatures};
pub use cost::model_file::{Fit, ModelFile, ModelReport, Repeated};
pub use cost::several::LearnedCosts;
pub use cost::{CostModel, LinkBytes, RankCost, RankLoad, ShardLoad, Traffic, Work};
pub use costs::{ComputeSample, Costs, Direction, ExchangeRank, ExchangeSample};
pub use diff::{PlanDiff, TableChange, diff};
pub use error::{Error, Result};
pub use files::claim_output;
pub use lookups::{FeatureLookups, Lookups};
pub use onefold_train_config::{
    DataType, FeatureConfig, HASH_SALT, IdPolicy, Pooling, TableConfig, TableOptimizer, TableOverride,
    resolve_tables, tables_of,
};
pub use plan::{Plan, RankPrediction, Shard, ShardingType, TablePlan};
pub use pretrain::{PretrainOptions, pretrain, repeatability};
pub use search::beam::Beam;
pub use search::greedy::Greedy;
pub use search::replan::{Replanned, replan};
pub use search::torchrec::TorchrecDefault;
pub use search::{Search, searches};
pub use shares::LookupShares;
pub use statistics::{kendall_tau, normal_cdf};
pub use table::{Table, TableFile};
pub use topology::{MAX_RANKS, RankGroup, Topology};
