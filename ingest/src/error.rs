//! The errors of the ETL: each names the place, and its second line says what to do.

use std::path::PathBuf;

use datafusion::arrow::error::ArrowError;
use datafusion::error::DataFusionError;

/// What can go wrong between raw logs and a dataset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    #[error("{0}")]
    Io(#[from] std::io::Error),

    /// The dataset could not be written.
    #[error(transparent)]
    Dataset(#[from] onefold_datasets::Error),

    /// `dataset.toml` does not say what it should.
    #[error("`{}`: {message}\n  hint: {hint}", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong, with the section or key.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A source has no files, or one that cannot be read.
    #[error("source `{source_name}`: `{}`: {message}\n  hint: {hint}", path.display())]
    Source {
        /// The source's name in `[sources]`.
        source_name: String,
        /// The file or pattern.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A column of the query is missing or has a type or values that its kind does not allow.
    #[error("column `{column}`: {message}\n  hint: {hint}")]
    Column {
        /// The column.
        column: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// The query gives no sample.
    #[error("the query of `{}` gives no samples, so there is nothing to build\n  hint: {hint}", path.display())]
    NoSamples {
        /// The configuration file.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// The engine ran out of the memory it was given.
    #[error(
        "the memory limit does not suffice: {message}\n  hint: raise `--memory-limit`, or lower `--threads` so that fewer operators share it"
    )]
    Memory {
        /// The engine's account, with the operator.
        message: String,
    },

    /// A source turned out to be damaged while the query read it.
    #[error(
        "a source cannot be read: {message}\n  hint: a file under `[sources]` is damaged or was changed while it was read; write it again"
    )]
    Unreadable {
        /// The engine's message, which names no file.
        message: String,
    },

    /// The engine failed while it read the sources or ran the query.
    #[error("the query failed: {message}\n  hint: {hint}")]
    Engine {
        /// The engine's message.
        message: String,
        /// What to do.
        hint: String,
    },
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<DataFusionError> for Error {
    fn from(error: DataFusionError) -> Self {
        let message = error.strip_backtrace();
        let engine = |message, hint: &str| Self::Engine { message, hint: hint.to_owned() };
        match error.find_root() {
            DataFusionError::ResourcesExhausted(_) => Self::Memory { message },
            DataFusionError::ParquetError(_) | DataFusionError::ObjectStore(_) => {
                Self::Unreadable { message }
            }
            DataFusionError::ArrowError(cause, _) if matches!(**cause, ArrowError::ParquetError(_)) => {
                Self::Unreadable { message }
            }
            DataFusionError::IoError(_) => engine(
                message,
                "check that no source changes while it is read, and the free space where `--spill-directory` is",
            ),
            _ => engine(message, "check the query and the types of its columns"),
        }
    }
}
