//! What a dataset's data is like, what folding it saved, and what a trainer can expect of it: measured, and as one
//! page.
//!
//! ```text
//!                  ┌─▶ whole, in the dataset's order ──▶ sessions, repeats, co-change, dedupe factors ─┐
//! dataset ──▶ rows ├─▶ row groups spread over it ──────▶ written again: bytes by column and layout ────┼─▶ Report ─▶ html
//!                  └─▶ some, in the other order ───────▶ dedupe factors and bytes before clustering ───┘
//! ```
//!
//! [`gather()`] reads every sample once, a row group at a time. Of a clustered dataset it also takes stretches of time,
//! whole and in order of time, as they would have been logged: all samples if they fit into [`ReportOptions::memory`],
//! or some stretches spread over the dataset. Of a dataset in arrival order it takes whole sessions and clusters those.
//! Both are written by the writer of datasets, in each layout, and measured by what their files' footers say.
//! Columns that a dataset keeps beside its features are left out. [`html()`] makes one self-contained page of a [`Report`].
#![forbid(unsafe_code)]

mod counter;
mod encoded;
mod figures;
mod gather;
mod gathered;
mod html;
mod pass;
mod plan;
#[cfg(test)]
#[path = "../../src/folded/samples.rs"]
mod samples;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

pub use self::gather::gather;
pub use self::html::html;
use onefold_datasets::{Layout, Order, SparseKind};

/// The batch sizes of which dedupe factors are measured.
pub const BATCH_SIZES: [usize; 3] = [512, 2048, 8192];
/// The batch size at which figures stand that have only one: this place of [`BATCH_SIZES`].
pub const MIDDLE: usize = 1;

/// How a dataset is reported on.
#[derive(Debug, Clone)]
pub struct ReportOptions {
    /// Threads.
    pub threads: usize,
    /// The number of the snapshot; the newest one if `None`.
    pub snapshot: Option<u64>,
    /// The share of all sessions that the dataset holds, if it is a sample: above 0, at most 1. Where samples are put
    /// into arrival order, a batch of `sampled` times as many samples then stands for a batch: it spans the same time.
    pub sampled: Option<f64>,
    /// At most so many samples are written again, in each layout.
    pub encode_samples: usize,
    /// Bytes that samples may take that are put into another order, decoded. The row group that is read, and those that
    /// are written, come on top.
    pub memory: u64,
    /// Where samples are written for a moment; the system's temporary directory if `None`.
    pub scratch: Option<PathBuf>,
}

impl ReportOptions {
    /// The options of a whole dataset: 100,000 samples are written again, 256 MiB put into another order.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            snapshot: None,
            sampled: None,
            encode_samples: 100_000,
            memory: 256 << 20,
            scratch: None,
        }
    }
}

/// Everything that is to be told of a dataset. Figures "per sample" are means over samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The name of the dataset's directory.
    pub dataset: String,
    /// The version of Onefold that made the report.
    pub onefold_version: String,
    /// The share of the sessions that the dataset holds of the log that it stands for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled: Option<f64>,
    /// How its lists are stored.
    pub layout: Layout,
    /// How its samples are ordered.
    pub order: Order,
    /// Partitions.
    pub partitions: usize,
    /// Data files.
    pub files: usize,
    /// Samples.
    pub samples: u64,
    /// Sessions.
    pub sessions: u64,
    /// Size of the data files.
    pub bytes_on_disk: u64,
    /// `bytes_on_disk / samples`.
    pub bytes_per_sample: f64,
    /// Time of the earliest sample, in microseconds since 1970.
    pub first_timestamp_micros: i64,
    /// Time of the latest sample, likewise.
    pub last_timestamp_micros: i64,
    /// How many samples sessions have.
    pub samples_per_session: SessionSizes,
    /// Of each group, the dedupe factor at the middle batch size.
    pub dedupe_factor: BTreeMap<String, f64>,
    /// All features together: groups that are deduplicated as such, the others as they are.
    pub all: Vec<BatchFigures>,
    /// The feature groups, in the schema's order.
    pub groups: Vec<GroupReport>,
    /// What is stored.
    pub storage: StorageReport,
    /// Which features change together.
    pub co_change: CoChange,
    /// What a batch of each size costs a trainer.
    pub training: Vec<TrainingReport>,
    /// Time that the report took.
    pub wall_seconds: f64,
}

/// How many samples sessions have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionSizes {
    /// Sessions that were counted.
    pub sessions: u64,
    /// The mean, S.
    pub mean: f64,
    /// Half of the sessions have no more.
    pub median: u64,
    /// 99 in 100 sessions have no more.
    pub p99: u64,
    /// The longest session.
    pub max: u64,
    /// A histogram.
    pub histogram: Vec<SizeBucket>,
}

/// Sessions of similar size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SizeBucket {
    /// The fewest samples.
    pub from: u64,
    /// The most; `None` if there is no bound.
    pub to: Option<u64>,
    /// Sessions.
    pub sessions: u64,
}

