//! `onefold-read`: looks at a dataset's batches and measures how fast they come.

mod bench;
mod cli;
mod head;

use std::process::ExitCode;

use clap::Parser;
use onefold_datasets::console::{self, Printer};

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // By default glibc keeps what each thread has freed for that thread: up to twice what the reader holds.
    console::restart_with("MALLOC_ARENA_MAX", "1");
    let printer = Printer::new(cli.output);
    console::run(|| match &cli.command {
        Command::Head { reading, samples, batch } => head::head(reading, *samples, *batch, &printer),
        Command::Bench { reading } => bench::bench(reading, &printer),
    })
}
