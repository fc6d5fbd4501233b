//! Trains DLRMs from deduplicated batches: lookups, pooling and sequence compute run once per distinct row.
//!
//! ```text
//!                      ┌ Embeddings::forward ─ rows [U, F, D] ─ attention ─ index select ┐
//! Batch (onefold-ikjt) ┤                                                                ├ dot ─ top MLP ─ logit
//!                      └ dense [B, …] ─ bottom MLP ─ [B, D] ────────────────────────────┘
//! ```
//!
//! [`TrainConfig`] is `train.toml`, checked against the dataset's schema. A [`Model`](model::Model) is a DLRM
//! (Naumov et al. 2019): [`model`] holds the dense part on libtorch, [`embedding`] the tables, whose lookups and
//! row-wise Adagrad updates are our own and outside autograd: what is looked up is a leaf tensor, and its gradient
//! after `backward` goes to the table's update. [`train()`] and [`evaluate()`] are the loops; [`metrics`] has NE and AUC.
//!
//! [`profile`](mod@profile) measures what tables cost, for the planner's cost model.
//!
//! Upstream is `onefold-ikjt` (batches); `onefold-sharding` gives the tables' configuration and the plan.

pub mod checkpoint;
mod config;
pub mod embedding;
mod error;
mod evaluate;
pub mod metrics;
pub mod model;
pub mod optimizer;
pub mod profile;
mod tensors;
mod train;

pub use config::{DenseOptimizerKind, ModelConfig, TrainConfig};
pub use error::{Error, Result};
pub use evaluate::{EvaluationSummary, evaluate};
pub use train::{TrainOptions, TrainSummary, train};
