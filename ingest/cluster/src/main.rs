//! `onefold-cluster`: the command line.

use std::process::ExitCode;

onefold_allocator::use_jemalloc!();

fn main() -> ExitCode {
    onefold_cluster::command::PROGRAM.main(std::env::args_os())
}
