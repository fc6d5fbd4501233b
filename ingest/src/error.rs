//! The errors of the ETL. Each error names a place and suggests a fix.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use onefold_base::fault::{Explain, Fault, Kind, Text, option, text, unexpected};

/// The message and the hint of an error, before the place is added.
pub(crate) type MessageAndHint = (String, String);

/// An error of the way from raw logs to a dataset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the operating system; `fs_err` adds the path to the message.
    Io(#[from] std::io::Error),

    /// The dataset could not be read or written.
    Dataset(#[source] onefold_datasets::Error),

    /// An operator could not spill: the disk is full, a file is too large, or the spill limit is reached.
    Spill(Fault),

    /// Several problems of a configuration and its logs.
    Problems(Vec<Fault>),

    /// Any other error.
    Fault(#[from] Fault),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<onefold_datasets::Error> for Error {
    fn from(error: onefold_datasets::Error) -> Self {
        match error {
            // The writer passes an error of this crate through.
            onefold_datasets::Error::Decoding(own) => match own.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => Self::Dataset(onefold_datasets::Error::Decoding(other)),
            },
            error => Self::Dataset(error),
        }
    }
}

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Dataset(error.into())
    }
}

impl From<DataFusionError> for Error {
    fn from(error: DataFusionError) -> Self {
        // The engine passes an error of this crate through.
        let error = match own(error) {
            Ok(error) => return error,
            Err(error) => error,
        };
        // A shared error cannot be moved out, so its fault is copied if it has a hint.
        if let DataFusionError::External(cause) = error.find_root()
            && let Some(fault) = cause.downcast_ref().map(Self::fault)
            && !fault.hints.is_empty()
        {
            return fault.into();
        }
        let message = engine_message(&error);
        if let Some(message) = spill_limit(&message) {
            return Self::Spill(at_spill_limit(&message));
        }
        if is_full(error.find_root()) {
            return Self::Spill(disk_is_full(&message));
        }
        match error.find_root() {
            DataFusionError::ResourcesExhausted(_) => {
                let message = format!("the memory limit does not suffice: {message}");
                let hint = text![
                    "raise ",
                    option("memory_limit"),
                    ", or lower ",
                    option("threads"),
                    " so that fewer operators share the memory"
                ];
                Fault::new(Kind::Failed, message).hint(hint).into()
            }
            DataFusionError::IoError(_) => {
                let hint = text![
                    "check that the spill directory (",
                    option("spill_directory"),
                    ") is a folder that can be written"
                ];
                Fault::new(Kind::Storage, format!("the query failed: {message}")).hint(hint).into()
            }
            _ => {
                let hint = advice(&message).unwrap_or("check the query and the types of its columns");
                Self::engine(message, hint)
            }
        }
    }
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Dataset(error) => error.fault(),
            Self::Problems(faults) => as_one(faults),
            Self::Spill(fault) | Self::Fault(fault) => fault.clone(),
        }
    }
}

impl Error {
    /// Returns the error for a `dataset.toml` that is invalid or does not fit the data. `message` names the section or
    /// key.
    pub(crate) fn config(path: &Path, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::of_file(Kind::Options, path, message).hint(hint).into()
    }

    /// Returns the error for data with a wrong form or wrong values. `place` is, for example, a file or a column.
    pub(crate) fn data(place: impl fmt::Display, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Data, text![format!("{place}: "), message]).hint(hint).into()
    }

    /// Returns the error for a column that the query lacks, or with a type or values that its kind of feature does not
    /// allow.
    pub(crate) fn column(column: &str, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::data(format!("column `{column}`"), message, hint)
    }

    /// Returns the error for a query of the configuration `path` that gives no samples.
    pub(crate) fn no_samples(path: &Path, hint: impl Into<Text>) -> Self {
        let message =
            format!("the query of `{}` gives no samples, so there is nothing to build", path.display());
        Fault::new(Kind::Data, message).hint(hint).into()
    }

    /// Returns the error for a file of the source `name` that cannot be read or does not exist.
    pub(crate) fn source(name: &str, path: &Path, message: String, hint: String) -> Self {
        let place = format!("source `{name}`: `{}`", path.display());
        Fault::new(Kind::Failed, format!("{place}: {message}")).hint(hint).into()
    }

    /// Returns the error together with the faults that explain it, unless neither the
    /// configuration nor its logs caused it.
    pub(crate) fn explained(self, mut faults: Vec<Fault>) -> Self {
        let is_of_input = matches!(self.fault().kind, Kind::Data | Kind::Options | Kind::Failed);
        if faults.is_empty() || !is_of_input || matches!(self, Self::Spill(_)) {
            return self;
        }
        match self {
            Self::Problems(others) => faults.extend(others),
            error => faults.push(error.fault()),
        }
        Self::Problems(faults)
    }

    /// Returns the error for a failure of the engine while it reads the sources or runs the query.
    pub fn engine(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Failed, text!["the query failed: ", message]).hint(hint).into()
    }
}

