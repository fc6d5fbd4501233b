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
    Service(Fault),

    /// Options that cannot work with this dataset.
    Options {
        /// What is wrong.
        message: Text,
        /// What to do.
        hint: Text,
    },
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
            Self::Invariant { place, message } => Fault::new(Kind::Data, format!("{place}: {message}")),
            Self::Corrupt { path, row_group, column, row, message } => {
                let place = Place(*row_group, column.as_deref(), *row);
                Fault::new(Kind::Data, format!("`{}`{place}: {message}", path.display()))
                    .hint("the file is damaged; build the dataset again, or restore the file from a copy")
            }
            Self::IdOutsideTable { path, row_group, column, row, id, rows } => {
                let place = Place(Some(*row_group), Some(column), *row);
                let message =
                    format!("`{}`{place}: id {id} is outside the table's {rows} rows", path.display());
                Fault::new(Kind::Data, message).hint(
                    "give the table more rows (a model that is trained already gets them by \
                     `onefold-train run --warm-start`), or hash or clamp the feature's ids",
                )
            }
            Self::LabelOutsideRange { path, row_group, column, row, value, least, most } => {
                let place = Place(Some(*row_group), Some(column), *row);
                let path = path.display();
                let message =
                    format!("`{path}`{place}: the label is {value}, which is not from {least} to {most}");
                Fault::new(Kind::Data, message).hint(
                    "change the label in the dataset's query, as `rating >= 4`, exclude such samples there, or train \
                     with a `loss` that takes them: `mse`, `huber` or `poisson`",
                )
            }
            Self::Mismatch { path, message } => Fault::of_file(Kind::Data, path, message)
                .hint("the file was replaced or removed after the build; build the dataset again"),
            Self::PreprocessFile { path, message, hint } => {
                Fault::of_file(Kind::Options, path, message).hint(hint)
            }
            Self::Preprocess { path, line, step, op, message, hint } => {
                let place = format!("`{}`, line {line}, step {step} (`{op}`)", path.display());
                Fault::new(Kind::Options, format!("{place}: {message}")).hint(hint)
            }
            Self::Service(fault) => fault.clone(),
            Self::Options { message, hint } => Fault::new(Kind::Options, message).hint(hint),
        }
    }
}

impl Error {
    /// [`Error::Options`]: what is wrong, and what to do.
    pub fn options(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Self::Options { message: message.into(), hint: hint.into() }
    }

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

#[cfg(test)]
mod tests {
    use onefold_datasets::Error as DatasetError;
    use onefold_storage::Error as StorageError;

    use super::*;

    #[test]
    fn the_kind_says_who_can_do_something_about_it() {
        let path = || PathBuf::from("s3://bucket/data");
        let (message, hint) = (|| "AWS denied the request".to_owned(), || "set a key".to_owned());
        let filter = "split=".to_owned();
        let label = Error::LabelOutsideRange {
            path: path(),
            row_group: 0,
            column: "rating".to_owned(),
            row: None,
            value: 7.0,
            least: 0.0,
            most: 1.0,
        };
        let kinds: [(Error, Kind); 7] = [
            (StorageError::Read { path: path(), message: message(), hint: hint() }.into(), Kind::Storage),
            (
                StorageError::Location { location: filter.clone(), message: message(), hint: hint() }.into(),
                Kind::Options,
            ),
            (StorageError::Changed { path: path() }.into(), Kind::Data),
            (DatasetError::Snapshot { path: path(), message: message() }.into(), Kind::Data),
            (
                DatasetError::PartitionFilter { filter, message: message(), hint: hint() }.into(),
                Kind::Options,
            ),
            (label, Kind::Data),
            (std::io::Error::from(std::io::ErrorKind::PermissionDenied).into(), Kind::Storage),
        ];
        for (error, kind) in kinds {
            assert_eq!(error.fault().kind, kind, "{error}");
        }
    }
}
