//! Checkpoints of a run, and the files that parameters are in.
//!
//! What a checkpoint holds besides the tables is its caller's: entries of files, and a progress that serde writes and reads.

mod store;
pub(crate) mod tables;
pub(crate) mod tensor_file;

use std::path::Path;

pub use self::store::CheckpointChoice;
pub(crate) use self::store::{Checkpoint, CheckpointParts, Checkpoints};
use crate::Error;

/// The error of a damaged file of a run.
pub(crate) fn damaged(path: &Path, message: &str) -> Error {
    let hint = "the run is damaged; train again, or restore it from a copy".to_owned();
    Error::Run { path: path.to_owned(), message: message.to_owned(), hint }
}
