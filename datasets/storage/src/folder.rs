//! Resolves a local location to a folder, with the meaning that the location has in a shell.

use std::path::{Component, Path, PathBuf};

use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use onefold_base::fault::Text;
use onefold_base::location::{Problem, check_scheme, check_tilde, is_url};
use onefold_base::percent;

use crate::{Error, Result};

/// A folder on a local disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Folder {
    /// The absolute path, without `.`, `..` and symbolic links.
    pub(crate) path: PathBuf,
    /// The key of the folder in a store of the whole local disk. It is empty only for `/`.
    pub(crate) prefix: ObjectPath,
    /// Whether the last component of the location is a symbolic link.
    pub(crate) is_link: bool,
}

/// Returns the absolute form of a location: a local path without `.` and `..`, or a URL without trailing
/// slashes. It does not depend on the working directory, so it can be stored and sent to other processes.
///
/// Symbolic links remain in a path, because another machine may reach the same folder through other links.
/// Only a path with `..` is resolved, because its meaning depends on the links.
///
/// # Errors
///
/// [`Error::Fault`] if the location is empty, begins with a `~` that the shell did not expand, goes through a
/// symbolic link to a target that does not exist, has `..` after a folder that does not exist, or has a name
/// that is not UTF-8.
pub fn absolute(location: &Path) -> Result<PathBuf> {
    if let Some(url) = location.to_str().filter(|_| is_url(location)) {
        return Ok(url.trim_end_matches('/').into());
    }
    let resolved = Folder::resolve(location, location)?.path;
    if location.components().any(|component| component == Component::ParentDir) {
        return Ok(resolved);
    }
    // The components omit trailing slashes.
    Ok(std::path::absolute(location)?.components().collect())
}

/// Returns the resolved form of a location that must be a local path: absolute, without `.`, `..` and symbolic
/// links. `message` and `hint` are those of the error for a URL.
///
/// # Errors
///
/// The errors of [`absolute`], and [`Error::Fault`] for a URL.
pub fn path_on_disk(location: &Path, message: &str, hint: impl Into<Text>) -> Result<PathBuf> {
    match is_url(location) {
        true => Err(Error::location(location.display(), message, hint)),
        false => Ok(Folder::resolve(location, location)?.path),
    }
}

/// Returns the absolute form of a local path that may have wildcards; `None` for a URL, which does not depend on
/// the working directory.
///
/// # Errors
///
/// Returns the operating system's error if the path is empty or there is no working directory.
pub fn absolute_pattern(pattern: &str) -> std::io::Result<Option<PathBuf>> {
    if is_url(Path::new(pattern)) { Ok(None) } else { std::path::absolute(pattern).map(Some) }
}

impl Folder {
    /// Resolves the path `folder`. Errors name `location`, from which the path was taken.
    pub(crate) fn resolve(folder: &Path, location: &Path) -> Result<Self> {
        let resolved = resolve(folder).and_then(|path| {
            let prefix = prefix_of(&path)?;
            // A trailing slash or `.` would make the kernel follow the link.
            let named: PathBuf = folder.components().collect();
            let is_link = fs_err::symlink_metadata(named).is_ok_and(|metadata| metadata.is_symlink());
            Ok(Self { path, prefix, is_link })
        });
        resolved.map_err(|problem| wrong_location(location, problem))
    }

    /// Resolves a `file://` URL. Its path has the same meaning as the local path: in particular, `..` after a
    /// symbolic link is the parent of the link's target, although URL parsers would remove the link.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`absolute`], and an error if the URL names another machine or has a query or a
    /// fragment.
    pub(crate) fn of_url(url: &str, location: &Path) -> Result<Self> {
        let folder = path_of_url(url).map_err(|problem| wrong_location(location, problem))?;
        Self::resolve(&folder, location)
    }

    /// Returns whether this is the root of the file system.
    pub(crate) fn is_root(&self) -> bool {
        self.prefix.is_root()
    }
}

