//! The errors of the trainer.

use std::path::PathBuf;

use onefold_base::fault::{Explain, Fault, Kind, Text, option, text};
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
        hint: Text,
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
        hint: Text,
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
        hint: Text,
    },

    /// The ranks of a job cannot be brought together.
    Ranks {
        /// What is wrong.
        message: Text,
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

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Dataset(error) => error.fault(),
            Self::Read(error) => error.fault(),
            Self::Sharding { path, source } => source.fault().within(&format!("`{}`", path.display())),
            Self::Config { path, message, hint } => Fault::of_file(Kind::Options, path, message).hint(hint),
            Self::Id { feature, id, rows } => {
                let message = format!("feature `{feature}`: id {id} is outside the table's rows 0..{rows}");
                let section = format!("`[tables.{feature}]`");
                let hint = format!("raise `rows` under {section}, or set `ids = \"hashed\"` there");
                Fault::new(Kind::Data, message).hint(hint)
            }
            Self::Run { path, message, hint } => Fault::of_file(Kind::Failed, path, message).hint(hint),
            Self::Diverged { step, loss, cause, batch } => {
                let look = format!("`pyarrow.ipc.open_file(\"{}\").read_pandas()`", batch.display());
                Fault::new(Kind::Failed, format!("the loss is {loss} at step {step}: {cause}")).hint(format!(
                    "the batch is saved: look at it with {look}; lower the learning rates under `[optimizer]`, set \
                     `max_grad_norm` under `[optimizer.dense]`, or clean the feature"
                ))
            }
            Self::Prediction { label, logit, sample } => {
                let place = format!("in sample {sample} of the evaluation, counted from 0");
                Fault::new(Kind::Failed, format!("the logit of `{label}` is {logit} {place}")).hint(
                    "clean the dense features if some are no finite numbers; if all are, the model has diverged: lower \
                     the learning rates under `[optimizer]`, or evaluate an earlier checkpoint",
                )
            }
            Self::Memory { needed, limit } => {
                let (needed, limit) = (format_bytes(*needed), format_bytes(*limit));
                let message = format!("the model takes {needed}, and the memory limit is {limit}");
                Fault::new(Kind::Failed, message).hint(text![
                    "raise ",
                    option("memory_limit"),
                    ", or give the tables fewer rows or a smaller `dim`"
                ])
            }
            Self::MachineMemory { needed, available, ranks } => {
                let (needed, available) = (format_bytes(*needed), format_bytes(*available));
                let on = on_ranks(*ranks);
                let message = format!("the model takes {needed}{on}, which has {available} of memory left");
                Fault::new(Kind::Failed, message).hint(text![
                    "give the tables fewer rows, a smaller `dim` or `dtype = \"bf16\"`, or divide them among more \
                     machines; if it does fit, say so with ",
                    option("memory_limit"),
                    " of `run`"
                ])
            }
            Self::Device { device, message, hint } => {
                Fault::new(Kind::Failed, format!("device `{device}`: {message}")).hint(hint)
            }
            Self::Ranks { message, hint } => Fault::new(Kind::Failed, message).hint(hint),
            Self::Collective { operation, message } => {
                Fault::new(Kind::Failed, format!("`{operation}`: {message}")).hint(BUG)
            }
            Self::RankLost { rank, others, step, cause } => {
                let message = format!("{} lost at step {step}: {cause}", ranks(*rank, others));
                Fault::new(Kind::Failed, message).hint(
                    "look on their hosts for what ended them (a signal, too little memory, the network), and resume \
                     the run",
                )
            }
            Self::RankEnded { rank, step, message } => {
                Fault::new(Kind::Failed, format!("rank {rank} ended at step {step}: {message}"))
            }
            Self::ReportedElsewhere { rank, reporter } => {
                let message = format!("ended because of rank {rank}, as rank {reporter} reports");
                Fault::new(Kind::Failed, message)
            }
            Self::Torch(error) => Fault::new(Kind::Failed, format!("libtorch: {error}")).hint(BUG),
        }
    }
}

const BUG: &str = "this is a bug in Onefold; please report it with the command line";

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
            Own::Config { path, message, hint } => Self::Config { path, message, hint: hint.into() },
        }
    }
}
