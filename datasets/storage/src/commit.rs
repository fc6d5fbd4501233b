//! Writes files and directories atomically, under a temporary name followed by a rename.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onefold_base::fault::{Explain, option, text};

use crate::{Created, Error, Result};

/// Replaces the file at `path`, or the target of a symbolic link there, with `bytes`. It writes and syncs a file
/// next to it, renames it over the old file, and syncs the directory, so after a crash either the old or the new
/// file exists, complete. A device or a pipe, such as `/dev/stdout`, takes the bytes and is not replaced.
///
/// # Errors
///
/// Returns the operating system's error, or an error that carries the [`Fault`](onefold_base::fault::Fault) of a
/// URL or of a path that is not valid (see [`absolute`](crate::absolute)). In these cases the old file is
/// unchanged, and no temporary file is left.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if is_special(path) {
        return fs_err::write(path, bytes);
    }
    let path = &file_on_disk(path).map_err(|error| io::Error::other(error.fault()))?;
    let temporary = sibling(path, "tmp");
    let written = write_synced(&temporary, bytes).and_then(|()| fs_err::rename(&temporary, path));
    if written.is_err() {
        // The first error is reported. If the temporary file cannot be removed, the next write replaces it.
        let _ = fs_err::remove_file(&temporary);
    }
    written?;
    sync_directory(parent(path))
}

/// Checks, before any work begins, that [`write_atomically`] can write a file at `path`.
///
/// # Errors
///
/// [`Error::Fault`] if the path is a directory or not a valid local path (see [`absolute`](crate::absolute)), if its
/// parent directory does not exist, or if this user may not write there.
pub fn check_output(path: &Path) -> Result<()> {
    let wrong = |path: &Path, message: &str, hint: &str| Err(Error::location(path.display(), message, hint));
    if path.is_dir() {
        return wrong(path, "this is a directory, not a file", "give the name of a file");
    }
    if is_special(path) {
        return Ok(());
    }
    let file = file_on_disk(path)?;
    if !parent(&file).is_dir() {
        let message = "there is no such directory to write into";
        return wrong(parent(path), message, "create it, or choose another place");
    }
    // Only an attempt shows whether the file system and the user's rights allow a new file.
    // Its name does not contain that of the file, because the result could be too long for a name.
    let attempt = parent(&file).join(format!(".{}.tmp", crate::random_name()));
    let created = fs_err::File::create(&attempt).and_then(|_| fs_err::remove_file(&attempt));
    created.map_err(|error| Error::write(path, error))
}

/// Returns whether `path` is a device, a pipe or a socket.
pub(crate) fn is_special(path: &Path) -> bool {
    fs_err::metadata(path).is_ok_and(|there| !there.is_file() && !there.is_dir())
}

/// Returns the resolved path of a file that must be on a local disk.
fn file_on_disk(path: &Path) -> Result<PathBuf> {
    let hint = "give a local path, and copy the file to the store afterwards";
    crate::path_on_disk(path, "this file is written to a local disk", hint)
}

/// Creates the file at `path` with `bytes` unless it exists. It writes and syncs a file next to it and gives
/// it the name, which fails if the name is taken. Missing folders are created, and the folder is synced.
///
/// # Errors
///
/// Returns the operating system's error. In this case no temporary file is left. The error is `ResourceBusy`
/// if the file system supports neither hard links nor a rename that does not replace, and another writer
/// keeps its claim to the name.
pub(crate) fn create_file(path: &Path, bytes: &[u8]) -> io::Result<Created> {
    create_file_by(&Naming::default(), path, bytes)
}

fn create_file_by(naming: &Naming, path: &Path, bytes: &[u8]) -> io::Result<Created> {
    let temporary = sibling(path, &format!("{}.tmp", crate::random_name()));
    let created = in_folder(parent(path), || {
        write_synced(&temporary, bytes)?;
        naming.name(&temporary, path)
    });
    // The first error is reported. If this fails, a vacuum removes the temporary file.
    let _ = fs_err::remove_file(&temporary);
    if created? == Created::Yes {
        sync_directory(parent(path))?;
        return Ok(Created::Yes);
    }
    Ok(Created::Exists)
}

/// Gives a complete file its name, unless the name is taken. Tests replace the system calls.
///
/// It tries three methods, the safest first. With each of them, a name appears only together with the
/// complete and synced file. A killed writer therefore leaves nothing under the name, and only one of several
/// writers succeeds:
///
/// 1. A hard link: one atomic call, defined by POSIX. Object stores behind FUSE, exFAT, FAT and some network
///    mounts do not support it.
/// 2. A rename that does not replace (Linux's `renameat2` with `RENAME_NOREPLACE`): also atomic, but only
///    some file systems support it.
/// 3. A rename by the one writer that has created a claim, which is a separate file created exclusively
///    (`O_EXCL`). The holder of the claim checks that the name is free before it renames. A writer that is
///    killed in between leaves the claim, which blocks the name until a person or a vacuum removes it. Other
///    writers never take over a claim: they would have to guess that its holder is dead, and a wrong guess
///    would let two writers succeed.
///
/// Creating the name itself exclusively and writing into it would need no claim, but a killed writer would
/// leave a partial file under the name. The third method excludes only writers that also use it. Writers use
/// the same method as long as they see the same file system with the same capabilities.
#[derive(Debug, Clone, Copy)]
struct Naming {
    link: fn(&Path, &Path) -> io::Result<()>,
    rename: fn(&Path, &Path) -> io::Result<()>,
    /// The time limit for another writer to hold its claim.
    patience: Duration,
}

