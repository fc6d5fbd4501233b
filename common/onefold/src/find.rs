//! Finds the programs `onefold-*` on this machine.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The prefix of the file names of programs.
const PREFIX: &str = "onefold-";

/// A program that was found.
#[derive(Debug, PartialEq)]
pub(crate) struct Found {
    /// The name without `onefold-`.
    pub(crate) name: String,
    /// The path of the executable file.
    pub(crate) path: PathBuf,
}

/// Returns the directories to search: the directory of this program, then the directories on the `PATH`. If another
/// program, such as Python's interpreter, runs this one in its process, the directory of that program is not searched.
pub(crate) fn folders() -> Vec<PathBuf> {
    let own =
        std::env::current_exe().ok().filter(|path| path.file_stem().is_some_and(|name| name == "onefold"));
    let own = own.and_then(|path| path.parent().map(Path::to_owned));
    let path = std::env::var_os("PATH").unwrap_or_default();
    own.into_iter().chain(std::env::split_paths(&path)).collect()
}

/// Returns the programs in these directories, sorted by name. As in a shell, a program in an earlier directory hides
/// programs with the same name in later directories. Directories that cannot be read are skipped.
pub(crate) fn find(folders: &[PathBuf]) -> Vec<Found> {
    let mut found = BTreeMap::new();
    for folder in folders {
        let Ok(entries) = folder.read_dir() else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PREFIX));
            if let Some(name) = name.filter(|_| is_executable(&path)) {
                found.entry(name.to_owned()).or_insert_with(|| path.clone());
            }
        }
    }
    found.into_iter().map(|(name, path)| Found { name, path }).collect()
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_files_are_programs_and_the_first_directory_wins() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, mode| {
            let path = folder.path().join(name);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(&path, "").unwrap();
            fs_err::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path
        };
        let first = write("first/onefold-read", 0o755);
        write("second/onefold-read", 0o755);
        let ingest = write("second/onefold-ingest", 0o755);
        write("second/onefold-ingest.d", 0o644);
        write("second/onefold", 0o755);
        fs_err::create_dir(folder.path().join("second/onefold-folder")).unwrap();
        let folders = ["first", "missing", "second"].map(|name| folder.path().join(name));
        let expected =
            [("ingest", ingest), ("read", first)].map(|(name, path)| Found { name: name.to_owned(), path });
        assert_eq!(find(&folders), expected);
    }
}
