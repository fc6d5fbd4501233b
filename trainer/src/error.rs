//! The errors of the trainer.

use std::fmt;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text, text, unexpected};

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

    /// `train.toml`, or its tables.
    Config(#[from] onefold_train_config::Error),

    /// The plan.
    Sharding {
        /// The plan.
        path: PathBuf,
        /// What is wrong with it.
        source: onefold_sharding::Error,
    },

    /// A run directory that cannot be used.
    Run(Fault),

    /// An operation of all ranks that was called wrongly, or differently on different ranks.
    Collective(Fault),

    /// Other ranks of the job died or hang. The lowest rank that is left reports it.
    RankLost(Fault),

    /// Another rank of the job ended with an error of its own. The lowest rank that is left reports it.
    RankEnded(Fault),

    /// This rank ends because of another, and a third one reports it.
    ReportedElsewhere {
        /// The rank that was lost or ended.
        rank: u32,
        /// The rank that reports it.
        reporter: u32,
    },

    /// libtorch refused an operation.
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
    /// `train.toml`, or another configuration, does not say what it should.
    pub(crate) fn config(path: impl AsRef<Path>, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::of_file(Kind::Options, path, message).hint(hint).into()
    }

    /// A run directory, or a file in it, that cannot be used.
    pub(crate) fn run(path: impl AsRef<Path>, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::Run(Fault::of_file(Kind::Failed, path, message).hint(hint))
    }

    /// An id that its table has no row for.
    pub(crate) fn id(feature: &str, id: i64, rows: u64) -> Self {
        let message = format!("feature `{feature}`: id {id} is outside the table's rows 0..{rows}");
        let hint = format!("raise `rows` under `[tables.{feature}]`, or set `ids = \"hashed\"` there");
        Fault::new(Kind::Data, message).hint(hint).into()
    }

    /// A device, as `cuda:0`, that cannot be used, or that failed.
    pub(crate) fn device(device: impl fmt::Display, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Failed, text![format!("device `{device}`: "), message]).hint(hint).into()
    }

    /// The ranks of a job cannot be brought together.
    pub(crate) fn ranks(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Failed, message).hint(hint).into()
    }

    /// An operation of all ranks that was called wrongly, or differently on different ranks.
    pub fn collective(operation: &str, message: impl fmt::Display) -> Self {
        let message = format!("`{operation}`: {message}");
        let hint = unexpected(&message);
        Self::Collective(Fault::new(Kind::Failed, message).hint(hint))
    }

    /// The `lost` ranks, in order, were lost at `step`, counted from 1.
    pub(crate) fn rank_lost(lost: &[u32], step: u64, cause: &str) -> Self {
        let message = format!("{} lost at step {step}: {cause}", ranks(lost[0], &lost[1..]));
        let hint = "look on their hosts for what ended them (a signal, too little memory, the network), and resume the run";
        Self::RankLost(Fault::new(Kind::Failed, message).hint(hint))
    }

    /// The rank ended with the error `message` at `step`, counted from 1.
    pub(crate) fn rank_ended(rank: u32, step: u64, message: &str) -> Self {
        Self::RankEnded(Fault::new(Kind::Failed, format!("rank {rank} ended at step {step}: {message}")))
    }

    /// Whether it is this rank's, and the other ranks do not know of it yet.
    pub(crate) fn is_own(&self) -> bool {
        !matches!(
            self,
            Self::Collective(_) | Self::RankLost(_) | Self::RankEnded(_) | Self::ReportedElsewhere { .. }
        )
    }

    /// Whether all ranks are still there to go on together: the error is this rank's, or one that it has agreed on with
    /// the others.
    pub(crate) fn is_agreed(&self) -> bool {
        match self {
            Self::ReportedElsewhere { rank, reporter } => rank == reporter,
            other => other.is_own(),
        }
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
