//! Streaming metrics in constant memory: normalized entropy, AUC, log loss.

mod binary;
mod scores;
mod segments;
mod tasks;

pub(crate) use self::binary::MetricState;
pub use self::binary::{BinaryMetrics, Figures};
pub use self::segments::{Segment, SegmentMetrics};
pub use self::tasks::{Task, TaskMetrics};
