//! What a worker has learned of its samples, as rows behind its records: their number, digest and statistics.
//!
//! The totals come in parts of a few KiB. A part has the place of the record in its row; the time is the number of the
//! part, the high half of the digest that of the worker, and [`TOTALS`] is set. A sort by [`TOTALS`] first puts all of
//! them before the first record, so whoever reads sorted records knows the totals of all samples before.
//!
//! A part is a piece of the summary (JSON), or counts of ids: the number of the vocabulary, then pairs of an id and how
//! often it occurred. Counts can be read in any order, a worker's pieces of the summary in theirs.

use std::collections::BTreeMap;
use std::iter;

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::UInt64Type;
use onefold_datasets::{CountBudget, VocabularyCounter};

use super::bug;
use super::convert::column;
use super::encode::SampleTotals;
use super::fold::{DIGEST, RECORD};
use super::statistics::StatisticsOptions;
use crate::sessionize::TOTALS;
use crate::{Error, Result};

/// The first byte of a part.
const SUMMARY: u8 = 0;
const COUNTS: u8 = 1;
/// The most bytes of a part, about: as many as a long record has.
const PART_BYTES: usize = 4096;
/// The bytes of an id and its count.
const PAIR: usize = 16;

impl SampleTotals {
    /// The parts.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the totals cannot be written down.
    pub(super) fn into_parts(mut self) -> Result<impl Iterator<Item = Vec<u8>> + Send> {
        let counters = std::mem::take(&mut self.statistics.counters);
        let summary = serde_json::to_vec(&self).map_err(|error| malformed(&error))?;
        let pieces: Vec<Vec<u8>> =
            summary.chunks(PART_BYTES).map(|piece| [&[SUMMARY], piece].concat()).collect();
        let counts = (0_u32..).zip(counters).flat_map(|(vocabulary, counter)| {
            let pairs: Vec<(i64, u64)> = counter.counts().collect();
            drop(counter);
            let mut pairs = pairs.into_iter();
            iter::from_fn(move || {
                let some = pairs.by_ref().take(PART_BYTES / PAIR);
                let bytes: Vec<u8> =
                    some.flat_map(|(id, count)| [id.to_le_bytes(), count.to_le_bytes()].concat()).collect();
                (!bytes.is_empty()).then(|| [&[COUNTS][..], &vocabulary.to_le_bytes(), &bytes].concat())
            })
        });
        Ok(pieces.into_iter().chain(counts))
    }
}

/// Puts the totals of workers together.
#[derive(Debug)]
pub(super) struct TotalsReader {
    /// The summary of each worker.
    summaries: BTreeMap<u64, Vec<u8>>,
    counters: Vec<VocabularyCounter>,
}

impl TotalsReader {
    /// Nothing read yet. Counts take their memory from `budget`.
    pub(super) fn new(statistics: &StatisticsOptions, budget: &CountBudget) -> Self {
        let counters = statistics.vocabularies.iter().map(|name| VocabularyCounter::new(name, budget));
        Self { summaries: BTreeMap::new(), counters: counters.collect() }
    }

    /// Reads the parts at the beginning of a batch, and gives the records behind them.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if there are more distinct ids than may be counted, [`Error::Engine`] for something that is
    /// no part.
    pub(super) fn read(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let (parts, records) = totals_before(batch)?;
        for (worker, part) in parts {
            self.part(worker, &part)?;
        }
        Ok(records)
    }

    /// Reads a part of the totals of a worker. Parts of one worker come in their order.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub(super) fn part(&mut self, worker: u64, part: &[u8]) -> Result<()> {
        match part.split_first() {
            Some((&SUMMARY, piece)) => {
                self.summaries.entry(worker).or_default().extend_from_slice(piece);
                Ok(())
            }
            Some((&COUNTS, counts)) => {
                self.counts(counts).unwrap_or_else(|| Err(bug("counts of ids are malformed")))
            }
            _ => Err(bug("totals of samples are malformed")),
        }
    }

    fn counts(&mut self, counts: &[u8]) -> Option<Result<()>> {
        let (vocabulary, pairs) = counts.split_first_chunk()?;
        let counter = self.counters.get_mut(u32::from_le_bytes(*vocabulary) as usize)?;
        let (pairs, []) = pairs.as_chunks::<PAIR>() else { return None };
        Some(pairs.iter().try_for_each(|pair| {
            let [id, count] = [&pair[..8], &pair[8..]].map(|half| half.try_into().unwrap_or_default());
            Ok(counter.add(i64::from_le_bytes(id), u64::from_le_bytes(count))?)
        }))
    }

    /// The totals of all workers, which are read; `None` if there were none.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if a summary is not whole.
    pub(super) fn finish(&mut self) -> Result<Option<SampleTotals>> {
        let mut all: Option<SampleTotals> = None;
        for summary in self.summaries.values() {
            let totals: SampleTotals = serde_json::from_slice(summary).map_err(|error| malformed(&error))?;
            match &mut all {
                None => all = Some(totals),
                Some(all) => all.merge(totals)?,
            }
        }
        if let Some(all) = &mut all {
            all.statistics.counters = std::mem::take(&mut self.counters);
        }
        Ok(all)
    }
}

/// A worker and a part of its totals.
type WorkerPart = (u64, Vec<u8>);

/// The parts of totals at the beginning of a batch, each with its worker, and the records behind them.
///
/// # Errors
///
/// [`Error::Column`] if the batch is none of records.
pub(super) fn totals_before(batch: &RecordBatch) -> Result<(Vec<WorkerPart>, RecordBatch)> {
    let flags = column(batch, TOTALS)?.as_boolean();
    let parts = (0..batch.num_rows()).take_while(|row| flags.value(*row)).count();
    let workers = column(batch, DIGEST[0])?.as_primitive::<UInt64Type>();
    let records = column(batch, RECORD)?.as_binary::<i32>();
    let totals = (0..parts).map(|row| (workers.value(row), records.value(row).to_vec()));
    Ok((totals.collect(), batch.slice(parts, batch.num_rows() - parts)))
}

fn malformed(error: &serde_json::Error) -> Error {
    bug(&format!("totals of samples are malformed: {error}"))
}
