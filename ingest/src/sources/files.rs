//! Finds the files of a source: expands paths, directories and patterns into a sorted list, with the `name=value`
//! folders of each file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};
use object_store::{ObjectMeta, ObjectStoreExt, local::LocalFileSystem};

use crate::error::MessageAndHint;
use onefold_base::percent::decode_leniently;

/// A file or directory that cannot be read or does not fit the others, and the reason.
pub(crate) type FileError = (PathBuf, MessageAndHint);

/// The folder of the log of a Delta Lake table.
pub(super) const DELTA_LOG: &str = "_delta_log";

/// The folder value that Hive uses for rows without a value.
const NO_VALUE: &str = "__HIVE_DEFAULT_PARTITION__";

/// The name of a file in error messages.
pub(super) struct FileName(pub(super) PathBuf);

/// A file of a source that is not yet inspected.
#[derive(Debug, Clone)]
pub(super) struct FoundFile {
    /// The path or URL as in the configuration, for messages.
    pub(super) name: PathBuf,
    /// The location in the store, the size and the version.
    pub(super) meta: ObjectMeta,
    /// The `name=value` folders in its path; the value is `None` for Hive's default value.
    pub(super) folders: Vec<(String, Option<String>)>,
}

/// Whether a path is a pattern, that is, contains `*`, `?` or `[`.
pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// Whether a file or folder is not part of the data, such as `.crc`, `_SUCCESS` or `_temporary`. A folder
/// `_name=value` is part of the data.
pub(super) fn is_hidden(name: &str) -> bool {
    name.starts_with('.') || (name.starts_with('_') && !name.contains('='))
}

/// Whether an object only marks an empty folder. Consoles of object stores create such objects.
pub(super) fn is_folder_marker(meta: &ObjectMeta) -> bool {
    meta.size == 0 && meta.location.filename().is_none_or(|name| !name.contains('.'))
}

/// Whether a key, or a folder that contains it, matches a pattern that begins with `**`.
pub(super) fn matches_below(key: &str, parts: &[&str]) -> bool {
    let Ok(pattern) = Pattern::new(&parts.join("/")) else { return false };
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    let folders = key.match_indices('/').map(|(end, _)| &key[..end]);
    folders.chain([key]).any(|path| pattern.matches_with(path, options))
}

/// Returns the `name=value` folders of a path. The last part of the path is ignored.
pub(super) fn folders(path: &str) -> Vec<(String, Option<String>)> {
    let parts: Vec<&str> = path.split('/').collect();
    let folders = parts[..parts.len() - 1].iter().filter_map(|part| part.split_once('='));
    let named = folders.filter(|(name, _)| !name.is_empty());
    named
        .map(|(name, value)| {
            let value = decode_leniently(value);
            (name.to_owned(), (value != NO_VALUE).then_some(value))
        })
        .collect()
}

/// Returns whether a local folder is a Delta Lake table. Such a folder also has files that no version, or only earlier
/// versions, of the table have.
pub(crate) fn is_table(folder: &Path) -> bool {
    folder.join(DELTA_LOG).is_dir()
}

/// Returns the message and the hint for a path that is the folder of a Delta Lake table.
pub(super) fn refused_table(path: &str) -> MessageAndHint {
    let message =
        "it is a Delta Lake table, and its folder can have files that the table does not have any more";
    let hint = format!("write `{{ delta = \"{path}\" }}`, which reads the files of one version of the table");
    (message.to_owned(), hint)
}

/// Returns the local files that match `pattern`, which is relative to `base`.
///
/// # Errors
///
/// The directory or file that cannot be read, or an invalid pattern. It is not an error if no file matches.
pub(super) async fn local(base: &Path, pattern: &str) -> Result<Vec<FoundFile>, FileError> {
    let folder = base.join(pattern);
    if is_table(&folder) {
        return Err((folder, refused_table(pattern)));
    }
    let store = LocalFileSystem::new();
    let mut found = Vec::new();
    for path in local_paths(base, pattern)? {
        let wrong = |error: &dyn std::fmt::Display| {
            let hint = "make the file readable, or leave it out of the pattern";
            (path.clone(), (format!("it cannot be read: {error}"), hint.to_owned()))
        };
        let whole = fs_err::canonicalize(&path).map_err(|error| wrong(&error))?;
        let location = object_store::path::Path::from_absolute_path(&whole).map_err(|error| wrong(&error))?;
        let meta = store.head(&location).await.map_err(|error| wrong(&error))?;
        let below = path.strip_prefix(base).unwrap_or(&path);
        found.push(FoundFile { folders: folders(&below.to_string_lossy()), name: path, meta });
    }
    Ok(found)
}

