//! Records the steps of a job's ranks: how long they compute, and how long they wait for the reader and for
//! each other.
//!
//! ```text
//! Recorder ─ step's marks ─▶ Watch ─▶ Work ─ gathered every window ─▶ RankFigures: metrics.jsonl, TensorBoard, summary.json
//!                              └────▶ RUN/timeline/rank-00000.jsonl ─▶ Timeline ─▶ HTML, Chrome's trace format
//! ```
//!
//! A step is divided without gaps: at every moment, a rank computes or waits for one thing ([`Activity`]). The
//! start of a step is measured with the clock of the rank's machine, durations with a monotonic clock. Ranks of
//! one machine share the clock; the lanes of ranks on different machines are shifted by the difference of their
//! clocks. Durations are not affected.

mod chrome;
mod figures;
mod html;
mod recorder;
#[cfg(test)]
mod tests;
mod timeline;
mod watch;

use serde::{Deserialize, Serialize};

pub use self::figures::{OverRanks, RankFigures, RankTimes};
pub(crate) use self::recorder::Recorder;
pub use self::timeline::{OfRank, Span, Timeline, TracedStep};
pub(crate) use self::watch::Watch;

/// The activity of a rank within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Waits for the reader's next batch.
    Input,
    /// Waits for the requests of other ranks.
    Requests,
    /// Waits for the requested vectors.
    Answers,
    /// Waits for the gradients of its tables' rows.
    Gradients,
    /// Waits for the sum of the dense part's gradients.
    DenseGradient,
    /// Waits for the other ranks' losses and counts, and so for the slowest rank's backward pass.
    Losses,
    /// Looks up rows for all ranks, and computes the logits.
    Forward,
    /// Determines the distinct rows of the next batch by owner.
    Request,
    /// Computes the loss and its gradients.
    Backward,
    /// Assembles the gradients of vectors for their owners.
    SendGradients,
    /// Updates the dense part and the tables.
    Update,
    /// Accumulates metrics, and writes the log.
    Record,
}

/// The kinds of a rank's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Computing, and all other activities except waiting.
    Compute,
    /// Waiting for requests, answers and gradients of table rows.
    Exchange,
    /// Waiting for reductions over all ranks, and for their losses and counts.
    AllReduce,
    /// Waiting for the reader.
    Waiting,
}

impl Kind {
    /// All kinds, in display order; the index of a kind is its discriminant.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Exchange, Self::AllReduce, Self::Waiting];

    /// Returns the name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Exchange => "exchange",
            Self::AllReduce => "all_reduce",
            Self::Waiting => "waiting",
        }
    }
}

impl Activity {
    /// Returns the kind of time that the activity takes.
    pub fn kind(self) -> Kind {
        match self {
            Self::Input => Kind::Waiting,
            Self::Requests | Self::Answers | Self::Gradients => Kind::Exchange,
            Self::DenseGradient | Self::Losses => Kind::AllReduce,
            Self::Forward
            | Self::Request
            | Self::Backward
            | Self::SendGradients
            | Self::Update
            | Self::Record => Kind::Compute,
        }
    }

    /// Returns the name for display.
    pub fn label(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Requests => "requests",
            Self::Answers => "answers",
            Self::Gradients => "gradients",
            Self::DenseGradient => "dense gradient",
            Self::Losses => "losses",
            Self::Forward => "forward",
            Self::Request => "next request",
            Self::Backward => "backward",
            Self::SendGradients => "send gradients",
            Self::Update => "update",
            Self::Record => "record",
        }
    }
}