/// Creates the error for a location.
pub(crate) fn wrong_location(location: &Path, (message, hint): Problem) -> Error {
    Error::location(location.display(), message, hint)
}

fn problem(message: impl Into<String>, hint: &str) -> Problem {
    (message.into(), hint.to_owned())
}

/// Returns the path of a `file://` URL, decoded but not resolved.
pub(crate) fn path_of_url(url: &str) -> Result<PathBuf, Problem> {
    let write_url = "write `file:///folder`";
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
        return Err(problem(format!("the URL names the machine `{host}`, not a local path"), write_url));
    }
    if path.is_empty() {
        return Err(problem("the URL does not name a local path", write_url));
    }
    if path.contains(['?', '#']) {
        let hint = "write `%3F` for a question mark and `%23` for a number sign in a name";
        return Err(problem("the URL has a query or a fragment", hint));
    }
    let decoded = percent::decode(path);
    let decoded = decoded.ok_or_else(|| {
        problem("the URL's percent-encoding is not that of UTF-8 text", "write `%25` for a percent sign")
    })?;
    Ok(decoded.into())
}

/// Resolves a path in the same way as the kernel. The system resolves the deepest existing ancestor; the
/// components after it, which do not exist yet, are appended.
fn resolve(folder: &Path) -> Result<PathBuf, Problem> {
    if folder.as_os_str().is_empty() {
        return Err(problem("the path is empty", "write `.` for the working directory"));
    }
    check_tilde(folder)?;
    check_scheme(folder)?;
    // This removes `.` and repeated slashes, but keeps `..`.
    let components: Vec<Component<'_>> = folder.components().collect();
    for existing in (0..=components.len()).rev() {
        let (there, missing) = components.split_at(existing);
        let there: PathBuf = if there.is_empty() { ".".into() } else { there.iter().collect() };
        match fs_err::canonicalize(&there) {
            Ok(resolved) => return append(resolved, missing),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if fs_err::symlink_metadata(&there).is_ok_and(|metadata| metadata.is_symlink()) {
                    let message =
                        format!("`{}` is a symbolic link to a place that does not exist", there.display());
                    return Err(problem(message, "create the place that it points to, or remove the link"));
                }
            }
            Err(error) => {
                let hint =
                    "check that each part of the path before the last is a folder that this user may enter";
                return Err(problem(error.to_string(), hint));
            }
        }
    }
    Err(problem("the working directory does not exist", "change to a folder that exists"))
}

