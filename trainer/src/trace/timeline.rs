//! The files of a run's timeline, with one line per traced step of a rank.

use std::io::Write;
use std::path::{Path, PathBuf};

use fs_err::File;
use serde::{Deserialize, Serialize};

use super::{Activity, RankTimes};
use crate::embedding::SentBytes;
use crate::run::Run;
use crate::{Error, Result};

/// The folder of the timeline in a run.
pub(super) const DIRECTORY: &str = "timeline";
/// The upper bound of times in a file, so that sums of a few do not overflow and doubles are exact. It is in
/// the year 2112.
const LATEST: u64 = 1 << 52;

/// An uninterrupted activity of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// The activity.
    pub name: Activity,
    /// The start in microseconds after the beginning of the step.
    pub start_micros: u64,
    /// The end in microseconds after the beginning of the step, exclusive.
    pub end_micros: u64,
}

/// A step of a rank: a line of `timeline/rank-00000.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedStep {
    /// The step, counted from 1.
    pub step: u64,
    /// The rank.
    pub rank: u32,
    /// The number of ranks of the job.
    pub ranks: u32,
    /// The beginning in microseconds since 1970, by the clock of the rank's machine.
    pub began_micros: u64,
    /// The duration in microseconds.
    pub length_micros: u64,
    /// The bytes that the rank sent to other ranks in the step.
    pub sent_bytes: SentBytes,
    /// The activities, in ascending order, without gaps of a microsecond or more.
    pub spans: Vec<Span>,
}

/// The traced steps of a run's ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// The number of ranks of the job.
    pub ranks: u32,
    /// The steps, at least one, by step and then by rank. After a job was killed, steps of some ranks may be
    /// missing.
    pub steps: Vec<TracedStep>,
}

/// The average step of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OfRank {
    /// The number of steps.
    pub steps: u64,
    /// The milliseconds by kind, in the order of [`Kind::ALL`](super::Kind::ALL).
    pub times_ms: [f64; 4],
    /// The bytes that the rank sent to other ranks.
    pub sent_bytes: SentBytes,
}

/// Returns the name of a rank's file in the timeline's folder.
fn file_name(rank: u32) -> String {
    format!("rank-{rank:05}.jsonl")
}

/// Returns the rank of a file.
fn rank_of(name: &str) -> Option<u32> {
    name.strip_prefix("rank-")?.strip_suffix(".jsonl")?.parse().ok()
}

/// Returns the ranks that have a file in the timeline's folder.
fn ranks_in(directory: &Path) -> Result<Vec<u32>> {
    if !directory.is_dir() {
        return Ok(Vec::new());
    }
    let mut ranks = Vec::new();
    for entry in fs_err::read_dir(directory)? {
        ranks.extend(entry?.file_name().to_str().and_then(rank_of));
    }
    ranks.sort_unstable();
    Ok(ranks)
}

/// Creates the file of a rank; rank 0 removes files of ranks that only an earlier job had.
pub(super) fn create(directory: &Path, rank: u32, ranks: u32) -> Result<File> {
    // Another rank may create the folder first. The run's own folder is never created here: it is missing if
    // rank 0 has failed.
    match fs_err::create_dir(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => {}
    }
    for other in ranks_in(directory)?.into_iter().filter(|other| rank == 0 && *other >= ranks) {
        fs_err::remove_file(directory.join(file_name(other)))?;
    }
    Ok(File::create(directory.join(file_name(rank)))?)
}

impl TracedStep {
    /// Writes the step as a line.
    pub(super) fn write(&self, out: &mut impl Write) -> Result<()> {
        let mut line = serde_json::to_vec(self).map_err(std::io::Error::from)?;
        line.push(b'\n');
        Ok(out.write_all(&line)?)
    }

    /// Parses a line of the file of `rank`; the error describes the damage.
    fn parse(line: &str, rank: u32) -> Result<Self, String> {
        let step: Self = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if step.rank != rank {
            return Err(format!("it is of rank {}", step.rank));
        }
        if step.rank >= step.ranks {
            return Err(format!("there is no rank {rank} among {} ranks", step.ranks));
        }
        if step.began_micros >= LATEST || step.length_micros >= LATEST {
            return Err("its time is out of range".to_owned());
        }
        let mut end = 0;
        for span in &step.spans {
            if span.start_micros < end || span.end_micros < span.start_micros {
                return Err(format!("the span that starts at {} µs overlaps another", span.start_micros));
            }
            end = span.end_micros;
        }
        if end > step.length_micros {
            return Err(format!("a span ends at {end} µs, and the step at {} µs", step.length_micros));
        }
        Ok(step)
    }

