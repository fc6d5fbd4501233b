//! The batch ETL: builds a session-clustered dataset from raw logs.
//!
//! ```text
//! dataset.toml ─▶ sources ─▶ samples ─▶ cluster: delta-encode ─▶ sort ─▶ WriteExec ─▶ commit
//!    config       files,     joins,      by session    DataFusion, decode,      onefold-datasets
//!                 stores     or SQL                    spills      encode
//! ```
//!
//! [`Config`] is a checked `dataset.toml`. [`build()`] runs it on DataFusion, which does the joins, windows, sorts and
//! spilling. This crate finds and inspects logs (`sources`), makes the SQL of the declared steps (`samples`,
//! `timeline`) and of sessions (`sessionize`), and keeps lists out of the sort (`cluster`). The crate
//! `onefold-datasets` contains the dataset format and its writer.
#![forbid(unsafe_code)]

mod build;
mod check;
mod clock;
mod cluster;
pub mod command;
mod compare;
pub mod config;
mod decide;
mod engine;
mod error;
mod exchanges;
pub mod executor;
mod groups;
mod ids;
mod init;
mod late_lists;
mod memory;
mod merge;
mod operator;
mod pipeline;
mod planned;
mod popularity;
mod probe_lists;
mod problems;
mod profile;
mod reading;
mod recompute;
pub mod remote;
mod row_counts;
mod row_digest;
mod samples;
mod session_ids;
mod sessionize;
mod shard;
mod signed_lengths;
mod sources;
mod spilling_join;
mod spool;
mod sql;
mod statistics;
mod timeline;
mod times;

pub use build::{BuildSummary, Part, build, commit_parts, write_part};
pub use check::{Checked, FoundProblem, check};
pub use compare::{Comparison, compare};
pub use config::{
    Compression, Config, FeatureKind, Format, MissingColumns, ObjectStores, PartitionBy, SourceConfig,
    TimeConfig,
};
pub use engine::EngineOptions;
pub use error::{Error, Result};
pub use groups::GroupSummary;
pub use init::{InitSource, InitSummary, init};
pub use merge::MergeSummary;
pub use pipeline::{BuildOptions, Groups};
pub use recompute::{ColumnsOptions, ColumnsSummary, LabelChanges, Task as ColumnsTask, compute_columns};
pub use row_counts::{Reason, RowCounts};
pub use samples::SkipCounts;
pub use statistics::{BuildStatistics, ColumnStatistics, ValueStatistics};
pub use times::TimeLimits;
