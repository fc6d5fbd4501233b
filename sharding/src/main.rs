//! `onefold-shard`: the command line of the sharding crate.
#![forbid(unsafe_code)]

mod cli;
mod commands;
mod train_config;

use std::process::ExitCode;

use clap::Parser;
use onefold_terminal::Printer;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let printer = Printer::new(cli.output);
    onefold_terminal::run::<Cli>(|| match &cli.command {
        Command::Plan(arguments) => commands::plan(arguments, &printer),
        Command::Tables(arguments) => commands::tables::tables(arguments, &printer),
        Command::Tasks(arguments) => commands::tables::tasks_command(arguments, &printer),
        Command::Compare(arguments) => commands::compare::compare_command(arguments, &printer),
        Command::Pretrain(arguments) => commands::pretrain::pretrain_command(arguments, &printer),
        Command::Show(arguments) => commands::show::show(arguments, &printer),
        Command::Diff(arguments) => commands::show::diff_command(arguments, &printer),
        Command::Export(arguments) => commands::show::export(arguments, &printer),
        Command::Topology(arguments) => commands::topology(arguments, &printer),
        Command::Check(arguments) => commands::check(arguments, &printer),
    })
}
