//! The errors of this crate. Each names the place; its second line says what to do. An option of the API is named as
//! ``the option `memory_limit` ``, which binaries print as their flag.

use std::path::PathBuf;

use onefold_storage::write_hint;
use strsim::levenshtein;

use crate::Problem;

/// What can go wrong with schemas, snapshots and datasets.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    #[error("{0}")]
    Io(#[from] std::io::Error),

    /// The storage of a dataset, or an output path.
    #[error(transparent)]
    Storage(#[from] onefold_storage::Error),

    /// A directory that should hold a dataset does not.
    #[error("`{}` is not a dataset: it has no snapshot\n  hint: {hint}", path.display())]
    NotADataset {
        /// The directory.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// A snapshot that cannot be read or contradicts itself.
    #[error("`{}`: {message}\n  hint: the dataset is damaged or of another version; read an older snapshot, or build it again", path.display())]
    Snapshot {
        /// The snapshot's file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },

    /// A dataset does not have the snapshot that was asked for.
    #[error("`{}` has no snapshot {snapshot}\n  hint: {hint}", path.display())]
    NoSnapshot {
        /// The dataset.
        path: PathBuf,
        /// The number of the snapshot.
        snapshot: u64,
        /// Which ones there are.
        hint: String,
    },

    /// Another writer committed first.
    #[error("`{}`: nothing was committed, because another writer {what} meanwhile (snapshot {snapshot})\n  hint: run this again; it then starts from that snapshot", path.display())]
    Conflict {
        /// The dataset.
        path: PathBuf,
        /// The snapshot of the other writer.
        snapshot: u64,
        /// What the other writer did.
        what: String,
    },

    /// An append would leave a partition with fewer samples than it has.
    #[error(
        "`{}`: {}partition `{partition}` has {before} samples, and appending would leave {now}; nothing was committed\n  hint: give logs that hold all samples of the partition, add late samples to it with the option `commit = merge`, or replace it with the option `commit = replace`",
        path.display(), if *partitions > 1 { format!("{partitions} partitions would lose samples: ") } else { String::new() }
    )]
    FewerSamples {
        /// The dataset.
        path: PathBuf,
        /// The first such partition.
        partition: String,
        /// Its samples now.
        before: u64,
        /// The samples to be written.
        now: u64,
        /// How many partitions would lose samples.
        partitions: usize,
    },

    /// A schema that no dataset can have.
    #[error("{message}\n  hint: {hint}")]
    Schema {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },

    /// Rows that do not fit the schema they are written under.
    #[error("column `{column}`: {message}\n  hint: {hint}")]
    Column {
        /// The column.
        column: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A vocabulary's file is not the one that the snapshot records, or is malformed.
    #[error(
        "`{}`: {message}\n  hint: the dataset is damaged; build it again with `onefold-ingest build`", path.display()
    )]
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },

    /// A feature has more distinct ids than can be counted in the memory that there is.
    #[error(
        "feature `{feature}`: the memory limit does not suffice to count its ids for a vocabulary: {} distinct ones so far, {} for all features\n  hint: raise the option `memory_limit`, or leave this feature's ids as they are (remove its `vocabulary`)",
        onefold_base::units::format_count(*distinct), onefold_base::units::format_bytes(*limit)
    )]
    TooManyIds {
        /// The feature.
        feature: String,
        /// The distinct ids counted until then.
        distinct: u64,
        /// The bytes that the counters of all features had.
        limit: u64,
    },

    /// A partition filter that cannot be parsed or names no partition column.
    #[error("partition filter `{filter}`: {message}\n  hint: {hint}")]
    PartitionFilter {
        /// The filter as given.
        filter: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A dataset's file is not what its snapshot says, or does not decode.
    #[error(
        "{0}\n  hint: `onefold-ingest verify` finds all that is wrong with the dataset; build it again with `onefold-ingest build`"
    )]
    Damaged(Box<Problem>),

    /// A Parquet file could not be written or read.
    #[error("`{}`: {source}\n  hint: {hint}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The library's error.
        source: parquet::errors::ParquetError,
        /// What to do.
        hint: String,
    },

    /// What was written is not what was to be written.
    #[error(
        "the samples written are not those of the query: {written} of {expected} samples{}\n  hint: nothing was committed; check that no source changed while it was read, then run this again, and report it if it stays",
        if written == expected { ", whose digests differ" } else { "" }
    )]
    Samples {
        /// Samples that the query gave.
        expected: u64,
        /// Samples that were written.
        written: u64,
    },

    /// Whoever gives the samples of a row group could not decode them.
    #[error(transparent)]
    Decoding(Box<dyn std::error::Error + Send + Sync>),

    /// An Arrow operation failed on data that had been checked: a bug of Onefold.
    #[error("internal error: {0}\n  hint: this is a bug in Onefold; please report it with the command line")]
    Internal(#[from] arrow::error::ArrowError),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// That `path` cannot be written.
    pub(crate) fn write(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        onefold_storage::Error::write(path, source).into()
    }

    /// That the Parquet file `path` cannot be written: [`Error::Storage`] if it is the operating system or a store that
    /// says so, or else [`Error::Parquet`].
    pub fn write_parquet(path: impl Into<PathBuf>, source: parquet::errors::ParquetError) -> Self {
        let path = path.into();
        match source {
            parquet::errors::ParquetError::External(cause) => match cause.downcast::<std::io::Error>() {
                Ok(source) => Self::write(path, *source),
                Err(cause) => {
                    let source = parquet::errors::ParquetError::External(cause);
                    Self::Parquet { path, source, hint: write_hint(std::io::ErrorKind::Other) }
                }
            },
            source => Self::Parquet { path, source, hint: write_hint(std::io::ErrorKind::Other) },
        }
    }
}

/// The valid names, and the nearest one to `wrong`, for an error's hint.
///
/// ```
/// let hint = onefold_datasets::suggest("histroy", ["history", "user"]);
/// assert_eq!(hint, "did you mean `history`? Known names: `history`, `user`");
/// ```
pub fn suggest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let listed = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let nearest = known.iter().min_by_key(|name| levenshtein(wrong, name));
    match nearest {
        None => "there are none".to_owned(),
        Some(name) if levenshtein(wrong, name) <= 1 + wrong.len() / 3 => {
            format!("did you mean `{name}`? Known names: {listed}")
        }
        Some(_) => format!("known names: {listed}"),
    }
}

impl From<crate::Problem> for Error {
    fn from(problem: crate::Problem) -> Self {
        Self::Damaged(Box::new(problem))
    }
}

#[cfg(test)]
mod tests {
    use onefold_storage::Explanation;

    use super::*;

    /// The hint must not be to free space on a disk.
    #[test]
    fn a_store_that_refuses_to_write_is_explained_from_behind_parquet() {
        let (message, hint) = ("AWS denied the request".to_owned(), "set AWS_ACCESS_KEY_ID".to_owned());
        let error = std::io::Error::other(Explanation { message, hint });
        let parquet = parquet::errors::ParquetError::External(Box::new(error));
        let error = Error::write_parquet("s3://bucket/part.parquet", parquet);
        assert!(matches!(error, Error::Storage(onefold_storage::Error::Store { .. })), "{error:?}");
        let expected = "`s3://bucket/part.parquet` cannot be written: AWS denied the request\n  hint: set AWS_ACCESS_KEY_ID";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn far_names_are_listed_without_a_guess() {
        assert_eq!(suggest("zzzz", ["user", "history"]), "known names: `user`, `history`");
    }
}
