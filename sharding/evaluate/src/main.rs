//! `onefold-evaluate-plans`: draws placement tasks, and runs all searches on them.
#![forbid(unsafe_code)]

mod cli;
mod compare;
mod tasks;

use std::process::ExitCode;

use anyhow::Result;
use onefold_base::fault::{Explainer, explained};
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};

use crate::cli::{Cli, Command};

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[explained::<onefold_sharding::Error>];

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> Result<()> {
        match &self.command {
            Command::Tasks(arguments) => tasks::tasks_command(arguments, printer),
            Command::Compare(arguments) => compare::compare_command(arguments, printer),
        }
    }
}

fn main() -> ExitCode {
    Program::of::<Cli>().main(std::env::args_os())
}
