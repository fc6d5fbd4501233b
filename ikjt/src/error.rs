//! The errors of tensors, of the reader and of preprocessing.

use std::fmt;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text};

/// An error of reading, decoding, preprocessing or transferring batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// An error about the dataset's snapshot or about a partition filter.
    Dataset(#[from] onefold_datasets::Error),

    /// Buffers that violate the invariants of a feature, group or batch.
    Invariant(Fault),

    /// A data file that cannot be decoded.
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The row group, if the error occurred in one.
        row_group: Option<usize>,
        /// The column, if it is known.
        column: Option<String>,
        /// The row within the row group, if it is known.
        row: Option<usize>,
        /// The decoder's message.
        message: String,
    },

    /// Any other error, or an error that a preprocessing service returned instead of batches.
    Fault(#[from] Fault),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Dataset(error.into())
    }
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Dataset(error) => error.fault(),
            Self::Invariant(fault) | Self::Fault(fault) => fault.clone(),
            Self::Corrupt { path, row_group, column, row, message } => {
                let place = place_in_file(*row_group, column.as_deref(), *row);
                Fault::new(Kind::Data, format!("`{}`{place}: {message}", path.display()))
                    .hint("the file is damaged; build the dataset again, or restore the file from a copy")
            }
        }
    }
}

impl Error {
    /// Creates an error about options that do not suit this dataset, with a message and a hint.
    pub fn options(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Options, message).hint(hint).into()
    }

    /// Creates an error about buffers that violate an invariant. `place` names the feature, group or batch; `message`
    /// names the broken invariant with index, value and bound.
    pub fn invariant(place: impl fmt::Display, message: impl fmt::Display) -> Self {
        Self::Invariant(Fault::new(Kind::Data, format!("{place}: {message}")))
    }

    /// Creates an error for a data file, or one of its row groups, that cannot be decoded.
    pub(crate) fn corrupt(path: &Path, row_group: Option<usize>, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Corrupt { path: path.to_owned(), row_group, column: None, row: None, message }
    }

    /// Creates an error for a data file that differs from what the snapshot records.
    pub(crate) fn mismatch(path: impl AsRef<Path>, message: impl Into<Text>) -> Self {
        let hint = "the file was replaced or removed after the build; build the dataset again";
        Fault::of_file(Kind::Data, path, message).hint(hint).into()
    }

    /// Creates an error for a batch from another process that does not match the request.
    pub fn wrong_batch(error: &Self) -> Self {
        let message =
            format!("the preprocessing service sent something else than a batch of the job: {error}");
        Fault::new(Kind::Data, message).into()
    }

    /// Creates an error for an invalid value of a sample. The error names the file, row group and row if `origin` is
    /// given, and otherwise the sample's index in its batch.
    pub(crate) fn value(
        (origin, sample): (Option<Origin>, usize),
        column: &str,
        message: &str,
        hint: &str,
    ) -> Self {
        let place = match origin {
            Some(Origin { path, row_group, row }) => {
                format!("`{}`{}", path.display(), place_in_file(Some(row_group), Some(column), Some(row)))
            }
            None => format!("sample {sample} of a batch{}", place_in_file(None, Some(column), None)),
        };
        Fault::new(Kind::Data, format!("{place}: {message}")).hint(hint).into()
    }
}

/// The place of a sample in the dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) path: PathBuf,
    pub(crate) row_group: usize,
    /// The row within the row group.
    pub(crate) row: usize,
}

/// Describes a place in a file by its row group, column and row, as far as they are known, as a suffix of the path.
fn place_in_file(row_group: Option<usize>, column: Option<&str>, row: Option<usize>) -> String {
    let row_group = row_group.map(|row_group| format!(", row group {row_group}"));
    let column = column.map(|column| format!(", column `{column}`"));
    let row = row.map(|row| format!(", row {row}"));
    [row_group, column, row].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use onefold_storage::Error as StorageError;

    use super::*;

    #[test]
    fn kinds_of_errors_separate_options_data_and_storage() {
        let kinds: [(Error, Kind); 3] = [
            (StorageError::location("split=", "it is no URL", "write one").into(), Kind::Options),
            (Error::value((None, 0), "rating", "it is 7", "exclude it"), Kind::Data),
            (std::io::Error::from(std::io::ErrorKind::PermissionDenied).into(), Kind::Storage),
        ];
        for (error, kind) in kinds {
            assert_eq!(error.fault().kind, kind, "{error}");
        }
    }

    #[test]
    fn errors_of_values_name_the_known_position() {
        let origin = Origin { path: "a.parquet".into(), row_group: 2, row: 7 };
        let text =
            |origin: Option<Origin>| Error::value((origin, 3), "x", "it is 7", "exclude it").to_string();
        assert!(text(Some(origin)).starts_with("`a.parquet`, row group 2, column `x`, row 7: it is 7"));
        assert!(text(None).starts_with("sample 3 of a batch, column `x`: it is 7"));
    }
}
