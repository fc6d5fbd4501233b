//! How the error of a command is told: what happened, and what to do.

use std::fmt;
use std::io;

use onefold_base::process::panic_text;

use crate::options::Names;

/// What a kind of failure means to a program that calls a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The arguments are wrong; nothing was done.
    Usage,
    /// The operating system refused something: a file is not there, a disk is full.
    System,
    /// The command could not do what was asked: what it read is wrong, a limit does not suffice, a check failed.
    Failed,
    /// Whoever was told of the progress wanted the command to end.
    Stopped,
    /// A bug in Onefold.
    Internal,
}

impl FailureKind {
    /// The kind in one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::System => "system",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
            Self::Internal => "internal",
        }
    }
}

/// The error of a command.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// What kind of error it is.
    pub kind: FailureKind,
    /// What happened, and where.
    pub message: String,
    /// What to do, each a sentence without a full stop.
    pub hints: Vec<String>,
    /// The object that `--json` had printed before the command failed, as `verify` does with what it found.
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
    /// The causes of an error joined by `: `, with all their hints and no message said twice. Options have the names
    /// that libraries give them.
    pub(crate) fn of_error(error: &anyhow::Error) -> Self {
        let mut messages: Vec<String> = Vec::new();
        let mut hints: Vec<String> = Vec::new();
        for cause in error.chain() {
            let text = cause.to_string();
            let (message, hint) =
                text.split_once("\n  hint: ").map_or((text.as_str(), None), |(m, h)| (m, Some(h)));
            if messages.last().is_none_or(|last| !last.contains(message)) {
                messages.push(message.to_owned());
            }
            if let Some(hint) = hint.filter(|hint| !hints.iter().any(|seen| seen == hint)) {
                hints.push(hint.to_owned());
            }
        }
        let system = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
        if hints.is_empty() {
            hints.extend(system.map(|error| system_hint(error.kind()).to_owned()));
        }
        let kind = if system.is_some() { FailureKind::System } else { FailureKind::Failed };
        Self { kind, message: messages.join(": "), hints, summary: None }
    }

    /// The failure of a command that panicked.
    pub(crate) fn of_panic(panic: &(dyn std::any::Any + Send)) -> Self {
        let hint = "this is a bug in Onefold; please report it with the command line and what it says under `ONEFOLD_LOG=debug`";
        Self {
            kind: FailureKind::Internal,
            message: format!("internal error: {}", panic_text(panic)),
            hints: vec![hint.to_owned()],
            summary: None,
        }
    }

    /// The same with names of options as the caller knows them.
    pub(crate) fn named(mut self, names: &Names) -> Self {
        self.message = names.put_into(&self.message);
        self.hints.iter_mut().for_each(|hint| *hint = names.put_into(hint));
        self
    }
}

/// What to do about an error of the operating system, which names a path and no remedy.
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
    use super::*;

    #[test]
    fn causes_are_joined_and_hints_come_last() {
        let inner = onefold_datasets::Error::Schema { message: "no label".into(), hint: "add one".into() };
        let failure = Failure::of_error(&anyhow::Error::new(inner).context("dataset.toml"));
        assert_eq!(failure.to_string(), "dataset.toml: no label\n  hint: add one");
        assert_eq!(failure.kind, FailureKind::Failed);
    }

    #[test]
    fn an_error_of_the_operating_system_has_a_hint() {
        let error =
            anyhow::Error::new(onefold_datasets::Error::from(fs_err::read("no/such/file").unwrap_err()));
        let failure = Failure::of_error(&error);
        let text = failure.to_string();
        assert!(text.starts_with("failed to open file `no/such/file`: "), "{text}");
        assert!(
            text.ends_with(
                "\n  hint: check the path; it is relative to the directory in which the command runs"
            ),
            "{text}"
        );
        assert_eq!(failure.kind, FailureKind::System);
    }
}
