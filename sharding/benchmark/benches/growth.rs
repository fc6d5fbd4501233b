//! How planning time grows with tables and ranks: `cargo bench -p onefold-sharding-benchmark --bench growth -- growth.svg`.
//!
//! Prints a line per size, and draws them if a file is named. Criterion has no part in it: what is of interest is one
//! plan of each size, cold, with the memory that it took.
#![allow(clippy::print_stdout)]

use std::fmt::Write;
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

struct Measured {
    tables: usize,
    ranks: u32,
    /// By search.
    seconds: Vec<f64>,
}

fn main() {
    // Cargo's own arguments begin with dashes.
    let out = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let searches: [&dyn Search; 4] = [&Greedy::BySize, &TorchrecDefault, &Beam::Neuroshard, &Beam::Full];
    println!(
        "tables  ranks   {}  peak memory",
        searches.map(|search| format!("{:>16}", search.id())).join("  ")
    );
    let mut all = Vec::new();
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
        all.push(Measured { tables, ranks, seconds });
    }
    if let Some(out) = out {
        let names = searches.map(|search| search.id().to_owned());
        if let Err(error) = fs_err::write(&out, drawn(&all, &names)) {
            panic!("{error}");
        }
    }
}

/// Seconds over tables × ranks, both logarithmic.
fn drawn(all: &[Measured], names: &[String]) -> String {
    const COLOURS: [&str; 4] = ["#93a4b3", "#e0a100", "#2f6db3", "#c8442f"];
    let size = |measured: &Measured| (measured.tables as f64 * f64::from(measured.ranks)).log10();
    let x = |measured: &Measured| 60.0 + (size(measured) - 2.0) / 4.8 * 560.0;
    let y = |seconds: f64| 330.0 - (seconds.max(1e-6).log10() + 5.0) / 6.5 * 300.0;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 820 380\" font-family=\"system-ui,sans-serif\" font-size=\"12\"><rect width=\"820\" height=\"380\" fill=\"#fff\"/>",
    );
    for power in -5..=1 {
        let at = y(10f64.powi(power));
        let label = match power {
            0 => "1 s".to_owned(),
            1 => "10 s".to_owned(),
            power => format!("10^{power} s"),
        };
        let _ = write!(
            svg,
            "<line x1=\"60\" x2=\"620\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e3e8ee\"/><text x=\"54\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#5b6b7a\">{label}</text>",
            at + 4.0
        );
    }
    for measured in all {
        let at = x(measured);
        let _ = write!(
            svg,
            "<text x=\"{at:.1}\" y=\"350\" fill=\"#5b6b7a\" text-anchor=\"end\" transform=\"rotate(-35 {at:.1} 346)\">{}×{}</text>",
            measured.tables, measured.ranks
        );
    }
    for (i, (name, colour)) in names.iter().zip(COLOURS).enumerate() {
        let points: Vec<String> =
            all.iter().map(|measured| format!("{:.1},{:.1}", x(measured), y(measured.seconds[i]))).collect();
        let _ = write!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>",
            points.join(" ")
        );
        for measured in all {
            let _ = write!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x(measured),
                y(measured.seconds[i])
            );
        }
        let last = all.last().map_or(0.0, |measured| y(measured.seconds[i]));
        let _ = write!(svg, "<text x=\"632\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>", last + 4.0);
    }
    svg.push_str("<text x=\"340\" y=\"20\" text-anchor=\"middle\" fill=\"#1b2733\">seconds to plan, by tables × ranks</text></svg>\n");
    svg
}
