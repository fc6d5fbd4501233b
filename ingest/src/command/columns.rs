//! `onefold-ingest add-features` and `relabel`.

use std::path::{Path, PathBuf};

use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_datasets::PartitionFilter;
use onefold_terminal::Printer;

use super::build::{load_config, parse_source};
use super::{EngineArguments, run_async};
use crate::{ColumnsOptions, ColumnsSummary, LabelChanges, add_features, relabel};

/// The arguments that `add-features` and `relabel` share.
#[derive(Debug, clap::Args)]
struct Common {
    /// The configuration of the dataset
    config: PathBuf,
    /// The dataset: a path or a URL, as `s3://bucket/folder`
    #[arg(long)]
    out: PathBuf,
    /// Read other files in place of those that a source of the configuration names, as `log=log.parquet`: a file, a
    /// directory, a pattern or a URL, and no other key of the source
    #[arg(long, value_name = "NAME=PATH", value_parser = parse_source)]
    sources: Vec<(String, String)>,
    /// Write columns of these partitions alone, as `date=2024-06-01` or `city="Paris, TX"`
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    partition: PartitionFilter,
}

#[derive(Debug, clap::Args)]
pub(crate) struct AddFeaturesArguments {
    #[command(flatten)]
    common: Common,
    /// Samples of the dataset may be missing in the logs: they get no ids, and 0 of dense features
    #[arg(long)]
    allow_missing: bool,
    #[command(flatten)]
    engine: EngineArguments,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RelabelArguments {
    #[command(flatten)]
    common: Common,
    /// Samples of the dataset may be missing in the logs: they keep their labels
    #[arg(long)]
    allow_missing: bool,
    #[command(flatten)]
    engine: EngineArguments,
}

impl Common {
    fn options(&self, engine: &EngineArguments, allow_missing: bool) -> ColumnsOptions {
        ColumnsOptions { engine: engine.options(), partitions: self.partition.clone(), allow_missing }
    }
}

/// Adds features to samples that lack them.
pub(crate) fn run_add_features(arguments: &AddFeaturesArguments, printer: &Printer) -> anyhow::Result<()> {
    let AddFeaturesArguments { common, allow_missing, engine } = arguments;
    let config = load_config(&common.config, &common.sources)?;
    let options = common.options(engine, *allow_missing);
    let work = add_features(&config, &common.out, &options, printer);
    let summary = run_async(options.engine.threads, work, printer)?;
    Ok(printer.summary(&describe(&summary, &common.out), &summary)?)
}

/// Recomputes labels, and writes the changed ones.
pub(crate) fn run_relabel(arguments: &RelabelArguments, printer: &Printer) -> anyhow::Result<()> {
    let RelabelArguments { common, allow_missing, engine } = arguments;
    let config = load_config(&common.config, &common.sources)?;
    let options = common.options(engine, *allow_missing);
    let work = relabel(&config, &common.out, &options, printer);
    let summary = run_async(options.engine.threads, work, printer)?;
    Ok(printer.summary(&describe(&summary, &common.out), &summary)?)
}

fn describe(summary: &ColumnsSummary, out: &Path) -> String {
    let samples = count_of(summary.samples, "sample");
    let columns = format!("`{}`", summary.columns.join("`, `"));
    let out = out.display();
    let mut lines = Vec::new();
    lines.push(match (&summary.labels, summary.changed) {
        (None, true) => format!("added {columns} to {samples} of {out}: snapshot {}", summary.snapshot),
        (None, false) => format!("nothing to add to {out}: no sample lacks a feature"),
        (Some(_), true) => format!("computed {columns} of {samples} of {out}: snapshot {}", summary.snapshot),
        (Some(_), false) => format!("computed {columns} of {samples} of {out}: nothing changed"),
    });
    lines.extend(summary.labels.iter().flat_map(describe_labels));
    if summary.samples_missing > 0 {
        lines.push(format!("{} are not in the logs", count_of(summary.samples_missing, "sample")));
    }
    if summary.samples_ignored > 0 {
        let ignored = count_of(summary.samples_ignored, "sample");
        lines.push(format!("ignored {ignored} of the logs that are none of these"));
    }
    if summary.changed {
        lines.push(format!(
            "wrote {} of {} in {}",
            count_of(summary.files_written as u64, "file"),
            format_bytes(summary.bytes_written),
            count_of(summary.partitions_written as u64, "partition"),
        ));
    }
    let speed = format_count(summary.samples_per_second as u64);
    lines.push(format!("{:.1} s, {speed} samples/s", summary.wall_seconds));
    lines.join("\n")
}

fn describe_labels(changes: &LabelChanges) -> Vec<String> {
    let mut lines: Vec<String> = changes
        .labels_changed
        .iter()
        .map(|(name, changed)| format!("{name}: {} changed", count_of(*changed, "value")))
        .collect();
    for (day, samples) in &changes.samples_changed_by_day {
        let samples = count_of(*samples, "sample");
        lines.push(format!("  {samples} by an event {} later", count_of(day.unsigned_abs(), "day")));
    }
    if changes.samples_changed_without_event > 0 {
        lines.push(format!(
            "  {} without an event",
            count_of(changes.samples_changed_without_event, "sample")
        ));
    }
    lines
}
