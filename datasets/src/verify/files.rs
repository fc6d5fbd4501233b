//! Files as the snapshot names them: their bytes, and those that it does not name.

use std::collections::BTreeSet;

use onefold_base::progress::{Reporter, Silent};
use onefold_storage::{FEW_REQUESTS, Object, Storage};

use super::problem_of;
use crate::names::{DATA, VOCABULARIES, is_written};
use crate::scan::MISSING;
use crate::snapshot::{named_files, numbers};
use crate::{Error, Problem, Result, Snapshot, Vocabulary};

/// Checks the size and SHA-256 of the file `path`, and reports its bytes as done; gives the object that has them.
///
/// # Errors
///
/// [`Error::Damaged`] if they are others or there is no such file, and as [`Storage::sha256`].
pub(super) fn check_bytes(
    storage: &Storage,
    path: &str,
    expected_bytes: u64,
    expected_sha256: &str,
    reporter: &dyn Reporter,
) -> Result<Object> {
    reporter.go_on()?;
    let wrong = |message: String| Problem::new(path, message);
    let found = storage.head(path)?;
    let found = found.ok_or_else(|| wrong(MISSING.to_owned()))?;
    if found.bytes != expected_bytes {
        return Err(wrong(format!("it has {} bytes, the snapshot says {expected_bytes}", found.bytes)).into());
    }
    let sha256 = storage.sha256(path, &found, FEW_REQUESTS, |read| {
        reporter.advance(read.bytes());
        Ok(())
    })?;
    if sha256 != expected_sha256 {
        let message = format!("its bytes have SHA-256 {sha256}, the snapshot says {expected_sha256}");
        return Err(wrong(message).into());
    }
    Ok(found)
}

/// What is wrong with the vocabularies' files.
///
/// # Errors
///
/// As [`Storage::read`].
pub(super) fn vocabulary_problems(storage: &Storage, snapshot: &Snapshot) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for file in snapshot.vocabularies.values() {
        let bytes = check_bytes(storage, &file.path, file.bytes_on_disk, &file.sha256, &Silent);
        let read = |_| match Vocabulary::read(storage, file) {
            Ok(_) => Ok(()),
            Err(Error::Vocabulary { message, .. }) => Err(Problem::new(&file.path, message).into()),
            Err(error) => Err(error),
        };
        problems.extend(problem_of(bytes.and_then(read))?.err());
    }
    Ok(problems)
}

/// Files in the folders of data files and vocabularies that no snapshot names: those of a writer that was killed or is at
/// work, and files whose names no writer makes.
pub(super) fn unnamed_files(storage: &Storage, snapshot: &Snapshot) -> Result<Vec<Problem>> {
    let others = numbers(storage, None)?.into_iter().filter(|number| *number != snapshot.snapshot);
    let mut named = named_files(storage, others)?;
    named.extend(snapshot.file_paths().map(str::to_owned));
    let mut unnamed = BTreeSet::new();
    for folder in [DATA, VOCABULARIES] {
        let objects = storage.list(folder, None)?;
        unnamed.extend(objects.into_iter().map(|object| object.path).filter(|path| !named.contains(path)));
    }
    let message = |path: &str| match is_written(path) {
        true => {
            "no snapshot names it: a writer is at work, or was killed; a vacuum removes it once it is old"
        }
        false => "it is no file of a dataset, and a vacuum keeps it; move it out of the dataset's folder",
    };
    Ok(unnamed.into_iter().map(|path| Problem::new(&path, message(&path))).collect())
}
