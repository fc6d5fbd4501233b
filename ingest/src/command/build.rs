//! `onefold-ingest build` and `append`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::build::BuildSummary;
use crate::config::Config;
use crate::pipeline::{BuildOptions, Groups};
use crate::{build, popularity, profile};
use clap::ValueEnum;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_datasets::{Commit, Layout, MOST_BUCKETS, Order, PartitionFilter, WORK};
use onefold_storage::commit::{check_output, write_atomically};
use onefold_terminal::Printer;

use super::statistics::table;
use super::{DatasetArguments, EngineArguments, run_async};
use crate::remote::Cluster;

/// The arguments that `build` and `append` share.
#[derive(Debug, clap::Args)]
struct Common {
    #[command(flatten)]
    dataset: DatasetArguments,
    /// Which features are deduplicated together
    #[arg(long, value_enum, default_value_t = Groups::Given)]
    groups: Groups,
    /// Write a page to this file that shows when each stage of the build worked, and how far stages can be divided
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    how: HowArguments,
}

/// How samples are read and written.
#[derive(Debug, clap::Args)]
pub(super) struct HowArguments {
    /// How lists of ids are stored [default: as in the dataset, or `folded` in a new one]
    #[arg(long, value_enum)]
    layout: Option<LayoutArgument>,
    /// Order of the samples within a partition [default: that of the dataset, or `session` in a new one]
    #[arg(long, value_enum)]
    order: Option<OrderArgument>,
    /// How often jobs read each column, as lines `column,reads`: columns that are read most are stored first
    #[arg(long, value_name = "FILE")]
    popularity: Option<PathBuf>,
    /// Write only these partitions, such as `date=2024-06-01`: conditions =, !=, <, <=, >, >= joined by commas. A value
    /// with a comma or an operator is in quotes, and a quote in it twice: `city="Paris, TX"`
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    partition: PartitionFilter,
    #[command(flatten)]
    engine: EngineArguments,
}

/// The arguments of `build`.
#[derive(Debug, clap::Args)]
pub struct BuildArguments {
    #[command(flatten)]
    common: Common,
    /// Replace the dataset that is at `--out`
    #[arg(id = "commit = overwrite", long = "overwrite")]
    overwrite: bool,
    /// Ranges of buckets with files of their own. Sessions are divided into 64 buckets, or as many as ranges if these are
    /// more, which ranks share when they read [default: `[dataset] buckets`, or a range for every 50 million samples]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_BUCKETS)))]
    buckets: Option<u32>,
}

