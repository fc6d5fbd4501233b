//! Trains DLRMs from deduplicated batches: lookups, pooling and sequence compute run once per distinct row.
//!
//! ```text
//!                      ┌ lookup, pooling ─▶ rows [U, F, D] ────────────┐
//! Batch (onefold-ikjt) ┤ lookup, attention ─▶ rows [U, D] ─────────────┼▶ dot, expansion [B, …] ─▶ top MLP ─▶ logit
//!                      └ dense [B, …] ─▶ bottom MLP ─▶ [B, D] ─────────┘
//! ```
//!
//! [`TrainConfig`] is `train.toml`, checked against the dataset's schema. A [`Model`](model::Model) is a DLRM (Naumov
//! et al. 2019): [`model`] holds the dense part on libtorch, [`embedding`] the tables. Lookups, pooling, attention, the
//! interaction and the tables' updates are our own kernels ([`onefold_kernels`]), outside autograd: what they give is a
//! leaf tensor, whose gradient after `backward` goes on to the kernel's own backward. [`Prepared`] and [`evaluate()`] are
//! the loops; [`metrics`] has NE and AUC; [`checkpoint`] what a run leaves on the disk; [`bench`](bench::bench) measures
//! steps.
//!
//! [`device`] is a GPU: there the tables' kernels are CUDA's, and the dense part libtorch's operations.
//!
//! [`trace`] watches the ranks of a job; [`report`] draws what runs came to.
//!
//! [`profile`](mod@profile) measures what tables cost, for the planner's cost model. [`command`] is what the programs
//! `onefold-train` and `onefold-train-tools` share.
//!
//! Upstream are `onefold-ikjt` (batches), `onefold-train-config` (`train.toml`) and `onefold-kernels`; `onefold-sharding`
//! gives the tables' configuration and the plan.

pub mod bench;
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
pub mod profile;
pub mod report;
pub mod run;
mod shim;
mod stop;
pub mod tensorboard;
mod tensors;
pub mod trace;
mod train;
mod vocabularies;

pub use config::{
    CheckpointConfig, DataConfig, DenseConfig, DenseOptimizerConfig, DenseOptimizerKind, EarlyStoppingConfig,
    EvaluationConfig, ExchangeConfig, Interaction, LoopConfig, LossConfig, ModelConfig, Normalization,
    OptimizerConfig, ParameterCount, Precision, Schedule, ScheduleConfig, ScheduleKind, TableOptimizer,
    TableOptimizerConfig, TaskConfig, TrainConfig, WatchedMetric,
};
pub use error::{Error, Result};
pub use evaluate::{EvaluateOptions, EvaluationSummary, evaluate};
pub use export::{ExportSummary, export};
pub use memory::ModelSize;
use onefold_train_config as config;
pub use predict::{PredictionSummary, predict};
pub use stop::Stop;
pub use train::{
    Ending, Existing, Follow, GrownTable, LossJump, PartitionFigures, Prepared, ProgressiveSummary,
    RowCounts, TrainOptions, TrainSummary, WarmStart,
};
