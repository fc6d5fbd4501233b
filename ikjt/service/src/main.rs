//! `onefold-serve`: the master and the workers of a preprocessing service.

use std::process::ExitCode;

onefold_allocator::use_jemalloc!(onefold_allocator::ONE_ARENA_KEEPING);

fn main() -> ExitCode {
    onefold_serve::PROGRAM.main(std::env::args_os())
}
