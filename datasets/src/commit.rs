//! Writes that are whole or not there: a file by temporary name and rename, a directory likewise.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Replaces the file at `path` with `bytes`: written beside it, synced, renamed over it, and the directory
/// synced, so that after a crash either the old or the new file is there, whole.
///
/// # Errors
///
/// The operating system's error; the old file is then untouched.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = sibling(path, "tmp");
    let mut file = fs_err::File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs_err::rename(&temporary, path)?;
    sync_directory(parent(path))
}

/// Makes the entries of a directory (new names, renames) survive a power cut.
///
/// # Errors
///
/// The operating system's error.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    fs_err::File::open(path)?.sync_all()
}

/// A directory that is built under a temporary name beside its place and appears there by one rename.
///
/// Dropped without [`commit`](Self::commit), it is removed, so a failed command leaves nothing. What a
/// killed command leaves has a name that only the next run of the same command uses, and clears.
#[derive(Debug)]
pub struct StagedDirectory {
    target: PathBuf,
    staging: PathBuf,
    overwrite: bool,
    committed: bool,
}

impl StagedDirectory {
    /// Starts a directory that will be at `target`.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if something is there and `overwrite` is false, or if it is there and does not
    /// hold `marker`, the file that makes it a directory of the kind being written.
    pub fn create(target: &Path, marker: &str, overwrite: bool) -> Result<Self> {
        let occupied = target.exists() && !is_empty_directory(target)?;
        if occupied && !target.join(marker).is_file() {
            let hint = format!("it holds no `{marker}`, so it is not replaced; choose another directory");
            return Err(Error::Exists { path: target.to_owned(), hint });
        }
        if occupied && !overwrite {
            let hint = "choose another directory, or replace it with `--overwrite`".to_owned();
            return Err(Error::Exists { path: target.to_owned(), hint });
        }
        let staging = sibling(target, "partial");
        if staging.exists() {
            fs_err::remove_dir_all(&staging)?;
        }
        fs_err::create_dir_all(&staging)?;
        Ok(Self { target: target.to_owned(), staging, overwrite, committed: false })
    }

    /// Where the files are written until the commit.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Moves the directory to its place. An old one there is moved aside first and then removed; a kill in
    /// between leaves the old one under a name that ends in `.replaced`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a rename fails.
    pub fn commit(mut self) -> Result<()> {
        sync_directory(&self.staging)?;
        let replaced = sibling(&self.target, "replaced");
        if replaced.exists() {
            fs_err::remove_dir_all(&replaced)?;
        }
        if self.target.exists() {
            if self.overwrite || is_empty_directory(&self.target)? {
                fs_err::rename(&self.target, &replaced)?;
            } else {
                let hint = "it appeared while this command ran; choose another directory".to_owned();
                return Err(Error::Exists { path: self.target.clone(), hint });
            }
        }
        fs_err::rename(&self.staging, &self.target)?;
        self.committed = true;
        sync_directory(parent(&self.target))?;
        if replaced.exists() {
            fs_err::remove_dir_all(&replaced)?;
        }
        Ok(())
    }
}

impl Drop for StagedDirectory {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing more can be done in a drop; the next run clears the same name.
            let _ = fs_err::remove_dir_all(&self.staging);
        }
    }
}

/// Whether `path` is a directory without entries.
pub(crate) fn is_empty_directory(path: &Path) -> io::Result<bool> {
    Ok(path.is_dir() && fs_err::read_dir(path)?.next().is_none())
}

/// The directory that holds `path`.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `.name.suffix` beside `path`.
fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_else(|| "output".as_ref()));
    name.push(".");
    name.push(suffix);
    parent(path).join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write_atomically(&path, b"old").unwrap();
        write_atomically(&path, b"new").unwrap();
        assert_eq!(fs_err::read(&path).unwrap(), b"new");
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_staged_directory_appears_only_at_commit() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("out");
        drop(StagedDirectory::create(&target, "marker", false).unwrap());
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
        let staged = StagedDirectory::create(&target, "marker", false).unwrap();
        fs_err::write(staged.path().join("marker"), b"1").unwrap();
        assert!(!target.exists());
        staged.commit().unwrap();
        assert!(target.join("marker").is_file());
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_its_own_kind_is_replaced_and_only_when_told() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("out");
        fs_err::create_dir(&target).unwrap();
        fs_err::write(target.join("thesis.txt"), b"years of work").unwrap();
        let error = StagedDirectory::create(&target, "marker", true).unwrap_err();
        assert!(error.to_string().contains("it holds no `marker`"), "{error}");
        fs_err::write(target.join("marker"), b"1").unwrap();
        let error = StagedDirectory::create(&target, "marker", false).unwrap_err();
        assert!(error.to_string().contains("`--overwrite`"), "{error}");
        StagedDirectory::create(&target, "marker", true).unwrap().commit().unwrap();
        assert!(!target.join("thesis.txt").exists());
    }
}
