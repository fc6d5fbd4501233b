//! `onefold-ingest report`.

use std::path::{Path, PathBuf};

use crate::build;
use crate::config::Config;
use crate::engine::EngineOptions;
use crate::pipeline::BuildOptions;
use anyhow::Context;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::process::available_threads;
use onefold_base::units::{format_count, parse_bytes};
use onefold_datasets::Commit;
use onefold_report::{MIDDLE, Report, ReportOptions, gather, html};
use onefold_storage::commit::{check_output, write_atomically};
use onefold_terminal::Printer;

use super::run_async;

/// The smallest memory limit with which a build of a few sessions runs, in bytes.
const MINIMUM_BUILD_BYTES: u64 = 512 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct ReportArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: Option<PathBuf>,
    /// The number of the snapshot to report on [default: the newest]
    #[arg(long, value_name = "SNAPSHOT", requires = "dataset")]
    at: Option<u64>,
    /// Report on the logs of this configuration, before a dataset is built from them
    #[arg(long, value_name = "CONFIG", conflicts_with = "dataset")]
    from_logs: Option<PathBuf>,
    /// With `--from-logs`: the approximate number of samples to take, in whole sessions
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Write the report as one self-contained page to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Memory for sorting samples into another order
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "256MiB")]
    memory_limit: u64,
    /// The largest number of samples to write in each layout, to measure its size
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    encode_samples: usize,
    /// Directory for these files, which are removed again [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    scratch_directory: Option<PathBuf>,
    /// Threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

/// Measures the dataset, and writes the HTML page if `--html` is given.
pub(crate) fn run(arguments: &ReportArguments, printer: &Printer) -> anyhow::Result<()> {
    let page = arguments.html.as_deref();
    if let Some(path) = page {
        check_output(path)?;
    }
    let threads = arguments.threads.map_or_else(available_threads, usize::from);
    let options = ReportOptions {
        snapshot: arguments.at,
        memory: arguments.memory_limit,
        encode_samples: arguments.encode_samples.max(1),
        scratch: arguments.scratch_directory.clone(),
        ..ReportOptions::new(threads)
    };
    let report = match (&arguments.from_logs, &arguments.dataset) {
        (Some(config), _) => from_logs(config, arguments, &options, printer)?,
        (None, Some(dataset)) => gather(dataset, &options, printer)?,
        (None, None) => {
            let hint = text!["give a dataset, or ", option("from_logs").set_to("dataset.toml")];
            let message = "there is neither a dataset nor logs to report on";
            return Err(Fault::new(Kind::Options, message).hint(hint).into());
        }
    };
    if let Some(path) = page {
        write_atomically(path, html(&report).as_bytes())
            .with_context(|| format!("the report could not be written to `{}`", path.display()))?;
    }
    Ok(printer.summary(&describe(&report, page), &report)?)
}

/// Builds a temporary dataset from whole sessions of the logs, and reports on it.
fn from_logs(
    config: &Path,
    arguments: &ReportArguments,
    options: &ReportOptions,
    printer: &Printer,
) -> anyhow::Result<Report> {
    let config = Config::load(config)?;
    let scratch = match &arguments.scratch_directory {
        Some(directory) => tempfile::tempdir_in(directory)?,
        None => tempfile::tempdir()?,
    };
    // The report takes its name from the configuration's folder.
    let folder = fs_err::canonicalize(&config.path)?;
    let name = folder.parent().and_then(Path::file_name).unwrap_or("logs".as_ref());
    let dataset = scratch.path().join(name);
    let engine = EngineOptions {
        memory_limit: arguments.memory_limit.max(MINIMUM_BUILD_BYTES),
        threads: options.threads,
        spill_directory: arguments.scratch_directory.clone(),
        spill_limit: None,
        cluster: None,
    };
    let build_options = BuildOptions {
        buckets: Some(1),
        about_samples: Some(arguments.samples),
        ..BuildOptions::new(engine, Commit::Create)
    };
    let work = build(&config, &dataset, &build_options, printer);
    let built = run_async(options.threads, work, printer)?;
    let sampled = Some(built.share).filter(|share| *share < 1.0);
    Ok(gather(&dataset, &ReportOptions { sampled, ..options.clone() }, printer)?)
}

fn describe(report: &Report, page: Option<&Path>) -> String {
    let (storage, all) = (&report.storage, &report.all[MIDDLE]);
    let times = |bytes: f64| storage.arrival_bytes_per_sample / bytes;
    let mut text = format!(
        "{}: {} samples in {} sessions ({:.2} samples per session)\n\
         bytes per sample: {:.1} in arrival order, {:.1} clustered ({:.2} times less), {:.1} folded ({:.2} times less)\n",
        report.dataset,
        format_count(report.samples),
        format_count(report.sessions),
        report.samples_per_session.mean,
        storage.arrival_bytes_per_sample,
        storage.rows_bytes_per_sample,
        times(storage.rows_bytes_per_sample),
        storage.folded_bytes_per_sample,
        times(storage.folded_bytes_per_sample),
    );
    let arrival = all.arrival_dedupe_factor;
    text.push_str(&format!(
        "dedupe factor in batches of {}: {}{:.2} clustered, {:.2} with windows\n",
        format_count(all.batch_size as u64),
        arrival.map_or_else(String::new, |factor| format!("{factor:.2} in arrival order, ")),
        all.dedupe_factor,
        all.partial_dedupe_factor,
    ));
    for group in report.groups.iter().filter(|group| group.deduplicated) {
        let batch = &group.figures.batches[MIDDLE];
        text.push_str(&format!(
            "  group {:<16} {:>8.1} ids per sample, d {:.3}, dedupe factor {:.2} ({:.2} predicted, {:.2} with windows)\n",
            group.name,
            group.figures.ids_per_sample,
            group.figures.repeat_probability.unwrap_or(0.0),
            batch.dedupe_factor,
            group.figures.predicted_dedupe_factor,
            batch.partial_dedupe_factor,
        ));
    }
    match page {
        Some(path) => text.push_str(&format!("report in {}, {:.1} s", path.display(), report.wall_seconds)),
        None => text.push_str(&format!("{:.1} s; `--html FILE` writes it as a page", report.wall_seconds)),
    }
    text
}
