//! The totals of a worker (number of samples, digest and statistics), encoded as rows that follow its records.
//!
//! The totals are divided into parts of a few KiB. A row with a part has the part in the record column, the number
//! of the part in the time column, and the number of the worker in the high half of the digest; [`TOTALS`] is true.
//! A sort by [`TOTALS`] first puts all parts before the first record, so a reader of sorted records knows the
//! totals of all samples in advance.
//!
//! A part is a piece of the summary (JSON), or counts of ids: the number of the vocabulary, then pairs of an id and
//! its count. If the ids are numbers of texts, and the texts are on another machine, each pair is followed by the
//! length of its text and the text. Counts can be read in any order. The pieces of the summary of a worker must be
//! read in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::{iter, vec};

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::{DataType, UInt64Type};
use datafusion::logical_expr::{cast, not};
use datafusion::prelude::{DataFrame, ident};
use futures::StreamExt;
use onefold_datasets::{CountBudget, TextIds, VocabularyCounter};

use super::columns::column;
use super::encode::SampleTotals;
use super::fold::{DIGEST, RECORD};
use super::statistics::StatisticsOptions;
use crate::error::{Error, Result, bug};
use crate::sessionize::{TIME, TOTALS};

/// The first byte of a part, which is its kind.
const SUMMARY: u8 = 0;
const COUNTS: u8 = 1;
const TEXT_COUNTS: u8 = 2;
/// The approximate maximum size of a part in bytes, which is the size of a long record.
const PART_BYTES: usize = 4096;

/// Iterates over the counts of a vocabulary's ids, with their texts if the reader does not have them.
struct Counted {
    vocabulary: u32,
    pairs: vec::IntoIter<(i64, u64)>,
    texts: Option<Arc<TextIds>>,
}

impl SampleTotals {
    /// Divides the totals into parts. `texts` has for each vocabulary the texts that the reader does not have.
    pub(super) fn into_parts(
        mut self,
        texts: Vec<Option<Arc<TextIds>>>,
    ) -> Result<impl Iterator<Item = Result<Vec<u8>>> + Send> {
        let counters = std::mem::take(&mut self.statistics.counters);
        let summary = serde_json::to_vec(&self).map_err(|error| malformed(&error))?;
        let pieces: Vec<Vec<u8>> =
            summary.chunks(PART_BYTES).map(|piece| [&[SUMMARY], piece].concat()).collect();
        let texts = texts.into_iter().chain(iter::repeat_with(|| None));
        let counts = (0_u32..).zip(counters).zip(texts).flat_map(|((vocabulary, counter), texts)| {
            let pairs: Vec<(i64, u64)> = counter.counts().collect();
            drop(counter);
            let mut counted = Counted { vocabulary, pairs: pairs.into_iter(), texts };
            iter::from_fn(move || counted.next_part().transpose())
        });
        Ok(pieces.into_iter().map(Ok).chain(counts))
    }
}

impl Counted {
    /// Returns the next part; `None` if there are no more counts.
    fn next_part(&mut self) -> Result<Option<Vec<u8>>> {
        if self.pairs.len() == 0 {
            return Ok(None);
        }
        let kind = if self.texts.is_some() { TEXT_COUNTS } else { COUNTS };
        let mut part = [&[kind][..], &self.vocabulary.to_le_bytes()].concat();
        let texts = self.texts.as_ref().map(|texts| texts.lock());
        while part.len() < PART_BYTES
            && let Some((id, count)) = self.pairs.next()
        {
            part.extend_from_slice(&id.to_le_bytes());
            part.extend_from_slice(&count.to_le_bytes());
            if let Some(texts) = &texts {
                let text = texts.text(id).ok_or_else(|| bug("an id was counted whose text is not known"))?;
                let length = u32::try_from(text.len()).map_err(|_| bug("a text has more than 4 GiB"))?;
                part.extend_from_slice(&length.to_le_bytes());
                part.extend_from_slice(text.as_bytes());
            }
        }
        Ok(Some(part))
    }
}

/// Merges the totals of workers.
#[derive(Debug)]
pub(super) struct TotalsReader {
    /// By worker, the pieces of its summary.
    summaries: BTreeMap<u64, Vec<u8>>,
    counters: Vec<VocabularyCounter>,
    /// For each vocabulary, the texts to which texts that arrive with counts are added.
    texts: Vec<Option<Arc<TextIds>>>,
}

