//! Checkpoints of a run, and the files that parameters are in.
//!
//! What a checkpoint holds besides the tables is its caller's: entries of files, and a progress that serde writes and
//! reads.

mod store;
pub(crate) mod tables;
pub(crate) mod tensor_file;

use std::path::Path;

pub use self::store::CheckpointChoice;
pub(crate) use self::store::{Checkpoint, CheckpointParts, Checkpoints, FOLDER};
use crate::Error;

/// Why a file of a run cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// What is wrong with it.
    #[error("{0}")]
    Damaged(String),
    /// It cannot be read, which says nothing about what is in it.
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
    /// The error of the file or directory `path`, with what to do if it is damaged.
    pub(crate) fn at(self, path: &Path, hint: &str) -> Error {
        match self {
            Self::Damaged(message) => Error::run(path, message, hint),
            Self::Unread(error) => error.into(),
        }
    }
}

/// The error of a file of a run.
pub(crate) fn damaged(path: &Path, fault: impl Into<Fault>) -> Error {
    fault.into().at(path, "the run is damaged; train again, or restore it from a copy")
}
