//! The errors of tensors, of the reader and of preprocessing.

use std::fmt;
use std::path::{Path, PathBuf};

/// What can go wrong between a dataset and its batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The dataset's snapshot or a partition filter.
    Dataset(#[from] onefold_datasets::Error),

    /// Buffers that do not make a tensor.
    Invariant {
        /// The feature, group or batch.
        place: String,
        /// The broken invariant, with index, value and bound.
        message: String,
    },

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

    /// An id that an embedding table has no row for.
    IdOutsideTable {
        /// The file.
        path: PathBuf,
        /// The row group.
        row_group: usize,
        /// The feature.
        column: String,
        /// The row in the row group; unknown if samples were drawn from the batch.
        row: Option<usize>,
        /// The id, after preprocessing.
        id: i64,
        /// The table's rows.
        rows: u64,
    },

    /// A label that has none of the values that it may have.
    LabelOutsideRange {
        /// The file.
        path: PathBuf,
        /// The row group.
        row_group: usize,
        /// The label.
        column: String,
        /// The row in the row group; unknown if samples were drawn from the batch.
        row: Option<usize>,
        /// The label's value.
        value: f32,
        /// The least value that it may have.
        least: f32,
        /// The greatest one.
        most: f32,
    },

    /// A data file that is not what the snapshot says.
    Mismatch {
        /// The file.
        path: PathBuf,
        /// What differs.
        message: String,
    },

    /// An invalid `preprocess.toml`: not TOML, another version, an unknown table.
    PreprocessFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A step of a `preprocess.toml` that is wrong in itself, does not fit the schema, or cannot be run on a batch.
    Preprocess {
        /// The file.
        path: PathBuf,
        /// The line of the step's `[[step]]`, from 1.
        line: usize,
        /// The number of the step in the file, from 1.
        step: usize,
        /// The step's operator, as written.
        op: String,
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },

    /// What a preprocessing service answers in place of batches, or that it does not answer.
    Service {
        /// What is wrong.
        kind: ServiceErrorKind,
        /// What a process of the service says, with its hint.
        message: String,
    },

    /// Options that cannot work with this dataset.
    Options {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
}

/// What is wrong with a request to a preprocessing service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceErrorKind {
    /// The request: its options, its version, what it proves its sender with.
    Options,
    /// The data that it asks for, or the answer.
    Data,
    /// There was no answer.
    Unreachable,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<onefold_storage::Error> for Error {
    fn from(error: onefold_storage::Error) -> Self {
        Self::Dataset(error.into())
    }
}

impl Error {
    pub(crate) fn corrupt(path: &Path, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Corrupt { path: path.to_owned(), row_group: None, column: None, row: None, message }
    }

    pub(crate) fn invariant(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invariant { place: place.into(), message: message.into() }
    }
}

/// Where in a file: row group, column and row, as far as known.
struct Place<'a>(Option<usize>, Option<&'a str>, Option<usize>);

impl fmt::Display for Place<'_> {
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
