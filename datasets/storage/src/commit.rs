//! Writes that are whole or not there: a file by temporary name and rename, a directory likewise.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{Created, Error, Result};

/// Replaces the file at `path` with `bytes`: written beside it, synced, renamed over it, and the directory
/// synced, so that after a crash either the old or the new file is there, whole.
///
/// # Errors
///
/// The operating system's error; the old file is then untouched, and nothing is left beside it.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = sibling(path, "tmp");
    let written = write_synced(&temporary, bytes).and_then(|()| fs_err::rename(&temporary, path));
    if written.is_err() {
        // What counts is the first error; the next write replaces what cannot be removed.
        let _ = fs_err::remove_file(&temporary);
    }
    written?;
    sync_directory(parent(path))
}

/// Creates the file at `path` with `bytes`, unless it exists: written beside it, synced, and linked to its name, which
/// fails if the name is taken. Missing folders are made, and the folder is synced.
///
/// # Errors
///
/// The operating system's error; nothing is left beside the file.
pub(crate) fn create_file(path: &Path, bytes: &[u8]) -> io::Result<Created> {
    let temporary = sibling(path, &format!("{}.tmp", crate::random_name()));
    let created = in_folder(parent(path), || {
        write_synced(&temporary, bytes)?;
        match fs_err::hard_link(&temporary, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Created::Exists),
            linked => linked.map(|()| Created::Yes),
        }
    });
    // The first error is the one to report; a vacuum removes the temporary file if this fails.
    let _ = fs_err::remove_file(&temporary);
    if created? == Created::Yes {
        sync_directory(parent(path))?;
        return Ok(Created::Yes);
    }
    Ok(Created::Exists)
}

/// How often a folder may be removed again before a file is in it. Another process removes empty folders once, when it
/// ends.
const MOST_REMOVALS: usize = 1000;

/// Makes `folder` and what is missing above it, and calls `create`, which makes a file in it. Until then another writer
/// or a vacuum may remove the folder, because it is empty; both steps are then repeated. A folder that is removed while
/// it is made appears as one that exists and yet is no directory, so that error is repeated too.
///
/// # Errors
///
/// The operating system's error. `AlreadyExists` says that a file is where the folder should be.
pub(crate) fn in_folder<T>(folder: &Path, mut create: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut attempt = || fs_err::create_dir_all(folder).and_then(|()| create());
    for _ in 0..MOST_REMOVALS {
        match attempt() {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {}
            result => return result,
        }
    }
    attempt()
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs_err::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes the entries of a directory (new names, renames) survive a power cut.
///
/// # Errors
///
/// The operating system's error.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    fs_err::File::open(path)?.sync_all()
}

/// The file that is locked while its directory is written.
const LOCK_FILE: &str = ".onefold-writing";

/// The exclusive right to write a directory: a locked file in it, removed at the end. The kernel releases the lock when
/// the process ends, however it ends.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    _file: fs_err::File,
}

