//! The errors of this crate. Each names the place, and says what to do.

use std::fmt;
use std::path::Path;

use onefold_base::fault::{Explain, Fault, Kind, Text, text};
use parquet::errors::ParquetError;

/// What can go wrong when raw logs are fetched, imported, generated or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The output directory exists already or cannot be written.
    Output(#[from] onefold_datasets::Error),

    /// An Arrow operation failed on data that had been checked: a bug of Onefold.
    Internal(#[from] arrow::error::ArrowError),

    /// Any other error.
    Fault(#[from] Fault),
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
            Self::Internal(error) => Fault::new(Kind::Failed, format!("internal error: {error}"))
                .hint("this is a bug in Onefold; please report it with the command line"),
            Self::Fault(fault) => fault.clone(),
        }
    }
}

impl Error {
    /// An importer's input does not have the expected form.
    pub(crate) fn source(path: impl AsRef<Path>, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::of_file(Kind::Data, path, message).hint(hint).into()
    }

    /// A program that is run (pip) failed or is missing.
    pub(crate) fn program(
        program: impl fmt::Display,
        message: impl Into<Text>,
        hint: impl Into<Text>,
    ) -> Self {
        Fault::new(Kind::Failed, text![format!("`{program}` failed: "), message]).hint(hint).into()
    }

    /// A Parquet file could not be written or read.
    pub(crate) fn parquet(path: &Path, source: &ParquetError, hint: &str) -> Self {
        let is_system = matches!(source, ParquetError::External(cause) if cause.is::<std::io::Error>());
        let kind = if is_system { Kind::Storage } else { Kind::Data };
        Fault::of_file(kind, path, source.to_string()).hint(hint).into()
    }
}
