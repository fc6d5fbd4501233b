//! The commands of `onefold-ingest`. Each command calls the library with its arguments and prints the result.

mod build;
mod check;
mod cli;
mod columns;
mod compact;
mod features;
mod forget;
mod history;
mod init;
mod parts;
mod report;
mod shard;
mod statistics;
mod users;
mod vacuum;
mod verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use onefold_base::fault::{Explainer, explained};
use onefold_base::process::available_threads;
use onefold_base::progress::Reporter;
use onefold_base::units::parse_bytes;
use onefold_datasets::RewriteOptions;
use onefold_terminal::Program;

pub use self::build::{AppendArguments, BuildArguments, ConnectCluster, run_append, run_build};
use crate::config::Config;
use crate::engine::EngineOptions;

/// The program, for callers that run it in their own process.
pub const PROGRAM: Program = Program::of::<cli::Cli>();

/// The error types that a command can return.
pub const ERRORS: [Explainer; 3] = [
    explained::<crate::error::Error>,
    explained::<onefold_datasets::Error>,
    explained::<onefold_storage::Error>,
];

/// Runs the program with its arguments. The first argument is the program's name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    PROGRAM.main(arguments)
}

/// The interval at which a running build asks the reporter whether to continue.
const ASKED_EVERY: Duration = Duration::from_millis(50);

/// Runs a build or a comparison on a runtime with this number of threads.
fn run_async<T>(
    threads: usize,
    work: impl Future<Output = crate::error::Result<T>>,
    reporter: &dyn Reporter,
) -> anyhow::Result<T> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(threads.max(1)).enable_all().build()?;
    runtime.block_on(async {
        let mut work = std::pin::pin!(work);
        loop {
            match tokio::time::timeout(ASKED_EVERY, work.as_mut()).await {
                Ok(done) => return Ok(done?),
                // Returning drops `work`, which stops it.
                Err(_) => reporter.go_on()?,
            }
        }
    })
}

/// A configuration, and the dataset that it describes.
#[derive(Debug, clap::Args)]
struct DatasetArguments {
    /// The configuration: sources, samples, session, partitions, features, kept columns
    config: PathBuf,
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    #[arg(long)]
    out: PathBuf,
    /// Read other files in place of those that a source of the configuration names, such as `log=log.parquet`: a file,
    /// a directory, a pattern or a URL. The other keys of the source do not apply to them
    #[arg(long, value_name = "NAME=PATH", value_parser = parse_source)]
    sources: Vec<(String, String)>,
}

impl DatasetArguments {
    /// Reads the configuration.
    fn config(&self) -> crate::error::Result<Config> {
        let mut config = Config::load(&self.config)?;
        for (name, path) in &self.sources {
            config.set_source(name, path)?;
        }
        Ok(config)
    }
}

/// Parses the name and the path of a source.
fn parse_source(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.to_owned(), path.to_owned())),
        _ => Err("write the name of a source and a path, as `log=log.parquet`".to_owned()),
    }
}

/// How files of a dataset are written again.
#[derive(Debug, Clone, Copy, clap::Args)]
struct RewriteArguments {
    /// Number of threads that decode and encode row groups, which take 250 MiB of memory each [default: all that the
    /// machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl RewriteArguments {
    fn options(self) -> RewriteOptions {
        RewriteOptions::new(self.threads.map_or_else(available_threads, usize::from))
    }
}

/// The memory, disk space and threads that the engine may use.
#[derive(Debug, clap::Args)]
struct EngineArguments {
    /// Memory for sorts and joins (they spill to disk beyond it), open sessions, vocabularies, and row groups that are
    /// verified
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
            cluster: None,
        }
    }
}
