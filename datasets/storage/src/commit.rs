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
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(|error| match error {
        // A file system that does not know the flag says that it is invalid.
        rustix::io::Errno::INVAL => io::ErrorKind::Unsupported.into(),
        error => error.into(),
    })
}

#[cfg(not(target_os = "linux"))]
fn rename_without_replacing(_: &Path, _: &Path) -> io::Result<()> {
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
    /// [`Error::Fault`] if something is there and `overwrite` is false, if it is there and does not hold `marker`, the
    /// file that makes it a directory of the kind being written, or if `target` names nothing, as
    /// [`absolute`](crate::absolute) says; [`Error::Locked`] if another process writes the same directory.
    pub fn create(target: &Path, marker: &str, overwrite: bool) -> Result<Self> {
        // The folders on the way are made, so a `~` that the shell did not expand would become one.
        crate::absolute(target)?;
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
                let hint = "it appeared while this command ran; choose another directory";
                return Err(Error::exists(&self.target, hint));
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

    /// The ways to name a file on file systems with ever fewer capabilities.
    #[cfg(unix)]
    fn namings() -> [Naming; 4] {
        use rustix::io::Errno;
        let full = Naming::default();
        let no_links = Naming { link: |_, _| Err(Errno::PERM.into()), ..full };
        let neither = Naming {
            link: |_, _| Err(Errno::OPNOTSUPP.into()),
            rename: |_, _| Err(Errno::NOSYS.into()),
            ..full
        };
        let old_kernel = Naming { rename: |_, _| Err(io::ErrorKind::Unsupported.into()), ..no_links };
        [full, no_links, neither, old_kernel]
    }

    #[cfg(unix)]
    #[test]
    fn a_file_is_created_once_also_without_hard_links() {
        for naming in namings() {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("folder/file");
            assert_eq!(create_file_by(&naming, &path, b"first").unwrap(), Created::Yes);
            assert_eq!(create_file_by(&naming, &path, b"second").unwrap(), Created::Exists);
            assert_eq!(fs_err::read(&path).unwrap(), b"first");
            assert_eq!(fs_err::read_dir(parent(&path)).unwrap().count(), 1);
        }
    }

    #[cfg(unix)]
    #[test]
    fn of_many_writers_one_creates_a_file_also_without_hard_links() {
        for naming in namings() {
            let directory = tempfile::tempdir().unwrap();
            let create = |writer: u8| {
                let path = |n: u8| directory.path().join(n.to_string());
                let created = |n: u8| create_file_by(&naming, &path(n), &[n, writer]).unwrap();
                (0..20).filter(|n| created(*n) == Created::Yes).count()
            };
            let create = &create;
            let created: usize = std::thread::scope(|scope| {
                let writers: Vec<_> = (0..8).map(|writer| scope.spawn(move || create(writer))).collect();
                writers.into_iter().map(|writer| writer.join().unwrap()).sum()
            });
            assert_eq!(created, 20);
            assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 20);
        }
    }

    /// The system's other errors are not taken for a missing capability.
    #[cfg(unix)]
    #[test]
    fn a_full_disk_is_reported_by_the_first_way() {
        use rustix::io::Errno;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let full = Naming { link: |_, _| Err(Errno::NOSPC.into()), ..Naming::default() };
        let error = create_file_by(&full, &path, b"text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
    }

    /// A killed writer leaves its claim and no file; the name is not given to another one before the claim is removed.
    #[cfg(unix)]
    #[test]
    fn a_claim_of_a_killed_writer_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let naming = Naming { patience: Duration::from_millis(50), ..namings()[2] };
        let claim = directory.path().join(".file.claim.tmp");
        fs_err::write(&claim, b"").unwrap();
        let error = create_file_by(&naming, &path, b"text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        let error = Error::write(&path, error).to_string();
        assert!(error.contains(".file.claim.tmp") && error.contains("hint: if no other writer"), "{error}");
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1, "only the claim is left");
        fs_err::remove_file(&claim).unwrap();
        assert_eq!(create_file_by(&naming, &path, b"text").unwrap(), Created::Yes);
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
