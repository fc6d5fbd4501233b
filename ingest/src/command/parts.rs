//! `onefold-ingest write` and `commit`.

use std::path::PathBuf;

use onefold_base::units::{count_of, format_bytes};
use onefold_datasets::{Commit, MOST_BUCKETS, Snapshot};
use onefold_terminal::Printer;
use serde::Serialize;

use super::build::HowArguments;
use super::run_async;
use crate::build::{Part, commit_parts, write_part};
use crate::config::Config;

/// The arguments of `write`.
#[derive(Debug, clap::Args)]
pub(crate) struct WriteArguments {
    /// The configuration, as for `build`
    config: PathBuf,
    /// Read these files, folders or URLs in place of those of the configuration's only source
    input: Vec<String>,
    /// The dataset that the range is written to: a path or a URL, such as `s3://bucket/folder`
    #[arg(long)]
    dataset: PathBuf,
    /// The range of buckets to write, and the number of all ranges, such as `3/16`; they count from 0. Segments of
    /// `shard` by the session's columns are divided likewise
    #[arg(long, value_name = "K/C", value_parser = parse_bucket)]
    bucket: (u32, u32),
    /// The file for what `commit` needs: a path or a URL
    #[arg(long, value_name = "PART")]
    out: PathBuf,
    #[command(flatten)]
    how: HowArguments,
}

/// The arguments of `commit`.
#[derive(Debug, clap::Args)]
pub(crate) struct CommitArguments {
    /// The dataset that the parts were written to: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// The parts, one of each range: files, or folders or URLs of folders that hold nothing else
    #[arg(required = true)]
    parts: Vec<PathBuf>,
    /// Replace an existing dataset
    #[arg(id = "commit = overwrite", long = "overwrite")]
    overwrite: bool,
    /// Add the partitions of the parts to the dataset. An existing partition is replaced unless it would have fewer
    /// samples
    #[arg(id = "commit = append", long = "append", conflicts_with = "commit = overwrite")]
    append: bool,
    /// Like `--append`, but replace partitions even if they then have fewer samples
    #[arg(id = "commit = replace", long = "replace", conflicts_with_all = ["commit = overwrite", "commit = append"])]
    replace: bool,
}

fn parse_bucket(text: &str) -> Result<(u32, u32), String> {
    let parsed =
        text.split_once('/').and_then(|(bucket, all)| Some((bucket.parse().ok()?, all.parse().ok()?)));
    match parsed {
        Some((bucket, all)) if bucket < all && all <= MOST_BUCKETS => Ok((bucket, all)),
        Some((bucket, all)) if bucket >= all => Err(format!(
            "there is no range {bucket} of {all}: they count from 0 to {}",
            u32::saturating_sub(all, 1)
        )),
        Some(_) => Err(format!("a dataset has at most {MOST_BUCKETS} ranges of buckets")),
        None => Err("write a range and the number of ranges, as `3/16`".to_owned()),
    }
}

/// Runs `write`.
pub(crate) fn run_write(arguments: &WriteArguments, printer: &Printer) -> anyhow::Result<()> {
    Part::check_place(&arguments.out)?;
    let mut config = Config::load(&arguments.config)?;
    if !arguments.input.is_empty() {
        config.set_input(&arguments.input)?;
    }
    let options = arguments.how.options(&config, Commit::Append)?;
    let work = write_part(&config, &arguments.dataset, arguments.bucket, &options, printer);
    let part = run_async(options.engine.threads, work, printer)?;
    part.store(&arguments.out)?;
    let sets = part.written.iter().flat_map(|range| &range.files);
    let files = sets.flat_map(|set| &set.files);
    let text = format!(
        "wrote range {} of {}: {} in {}, {} ({}); {} says what to commit\n{}",
        part.range,
        part.buckets.ranges(),
        count_of(part.samples, "sample"),
        count_of(part.written.len() as u64, "partition"),
        count_of(files.clone().count() as u64, "file"),
        format_bytes(files.map(|file| file.bytes_on_disk).sum()),
        arguments.out.display(),
        part.rows.described(),
    );
    Ok(printer.summary(&text, &part)?)
}

/// The result of `commit`.
#[derive(Debug, Serialize)]
struct CommitSummary {
    /// The number of the dataset's newest snapshot.
    snapshot: u64,
    /// Whether this run committed the snapshot; `false` if the dataset already had these samples.
    changed: bool,
    /// The number of samples of the dataset.
    samples: u64,
    /// The number of sessions of these samples.
    sessions: u64,
    /// The number of partitions of the dataset.
    partitions: u64,
    /// The number of partitions that the parts contain.
    partitions_written: usize,
    /// The total size of the data files, in bytes.
    bytes_on_disk: u64,
}

/// Runs `commit`.
pub(crate) fn run_commit(arguments: &CommitArguments, printer: &Printer) -> anyhow::Result<()> {
    let commit = match (arguments.overwrite, arguments.append, arguments.replace) {
        (true, ..) => Commit::Overwrite,
        (_, true, _) => Commit::Append,
        (_, _, true) => Commit::Replace,
        _ => Commit::Create,
    };
    let mut parts = Vec::new();
    for location in &arguments.parts {
        parts.extend(Part::read(location)?);
    }
    let written = commit_parts(&arguments.dataset, parts, commit)?;
    let Snapshot { snapshot, statistics, .. } = &written.snapshot;
    let summary = CommitSummary {
        snapshot: *snapshot,
        changed: written.changed,
        samples: statistics.samples,
        sessions: statistics.sessions,
        partitions: statistics.partitions,
        partitions_written: written.partitions.len(),
        bytes_on_disk: statistics.bytes_on_disk,
    };
    let text = format!(
        "{} {}: snapshot {} has {} in {}, {}",
        if summary.changed { "committed to" } else { "nothing to commit to" },
        arguments.dataset.display(),
        summary.snapshot,
        count_of(summary.samples, "sample"),
        count_of(summary.sessions, "session"),
        format_bytes(summary.bytes_on_disk),
    );
    Ok(printer.summary(&text, &summary)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_from_zero() {
        assert_eq!(parse_bucket("3/16"), Ok((3, 16)));
        assert!(parse_bucket("16/16").unwrap_err().contains("from 0 to 15"));
        assert!(parse_bucket("0/0").unwrap_err().contains("from 0 to 0"));
        assert!(parse_bucket("1/1000000000").unwrap_err().contains("at most"));
        assert!(parse_bucket("3").unwrap_err().contains("as `3/16`"));
    }
}
