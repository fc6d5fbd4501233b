//! The command `onefold-train trace`.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use onefold_base::units::count_of;
use onefold_storage::commit::{check_output, write_atomically};
use onefold_terminal::Printer;
use onefold_trainer::trace::{RankTimes, Timeline};
use serde::Serialize;

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("formats").args(["html", "chrome"]).required(true).multiple(true))]
pub(crate) struct TraceArguments {
    /// The directory of the run
    run: PathBuf,
    /// Write an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write JSON for Perfetto (ui.perfetto.dev) and chrome://tracing
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
}

/// The output of the command with `--json`.
#[derive(Debug, Serialize)]
struct TraceSummary<'a> {
    ranks: u32,
    first_step: u64,
    last_step: u64,
    /// The mean times of a step, in milliseconds.
    #[serde(flatten)]
    times: RankTimes,
    #[serde(skip_serializing_if = "Option::is_none")]
    html: Option<&'a Path>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chrome: Option<&'a Path>,
}

/// Parses a range of steps such as `10..20`, which includes both ends.
pub(crate) fn parse_steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let parsed = text
        .split_once("..")
        .and_then(|(first, last)| Some(first.trim().parse().ok()?..=last.trim().parse().ok()?));
    let valid = parsed.filter(|steps| *steps.start() > 0 && !steps.is_empty());
    valid.ok_or_else(|| {
        format!("`{text}` is no range of steps\n  hint: write the first and the last step, counted from 1, as `10..20`")
    })
}

pub(crate) fn run(arguments: &TraceArguments, printer: &Printer) -> anyhow::Result<()> {
    let (html, chrome) = (arguments.html.as_deref(), arguments.chrome.as_deref());
    [html, chrome].into_iter().flatten().try_for_each(check_output)?;
    let timeline = Timeline::load(&arguments.run)?;
    if let Some(path) = html {
        write_atomically(path, timeline.html(&arguments.run.display().to_string()).as_bytes())?;
    }
    if let Some(path) = chrome {
        write_atomically(path, timeline.chrome().as_bytes())?;
    }
    let (first_step, last_step) = timeline.range();
    let times = timeline.times();
    let files: Vec<_> = [html, chrome].into_iter().flatten().map(|path| path.display().to_string()).collect();
    let text = format!(
        "steps {first_step} to {last_step} of {}, on average: {}\nwritten to {}",
        count_of(timeline.ranks.into(), "rank"),
        describe(&times, 1),
        files.join(" and ")
    );
    let summary = TraceSummary { ranks: timeline.ranks, first_step, last_step, times, html, chrome };
    Ok(printer.summary(&text, &summary)?)
}

/// Describes the times of `steps` steps, as milliseconds per step.
pub(crate) fn describe(times: &RankTimes, steps: u64) -> String {
    let part = |(name, times): (&str, onefold_trainer::trace::OverRanks)| {
        let [mean, max] = [times.mean, times.max].map(|time| time / steps.max(1) as f64);
        format!("{name} {mean:.1} ms (rank {}: {max:.1})", times.max_rank)
    };
    let parts = [
        ("compute", times.compute_ms),
        ("exchange", times.exchange_ms),
        ("all-reduce", times.all_reduce_ms),
        ("input", times.waiting_ms),
    ];
    parts.map(part).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_steps_have_both_ends() {
        assert_eq!(parse_steps("10..20"), Ok(10..=20));
        assert_eq!(parse_steps("3..3"), Ok(3..=3));
        for wrong in ["", "10", "10..", "..20", "0..4", "5..4", "1..=4", "a..b"] {
            let error = parse_steps(wrong).unwrap_err();
            assert!(error.starts_with(&format!("`{wrong}` is no range of steps\n  hint: ")), "{error}");
        }
    }
}
