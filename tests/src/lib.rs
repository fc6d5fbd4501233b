//! Helpers for tests that span several crates: a temporary directory ([`Dir`]), commands of the workspace's binaries
//! as a person runs them ([`TestCommand`]), and ports for servers ([`free_port`]).
//!
//! ```no_run
//! let dir = onefold_tests::Dir::new();
//! let log = dir.command("onefold-data generate --workload rm3 --samples 100 --seed 1 --out logs").json();
//! assert_eq!(log["samples"], 100);
//! dir.command("onefold-read head logs").fails(&["`logs` is not a dataset"]);
//! ```
//!
//! A failure prints the command, its directory and the files in it, stdout and stderr.
//!
//! The feature `s3` adds an S3 server: `S3Server`.

#![forbid(unsafe_code)]

mod certificates;
mod ports;
#[cfg(feature = "s3")]
mod s3;

use std::collections::BTreeMap;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock};

use onefold_base::sync::locked;
use serde_json::Value;

pub use self::certificates::EXPIRY;
pub use self::ports::free_port;
#[cfg(feature = "s3")]
pub use self::s3::{ACCESS_KEY, BUCKET, Counters, Fault, ObjectWriter, S3Server, SECRET_KEY, When};

/// A temporary directory, which is removed at the end.
#[derive(Debug)]
pub struct Dir(tempfile::TempDir);

/// The files of a directory that was created once, by their relative paths.
type Made = Arc<OnceLock<BTreeMap<PathBuf, Vec<u8>>>>;

/// The results of [`Dir::made_once`], by caller and key.
static MADE: Mutex<BTreeMap<(Location<'static>, String), Made>> = Mutex::new(BTreeMap::new());

impl Default for Dir {
    fn default() -> Self {
        Self::new()
    }
}

impl Dir {
    /// Creates an empty directory.
    pub fn new() -> Self {
        Self(tempfile::Builder::new().prefix("onefold-test-").tempdir().expect("a temporary folder"))
    }

    /// Creates a directory with the files that `make` creates. In a process, each caller runs `make` once per `key`,
    /// which must name everything on which the result depends. Later calls copy the files. Empty directories are not
    /// copied.
    #[track_caller]
    pub fn made_once(key: &str, make: impl FnOnce(&Self)) -> Self {
        let place = (*Location::caller(), key.to_owned());
        let made = Arc::clone(locked(&MADE).entry(place).or_default());
        let files = made.get_or_init(|| {
            let first = Self::new();
            make(&first);
            first.files()
        });
        let dir = Self::new();
        files.iter().for_each(|(name, bytes)| dir.write(name, bytes));
        dir
    }

    /// Returns the path of the directory.
    pub fn root(&self) -> &Path {
        self.0.path()
    }

    /// Returns the path of `name` in the directory.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root().join(name)
    }

    /// Writes a file, and creates its parent directories.
    #[track_caller]
    pub fn write(&self, name: impl AsRef<Path>, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs_err::create_dir_all(path.parent().unwrap_or(self.root())).expect("a folder");
        fs_err::write(path, bytes).expect("a file");
    }

    /// Returns the bytes of a file.
    #[track_caller]
    pub fn read(&self, name: impl AsRef<Path>) -> Vec<u8> {
        fs_err::read(self.path(name)).expect("a file")
    }

    /// Returns the text of a file.
    #[track_caller]
    pub fn text(&self, name: impl AsRef<Path>) -> String {
        String::from_utf8(self.read(name)).expect("a text")
    }

    /// Replaces every `from` in a text file, which must contain it at least once.
    #[track_caller]
    pub fn edit(&self, name: impl AsRef<Path>, from: &str, to: &str) {
        let text = self.text(&name);
        assert!(text.contains(from), "no `{from}` in `{}`:\n{text}", name.as_ref().display());
        self.write(name, text.replace(from, to));
    }

    /// Appends text to a file.
    pub fn append(&self, name: impl AsRef<Path>, text: &str) {
        let all = self.text(&name) + text;
        self.write(name, all);
    }

    /// Sets every `key = …` of a TOML file to `value`. The key must occur at least once.
    #[track_caller]
    pub fn set(&self, name: impl AsRef<Path>, key: &str, value: &str) {
        let (text, start) = (self.text(&name), format!("{key} = "));
        assert!(
            text.lines().any(|line| line.starts_with(&start)),
            "no `{key}` in `{}`:\n{text}",
            name.as_ref().display()
        );
        let line = |line: &str| {
            if line.starts_with(&start) { format!("{start}{value}\n") } else { format!("{line}\n") }
        };
        self.write(name, text.lines().map(line).collect::<String>());
    }

    /// Returns all files below the directory, by relative path, with their bytes.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        files_below(self.root())
    }

    /// Returns the command `line`, which consists of one of the workspace's binaries and its arguments, separated by
    /// white space. It runs in this directory.
    pub fn command(&self, line: &str) -> TestCommand {
        let mut words = line.split_whitespace();
        let mut command = Command::new(binary(words.next().unwrap_or_default()));
        command.args(words).current_dir(self.root()).env_remove("ONEFOLD_LOG").env("RUST_BACKTRACE", "0");
        TestCommand { command, line: line.to_owned(), root: self.root().to_owned() }
    }
}

