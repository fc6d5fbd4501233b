//! The errors of this crate. Each error names the affected path or URL and suggests a remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text, text};

/// An error of files and folders on a local disk or in an object store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating-system error; `fs_err` adds the path.
    Io(#[from] io::Error),

    /// Another process is writing the same directory.
    Locked {
        /// The directory.
        path: PathBuf,
    },

    /// Any other error.
    Fault(#[from] Fault),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns the hint for a file that cannot be written because of an error of this `kind`.
pub fn write_hint(kind: io::ErrorKind) -> &'static str {
    use io::ErrorKind;
    match kind {
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
    }
}

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Locked { path } => {
                let message = format!("`{}` is being written by another process", path.display());
                Fault::new(Kind::Failed, message).hint("wait for it to end, then run this again")
            }
            Self::Fault(fault) => fault.clone(),
        }
    }
}

impl Error {
    /// Creates the error of an output path that already exists.
    pub fn exists(path: impl AsRef<Path>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Failed, format!("`{}` already exists", path.as_ref().display())).hint(hint).into()
    }

    /// Creates the error of a path or URL that is not a valid location.
    pub fn location(location: impl fmt::Display, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::new(Kind::Options, text![format!("`{location}`: "), message]).hint(hint).into()
    }

    /// Creates the error of a path that cannot be written. The cause is a store's explanation or an error of
    /// the operating system.
    pub fn write(path: impl AsRef<Path>, source: io::Error) -> Self {
        let place = format!("`{}` cannot be written", path.as_ref().display());
        let fault = match source.get_ref().and_then(|cause| cause.downcast_ref::<Fault>()) {
            Some(cause) => cause.clone(),
            None => Fault::new(Kind::Storage, source.to_string()).hint(write_hint(source.kind())),
        };
        fault.within(&place).into()
    }
}
