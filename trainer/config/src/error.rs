//! The errors of a configuration.

use std::path::{Path, PathBuf};

use onefold_base::fault::{Explain, Fault, Kind, Text};

/// What can be wrong with a `train.toml`, or with the dataset that it is for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operating-system error; `fs_err` puts the path into it.
    Io(#[from] std::io::Error),

    /// The dataset.
    Dataset(#[from] onefold_datasets::Error),

    /// The tables.
    Tables {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong with its tables.
        source: Fault,
    },

    /// Any other error: the file does not say what it should.
    Fault(#[from] Fault),
}

impl Error {
    /// The file `path` does not say what it should: `message` names the section or key.
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
