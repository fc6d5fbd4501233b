//! `onefold-shard`: the planner's command line.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    onefold_sharding_cli::main(std::env::args_os())
}
