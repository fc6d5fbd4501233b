//! The errors of a configuration.

use std::path::PathBuf;

use onefold_base::fault::{Explain, Fault, Kind};

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
        source: onefold_sharding::Error,
    },

    /// The file does not say what it should.
    Config {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong, with the section or key.
        message: String,
        /// What to do.
        hint: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

onefold_base::display_fault!(Error);

impl Explain for Error {
    fn fault(&self) -> Fault {
        match self {
            Self::Io(error) => error.fault(),
            Self::Dataset(error) => error.fault(),
            Self::Tables { path, source } => source.fault().within(&format!("`{}`", path.display())),
            Self::Config { path, message, hint } => Fault::of_file(Kind::Options, path, message).hint(hint),
        }
    }
}
