//! Terminal output of the binaries: progress, the closing summary, errors and `--json`; and their allocator.
//!
//! stdout is data: a summary for people, or with `--json` one JSON object as its last line. Progress, logs
//! and errors go to stderr. Libraries take a [`Reporter`] and never print.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::CommandFactory;
use indicatif::{ProgressBar, ProgressStyle};
use onefold_datasets::process::panic_text;
use onefold_datasets::progress::Reporter;
use serde::Serialize;

pub mod allocator;
mod options;

use options::Flags;

/// The options that every command takes.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct OutputOptions {
    /// Print one JSON object as the last line of stdout, in place of the summary
    #[arg(long, global = true)]
    pub json: bool,
    /// Show no progress (it is never shown when stderr is not a terminal)
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// Terminal output of a binary.
#[derive(Debug)]
pub struct Printer {
    options: OutputOptions,
    bar: Mutex<ProgressBar>,
}

impl Printer {
    /// A printer for these options.
    pub fn new(options: OutputOptions) -> Self {
        Self { options, bar: Mutex::new(ProgressBar::hidden()) }
    }

    /// Whether the summary is wanted as JSON.
    pub fn is_json(&self) -> bool {
        self.options.json
    }

    /// Ends a command: prints `text`, or with `--json` the object `json` on one line.
    ///
    /// # Errors
    ///
    /// An error of stdout, or of serialising `json`.
    pub fn summary(&self, text: &str, json: &impl Serialize) -> io::Result<()> {
        if self.options.json {
            writeln!(io::stdout().lock(), "{}", serde_json::to_string(json)?)
        } else {
            writeln!(io::stdout().lock(), "{}", text.trim_end())
        }
    }

    /// Tells a person something on the way to the summary, on stderr.
    pub fn remark(&self, text: &str) {
        if !self.options.quiet && !self.options.json {
            // Nobody listens if stderr is closed.
            let _ = writeln!(io::stderr().lock(), "{text}");
        }
    }

    fn bar(&self) -> std::sync::MutexGuard<'_, ProgressBar> {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reporter for Printer {
    fn begin(&self, stage: &str, total: Option<u64>, unit: &str) {
        let bar = match (self.options.quiet, total) {
            (true, _) => ProgressBar::hidden(),
            (false, Some(total)) => ProgressBar::new(total).with_style(style(&format!(
                "{{prefix:<12}} {{bar:30}} {{human_pos}}/{{human_len}} {unit}  {{per_sec}}  {{msg}}"
            ))),
            (false, None) => ProgressBar::new_spinner().with_style(style(&format!(
                "{{prefix:<12}} {{spinner}} {{human_pos}} {unit}  {{per_sec}}  {{msg}}"
            ))),
        };
        bar.set_prefix(stage.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        *self.bar() = bar;
    }

    fn advance(&self, amount: u64) {
        self.bar().inc(amount);
    }

    fn note(&self, text: &str) {
        self.bar().set_message(text.to_owned());
    }

    fn end(&self) {
        self.bar().finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Runs a command of the binary whose arguments are `Cli`. Logs go to stderr by `ONEFOLD_LOG` (default `warn`). An error is
/// printed to stderr with its causes, and with flags of `Cli` in place of the options that it names; the exit status is
/// then 1. A closed pipe is a success. A panic is printed as an internal error, with exit status 101; `ONEFOLD_LOG=debug`
/// shows where it happened.
///
/// Errors of libraries name an option as ``the option `memory_limit` ``: the id of an argument in `Cli`.
pub fn run<Cli: CommandFactory>(command: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("ONEFOLD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // A second call in one process (a test) finds the logger set, which is as good.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).try_init();
    // Some panics are foreseen (decoders on damaged bytes) and become errors: nobody should see them twice.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
    match catch_unwind(AssertUnwindSafe(command)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            let text = Flags::of(Cli::command(), std::env::args_os()).put_into(&render(&error));
            let _ = writeln!(io::stderr().lock(), "error: {text}");
            ExitCode::from(1)
        }
        Err(panic) => {
            let hint = "this is a bug in Onefold; please report it with the command line and what it says under `ONEFOLD_LOG=debug`";
            let _ = writeln!(
                io::stderr().lock(),
                "error: internal error: {}\n  hint: {hint}",
                panic_text(&*panic)
            );
            ExitCode::from(101)
        }
    }
}

/// The causes of an error joined by `: `, with all hints after them and no message said twice.
fn render(error: &anyhow::Error) -> String {
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
    if hints.is_empty() {
        hints.extend(system_hint(error).map(str::to_owned));
    }
    let mut rendered = messages.join(": ");
    for hint in hints {
        rendered.push_str("\n  hint: ");
        rendered.push_str(&hint);
    }
    rendered
}

/// What to do about an error of the operating system, which names a path and no remedy.
fn system_hint(error: &anyhow::Error) -> Option<&'static str> {
    let error = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>())?;
    Some(match error.kind() {
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
    })
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Starts this program again with environment variables, unless one of them is set: for what libraries read before `main`.
/// Comes back if one is set, or if starting again fails.
pub fn restart_with(variables: &[(&str, &str)]) {
    use std::os::unix::process::CommandExt;
    if variables.is_empty() || variables.iter().any(|(variable, _)| std::env::var_os(variable).is_some()) {
        return;
    }
    if let Ok(program) = std::env::current_exe() {
        let arguments = std::env::args_os().skip(1);
        let _ = std::process::Command::new(program).args(arguments).envs(variables.iter().copied()).exec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_joined_and_hints_come_last() {
        let inner = onefold_datasets::Error::Schema { message: "no label".into(), hint: "add one".into() };
        let error = anyhow::Error::new(inner).context("dataset.toml");
        assert_eq!(render(&error), "dataset.toml: no label\n  hint: add one");
    }

    #[test]
    fn an_error_of_the_operating_system_has_a_hint() {
        let error =
            anyhow::Error::new(onefold_datasets::Error::from(fs_err::read("no/such/file").unwrap_err()));
        let text = render(&error);
        assert!(text.starts_with("failed to open file `no/such/file`: "), "{text}");
        assert!(
            text.ends_with(
                "\n  hint: check the path; it is relative to the directory in which the command runs"
            ),
            "{text}"
        );
    }
}
