//! Writes that are whole or not there: a file by temporary name and rename, a directory likewise.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onefold_base::fault::{option, text};

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

/// Creates the file at `path` with `bytes`, unless it exists: written beside it, synced, and given its name, which fails
/// if the name is taken. Missing folders are made, and the folder is synced.
///
/// # Errors
///
/// The operating system's error; nothing is left beside the file. `ResourceBusy` if the file system has neither hard
/// links nor a rename that does not replace, and another writer has claimed the name and not given it up.
pub(crate) fn create_file(path: &Path, bytes: &[u8]) -> io::Result<Created> {
    create_file_by(&Naming::default(), path, bytes)
}

fn create_file_by(naming: &Naming, path: &Path, bytes: &[u8]) -> io::Result<Created> {
    let temporary = sibling(path, &format!("{}.tmp", crate::random_name()));
    let created = in_folder(parent(path), || {
        write_synced(&temporary, bytes)?;
        naming.name(&temporary, path)
    });
    // The first error is the one to report; a vacuum removes the temporary file if this fails.
    let _ = fs_err::remove_file(&temporary);
    if created? == Created::Yes {
        sync_directory(parent(path))?;
        return Ok(Created::Yes);
    }
    Ok(Created::Exists)
}

/// Gives a complete file its name, unless the name is taken. Tests replace the system calls.
///
/// Three ways are tried, the safest first. With each of them, a name appears only with the complete and synced file, so
/// a killed writer leaves nothing under it, and of several writers one succeeds:
///
/// 1. A hard link: one atomic call, which POSIX defines. Object stores behind FUSE, exFAT, FAT and some network mounts
///    refuse it.
/// 2. A rename that does not replace (Linux's `renameat2` with `RENAME_NOREPLACE`): atomic too, but only some file
///    systems support it.
/// 3. A rename by the one writer that has created a claim, a file with a name of its own, exclusively (`O_EXCL`). The
///    holder checks that the name is free before it renames. A writer that is killed in between leaves the claim. It
///    keeps others from the name until a person or a vacuum removes it: to take over a claim would be a guess that its
///    holder is dead, and a wrong guess would let two writers succeed.
///
/// To create the name itself exclusively and write into it would need no claim, but a killed writer would leave a part
/// of a file under the name. The third way excludes writers that use the third way only; writers agree on the way as
/// long as they see the same file system with the same capabilities.
#[derive(Debug, Clone, Copy)]
struct Naming {
    link: fn(&Path, &Path) -> io::Result<()>,
    rename: fn(&Path, &Path) -> io::Result<()>,
    /// How long another writer may hold its claim.
    patience: Duration,
}

impl Default for Naming {
    fn default() -> Self {
        Self { link: hard_link, rename: rename_without_replacing, patience: CLAIM_LIMIT }
    }
}

/// A writer holds its claim for one rename. A rename may copy the file in an object store behind FUSE.
const CLAIM_LIMIT: Duration = Duration::from_secs(30);
/// The wait between two looks at another writer's claim.
const CLAIM_WAIT: Duration = Duration::from_millis(10);