impl TotalsReader {
    /// Creates a reader that has read nothing. Counts take their memory from `budget`.
    pub(super) fn new(statistics: &StatisticsOptions, budget: &CountBudget) -> Self {
        let counters = statistics.vocabularies.iter().map(|name| VocabularyCounter::new(name, budget));
        Self { summaries: BTreeMap::new(), counters: counters.collect(), texts: Vec::new() }
    }

    /// Sets for each vocabulary the texts to which texts that arrive with counts are added.
    pub(super) fn with_texts(self, texts: Vec<Option<Arc<TextIds>>>) -> Self {
        Self { texts, ..self }
    }

    /// Reads the parts at the start of a batch and returns the records after them.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if there are more distinct ids than may be counted, [`Error::Fault`] for a malformed
    /// part.
    pub(super) fn read(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let (parts, records) = totals_before(batch)?;
        for (worker, part) in parts {
            self.part(worker, &part)?;
        }
        Ok(records)
    }

    /// Reads the parts among the rows of a table, and returns the records among them.
    pub(super) async fn read_table(&mut self, table: DataFrame) -> Result<DataFrame> {
        let record = cast(ident(RECORD), DataType::Binary).alias(RECORD);
        let columns = vec![ident(TIME), ident(DIGEST[0]), record, ident(TOTALS)];
        let parts = table.clone().filter(ident(TOTALS))?.select(columns)?;
        let mut parts = parts.sort(vec![ident(TIME).sort(true, false)])?.execute_stream().await?;
        while let Some(parts) = parts.next().await.transpose()? {
            self.read(&parts)?;
        }
        Ok(table.filter(not(ident(TOTALS)))?)
    }

    /// Reads a part of the totals of a worker. The parts of a worker must be read in order.
    pub(super) fn part(&mut self, worker: u64, part: &[u8]) -> Result<()> {
        match part.split_first() {
            Some((&SUMMARY, piece)) => {
                self.summaries.entry(worker).or_default().extend_from_slice(piece);
                Ok(())
            }
            Some((&kind @ (COUNTS | TEXT_COUNTS), counts)) => self
                .counts(counts, kind == TEXT_COUNTS)
                .unwrap_or_else(|| Err(bug("counts of ids are malformed"))),
            _ => Err(bug("totals of samples are malformed")),
        }
    }

