//! The commands: each calls the library with its arguments, and prints what was done.

use std::path::PathBuf;

use onefold_datasets::process::available_threads;
use onefold_datasets::units::parse_bytes;
use onefold_ingest::EngineOptions;

pub(crate) mod build;
pub(crate) mod history;
pub(crate) mod report;
pub(crate) mod shard;
mod statistics;
pub(crate) mod vacuum;
pub(crate) mod verify;

/// Runs a build or a comparison on a runtime of so many threads.
fn run_async<T>(threads: usize, work: impl Future<Output = onefold_ingest::Result<T>>) -> anyhow::Result<T> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(threads.max(1)).enable_all().build()?;
    Ok(runtime.block_on(work)?)
}

/// The memory, disk space and threads that the engine may use.
#[derive(Debug, clap::Args)]
struct EngineArguments {
    /// Memory for sorts and joins (they spill to disk beyond it), open sessions, and vocabularies
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4GiB")]
    memory_limit: u64,
    /// Directory for data that does not fit into memory [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    spill_directory: Option<PathBuf>,
    /// Disk space for that data, which is then compressed [default: what is free there, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    spill_limit: Option<u64>,
    /// Number of threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl EngineArguments {
    fn options(&self) -> EngineOptions {
        EngineOptions {
            memory_limit: self.memory_limit,
            threads: self.threads.map_or_else(available_threads, usize::from),
            spill_directory: self.spill_directory.clone(),
            spill_limit: self.spill_limit,
        }
    }
}
