//! Describes the data of a dataset, the savings by folding, and their effect on training, as measurements and as an
//! HTML page.
//!
//! ```text
//!                  ┌─▶ whole, in the dataset's order ──▶ sessions, repeats, co-change, dedupe factors ─┐
//! dataset ──▶ rows ├─▶ row groups spread over it ──────▶ written again: bytes by column and layout ────┼─▶ Report ─▶ html
//!                  └─▶ some, in the other order ───────▶ dedupe factors and bytes before clustering ───┘
//! ```
//!
//! [`gather()`] reads every sample once, one row group at a time. If the dataset is clustered, it also collects
//! intervals of time, complete and in order of time, as they would have been logged: all samples if they fit into
//! [`ReportOptions::memory`], or else several intervals that are spread over the dataset. If the dataset is in
//! arrival order, it collects whole sessions and clusters them. Both are written by the writer of datasets in each
//! layout, and measured by the footers of the files. Columns that a dataset keeps in addition to its features are
//! ignored. [`html()`] makes a self-contained page from a [`Report`].
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

/// The batch sizes for which dedupe factors are measured.
pub const BATCH_SIZES: [usize; 3] = [512, 2048, 8192];
/// The index in [`BATCH_SIZES`] of the batch size for figures that are given for only one size.
pub const MIDDLE: usize = 1;

/// The options of a report.
#[derive(Debug, Clone)]
pub struct ReportOptions {
    /// The number of threads.
    pub threads: usize,
    /// The number of the snapshot, or `None` for the newest one.
    pub snapshot: Option<u64>,
    /// The share of all sessions that the dataset contains, if it is a sample: above 0, at most 1. When samples are
    /// sorted into arrival order, a batch is then represented by `sampled` times as many samples, which span the same
    /// time.
    pub sampled: Option<f64>,
    /// The largest number of samples that are written again in each layout.
    pub encode_samples: usize,
    /// The largest size, in decoded bytes, of the samples that are sorted into another order. The row groups that are
    /// being read and written take additional memory.
    pub memory: u64,
    /// The directory for temporary files, or `None` for the system's temporary directory.
    pub scratch: Option<PathBuf>,
}

impl ReportOptions {
    /// Returns the options for a complete dataset: 100,000 samples are written again, and 256 MiB are sorted into
    /// another order.
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

/// The contents of a report. Figures "per sample" are means over samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The name of the dataset's directory.
    pub dataset: String,
    /// The version of Onefold that made the report.
    pub onefold_version: String,
    /// The share of a log's sessions that the dataset contains, if it is a sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled: Option<f64>,
    /// The layout of the lists.
    pub layout: Layout,
    /// The order of the samples.
    pub order: Order,
    /// The number of partitions.
    pub partitions: usize,
    /// The number of data files.
    pub files: usize,
    /// The number of samples.
    pub samples: u64,
    /// The number of sessions.
    pub sessions: u64,
    /// The size of the data files, in bytes.
    pub bytes_on_disk: u64,
    /// `bytes_on_disk / samples`.
    pub bytes_per_sample: f64,
    /// The time of the earliest sample, in microseconds since 1970.
    pub first_timestamp_micros: i64,
    /// The time of the latest sample, in microseconds since 1970.
    pub last_timestamp_micros: i64,
    /// The distribution of the number of samples per session.
    pub samples_per_session: SessionSizes,
    /// The dedupe factor of each group at the middle batch size.
    pub dedupe_factor: BTreeMap<String, f64>,
    /// All features together, for each batch size. Groups count as deduplicated only if the dataset deduplicates
    /// them.
    pub all: Vec<BatchFigures>,
    /// The feature groups, in the schema's order.
    pub groups: Vec<GroupReport>,
    /// The size of the samples on disk.
    pub storage: StorageReport,
    /// The features that change together.
    pub co_change: CoChange,
    /// The cost of a batch for a trainer, for each batch size.
    pub training: Vec<TrainingReport>,
    /// The time that the report took, in seconds.
    pub wall_seconds: f64,
}

/// The distribution of the number of samples per session.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionSizes {
    /// The number of sessions.
    pub sessions: u64,
    /// The mean number of samples, S.
    pub mean: f64,
    /// The median: half of the sessions have at most this number of samples.
    pub median: u64,
    /// The 99th percentile: 99 % of the sessions have at most this number of samples.
    pub p99: u64,
    /// The number of samples of the longest session.
    pub max: u64,
    /// A histogram of the sizes.
    pub histogram: Vec<SizeBucket>,
}

/// The sessions within a range of sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SizeBucket {
    /// The smallest number of samples.
    pub from: u64,
    /// The largest number of samples; `None` if there is no limit.
    pub to: Option<u64>,
    /// The number of sessions.
    pub sessions: u64,
}

/// The savings by deduplication of a feature or of a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// The mean number of ids per sample.
    pub ids_per_sample: f64,
    /// d: the probability that the lists equal those of the session's previous sample; `None` if every session has
    /// only one sample.
    pub repeat_probability: Option<f64>,
    /// `1 / (1 - d (S-1)/S)`, where S is the mean number of samples per session.
    pub predicted_dedupe_factor: f64,
    /// The measured figures, for each batch size.
    pub batches: Vec<BatchFigures>,
}