/// Combines all problems into one fault with a list of their messages and hints.
fn as_one(faults: &[Fault]) -> Fault {
    let mut message = format!("there are {} problems", faults.len());
    for (number, fault) in faults.iter().enumerate() {
        message += &format!("\n{}. {}", number + 1, fault.message);
        fault.hints.iter().for_each(|hint| message += &format!("\n   fix: {hint}"));
    }
    let kind =
        if faults.iter().all(|fault| fault.kind == Kind::Options) { Kind::Options } else { Kind::Data };
    Fault::new(kind, message)
        .hint("correct all of them; `onefold-ingest check` lists what is left, and writes nothing")
}

/// Wraps an error of this crate so that it can pass through the engine.
pub(crate) fn external(error: Error) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// Returns the error for a state that no input can cause.
pub(crate) fn bug(message: &str) -> Error {
    Error::engine(message, unexpected(message))
}

/// Reports an Arrow error on columns that were checked before as a bug.
pub(crate) fn arrow_bug(error: ArrowError) -> Error {
    bug(&error.to_string())
}

/// Returns the fault for an operator that cannot spill, because the disk is full or a file is too large.
fn disk_is_full(message: &str) -> Fault {
    let message = format!("rows that do not fit into memory cannot be written to disk: {message}");
    Fault::new(Kind::Storage, message).hint(text![
        "free some space in the spill directory (by default the system's temporary directory), choose one on another \
         disk with ",
        option("spill_directory"),
        ", or raise ",
        option("memory_limit"),
        "; nothing was changed"
    ])
}

/// Returns the fault for temporary files that have reached the spill limit.
fn at_spill_limit(message: &str) -> Fault {
    let message = format!("rows that do not fit into memory reached the spill limit: {message}");
    Fault::new(Kind::Failed, message).hint(text![
        "raise ",
        option("spill_limit"),
        " (if it was not set, set it: temporary files are then compressed), free some space in the spill directory \
         (by default the system's temporary directory), choose one on a larger disk with ",
        option("spill_directory"),
        ", or raise ",
        option("memory_limit"),
        "; nothing was changed"
    ])
}

/// Returns the engine's message without its claim of an internal error and its request for a bug report. The cause is
/// nearly always an incorrect expression in the user's SQL.
pub(crate) fn engine_message(error: &DataFusionError) -> String {
    const REPORT: &str = "This issue was likely caused by a bug in DataFusion's code.";
    let mut message = error.strip_backtrace();
    while let Some(start) = message.find(REPORT) {
        let end = message[start..].find("/datafusion/issues").map_or(message.len(), |at| start + at + 18);
        message.replace_range(start..end, "");
    }
    let message = message.replace("Internal error: ", "");
    message.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

/// Returns advice for messages of the engine that contain none.
pub(crate) fn advice(message: &str) -> Option<&'static str> {
    if message.contains("Overflow") && (message.contains("Nanosecond") || message.contains("* 1000")) {
        return Some(
            "nanoseconds hold the years 1678 to 2261: use microseconds, as `arrow_cast('9999-12-31', \
             'Timestamp(Microsecond, None)')` in place of `TIMESTAMP '9999-12-31'`",
        );
    }
    if message.contains("Cannot cast string") || message.contains("Error parsing timestamp") {
        return Some(
            "a text is not such a value: `TRY_CAST` in place of `CAST` is null for it, which `COALESCE(…, 0)` or `WHERE … IS \
             NOT NULL` can handle",
        );
    }
    (message.contains("failed to match any signature") || message.contains("does not support")).then_some(
        "a function does not take values of these types; convert them, for example with `CAST(x AS BIGINT)`",
    )
}

/// Returns the sentence about the limit of temporary files from a message of the engine, if there is one. The engine
/// has no error type for this; the sentence is inside the error of a write.
fn spill_limit(message: &str) -> Option<String> {
    let from = message.find("The used disk space during the spilling process")?;
    let sentence = message[from..].split(". ").next()?;
    Some(sentence.trim_end_matches('.').replacen("The", "the", 1))
}

/// Returns whether an error of the engine is caused by a full disk. The engine wraps the operating system's error
/// several times.
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

/// Extracts an error of this crate from an error of the engine, or returns the engine's error.
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
    fn the_spill_limit_has_its_own_error() {
        // The engine writes this sentence; the tests of `engine` check it.
        let sentence = "The used disk space during the spilling process has exceeded the allowable limit of 1.0 MB. Please";
        let error = ArrowError::from(io::Error::other(sentence));
        let error = Error::from(DataFusionError::ArrowError(Box::new(error), None).context("sort"));
        let expected =
            "the used disk space during the spilling process has exceeded the allowable limit of 1.0 MB";
        assert!(
            matches!(&error, Error::Spill(fault) if fault.message.to_string().ends_with(expected)),
            "{error}"
        );
    }

    #[test]
    fn a_full_disk_is_recognised_however_it_is_wrapped() {
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
            assert!(matches!(Error::from(error), Error::Spill(_)), "{text}");
        }
        let other = DataFusionError::IoError(io::Error::from(io::ErrorKind::PermissionDenied));
        let error = Error::from(other);
        assert_eq!(error.fault().kind, Kind::Storage);
        assert!(error.to_string().contains("check that the spill directory"), "{error}");
    }
}