    /// Returns the end in microseconds since 1970.
    pub(super) fn ended_micros(&self) -> u64 {
        self.began_micros + self.length_micros
    }

    /// Returns the milliseconds by kind, in the order of [`Kind::ALL`](super::Kind::ALL).
    pub fn times_ms(&self) -> [f64; 4] {
        let mut times = [0.0; 4];
        for span in &self.spans {
            times[span.name.kind() as usize] += (span.end_micros - span.start_micros) as f64 / 1e3;
        }
        times
    }
}

impl Timeline {
    /// Reads the timeline of the run in `run`.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if there is no run, it has no timeline, or a line is damaged.
    pub fn load(run: &Path) -> Result<Self> {
        let directory = run.join(DIRECTORY);
        let files = ranks_in(&directory)?;
        let mut steps = Vec::new();
        for rank in &files {
            steps.extend(read(&directory.join(file_name(*rank)), *rank)?);
        }
        let Some(first) = steps.first() else {
            Run::load(run)?;
            return Err(Error::run(
                run,
                "the run has no timeline",
                "train with `onefold-train run --trace-steps FIRST..LAST`; without it steps 10 to 20 are \
                 traced, on several ranks",
            ));
        };
        let ranks = first.ranks;
        if let Some(other) = steps.iter().find(|step| step.ranks != ranks) {
            return Err(Error::run(
                directory,
                format!(
                    "`{}` is of a job of {ranks} ranks, and `{}` of one of {}",
                    file_name(first.rank),
                    file_name(other.rank),
                    other.ranks
                ),
                "a resumed run ended before all ranks had traced a step: remove the older files, or train on",
            ));
        }
        steps.sort_by_key(|step| (step.step, step.rank));
        Ok(Self { ranks, steps })
    }

    /// Returns the average step of every rank, by rank.
    pub fn by_rank(&self) -> Vec<OfRank> {
        let of_rank = |rank: u32| {
            let steps: Vec<_> = self.steps.iter().filter(|step| step.rank == rank).collect();
            let count = steps.len().max(1) as f64;
            let times: Vec<[f64; 4]> = steps.iter().map(|step| step.times_ms()).collect();
            let sent = steps.iter().fold(SentBytes::default(), |sum, step| sum + step.sent_bytes);
            OfRank {
                steps: steps.len() as u64,
                times_ms: std::array::from_fn(|kind| {
                    times.iter().map(|times| times[kind]).sum::<f64>() / count
                }),
                sent_bytes: sent.named().map(|(_, bytes)| (bytes as f64 / count).round() as u64).into(),
            }
        };
        (0..self.ranks).map(of_rank).collect()
    }

    /// Returns the times of an average step, over the ranks that have steps.
    pub fn times(&self) -> RankTimes {
        let ranks = self.by_rank();
        RankTimes::new(
            (0..)
                .zip(&ranks)
                .filter(|(_, of_rank)| of_rank.steps > 0)
                .map(|(rank, of_rank)| (rank, of_rank.times_ms)),
        )
    }

    /// Returns the first and the last step.
    pub fn range(&self) -> (u64, u64) {
        let step = |step: Option<&TracedStep>| step.map_or(0, |step| step.step);
        (step(self.steps.first()), step(self.steps.last()))
    }

    /// Returns the steps, each with its ranks in ascending order.
    pub(super) fn by_step(&self) -> impl Iterator<Item = &[TracedStep]> {
        self.steps.chunk_by(|a, b| a.step == b.step)
    }
}

/// Reads the lines of a rank's file.
fn read(path: &PathBuf, rank: u32) -> Result<Vec<TracedStep>> {
    let text = fs_err::read_to_string(path)?;
    let mut steps: Vec<TracedStep> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let step = TracedStep::parse(line, rank).and_then(|step| match steps.last() {
            Some(last) if last.step >= step.step => Err(format!("step {} comes twice", step.step)),
            _ => Ok(step),
        });
        steps.push(step.map_err(|message| {
            Error::run(
                path,
                format!("line {number} is damaged: {message}"),
                "remove the line, or trace steps again with `onefold-train run --trace-steps FIRST..LAST`",
            )
        })?);
    }
    Ok(steps)
}
