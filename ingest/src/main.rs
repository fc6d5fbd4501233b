//! `onefold-ingest`: the command line of the batch ETL.

use std::process::ExitCode;

onefold_allocator::use_jemalloc!();

fn main() -> ExitCode {
    onefold_ingest::command::main(std::env::args_os())
}