/// Returns the paths of the local files that match `pattern`, which is absolute or relative to `base`: a file, a
/// directory with all files below it, or a glob of either. It is not an error if no file matches.
///
/// # Errors
///
/// The directory or file that cannot be read, or an invalid pattern.
pub(crate) fn local_paths(base: &Path, pattern: &str) -> Result<BTreeSet<PathBuf>, FileError> {
    let place = base.join(pattern);
    let mut paths = BTreeSet::new();
    if place.is_dir() {
        walk(&place, &mut paths, &mut BTreeSet::new())?;
        return Ok(paths);
    }
    if place.exists() || !is_pattern(pattern) {
        paths.extend(place.exists().then_some(place));
        return Ok(paths);
    }
    let wrong = |message: String| (place.clone(), (message, super::PATH_HINT.to_owned()));
    // Brackets in `base` must not be treated as part of the pattern.
    let escaped = match Path::new(pattern).is_absolute() {
        true => PathBuf::from(pattern),
        false => Path::new(&Pattern::escape(&base.to_string_lossy())).join(pattern),
    };
    let matches = glob::glob(&escaped.to_string_lossy());
    let matches = matches.map_err(|error| wrong(format!("bad pattern: {error}")))?;
    let hidden_wanted = pattern.split('/').any(is_hidden_part);
    for path in matches {
        let path = path.map_err(|error| unreadable(error.path(), error.error()))?;
        let below = path.strip_prefix(base).unwrap_or(&path);
        if !hidden_wanted
            && below.components().any(|part| is_hidden_part(&part.as_os_str().to_string_lossy()))
        {
            continue;
        }
        if path.is_dir() {
            walk(&path, &mut paths, &mut BTreeSet::new())?;
        } else {
            paths.insert(path);
        }
    }
    Ok(paths)
}

/// Whether a part of a path is hidden; `.` and `..` are not.
fn is_hidden_part(name: &str) -> bool {
    is_hidden(name) && name != "." && name != ".."
}

/// Collects the files below a directory. `seen` has the directories that were visited, because a link may lead back
/// to one.
fn walk(
    directory: &Path,
    paths: &mut BTreeSet<PathBuf>,
    seen: &mut BTreeSet<PathBuf>,
) -> Result<(), FileError> {
    let whole = fs_err::canonicalize(directory).map_err(|error| unreadable(directory, &error))?;
    if !seen.insert(whole.clone()) {
        return Ok(());
    }
    for entry in fs_err::read_dir(directory).map_err(|error| unreadable(directory, &error))? {
        let entry = entry.map_err(|error| unreadable(directory, &error))?;
        let path = entry.path();
        if is_hidden(&entry.file_name().to_string_lossy()) {
            continue;
        }
        match fs_err::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => walk(&path, paths, seen)?,
            Ok(_) => drop(paths.insert(path)),
            Err(error) => return Err(unreadable(&path, &error)),
        }
    }
    seen.remove(&whole);
    Ok(())
}

/// Returns the path of a `file://` URL, which may be a pattern.
///
/// # Errors
///
/// A message and a hint if the URL has another host or no absolute path.
pub(super) fn path_of_url(url: &str) -> Result<String, MessageAndHint> {
    let rest = url.strip_prefix("file://").unwrap_or(url);
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    if !path.starts_with('/') {
        let hint = "write `file:///folder/*.parquet`, with an absolute path and no host";
        return Err(("the URL names no local path".to_owned(), hint.to_owned()));
    }
    Ok(decode_leniently(path))
}

