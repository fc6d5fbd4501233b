//! The errors of this crate: each names the place, and its second line says what to do.

use std::path::PathBuf;

/// What can go wrong with schemas, manifests, datasets and raw logs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    #[error("{0}")]
    Io(#[from] std::io::Error),

    /// A directory that should hold a dataset does not.
    #[error("`{}` is not a dataset: it has no `manifest.json`\n  hint: {hint}", path.display())]
    NotADataset {
        /// The directory.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// Output would go where something already is.
    #[error("`{}` already exists\n  hint: {hint}", path.display())]
    Exists {
        /// The file or directory in the way.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// Another process writes the same dataset.
    #[error("`{}` is being written by another process\n  hint: wait for it to end, then run this again", path.display())]
    Locked {
        /// The dataset directory.
        path: PathBuf,
    },

    /// A manifest that cannot be read or contradicts itself.
    #[error("`{}`: {message}\n  hint: the dataset is damaged or of another version; build it again with `onefold-ingest build`", path.display())]
    Manifest {
        /// The manifest file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
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

    /// Input of an importer (public logs) that is not what the importer knows.
    #[error("`{}`: {message}\n  hint: {hint}", path.display())]
    Source {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// A program this one runs (pip) failed or is missing.
    #[error("`{program}` failed: {message}\n  hint: {hint}")]
    Program {
        /// The command line.
        program: String,
        /// Its last words.
        message: String,
        /// What to do.
        hint: String,
    },

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

    /// An Arrow operation failed on data that had been checked: a bug of Onefold.
    #[error("internal error: {0}\n  hint: this is a bug in Onefold; please report it with the command line")]
    Internal(#[from] arrow::error::ArrowError),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The valid names, and the nearest one to `wrong`, for an error's hint.
///
/// ```
/// let hint = onefold_datasets::suggest("histroy", ["history", "user"]);
/// assert_eq!(hint, "did you mean `history`? Known names: `history`, `user`");
/// ```
pub fn suggest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let listed = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let nearest = known.iter().min_by_key(|name| edit_distance(wrong, name));
    match nearest {
        None => "there are none".to_owned(),
        Some(name) if edit_distance(wrong, name) <= 1 + wrong.len() / 3 => {
            format!("did you mean `{name}`? Known names: {listed}")
        }
        Some(_) => format!("known names: {listed}"),
    }
}

/// Levenshtein distance in characters (Wagner and Fischer 1974), one row at a time.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_counts_single_edits() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
    }

    #[test]
    fn far_names_are_listed_without_a_guess() {
        assert_eq!(suggest("zzzz", ["user", "history"]), "known names: `user`, `history`");
    }
}
