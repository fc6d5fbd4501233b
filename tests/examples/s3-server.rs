//! Runs a command while an S3 server runs on the loopback interface, with the latency of an object store. The
//! command's environment names the server; its datasets are at `s3://data/…`. At the end the numbers of requests are
//! printed.
//!
//! ```sh
//! cargo build --release --workspace --bins --example s3-server
//! target/release/examples/s3-server --latency-ms 20 -- tests/measure_s3.py --help
//! ```

use std::io::Write;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use onefold_tests::S3Server;

#[derive(Parser)]
struct Options {
    /// Milliseconds that every request takes longer.
    #[arg(long, default_value_t = 0)]
    latency_ms: u64,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<String>,
}

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    let server = S3Server::start();
    server.delay(Duration::from_millis(options.latency_ms));
    let (program, arguments) = options.command.split_first().context("no command is given")?;
    let mut command = Command::new(program);
    command.args(arguments).envs(server.environment());
    let status = command.status().with_context(|| format!("`{program}` cannot be started"))?;
    writeln!(std::io::stderr(), "{:?}", server.counters())?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