impl Default for Naming {
    fn default() -> Self {
        Self { link: hard_link, rename: rename_without_replacing, patience: CLAIM_LIMIT }
    }
}

/// The time limit of a claim. A writer holds it for one rename, which may copy the file in an object store
/// behind FUSE.
const CLAIM_LIMIT: Duration = Duration::from_secs(30);
/// The interval between two checks of another writer's claim.
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
        // A vacuum recognises this name as a left-over file.
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
        // Another writer may have held the claim and created the file since the check above.
        let named = is_taken(path).and_then(|taken| match taken {
            true => Ok(Created::Exists),
            false => fs_err::rename(temporary, path).map(|()| Created::Yes),
        });
        // If the claim cannot be removed, it blocks only writers for which the name is taken anyway.
        let _ = fs_err::remove_file(&claim);
        named
    }
}

/// Returns whether a file, folder or link has the name `path`.
fn is_taken(path: &Path) -> io::Result<bool> {
    match fs_err::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Creates a hard link. The error has the system's error code, which `fs_err` hides.
fn hard_link(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::link(from, to)?)
}

fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    rename_with(from, to, rustix::fs::RenameFlags::NOREPLACE)
}

/// Exchanges the names of two files or directories atomically.
fn exchange_names(one: &Path, other: &Path) -> io::Result<()> {
    rename_with(one, other, rustix::fs::RenameFlags::EXCHANGE)
}

fn rename_with(from: &Path, to: &Path, flags: rustix::fs::RenameFlags) -> io::Result<()> {
    use rustix::fs::{CWD, renameat_with};
    renameat_with(CWD, from, CWD, to, flags).map_err(|error| match error {
        // A file system that does not know the flag reports it as invalid.
        rustix::io::Errno::INVAL => io::ErrorKind::Unsupported.into(),
        error => error.into(),
    })
}

/// Returns whether the file system does not support a call. File systems without links report missing
/// permission. If the user really has no permission, the next call fails too.
fn is_unsupported(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let codes = [Errno::PERM, Errno::NOTSUP, Errno::OPNOTSUPP, Errno::MLINK, Errno::NOSYS, Errno::XDEV];
    let is_one = codes.iter().any(|code| error.raw_os_error() == Some(code.raw_os_error()));
    is_one || error.kind() == io::ErrorKind::Unsupported
}

/// The largest number of repetitions because another process removed the empty folder. A process removes
/// empty folders once, when it ends.
const MOST_REMOVALS: usize = 1000;

/// Creates `folder` and its missing ancestors, and calls `create`, which creates a file in it. Until then
/// another writer or a vacuum may remove the empty folder; both steps are then repeated. `AlreadyExists` is
/// also repeated, because it is the error if a folder is removed while it is being created.
///
/// # Errors
///
/// Returns the operating system's error. `AlreadyExists` means that a file has the path of the folder.
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

/// Makes the entries of a directory (new names, renames) durable.
///
/// # Errors
///
/// Returns the operating system's error.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    fs_err::File::open(path)?.sync_all()
}

/// The file that is locked while its directory is written.
const LOCK_FILE: &str = ".onefold-writing";

