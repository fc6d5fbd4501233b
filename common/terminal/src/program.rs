//! A program of several commands, run as a binary or in the process of a caller.

use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use onefold_base::fault::{Explainer, Fault, Kind};
use onefold_base::progress::Reporter;

use crate::failure::fault_of;
use crate::keywords::{Keyword, usage_fault};
use crate::options::Names;
use crate::{Failure, OutputOptions, Printer, generate};

/// The environment variable with which a program that runs this one requests errors in a file. An error is then not
/// printed but appended to that file, as a [`Failure`] in one line of JSON that names options as keywords.
pub const FAILURE_FILE: &str = "ONEFOLD_FAILURE_FILE";

/// The command line of a binary: its arguments, and the work that they request.
pub trait CommandLine: clap::Parser + 'static {
    /// Functions that find the faults of the libraries' error types with which a command may end.
    const ERRORS: &'static [Explainer];

    /// Returns the options of the output.
    fn output(&self) -> OutputOptions;

    /// Runs the command.
    ///
    /// # Errors
    ///
    /// An error of one of the types of [`ERRORS`](Self::ERRORS), a [`Fault`], or any other error, which gets the kind
    /// [`Kind::Failed`]. A [`clap::Error`] is reported as an error of the program's arguments.
    fn run(&self, printer: &Printer) -> anyhow::Result<()>;
}

/// A program whose arguments are a [`CommandLine`].
#[derive(Debug, Clone, Copy)]
pub struct Program {
    definition: fn() -> clap::Command,
    parse: fn(&[OsString]) -> Result<Parsed, clap::Error>,
    errors: &'static [Explainer],
}

/// Parsed arguments: the output options, and the work.
type Parsed = (OutputOptions, Box<dyn Fn(&Printer) -> anyhow::Result<()>>);

/// The end of a command, for [`Program::status`] and [`Program::call`].
enum Ended {
    Well,
    ClosedPipe,
    Misused(clap::Error),
    Badly(Fault),
}

impl Program {
    /// Returns the program with the arguments `Cli`.
    pub const fn of<Cli: CommandLine>() -> Self {
        Self { definition: Cli::command, parse: parse::<Cli>, errors: Cli::ERRORS }
    }

    /// Runs the program as a binary does. `arguments` begin with the program's name. See [`status`](Self::status).
    pub fn main(self, arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
        ExitCode::from(self.status(arguments))
    }

    /// Runs the program as a binary does, and returns its exit status, which depends on the kind of the error.
    ///
    /// Logs go to stderr, filtered by `ONEFOLD_LOG` (default `warn`). An error is printed to stderr with its causes
    /// and with options as flags, or is appended to the [`FAILURE_FILE`]. A closed pipe is a success. A panic is an
    /// internal error, unless its message says that the machine is out of memory, threads or space;
    /// `ONEFOLD_LOG=debug` shows where it happened.
    ///
    /// With [`GENERATE`](crate::GENERATE) as the first argument, it prints shell completions or writes manual pages.
    pub fn status(self, arguments: impl IntoIterator<Item = OsString>) -> u8 {
        let arguments: Vec<OsString> = arguments.into_iter().collect();
        let ended = match (generate::requested(&arguments), (self.parse)(&arguments)) {
            (Some(request), _) => self.run(|| generate::generate((self.definition)(), request)),
            (None, Ok((options, work))) => self.run(|| work(&Printer::new(options))),
            (None, Err(error)) => Ended::Misused(error),
        };
        // A caller that is not a Rust program does not flush Rust's stdout at its end. All output ends with a line
        // break and is flushed already, so an error can be ignored.
        let _ = io::stdout().flush();
        let mut definition = (self.definition)();
        let file = std::env::var_os(FAILURE_FILE);
        let fault = match ended {
            Ended::Well | Ended::ClosedPipe => return 0,
            Ended::Misused(error) if file.is_none() || !error.use_stderr() => {
                // The error is help, the version or a message. The pipe may be closed.
                let _ = error.print();
                return if error.use_stderr() { exit_status(Kind::Usage) } else { 0 };
            }
            Ended::Misused(error) => {
                definition.build();
                let command = arguments.get(1).map(|command| command.to_string_lossy());
                usage_fault(&error, &definition, &command.unwrap_or_default())
            }
            Ended::Badly(fault) => fault,
        };
        // An error is ignored: the pipe may be closed.
        let _ = match file {
            None => {
                let failure = Failure::new(&fault, &Names::flags(definition, &arguments));
                // One write, because ranks that end at the same time write to one pipe.
                io::stderr().lock().write_all(format!("error: {failure}\n").as_bytes())
            }
            Some(file) => Failure::new(&fault, &Names::keywords(definition, &arguments)).append_to(&file),
        };
        exit_status(fault.kind)
    }

