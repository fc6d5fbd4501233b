//! Files as the snapshot names them: their bytes, and those that it does not name.

use std::collections::BTreeSet;

use crate::progress::{Reporter, Silent};
use crate::snapshot::{named_files, numbers};
use crate::storage::Storage;
use crate::writer::{DATA, VOCABULARIES};
use crate::{Error, Problem, Result, Snapshot, Vocabulary, VocabularyFile};

/// Checks the size and SHA-256 of the file `path`, and reports its bytes as done.
pub(super) fn check_bytes(
    storage: &Storage,
    path: &str,
    expected_bytes: u64,
    expected_sha256: &str,
    reporter: &dyn Reporter,
) -> Result<(), Problem> {
    let wrong = |message: String| Problem::new(path, message);
    let failed = |error: Error| match error {
        Error::Read { message, .. } => wrong(format!("it cannot be read: {message}")),
        error => wrong(format!("it cannot be read: {error}")),
    };
    let found = storage.head(path).map_err(failed)?;
    let found = found.ok_or_else(|| wrong("it is missing, the snapshot names it".to_owned()))?;
    if found.bytes != expected_bytes {
        return Err(wrong(format!("it has {} bytes, the snapshot says {expected_bytes}", found.bytes)));
    }
    let sha256 = storage.sha256(path, &found, |read| reporter.advance(read)).map_err(failed)?;
    if sha256 != expected_sha256 {
        return Err(wrong(format!("its bytes have SHA-256 {sha256}, the snapshot says {expected_sha256}")));
    }
    Ok(())
}

/// What is wrong with the vocabularies' files.
pub(super) fn vocabulary_problems(storage: &Storage, snapshot: &Snapshot) -> Vec<Problem> {
    let check = |file: &VocabularyFile| {
        let bytes = check_bytes(storage, &file.path, file.bytes_on_disk, &file.sha256, &Silent);
        let read = || match Vocabulary::read(storage, file) {
            Ok(_) => Ok(()),
            Err(Error::Vocabulary { message, .. }) => Err(Problem::new(&file.path, message)),
            Err(error) => Err(Problem::new(&file.path, error.to_string())),
        };
        bytes.and_then(|()| read()).err()
    };
    snapshot.vocabularies.values().filter_map(check).collect()
}

/// Data files and vocabularies that no snapshot names: left by a writer that was killed, or by one that is at work.
pub(super) fn unnamed_files(storage: &Storage, snapshot: &Snapshot) -> Result<Vec<Problem>> {
    let others = numbers(storage, None)?.into_iter().filter(|number| *number != snapshot.snapshot);
    let mut named = named_files(storage, others)?;
    named.extend(snapshot.file_paths().map(str::to_owned));
    let mut unnamed = BTreeSet::new();
    for folder in [DATA, VOCABULARIES] {
        let objects = storage.list(folder, None)?;
        unnamed.extend(objects.into_iter().map(|object| object.path).filter(|path| !named.contains(path)));
    }
    let message =
        "no snapshot names it: a writer is at work, or was killed; a vacuum removes it once it is old";
    Ok(unnamed.into_iter().map(|path| Problem::new(path, message)).collect())
}
