//! The command `onefold-train-tools bench`.

use std::fmt::Write as _;
use std::path::PathBuf;

use onefold_base::process::available_threads;
use onefold_base::units::{format_bytes, format_count};
use onefold_ikjt::Dedupe;
use onefold_raw_logs::generate::Workload;
use onefold_terminal::Printer;
use onefold_trainer::Precision;
use onefold_trainer::bench::{BenchOptions, BenchReport, bench};
use onefold_trainer::command::DeviceOption;

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArguments {
    /// The workload whose reference model is trained
    #[arg(long, value_enum)]
    workload: Workload,
    /// Directory of a dataset of that workload
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// Kinds of deduplication; several are measured in turns of two steps, of which the second counts
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["off", "exact", "window"])]
    dedupe: Vec<Dedupe>,
    /// Precision of the dense part's matrix products
    #[arg(long, value_enum, default_value = "fp32")]
    precision: Precision,
    #[command(flatten)]
    device: DeviceOption,
    /// Threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Batches of 2,048 samples, read beforehand
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batches: u16,
    /// Steps of each variant that count
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

pub(crate) fn run(arguments: &BenchArguments, printer: &Printer) -> anyhow::Result<()> {
    let options = BenchOptions {
        workload: arguments.workload,
        dedupe: arguments.dedupe.clone(),
        threads: arguments.threads.map_or_else(available_threads, usize::from),
        precision: arguments.precision,
        device: arguments.device.open()?,
        batches: usize::from(arguments.batches),
        rounds: usize::from(arguments.rounds),
    };
    let report = bench(&arguments.data, &options, printer)?;
    Ok(printer.summary(&describe(&report), &report)?)
}

fn describe(report: &BenchReport) -> String {
    let figure = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2} x"));
    let mut text = format!("{:<34}  step ms  samples/s  speedup    bound\n", "");
    for variant in &report.variants {
        let _ = writeln!(
            text,
            "{:<34} {:>8.1}  {:>9}  {:>7}  {:>7}",
            variant.name,
            variant.step_ms,
            format_count(variant.samples_per_second as u64),
            figure(variant.speedup),
            figure(variant.bound),
        );
    }
    for variant in &report.variants {
        let stages = variant.stages_ms.iter().map(|(name, time)| format!("{name} {time:.1}"));
        let _ = writeln!(text, "{}, ms: {}", variant.name, stages.collect::<Vec<_>>().join(", "));
    }
    let memory =
        report.peak_rss_bytes.map_or_else(String::new, |b| format!(", peak memory {}", format_bytes(b)));
    let _ = writeln!(
        text,
        "{} steps each, {}, batches of {}, {} threads{}{memory}",
        report.rounds,
        report.kernels,
        report.batch_size,
        report.threads,
        report.device.as_ref().map_or_else(String::new, |device| format!(", {device}")),
    );
    text
}
