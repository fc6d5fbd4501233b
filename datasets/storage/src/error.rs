//! The errors of this crate. Each names the place, and says what to do.

use std::io;
use std::path::PathBuf;

use onefold_base::fault::{Explain, Fault, Kind, Text};

use crate::service::CHANGED;

/// What can go wrong with files and folders, on a local disk or in an object store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] io::Error),

    /// Output would go where something already is.
    Exists {
        /// The file or directory in the way.
        path: PathBuf,
        /// What to do.
        hint: Text,
    },

    /// Another process writes the same directory.
    Locked {
        /// The directory.
        path: PathBuf,
    },

    /// A path or URL that names no storage.
    Location {
        /// The path or URL.
        location: String,
        /// What is wrong with it.
        message: String,
        /// What to do.
        hint: String,
    },

    /// The storage does not give an object.
    Read {
        /// The object.
        path: PathBuf,
        /// What the storage answered.
        message: String,
        /// What to do.
        hint: String,
    },

    /// The store does not take an object.
    Store {
        /// The object.
        path: PathBuf,
        /// The store's answer, and the hint for it.
        cause: Fault,
    },

    /// An object is not the one that was read before.
    Changed {
        /// The object.
        path: PathBuf,
    },

    /// A file could not be written: the disk is full, say.
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

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Exists { path, hint } => {
                Fault::new(Kind::Failed, format!("`{}` already exists", path.display())).hint(hint)
            }
            Self::Locked { path } => {
                let message = format!("`{}` is being written by another process", path.display());
                Fault::new(Kind::Failed, message).hint("wait for it to end, then run this again")
            }
            Self::Location { location, message, hint } => {
                Fault::new(Kind::Options, format!("`{location}`: {message}")).hint(hint)
            }
            Self::Read { path, message, hint } => {
                let message = format!("`{}` cannot be read: {message}", path.display());
                Fault::new(Kind::Storage, message).hint(hint)
            }
            Self::Store { path, cause } => {
                cause.clone().within(&format!("`{}` cannot be written", path.display()))
            }
            Self::Changed { path } => {
                let message = format!("`{}` was changed while it was read", path.display());
                Fault::new(Kind::Data, message).hint(CHANGED)
            }
            Self::Write { path, source, hint } => {
                let message = format!("`{}` cannot be written: {source}", path.display());
                Fault::new(Kind::Storage, message).hint(hint)
            }
        }
    }
}

impl Error {
    /// That `path` cannot be written: [`Error::Store`] if a store explained why, otherwise [`Error::Write`].
    pub fn write(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if let Some(cause) = source.get_ref().and_then(|cause| cause.downcast_ref::<Fault>()) {
            return Self::Store { path, cause: cause.clone() };
        }
        let hint = write_hint(source.kind());
        Self::Write { path, source, hint }
    }
}
