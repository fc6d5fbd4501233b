//! The errors of this crate: each names the place, and says what to do.

use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text, option, text};
use onefold_base::units::format_bytes;

/// What can go wrong with tables, topologies, searches and plans.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// An error about a dataset or an output path.
    Datasets(#[from] onefold_datasets::Error),

    /// An error about a dataset's samples, or their preprocessing.
    Read(#[source] Box<onefold_ikjt::Error>),

    /// A file that is missing, malformed, of another version, or holds an impossible value.
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: Text,
        /// What to do.
        hint: Text,
    },

    /// A section of a training configuration that does not fit the dataset.
    Config {
        /// The section, such as `tables.history`.
        section: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A table or topology that cannot exist.
    Invalid {
        /// What is wrong.
        message: Text,
        /// What to do.
        hint: Text,
    },

    /// A plan that contradicts itself, or does not fit the tables or the topology.
    Plan {
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A search found no rank with room for a table.
    DoesNotFit {
        /// The table.
        table: String,
        /// Its memory, or that of its smallest shard, with optimizer state and buffers.
        needed_bytes: u64,
        /// The rank with the most memory left.
        rank: u32,
        /// What that rank has left.
        left_bytes: u64,
        /// The memory of a rank.
        capacity_bytes: u64,
        /// Whether the search splits tables.
        splits: bool,
    },

    /// A rank with less memory than others cannot even ask for what they hold.
    CannotAsk {
        /// The rank.
        rank: u32,
        /// What its buffers need.
        asking_bytes: u64,
        /// What it has.
        capacity_bytes: u64,
    },

    /// All tables together are larger than all ranks together.
    NoRoom {
        /// What all tables need.
        tables_bytes: u64,
        /// What the buffers of all ranks need.
        buffer_bytes: u64,
        /// What all ranks have.
        capacity_bytes: u64,
        /// The ranks.
        ranks: u32,
        /// Ranks that have room; `None` if the buffers of many ranks leave no room in each.
        enough_ranks: Option<u64>,
    },
}

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Datasets(error.into())
    }
}

impl From<onefold_ikjt::Error> for Error {
    fn from(error: onefold_ikjt::Error) -> Self {
        Self::Read(Box::new(error))
    }
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        let wrong = |message: String| Fault::new(Kind::Options, message);
        match self {
            Self::Io(error) => error.fault(),
            Self::Datasets(error) => error.fault(),
            Self::Read(error) => error.fault(),
            Self::File { path, message, hint } => Fault::of_file(Kind::Options, path, message).hint(hint),
            Self::Config { section, message, hint } => wrong(format!("`[{section}]`: {message}")).hint(hint),
            Self::Invalid { message, hint } => Fault::new(Kind::Options, message).hint(hint),
            Self::Plan { message, hint } => wrong(format!("the plan is not valid: {message}")).hint(hint),
            Self::DoesNotFit { table, needed_bytes, rank, left_bytes, capacity_bytes, splits } => {
                let message = format!(
                    "table `{table}` fits on no rank: it needs {}, rank {rank} has the most left with {} of {}, so {} \
                     are missing",
                    format_bytes(*needed_bytes),
                    format_bytes(*left_bytes),
                    format_bytes(*capacity_bytes),
                    format_bytes(needed_bytes.saturating_sub(*left_bytes))
                );
                Fault::new(Kind::Failed, message).hint(room_hint(*needed_bytes, *capacity_bytes, *splits))
            }
            Self::CannotAsk { rank, asking_bytes, capacity_bytes } => {
                let message = format!(
                    "rank {rank} has {}, and its buffers to ask for the other ranks' rows and vectors need {}",
                    format_bytes(*capacity_bytes),
                    format_bytes(*asking_bytes)
                );
                Fault::new(Kind::Failed, message).hint(
                    "raise `memory_bytes` in its group of the topology, leave the rank out, or lower `batch_size` in \
                     the tables' file",
                )
            }
            Self::NoRoom { tables_bytes, buffer_bytes, capacity_bytes, ranks, enough_ranks } => {
                let have = match ranks {
                    1 => "1 rank has".to_owned(),
                    _ => format!("{ranks} ranks together have"),
                };
                let needed = tables_bytes.saturating_add(*buffer_bytes);
                let message = format!(
                    "the tables do not fit: with optimizer state they need {}, and the buffers of a step {}; {have} \
                     {}, so {} are missing",
                    format_bytes(*tables_bytes),
                    format_bytes(*buffer_bytes),
                    format_bytes(*capacity_bytes),
                    format_bytes(needed.saturating_sub(*capacity_bytes))
                );
                Fault::new(Kind::Failed, message).hint(ranks_hint(*ranks, *enough_ranks))
            }
        }
    }
}

impl Error {
    /// [`Error::Invalid`]: what is wrong, and what to do.
    pub fn invalid(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::Invalid { message: message.into(), hint: hint.into() }
    }

    /// [`Error::File`]: the file, what is wrong with it, and what to do.
    pub fn file(path: &Path, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::File { path: path.to_owned(), message: message.into(), hint: hint.into() }
    }

    /// A fault of a plan whose remedy is to make the plan again.
    pub(crate) fn plan(message: impl Into<String>) -> Self {
        let hint = "make the plan again with `onefold-shard plan`".to_owned();
        Self::Plan { message: message.into(), hint }
    }

    /// The same error, saying which table it is about.
    pub(crate) fn of_table(self, table: &str) -> Self {
        match self {
            Self::Invalid { message, hint } => {
                Self::Invalid { message: text![format!("table `{table}`: "), message], hint }
            }
            other => other,
        }
    }

    /// The same error, saying in which file the wrong value stands.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Invalid { message, hint } => Self::File { path: path.to_owned(), message, hint },
            Self::Plan { message, hint } => Self::File {
                path: path.to_owned(),
                message: format!("the plan is not valid: {message}").into(),
                hint: hint.into(),
            },
            other => other,
        }
    }
}

/// Another rank helps only a table that a whole rank has room for, or that can be split further.
fn room_hint(needed: u64, capacity: u64, splits: bool) -> Text {
    if needed <= capacity {
        "add ranks or raise `memory_bytes` in the topology, or lower `rows` or `dim` of the tables".into()
    } else if splits {
        "it does not split further, its columns only into multiples of 4 and its rows over the ranks; raise `memory_bytes` in the topology, add ranks, or lower the table's `rows` or `dim`".into()
    } else {
        text![
            "it is larger than a whole rank and this search does not split tables; plan with ",
            option("search").set_to("beam"),
            ", raise `memory_bytes` in the topology, or lower the table's `rows` or `dim`"
        ]
    }
}

/// More ranks bring memory, and more samples to exchange: they help where the buffers leave something of a rank.
fn ranks_hint(ranks: u32, enough: Option<u64>) -> String {
    match enough {
        Some(enough) => {
            let enough = enough.max(u64::from(ranks) + 1);
            format!(
                "plan for {enough} ranks or more, raise `memory_bytes` in the topology, or lower `rows` or `dim` of the tables"
            )
        }
        None => "more ranks do not help, as they exchange more vectors; raise `memory_bytes` in the topology, or lower \
                 `batch_size` in the tables' file, or `dim` of the tables"
            .to_owned(),
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
