//! `onefold-shard`: the command line of the sharding crate.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    onefold_sharding::command::main(std::env::args_os())
}
