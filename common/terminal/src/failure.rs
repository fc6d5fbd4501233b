//! The error of a command as the user sees it: what happened, and what to do.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, Write};

use onefold_base::fault::{Explainer, Fault, Kind, Text, exhausted, explained};
use serde::{Deserialize, Serialize};

use crate::options::Names;

/// The error of a command. Options have the names that the caller knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of the error.
    pub kind: Kind,
    /// The message: what happened, and where.
    pub message: String,
    /// The hints: what to do. Each one is a sentence without a full stop.
    pub hints: Vec<String>,
    /// The JSON object that the command had printed for `--json` before it failed, such as the findings of `verify`.
    pub summary: Option<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.hints.iter().try_for_each(|hint| write!(f, "\n  hint: {hint}"))
    }
}

impl std::error::Error for Failure {}

impl Failure {
    /// Returns `fault` with the option names of `names`.
    pub(crate) fn new(fault: &Fault, names: &Names) -> Self {
        let told = |text: &Text| text.named(|option| names.name(option));
        let hints = fault.hints.iter().map(told).collect();
        Self { kind: fault.kind, message: told(&fault.message), hints, summary: None }
    }

    /// Appends the error to a file, as one line of JSON.
    pub(crate) fn append_to(&self, file: &OsStr) -> io::Result<()> {
        let line = serde_json::to_string(self)? + "\n";
        fs_err::OpenOptions::new().append(true).create(true).open(file)?.write_all(line.as_bytes())
    }
}

/// Returns the fault of a command's error: the fault of the first cause of a known type, with the messages of the
/// causes before it as its place. If that fault has no hint and one of the causes is an error of the operating
/// system, the hint is for that error.
pub(crate) fn fault_of(error: &anyhow::Error, libraries: &[Explainer]) -> Fault {
    let own: [Explainer; 2] = [explained::<Fault>, explained::<io::Error>];
    let mut places = Vec::new();
    let mut found = None;
    for cause in error.chain() {
        found = own.iter().chain(libraries).find_map(|explain| explain(cause));
        if found.is_some() {
            break;
        }
        places.push(cause.to_string());
    }
    let innermost = found.unwrap_or_else(|| Fault::new(Kind::Failed, places.pop().unwrap_or_default()));
    let fault = places.iter().rev().fold(innermost, |fault, place| fault.within(place));
    match error.chain().find_map(|cause| cause.downcast_ref::<io::Error>()) {
        Some(system) if fault.hints.is_empty() => {
            let hint = exhausted(&system.to_string()).unwrap_or_else(|| system_hint(system.kind()));
            fault.hint(hint)
        }
        _ => fault,
    }
}

/// Returns the hint for an error of the operating system, whose own message names no remedy.
fn system_hint(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => {
            "check the path; it is relative to the directory in which the command runs"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "check who owns the path and who may read and write it"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space, or choose another disk"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory | io::ErrorKind::AlreadyExists => {
            "something else is at this path; choose another one"
        }
        _ => "check the path and the disk, then run this again",
    }
}

#[cfg(test)]
mod tests {
    use onefold_base::fault::text;
    use onefold_datasets::Error;

    use super::*;

    fn fault(error: &anyhow::Error) -> Fault {
        fault_of(error, &[explained::<Error>])
    }

    #[test]
    fn causes_are_joined_and_hints_come_last() {
        let inner = Error::schema("no label", "add one");
        let fault = fault(&anyhow::Error::new(inner).context("dataset.toml"));
        assert_eq!(fault.to_string(), "dataset.toml: no label\n  hint: add one");
        assert_eq!(fault.kind, Kind::Options);
        let fault = fault_of(&anyhow::anyhow!("b").context("a"), &[]);
        assert_eq!(fault, Fault::new(Kind::Failed, text!["a", ": ", "b"]));
    }

    #[test]
    fn exhausted_threads_memory_and_files_are_not_reported_as_disk_errors() {
        for (number, part) in [(11, "no more threads"), (12, "no more memory"), (24, "open more files")] {
            let fault = fault(&io::Error::from_raw_os_error(number).into());
            assert!(fault.to_string().contains(part), "{fault}");
        }
    }

    #[test]
    fn an_error_of_the_operating_system_has_a_hint() {
        let fault = fault(&Error::from(fs_err::read("no/such/file").unwrap_err()).into());
        let text = fault.to_string();
        assert!(text.starts_with("failed to open file `no/such/file`: "), "{text}");
        assert!(
            text.ends_with(
                "\n  hint: check the path; it is relative to the directory in which the command runs"
            ),
            "{text}"
        );
        assert_eq!(fault.kind, Kind::Storage);
    }
}
