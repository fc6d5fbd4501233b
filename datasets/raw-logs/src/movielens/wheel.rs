//! The wheel that contains the files. It is fetched with pip once, and kept in a cache that all clones share.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use crate::{Result, error};
use onefold_base::fault::{option, text};
use onefold_base::progress::Reporter;
use onefold_base::units::format_hex;
use onefold_storage::commit::sync_directory;

/// A wheel on PyPI, pinned by its checksum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wheel {
    /// The requirement for pip: `name==version`.
    pub(super) requirement: &'static str,
    /// The file's name, on PyPI and in the cache.
    pub(super) file_name: &'static str,
    /// SHA-256 of the file, in hexadecimal.
    pub(super) sha256: &'static str,
}

/// A wheel in the cache whose checksum was verified.
#[derive(Debug)]
pub(super) struct CachedWheel {
    /// The path of the wheel.
    pub(super) path: PathBuf,
    /// Whether this call downloaded it.
    pub(super) downloaded: bool,
}

/// Returns the cache that Onefold's programs share: `ONEFOLD_CACHE`, or `onefold` in `XDG_CACHE_HOME` or `~/.cache`.
pub(super) fn default_cache(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("ONEFOLD_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("onefold")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("onefold")))
        .ok_or_else(|| {
            error::program(
                "onefold-data fetch",
                "there is no folder for the cache: neither HOME, XDG_CACHE_HOME nor ONEFOLD_CACHE is set",
                text!["name one with ", option("cache").set_to("DIR")],
            )
        })
}

/// Returns the wheel in `folder`. Downloads it with pip unless it exists with the right checksum. Only one process
/// downloads at a time, and the file is created by a rename, so an interrupted call leaves no partial file.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if Python or pip is missing, or if pip fails or fetches another file;
/// [`Error::Io`](crate::Error::Io) if the cache cannot be written.
pub(super) fn fetch(
    wheel: &Wheel,
    folder: &Path,
    python: &OsStr,
    reporter: &dyn Reporter,
) -> Result<CachedWheel> {
    let path = folder.join(wheel.file_name);
    if is_intact(&path, wheel)? {
        return Ok(CachedWheel { path, downloaded: false });
    }
    fs_err::create_dir_all(folder)?;
    let lock = fs_err::File::create(folder.join("fetch.lock"))?;
    lock.lock()?; // The kernel releases the lock when its holder is killed.
    if is_intact(&path, wheel)? {
        return Ok(CachedWheel { path, downloaded: false });
    }
    if path.exists() {
        tracing::warn!("`{}` is damaged (its checksum is wrong) and is fetched again", path.display());
    }
    let partial = Partial::create(folder.join("fetch.partial"))?;
    reporter.begin("fetch", None, "wheels");
    let downloaded = download(wheel, &partial.0, python);
    reporter.end();
    let fetched = downloaded?;
    if !is_intact(&fetched, wheel)? {
        let message = format!("pip did not fetch `{}` with SHA-256 {}", wheel.file_name, wheel.sha256);
        let hint =
            format!("pip's index serves another file; put the wheel from PyPI at `{}`", path.display());
        return Err(error::source(fetched, message, hint));
    }
    fs_err::File::open(&fetched)?.sync_all()?;
    fs_err::rename(&fetched, &path)?;
    sync_directory(folder)?;
    Ok(CachedWheel { path, downloaded: true })
}

/// Runs pip in `work`, and returns the path of the wheel.
fn download(wheel: &Wheel, work: &Path, python: &OsStr) -> Result<PathBuf> {
    let requirements = work.join("requirements.txt");
    fs_err::write(&requirements, format!("{} --hash=sha256:{}\n", wheel.requirement, wheel.sha256))?;
    let folder = work.join("wheels");
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"])
        .args(["--no-deps", "--require-hashes", "--only-binary=:all:"])
        // The platform is fixed, so that the wheel does not depend on the Python version that runs pip.
        .args(["--implementation", "py", "--python-version", "3.11", "--abi", "none", "--platform", "any"])
        .arg("--dest")
        .arg(&folder)
        .arg("--requirement")
        .arg(&requirements);
    let own = format!("or put `{}` of {} into the cache yourself", wheel.file_name, wheel.requirement);
    let failed = |message: String, remedy: &str| {
        error::program(
            format!("{} -m pip download {}", python.display(), wheel.requirement),
            message,
            format!("{remedy}, {own}"),
        )
    };
    let output = pip.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => failed(
            format!("`{}` is not on the PATH", python.display()),
            "install Python 3 with pip (Debian: `apt-get install python3-pip`)",
        ),
        _ => failed(error.to_string(), "make it runnable"),
    })?;
    let words = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(folder.join(wheel.file_name)),
        false if words.contains("No module named pip") => Err(failed(
            "this Python has no pip".to_owned(),
            "install it (Debian: `apt-get install python3-pip`)",
        )),
        false => Err(failed(
            format!("{}: {}", output.status, last_lines(&words, 3)),
            "check the network and pip's index and run this again",
        )),
    }
}

/// A directory for a download in progress. It is empty at first, and removed at the end.
#[derive(Debug)]
struct Partial(PathBuf);

impl Partial {
    fn create(path: PathBuf) -> Result<Self> {
        if path.exists() {
            fs_err::remove_dir_all(&path)?; // left by a killed download: the lock shows that no process uses it
        }
        fs_err::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // A drop cannot report an error. The next download removes this directory.
        let _ = fs_err::remove_dir_all(&self.0);
    }
}

