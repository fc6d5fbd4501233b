//! Checks vocabulary files, and finds files that the snapshot does not list.

use std::collections::{BTreeSet, HashSet};

use onefold_storage::Storage;

use super::memory::Memory;
use crate::names::{DATA, MANIFESTS, VOCABULARIES, is_written};
use crate::snapshot::{NamedFiles, numbers};
use crate::{Error, Problem, Result, Snapshot, Vocabulary};

/// Returns the problems of the vocabularies' files.
///
/// # Errors
///
/// Returns the errors of [`Vocabulary::read`], except problems of a file, and an error if a vocabulary does not
/// fit into `memory_limit` bytes.
pub(super) fn vocabulary_problems(
    storage: &Storage,
    snapshot: &Snapshot,
    memory_limit: u64,
) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for file in snapshot.vocabularies.values() {
        let room = Memory::new(memory_limit, 0).wait_for(Vocabulary::reading_bytes(storage, file)).map(drop);
        room.map_err(|fault| fault.within(&format!("`{}`", storage.shown(&file.path).display())))?;
        match Vocabulary::read(storage, file) {
            Ok(_) => {}
            Err(Error::Vocabulary { message, .. }) => problems.push(Problem::new(&file.path, message)),
            Err(error) => return Err(error),
        }
    }
    Ok(problems)
}

/// Returns the files in the folders of data files, vocabularies and manifests that no snapshot lists: files
/// of a writer that is running or was killed, and files whose names no writer creates.
pub(super) fn unnamed_files(storage: &Storage, snapshot: &Snapshot) -> Result<Vec<Problem>> {
    let mut files = NamedFiles::new(storage);
    let mut named: HashSet<String> = snapshot.file_paths().map(str::to_owned).collect();
    named.extend(snapshot.manifests.iter().map(|entry| entry.path.clone()));
    for number in numbers(storage, None)?.into_iter().filter(|number| *number != snapshot.snapshot) {
        named.extend(files.of_existing(number)?.into_iter().flatten());
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