    /// Reads counts, `with_texts` if each is followed by the text of its id. Returns `None` if they are malformed.
    fn counts(&mut self, counts: &[u8], with_texts: bool) -> Option<Result<()>> {
        let (vocabulary, mut rest) = counts.split_first_chunk()?;
        let vocabulary = u32::from_le_bytes(*vocabulary) as usize;
        let counter = self.counters.get_mut(vocabulary)?;
        let texts = if with_texts { Some(self.texts.get(vocabulary)?.as_ref()?) } else { None };
        while !rest.is_empty() {
            let (id, behind) = rest.split_first_chunk()?;
            let (count, behind) = behind.split_first_chunk()?;
            let id = i64::from_le_bytes(*id);
            rest = behind;
            if let Some(texts) = texts {
                let (length, behind) = rest.split_first_chunk()?;
                let (text, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
                let text = str::from_utf8(text).ok()?;
                rest = behind;
                match texts.number(text) {
                    Ok(number) if number == id => {}
                    Ok(_) => return Some(Err(same_hash(texts.name(), text))),
                    Err(error) => return Some(Err(error.into())),
                }
            }
            if let Err(error) = counter.add(id, u64::from_le_bytes(*count)) {
                return Some(Err(error.into()));
            }
        }
        Some(Ok(()))
    }

    /// Returns the totals of all workers that were read since the last call; `None` if there were none.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a summary is incomplete.
    pub(super) fn finish(&mut self) -> Result<Option<SampleTotals>> {
        let mut all: Option<SampleTotals> = None;
        for summary in std::mem::take(&mut self.summaries).into_values() {
            let totals: SampleTotals = serde_json::from_slice(&summary).map_err(|error| malformed(&error))?;
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

/// Splits a batch into the parts of totals at its start, each with its worker, and the records after them.
///
/// # Errors
///
/// [`Error::Fault`] if the batch does not have the columns of records.
pub(super) fn totals_before(batch: &RecordBatch) -> Result<(Vec<WorkerPart>, RecordBatch)> {
    let flags = column(batch, TOTALS)?.as_boolean();
    let parts = (0..batch.num_rows()).take_while(|row| flags.value(*row)).count();
    let workers = column(batch, DIGEST[0])?.as_primitive::<UInt64Type>();
    let records = column(batch, RECORD)?.as_binary::<i32>();
    let totals = (0..parts).map(|row| (workers.value(row), records.value(row).to_vec()));
    Ok((totals.collect(), batch.slice(parts, batch.num_rows() - parts)))
}

/// Returns the error for two texts with the same hash, which several machines cannot distinguish.
pub(crate) fn same_hash(vocabulary: &str, text: &str) -> Error {
    Error::engine(
        format!(
            "the text `{text}` of the vocabulary `{vocabulary}` and another one have the same 63-bit hash, so several \
             machines cannot tell them apart"
        ),
        "build it with `onefold-ingest build`, which can",
    )
}

fn malformed(error: &serde_json::Error) -> Error {
    bug(&format!("totals of samples are malformed: {error}"))
}

#[cfg(test)]
mod tests {
    use onefold_datasets::digest::Digest;
    use onefold_datasets::hash_id;

    use super::super::statistics::SampleStatistics;
    use super::*;

    fn wanted() -> StatisticsOptions {
        StatisticsOptions {
            vocabularies: vec!["numbers".to_owned(), "words".to_owned()],
            vocabulary_of: vec![Some(0), Some(1)],
            timelines: Vec::new(),
            changes: false,
            values: false,
        }
    }

    /// Creates a reader with its own memory of texts.
    fn reader(budget: &CountBudget) -> (TotalsReader, Arc<TextIds>) {
        let texts = Arc::new(TextIds::new("words", budget));
        (TotalsReader::new(&wanted(), budget).with_texts(vec![None, Some(Arc::clone(&texts))]), texts)
    }

    #[test]
    fn texts_travel_with_their_counts() {
        let budget = CountBudget::new(1 << 30);
        let words = |machine: usize| (0..1000).map(move |word| format!("word {}", word * (machine + 1)));
        let (mut reader, texts) = reader(&budget);
        for machine in 0..2 {
            let known = Arc::new(TextIds::new("words", &budget));
            let mut statistics = SampleStatistics::new(&wanted(), &budget);
            for word in words(machine) {
                statistics.counters[0].add(word.len() as i64, 1).unwrap();
                statistics.counters[1].add(known.number(&word).unwrap(), 7).unwrap();
            }
            let totals = SampleTotals { samples: 5, digest: Digest::default(), statistics };
            for part in totals.into_parts(vec![None, Some(known)]).unwrap() {
                let part = part.unwrap();
                assert!(part.len() < 2 * PART_BYTES);
                reader.part(machine as u64, &part).unwrap();
            }
        }
        let totals = reader.finish().unwrap().unwrap();
        let mut expected: BTreeMap<String, u64> = BTreeMap::new();
        words(0).chain(words(1)).for_each(|word| *expected.entry(word).or_default() += 7);
        let texts = texts.lock();
        let counts = totals.statistics.counters[1].counts();
        let counted: BTreeMap<String, u64> =
            counts.map(|(number, count)| (texts.text(number).unwrap().to_owned(), count)).collect();
        assert_eq!((totals.samples, &counted), (10, &expected));
        let lengths = totals.statistics.counters[0].counts();
        assert_eq!(lengths.map(|(_, count)| count).sum::<u64>(), 2000);
        assert!(reader.finish().unwrap().is_none(), "nothing was read since");
    }

    #[test]
    fn texts_that_machines_cannot_tell_apart_are_an_error() {
        let budget = CountBudget::new(1 << 20);
        let part = |number: i64, text: &str| {
            let length = text.len() as u32;
            [
                &[TEXT_COUNTS][..],
                &1_u32.to_le_bytes(),
                &number.to_le_bytes(),
                &1_u64.to_le_bytes(),
                &length.to_le_bytes(),
                text.as_bytes(),
            ]
            .concat()
        };
        let whole = part(hash_id(b"N17"), "N17");
        reader(&budget).0.part(0, &whole).unwrap();
        // Simulates another text with the same hash that came first.
        let error = reader(&budget).0.part(0, &part(hash_id(b"N17") + 1, "N17")).unwrap_err().to_string();
        assert!(error.contains("`N17` of the vocabulary `words`") && error.contains("onefold-ingest build"));
        for length in 0..whole.len() {
            // A truncated count is malformed; a part without counts is valid.
            let result = reader(&budget).0.part(0, &whole[..length]);
            assert_eq!(result.is_ok(), length == 5, "{length}");
        }
        let error = reader(&CountBudget::new(100)).0.part(0, &whole).unwrap_err().to_string();
        assert!(error.contains("`words`") && error.contains("memory limit"), "{error}");
    }
}
