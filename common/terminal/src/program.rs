//! A program of several commands, run as a binary or in the process of a caller.

use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;

use onefold_base::progress::Reporter;

use crate::keywords::{Keyword, usage_failure};
use crate::options::Names;
use crate::{Failure, FailureKind, OutputOptions, Printer};

/// What a binary takes from its command line, and what it does with it.
pub trait CommandLine: clap::Parser + 'static {
    /// The options of its output.
    fn output(&self) -> OutputOptions;

    /// Does what was asked for.
    ///
    /// # Errors
    ///
    /// Errors of libraries name an option as ``the option `memory_limit` ``: the id of an argument.
    fn run(&self, printer: &Printer) -> anyhow::Result<()>;
}

/// A program whose arguments are a [`CommandLine`].
#[derive(Debug, Clone, Copy)]
pub struct Program {
    definition: fn() -> clap::Command,
    parse: fn(&[OsString]) -> Result<Parsed, clap::Error>,
}

/// Arguments that fit: the output, and the work.
type Parsed = (OutputOptions, Box<dyn Fn(&Printer) -> anyhow::Result<()>>);

/// The command that ended, as [`Program::status`] and [`Program::call`] see it.
enum Ended {
    Well,
    ClosedPipe,
    Badly(Failure),
}

impl Program {
    /// The program with the arguments `Cli`.
    pub const fn of<Cli: CommandLine>() -> Self {
        Self { definition: Cli::command, parse: parse::<Cli> }
    }

    /// Runs the program as a binary does: `arguments` begin with its name. See [`status`](Self::status).
    pub fn main(self, arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
        ExitCode::from(self.status(arguments))
    }

    /// Runs the program as a binary does, and gives its exit status. Logs go to stderr by `ONEFOLD_LOG` (default
    /// `warn`). An error is printed to stderr with its causes, and with flags in place of the options that it names;
    /// the status is then 1, or 2 if the arguments are wrong. A closed pipe is a success. A panic is printed as an
    /// internal error, with status 101; `ONEFOLD_LOG=debug` shows where it happened.
    pub fn status(self, arguments: impl IntoIterator<Item = OsString>) -> u8 {
        let arguments: Vec<OsString> = arguments.into_iter().collect();
        let (options, work) = match (self.parse)(&arguments) {
            Ok(parsed) => parsed,
            Err(error) => {
                // Help, the version, or what is wrong. Nobody reads it if the pipe is closed.
                let _ = error.print();
                return u8::try_from(error.exit_code()).unwrap_or(2);
            }
        };
        let ended = run(|| work(&Printer::new(options)));
        // A program that is not Rust's does not do it at its end; what was printed ends with a line, and is out
        // already.
        let _ = io::stdout().flush();
        match ended {
            Ended::Well | Ended::ClosedPipe => 0,
            Ended::Badly(failure) => {
                let internal = failure.kind == FailureKind::Internal;
                let failure = failure.named(&Names::flags((self.definition)(), &arguments));
                // In one piece, for ranks that end together write to one pipe. Nobody reads it if that is closed.
                let _ = io::stderr().lock().write_all(format!("error: {failure}\n").as_bytes());
                if internal { 101 } else { 1 }
            }
        }
    }

    /// Runs a command in the caller's process: `reporter` hears of its progress and can end it, and what comes back is
    /// the object that `--json` prints, as text. Options are given and named as keywords: see
    /// [`keywords`](Self::keywords).
    ///
    /// # Errors
    ///
    /// What the binary would print, with the names of keywords in place of flags.
    pub fn call(
        self,
        command: &str,
        given: &[(String, Vec<OsString>)],
        reporter: Arc<dyn Reporter>,
    ) -> Result<String, Failure> {
        let mut definition = (self.definition)();
        definition.build();
        let arguments = crate::keywords::arguments(&definition, command, given)?;
        let names = Names::keywords(definition.clone(), &arguments);
        let (_, work) =
            (self.parse)(&arguments).map_err(|error| usage_failure(&error, &definition, command))?;
        let printer = Printer::for_caller(Arc::clone(&reporter));
        let ended = run(|| work(&printer));
        let summary = printer.take_summary();
        let failure = match ended {
            Ended::Well | Ended::ClosedPipe => return Ok(summary.unwrap_or_else(|| "{}".to_owned())),
            Ended::Badly(failure) => failure,
        };
        // Whatever the work made of it.
        let kind = if reporter.go_on().is_err() { FailureKind::Stopped } else { failure.kind };
        Err(Failure { kind, summary, ..failure.named(&names) })
    }

    /// The keywords that [`call`](Self::call) takes for a command, or none if there is no such command.
    pub fn keywords(self, command: &str) -> Option<Vec<Keyword>> {
        let mut definition = (self.definition)();
        definition.build();
        definition.find_subcommand(command).map(crate::keywords::keywords)
    }

    /// What a command does, in one paragraph or more; none if there is no such command.
    pub fn about(self, command: &str) -> Option<String> {
        let definition = (self.definition)();
        let command = definition.find_subcommand(command)?;
        command.get_long_about().or(command.get_about()).map(ToString::to_string)
    }
}

fn parse<Cli: CommandLine>(arguments: &[OsString]) -> Result<Parsed, clap::Error> {
    let cli = Cli::try_parse_from(arguments)?;
    Ok((cli.output(), Box::new(move |printer| cli.run(printer))))
}

fn run(work: impl FnOnce() -> anyhow::Result<()>) -> Ended {
    let filter = tracing_subscriber::EnvFilter::try_from_env("ONEFOLD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // A second call in one process finds the logger set, which is as good.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).try_init();
    // Some panics are foreseen (decoders on damaged bytes) and become errors: nobody should see them twice.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => Ended::Well,
        Ok(Err(error)) if is_closed_pipe(&error) => Ended::ClosedPipe,
        Ok(Err(error)) => Ended::Badly(Failure::of_error(&error)),
        Err(panic) => Ended::Badly(Failure::of_panic(&*panic)),
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
