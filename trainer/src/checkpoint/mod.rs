//! Checkpoints of a run, and the files that store parameters.
//!
//! Besides the tables, the caller defines the content of a checkpoint: entries of files, and a progress value
//! that is serialized with serde.

mod dense;
mod store;
pub(crate) mod tables;
pub(crate) mod tensor_file;

use std::path::Path;

use serde::Deserialize;

pub(crate) use self::dense::{DenseFile, dense_entries};
pub use self::store::CheckpointChoice;
pub(crate) use self::store::{Checkpoint, CheckpointParts, Checkpoints, FOLDER};
use crate::Error;

/// The reason why a file of a run cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// The file is damaged; the message describes how.
    #[error("{0}")]
    Damaged(String),
    /// The file cannot be read, so its content is unknown.
    #[error(transparent)]
    Unread(#[from] onefold_storage::Error),
}

impl From<String> for Fault {
    fn from(message: String) -> Self {
        Self::Damaged(message)
    }
}

impl From<&str> for Fault {
    fn from(message: &str) -> Self {
        Self::Damaged(message.to_owned())
    }
}

impl Fault {
    /// Returns the error for the file or directory `path`; `hint` is added if the file is damaged.
    pub(crate) fn at(self, path: &Path, hint: &str) -> Error {
        match self {
            Self::Damaged(message) => Error::run(path, message, hint),
            Self::Unread(error) => error.into(),
        }
    }
}

/// The format version of a description. It is parsed first, because other versions have other fields.
#[derive(Debug, Deserialize)]
pub(crate) struct Versioned {
    pub(crate) format_version: u32,
}

/// Returns the SHA-256 of `bytes`, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the error for a file of a run.
pub(crate) fn damaged(path: &Path, fault: impl Into<Fault>) -> Error {
    fault.into().at(path, "the run is damaged; train again, or restore it from a copy")
}
