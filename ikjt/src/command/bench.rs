//! `onefold-read bench`: measures the rate of a dataset's batches, and the time of each stage.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use crate::batch::{Figures, Statistics};
use crate::reader::{StageFigures, Step};
use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_terminal::Printer;
use serde::Serialize;

use super::cli::Reading;
use super::head::describe_factors;

#[derive(Debug, Serialize)]
struct Bench {
    samples: u64,
    batches: u64,
    batch_size: usize,
    /// The total number of ids over all samples, as if every sample stored its own lists.
    values: u64,
    dedupe_factor: BTreeMap<String, f64>,
    partial_dedupe_factor: BTreeMap<String, f64>,
    groups: Statistics,
    bytes_on_disk: u64,
    #[serde(flatten)]
    stages: StageFigures,
    wall_seconds: f64,
    first_batch_seconds: f64,
    samples_per_second: f64,
    values_per_second: f64,
    threads: usize,
    memory_limit_bytes: u64,
    peak_rss_bytes: Option<u64>,
}

pub(crate) fn bench(reading: &Reading, printer: &Printer) -> anyhow::Result<()> {
    let reader = reading.open()?;
    printer.begin("reading", Some(reader.samples()), "samples");
    let started = Instant::now();
    let (mut samples, mut count) = (0, 0);
    let mut first_batch_seconds = 0.0;
    let mut groups = Statistics::default();
    let mut batches = reader.batches()?;
    while let Some(Step { batch, .. }) = batches.next().transpose()? {
        if count == 0 {
            first_batch_seconds = started.elapsed().as_secs_f64();
        }
        samples += batch.size() as u64;
        count += 1;
        groups.add(&batch);
        printer.advance(batch.size() as u64);
        printer.go_on()?;
    }
    let wall_seconds = started.elapsed().as_secs_f64();
    printer.end();
    let by_group = groups.groups();
    let values = by_group.values().map(|group| group.figures.sample_values).sum();
    let chosen = reader.snapshot().select(&reading.partitions)?;
    let factors = |factor: fn(&Figures) -> f64| {
        by_group.iter().map(|(name, group)| (name.clone(), factor(&group.figures))).collect()
    };
    let bench = Bench {
        samples,
        batches: count,
        batch_size: reading.batch_size()?,
        values,
        dedupe_factor: factors(Figures::dedupe_factor),
        partial_dedupe_factor: factors(Figures::partial_dedupe_factor),
        groups,
        bytes_on_disk: chosen.iter().map(|partition| partition.bytes_on_disk()).sum(),
        stages: batches.stages(),
        wall_seconds,
        first_batch_seconds,
        samples_per_second: samples as f64 / wall_seconds,
        values_per_second: values as f64 / wall_seconds,
        threads: reading.threads(),
        memory_limit_bytes: reading.memory_limit,
        peak_rss_bytes: peak_rss_bytes(),
    };
    Ok(printer.summary(&describe(&bench), &bench)?)
}

fn describe(bench: &Bench) -> String {
    let mut text = format!(
        "{} in {}: {:.2} s, {} samples/s, {} ids/s, {}\n",
        count_of(bench.samples, "sample"),
        count_of(bench.batches, "batch"),
        bench.wall_seconds,
        format_count(bench.samples_per_second as u64),
        format_count(bench.values_per_second as u64),
        count_of(bench.threads as u64, "thread"),
    );
    for (name, group) in bench.groups.groups() {
        let _ = writeln!(
            text,
            "group {name:<12} {:>12} rows for {} samples, {}",
            format_count(group.figures.rows),
            format_count(group.figures.samples),
            describe_factors(&group.figures)
        );
    }
    let _ = writeln!(text, "{}", describe_stages(&bench.stages, bench.wall_seconds * bench.threads as f64));
    let _ = write!(
        text,
        "{} on disk, {} read, {} verified",
        format_bytes(bench.bytes_on_disk),
        format_bytes(bench.stages.bytes_read),
        format_bytes(bench.stages.bytes_verified)
    );
    if let Some(bytes) = bench.peak_rss_bytes {
        let limit = format_bytes(bench.memory_limit_bytes);
        let _ = write!(text, ", peak memory {} (limit of the reader {limit})", format_bytes(bytes));
    }
    text
}

/// Returns the shares of the stages in the threads' time. The rest is waiting.
fn describe_stages(stages: &StageFigures, thread_seconds: f64) -> String {
    let share = |(name, seconds): (&str, f64)| format!("{name} {:.0} %", 100.0 * seconds / thread_seconds);
    format!("threads' time: {}", stages.by_stage().map(share).join(", "))
}
