//! The directory of a run during training.

use std::path::{Path, PathBuf};

use onefold_base::fault::{Text, option, text};
use onefold_storage::commit::DirectoryLock;
use onefold_storage::{Storage, path_on_disk};

use crate::distributed::Collectives;
use crate::run::{RUN_FILE, Run, SHARDS};
use crate::{Error, Result, checkpoint, preprocess};

/// The treatment of an existing run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Reports an error.
    Refuse,
    /// Replaces the old run when the new one is complete. Until then, the old run is kept next to it as
    /// `.NAME.replaced`.
    Overwrite,
    /// Resumes the run from its newest checkpoint, or from its start if it has none; begins one if there is
    /// none.
    Resume,
}

/// The locked directory of a run. Dropping it, for example after a panic, removes nothing; only
/// [`give_back`](Self::give_back) does.
#[derive(Debug)]
pub(super) struct RunDirectory {
    pub(super) path: PathBuf,
    /// The location of the old run until this one is complete.
    replaced: PathBuf,
    /// The parent directories that were created for this run.
    created: Vec<PathBuf>,
    /// The folder of the checkpoints, if it is a different folder and a run has begun there.
    begun: Option<Storage>,
    /// Whether an existing run is resumed.
    pub(super) resumed: bool,
    kept: bool,
    lock: Option<DirectoryLock>,
}

impl RunDirectory {
    /// Creates and locks the directory `path` for a run.
    pub(super) fn create(path: &Path, existing: Existing) -> Result<Self> {
        let message = "the directory of a run is on a local disk, because its metrics grow step by step";
        let (out, checkpoints) = (option("out"), option("checkpoints"));
        let hint = text!["give a local directory with ", out, ", and this URL with ", checkpoints];
        // Parent folders are created, so this also rejects a `~` that the shell did not expand.
        let resolved = path_on_disk(path, message, hint)?;
        let occupied = path.is_file() || (path.is_dir() && fs_err::read_dir(path)?.next().is_some());
        if occupied {
            check_occupied(path, existing)?;
        }
        // The target of a symbolic link is replaced, not the link. The components omit a trailing slash.
        let named: PathBuf = path.components().collect();
        let path = if named.is_symlink() { resolved.as_path() } else { path };
        let replaced = replaced(path);
        if occupied && existing == Existing::Overwrite {
            drop(lock(path)?);
            set_aside(path, &replaced)?;
        }
        let missing = path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let created: Vec<_> = missing.map(Path::to_owned).collect();
        fs_err::create_dir_all(path)?;
        let lock = lock(path)?;
        let resumed = occupied && existing == Existing::Resume;
        Ok(Self {
            path: path.to_owned(),
            replaced,
            created,
            begun: None,
            resumed,
            kept: false,
            lock: Some(lock),
        })
    }

    /// Records that a run has begun in `files`, the folder of its checkpoints.
    pub(super) fn begins_in(&mut self, files: Storage) {
        self.begun = Some(files);
    }

    /// Keeps the run, because it has taken steps, or contains a batch to examine.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }

    /// Marks the run as complete, and removes the run that it replaces.
    pub(super) fn complete(&mut self) -> Result<()> {
        self.keep();
        if self.replaced.exists() {
            fs_err::remove_dir_all(&self.replaced)?;
        }
        Ok(())
    }

    /// Restores the previous state after an error before the first step. A run that is [kept](Self::keep) or
    /// was resumed is not removed.
    pub(super) fn give_back(mut self) {
        drop(self.lock.take());
        if self.kept {
            return;
        }
        // Errors are ignored: the caller has an error already, and the next run reports obstacles.
        if let Some(files) = self.begun.take() {
            let _ = discard(&files);
        }
        if self.resumed {
            return;
        }
        let _ = fs_err::remove_dir_all(&self.path);
        for directory in &self.created {
            let _ = fs_err::remove_dir(directory);
        }
        if !self.created.contains(&self.path) {
            let _ = fs_err::create_dir(&self.path);
        }
        if self.replaced.exists() {
            let _ = fs_err::rename(&self.replaced, &self.path);
        }
    }
}

