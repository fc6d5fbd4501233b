//! Trains DLRMs from deduplicated batches: lookups, pooling and sequence compute run once per distinct row.
//!
//! ```text
//!                      ┌ lookup, pooling ─▶ rows [U, F, D] ────────────┐
//! Batch (onefold-ikjt) ┤ lookup, attention ─▶ rows [U, D] ─────────────┼▶ dot, expansion [B, …] ─▶ top MLP ─▶ logit
//!                      └ dense [B, …] ─▶ bottom MLP ─▶ [B, D] ─────────┘
//! ```
//!
//! [`TrainConfig`] is `train.toml`, checked against the dataset's schema. A [`Model`](model::Model) is a DLRM
//! (Naumov et al. 2019): [`model`] has the dense part, on libtorch, and [`embedding`] has the tables. Lookups,
//! pooling, attention, interaction and table updates are kernels of this project ([`onefold_kernels`]) outside
//! autograd: the output of a kernel is a leaf tensor, and after `backward` its gradient is the input of the
//! kernel's own backward pass.
//!
//! * [`Prepared`] and [`evaluate()`] are the training and evaluation loops.
//! * [`metrics`] computes NE, AUC and other metrics.
//! * [`checkpoint`] reads and writes the state of a run.
//! * [`device`] is a GPU, with CUDA kernels for the tables and libtorch's operations for the dense part.
//! * [`trace`] records the steps of the ranks of a job; [`report`] draws the results of runs.
//! * [`table_steps`] has the training steps of tables without a dense part, for `onefold-train-tools`.
//! * [`command`] has the code that the programs `onefold-train` and `onefold-train-tools` share.
//!
//! The crate depends on `onefold-ikjt` (batches), `onefold-train-config` (`train.toml`), `onefold-kernels`, and
//! `onefold-sharding` (configuration of tables, and plans).

pub mod checkpoint;
pub mod command;
mod cuda_library;
pub mod device;
pub mod distributed;
pub mod embedding;
mod error;
mod evaluate;
mod export;
mod infer;
mod lockstep;
mod memory;
pub mod metrics;
pub mod model;
pub mod normalize;
pub mod optimizer;
mod predict;
mod preprocess;
mod processor;
pub mod report;
pub mod run;
mod shim;
mod stop;
pub mod table_steps;
pub mod tensorboard;
mod tensors;
pub mod trace;
mod train;
mod vocabularies;

pub use config::{Precision, TableOptimizerConfig, TrainConfig, name_of};
pub use error::{Error, Result};
pub use evaluate::{EvaluateOptions, EvaluationSummary, evaluate};
pub use export::{ExportSummary, export};
pub use memory::{ModelSize, available as available_memory};
use onefold_train_config as config;
pub use predict::{PredictionSummary, predict};
pub use processor::check_precision;
pub use stop::Stop;
pub use train::{
    Ending, Existing, Follow, GrownTable, LossJump, PartitionFigures, Prepared, ProgressiveSummary,
    RowCounts, TrainOptions, TrainSummary, WarmStart,
};
