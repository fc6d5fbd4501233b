//! Trains DLRMs from deduplicated batches: lookups, pooling and sequence compute run once per distinct row.
//!
//! ```text
//!                      ┌ lookup, pooling ─▶ rows [U, F, D] ────────────┐
//! Batch (onefold-ikjt) ┤ lookup, attention ─▶ rows [U, D] ─────────────┼▶ dot, expansion [B, …] ─▶ top MLP ─▶ logit
//!                      └ dense [B, …] ─▶ bottom MLP ─▶ [B, D] ─────────┘
//! ```
//!
//! [`TrainConfig`] is `train.toml`, checked against the dataset's schema. A [`Model`](model::Model) is a DLRM
//! (Naumov et al. 2019): [`model`] holds the dense part on libtorch, [`embedding`] the tables. Lookups, pooling, attention, the
//! interaction and the tables' updates are our own [`kernels`], outside autograd: what they give is a leaf tensor, whose
//! gradient after `backward` goes on to the kernel's own backward. [`train()`] and [`evaluate()`] are the loops;
//! [`metrics`] has NE and AUC; [`bench`](bench::bench) measures steps.
//!
//! Upstream is `onefold-ikjt` (batches); `onefold-sharding` gives the tables' configuration and the plan.

pub mod bench;
pub mod checkpoint;
mod config;
pub mod embedding;
mod error;
mod evaluate;
pub mod kernels;
pub mod metrics;
pub mod model;
pub mod optimizer;
mod tensors;
mod train;

pub use config::{DenseOptimizerKind, ModelConfig, TrainConfig};
pub use error::{Error, Result};
pub use evaluate::{EvaluationSummary, evaluate};
pub use train::{TrainOptions, TrainSummary, train};
