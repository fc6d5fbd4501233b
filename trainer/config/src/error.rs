//! Errors of the training configuration.

use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text};

/// Errors of a `train.toml`, or of a dataset that does not fit it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operating-system error; `fs_err` adds the path.
    Io(#[from] std::io::Error),

    /// An error of the dataset.
    Dataset(#[from] onefold_datasets::Error),

    /// An invalid configuration of embedding tables.
    Tables {
        /// The configuration file.
        path: PathBuf,
        /// The error of the table configuration.
        source: Fault,
    },

    /// Any other error, such as an invalid setting.
    Fault(#[from] Fault),
}

impl Error {
    /// Returns an error about the content of the file `path`; `message` names the section or key.
    pub(crate) fn config(path: &Path, message: impl Into<Text>, hint: impl Into<Text>) -> Self {
        Fault::of_file(Kind::Options, path, message).hint(hint).into()
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Dataset(error) => error.fault(),
            Self::Tables { path, source } => source.clone().within(&format!("`{}`", path.display())),
            Self::Fault(fault) => fault.clone(),
        }
    }
}
