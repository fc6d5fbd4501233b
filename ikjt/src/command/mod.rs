//! The commands of `onefold-read`: showing samples of batches, measuring the rate of reading, and computing digests.

mod bench;
mod cli;
mod digest;
mod head;

use onefold_base::fault::{Explainer, explained};
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};

use cli::{Cli, Command};

/// The program, which other programs can call in their process.
pub const PROGRAM: Program = Program::of::<Cli>();

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[explained::<crate::Error>, explained::<onefold_datasets::Error>];

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        match &self.command {
            Command::Head { reading, samples, batch } => head::head(reading, *samples, *batch, printer),
            Command::Bench { reading } => bench::bench(reading, printer),
            Command::Digest { reading, by_step } => digest::print_digests(reading, *by_step, printer),
        }
    }
}
