//! Directories that appear whole.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use onefold_sharding::Error;

/// A directory that is written beside its place, so that it appears whole.
pub(crate) struct Staged {
    beside: tempfile::TempDir,
    out: PathBuf,
}

impl Staged {
    /// For a directory that must not be there.
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

    /// Where to write until then.
    pub(crate) fn path(&self) -> &Path {
        self.beside.path()
    }

    /// Puts the directory in its place.
    pub(crate) fn commit(self) -> Result<()> {
        fs_err::rename(self.beside.path(), &self.out)?;
        // It is elsewhere by now.
        let _ = self.beside.keep();
        Ok(())
    }
}