/// The exclusive right to write a directory: a locked file that is removed when this is dropped. The kernel
/// releases the lock when the process ends for any reason. The file must not be moved while it is locked,
/// because it is removed by its path.
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

    /// Takes the lock of `directory` with the lock file `path`.
    fn take_file(path: PathBuf, directory: &Path) -> Result<Self> {
        loop {
            let file = fs_err::OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
            match file.file().try_lock() {
                Ok(()) if is_still_at(&file, &path)? => return Ok(Self { path, _file: file }),
                // The previous holder removed the file, so the next writer would lock another file.
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
        // If the file cannot be removed, the next writer locks it.
        let _ = fs_err::remove_file(&self.path);
    }
}

/// Returns whether the open file `file` still has the path `path`.
fn is_still_at(file: &fs_err::File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    match fs_err::metadata(path) {
        Ok(now) => file.metadata().map(|open| (open.dev(), open.ino()) == (now.dev(), now.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Directories that were created on the path to an output. Dropping this before [`keep`](Self::keep) removes
/// those that are empty.
#[derive(Debug)]
pub(crate) struct CreatedDirectories(Vec<PathBuf>);

impl CreatedDirectories {
    /// Creates `path` and its missing ancestors.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let missing = path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let created = Self(missing.map(Path::to_owned).collect());
        fs_err::create_dir_all(path)?;
        Ok(created)
    }

    /// Keeps the directories.
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

/// A directory that is built under a temporary name and then appears with its own name by one rename.
///
/// Dropping this without [`commit`](Self::commit) removes the directory, so a failed command leaves nothing.
/// A killed command leaves files with names that only the next run of the same command uses and clears:
/// `.NAME.partial` for the directory, `.NAME.lock` for its lock, and `.NAME.previous` for an old output.
#[derive(Debug)]
pub struct StagedDirectory {
    target: PathBuf,
    staging: PathBuf,
    overwrite: bool,
    /// A lock file next to the directory. It does not move with the directory, so it protects the name
    /// before, during and after the rename.
    _lock: DirectoryLock,
    created: CreatedDirectories,
}

impl StagedDirectory {
    /// Starts a directory that will appear at `location`. If it is a symbolic link, the directory will appear at
    /// the link's target.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if `location` exists and `overwrite` is false, if it exists without the file `marker`,
    /// which identifies a directory of the same kind, if it contains the working directory, or if it is not a
    /// valid path (see [`absolute`](crate::absolute)); [`Error::Locked`] if another process writes the same
    /// directory.
    pub fn create(location: &Path, marker: &str, overwrite: bool) -> Result<Self> {
        // Missing folders are created, so this must first reject a `~` that the shell did not expand.
        let hint = "give a local path, and copy the folder to the store afterwards";
        let target = crate::path_on_disk(location, "this folder is written to a local disk", hint)?;
        // The rename would leave the shell in a directory without a name.
        if fs_err::canonicalize(".").is_ok_and(|here| here.starts_with(&target)) {
            let message = "the working directory is in this folder, which is replaced as a whole";
            return Err(Error::location(location.display(), message, "choose another folder"));
        }
        let created = CreatedDirectories::create(parent(&target))?;
        let lock = DirectoryLock::take_file(sibling(&target, "lock"), location)?;
        restore(&target)?;
        let occupied = target.exists() && !is_empty_directory(&target)?;
        if occupied && !target.join(marker).is_file() {
            let hint = format!("it holds no `{marker}`, so it is not replaced; choose another directory");
            return Err(Error::exists(location, hint));
        }
        if occupied && !overwrite {
            let hint = text!["choose another directory, or replace it with ", option("overwrite")];
            return Err(Error::exists(location, hint));
        }
        let staging = sibling(&target, "partial");
        if staging.exists() {
            fs_err::remove_dir_all(&staging)?;
        }
        fs_err::create_dir(&staging)?;
        Ok(Self { target, staging, overwrite, _lock: lock, created })
    }

    /// Returns the path under which files are written until the commit.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Moves the directory to its target. An old directory there is exchanged with it and then removed. If
    /// the file system cannot exchange two names, the old directory is moved aside first; if the command is
    /// killed in between, its next run moves it back.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a rename fails, or if the old directory cannot be removed.
    pub fn commit(self) -> Result<()> {
        self.commit_by(exchange_names)
    }

    /// Works like [`commit`](Self::commit) with a given function that exchanges two names, which tests
    /// replace.
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
        // After a commit it does not exist. Otherwise, an error cannot be handled here; the next run clears
        // the name.
        let _ = fs_err::remove_dir_all(&self.staging);
    }
}

/// Exchanges the names of `staging` and `target`.
fn replace(exchange: fn(&Path, &Path) -> io::Result<()>, staging: &Path, target: &Path) -> io::Result<()> {
    if exchange(staging, target).is_ok() {
        return Ok(());
    }
    // The file system cannot exchange names. If there is another problem, the following calls also fail and
    // report the path.
    let aside = sibling(target, PREVIOUS);
    fs_err::rename(target, &aside)?;
    if let Err(error) = fs_err::rename(staging, target) {
        // If this fails, the next run moves it back.
        let _ = restore(target);
        return Err(error);
    }
    fs_err::rename(&aside, staging)
}

/// The suffix of an old output that is replaced without an exchange.
const PREVIOUS: &str = "previous";

/// Moves back an old output that a killed writer moved aside, or removes it if the new one has its name.
fn restore(target: &Path) -> io::Result<()> {
    let aside = sibling(target, PREVIOUS);
    match (aside.exists(), target.exists()) {
        (false, _) => Ok(()),
        (true, false) => fs_err::rename(&aside, target),
        (true, true) => fs_err::remove_dir_all(&aside),
    }
}

/// Returns whether `path` is an empty directory.
pub(crate) fn is_empty_directory(path: &Path) -> io::Result<bool> {
    Ok(path.is_dir() && fs_err::read_dir(path)?.next().is_none())
}

/// Returns the directory that contains `path`.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the path `.NAME.SUFFIX` in the same directory as `path`.
fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_else(|| "output".as_ref()));
    name.push(".");
    name.push(suffix);
    parent(path).join(name)
}

#[cfg(test)]
mod tests;
