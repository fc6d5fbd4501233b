//! How far a service scales, by simulation: `cargo bench -p onefold-serve --bench scaling`.
//!
//! The master's decisions are the real ones; times are measured ones, and every one of them is an option. The same
//! options give the same figures. See `--help`, as in `cargo bench -p onefold-serve --bench scaling -- --trainers 8`.
#![expect(clippy::print_stdout, reason = "what was found")]

use std::path::PathBuf;

use clap::Parser;

use crate::fleet::{Fleet, Found};

mod fleet;
mod picture;

/// Simulate services of more and more workers
#[derive(Debug, Clone, Parser)]
struct Arguments {
    #[command(flatten)]
    service: Service,
    /// Numbers of workers
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256")]
    workers: Vec<usize>,
    /// Samples a second that a trainer of the second table takes
    #[arg(long, default_value_t = 1e6)]
    rate: f64,
    /// Draw what the autoscaler does for a trainer whose speed changes into this file, and simulate nothing else
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
    /// What `cargo bench` says to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is simulated, with the times that were measured.
#[derive(Debug, Clone, clap::Args)]
struct Service {
    /// Trainers, each with a job of its own
    #[arg(long, default_value_t = 64)]
    trainers: usize,
    /// Processor time of the master for a lease, a sign of life or a report, in us: `--bench leases`, 256 workers
    #[arg(long, default_value_t = 50.0)]
    lease_us: f64,
    /// Time of a worker's thread for a sample, in us: 4.6 s for 1.2 M samples of rm1, `measure.py shared`
    #[arg(long, default_value_t = 3.8)]
    sample_us: f64,
    /// Threads of a worker, all of which compute a batch. An assumption: the measurement had two
    #[arg(long, default_value_t = 16)]
    threads: usize,
    /// Of that time, what goes into decoding, by a worker's stages in `status --json`: two workers that compute blocks
    /// which follow each other both decode a row group
    #[arg(long, default_value_t = 0.75)]
    decoding: f64,
    /// Bytes of a sample on the wire: rm1, window, `measure.py speed`
    #[arg(long, default_value_t = 697.0)]
    sample_bytes: f64,
    /// Network card of a worker, in Gbit/s
    #[arg(long, default_value_t = 25.0)]
    worker_gbit: f64,
    /// Network card of a trainer, in Gbit/s
    #[arg(long, default_value_t = 25.0)]
    trainer_gbit: f64,
    /// Time for a message to go from one host to another, in us
    #[arg(long, default_value_t = 50.0)]
    trip_us: f64,
    /// Samples of a batch
    #[arg(long, default_value_t = 2048)]
    batch: u64,
    /// Batches of a row group
    #[arg(long, default_value_t = 16)]
    row_group: u64,
    /// Row groups of a block: `ROW_GROUPS_IN_BLOCK`
    #[arg(long, default_value_t = 4)]
    row_groups: u64,
    /// Blocks of a client that are on their way for every worker: `BLOCKS_OF_WORKER`
    #[arg(long, default_value_t = 2)]
    blocks_of_worker: usize,
    /// The most blocks of a client that are on their way: `MOST_BLOCKS`
    #[arg(long, default_value_t = 16)]
    most_blocks: usize,
    /// By how much the time of a batch differs from the mean, at most, as a share
    #[arg(long, default_value_t = 0.3)]
    spread: f64,
    /// Batches of a block that find room at the client before their turn: with its memory limit of 1 GiB, 16 blocks have
    /// 20 MiB each
    #[arg(long, default_value_t = 14)]
    ready: u64,
    /// Seconds that are counted, after as many that are not
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

fn main() {
    let arguments = Arguments::parse();
    if let Some(file) = &arguments.picture {
        return fs_err::write(file, picture::picture()).expect("the picture is written");
    }
    let Service { trainers, threads, .. } = arguments.service;
    println!(
        "Waiting trainers wait for the master, for a batch to be computed, and for one that is computed to be sent.\n"
    );
    let linear = Fleet::new(&arguments.service, 1, None).run().samples_per_second;
    println!("{trainers} trainers that take what they get; workers of {threads} threads");
    table(&arguments, None, linear);
    println!("\n{trainers} trainers that take {:.2} M samples/s each", arguments.rate / 1e6);
    table(&arguments, Some(arguments.rate), linear);
}

fn table(arguments: &Arguments, rate: Option<f64>, linear: f64) {
    println!(
        "{:>7} {:>12} {:>9} {:>9} {:>12} {:>12} {:>14} {:>7} {:>12}  limited by",
        "workers",
        "M samples/s",
        "of linear",
        "workers",
        "least, most",
        "their cards",
        "trainers' cards",
        "master",
        "waits"
    );
    for &workers in &arguments.workers {
        let found = Fleet::new(&arguments.service, workers, rate).run();
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        println!(
            "{workers:>7} {:>12.1} {:>9} {:>9} {:>12} {:>12} {:>14} {:>7} {:>12}  {}",
            found.samples_per_second / 1e6,
            percent(found.samples_per_second / linear / workers as f64),
            percent(found.workers),
            format!("{}, {}", percent(found.least_worker), percent(found.most_worker)),
            percent(found.worker_cards),
            percent(found.trainer_cards),
            format!("{:.1} %", 100.0 * found.master),
            found.waits.map(percent).join(", "),
            limit(&found, &arguments.service, workers, rate)
        );
    }
}

/// What keeps the service from giving more.
fn limit(found: &Found, service: &Service, workers: usize, rate: Option<f64>) -> &'static str {
    const FULL: f64 = 0.97;
    let asked = rate.unwrap_or(f64::INFINITY) * service.trainers as f64;
    let ahead = service.most_blocks.min(service.blocks_of_worker * workers) * service.trainers;
    let [master, computing, sending] = found.waits;
    if found.samples_per_second >= FULL * asked {
        "trainers"
    } else if found.workers >= FULL {
        "workers"
    } else if found.trainer_cards >= FULL {
        "trainers' cards"
    } else if found.worker_cards >= FULL {
        "workers' cards"
    } else if master > computing.max(sending) {
        "master"
    } else if sending > computing {
        // Trainers that read from one worker share its card, while cards of others rest.
        "shared cards"
    } else if ahead < service.blocks_of_worker * workers {
        "blocks on their way"
    } else {
        "uneven placement"
    }
}
