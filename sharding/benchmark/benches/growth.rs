//! Measures how planning time grows with the numbers of tables and ranks: `cargo bench -p onefold-sharding-benchmark
//! --bench growth`.
//!
//! Prints one line per size. Criterion is not used, because the benchmark measures one plan per size, without
//! warm-up, and the memory that it takes.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use onefold_base::process::peak_rss_bytes;
use onefold_base::units::format_bytes;
use onefold_sharding::{AnalyticCost, Beam, Greedy, Search, TorchrecDefault};
use onefold_sharding_benchmark::{TaskOptions, tasks};

const SIZES: [(usize, u32); 11] = [
    (30, 4),
    (60, 4),
    (120, 8),
    (250, 8),
    (250, 32),
    (500, 32),
    (500, 64),
    (1000, 64),
    (1000, 128),
    (2000, 128),
    (5000, 1024),
];

fn main() {
    let searches: [&dyn Search; 4] = [&Greedy::BySize, &TorchrecDefault, &Beam::Neuroshard, &Beam::Full];
    println!(
        "tables  ranks   {}  peak memory",
        searches.map(|search| format!("{:>16}", search.id())).join("  ")
    );
    for (tables, ranks) in SIZES {
        let options = TaskOptions {
            max_dim: 64,
            memory_bytes: 16 << 30,
            ..TaskOptions::new(tables..=tables, ranks, 1, 1)
        };
        let task = match tasks(&options) {
            Ok(tasks) => tasks.into_iter().next(),
            Err(error) => panic!("{error}"),
        };
        let Some(task) = task else { continue };
        let mut seconds = Vec::new();
        for search in searches {
            let started = Instant::now();
            let plan = search.plan(
                &task.tables.tables,
                &task.topology,
                &AnalyticCost,
                task.tables.global_batch_size,
            );
            seconds.push(started.elapsed().as_secs_f64());
            let valid = plan.and_then(|plan| {
                plan.check(&task.tables.tables, &task.topology, task.tables.global_batch_size)
            });
            if let Err(error) = valid {
                println!("{}: {error}", search.id());
            }
        }
        let columns =
            seconds.iter().map(|seconds| format!("{seconds:>14.4} s")).collect::<Vec<_>>().join("  ");
        println!("{tables:>6} {ranks:>6}   {columns}  {}", format_bytes(peak_rss_bytes().unwrap_or(0)));
    }
}