/// The arguments of `append`.
#[derive(Debug, clap::Args)]
pub struct AppendArguments {
    #[command(flatten)]
    common: Common,
    /// Replace partitions even if they then have fewer samples
    #[arg(id = "commit = replace", long = "replace")]
    replace: bool,
    /// Add late samples to existing partitions, each once, and keep the samples that they have
    #[arg(id = "commit = merge", long = "merge", conflicts_with = "commit = replace")]
    merge: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LayoutArgument {
    /// Every sample with its lists, as other programs expect
    Rows,
    /// In feature groups a list only where it changes, and of a sequence only the ids appended
    Folded,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OrderArgument {
    /// The samples of a session together, in time order; sessions by start
    Session,
    /// Likewise; sessions by a hash of what identifies them, so that any part of a partition is a sample of it
    SessionHash,
    /// By time alone, as logged: the baseline to measure clustering against
    Arrival,
}

/// A function that connects to a cluster, given its work folder.
pub type ConnectCluster<'a> = dyn Fn(&Path) -> anyhow::Result<Arc<dyn Cluster>> + 'a;

/// Runs `build`, on a cluster if one is given.
///
/// # Errors
///
/// The errors of the build.
pub fn run_build(
    arguments: &BuildArguments,
    cluster: Option<&ConnectCluster<'_>>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let commit = if arguments.overwrite { Commit::Overwrite } else { Commit::Create };
    run(&arguments.common, commit, arguments.buckets, cluster, printer)
}

/// Runs `append`, on a cluster if one is given.
///
/// # Errors
///
/// The errors of the build.
pub fn run_append(
    arguments: &AppendArguments,
    cluster: Option<&ConnectCluster<'_>>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let commit = match (arguments.replace, arguments.merge) {
        (true, _) => Commit::Replace,
        (_, true) => Commit::Merge,
        _ => Commit::Append,
    };
    run(&arguments.common, commit, None, cluster, printer)
}

fn run(
    arguments: &Common,
    commit: Commit,
    buckets: Option<u32>,
    cluster: Option<&ConnectCluster<'_>>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let config = arguments.dataset.config()?;
    let mut options =
        BuildOptions { groups: arguments.groups, buckets, ..arguments.how.options(&config, commit)? };
    let mut out = arguments.dataset.out.clone();
    if let Some(connect) = cluster {
        // Executors have other working directories, so a path must be absolute.
        out = onefold_storage::absolute(&out)?;
        options.engine.cluster = Some(connect(&out.join(WORK))?);
    }
    let profile = match &arguments.profile {
        Some(_) if cluster.is_some() => {
            let message = text![option("profile"), " is for builds without a cluster"];
            return Err(Fault::new(Kind::Options, message).into());
        }
        Some(path) => {
            check_output(path)?;
            Some((path, profile::start()))
        }
        None => None,
    };
    let work = build(&config, &out, &options, printer);
    let summary = run_async(options.engine.threads, work, printer)?;
    if let Some((path, profile)) = profile {
        write_atomically(path, profile.page(options.engine.threads).as_bytes())?;
    }
    Ok(printer.summary(&describe(&summary, &arguments.dataset.out, commit), &summary)?)
}

impl HowArguments {
    /// Returns the options of a build. Groups and buckets are those of the configuration.
    pub(super) fn options(&self, config: &Config, commit: Commit) -> anyhow::Result<BuildOptions> {
        Ok(BuildOptions {
            layout: self.layout.map(|layout| match layout {
                LayoutArgument::Rows => Layout::Rows,
                LayoutArgument::Folded => Layout::Folded,
            }),
            order: self.order.map(|order| match order {
                OrderArgument::Session => Order::Session,
                OrderArgument::SessionHash => Order::SessionHash,
                OrderArgument::Arrival => Order::Arrival,
            }),
            column_order: match &self.popularity {
                None => Vec::new(),
                Some(path) => popularity::column_order(path, config)?,
            },
            partitions: self.partition.clone(),
            ..BuildOptions::new(self.engine.options(), commit)
        })
    }
}

/// Returns the statistics of the samples and the warnings about them, as lines.
fn describe_samples(summary: &BuildSummary) -> Vec<String> {
    let statistics = &summary.statistics;
    let mut lines = Vec::new();
    let read = count_of(statistics.samples, "sample");
    lines.push(match (&statistics.first_time, &statistics.last_time) {
        (Some(first), Some(last)) => format!("{read} read, from {first} to {last}"),
        _ => format!("{read} read"),
    });
    lines.extend(table(statistics).into_iter().map(|line| format!("  {line}")));
    lines.extend(summary.warnings.iter().map(|warning| format!("warning: {warning}")));
    lines
}

fn describe(summary: &BuildSummary, out: &Path, commit: Commit) -> String {
    let mut lines = vec![format!(
        "{} {}: {} in {} ({:.2} samples per session)",
        match (commit.keeps_others(), summary.changed) {
            (false, _) => "built",
            (true, true) if commit == Commit::Merge => "merged into",
            (true, true) => "appended to",
            (true, false) if commit == Commit::Merge => "nothing to merge into",
            (true, false) => "nothing to append to",
        },
        out.display(),
        count_of(summary.samples, "sample"),
        count_of(summary.sessions, "session"),
        summary.samples_per_session,
    )];
    lines.push(format!(
        "{}, {}, {} on disk ({:.1} bytes per sample), {} order, {} layout",
        count_of(summary.partitions, "partition"),
        count_of(summary.files, "file"),
        format_bytes(summary.bytes_on_disk),
        summary.bytes_on_disk as f64 / summary.samples as f64,
        match summary.order {
            Order::Session => "session",
            Order::SessionHash => "session hash",
            Order::Arrival => "arrival",
        },
        match summary.layout {
            Layout::Rows => "rows",
            Layout::Folded => "folded",
        },
    ));
    if commit.keeps_others() {
        let samples = count_of(summary.samples_written, "sample");
        lines
            .push(format!("wrote {samples} in {}", count_of(summary.partitions_written as u64, "partition")));
    }
    if let Some(merged) = &summary.merged {
        let earlier =
            if commit == Commit::Merge { "" } else { " to earlier partitions, where their sessions began" };
        lines.push(format!(
            "added {}{earlier}, skipped {} that were there already; rewrote {}",
            count_of(merged.samples_added, "sample"),
            format_count(merged.samples_skipped),
            count_of(merged.ranges_rewritten, "range"),
        ));
    }
    for (source, read) in &summary.table_versions {
        lines.push(format!("table {source}: version {}", read.version));
    }
    lines.push(summary.rows.described());
    if summary.ragged_rows_skipped > 0 {
        let rows = count_of(summary.ragged_rows_skipped, "row");
        lines.push(format!("left out: {rows} of CSV files with fewer or more values than columns"));
    }
    for (partition, samples) in &summary.samples_of_earlier_sessions {
        let samples = count_of(*samples, "sample");
        lines.push(format!(
            "of these, {samples} belong to sessions that started in {partition}: `--merge` into that partition adds them"
        ));
    }
    for (what, count) in summary.skipped.described() {
        lines.push(format!("counted: {} {what}", format_count(count)));
    }
    for (name, ids) in &summary.vocabularies {
        lines.push(format!("vocabulary {name}: {}", count_of(*ids, "id")));
    }
    for group in &summary.groups {
        lines.push(format!("group {}: {} ({})", group.name, group.features.join(", "), group.why));
    }
    if summary.sorted_joins {
        lines.push("joins were sorted, because their keys do not fit into `--memory-limit`".to_owned());
    }
    lines.extend(describe_samples(summary));
    lines.push(format!(
        "{:.1} s, {} samples/s, {} read",
        summary.wall_seconds,
        format_count(summary.samples_per_second as u64),
        format_bytes(summary.source_bytes),
    ));
    lines.join("\n")
}
