//! `onefold-read`: shows a dataset's batches, measures how fast they come, and digests them.

mod bench;
mod cli;
mod digest;
mod head;

use std::process::ExitCode;

use clap::Parser;
use onefold_terminal::Printer;

use cli::{Cli, Command};

onefold_terminal::use_jemalloc!();

fn main() -> ExitCode {
    let cli = Cli::parse();
    let printer = Printer::new(cli.output);
    onefold_terminal::run::<Cli>(|| match &cli.command {
        Command::Head { reading, samples, batch } => head::head(reading, *samples, *batch, &printer),
        Command::Bench { reading } => bench::bench(reading, &printer),
        Command::Digest { reading, by_step } => digest::print_digests(reading, *by_step, &printer),
    })
}