/// What deduplication of a feature or of a group saves.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// Ids of a sample.
    pub ids_per_sample: f64,
    /// d: the probability that the lists are those of the session's previous sample; `None` if every session has one
    /// sample.
    pub repeat_probability: Option<f64>,
    /// `1 / (1 - d (S-1)/S)`, with the mean S of the samples per session.
    pub predicted_dedupe_factor: f64,
    /// Measured, by batch size.
    pub batches: Vec<BatchFigures>,
}

/// What was measured of batches of one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BatchFigures {
    /// Samples of a batch.
    pub batch_size: usize,
    /// The samples' ids per id of distinct rows, in arrival order; `None` if too few samples could be put into it.
    pub arrival_dedupe_factor: Option<f64>,
    /// The same of clustered samples.
    pub dedupe_factor: f64,
    /// The samples' ids per id of T, of clustered samples: the concatenation of what each list has beyond the one
    /// before.
    pub partial_dedupe_factor: f64,
    /// Distinct rows per sample, of clustered samples.
    pub rows_per_sample: f64,
}

/// A feature group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupReport {
    /// The group's name.
    pub name: String,
    /// Whether it is deduplicated. If not, its figures tell what would be saved if it were.
    pub deduplicated: bool,
    /// All features together: a row repeats if all its lists do.
    #[serde(flatten)]
    pub figures: Figures,
    /// Each feature alone.
    pub features: Vec<FeatureReport>,
}

/// A sparse feature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FeatureReport {
    /// The column's name.
    pub name: String,
    /// Whether the order of its ids matters.
    pub kind: SparseKind,
    /// The feature alone.
    #[serde(flatten)]
    pub figures: Figures,
}

/// What samples take on disk, as samples were written for the report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StorageReport {
    /// Samples that were written in arrival order.
    pub arrival_samples: u64,
    /// Samples that were written clustered, in either layout.
    pub clustered_samples: u64,
    /// In arrival order, layout `rows`.
    pub arrival_bytes_per_sample: f64,
    /// Clustered, layout `rows`.
    pub rows_bytes_per_sample: f64,
    /// Clustered, layout `folded`.
    pub folded_bytes_per_sample: f64,
    /// By column, the largest in arrival order first.
    pub columns: Vec<ColumnReport>,
}

/// What a column takes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnReport {
    /// The column's name; the lengths of a window are part of its feature.
    pub name: String,
    /// In arrival order, layout `rows`.
    pub arrival_bytes_per_sample: f64,
    /// Clustered, layout `rows`.
    pub rows_bytes_per_sample: f64,
    /// Clustered, layout `folded`.
    pub folded_bytes_per_sample: f64,
    /// The ids of a sparse feature.
    #[serde(flatten)]
    pub ids: Option<IdFigures>,
}

/// The ids that a sparse feature's column stores in the layout `folded`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct IdFigures {
    /// Ids stored per sample.
    pub stored_ids_per_sample: f64,
    /// Different ones among those of the samples written.
    pub distinct_ids: u64,
    /// Bytes of the column per id stored.
    pub bytes_per_stored_id: f64,
    /// The entropy of order 0 of the ids stored, in bytes an id.
    pub entropy_bytes_per_stored_id: f64,
}

/// Which features change together within sessions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CoChange {
    /// Features in the schema's order; of more than [`MOST_CO_CHANGE`](Self::MOST_CO_CHANGE) the largest on disk.
    pub features: Vec<String>,
    /// Samples where each of them is not as in the session's previous sample.
    pub changes: Vec<u64>,
    /// `share[a][b]`: of the samples where `a` changes, the share where `b` changes too; `None` if `a` never changes.
    pub share: Vec<Vec<Option<f64>>>,
}

impl CoChange {
    /// So many features are compared at most.
    pub const MOST_CO_CHANGE: usize = 120;
}

/// What batches of one size cost a trainer, by how it reads them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainingReport {
    /// Samples of a batch.
    pub batch_size: usize,
    /// Without deduplication.
    pub off: TrainingFigures,
    /// Every distinct row once.
    pub exact: TrainingFigures,
    /// Of windows, every id once.
    pub window: TrainingFigures,
}

/// What a sample costs a trainer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TrainingFigures {
    /// Ids that are looked up.
    pub lookups_per_sample: f64,
    /// Bytes that a batch brings to the device: 8 an id, 4 an offset, a size, an inverse index and a float.
    pub bytes_to_device_per_sample: f64,
    /// Rows that are pooled or attended to, over all features.
    pub rows_per_sample: f64,
}

impl TrainingReport {
    /// How much faster a step can become at most whose time was proportional to lookups to the share `share`, by
    /// Amdahl's law: `1 / ((1 - share) + share / factor)`, for `exact` and for `window`.
    pub fn speed_up_bounds(&self, share: f64) -> (f64, f64) {
        let bound = |mode: &TrainingFigures| {
            let factor = self.off.lookups_per_sample / mode.lookups_per_sample;
            if factor.is_finite() { 1.0 / ((1.0 - share) + share / factor) } else { 1.0 }
        };
        (bound(&self.exact), bound(&self.window))
    }
}
