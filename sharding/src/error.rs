//! The errors of this crate. Each message names the place of the error, and says what to do.

use std::fmt;
use std::path::Path;

use onefold_base::fault::{Explain, Fault, Kind, Text, option, text};
use onefold_base::units::format_bytes;

/// An error about tables, topologies, searches or plans.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the operating system. `fs_err` adds the path to the message.
    Io(#[from] std::io::Error),

    /// An error about a dataset or an output path.
    Datasets(#[from] onefold_datasets::Error),

    /// A table, topology or plan that is invalid, or that does not fit the others.
    Invalid(Fault),

    /// The tables do not fit into the memory of the ranks, or a search found no rank with enough memory for one of
    /// them.
    NoRoom(Fault),

    /// Any other error.
    Fault(#[from] Fault),
}

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Datasets(error.into())
    }
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Datasets(error) => error.fault(),
            Self::Invalid(fault) | Self::NoRoom(fault) | Self::Fault(fault) => fault.clone(),
        }
    }
}

impl Error {
    /// Makes an [`Error::Invalid`] from the problem and the remedy.
    pub fn invalid(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::Invalid(Fault::new(Kind::Options, message).hint(hint))
    }

    /// Makes an error about a file that is missing, malformed, of another version, or contains an invalid value.
    pub fn file(path: &Path, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::of_file(Kind::Options, path, message).hint(hint).into()
    }

    /// Makes an error about a plan that has to be made again.
    pub(crate) fn plan(message: impl fmt::Display) -> Self {
        Self::invalid(
            format!("the plan is not valid: {message}"),
            "make the plan again with `onefold-shard plan`",
        )
    }

    /// Makes an error about a search that found no rank with enough memory for `table`. `needed` bytes of the table
    /// must be on one rank. `rank` is the rank with the most free memory: `left` of its `capacity` bytes. `splits`
    /// states whether the search splits tables.
    pub(crate) fn does_not_fit(
        table: &str,
        needed: u64,
        (rank, left, capacity): (u32, u64, u64),
        splits: bool,
    ) -> Self {
        let message = format!(
            "table `{table}` fits on no rank: it needs {}, rank {rank} has the most left with {} of {}, so {} are \
             missing",
            format_bytes(needed),
            format_bytes(left),
            format_bytes(capacity),
            format_bytes(needed.saturating_sub(left))
        );
        Self::NoRoom(Fault::new(Kind::Failed, message).hint(room_hint(needed, capacity, splits)))
    }

    /// Makes an error about tables whose `tables` bytes, with the `buffers` of all ranks, exceed the `capacity` of
    /// all `ranks`, in bytes. `enough` is a number of ranks that suffices, or `None` if it is unknown.
    pub(crate) fn no_room(tables: u64, buffers: u64, capacity: u64, ranks: u32, enough: Option<u32>) -> Self {
        let have = match ranks {
            1 => "1 rank has".to_owned(),
            _ => format!("{ranks} ranks together have"),
        };
        let message = format!(
            "the tables do not fit: with optimizer state they need {}, and the buffers of a step {}; {have} {}, so {} \
             are missing",
            format_bytes(tables),
            format_bytes(buffers),
            format_bytes(capacity),
            format_bytes(tables.saturating_add(buffers).saturating_sub(capacity))
        );
        Self::NoRoom(Fault::new(Kind::Failed, message).hint(ranks_hint(enough)))
    }

    /// Adds `place` before the message of an [`Error::Invalid`].
    pub(crate) fn within(self, place: &str) -> Self {
        match self {
            Self::Invalid(fault) => Self::Invalid(fault.within(place)),
            other => other,
        }
    }

    /// Adds the name of the file that contains the invalid value.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Invalid(fault) => Self::Fault(fault.within(&format!("`{}`", path.display()))),
            other => other,
        }
    }
}

/// Returns the hint for a table without room. More ranks help only if a whole rank has room for the table, or if the
/// table can be split further.
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

/// Returns the hint to plan for more ranks. The samples of a step are divided among the ranks, so more ranks bring
/// more memory and need smaller buffers.
fn ranks_hint(enough: Option<u32>) -> String {
    let raise = "raise `memory_bytes` in the topology, or lower `global_batch_size` in the tables' file, or `rows` or \
                 `dim` of the tables";
    enough.map_or_else(|| raise.to_owned(), |enough| format!("plan for {enough} ranks or more, {raise}"))
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