/// Checks that all ranks see the files that the lowest rank writes to `files`, the folder of the checkpoints
/// and the model. Every rank must call it.
pub(super) fn check_shared(files: &Storage, collectives: &dyn Collectives) -> Result<()> {
    if collectives.size() == 1 {
        return Ok(());
    }
    let word = format!("{:016x}", rand::random::<u64>());
    let word = collectives.gather_bytes(word.as_bytes())?.swap_remove(0);
    let path = format!("{SHARDS}/{}", String::from_utf8_lossy(&word));
    let (rank, bytes) = (collectives.rank(), word.clone());
    collectives
        .agree_on(|| if rank == 0 { files.replace(&path, bytes).map_err(Error::from) } else { Ok(()) })?;
    let seen = collectives.agree_on(|| match files.read(&path)? {
        Some(read) if read == word => Ok(()),
        _ => Err(Error::run(files.location(), format!("rank {rank} does not see what rank 0 writes there"), text![
                "all ranks need the same folder: give an absolute path on a file system that all machines share with ",
                option("out"),
                ", or the URL of an object store with ",
                option("checkpoints")
            ])),
    });
    if rank == 0 {
        files.remove_folder(SHARDS, None)?;
    }
    seen
}

/// Removes the files of a run without a checkpoint from the folder of its checkpoints.
fn discard(files: &Storage) -> onefold_storage::Result<()> {
    files.delete(vec![RUN_FILE.to_owned()])?;
    [preprocess::FOLDER, checkpoint::FOLDER, SHARDS]
        .iter()
        .try_for_each(|folder| files.remove_folder(folder, None))
}

fn lock(path: &Path) -> Result<DirectoryLock> {
    Ok(DirectoryLock::take(path)?)
}

fn check_occupied(path: &Path, existing: Existing) -> Result<()> {
    let refused = |hint: Text| Err(Error::from(onefold_storage::Error::exists(path, hint)));
    if !path.join(RUN_FILE).is_file() {
        let hint =
            format!("it holds no `{RUN_FILE}`, so it is not replaced or resumed; choose another directory");
        return refused(hint.into());
    }
    match existing {
        Existing::Refuse => refused(text![
            "choose another directory, continue the run with ",
            option("existing").set_to("resume"),
            ", or replace it with ",
            option("existing").set_to("overwrite")
        ]),
        Existing::Overwrite | Existing::Resume => Ok(()),
    }
}

/// Moves the run at `path` aside if it is complete. An incomplete run is removed instead if a complete one is
/// set aside already.
fn set_aside(path: &Path, replaced: &Path) -> Result<()> {
    let complete = Run::load(path).is_ok_and(|run| run.completed);
    if replaced.exists() && !complete {
        return Ok(fs_err::remove_dir_all(path)?);
    }
    if replaced.exists() {
        fs_err::remove_dir_all(replaced)?;
    }
    Ok(fs_err::rename(path, replaced)?)
}

