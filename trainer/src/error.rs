//! Errors of the trainer.

use std::fmt;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text, option, text, unexpected};

/// An error in configuring, training, storing or evaluating a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` adds the path.
    Io(#[from] std::io::Error),

    /// An error of the dataset or the run directory.
    Dataset(#[from] onefold_datasets::Error),

    /// An error of the reader.
    Read(#[from] onefold_ikjt::Error),

    /// An error of `train.toml` or its tables.
    Config(#[from] onefold_train_config::Error),

    /// An invalid plan.
    Sharding {
        /// The path of the plan.
        path: PathBuf,
        /// The error of the plan.
        source: onefold_sharding::Error,
    },

    /// A run directory that is missing, incomplete or damaged, or does not fit.
    Run(Fault),

    /// A collective operation with wrong arguments, or with different arguments on different ranks.
    Collective(Fault),

    /// Other ranks of the job died or hang. The lowest remaining rank reports it.
    RankLost(Fault),

    /// Another rank of the job ended with an error. The lowest remaining rank reports it.
    RankEnded(Fault),

    /// This rank ends because of another rank, and a different rank reports it.
    ReportedElsewhere {
        /// The rank that was lost or ended.
        rank: u32,
        /// The rank that reports it.
        reporter: u32,
    },

    /// An error of a libtorch operation.
    Torch(#[from] tch::TchError),

    /// Any other error.
    Fault(#[from] Fault),
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Dataset(error) => error.fault(),
            Self::Read(error) => error.fault(),
            Self::Config(error) => error.fault(),
            Self::Sharding { path, source } => source.fault().within(&format!("`{}`", path.display())),
            Self::Run(fault)
            | Self::Collective(fault)
            | Self::RankLost(fault)
            | Self::RankEnded(fault)
            | Self::Fault(fault) => fault.clone(),
            Self::ReportedElsewhere { rank, reporter } => {
                let message = format!("ended because of rank {rank}, as rank {reporter} reports");
                Fault::new(Kind::Failed, message)
            }
            Self::Torch(error) => {
                let text = error.to_string();
                Fault::new(Kind::Failed, format!("libtorch: {text}")).hint(unexpected(&text))
            }
        }
    }
}

impl Error {
    /// Returns an error about the content of `train.toml` or another configuration file.
    pub(crate) fn config(path: impl AsRef<Path>, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::of_file(Kind::Options, path, message).hint(hint).into()
    }

    /// Returns an error about a run directory or a file in it.
    pub(crate) fn run(path: impl AsRef<Path>, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::Run(Fault::of_file(Kind::Failed, path, message).hint(hint))
    }

    /// Returns an error about a run that cannot be continued as asked; `instead` says how to continue it.
    pub(crate) fn not_continued(
        path: impl AsRef<Path>,
        message: impl Into<Text>,
        instead: impl Into<Text>,
    ) -> Self {
        let hint = text![instead, ", or begin a new run in another directory, with ", option("out")];
        Self::run(path, message, hint)
    }

    /// Returns an error about an id outside the rows of its table.
    pub(crate) fn id(feature: &str, id: i64, rows: u64) -> Self {
        let message = format!("feature `{feature}`: id {id} is outside the table's rows 0..{rows}");
        let hint = format!("raise `rows` under `[tables.{feature}]`, or set `ids = \"hashed\"` there");
        Fault::new(Kind::Data, message).hint(hint).into()
    }

    /// Returns an error about a device, such as `cuda:0`, that failed or cannot be used.
    pub(crate) fn device(device: impl fmt::Display, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Failed, text![format!("device `{device}`: "), message]).hint(hint).into()
    }

    /// Returns an error about ranks that cannot join.
    pub(crate) fn ranks(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Failed, message).hint(hint).into()
    }

    /// Returns an error about a collective operation with wrong arguments, or with different arguments on
    /// different ranks.
    pub fn collective(operation: &str, message: impl fmt::Display) -> Self {
        let message = format!("`{operation}`: {message}");
        let hint = unexpected(&message);
        Self::Collective(Fault::new(Kind::Failed, message).hint(hint))
    }

    /// Returns an error about the ranks `lost`, in ascending order, that were lost at `step`, counted from 1.
    pub(crate) fn rank_lost(lost: &[u32], step: u64, cause: &str) -> Self {
        let message = format!("{} lost at step {step}: {cause}", ranks(lost[0], &lost[1..]));
        let hint = "look on their hosts for what ended them (a signal, too little memory, the network), and resume the run";
        Self::RankLost(Fault::new(Kind::Failed, message).hint(hint))
    }

    /// Returns an error about a rank that ended with the error `message` at `step`, counted from 1.
    pub(crate) fn rank_ended(rank: u32, step: u64, message: &str) -> Self {
        Self::RankEnded(Fault::new(Kind::Failed, format!("rank {rank} ended at step {step}: {message}")))
    }

    /// Returns whether the error occurred on this rank and is not yet known to the other ranks.
    pub fn is_own(&self) -> bool {
        !matches!(
            self,
            Self::Collective(_) | Self::RankLost(_) | Self::RankEnded(_) | Self::ReportedElsewhere { .. }
        )
    }

    /// Returns whether all ranks are still alive and synchronized: the error occurred on this rank only, or all
    /// ranks have agreed on it.
    pub(crate) fn is_agreed(&self) -> bool {
        match self {
            Self::ReportedElsewhere { rank, reporter } => rank == reporter,
            other => other.is_own(),
        }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns the subject and verb of a message, such as "rank 2 was" or "ranks 2 and 3 were".
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
