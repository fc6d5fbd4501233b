//! The errors of this crate. Each message names the place of the error, and says what to do.

use std::fmt;
use std::path::Path;

use onefold_base::fault::{Fault, Kind, Text, text};
use parquet::errors::ParquetError;

use crate::Error;

/// Makes an error about an importer's input that does not have the expected form.
pub(crate) fn source(path: impl AsRef<Path>, message: impl Into<Text>, hint: impl Into<Text>) -> Error {
    Fault::of_file(Kind::Data, path, message).hint(hint).into()
}

/// Makes an error about a program (pip) that failed or is missing.
pub(crate) fn program(program: impl fmt::Display, message: impl Into<Text>, hint: impl Into<Text>) -> Error {
    Fault::new(Kind::Failed, text![format!("`{program}` failed: "), message]).hint(hint).into()
}

/// Makes an error about a Parquet file that could not be written or read.
pub(crate) fn parquet(path: &Path, source: &ParquetError, hint: &str) -> Error {
    let is_system = matches!(source, ParquetError::External(cause) if cause.is::<std::io::Error>());
    let kind = if is_system { Kind::Storage } else { Kind::Data };
    Fault::of_file(kind, path, source.to_string()).hint(hint).into()
}