/// Returns the path `.NAME.replaced` next to `path`.
fn replaced(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_else(|| "run".as_ref()));
    name.push(".replaced");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::distributed::threads;

    fn run(path: &Path, text: &str) {
        fs_err::create_dir_all(path).unwrap();
        fs_err::write(path.join(RUN_FILE), text).unwrap();
    }

    fn text(path: &Path) -> String {
        fs_err::read_to_string(path.join(RUN_FILE)).unwrap()
    }

    #[test]
    fn ranks_need_one_folder() {
        let folder = tempfile::tempdir().unwrap();
        let check = |folders: [&str; 3]| -> Vec<Result<()>> {
            let ranks = threads(3, Duration::from_secs(300)).into_iter().zip(folders);
            std::thread::scope(|scope| {
                let open = |name: &str| Storage::open(&folder.path().join(name)).unwrap();
                let checks: Vec<_> =
                    ranks.map(|(rank, name)| scope.spawn(move || check_shared(&open(name), &rank))).collect();
                checks.into_iter().map(|check| check.join().unwrap()).collect()
            })
        };
        assert!(check(["a", "a", "a"]).iter().all(Result::is_ok));
        let results = check(["a", "a", "b"]);
        let error = results[2].as_ref().unwrap_err().to_string();
        assert!(
            error.contains("/b`: rank 2 does not see what rank 0 writes there\n  hint: all ranks need"),
            "{error}"
        );
        for other in &results[..2] {
            assert!(matches!(other, Err(Error::ReportedElsewhere { rank: 2, .. })), "{other:?}");
        }
        assert!(!folder.path().join("a").join(SHARDS).exists());
    }

    #[test]
    fn giving_back_restores_the_former_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/run");
        RunDirectory::create(&path, Existing::Refuse).unwrap().give_back();
        assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 0);
        run(&path, "old");
        assert!(
            RunDirectory::create(&path, Existing::Refuse)
                .unwrap_err()
                .to_string()
                .contains("the option `existing = resume`")
        );
        let new = RunDirectory::create(&path, Existing::Overwrite).unwrap();
        assert!(!path.join(RUN_FILE).exists());
        new.give_back();
        assert_eq!(text(&path), "old");
        RunDirectory::create(&path, Existing::Resume).unwrap().give_back();
        assert_eq!(text(&path), "old");
        assert_eq!(fs_err::read_dir(folder.path().join("a")).unwrap().count(), 1);
    }

    #[test]
    fn the_target_of_a_link_has_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("disk/run"), folder.path().join("run"));
        fs_err::create_dir_all(&target).unwrap();
        std::os::unix::fs::symlink("disk/run", &link).unwrap();
        RunDirectory::create(&link, Existing::Refuse).unwrap().give_back();
        assert!(link.is_symlink() && target.is_dir());
        run(&link, "old");
        let mut new = RunDirectory::create(&link.join(""), Existing::Overwrite).unwrap();
        run(&link, "new");
        new.complete().unwrap();
        assert!(link.is_symlink());
        assert_eq!(text(&target), "new");
        assert_eq!(fs_err::read_dir(folder.path().join("disk")).unwrap().count(), 1);
    }

    #[test]
    fn dropped_and_kept_runs_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let dropped = RunDirectory::create(&path, Existing::Refuse).unwrap();
        run(&path, "dropped");
        drop(dropped);
        assert_eq!(text(&path), "dropped");
        let mut kept = RunDirectory::create(&path, Existing::Overwrite).unwrap();
        run(&path, "kept");
        kept.keep();
        kept.give_back();
        assert_eq!(
            (text(&path), text(&folder.path().join(".run.replaced"))),
            ("kept".into(), "dropped".into())
        );
    }

    #[test]
    fn a_killed_run_never_costs_the_complete_one_it_replaces() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        run(&path, "complete");
        // The run is killed twice, so the directory contains no complete run.
        for text in ["partial", "partial again"] {
            let killed = RunDirectory::create(&path, Existing::Overwrite).unwrap();
            run(&path, text);
            drop(killed);
        }
        assert_eq!(text(&folder.path().join(".run.replaced")), "complete");
        let mut new = RunDirectory::create(&path, Existing::Overwrite).unwrap();
        run(&path, "new");
        new.complete().unwrap();
        assert_eq!(text(&path), "new");
        assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn one_process_at_a_time_and_nothing_but_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let first = RunDirectory::create(&path, Existing::Refuse).unwrap();
        run(&path, "one");
        for existing in [Existing::Resume, Existing::Overwrite] {
            let second = RunDirectory::create(&path, existing);
            let is_locked = matches!(
                second,
                Err(Error::Dataset(onefold_datasets::Error::Storage(onefold_storage::Error::Locked { .. })))
            );
            assert!(is_locked, "{second:?}");
        }
        first.give_back();
        fs_err::create_dir(&path).unwrap();
        fs_err::write(path.join("thesis.txt"), "years").unwrap();
        for existing in [Existing::Refuse, Existing::Resume, Existing::Overwrite] {
            let error = RunDirectory::create(&path, existing).unwrap_err().to_string();
            assert!(error.contains("it holds no `run.json`"), "{error}");
        }
        assert!(path.join("thesis.txt").exists());
    }
}
