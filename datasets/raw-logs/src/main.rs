//! `onefold-data`: makes raw logs, from public data or from a seed.

use std::process::ExitCode;

fn main() -> ExitCode {
    onefold_raw_logs::command::PROGRAM.main(std::env::args_os())
}
