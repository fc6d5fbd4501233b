//! The errors of tensors, of the reader and of preprocessing.

use std::fmt;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text};

/// What can go wrong between a dataset and its batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The dataset's snapshot or a partition filter.
    Dataset(#[from] onefold_datasets::Error),

    /// Buffers that do not make a tensor.
    Invariant(Fault),

    /// A data file that cannot be decoded.
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The row group, if it got that far.
        row_group: Option<usize>,
        /// The column, where it is known.
        column: Option<String>,
        /// The row in the row group, where it is known.
        row: Option<usize>,
        /// What the decoder says.
        message: String,
    },

    /// Any other error, and the answer of a preprocessing service in place of batches.
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
                let place = InFile(*row_group, column.as_deref(), *row);
                Fault::new(Kind::Data, format!("`{}`{place}: {message}", path.display()))
                    .hint("the file is damaged; build the dataset again, or restore the file from a copy")
            }
        }
    }
}

impl Error {
    /// Options that cannot work with this dataset: what is wrong, and what to do.
    pub fn options(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Options, message).hint(hint).into()
    }

    /// Buffers that do not make a tensor: the feature, group or batch, and the broken invariant, with index, value and
    /// bound.
    pub fn invariant(place: impl fmt::Display, message: impl fmt::Display) -> Self {
        Self::Invariant(Fault::new(Kind::Data, format!("{place}: {message}")))
    }

    /// A data file, or a row group of it, that cannot be decoded.
    pub(crate) fn corrupt(path: &Path, row_group: Option<usize>, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Corrupt { path: path.to_owned(), row_group, column: None, row: None, message }
    }

    /// A data file that is not what the snapshot says.
    pub(crate) fn mismatch(path: impl AsRef<Path>, message: impl Into<Text>) -> Self {
        let hint = "the file was replaced or removed after the build; build the dataset again";
        Fault::of_file(Kind::Data, path, message).hint(hint).into()
    }

    /// A batch that came from another process and is not what was asked for.
    pub fn wrong_batch(error: &Self) -> Self {
        let message =
            format!("the preprocessing service sent something else than a batch of the job: {error}");
        Fault::new(Kind::Data, message).into()
    }

    /// A value that may not be there: of a sample that comes from `origin`, or whose number in its batch alone is known.
    pub(crate) fn value(
        (origin, sample): (Option<Origin>, usize),
        column: &str,
        message: &str,
        hint: &str,
    ) -> Self {
        let place = match origin {
            Some(Origin { path, row_group, row }) => {
                format!("`{}`{}", path.display(), InFile(Some(row_group), Some(column), Some(row)))
            }
            None => format!("sample {sample} of a batch{}", InFile(None, Some(column), None)),
        };
        Fault::new(Kind::Data, format!("{place}: {message}")).hint(hint).into()
    }
}

/// Where in the dataset a sample is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) path: PathBuf,
    pub(crate) row_group: usize,
    /// The row of the row group.
    pub(crate) row: usize,
}

/// Where in a file: row group, column and row, as far as known.
struct InFile<'a>(Option<usize>, Option<&'a str>, Option<usize>);

impl fmt::Display for InFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(row_group, column, row) = self;
        if let Some(row_group) = row_group {
            write!(f, ", row group {row_group}")?;
        }
        if let Some(column) = column {
            write!(f, ", column `{column}`")?;
        }
        if let Some(row) = row {
            write!(f, ", row {row}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use onefold_storage::Error as StorageError;

    use super::*;

    #[test]
    fn the_kind_says_who_can_do_something_about_it() {
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
    fn a_value_is_placed_as_far_as_its_place_is_known() {
        let origin = Origin { path: "a.parquet".into(), row_group: 2, row: 7 };
        let text =
            |origin: Option<Origin>| Error::value((origin, 3), "x", "it is 7", "exclude it").to_string();
        assert!(text(Some(origin)).starts_with("`a.parquet`, row group 2, column `x`, row 7: it is 7"));
        assert!(text(None).starts_with("sample 3 of a batch, column `x`: it is 7"));
    }
}
