//! Files as the manifest names them: their bytes, and those that it does not name.

use std::collections::{BTreeSet, HashSet};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::commit::DirectoryLock;
use crate::progress::{Reporter, Silent};
use crate::units::format_hex;
use crate::{Error, Manifest, Problem, Result, Vocabulary, VocabularyFile};

/// Checks the size and SHA-256 of the file `path` of the dataset in `directory`, and reports its bytes as done.
pub(super) fn check_bytes(
    directory: &Path,
    path: &str,
    expected_bytes: u64,
    expected_sha256: &str,
    reporter: &dyn Reporter,
) -> Result<(), Problem> {
    let wrong = |message: String| Problem::new(path, message);
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => wrong("it is missing, the manifest names it".to_owned()),
        _ => wrong(format!("it cannot be read: {error}")),
    };
    let mut file = fs_err::File::open(directory.join(path)).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes != expected_bytes {
        return Err(wrong(format!("it has {bytes} bytes, the manifest says {expected_bytes}")));
    }
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(failed)?;
        match buffer.get(..read) {
            None | Some([]) => break,
            Some(bytes) => digest.update(bytes),
        }
        reporter.advance(read as u64);
    }
    let found = format_hex(&digest.finalize());
    if found != expected_sha256 {
        return Err(wrong(format!("its bytes have SHA-256 {found}, the manifest says {expected_sha256}")));
    }
    Ok(())
}

/// What is wrong with the vocabularies' files.
pub(super) fn vocabulary_problems(directory: &Path, manifest: &Manifest) -> Vec<Problem> {
    let check = |file: &VocabularyFile| {
        let bytes = check_bytes(directory, &file.path, file.bytes_on_disk, &file.sha256, &Silent);
        let read = || match Vocabulary::read(directory, file) {
            Ok(_) => Ok(()),
            Err(Error::Vocabulary { message, .. }) => Err(Problem::new(&file.path, message)),
            Err(error) => Err(Problem::new(&file.path, error.to_string())),
        };
        bytes.and_then(|()| read()).err()
    };
    manifest.vocabularies.values().filter_map(check).collect()
}

/// Files in the folders of the manifest's files, and in partitions' folders, that the manifest does not name.
pub(super) fn unnamed_files(directory: &Path, manifest: &Manifest) -> Result<Vec<Problem>> {
    let vocabularies = manifest.vocabularies.values().map(|file| PathBuf::from(&file.path));
    let named: HashSet<PathBuf> = manifest.file_paths().chain(vocabularies).collect();
    let mut folders = named.iter().filter_map(|path| path.parent().map(Path::to_owned)).collect();
    let mut unnamed = BTreeSet::new();
    walk(directory, Path::new(""), &named, &mut folders, &mut unnamed)?;
    let mut warnings: Vec<Problem> = unnamed
        .iter()
        .map(|path| {
            Problem::new(
                path.to_string_lossy(),
                "the manifest does not name it, so it is not part of the dataset",
            )
        })
        .collect();
    if DirectoryLock::is_in(directory) {
        warnings.push(Problem::new(".", "it is being written, or its writer was killed"));
    }
    Ok(warnings)
}

/// Adds the files of the folder `relative` and those below it that are not `named`. At the top lie other things too: there
/// only what looks like a data file counts.
fn walk(
    directory: &Path,
    relative: &Path,
    named: &HashSet<PathBuf>,
    folders: &mut BTreeSet<PathBuf>,
    unnamed: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    for entry in fs_err::read_dir(directory.join(relative))? {
        let entry = entry?;
        let name = entry.file_name();
        let (text, path) = (name.to_string_lossy(), relative.join(&name));
        if entry.file_type()?.is_dir() {
            if text.contains('=') || folders.contains(&path) {
                walk(directory, &path, named, folders, unnamed)?;
            }
        } else if !named.contains(&path)
            && (!relative.as_os_str().is_empty() || text.starts_with("part-") && text.ends_with(".parquet"))
        {
            unnamed.insert(path);
        }
    }
    Ok(())
}
