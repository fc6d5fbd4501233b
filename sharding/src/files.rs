//! Reading and writing the crate's JSON files: one version check, one way to name what is wrong.

use std::io::ErrorKind;
use std::path::Path;

use onefold_datasets::commit;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// What is said about a file of some kind.
pub(crate) struct FileKind {
    /// The only format version that is read and written.
    pub(crate) version: u32,
    /// How a person gets a file of this kind.
    pub(crate) hint: &'static str,
}

/// Reads the file at `path`, and refuses every version but that of `kind`.
///
/// # Errors
///
/// [`Error::File`] if the file is missing, is not JSON, is of another version or lacks a field;
/// [`Error::Io`] if it cannot be read.
pub(crate) fn load<T: DeserializeOwned>(path: &Path, kind: &FileKind) -> Result<T> {
    let wrong = |message: String| Error::File { path: path.to_owned(), message, hint: kind.hint.to_owned() };
    let bytes = match fs_err::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(wrong("there is no such file".to_owned()));
        }
        other => other?,
    };
    #[derive(serde::Deserialize)]
    struct Versioned {
        format_version: u32,
    }
    let versioned: Versioned = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    if versioned.format_version != kind.version {
        let message =
            format!("format version {}, this program reads {}", versioned.format_version, kind.version);
        return Err(wrong(message));
    }
    serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
}

/// Replaces the file at `path` with `value` as indented JSON, whole or not at all.
///
/// # Errors
///
/// [`Error::Io`] if it cannot be written; the old file is then untouched.
pub(crate) fn store(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(std::io::Error::other)?;
    text.push('\n');
    Ok(commit::write_atomically(path, text.as_bytes())?)
}

/// Checks before any work that a file may be written at `path`.
///
/// # Errors
///
/// An error with the remedy if a directory is in the way, the directory to write into is missing, or a
/// file is there and `overwrite` is false.
pub fn claim_output(path: &Path, overwrite: bool) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        let message = "there is no such directory to write into".to_owned();
        let hint = "create it, or choose another place for `--out`".to_owned();
        return Err(Error::File { path: parent.to_owned(), message, hint });
    }
    if path.is_dir() || path.file_name().is_none() {
        let message = "this is a directory, not a file".to_owned();
        let hint = "give `--out` the name of a file".to_owned();
        return Err(Error::File { path: path.to_owned(), message, hint });
    }
    if path.exists() && !overwrite {
        let hint = "choose another file, or replace it with `--overwrite`".to_owned();
        return Err(onefold_datasets::Error::Exists { path: path.to_owned(), hint }.into());
    }
    Ok(())
}
