//! The errors of the trainer.

use std::path::PathBuf;

use onefold_base::units::format_bytes;

/// What can go wrong while a model is configured, trained, stored or evaluated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The dataset, or the run directory.
    Dataset(#[from] onefold_datasets::Error),

    /// The reader.
    Read(#[from] onefold_ikjt::Error),

    /// The tables' configuration, or the plan.
    Sharding {
        /// The configuration or plan.
        path: PathBuf,
        /// What is wrong with it.
        source: onefold_sharding::Error,
    },

    /// `train.toml` does not say what it should.
    Config {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong, with the section or key.
        message: String,
        /// What to do.
        hint: String,
    },

    /// An id that its table has no row for.
    Id {
        /// The feature.
        feature: String,
        /// The id.
        id: i64,
        /// Rows of the table.
        rows: u64,
    },

    /// A run directory that cannot be used.
    Run {
        /// The run directory or a file in it.
        path: PathBuf,
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A loss or a gradient that is no finite number.
    Diverged {
        /// The step, counted from 1.
        step: u64,
        /// The loss.
        loss: f64,
        /// What in the batch or the model may be the cause.
        cause: String,
        /// The file that holds the batch.
        batch: PathBuf,
    },

    /// A prediction of an evaluation that is no finite number.
    Prediction {
        /// The task's label.
        label: String,
        /// The logit.
        logit: f32,
        /// The sample, counted from 0 in the order in which the evaluation reads them.
        sample: u64,
    },

    /// A model that is larger than it may be.
    Memory {
        /// Bytes of parameters, optimizer state and gradients.
        needed: u64,
        /// Bytes that there may be.
        limit: u64,
    },

    /// A model that the machine has no memory for.
    MachineMemory {
        /// Bytes of parameters, optimizer state and gradients of all ranks on the machine.
        needed: u64,
        /// Bytes that the machine has left.
        available: u64,
        /// The number of ranks on the machine.
        ranks: u32,
    },

    /// A device that cannot be used, or that failed.
    Device {
        /// The device, as `cuda:0`.
        device: String,
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },

    /// The ranks of a job cannot be brought together.
    Ranks {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },

    /// An operation of all ranks that was called wrongly, or differently on different ranks.
    Collective {
        /// The operation.
        operation: &'static str,
        /// What is wrong.
        message: String,
    },

    /// Other ranks of the job died or hang. The lowest rank that is left reports it.
    RankLost {
        /// The lowest rank that was lost.
        rank: u32,
        /// The other ranks that were lost.
        others: Vec<u32>,
        /// The step that the reporting rank was in, counted from 1.
        step: u64,
        /// What was seen of it.
        cause: String,
    },

    /// Another rank of the job ended with an error of its own. The lowest rank that is left reports it.
    RankEnded {
        /// The rank.
        rank: u32,
        /// The step that it was in, counted from 1.
        step: u64,
        /// Its error.
        message: String,
    },

    /// This rank ends because of another, and a third one reports it.
    ReportedElsewhere {
        /// The rank that was lost or ended.
        rank: u32,
        /// The rank that reports it.
        reporter: u32,
    },

    /// libtorch refused an operation.
    Torch(#[from] tch::TchError),
}

fn on_ranks(ranks: u32) -> String {
    if ranks == 1 { " on this machine".to_owned() } else { format!(" on the {ranks} ranks of this machine") }
}

impl Error {
    /// Whether it is this rank's, and the other ranks do not know of it yet.
    pub(crate) fn is_own(&self) -> bool {
        !matches!(
            self,
            Self::Collective { .. }
                | Self::RankLost { .. }
                | Self::RankEnded { .. }
                | Self::ReportedElsewhere { .. }
        )
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// "rank 2 was", "ranks 2 and 3 were".
pub(crate) fn ranks(rank: u32, others: &[u32]) -> String {
    match others {
        [] => format!("rank {rank} was"),
        [between @ .., last] => {
            let between: String = between.iter().map(|rank| format!(", {rank}")).collect();
            format!("ranks {rank}{between} and {last} were")
        }
    }
}

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Dataset(error.into())
    }
}

impl From<onefold_train_config::Error> for Error {
    fn from(error: onefold_train_config::Error) -> Self {
        use onefold_train_config::Error as Own;
        match error {
            Own::Io(error) => Self::Io(error),
            Own::Dataset(error) => Self::Dataset(error),
            Own::Tables { path, source } => Self::Sharding { path, source },
            Own::Config { path, message, hint } => Self::Config { path, message, hint },
        }
    }
}
