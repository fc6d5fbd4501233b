//! The errors of this crate. Each names the place; its second line says what to do. An option of the API is named as
//! ``the option `overwrite` ``, which binaries print as their flag.

use std::io;
use std::path::PathBuf;

use crate::Explanation;

/// What can go wrong with files and folders, on a local disk or in an object store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    #[error("{0}")]
    Io(#[from] io::Error),

    /// Output would go where something already is.
    #[error("`{}` already exists\n  hint: {hint}", path.display())]
    Exists {
        /// The file or directory in the way.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// Another process writes the same directory.
    #[error("`{}` is being written by another process\n  hint: wait for it to end, then run this again", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },

    /// A path or URL that names no storage.
    #[error("`{location}`: {message}\n  hint: {hint}")]
    Location {
        /// The path or URL.
        location: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// The storage does not give an object.
    #[error("`{}` cannot be read: {message}\n  hint: {hint}", path.display())]
    Read {
        /// The object.
        path: PathBuf,
        /// What the storage answered.
        message: String,
        /// What to do.
        hint: String,
    },

    /// The store does not take an object.
    #[error("`{}` cannot be written: {message}\n  hint: {hint}", path.display())]
    Store {
        /// The object.
        path: PathBuf,
        /// What the store answered.
        message: String,
        /// What to do.
        hint: String,
    },

    /// An object is not the one that was read before.
    #[error("`{}` was changed while it was read\n  hint: files of a dataset never change; find out what else writes there, and build the dataset again", path.display())]
    Changed {
        /// The object.
        path: PathBuf,
    },

    /// A file could not be written: the disk is full, say.
    #[error("`{}` cannot be written: {source}\n  hint: {hint}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
        /// What to do.
        hint: String,
    },
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What to do when a file cannot be written because of an error of this `kind`.
pub fn write_hint(kind: io::ErrorKind) -> String {
    use io::ErrorKind;
    let hint = match kind {
        ErrorKind::StorageFull => {
            "the disk is full: free space on it, then run this again; what was there is untouched"
        }
        ErrorKind::QuotaExceeded => {
            "the disk quota is used up: free space or raise it, then run this again; what was there is untouched"
        }
        ErrorKind::FileTooLarge => {
            "the file would be larger than the file system or `ulimit -f` allows: raise the limit or write to another disk; what was there is untouched"
        }
        ErrorKind::ResourceBusy => {
            "if no other writer runs, a killed one left that file: remove it, then run this again"
        }
        _ => "check the disk's free space and permissions",
    };
    hint.to_owned()
}

impl Error {
    /// That `path` cannot be written: [`Error::Store`] if a store explained why, otherwise [`Error::Write`].
    pub fn write(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if let Some(explanation) = source.get_ref().and_then(|cause| cause.downcast_ref::<Explanation>()) {
            let Explanation { message, hint } = explanation.clone();
            return Self::Store { path, message, hint };
        }
        let hint = write_hint(source.kind());
        Self::Write { path, source, hint }
    }
}
