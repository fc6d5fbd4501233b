//! The errors of this crate. Each names the place; its second line says what to do.

use std::path::PathBuf;

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
        hint: String,
    },

    /// An importer's input does not have the expected form.
    Source {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A program that is run (pip) failed or is missing.
    Program {
        /// The command line.
        program: String,
        /// The tail of its stderr.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A Parquet file could not be written or read.
    Parquet {
        /// The file.
        path: PathBuf,
        /// The library's error.
        source: parquet::errors::ParquetError,
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