fn unreadable(path: &Path, error: &std::io::Error) -> FileError {
    let hint = "make it readable for the user that runs this, or leave it out of the path";
    (path.to_owned(), (format!("it cannot be read: {error}"), hint.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the files that a pattern matches in a directory tree with files of all kinds.
    fn found(pattern: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        // Brackets in the base are not a pattern.
        let base = directory.path().join("lo[gs]");
        for file in [
            "date=1/a.parquet",
            "date=1/.a.parquet.crc",
            "date=1/_temporary/b.parquet",
            "date=2/hour=3%3A00/a.csv",
            "date=2/hour=__HIVE_DEFAULT_PARTITION__/a.csv",
            "_SUCCESS",
            "_v=1/c.csv",
            "odd[1].csv",
            "top.csv",
        ] {
            let path = base.join(file);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, b"x").unwrap();
        }
        let files = futures::executor::block_on(local(&base, pattern)).unwrap();
        let show = |file: &FoundFile| {
            let folders = file
                .folders
                .iter()
                .map(|(name, value)| format!("{name}:{}", value.as_deref().unwrap_or("-")));
            let folders = folders.collect::<Vec<_>>().join(",");
            format!("{}({folders})", file.name.strip_prefix(&base).unwrap().display())
        };
        files.iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn paths_directories_and_patterns_find_sorted_files() {
        let one = "date=1/a.parquet(date:1)";
        let two = "date=2/hour=3%3A00/a.csv(date:2,hour:3:00)";
        let none = "date=2/hour=__HIVE_DEFAULT_PARTITION__/a.csv(date:2,hour:-)";
        assert_eq!(found("date=1/a.parquet"), one);
        assert_eq!(found("date=1"), one);
        assert_eq!(found("date=2/"), format!("{two} {none}"));
        assert_eq!(found("date=*/"), format!("{one} {two} {none}"));
        assert_eq!(found("date=*/*.parquet"), one);
        assert_eq!(found("**/*.csv"), format!("_v=1/c.csv(_v:1) {two} {none} odd[1].csv() top.csv()"));
        assert_eq!(found("odd[1].csv"), "odd[1].csv()");
        assert_eq!(found("t?p.csv"), "top.csv()");
        assert_eq!(found("_SUCCESS*"), "_SUCCESS()");
        assert_eq!(found("none*"), "");
        assert_eq!(found("none"), "");
        assert_eq!(found("."), format!("_v=1/c.csv(_v:1) {one} {two} {none} odd[1].csv() top.csv()"));
    }

    #[test]
    fn bad_patterns_and_links_in_circles() {
        let directory = tempfile::tempdir().unwrap();
        let (_, (message, hint)) =
            futures::executor::block_on(local(directory.path(), "[*.csv")).unwrap_err();
        assert!(message.contains("bad pattern") && hint.contains("[sources]"), "{message}");
        fs_err::write(directory.path().join("a.csv"), b"x").unwrap();
        fs_err::os::unix::fs::symlink(directory.path(), directory.path().join("again")).unwrap();
        let files = futures::executor::block_on(local(directory.path(), "")).unwrap();
        assert_eq!(files.len(), 1);
        fs_err::os::unix::fs::symlink("nowhere", directory.path().join("broken.csv")).unwrap();
        let (path, (message, _)) = futures::executor::block_on(local(directory.path(), "")).unwrap_err();
        assert!(path.ends_with("broken.csv") && message.contains("cannot be read"), "{message}");
    }

    #[test]
    fn the_folder_of_a_table_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(directory.path().join("events/_delta_log")).unwrap();
        fs_err::write(directory.path().join("events/a.parquet"), b"x").unwrap();
        let found = |pattern| futures::executor::block_on(local(directory.path(), pattern));
        let (path, (message, hint)) = found("events").unwrap_err();
        assert!(path.ends_with("events") && message.contains("Delta Lake table"), "{message}");
        assert!(hint.contains("{ delta = \"events\" }"), "{hint}");
        assert_eq!(found("events/*.parquet").unwrap().len(), 1);
    }

    #[test]
    fn urls_of_files_are_paths() {
        assert_eq!(path_of_url("file:///logs/a%20b/*.csv").unwrap(), "/logs/a b/*.csv");
        assert_eq!(path_of_url("file://localhost/logs").unwrap(), "/logs");
        assert!(path_of_url("file://logs/a.csv").unwrap_err().1.contains("file:///"));
    }
}