/// Appends components that do not exist to an existing folder.
fn append(mut folder: PathBuf, missing: &[Component<'_>]) -> Result<PathBuf, Problem> {
    for component in missing {
        match component {
            Component::Normal(name) => folder.push(name),
            Component::ParentDir => {
                let message =
                    format!("`{}` does not exist, so `..` after it names nothing", folder.display());
                return Err(problem(message, "create that folder, or leave it and the `..` out"));
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Ok(folder)
}

/// Returns the key of an absolute folder in a store of the whole local disk.
fn prefix_of(folder: &Path) -> Result<ObjectPath, Problem> {
    let hint = "rename the folder, or choose another one";
    if folder.to_str().is_none() {
        return Err(problem("the folder's path is not UTF-8 text", hint));
    }
    let prefix = ObjectPath::from_absolute_path(folder).map_err(|error| problem(error.to_string(), hint))?;
    // The store converts keys to paths through URLs. This checks the conversion, because a wrong folder must
    // never be written.
    let file = LocalFileSystem::new().path_to_filesystem(&prefix.clone().join("file"));
    let file = file.map_err(|error| problem(error.to_string(), hint))?;
    if file != folder.join("file") {
        return Err(problem("the folder's name cannot be written as a URL", hint));
    }
    Ok(prefix)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::Storage;

    fn resolved(path: &Path) -> PathBuf {
        Folder::resolve(path, path).unwrap().path
    }

    fn refused(path: &Path) -> String {
        absolute(path).unwrap_err().to_string()
    }

    /// Returns a folder with a path that contains no symbolic links.
    fn folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = fs_err::canonicalize(folder.path()).unwrap();
        (folder, path)
    }

    #[test]
    fn dots_and_links_in_a_location_are_resolved_as_by_a_shell() {
        let (_folder, root) = folder();
        fs_err::create_dir_all(root.join("a/b")).unwrap();
        fs_err::create_dir_all(root.join("far/away/target")).unwrap();
        symlink(root.join("far/away/target"), root.join("a/link")).unwrap();
        for (location, meaning) in [
            ("a/b", "a/b"),
            ("a/b/", "a/b"),
            ("a/./b/.", "a/b"),
            ("a//b//", "a/b"),
            ("a/b/..", "a"),
            ("a/b/../new/folder", "a/new/folder"),
            ("a/b/../../new", "new"),
            ("a/link", "far/away/target"),
            ("a/link/new", "far/away/target/new"),
            // The kernel follows the link before it applies `..`.
            ("a/link/..", "far/away"),
            ("a/link/../new", "far/away/new"),
        ] {
            assert_eq!(resolved(&root.join(location)), root.join(meaning), "{location}");
            let url = format!("file://{}/{location}", root.display());
            let of_url = Folder::of_url(&url, Path::new(&url)).unwrap();
            assert_eq!(of_url.path, root.join(meaning), "{url}");
        }
        assert_eq!(resolved(Path::new("/../..")), Path::new("/"));
        let here = fs_err::canonicalize(".").unwrap();
        assert_eq!(resolved(Path::new("new")), here.join("new"));
        assert_eq!(resolved(Path::new("..")), here.parent().unwrap());
        assert_eq!(resolved(Path::new("../new")), here.parent().unwrap().join("new"));
    }

    #[test]
    fn an_absolute_name_keeps_links_if_the_path_has_no_two_dots() {
        let (_folder, root) = folder();
        fs_err::create_dir_all(root.join("far/target")).unwrap();
        symlink(root.join("far/target"), root.join("link")).unwrap();
        for (location, name) in [
            ("link/new/", "link/new"),
            ("link/./new", "link/new"),
            ("link/../new", "far/new"),
            ("far/../link", "far/target"),
        ] {
            let found = absolute(&root.join(location)).unwrap();
            // As paths, paths that differ only in slashes would compare as equal.
            assert_eq!(found.into_os_string(), root.join(name).into_os_string(), "{location}");
        }
        let here = fs_err::canonicalize(".").unwrap();
        assert_eq!(absolute(Path::new("new/")).unwrap().into_os_string(), here.join("new").into_os_string());
        assert_eq!(absolute(Path::new("s3://bucket/a/")).unwrap(), Path::new("s3://bucket/a"));
    }

    #[test]
    fn a_location_that_names_nothing_is_refused() {
        let (_folder, root) = folder();
        fs_err::write(root.join("file"), "text").unwrap();
        symlink(root.join("nowhere"), root.join("dangling")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        for (location, message) in [
            ("missing/../ds", "missing` does not exist, so `..` after it"),
            ("missing/..", "missing` does not exist, so `..` after it"),
            ("dangling", "dangling` is a symbolic link"),
            ("dangling/ds", "dangling` is a symbolic link"),
            ("dangling/../ds", "dangling` is a symbolic link"),
            ("loop/ds", "loop"),
            ("file/ds", "file/ds"),
            ("a\tb", "illegal character"),
        ] {
            let error = refused(&root.join(location));
            assert!(error.contains(message) && error.contains("hint: "), "{location}: {error}");
        }
        let bytes = root.join(OsStr::from_bytes(b"caf\xe9"));
        assert!(refused(&bytes).contains("is not UTF-8"), "{}", refused(&bytes));
        assert!(refused(&bytes).contains("caf"), "{}", refused(&bytes));
        assert!(refused(Path::new("")).contains("is empty"));
    }

    #[test]
    fn a_file_is_no_folder() {
        let (_folder, root) = folder();
        fs_err::write(root.join("file"), "text").unwrap();
        symlink("file", root.join("link")).unwrap();
        for name in ["file", "link"] {
            let error = Storage::open(&root.join(name)).unwrap_err().to_string();
            assert!(error.contains("this is a file, not a folder\n  hint: "), "{error}");
        }
        assert_eq!(Storage::of_file(&root.join("file")).unwrap().1, "file");
    }

    #[test]
    fn a_tilde_that_the_shell_left_is_refused() {
        for location in ["~", "~/ds", "~nobody-of-this-name/ds"] {
            let error = refused(Path::new(location));
            assert!(error.contains("did not expand `~") && error.contains("$HOME"), "{error}");
        }
        let here = fs_err::canonicalize(".").unwrap();
        assert_eq!(resolved(Path::new("./~/ds")), here.join("~/ds"));
        let (_folder, root) = folder();
        assert_eq!(resolved(&root.join("~/ds")), root.join("~/ds"));
    }

    #[test]
    fn a_scheme_without_its_slashes_is_refused() {
        for (location, url) in [
            ("s3:/bucket/ds", "s3://bucket/ds"),
            ("s3:bucket/ds", "s3://bucket/ds"),
            ("GS:/bucket/ds", "GS://bucket/ds"),
            ("file:/data/ds", "file:///data/ds"),
            ("file:data", "file:///data"),
            ("abfss:/container@account/ds", "abfss://container@account/ds"),
            ("grpc:/host:7070/ds", "grpc://host:7070/ds"),
            ("https:/host/ds", "https://host/ds"),
        ] {
            let hint = format!("write `{url}`");
            let error = refused(Path::new(location));
            assert!(error.contains(&hint) && error.contains(&format!("`{location}`: ")), "{error}");
            for opened in
                [Storage::open(Path::new(location)).err(), Storage::of_file(Path::new(location)).err()]
            {
                let error = opened.unwrap().to_string();
                assert!(error.contains(&hint), "{error}");
            }
        }
        let here = fs_err::canonicalize(".").unwrap();
        for local in ["./s3:/bucket/ds", "./file:", "a/s3:/bucket", "other:/bucket", "a:b"] {
            assert_eq!(resolved(Path::new(local)), here.join(local.trim_start_matches("./")), "{local}");
        }
    }

    #[test]
    fn special_characters_of_urls_belong_to_names() {
        let (_folder, root) = folder();
        for name in
            ["a b", "100%", "%20", "%2e%2e", "a#1", "a?b", "a*b", "~", "[x]", "a\\b", "ä", "a:b", "C|", "…"]
        {
            let found = Folder::resolve(&root.join(name), Path::new(name)).unwrap();
            assert_eq!(found.path, root.join(name), "{name}");
            let file = LocalFileSystem::new().path_to_filesystem(&found.prefix.clone().join("x")).unwrap();
            assert_eq!(file, root.join(name).join("x"), "{name}");
        }
    }

    #[test]
    fn urls_of_local_folders_are_checked() {
        let of_url = |url: &str| Folder::of_url(url, Path::new(url)).map(|folder| folder.path);
        assert_eq!(of_url("file:///a%20b").unwrap(), Path::new("/a b"));
        assert_eq!(of_url("file://localhost/a%25b").unwrap(), Path::new("/a%b"));
        for (url, message) in [
            ("file://host/a", "the machine `host`"),
            ("file://", "does not name a local path"),
            ("file:///a#b", "a query or a fragment"),
            ("file:///a?b", "a query or a fragment"),
            ("file:///a%ff", "not that of UTF-8"),
        ] {
            let error = of_url(url).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains(url), "{error}");
        }
    }
}
