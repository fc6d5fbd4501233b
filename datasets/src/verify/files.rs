//! Files as the snapshot names them: their bytes, and those that it does not name.

use std::collections::{BTreeSet, HashSet};

use onefold_storage::{FEW_REQUESTS, Storage};

use super::problem_of;
use crate::names::{DATA, MANIFESTS, VOCABULARIES, is_written};
use crate::scan::MISSING;
use crate::snapshot::{NamedFiles, numbers};
use crate::{Error, Problem, Result, Snapshot, Vocabulary, VocabularyFile};

/// Checks the size and SHA-256 of a vocabulary's file.
///
/// # Errors
///
/// [`Error::Damaged`] if they are others or there is no such file, and as [`Storage::sha256`].
fn check_bytes(storage: &Storage, file: &VocabularyFile) -> Result<()> {
    let wrong = |message: String| Problem::new(&file.path, message);
    let found = storage.head(&file.path)?.ok_or_else(|| wrong(MISSING.to_owned()))?;
    if found.bytes != file.bytes_on_disk {
        let (bytes, expected) = (found.bytes, file.bytes_on_disk);
        return Err(wrong(format!("it has {bytes} bytes, the snapshot says {expected}")).into());
    }
    let sha256 = storage.sha256(&file.path, &found, FEW_REQUESTS, |_| Ok(()))?;
    if sha256 != file.sha256 {
        let message = format!("its bytes have SHA-256 {sha256}, the snapshot says {}", file.sha256);
        return Err(wrong(message).into());
    }
    Ok(())
}

/// What is wrong with the vocabularies' files.
///
/// # Errors
///
/// As [`Storage::read`].
pub(super) fn vocabulary_problems(storage: &Storage, snapshot: &Snapshot) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for file in snapshot.vocabularies.values() {
        let bytes = check_bytes(storage, file);
        let read = |()| match Vocabulary::read(storage, file) {
            Ok(_) => Ok(()),
            Err(Error::Vocabulary { message, .. }) => Err(Problem::new(&file.path, message).into()),
            Err(error) => Err(error),
        };
        problems.extend(problem_of(bytes.and_then(read))?.err());
    }
    Ok(problems)
}

/// Files in the folders of data files, vocabularies and manifests that no snapshot names: those of a writer that was
/// killed or is at work, and files whose names no writer makes.
pub(super) fn unnamed_files(storage: &Storage, snapshot: &Snapshot) -> Result<Vec<Problem>> {
    let mut files = NamedFiles::new(storage);
    let mut named: HashSet<String> = snapshot.file_paths().map(str::to_owned).collect();
    named.extend(snapshot.manifests.iter().map(|entry| entry.path.clone()));
    for number in numbers(storage, None)?.into_iter().filter(|number| *number != snapshot.snapshot) {
        named.extend(files.of(number)?);
    }
    let mut unnamed = BTreeSet::new();
    for folder in [DATA, VOCABULARIES, MANIFESTS] {
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
