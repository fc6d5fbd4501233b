//! The errors of this crate. Each names the place, and says what to do.

use std::path::PathBuf;

use onefold_base::fault::{Explain, Fault, Kind, explained, option, text};
use onefold_base::units::{format_bytes, format_count};
use onefold_storage::write_hint;
use strsim::levenshtein;

use crate::Problem;

/// What can go wrong with schemas, snapshots and datasets.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The storage of a dataset, or an output path.
    Storage(#[from] onefold_storage::Error),

    /// A directory that should hold a dataset does not.
    NotADataset {
        /// The directory.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// A snapshot that cannot be read or contradicts itself.
    Snapshot {
        /// The snapshot's file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },

    /// A dataset does not have the snapshot that was asked for.
    NoSnapshot {
        /// The dataset.
        path: PathBuf,
        /// The number of the snapshot.
        snapshot: u64,
        /// Which ones there are.
        hint: String,
    },

    /// Another writer committed first.
    Conflict {
        /// The dataset.
        path: PathBuf,
        /// The snapshot of the other writer.
        snapshot: u64,
        /// What the other writer did.
        what: String,
    },

    /// An append would leave a partition with fewer samples than it has.
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
    Schema {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },

    /// Rows that do not fit the schema they are written under.
    Column {
        /// The column.
        column: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A vocabulary's file is not the one that the snapshot records, or is malformed.
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },

    /// A feature has more distinct ids than can be counted in the memory that there is.
    TooManyIds {
        /// The feature.
        feature: String,
        /// The distinct ids counted until then.
        distinct: u64,
        /// The bytes that the counters of all features had.
        limit: u64,
    },

    /// A partition filter that cannot be parsed or names no partition column.
    PartitionFilter {
        /// The filter as given.
        filter: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A dataset's file is not what its snapshot says, or does not decode.
    Damaged(Box<Problem>),

    /// A Parquet file could not be written or read.
    Parquet {
        /// The file.
        path: PathBuf,
        /// The library's error.
        source: parquet::errors::ParquetError,
        /// What to do.
        hint: String,
    },

    /// What was written is not what was to be written.
    Samples {
        /// Samples that the query gave.
        expected: u64,
        /// Samples that were written.
        written: u64,
    },

    /// Whoever gives the samples of a row group could not decode them.
    Decoding(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// An Arrow operation failed on data that had been checked: a bug of Onefold.
    Internal(#[from] arrow::error::ArrowError),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Storage(error) => error.fault(),
            Self::NotADataset { path, hint } => {
                let message = format!("`{}` is not a dataset: it has no snapshot", path.display());
                Fault::new(Kind::Options, message).hint(hint)
            }
            Self::Snapshot { path, message } => Fault::of_file(Kind::Data, path, message).hint(
                "the dataset is damaged or of another version; read an older snapshot, or build it again",
            ),
            Self::NoSnapshot { path, snapshot, hint } => {
                let message = format!("`{}` has no snapshot {snapshot}", path.display());
                Fault::new(Kind::Options, message).hint(hint)
            }
            Self::Conflict { path, snapshot, what } => {
                let message = format!(
                    "`{}`: nothing was committed, because another writer {what} meanwhile (snapshot {snapshot})",
                    path.display()
                );
                Fault::new(Kind::Failed, message).hint("run this again; it then starts from that snapshot")
            }
            Self::FewerSamples { path, partition, before, now, partitions } => {
                let several = match partitions {
                    0 | 1 => String::new(),
                    _ => format!("{partitions} partitions would lose samples: "),
                };
                let message = format!(
                    "`{}`: {several}partition `{partition}` has {before} samples, and appending would leave {now}; \
                     nothing was committed",
                    path.display()
                );
                let commit = |value| option("commit").set_to(value);
                Fault::new(Kind::Failed, message).hint(text![
                    "give logs that hold all samples of the partition, add late samples to it with ",
                    commit("merge"),
                    ", or replace it with ",
                    commit("replace")
                ])
            }
            Self::Schema { message, hint } => Fault::new(Kind::Options, message).hint(hint),
            Self::Column { column, message, hint } => {
                Fault::new(Kind::Data, format!("column `{column}`: {message}")).hint(hint)
            }
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
            Self::PartitionFilter { filter, message, hint } => {
                Fault::new(Kind::Options, format!("partition filter `{filter}`: {message}")).hint(hint)
            }
            Self::Damaged(problem) => Fault::new(Kind::Data, problem.to_string()).hint(
                "`onefold-ingest verify` finds all that is wrong with the dataset; build it again with \
                 `onefold-ingest build`",
            ),
            Self::Parquet { path, source, hint } => {
                Fault::of_file(Kind::Failed, path, source.to_string()).hint(hint)
            }
            Self::Samples { expected, written } => {
                let digests = if written == expected { ", whose digests differ" } else { "" };
                let message = format!(
                    "the samples written are not those of the query: {written} of {expected} samples{digests}"
                );
                Fault::new(Kind::Failed, message).hint(
                    "nothing was committed; check that no source changed while it was read, then run this again, \
                     and report it if it stays",
                )
            }
            Self::Decoding(error) => {
                explained::<Self>(&**error).unwrap_or_else(|| Fault::new(Kind::Failed, error.to_string()))
            }
            Self::Internal(error) => Fault::new(Kind::Failed, format!("internal error: {error}"))
                .hint("this is a bug in Onefold; please report it with the command line"),
        }
    }
}

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
    use super::*;

    /// The hint must not be to free space on a disk.
    #[test]
    fn a_store_that_refuses_to_write_is_explained_from_behind_parquet() {
        let denied = Fault::new(Kind::Storage, "AWS denied the request").hint("set AWS_ACCESS_KEY_ID");
        let error = std::io::Error::other(denied);
        let parquet = parquet::errors::ParquetError::External(Box::new(error));
        let error = Error::write_parquet("s3://bucket/part.parquet", parquet);
        assert!(matches!(error, Error::Storage(onefold_storage::Error::Store { .. })), "{error:?}");
        let expected = "`s3://bucket/part.parquet` cannot be written: AWS denied the request\n  hint: set AWS_ACCESS_KEY_ID";
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.fault().kind, Kind::Storage);
    }

    #[test]
    fn far_names_are_listed_without_a_guess() {
        assert_eq!(suggest("zzzz", ["user", "history"]), "known names: `user`, `history`");
    }
}