/// The measured figures of batches of one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BatchFigures {
    /// The number of samples of a batch.
    pub batch_size: usize,
    /// The number of ids of samples ÷ the number of ids of distinct rows, in arrival order; `None` if too few samples
    /// could be sorted into it.
    pub arrival_dedupe_factor: Option<f64>,
    /// The number of ids of samples ÷ the number of ids of distinct rows, for clustered samples.
    pub dedupe_factor: f64,
    /// The number of ids of samples ÷ the number of ids of T, for clustered samples. T is the concatenation of the
    /// ids that each list has in addition to the previous one.
    pub partial_dedupe_factor: f64,
    /// The number of distinct rows per sample, for clustered samples.
    pub rows_per_sample: f64,
}

/// A feature group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupReport {
    /// The name of the group.
    pub name: String,
    /// Whether the group is deduplicated. If not, its figures show the possible savings.
    pub deduplicated: bool,
    /// All features of the group together: a row repeats if all its lists repeat.
    #[serde(flatten)]
    pub figures: Figures,
    /// Each feature separately.
    pub features: Vec<FeatureReport>,
}

/// A sparse feature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FeatureReport {
    /// The name of the column.
    pub name: String,
    /// Whether the order of its ids matters.
    pub kind: SparseKind,
    /// The figures of this feature.
    #[serde(flatten)]
    pub figures: Figures,
}

/// The size of samples on disk, for the samples that were written for the report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StorageReport {
    /// The number of samples that were written in arrival order.
    pub arrival_samples: u64,
    /// The number of clustered samples that were written in each layout.
    pub clustered_samples: u64,
    /// Bytes per sample in arrival order, layout `rows`.
    pub arrival_bytes_per_sample: f64,
    /// Bytes per clustered sample, layout `rows`.
    pub rows_bytes_per_sample: f64,
    /// Bytes per clustered sample, layout `folded`.
    pub folded_bytes_per_sample: f64,
    /// The sizes of the columns, the largest in arrival order first.
    pub columns: Vec<ColumnReport>,
}

/// The size of a column on disk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnReport {
    /// The name of the column. The lengths of a window count for its feature.
    pub name: String,
    /// Bytes per sample in arrival order, layout `rows`.
    pub arrival_bytes_per_sample: f64,
    /// Bytes per clustered sample, layout `rows`.
    pub rows_bytes_per_sample: f64,
    /// Bytes per clustered sample, layout `folded`.
    pub folded_bytes_per_sample: f64,
    /// The ids of a sparse feature; `None` for other columns.
    #[serde(flatten)]
    pub ids: Option<IdFigures>,
}

/// The ids that a sparse feature's column stores in the layout `folded`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct IdFigures {
    /// The number of stored ids per sample.
    pub stored_ids_per_sample: f64,
    /// The number of distinct ids in the samples that were written.
    pub distinct_ids: u64,
    /// Bytes of the column per stored id.
    pub bytes_per_stored_id: f64,
    /// The zeroth-order entropy of the stored ids, in bytes per id.
    pub entropy_bytes_per_stored_id: f64,
}

/// Features that change together within sessions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CoChange {
    /// The features in the schema's order. If there are more than [`MOST_CO_CHANGE`](Self::MOST_CO_CHANGE), only the
    /// largest ones on disk are compared.
    pub features: Vec<String>,
    /// The number of samples in which each feature differs from the session's previous sample.
    pub changes: Vec<u64>,
    /// `share[a][b]`: among the samples in which `a` changes, the share in which `b` changes too; `None` if `a` never
    /// changes.
    pub share: Vec<Vec<Option<f64>>>,
}

impl CoChange {
    /// The largest number of features that are compared.
    pub const MOST_CO_CHANGE: usize = 120;
}

/// The cost of batches of one size for a trainer, for each way of deduplication.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainingReport {
    /// The number of samples of a batch.
    pub batch_size: usize,
    /// The cost without deduplication.
    pub off: TrainingFigures,
    /// The cost if every distinct row is processed once.
    pub exact: TrainingFigures,
    /// The cost if, in addition, every id of a window is looked up once.
    pub window: TrainingFigures,
}

/// The cost of a sample for a trainer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TrainingFigures {
    /// The number of ids that are looked up.
    pub lookups_per_sample: f64,
    /// The bytes that are copied to the device: 8 per id, and 4 per offset, size, inverse index and float.
    pub bytes_to_device_per_sample: f64,
    /// The number of rows that are pooled or attended to, over all features.
    pub rows_per_sample: f64,
}

impl TrainingReport {
    /// Returns upper bounds for the speed-up of a step, for `exact` and for `window`. `share` is the share of the
    /// step's time that is proportional to the number of lookups. The bound is `1 / ((1 - share) + share / factor)`,
    /// by Amdahl's law.
    pub fn speed_up_bounds(&self, share: f64) -> (f64, f64) {
        let bound = |mode: &TrainingFigures| {
            let factor = self.off.lookups_per_sample / mode.lookups_per_sample;
            if factor.is_finite() { 1.0 / ((1.0 - share) + share / factor) } else { 1.0 }
        };
        (bound(&self.exact), bound(&self.window))
    }
}