impl Naming {
    fn name(&self, temporary: &Path, path: &Path) -> io::Result<Created> {
        for way in [self.link, self.rename] {
            match way(temporary, path) {
                Ok(()) => return Ok(Created::Yes),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(Created::Exists),
                Err(error) if is_unsupported(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.name_with_claim(temporary, path)
    }

    fn name_with_claim(&self, temporary: &Path, path: &Path) -> io::Result<Created> {
        // The name is one that a vacuum takes for a left-over.
        let claim = sibling(path, "claim.tmp");
        let started = Instant::now();
        loop {
            if is_taken(path)? {
                return Ok(Created::Exists);
            }
            match fs_err::OpenOptions::new().write(true).create_new(true).open(&claim) {
                Ok(_) => break,
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Err(_) if started.elapsed() < self.patience => std::thread::sleep(CLAIM_WAIT),
                Err(_) => {
                    let message =
                        format!("another writer has claimed the name with the file `{}`", claim.display());
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
                }
            }
        }
        // Another writer may have held the claim, and created the file, since the look above.
        let named = is_taken(path).and_then(|taken| match taken {
            true => Ok(Created::Exists),
            false => fs_err::rename(temporary, path).map(|()| Created::Yes),
        });
        // A claim that stays is only in the way of a writer to whom the name is taken anyway.
        let _ = fs_err::remove_file(&claim);
        named
    }
}

/// Whether something has the name `path`.
fn is_taken(path: &Path) -> io::Result<bool> {
    match fs_err::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes a hard link. The error has the system's code, which `fs_err` hides.
#[cfg(unix)]
fn hard_link(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::link(from, to)?)
}

#[cfg(not(unix))]
fn hard_link(from: &Path, to: &Path) -> io::Result<()> {
    fs_err::hard_link(from, to)
}

#[cfg(target_os = "linux")]
fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    rename_with(from, to, rustix::fs::RenameFlags::NOREPLACE)
}

/// Exchanges the names of two files or directories in one step.
#[cfg(target_os = "linux")]
fn exchange_names(one: &Path, other: &Path) -> io::Result<()> {
    rename_with(one, other, rustix::fs::RenameFlags::EXCHANGE)
}

#[cfg(target_os = "linux")]
fn rename_with(from: &Path, to: &Path, flags: rustix::fs::RenameFlags) -> io::Result<()> {
    use rustix::fs::{CWD, renameat_with};
    renameat_with(CWD, from, CWD, to, flags).map_err(|error| match error {
        // A file system that does not know the flag says that it is invalid.
        rustix::io::Errno::INVAL => io::ErrorKind::Unsupported.into(),
        error => error.into(),
    })
}

#[cfg(not(target_os = "linux"))]
fn rename_without_replacing(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn exchange_names(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether the file system does not support a call. Permission to link is refused by file systems without links; if the
/// user may not write, the next call fails too.
fn is_unsupported(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        let codes = [Errno::PERM, Errno::NOTSUP, Errno::OPNOTSUPP, Errno::MLINK, Errno::NOSYS, Errno::XDEV];
        if codes.iter().any(|code| error.raw_os_error() == Some(code.raw_os_error())) {
            return true;
        }
    }
    error.kind() == io::ErrorKind::Unsupported
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

/// The exclusive right to write a directory: a locked file, removed at the end. The kernel releases the lock when the
/// process ends, however it ends. The file must keep its path while it is locked, because it is removed by its path.
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
        Self::take_file(directory.join(LOCK_FILE), directory)
    }

    /// Takes the lock of `directory` that is the file `path`.
    fn take_file(path: PathBuf, directory: &Path) -> Result<Self> {
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
/// killed command leaves has names that only the next run of the same command uses, and clears: `.NAME.partial` for the
/// directory, `.NAME.lock` for its lock, and `.NAME.previous` for an old output.
#[derive(Debug)]
pub struct StagedDirectory {
    target: PathBuf,
    staging: PathBuf,
    overwrite: bool,
    /// A file beside the directory: it does not move with the directory, so it protects the name before, during and
    /// after the rename.
    _lock: DirectoryLock,
    created: CreatedDirectories,
}

impl StagedDirectory {
    /// Starts a directory that will be at `target`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if something is there and `overwrite` is false, if it is there and does not hold `marker`, the
    /// file that makes it a directory of the kind being written, or if `target` is a URL or names nothing, as
    /// [`absolute`](crate::absolute) says; [`Error::Locked`] if another process writes the same directory.
    pub fn create(target: &Path, marker: &str, overwrite: bool) -> Result<Self> {
        // The folders on the way are made, so a `~` that the shell did not expand would become one.
        crate::absolute(target)?;
        if crate::is_url(target) {
            let message = "this folder is written to a local disk";
            let hint = "give a local path, and copy the folder to the store afterwards";
            return Err(Error::location(target.display(), message, hint));
        }
        let created = CreatedDirectories::create(parent(target))?;
        let lock = DirectoryLock::take_file(sibling(target, "lock"), target)?;
        restore(target)?;
        let occupied = target.exists() && !is_empty_directory(target)?;
        if occupied && !target.join(marker).is_file() {
            let hint = format!("it holds no `{marker}`, so it is not replaced; choose another directory");
            return Err(Error::exists(target, hint));
        }
        if occupied && !overwrite {
            let hint = text!["choose another directory, or replace it with ", option("overwrite")];
            return Err(Error::exists(target, hint));
        }
        let staging = sibling(target, "partial");
        if staging.exists() {
            fs_err::remove_dir_all(&staging)?;
        }
        fs_err::create_dir(&staging)?;
        Ok(Self { target: target.to_owned(), staging, overwrite, _lock: lock, created })
    }

    /// Where the files are written until the commit.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Moves the directory to its place. An old one there is exchanged with it, and then removed. Where the file system
    /// cannot exchange two names, the old one is moved aside first; after a kill in between, the next run of the same
    /// command moves it back.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a rename fails, or if the old directory cannot be removed.
    pub fn commit(self) -> Result<()> {
        self.commit_by(exchange_names)
    }

    /// As [`commit`](Self::commit), with this way of exchanging two names, which tests replace.
    fn commit_by(mut self, exchange: fn(&Path, &Path) -> io::Result<()>) -> Result<()> {
        sync_directory(&self.staging)?;
        let replaces = self.target.exists();
        if replaces && !self.overwrite && !is_empty_directory(&self.target)? {
            let hint = "it appeared while this command ran; choose another directory";
            return Err(Error::exists(&self.target, hint));
        }
        match replaces {
            true => replace(exchange, &self.staging, &self.target)?,
            false => fs_err::rename(&self.staging, &self.target)?,
        }
        self.created.keep();
        sync_directory(parent(&self.target))?;
        if replaces {
            fs_err::remove_dir_all(&self.staging)?;
        }
        Ok(())
    }
}

impl Drop for StagedDirectory {
    fn drop(&mut self) {
        // After a commit it is not there. Otherwise nothing more can be done in a drop; the next run clears the name.
        let _ = fs_err::remove_dir_all(&self.staging);
    }
}

/// Gives `staging` the name of `target`, and the other way round.
fn replace(exchange: fn(&Path, &Path) -> io::Result<()>, staging: &Path, target: &Path) -> io::Result<()> {
    if exchange(staging, target).is_ok() {
        return Ok(());
    }
    // The file system cannot exchange names. If something else is wrong, these fail too, and say with which path.
    let aside = sibling(target, PREVIOUS);
    fs_err::rename(target, &aside)?;
    if let Err(error) = fs_err::rename(staging, target) {
        // If it cannot be moved back now, the next run does it.
        let _ = restore(target);
        return Err(error);
    }
    fs_err::rename(&aside, staging)
}

/// The suffix of an old output that is replaced without an exchange.
const PREVIOUS: &str = "previous";

/// Moves an old output back that a killed writer has moved aside; removes it if the new one is in its place.
fn restore(target: &Path) -> io::Result<()> {
    let aside = sibling(target, PREVIOUS);
    match (aside.exists(), target.exists()) {
        (false, _) => Ok(()),
        (true, false) => fs_err::rename(&aside, target),
        (true, true) => fs_err::remove_dir_all(&aside),
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
mod tests;
