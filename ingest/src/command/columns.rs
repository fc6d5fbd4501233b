//! `onefold-ingest add-features` and `relabel`.

use std::path::Path;

use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_datasets::PartitionFilter;
use onefold_terminal::Printer;

use super::{DatasetArguments, EngineArguments, run_async};
use crate::recompute::{ColumnsOptions, ColumnsSummary, LabelChanges, Task as ColumnsTask, compute_columns};

/// The arguments of `add-features` and `relabel`.
#[derive(Debug, clap::Args)]
pub(crate) struct ColumnsArguments {
    #[command(flatten)]
    dataset: DatasetArguments,
    /// Write columns of these partitions only, such as `date=2024-06-01` or `city="Paris, TX"`
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    partition: PartitionFilter,
    /// Samples of the dataset may be missing in the logs: added features have no ids, or 0, in them, and labels stay as
    /// they are
    #[arg(long)]
    allow_missing: bool,
    #[command(flatten)]
    engine: EngineArguments,
}

/// Adds features to samples that lack them, or recomputes labels and writes the changed ones.
pub(crate) fn run(arguments: &ColumnsArguments, task: ColumnsTask, printer: &Printer) -> anyhow::Result<()> {
    let ColumnsArguments { dataset, partition, allow_missing, engine } = arguments;
    let config = dataset.config()?;
    let options = ColumnsOptions {
        engine: engine.options(),
        partitions: partition.clone(),
        allow_missing: *allow_missing,
    };
    let work = compute_columns(task, &config, &dataset.out, &options, printer);
    let summary = run_async(options.engine.threads, work, printer)?;
    Ok(printer.summary(&describe(&summary, &dataset.out), &summary)?)
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
        lines.push(format!("ignored {ignored} of the logs that match none of these"));
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
