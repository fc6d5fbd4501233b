//! Accumulates the steps of one rank, and writes some of them to the timeline.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use fs_err::File;

use super::figures::Work;
use super::timeline::{self, TracedStep};
use super::{RankFigures, RankTimes, Recorder};
use crate::Result;
use crate::distributed::Collectives;
use crate::embedding::SentBytes;

/// The steps that a job with several ranks traces by default.
const TRACED: RangeInclusive<u64> = 10..=20;

/// Watches the steps of this rank.
#[derive(Debug)]
pub(crate) struct Watch {
    rank: u32,
    ranks: u32,
    directory: PathBuf,
    traced: Option<RangeInclusive<u64>>,
    /// The timeline file, opened at the first traced step, so that a resumed run without traced steps keeps the
    /// existing file.
    file: Option<File>,
    /// The steps since the last window.
    window: Work,
    total: Work,
}

impl Watch {
    /// Watches a rank of the run in `run`, and traces the steps `traced`.
    pub(crate) fn new(
        run: &Path,
        traced: Option<RangeInclusive<u64>>,
        collectives: &dyn Collectives,
    ) -> Self {
        let (rank, ranks) = (collectives.rank(), collectives.size());
        Self {
            rank,
            ranks,
            directory: run.join(timeline::DIRECTORY),
            traced: traced.or((ranks > 1).then_some(TRACED)),
            file: None,
            window: Work::default(),
            total: Work::default(),
        }
    }

    /// Ends `step`, in which this rank sent `sent` bytes.
    pub(crate) fn end_step(&mut self, step: u64, recorder: &Recorder, sent: SentBytes) -> Result<()> {
        let Some(recorded) = recorder.end() else { return Ok(()) };
        let times = recorded.times();
        self.window.add(times, sent);
        self.total.add(times, sent);
        if !self.traced.as_ref().is_some_and(|traced| traced.contains(&step)) {
            return Ok(());
        }
        let line = TracedStep {
            step,
            rank: self.rank,
            ranks: self.ranks,
            began_micros: recorded.began_micros,
            length_micros: recorded.length.as_micros() as u64,
            sent_bytes: sent,
            spans: recorded.spans(),
        };
        if self.file.is_none() {
            self.file = Some(timeline::create(&self.directory, self.rank, self.ranks)?);
        }
        self.file.as_mut().map_or(Ok(()), |file| line.write(file))
    }

    /// Returns the average step of all ranks since the last call, or `None` for one rank. Every rank must call
    /// it.
    pub(crate) fn end_window(&mut self, collectives: &dyn Collectives) -> Result<Option<RankFigures>> {
        std::mem::take(&mut self.window).per_step(collectives)
    }

    /// Returns the times of all ranks in all steps so far, or `None` for one rank. Every rank must call it.
    pub(crate) fn totals(&self, collectives: &dyn Collectives) -> Result<Option<RankTimes>> {
        self.total.totals(collectives)
    }
}
