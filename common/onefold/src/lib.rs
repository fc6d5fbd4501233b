//! The program `onefold`: `onefold ingest build …` is `onefold-ingest build …`.
//!
//! It finds the programs `onefold-*` in its own directory and on the `PATH`, and replaces its process with the named
//! program, which then receives signals and sets the exit status. It is not linked with the other programs: each of
//! them [generates](onefold_terminal::GENERATE) its completions and manual pages itself.

#![forbid(unsafe_code)]

mod completions;
mod find;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::{Parser, Subcommand, ValueEnum};
use onefold_base::fault::{Explainer, Fault, Kind};
use onefold_base::names::suggest;
use onefold_terminal::{CommandLine, GENERATE, OutputOptions, Printer, Program};

use crate::find::{Found, find, folders};

/// The definition of the program, with which other programs can run it in their process.
pub const PROGRAM: Program = Program::of::<Cli>();

/// The names of this repository's programs without `onefold-`, each with a description.
const PROGRAMS: [(&str, &str); 7] = [
    ("data", "Fetch, import or generate raw logs"),
    ("ingest", "Build datasets from raw logs, and maintain them"),
    ("cluster", "Build datasets on a cluster of machines"),
    ("read", "Show batches of a dataset, and measure reading"),
    ("serve", "Run a preprocessing service for trainers"),
    ("shard", "Place embedding tables on ranks"),
    ("train", "Train and evaluate models"),
];

/// Start one of Onefold's programs: `onefold ingest build` is `onefold-ingest build`
///
/// Without a command, it lists the programs that it finds in its own directory and on the PATH.
#[derive(Debug, Parser)]
#[command(name = "onefold", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print a script with which a shell completes the arguments of all programs
    ///
    /// Example: source <(onefold completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages of all programs and of their commands
    ///
    /// Example: onefold man ~/.local/share/man/man1
    Man {
        /// The directory, which is created
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// List the programs, or print the help of a program or of one of its commands
    ///
    /// Example: onefold help ingest build
    Help {
        /// The program and its command
        #[arg(value_name = "PROGRAM")]
        words: Vec<OsString>,
    },
    /// A program and its arguments
    #[command(external_subcommand)]
    Program(Vec<OsString>),
}

/// A shell for which completions can be generated.
#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[];

    fn output(&self) -> OutputOptions {
        OutputOptions::default()
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        let found = find(&folders());
        match &self.command {
            None => list(&found, printer),
            Some(Action::Help { words }) if words.is_empty() => list(&found, printer),
            Some(Action::Help { words }) => {
                start(&found, &[&words[..], &[OsString::from("--help")]].concat())
            }
            Some(Action::Program(words)) => start(&found, words),
            Some(Action::Completions { shell }) => print_completions(&found, *shell, printer),
            Some(Action::Man { folder }) => {
                PROGRAM.write_manual(folder)?;
                for program in own(&found) {
                    let arguments = [GENERATE.into(), "man".into(), folder.clone().into_os_string()];
                    generated(program, &arguments, printer)?;
                }
                Ok(())
            }
        }
    }
}

/// Returns the description of a program of this repository; `None` for other programs.
fn purpose(name: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|(program, _)| *program == name).map(|(_, purpose)| *purpose)
}

/// Returns the found programs that belong to this repository. Only these programs can generate completions and manual
/// pages.
fn own(found: &[Found]) -> impl Iterator<Item = &Found> {
    found.iter().filter(|program| purpose(&program.name).is_some())
}

/// Prints the programs that were found, with this repository's programs first.
fn list(found: &[Found], printer: &Printer) -> anyhow::Result<()> {
    let mut text = String::from("Programs (`onefold PROGRAM --help` describes one):\n");
    let width = found.iter().map(|program| program.name.len()).max().unwrap_or_default();
    for (name, purpose) in PROGRAMS {
        if found.iter().any(|program| program.name == name) {
            let _ = writeln!(text, "  {name:<width$}  {purpose}");
        }
    }
    for Found { name, .. } in found.iter().filter(|program| purpose(&program.name).is_none()) {
        let _ = writeln!(text, "  {name}");
    }
    if found.is_empty() {
        text.push_str("  none in the directory of `onefold` and on the PATH\n");
    }
    text.push_str("\n`onefold completions` and `onefold man` write shell completions and manual pages.");
    Ok(printer.summary(&text, &())?)
}

/// Replaces this process with the program that the first word names.
fn start(found: &[Found], words: &[OsString]) -> anyhow::Result<()> {
    let Some((name, arguments)) = words.split_first() else { return Ok(()) };
    let name = name.to_string_lossy();
    let Some(program) = found.iter().find(|program| program.name == name) else {
        let message = format!("`onefold-{name}` is neither in the directory of `onefold` nor on the PATH");
        let hint = match purpose(&name) {
            Some(_) => "install it, or add its directory to the PATH".to_owned(),
            None => {
                let own = ["completions", "help", "man"];
                suggest(&name, found.iter().map(|program| program.name.as_str()).chain(own))
            }
        };
        return Err(Fault::new(Kind::Usage, message).hint(hint).into());
    };
    // `exec` returns only if it fails.
    let error = Command::new(&program.path).args(arguments).exec();
    let message = format!("`{}` cannot be started: {error}", program.path.display());
    Err(Fault::new(Kind::Failed, message).hint("check that the file can be executed on this machine").into())
}

/// Prints the completions of all programs, then the completions of `onefold` itself, which use them.
fn print_completions(found: &[Found], shell: Shell, printer: &Printer) -> anyhow::Result<()> {
    let name = shell.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let mut names = Vec::new();
    let mut scripts = String::new();
    for program in own(found) {
        if let Some(script) = generated(program, &[GENERATE.into(), OsString::from(&name)], printer)? {
            names.push(program.name.as_str());
            scripts.push_str(&script);
            scripts.push('\n');
        }
    }
    let programs: Vec<_> = PROGRAMS.into_iter().filter(|(name, _)| names.contains(name)).collect();
    Ok(printer.summary(&completions::script(shell, &programs, &scripts), &())?)
}

/// Runs a program, and returns its stdout. If the program fails, for example because a library is missing, prints a
/// remark and returns `None`, so that its completions or manual pages are left out.
fn generated(program: &Found, arguments: &[OsString], printer: &Printer) -> anyhow::Result<Option<String>> {
    let output = Command::new(&program.path).args(arguments).output()?;
    if output.status.success() {
        return Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()));
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    printer.remark(&format!("`onefold-{}` is left out: {}", program.name, reason.trim()));
    Ok(None)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_valid() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(["onefold", "ingest", "--json", "build", "--", "x"]).unwrap();
        let Some(Action::Program(words)) = &cli.command else { panic!("{cli:?}") };
        assert_eq!(*words, ["ingest", "--json", "build", "--", "x"]);
        let cli = Cli::try_parse_from(["onefold", "help", "ingest", "build"]).unwrap();
        let Some(Action::Help { words }) = &cli.command else { panic!("{cli:?}") };
        assert_eq!(*words, ["ingest", "build"]);
    }
}