impl DirectoryLock {
    /// Takes the lock of `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another process holds it.
    pub fn take(directory: &Path) -> Result<Self> {
        let path = directory.join(LOCK_FILE);
        loop {
            let file = fs_err::OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
            match file.file().try_lock() {
                Ok(()) if is_still_at(&file, &path)? => return Ok(Self { path, _file: file }),
                // The writer that held it removed it as it ended; the next one would lock another file.
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => {
                    return Err(Error::Locked { path: directory.to_owned() });
                }
                Err(std::fs::TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Left behind, it is only a file that the next writer locks.
        let _ = fs_err::remove_file(&self.path);
    }
}

/// Whether the open file `file` is the one that `path` names now.
#[cfg(unix)]
fn is_still_at(file: &fs_err::File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    match fs_err::metadata(path) {
        Ok(now) => file.metadata().map(|open| (open.dev(), open.ino()) == (now.dev(), now.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where an open file cannot be removed, it is.
#[cfg(not(unix))]
fn is_still_at(_: &fs_err::File, _: &Path) -> io::Result<bool> {
    Ok(true)
}

/// Directories made on the way to an output. Dropped before [`keep`](Self::keep), those that are empty are removed.
#[derive(Debug)]
pub(crate) struct CreatedDirectories(Vec<PathBuf>);

impl CreatedDirectories {
    /// Makes `path` and what is missing above it.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let missing = path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let created = Self(missing.map(Path::to_owned).collect());
        fs_err::create_dir_all(path)?;
        Ok(created)
    }

    /// Leaves the directories where they are.
    pub(crate) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for CreatedDirectories {
    fn drop(&mut self) {
        for directory in &self.0 {
            let _ = fs_err::remove_dir(directory);
        }
    }
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
    lock: Option<DirectoryLock>,
    created: CreatedDirectories,
}

impl StagedDirectory {
    /// Starts a directory that will be at `target`.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if something is there and `overwrite` is false, or if it is there and does not hold `marker`,
    /// the file that makes it a directory of the kind being written; [`Error::Locked`] if another process writes the
    /// same directory; [`Error::Location`] if `target` names nothing, as [`absolute`](crate::absolute) says.
    pub fn create(target: &Path, marker: &str, overwrite: bool) -> Result<Self> {
        // The folders on the way are made, so a `~` that the shell did not expand would become one.
        crate::absolute(target)?;
        let occupied = target.exists() && !is_empty_directory(target)?;
        if occupied && !target.join(marker).is_file() {
            let hint = format!("it holds no `{marker}`, so it is not replaced; choose another directory");
            return Err(Error::Exists { path: target.to_owned(), hint });
        }
        if occupied && !overwrite {
            let hint = "choose another directory, or replace it with the option `overwrite`".to_owned();
            return Err(Error::Exists { path: target.to_owned(), hint });
        }
        let staging = sibling(target, "partial");
        let created = CreatedDirectories::create(&staging)?;
        let lock = DirectoryLock::take(&staging).map_err(|error| match error {
            Error::Locked { .. } => Error::Locked { path: target.to_owned() },
            other => other,
        })?;
        remove_entries(&staging, LOCK_FILE)?;
        Ok(Self {
            target: target.to_owned(),
            staging,
            overwrite,
            committed: false,
            lock: Some(lock),
            created,
        })
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
        // Held until the rename, so that no other writer can stage at the same name. The lock's file moved along.
        let _ = fs_err::remove_file(self.target.join(LOCK_FILE));
        drop(self.lock.take());
        self.created.keep();
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

/// Empties a directory but for the file `kept`.
fn remove_entries(directory: &Path, kept: &str) -> io::Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs_err::remove_dir_all(entry.path())?;
        } else if entry.file_name() != kept {
            fs_err::remove_file(entry.path())?;
        }
    }
    Ok(())
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
    fn what_cannot_be_put_in_place_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // A folder with something in it cannot be renamed over.
        fs_err::create_dir_all(path.join("thesis")).unwrap();
        assert!(write_atomically(&path, b"new").is_err());
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
    fn one_directory_is_staged_once_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("a/b");
        let first = StagedDirectory::create(&target, "marker", false).unwrap();
        let second = StagedDirectory::create(&target, "marker", false);
        assert!(matches!(second, Err(Error::Locked { path }) if path == target));
        drop(first);
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0, "the folder on the way is left");
        // What a killed process leaves is cleared.
        fs_err::create_dir_all(directory.path().join(".out.partial")).unwrap();
        fs_err::write(directory.path().join(".out.partial/half"), b"1").unwrap();
        let staged = StagedDirectory::create(&directory.path().join("out"), "marker", false).unwrap();
        assert!(!staged.path().join("half").exists());
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
        assert!(error.to_string().contains("replace it with the option `overwrite`"), "{error}");
        StagedDirectory::create(&target, "marker", true).unwrap().commit().unwrap();
        assert!(!target.join("thesis.txt").exists());
    }
}
