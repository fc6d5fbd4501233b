//! `onefold`: lists and starts the other programs.

use std::process::ExitCode;

fn main() -> ExitCode {
    onefold_command::PROGRAM.main(std::env::args_os())
}