/// Returns all files below `root`, by relative path, with their bytes.
pub fn files_below(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    entries_below(root).into_iter().filter_map(|(name, bytes)| Some((name, bytes?))).collect()
}

/// Returns all files below `root` with their bytes, and all directories, pipes and devices with `None`.
fn entries_below(root: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut entries = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.strip_prefix(root).unwrap_or(&path).to_owned();
            if path.is_dir() {
                entries.insert(name, None);
                folders.push(path);
            } else if fs_err::metadata(&path).is_ok_and(|special| !special.is_file()) {
                // Reading a pipe waits for a writer.
                entries.insert(name, None);
            } else {
                entries.insert(name, Some(fs_err::read(path).expect("a file")));
            }
        }
    }
    entries
}

/// A command of one of the workspace's binaries.
#[derive(Debug)]
pub struct TestCommand {
    command: Command,
    line: String,
    root: PathBuf,
}

impl TestCommand {
    /// Adds an argument, which may contain white space.
    pub fn arg(mut self, argument: impl AsRef<std::ffi::OsStr>) -> Self {
        self.line += &format!(" {}", argument.as_ref().to_string_lossy());
        self.command.arg(argument);
        self
    }

    /// Sets an environment variable.
    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Removes the environment variables whose names begin with `prefix`.
    pub fn without_variables(mut self, prefix: &str) -> Self {
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with(prefix)) {
            self.command.env_remove(name);
        }
        self
    }

    /// Configures the command to access a server at `s3://` URLs, and no other server.
    #[cfg(feature = "s3")]
    pub fn with_s3(self, server: &S3Server) -> Self {
        let mut cleared = self.without_variables("AWS_");
        cleared.command.envs(server.environment());
        cleared
    }

    /// Limits the size of files that the command can write to `kib` KiB. A larger write fails, as on a full disk.
    pub fn with_file_limit(self, kib: u64) -> Self {
        // If the signal is ignored, the write fails (EFBIG) instead.
        let script = "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\"";
        let what = format!("files of {kib} KiB at most");
        self.started_by("bash", &["-c", script, &kib.to_string()], &what)
    }

    /// Makes the system kill the command with SIGXFSZ when it writes a file of more than `kib` KiB.
    pub fn killed_beyond(self, kib: u64) -> Self {
        let script = "ulimit -c 0; ulimit -f \"$0\"; exec \"$@\"";
        let what = format!("killed at a file of more than {kib} KiB");
        self.started_by("bash", &["-c", script, &kib.to_string()], &what)
    }

    /// Kills the command after `seconds` seconds, so that a test fails if the command does not end.
    pub fn with_time_limit(self, seconds: u64) -> Self {
        let what = format!("killed after {seconds} seconds");
        self.started_by("timeout", &["--signal=KILL", &seconds.to_string()], &what)
    }

    /// Returns the same command, started by another program.
    fn started_by(mut self, program: &str, arguments: &[&str], what: &str) -> Self {
        let mut command = Command::new(program);
        command.args(arguments).arg(self.command.get_program());
        command.args(self.command.get_args()).current_dir(&self.root);
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        self.line += &format!(" ({what})");
        self.command = command;
        self
    }

    /// Runs the command, which must succeed, and returns its stdout.
    #[track_caller]
    pub fn works(mut self) -> String {
        let output = self.output();
        self.check(output.status.success(), "it must succeed", &output);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs the command with `--json`, which must succeed, and returns the object on the last line of its stdout.
    #[track_caller]
    pub fn json(self) -> Value {
        let mut with_json = self.arg("--json");
        let output = with_json.output();
        with_json.check(output.status.success(), "it must succeed", &output);
        let stdout = String::from_utf8_lossy(&output.stdout);
        let last = serde_json::from_str(stdout.lines().last().unwrap_or_default());
        with_json.check(matches!(last, Ok(Value::Object(_))), "its last line must be a JSON object", &output);
        last.unwrap_or_default()
    }

    /// Runs the command, which must fail properly: exit status 1, no output on stdout, one error on stderr that
    /// contains all of `parts` and a hint, and no change of any file in the directory. Returns its stderr.
    #[track_caller]
    pub fn fails(self, parts: &[&str]) -> String {
        self.fails_with_status(1, parts)
    }

    /// Runs the command like [`fails`](Self::fails) for errors in the command line itself, whose exit status is 2.
    #[track_caller]
    pub fn is_misused(self, parts: &[&str]) -> String {
        self.fails_with_status(2, parts)
    }

    /// Runs the command like [`fails`](Self::fails), but allows changes of files.
    #[track_caller]
    pub fn fails_late(mut self, parts: &[&str]) -> String {
        self.error(1, parts).0
    }

    #[track_caller]
    fn fails_with_status(mut self, status: i32, parts: &[&str]) -> String {
        let before = entries_below(&self.root);
        let (stderr, output) = self.error(status, parts);
        let after = entries_below(&self.root);
        let changed = |name: &&PathBuf| before.get(*name) != after.get(*name);
        let changed: Vec<_> = before.keys().chain(after.keys()).filter(changed).collect();
        self.check(
            changed.is_empty(),
            &format!("it must leave the files alone, but changed {changed:?}"),
            &output,
        );
        stderr
    }

    /// Runs the command, which must fail with one error that contains all of `parts` and a hint. Returns its stderr
    /// as text, and its output.
    #[track_caller]
    fn error(&mut self, status: i32, parts: &[&str]) -> (String, Output) {
        let output = self.output();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code();
        self.check(
            code == Some(status),
            &format!("its exit status must be {status}, for {parts:?}"),
            &output,
        );
        self.check(output.stdout.is_empty(), "it must print nothing on stdout", &output);
        let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
        self.check(errors == 1 && !stderr.contains("panicked"), "it must print one error", &output);
        self.check(stderr.contains("\n  hint: "), "its error must have a hint", &output);
        self.check(
            !stderr.contains("the option `"),
            "its error must name flags, not options of the API",
            &output,
        );
        let missing: Vec<_> = parts.iter().filter(|part| !stderr.contains(**part)).collect();
        self.check(missing.is_empty(), &format!("its error must hold {missing:?}"), &output);
        (stderr, output)
    }

    /// Runs the command and returns its exit status, stdout and stderr.
    #[track_caller]
    pub fn output(&mut self) -> Output {
        self.command.output().unwrap_or_else(|error| panic!("`{}` cannot be started: {error}", self.line))
    }

    /// Starts the command without waiting for it. Its output is discarded.
    #[track_caller]
    pub fn spawn(mut self) -> Child {
        let quiet = self.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        quiet.spawn().unwrap_or_else(|error| panic!("`{}` cannot be started: {error}", self.line))
    }

    /// Starts the command like [`spawn`](Self::spawn), but keeps its stderr for `wait_with_output`.
    #[track_caller]
    pub fn spawn_with_stderr(mut self) -> Child {
        let piped = self.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        piped.spawn().unwrap_or_else(|error| panic!("`{}` cannot be started: {error}", self.line))
    }

    #[track_caller]
    fn check(&self, holds: bool, expectation: &str, output: &Output) {
        if holds {
            return;
        }
        let files: String = files_below(&self.root)
            .iter()
            .map(|(name, bytes)| format!("  {} ({} bytes)\n", name.display(), bytes.len()))
            .collect();
        panic!(
            "{expectation}\ncommand: {}\nfolder: {}\n{files}{}\n--- stdout\n{}--- stderr\n{}---",
            self.line,
            self.root.display(),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
    }
}

/// Returns the path of one of the workspace's binaries, which are in the parent of the test's directory.
#[track_caller]
fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folders = test.ancestors().skip(1).take(2);
    let candidates: Vec<_> =
        folders.map(|folder| folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX))).collect();
    let found = candidates.iter().find(|path| path.is_file()).cloned();
    found.unwrap_or_else(|| panic!("`{name}` is in none of {candidates:?}; run `make build tools` first"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_at_every_depth() {
        let dir = Dir::new();
        dir.write("a/b/c.txt", "one");
        dir.write("d.txt", "two");
        dir.edit("d.txt", "two", "three");
        let files = dir.files();
        let names: Vec<_> = files.keys().map(|name| name.to_string_lossy().into_owned()).collect();
        assert_eq!(names, ["a/b/c.txt", "d.txt"]);
        assert_eq!(files[Path::new("d.txt")], b"three");
    }

    #[test]
    fn a_folder_is_made_once_for_each_key() {
        let made = std::cell::Cell::new(0);
        let of = |key: &str| {
            Dir::made_once(key, |dir| {
                made.set(made.get() + 1);
                dir.write("folder/key.txt", key);
            })
        };
        let [first, second, other] = ["a", "a", "b"].map(of);
        first.write("folder/key.txt", "changed");
        assert_eq!((made.get(), second.text("folder/key.txt"), other.files().len()), (2, "a".to_owned(), 1));
    }

    #[test]
    #[should_panic(expected = "run `make build tools` first")]
    fn a_missing_binary_says_what_to_run() {
        Dir::new().command("onefold-nothing");
    }
}
