//! The errors of the ETL: each names the place, and its second line says what to do.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

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

    /// A popularity file does not say what it should.
    #[error("`{}`, line {line}: {message}\n  hint: {hint}", path.display())]
    Popularity {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
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

    /// Rows do not fit, and the configuration says that this is an error.
    #[error("{place}: {message}\n  hint: {hint}")]
    Rows {
        /// The key of the configuration that makes it one, or the section that reads the rows.
        place: String,
        /// How many rows, what is wrong with them, and one of them.
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

    /// An operator could not spill: the disk is full, or files may not be so large.
    #[error(
        "what does not fit into memory cannot be written: {message}\n  hint: free some space where `--spill-directory` is (by default the system's temporary directory), name another disk with it, or raise `--memory-limit`; nothing was changed"
    )]
    Spill {
        /// The engine's message.
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
        // Our own error, on its way back through the engine.
        let error = match own(error) {
            Ok(error) => return error,
            Err(error) => error,
        };
        // Shared, it cannot be taken out, but said again.
        if let DataFusionError::External(cause) = error.find_root()
            && let Some(again) = cause.downcast_ref().and_then(Self::said_again)
        {
            return again;
        }
        let message = error.strip_backtrace();
        let engine = |message, hint: &str| Self::Engine { message, hint: hint.to_owned() };
        if is_full(error.find_root()) {
            return Self::Spill { message };
        }
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
                "check that no source changes while it is read, and that `--spill-directory` is a folder that can be written",
            ),
            _ => engine(message, "check the query and the types of its columns"),
        }
    }
}

impl Error {
    /// An equal error, of those that the ETL's own parts of a query give.
    fn said_again(&self) -> Option<Self> {
        match self {
            Self::Source { source_name, path, message, hint } => Some(Self::Source {
                source_name: source_name.clone(),
                path: path.clone(),
                message: message.clone(),
                hint: hint.clone(),
            }),
            Self::Column { column, message, hint } => {
                Some(Self::Column { column: column.clone(), message: message.clone(), hint: hint.clone() })
            }
            _ => None,
        }
    }
}

/// Whether the operating system's error inside one of the engine's is that nothing more can be written. The engine wraps
/// it more than once.
fn is_full(error: &(dyn std::error::Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<io::Error>() {
        let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded, io::ErrorKind::FileTooLarge];
        return kinds.contains(&error.kind()) || error.get_ref().is_some_and(|inner| is_full(inner));
    }
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(DataFusionError::IoError(cause)), _) => is_full(cause),
        (Some(DataFusionError::ArrowError(cause, _)), _) => is_full(&**cause),
        (Some(DataFusionError::External(cause)), _) => is_full(&**cause),
        (_, Some(ArrowError::IoError(_, cause))) => is_full(cause),
        _ => error.source().is_some_and(is_full),
    }
}

/// Our own error inside one of the engine's, or the engine's error itself.
fn own(error: DataFusionError) -> Result<Error, DataFusionError> {
    match error {
        DataFusionError::Context(context, inner) => {
            own(*inner).map_err(|inner| DataFusionError::Context(context, Box::new(inner)))
        }
        DataFusionError::Shared(shared) => match Arc::try_unwrap(shared) {
            Ok(inner) => own(inner),
            Err(shared) => Err(DataFusionError::Shared(shared)),
        },
        DataFusionError::External(inner) => match inner.downcast::<Error>() {
            Ok(ours) => Ok(*ours),
            Err(other) => Err(DataFusionError::External(other)),
        },
        other => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_however_it_is_wrapped() {
        let full = || io::Error::from_raw_os_error(28);
        let arrow = |error| DataFusionError::ArrowError(Box::new(error), None);
        let wrapped = io::Error::other(ArrowError::IoError("written".to_owned(), full()));
        let errors = [
            DataFusionError::IoError(full()),
            arrow(ArrowError::IoError("x".to_owned(), full())),
            arrow(ArrowError::IoError("x".to_owned(), wrapped)).context("sort"),
            DataFusionError::External(Box::new(full())),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(matches!(Error::from(error), Error::Spill { .. }), "{text}");
        }
        let other = DataFusionError::IoError(io::Error::from(io::ErrorKind::PermissionDenied));
        assert!(matches!(Error::from(other), Error::Engine { .. }));
    }
}
