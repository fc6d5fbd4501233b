//! The command-line interface of the binaries: how commands run, for a person or in the process of a program that
//! calls them, how they report progress, the closing summary, errors and `--json`, and their shell completions and
//! manual pages.
//!
//! stdout is data: a summary for people, or with `--json` one JSON object as its last line. Progress, logs
//! and errors go to stderr. Libraries take a [`Reporter`](onefold_base::progress::Reporter) and never print.

#![forbid(unsafe_code)]

mod failure;
mod generate;
mod keywords;
mod options;
mod printer;
mod program;

pub use failure::Failure;
pub use generate::GENERATE;
pub use keywords::{Keyword, KeywordKind};
pub use printer::Printer;
pub use program::{CommandLine, FAILURE_FILE, Program};

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

/// Replaces this process with the same program and arguments, and with these environment variables in addition, for
/// libraries that read the environment before `main`. Returns if one of the variables is already set, or if the
/// program cannot be started.
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
