//! What the ranks of a job do in a step, and for how long: computing, or waiting for the reader and for each
//! other.
//!
//! ```text
//! Recorder ─ step's marks ─▶ Watch ─▶ Work ─ gathered every window ─▶ RankFigures: metrics.jsonl, TensorBoard, summary.json
//!                              └────▶ RUN/timeline/rank-00000.jsonl ─▶ Timeline ─▶ HTML, Chrome's trace format
//! ```
//!
//! A step is divided without gaps: at every moment a rank computes or waits for one thing ([`Activity`]). A
//! span starts by the clock of the rank's machine and lasts by a monotonic one. Ranks of one machine share the
//! clock; lanes of ranks on different machines are shifted against each other by as much as their clocks
//! differ. Lengths do not depend on it.

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

/// What a rank does at a moment of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Waits for the reader's next batch.
    Input,
    /// Waits for what other ranks ask it for.
    Requests,
    /// Waits for the vectors that it asked for.
    Answers,
    /// Waits for the gradients of its tables' rows.
    Gradients,
    /// Waits for the sum of the dense part's gradients.
    DenseGradient,
    /// Waits for the other ranks' losses and counts, so for the slowest rank's backward pass.
    Losses,
    /// Looks up for all ranks, and computes the logits.
    Forward,
    /// Finds the distinct rows of the next batch at their owners.
    Request,
    /// Computes the loss and its gradients.
    Backward,
    /// Puts the gradients of vectors together for their owners.
    SendGradients,
    /// Updates the dense part and its tables.
    Update,
    /// Adds up metrics, and writes the log.
    Record,
}

/// The kinds of a rank's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Computing, and all else that is no waiting.
    Compute,
    /// Waiting for requests, answers and gradients of table rows.
    Exchange,
    /// Waiting for what all ranks sum up or tell each other.
    AllReduce,
    /// Waiting for the reader.
    Waiting,
}

impl Kind {
    /// All, in the order in which they are shown; a kind's number is its place.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Exchange, Self::AllReduce, Self::Waiting];

    /// The name in files.
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
    /// The kind of time that it takes.
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

    /// The name for people.
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
