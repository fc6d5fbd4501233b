//! The errors of this crate. Each names the place, and says what to do.

use std::path::PathBuf;

use onefold_base::fault::{Explain, Fault, Kind, Text};
use parquet::errors::ParquetError;

/// What can go wrong when raw logs are fetched, imported, generated or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The output directory exists already or cannot be written.
    Output(#[from] onefold_datasets::Error),

    /// Generator options that contradict each other.
    Options {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: Text,
    },

    /// An importer's input does not have the expected form.
    Source {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: Text,
    },

    /// A program that is run (pip) failed or is missing.
    Program {
        /// The command line.
        program: String,
        /// The tail of its stderr.
        message: String,
        /// What to do.
        hint: Text,
    },

    /// A Parquet file could not be written or read.
    Parquet {
        /// The file.
        path: PathBuf,
        /// The library's error.
        source: ParquetError,
        /// What to do.
        hint: String,
    },

    /// An Arrow operation failed on data that had been checked: a bug of Onefold.
    Internal(#[from] arrow::error::ArrowError),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Output(error.into())
    }
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Output(error) => error.fault(),
            Self::Options { message, hint } => Fault::new(Kind::Options, message).hint(hint),
            Self::Source { path, message, hint } => Fault::of_file(Kind::Data, path, message).hint(hint),
            Self::Program { program, message, hint } => {
                Fault::new(Kind::Failed, format!("`{program}` failed: {message}")).hint(hint)
            }
            Self::Parquet { path, source, hint } => {
                let is_system =
                    matches!(source, ParquetError::External(cause) if cause.is::<std::io::Error>());
                let kind = if is_system { Kind::Storage } else { Kind::Data };
                Fault::of_file(kind, path, source.to_string()).hint(hint)
            }
            Self::Internal(error) => Fault::new(Kind::Failed, format!("internal error: {error}"))
                .hint("this is a bug in Onefold; please report it with the command line"),
        }
    }
}
