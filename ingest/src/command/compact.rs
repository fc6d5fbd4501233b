//! `onefold-ingest compact`.

use std::path::PathBuf;

use onefold_base::units::{count_of, format_bytes};
use onefold_datasets::PartitionFilter;
use onefold_datasets::compact::{Compacted, compact};
use onefold_storage::Storage;
use onefold_terminal::Printer;

use super::RewriteArguments;

#[derive(Debug, clap::Args)]
pub(crate) struct CompactArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// Merge files of these partitions only, such as `date=2024-06-01`: conditions joined by commas
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    partition: PartitionFilter,
    #[command(flatten)]
    rewrite: RewriteArguments,
}

/// Merges files of a dataset.
pub(crate) fn run(arguments: &CompactArguments, printer: &Printer) -> anyhow::Result<()> {
    let storage = Storage::open(&arguments.dataset)?;
    let how = arguments.rewrite.options();
    let compacted = compact(&storage, &arguments.partition, &how, printer)?;
    Ok(printer.summary(&describe(&compacted), &compacted)?)
}

fn describe(compacted: &Compacted) -> String {
    let size = |files: u64, row_groups: u64, bytes: u64| {
        let (files, row_groups) = (count_of(files, "file"), count_of(row_groups, "row group"));
        format!("{files}, {row_groups}, {}", format_bytes(bytes))
    };
    let Compacted { files_before, row_groups_before, bytes_on_disk_before, .. } = *compacted;
    let before = size(files_before, row_groups_before, bytes_on_disk_before);
    let partitions = count_of(compacted.partitions as u64, "partition");
    if !compacted.changed {
        return format!("nothing to gain in {partitions} ({before})");
    }
    let now = size(compacted.files, compacted.row_groups, compacted.bytes_on_disk);
    format!(
        "merged {} in {} of {partitions}: {before} became {now}\ncommitted snapshot {}\n{:.1} s",
        count_of(compacted.samples_rewritten, "sample"),
        count_of(compacted.ranges_rewritten, "range"),
        compacted.snapshot,
        compacted.wall_seconds,
    )
}
