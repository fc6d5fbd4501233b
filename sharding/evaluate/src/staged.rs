//! Directories that are written atomically.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use onefold_sharding::Error;

/// A temporary directory next to its final place. Committing moves it there, so that it never appears partially
/// written.
pub(crate) struct Staged {
    beside: tempfile::TempDir,
    out: PathBuf,
}

impl Staged {
    /// Prepares a directory that must not exist yet.
    pub(crate) fn new(out: &Path) -> Result<Self> {
        if out.exists() {
            let message = format!("`{}` already exists", out.display());
            return Err(Error::invalid(message, "choose another directory").into());
        }
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let beside = tempfile::Builder::new().prefix(".staged").tempdir_in(parent);
        let beside = beside.with_context(|| format!("`{}` cannot be written into", parent.display()))?;
        Ok(Self { beside, out: out.to_owned() })
    }

    /// Returns the temporary path, to which files are written before the commit.
    pub(crate) fn path(&self) -> &Path {
        self.beside.path()
    }

    /// Moves the directory to its final place.
    pub(crate) fn commit(self) -> Result<()> {
        fs_err::rename(self.beside.path(), &self.out)?;
        // The temporary path no longer exists, so there is nothing to delete.
        let _ = self.beside.keep();
        Ok(())
    }
}