/// Returns whether `path` exists and has the checksum of the wheel.
fn is_intact(path: &Path, wheel: &Wheel) -> Result<bool> {
    Ok(path.is_file() && format_hex(&Sha256::digest(fs_err::read(path)?)) == wheel.sha256)
}

/// Returns the last `count` lines that are not blank, joined.
fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines.get(lines.len().saturating_sub(count)..).unwrap_or_default();
    if last.is_empty() { "it said nothing".to_owned() } else { last.join(" / ") }
}

/// Reads the text file `entry` from a wheel.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the wheel is not a zip archive, or has no such UTF-8 entry.
pub(super) fn read_entry(wheel: &Path, entry: &str) -> Result<String> {
    let hint = "it is not the wheel that this version expects; delete it and run this again";
    let wrong = |message: String| error::source(wheel, message, hint);
    let file = fs_err::File::open(wheel)?;
    let mut archive =
        ZipArchive::new(file).map_err(|error| wrong(format!("it is not a zip archive ({error})")))?;
    let mut found =
        archive.by_name(entry).map_err(|error| wrong(format!("it has no entry `{entry}` ({error})")))?;
    let mut text = String::new();
    found
        .read_to_string(&mut text)
        .map_err(|error| wrong(format!("entry `{entry}` cannot be read ({error})")))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::{Mutex, PoisonError};

    use super::*;
    use onefold_base::progress::Silent;

    const WHEEL: Wheel = Wheel {
        requirement: "tiny==1.0",
        file_name: "tiny-1.0-py3-none-any.whl",
        // printf wheel | sha256sum
        sha256: "ba59926159d2aa256eb8739b8da7e2b574b960e1202c6d624cbe981cef996c91",
    };

    /// Writes a `python3` that logs its arguments to `calls` and runs `body` with `$dest` as pip's directory.
    fn fake_python(folder: &Path, body: &str) -> PathBuf {
        let path = folder.join("python3");
        let calls = folder.join("calls");
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> '{}'\nwhile [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done\n{body}\n",
            calls.display()
        );
        fs_err::write(&path, script).unwrap();
        fs_err::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    /// Held while scripts are written and run. A script that is still open for writing in the child process of
    /// another thread cannot be run.
    static SCRIPTS: Mutex<()> = Mutex::new(());

    const DELIVERS: &str = "mkdir -p \"$dest\" && printf wheel > \"$dest/tiny-1.0-py3-none-any.whl\"";

    #[test]
    fn a_second_fetch_downloads_nothing_and_a_corrupt_wheel_is_fetched_anew() {
        let _scripts = SCRIPTS.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("cache");
        let python = fake_python(directory.path(), DELIVERS);
        let fetch = || fetch(&WHEEL, &cache, python.as_os_str(), &Silent).unwrap();
        assert!(fetch().downloaded);
        assert!(!fetch().downloaded);
        let calls = || fs_err::read_to_string(directory.path().join("calls")).unwrap();
        assert_eq!(calls().lines().count(), 1, "{}", calls());
        assert!(calls().contains("--require-hashes"), "{}", calls());
        fs_err::write(fetch().path, b"whee1").unwrap();
        assert!(fetch().downloaded);
        assert_eq!(fs_err::read(fetch().path).unwrap(), b"wheel");
        assert!(!cache.join("fetch.partial").exists());
    }

    #[test]
    fn errors_of_python_and_pip_have_hints() {
        let _scripts = SCRIPTS.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("cache");
        let fails = |python: &Path, message: &str, hint: &str| {
            let error = fetch(&WHEEL, &cache, python.as_os_str(), &Silent).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains(hint), "{error}");
            assert!(!cache.join("fetch.partial").exists());
            assert!(!cache.join(WHEEL.file_name).exists());
        };
        fails(Path::new("/nonexistent/python3"), "is not on the PATH", "apt-get install python3-pip");
        let python = fake_python(directory.path(), "echo 'python3: No module named pip' >&2; exit 1");
        fails(&python, "this Python has no pip", "apt-get install python3-pip");
        let python = fake_python(directory.path(), "echo 'ERROR: No matching distribution' >&2; exit 1");
        fails(&python, "No matching distribution", "check the network and pip's index");
        let python = fake_python(directory.path(), &DELIVERS.replace("printf wheel", "printf spoof"));
        fails(&python, "pip did not fetch `tiny-1.0-py3-none-any.whl`", "put the wheel from PyPI at");
    }

    #[test]
    fn the_cache_follows_the_environment() {
        let cache = |variables: &[(&str, &str)]| {
            default_cache(|name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into())
            })
        };
        let (own, xdg, home) = (("ONEFOLD_CACHE", "/o"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h"));
        assert_eq!(cache(&[own, xdg, home]).unwrap(), Path::new("/o"));
        assert_eq!(cache(&[xdg, home]).unwrap(), Path::new("/x/onefold"));
        assert_eq!(cache(&[("ONEFOLD_CACHE", ""), home]).unwrap(), Path::new("/h/.cache/onefold"));
        assert!(cache(&[]).unwrap_err().to_string().contains("the option `cache = DIR`"));
    }

    #[test]
    fn a_missing_entry_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.whl");
        fs_err::write(&path, b"not a zip").unwrap();
        assert!(read_entry(&path, "a").unwrap_err().to_string().contains("not a zip archive"));
        let mut archive = zip::ZipWriter::new(fs_err::File::create(&path).unwrap());
        archive.start_file("b", zip::write::SimpleFileOptions::default()).unwrap();
        archive.finish().unwrap();
        assert!(read_entry(&path, "a").unwrap_err().to_string().contains("no entry `a`"));
        assert_eq!(read_entry(&path, "b").unwrap(), "");
    }
}
