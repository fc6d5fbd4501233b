//! Checks locations without a dataset. A dataset may be created there only if there are no foreign files.

use onefold_storage::Storage;

use crate::Result;
use crate::names::is_written;

/// The largest number of files that the error lists.
const MOST_LISTED: usize = 5;

/// Checks that a dataset can be created in `storage`, which has no snapshot. Empty folders are allowed, and
/// files with names that writers of datasets create, because another writer may be running or may have been
/// killed.
///
/// # Errors
///
/// [`Error::Storage`](crate::Error::Storage) if there is another file in any folder, or if the storage cannot
/// be listed.
pub fn check_new_location(storage: &Storage) -> Result<()> {
    let mut found = storage.find_files(MOST_LISTED + 1, |path| !is_written(path))?;
    found.sort();
    if found.is_empty() {
        return Ok(());
    }
    let more = if found.len() > MOST_LISTED { ", …" } else { "" };
    found.truncate(MOST_LISTED);
    let hint = format!(
        "it is not a dataset, and it holds files that belong to no dataset (`{}`{more}), so nothing is written into \
         it; choose another location",
        found.join("`, `")
    );
    Err(onefold_storage::Error::exists(storage.location(), hint).into())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::folded::samples::schema;
    use crate::{Commit, DatasetWriter, Order, WriterOptions};

    /// Returns the error of a writer with `commit`, if it refuses the location.
    fn refusal(root: &Path, commit: Commit) -> Option<String> {
        let options = WriterOptions { commit, ..WriterOptions::new(Order::Session) };
        DatasetWriter::create(root, schema(), options).err().map(|error| error.to_string())
    }

    fn write(root: &Path, path: &str) {
        fs_err::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs_err::write(root.join(path), b"1").unwrap();
    }

    #[test]
    fn a_location_with_files_of_others_is_refused() {
        for path in [
            "thesis.tex",
            "data/dataset.toml",
            "data/events/part-00000-0123456789abcdef.parquet",
            "vocabularies/deep/words.txt",
            "work/records.parquet",
            "snapshots/photo.json",
            "empty/and/not.txt",
        ] {
            let directory = tempfile::tempdir().unwrap();
            write(directory.path(), path);
            for commit in [Commit::Create, Commit::Overwrite, Commit::Append, Commit::Replace, Commit::Merge]
            {
                let error = refusal(directory.path(), commit).unwrap_or_else(|| panic!("{path} {commit:?}"));
                for part in [path, "already exists", "hint: ", "not a dataset", "another location"] {
                    assert!(error.contains(part), "{path}: {error}");
                }
            }
            assert_eq!(fs_err::read(directory.path().join(path)).unwrap(), b"1");
        }
    }

    #[test]
    fn an_error_lists_up_to_five_files() {
        let directory = tempfile::tempdir().unwrap();
        (1..=5).for_each(|number| write(directory.path(), &format!("data/{number}.txt")));
        let error = refusal(directory.path(), Commit::Create).unwrap();
        assert!(
            error.contains("`data/1.txt`, `data/2.txt`, `data/3.txt`, `data/4.txt`, `data/5.txt`)"),
            "{error}"
        );
        (6..=9).for_each(|number| write(directory.path(), &format!("data/{number}.txt")));
        let error = refusal(directory.path(), Commit::Create).unwrap();
        assert!(error.contains("`data/5.txt`, …)") && !error.contains("data/6.txt"), "{error}");
    }

    #[test]
    fn empty_folders_and_files_of_writers_and_systems_are_allowed() {
        let directory = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(directory.path().join("photos/2024")).unwrap();
        for path in [
            "data/day=1/part-00000-0123456789abcdef.parquet",
            "data/day=1/part-00001-0123456789abcdef.parquet#1",
            "vocabularies/items-0123456789abcdef.parquet",
            "work/records-0123456789abcdef.parquet",
            "snapshots/latest",
            "snapshots/.00000001.json.0123456789abcdef.tmp",
            "lost+found/#12",
            ".Trash-1000/files/thesis.tex",
            ".DS_Store",
            "data/.nfs000000000012d687",
        ] {
            write(directory.path(), path);
        }
        assert_eq!(refusal(directory.path(), Commit::Create), None);
    }
}
