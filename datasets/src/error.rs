//! The errors of this crate. Each error names the affected file or column and suggests a remedy.

use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text, explained, option, text, unexpected};
use onefold_base::units::{format_bytes, format_count};
use onefold_storage::write_hint;
use parquet::errors::ParquetError;

use crate::Problem;

/// An error of a schema, a snapshot or a dataset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` adds the path.
    Io(#[from] std::io::Error),

    /// An error of the storage of a dataset, or of an output path.
    Storage(#[from] onefold_storage::Error),

    /// The folder does not contain a dataset.
    NotADataset(Fault),

    /// A snapshot cannot be read or contradicts itself.
    Snapshot(Fault),

    /// The dataset does not have the requested snapshot.
    NoSnapshot(Fault),

    /// A vocabulary's file is malformed or differs from the file that the snapshot records.
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// A description of the error.
        message: String,
    },

    /// A feature has more distinct ids than fit into the available memory.
    TooManyIds {
        /// The feature's name.
        feature: String,
        /// The number of distinct ids counted so far.
        distinct: u64,
        /// The memory limit of the counters of all features, in bytes.
        limit: u64,
    },

    /// A file of a dataset differs from its description in the snapshot, or cannot be decoded.
    Damaged(Box<Problem>),

    /// The caller's function that provides the samples of a row group could not decode them.
    Decoding(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// An Arrow operation failed on data that had been checked, which is a bug in Onefold.
    Internal(#[from] arrow::error::ArrowError),

    /// Any other error.
    Fault(#[from] Fault),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Storage(error) => error.fault(),
            Self::NotADataset(fault)
            | Self::Snapshot(fault)
            | Self::NoSnapshot(fault)
            | Self::Fault(fault) => fault.clone(),
            Self::Vocabulary { path, message } => Fault::of_file(Kind::Data, path, message)
                .hint("the dataset is damaged; build it again with `onefold-ingest build`"),
            Self::TooManyIds { feature, distinct, limit } => {
                let message = format!(
                    "feature `{feature}`: the memory limit does not suffice to count its ids for a vocabulary: {} \
                     distinct ones so far, {} for all features",
                    format_count(*distinct),
                    format_bytes(*limit)
                );
                Fault::new(Kind::Failed, message).hint(text![
                    "raise ",
                    option("memory_limit"),
                    ", or leave this feature's ids as they are (remove its `vocabulary`)"
                ])
            }
            Self::Damaged(problem) => Fault::new(Kind::Data, problem.to_string()).hint(
                "`onefold-ingest verify` finds all that is wrong with the dataset; build it again with \
                 `onefold-ingest build`",
            ),
            Self::Decoding(error) => {
                explained::<Self>(&**error).unwrap_or_else(|| Fault::new(Kind::Failed, error.to_string()))
            }
            Self::Internal(error) => {
                let message = format!("internal error: {error}");
                let hint = unexpected(&message);
                Fault::new(Kind::Failed, message).hint(hint)
            }
        }
    }
}

impl Error {
    /// Creates the error of a schema or of options that no dataset can have.
    pub fn schema(message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Options, message).hint(hint).into()
    }

    /// Creates the error of a snapshot that cannot be read or contradicts itself.
    pub(crate) fn snapshot(path: impl AsRef<Path>, message: impl Into<Text>) -> Self {
        let hint = "the dataset is damaged or of another version; read an older snapshot, or build it again at another \
                    location";
        Self::Snapshot(Fault::of_file(Kind::Data, path, message).hint(hint))
    }

    /// Creates the error of a column that does not fit the dataset's schema.
    pub(crate) fn column(column: &str, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Data, text![format!("column `{column}`: "), message]).hint(hint).into()
    }

    /// Creates the error of a partition filter that cannot be parsed or chooses no partition.
    pub(crate) fn partition_filter(filter: &str, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Options, text![format!("partition filter `{filter}`: "), message]).hint(hint).into()
    }

    /// Creates the error of a path that cannot be written.
    pub(crate) fn write(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        onefold_storage::Error::write(path, source).into()
    }

    /// Creates the error of a Parquet file that cannot be written: [`Error::Storage`] if the operating system
    /// or an object store refuses the write.
    pub fn write_parquet(path: impl AsRef<Path>, source: ParquetError) -> Self {
        let source = match source {
            ParquetError::External(cause) => match cause.downcast::<std::io::Error>() {
                Ok(source) => return Self::write(path, *source),
                Err(cause) => ParquetError::External(cause),
            },
            source => source,
        };
        let hint = write_hint(std::io::ErrorKind::Other);
        Fault::of_file(Kind::Failed, path, source.to_string()).hint(hint).into()
    }
}

impl From<crate::Problem> for Error {
    fn from(problem: crate::Problem) -> Self {
        Self::Damaged(Box::new(problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hint must not advise to free space on a disk.
    #[test]
    fn a_store_that_refuses_to_write_is_explained_from_behind_parquet() {
        let denied = Fault::new(Kind::Storage, "AWS denied the request").hint("set AWS_ACCESS_KEY_ID");
        let error = std::io::Error::other(denied);
        let parquet = ParquetError::External(Box::new(error));
        let error = Error::write_parquet("s3://bucket/part.parquet", parquet);
        let expected = "`s3://bucket/part.parquet` cannot be written: AWS denied the request\n  hint: set AWS_ACCESS_KEY_ID";
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.fault().kind, Kind::Storage);
    }
}