    /// Runs a command in the caller's process, and returns the object that `--json` prints, as text. `reporter`
    /// receives the progress and can stop the command. Options are given and named as keywords: see
    /// [`keywords`](Self::keywords).
    ///
    /// # Errors
    ///
    /// The error that the binary would print, with keywords in place of flags.
    pub fn call(
        self,
        command: &str,
        given: &[(String, Vec<OsString>)],
        reporter: Arc<dyn Reporter>,
    ) -> Result<String, Failure> {
        let mut definition = (self.definition)();
        definition.build();
        let told =
            |fault, line: &[OsString]| Failure::new(&fault, &Names::keywords(definition.clone(), line));
        let arguments = crate::keywords::arguments(&definition, command, given);
        let arguments = arguments.map_err(|fault| told(fault, &[]))?;
        let printer = Printer::for_caller(Arc::clone(&reporter));
        let ended = match (self.parse)(&arguments) {
            Ok((_, work)) => self.run(|| work(&printer)),
            Err(error) => Ended::Misused(error),
        };
        let summary = printer.take_summary();
        let fault = match ended {
            Ended::Well | Ended::ClosedPipe => return Ok(summary.unwrap_or_else(|| "{}".to_owned())),
            Ended::Misused(error) => usage_fault(&error, &definition, command),
            Ended::Badly(fault) => fault,
        };
        // The caller may have stopped the work, whatever error the work made of it.
        let kind = if reporter.go_on().is_err() { Kind::Stopped } else { fault.kind };
        Err(Failure { kind, summary, ..told(fault, &arguments) })
    }

    /// Writes the manual pages of the program and of its commands into a directory, which is created.
    ///
    /// # Errors
    ///
    /// A page cannot be written.
    pub fn write_manual(self, folder: &Path) -> io::Result<()> {
        generate::manual((self.definition)(), folder)
    }

    /// Returns the keywords that [`call`](Self::call) takes for a command, or `None` if there is no such command.
    pub fn keywords(self, command: &str) -> Option<Vec<Keyword>> {
        let mut definition = (self.definition)();
        definition.build();
        definition.find_subcommand(command).map(crate::keywords::keywords)
    }

    /// Returns the description of a command, in one or more paragraphs, or `None` if there is no such command.
    pub fn about(self, command: &str) -> Option<String> {
        let definition = (self.definition)();
        let command = definition.find_subcommand(command)?;
        command.get_long_about().or(command.get_about()).map(ToString::to_string)
    }

    fn run(self, work: impl FnOnce() -> anyhow::Result<()>) -> Ended {
        // The crates that read AWS profiles and Delta tables also log the errors that they return.
        let filter = tracing_subscriber::EnvFilter::try_from_env("ONEFOLD_LOG").unwrap_or_else(|_| {
            tracing_subscriber::EnvFilter::new("warn,aws_config=error,buoyant_kernel=off")
        });
        let logger = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
        // Other crates may enable colours, which do not belong in the files that standard error is sent to. A second
        // call in one process finds the logger already set, which is fine.
        let _ = logger.with_ansi(false).try_init();
        // Panics of decoders on damaged bytes are caught and become errors. This hook keeps them from being printed.
        std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => Ended::Well,
            Ok(Err(error)) if is_closed_pipe(&error) => Ended::ClosedPipe,
            Ok(Err(error)) => match error.downcast() {
                Ok(error) => Ended::Misused(error),
                Err(error) => Ended::Badly(fault_of(&error, self.errors)),
            },
            Err(panic) => Ended::Badly(Fault::of_panic(&*panic)),
        }
    }
}

fn parse<Cli: CommandLine>(arguments: &[OsString]) -> Result<Parsed, clap::Error> {
    let cli = Cli::try_parse_from(arguments)?;
    Ok((cli.output(), Box::new(move |printer| cli.run(printer))))
}

/// Returns the exit status of a command that ends with an error of this kind.
fn exit_status(kind: Kind) -> u8 {
    match kind {
        Kind::Usage => 2,
        Kind::Internal => 101,
        Kind::Options | Kind::Data | Kind::Storage | Kind::Failed | Kind::Stopped => 1,
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::{Parser, Subcommand};
    use onefold_base::fault::{option, text};
    use onefold_base::progress::Silent;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(subcommand)]
        command: Command,
        #[command(flatten)]
        output: OutputOptions,
    }

    #[derive(Debug, Subcommand)]
    enum Command {
        Build {
            #[arg(long)]
            memory_limit: u64,
        },
    }

    impl CommandLine for Cli {
        const ERRORS: &'static [Explainer] = &[];

        fn output(&self) -> OutputOptions {
            self.output
        }

        fn run(&self, _: &Printer) -> anyhow::Result<()> {
            let Command::Build { memory_limit } = self.command;
            let message = text![option("memory_limit"), format!(" is {memory_limit}")];
            Err(Fault::new(Kind::Data, message).hint(text!["raise ", option("memory_limit")]).into())
        }
    }

    #[test]
    fn a_function_fails_with_the_kind_of_its_error_and_the_names_of_keywords() {
        let given = [("memory_limit".to_owned(), vec![OsString::from("7")])];
        let failure = Program::of::<Cli>().call("build", &given, Arc::new(Silent)).unwrap_err();
        assert_eq!(failure.to_string(), "`memory_limit` is 7\n  hint: raise `memory_limit`");
        assert_eq!(failure.kind, Kind::Data);
        let misused = Program::of::<Cli>().call("build", &[], Arc::new(Silent)).unwrap_err();
        assert_eq!((misused.kind, exit_status(misused.kind)), (Kind::Usage, 2));
    }
}
