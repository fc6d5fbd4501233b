//! `onefold-read`: shows a dataset's batches, measures the rate of reading them, and computes their digests.

use std::process::ExitCode;

onefold_allocator::use_jemalloc!(onefold_allocator::ONE_ARENA);

fn main() -> ExitCode {
    onefold_ikjt::command::PROGRAM.main(std::env::args_os())
}
