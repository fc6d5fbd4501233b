//! Delta-encodes samples in the order of the log: each sample becomes a record of the changes since the previous
//! sample of its session.

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;

use datafusion::arrow::array::{ArrayRef, UInt32Array};
use datafusion::arrow::compute::take;
use datafusion::arrow::datatypes::SchemaRef;
use onefold_datasets::digest::{Digest, SampleSeeds};
use onefold_datasets::{CountBudget, KeptColumn, overlap};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::chains::{Chain, Chains};
use super::convert::Converted;
use super::counts::ColumnCounts;
use super::generations::{Generations, Held};
use super::history::{Histories, Rules, Seen, is_one_session};
use super::kept::KeptValue;
use super::last_lists::LastLists;
use super::record::{RecordWriter, Shape};
use super::record_batches::{Pending, RecordBatches};
use super::reuse::Reuse;
use super::statistics::{Entered, SampleStatistics, StatisticsOptions};
use crate::error::{Result, arrow_bug};

/// Marks an unchanged list in [`DeltaEncoder::known`].
const UNCHANGED: usize = usize::MAX;
/// The chains of a session that the decoder holds may take 1/64 of [`EncoderOptions::state_bytes`].
const OPEN_CHAINS_PART: usize = 64;
/// If changes are counted, the histories of sessions may take 1/2 of [`EncoderOptions::state_bytes`].
const HISTORIES_PART: usize = 2;
/// Hashes of forgotten sessions may take 1/32 of [`EncoderOptions::state_bytes`].
const HASHES_PART: usize = 32;
/// The number of samples whose sessions are loaded into the processor's caches together.
const TOUCHED: usize = 8;
/// The maximum number of samples per session that may be continued by a later sample.
const MOST_LASTS: usize = 8;

/// Options of the delta encoding.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct EncoderOptions {
    /// Names of the floats, in the order of the records.
    pub(super) floats: Vec<String>,
    /// Names of the lists, in the order of the records, each with whether its order matters. Only ordered lists may
    /// be windows.
    pub(super) lists: Vec<(String, bool)>,
    /// The kept columns, in the order of the records.
    pub(super) kept: Vec<KeptColumn>,
    /// The number of lists at the beginning of `lists` that are part of a sample's digest: those of the log. The
    /// remaining lists were produced by timelines earlier, and only samples of a dataset have them.
    pub(super) digested: usize,
    /// The index of the first worker of this fold among all workers whose records are sorted together. Workers with
    /// different indexes use different chain numbers.
    pub(super) first_worker: usize,
    /// For each timeline, the number of lists that it produces. The records contain its positions.
    pub(super) timelines: Vec<usize>,
    /// Whether samples have keys.
    pub(super) keyed: bool,
    /// The longest pause within a session, in microseconds, if sessions end with a pause.
    pub(super) gap_micros: Option<i64>,
    /// Whether samples are encoded relative to the previous sample. It is `false` if the sort does not keep the
    /// samples of a session together.
    pub(super) chained: bool,
    /// The memory limit for the last samples of sessions, in bytes.
    pub(super) state_bytes: usize,
}

impl EncoderOptions {
    pub(super) fn shape(&self) -> Shape {
        Shape { floats: self.floats.len(), positions: 2 * self.timelines.len(), lists: self.lists.len() }
    }

    /// Returns the seeds of the samples' digests.
    pub(super) fn seeds(&self) -> SampleSeeds {
        SampleSeeds::new(
            self.floats.iter().map(String::as_str),
            self.lists.iter().map(|(name, _)| name.as_str()),
            self.kept.iter().map(|column| column.name.as_str()),
        )
    }
}

/// Encodes the samples of the sessions that are assigned to one worker.
///
/// It keeps the last sample of every session together with its record, because only the next sample of the session
/// decides whether the record ends its chain. If parts of a log are read at the same time, it keeps several samples
/// per session, so that the samples of each part form a chain. A session is forgotten if few sessions
/// [return](super::reuse) after such a long time, or if the memory limit is reached. The next sample of a forgotten
/// session is stored whole, so forgetting affects the size of the records but never their correctness.
#[derive(Debug)]
pub(super) struct DeltaEncoder {
    options: EncoderOptions,
    seeds: SampleSeeds,
    sessions: Generations<Session>,
    reuse: Reuse,
    /// The histories of sessions. Empty if changes are not counted.
    histories: Histories,
    chain_numbers: ChainNumbers,
    record: RecordWriter,
    records: RecordBatches,
    /// For every list of the current sample, the number of its first ids that are the last ids of the previous
    /// list, or [`UNCHANGED`].
    known: Vec<usize>,
    /// The part of each list of the current sample in the digest.
    parts: Vec<u128>,
    outcome: SampleTotals,
}

/// The number, the digest and the statistics of encoded samples.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SampleTotals {
    pub(crate) samples: u64,
    /// The digest of times, floats, kept values and lists of the log. Lists from timelines are produced later.
    pub(crate) digest: Digest,
    pub(crate) statistics: SampleStatistics,
}

/// The samples of a session that later samples may continue.
#[derive(Debug, Default)]
struct Session {
    lasts: Vec<Last>,
    chains: Chains,
    /// The number of the last added sample, as counted by [`Reuse`].
    seen: Option<u64>,
}

/// The last sample of a session, or of one part of its samples.
#[derive(Debug, Default)]
struct Last {
    /// The record of the sample; `None` before the session's first sample.
    record: Option<Pending>,
    /// The number of entries of its session that were created before it. It is its run in the
    /// [histories](super::history).
    number: usize,
    chain: u64,
    times: Chain,
    time: i64,
    /// The columns that order samples with equal times, as comparable bytes.
    order: Vec<u8>,
    digest: u128,
    lists: LastLists,
    entered: Entered,
}

/// Numbers chains so that two chains of one session never have the same number.
#[derive(Debug)]
pub(super) struct ChainNumbers {
    next: u64,
    /// The seed of a hash that replaces consecutive numbers. Used if other workers that are not known may have
    /// samples of the same sessions.
    seed: Option<u64>,
}

impl ChainNumbers {
    /// Creates the numbers of a worker. Each worker has its own index, below 2^15.
    pub(super) fn of_worker(worker: usize) -> Self {
        Self { next: (worker as u64) << 48, seed: None }
    }

    /// Creates random numbers. Two of them are equal with a probability of 2^-63.
    pub(super) fn random() -> Self {
        Self { next: 0, seed: Some(RandomState::new().hash_one(())) }
    }

    /// Returns the number of the next chain, which is below 2^63.
    fn next(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.seed.map_or(number, |seed| xxh3_64_with_seed(&number.to_le_bytes(), seed) >> 1)
    }
}

impl SampleTotals {
    /// Adds the totals of other samples.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there are more distinct ids than may be counted.
    pub(super) fn merge(&mut self, other: Self) -> Result<()> {
        self.samples += other.samples;
        self.digest.merge(other.digest);
        self.statistics.merge(other.statistics)
    }
}

impl DeltaEncoder {
    /// Creates the encoder of one worker. Counts of ids take their memory from the budget. `schema` is the schema
    /// of the records. `chain_numbers` must differ from those of other workers.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if a key column has a type that cannot be compared.
    pub(super) fn new(
        options: EncoderOptions,
        (statistics, budget): (&StatisticsOptions, &CountBudget),
        schema: &SchemaRef,
        chain_numbers: ChainNumbers,
    ) -> Result<Self> {
        let histories_bytes = if statistics.changes { options.state_bytes / HISTORIES_PART } else { 0 };
        let rules = Rules {
            sliding: (0..options.lists.len()).filter(|list| options.lists[*list].1).collect(),
            gap_micros: options.gap_micros,
        };
        Ok(Self {
            seeds: options.seeds(),
            sessions: Generations::new(options.state_bytes - histories_bytes),
            reuse: Reuse::new(options.state_bytes / HASHES_PART),
            histories: Histories::new(rules, histories_bytes),
            chain_numbers,
            record: RecordWriter::new(options.shape()),
            records: RecordBatches::new(schema)?,
            known: vec![0; options.lists.len()],
            parts: vec![0; options.lists.len()],
            outcome: SampleTotals {
                samples: 0,
                digest: Digest::default(),
                statistics: SampleStatistics::new(statistics, budget),
            },
            options,
        })
    }

    /// Encodes the samples `rows` of `batch` in this order. [`records`](Self::records) returns their records once
    /// they are complete.
    pub(super) fn encode(&mut self, batch: &Converted, rows: &[u32]) -> Result<()> {
        let indices = UInt32Array::from(rows.to_vec());
        let mut keys: Vec<ArrayRef> = Vec::with_capacity(batch.keys.len());
        for key in &batch.keys {
            keys.push(take(key, &indices, None).map_err(arrow_bug)?);
        }
        let keys = self.records.keys(&keys)?;
        let width = self.known.len();
        let mut lists = Vec::with_capacity(TOUCHED * width);
        for (rows, first) in rows.chunks(TOUCHED).zip((0..).step_by(TOUCHED)) {
            lists.clear();
            let rows = rows.iter().map(|row| *row as usize);
            rows.clone().for_each(|row| lists.extend((0..width).map(|list| batch.list(list, row))));
            self.touch(batch, rows.clone(), &lists);
            for (i, row) in rows.enumerate() {
                let sample = Row { batch, row, lists: &lists[i * width..][..width] };
                self.encode_sample(sample, keys.row(first + i).as_ref())?;
            }
        }
        Ok(())
    }

    /// Loads the last samples of the sessions of `rows`, and the first ids of their `lists`, into the processor's
    /// caches. The sessions of a batch are scattered in memory, and its columns exceed the first-level cache. These
    /// loads are independent of each other, so they run in parallel.
    fn touch(&self, batch: &Converted, rows: impl Iterator<Item = usize>, lists: &[&[i64]]) {
        let identities = rows.map(|row| batch.identity.row(row));
        let mut sessions = Vec::with_capacity(TOUCHED);
        sessions.extend(identities.filter_map(|identity| self.sessions.get(identity.as_ref())));
        let last = |session: &&Session| session.lasts.last().map_or(0, Last::touch);
        black_box(sessions.iter().map(last).fold(0, u64::wrapping_add));
        black_box(lists.iter().filter_map(|list| list.first()).fold(0, |all: i64, id| all.wrapping_add(*id)));
    }

    /// Returns the complete records: those of all samples except the last ones of the sessions in memory.
    pub(super) fn records(&mut self) -> &mut RecordBatches {
        &mut self.records
    }

    /// Completes the records of some sessions and forgets them. Returns `false` if no sessions are left.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there are more distinct ids than may be counted.
    pub(super) fn forget_some(&mut self) -> Result<bool> {
        let mut some = self.sessions.take_some();
        for session in &mut some {
            session.forget(&mut self.outcome.statistics, &mut self.records)?;
        }
        Ok(!some.is_empty())
    }

    /// Adds counts of the columns of some samples.
    pub(super) fn columns(&mut self, counts: &ColumnCounts) {
        self.outcome.statistics.columns.merge(counts);
    }

    /// Returns the totals of all samples and the records that were not taken. Call it after all sessions are
    /// forgotten.
    pub(super) fn finish(mut self) -> (SampleTotals, RecordBatches) {
        debug_assert!(self.sessions.is_empty());
        self.histories.finish(&mut self.outcome.statistics);
        self.outcome.statistics.observe_ids();
        (self.outcome, self.records)
    }

    /// Encodes a sample with these keys.
    fn encode_sample(&mut self, sample: Row<'_>, keys: &[u8]) -> Result<()> {
        let Row { batch, row, .. } = sample;
        let statistics = &mut self.outcome.statistics;
        if let Some(forgotten) = self.sessions.make_room(self.reuse.is_over()) {
            for (identity, mut session) in forgotten {
                session.forget(statistics, &mut self.records)?;
                session.seen.into_iter().for_each(|seen| self.reuse.forget(&identity, seen));
            }
            self.reuse.begin();
        }
        let identity = batch.identity.row(row);
        let Session { lasts, chains, seen } = self.sessions.entry(identity.as_ref(), Session::default);
        *seen = Some(self.reuse.see(identity.as_ref(), *seen));
        let (time, order) = (batch.time[row], batch.order_bytes(row));
        let (last, others) = last_before(lasts, time, order);
        let is_first = last.record.is_none();
        let before = if is_first { 0 } else { last.bytes() };
        if is_first {
            statistics.enter(&mut last.entered);
        }
        let same_session = !is_first && is_one_session(self.options.gap_micros, last.time, time);
        let mut digested = self.seeds.numbers(time, sample.floats());
        sample.compare(
            &self.options,
            &self.seeds,
            same_session,
            &last.lists,
            (&mut self.known, &mut self.parts),
        );
        self.parts.iter().for_each(|part| digested.add(*part));
        for (i, value) in sample.kept().enumerate() {
            value.into_iter().for_each(|value| digested.add(value.part(self.seeds.kept(i))));
        }
        let digest = digested.number();
        self.outcome.digest.add(digested);
        self.outcome.samples += 1;

        // A sample may refer only to a sample that precedes it after the sort. The sort may swap equal samples.
        let in_order = (last.time, &last.order[..], last.digest) < (time, order, digest);
        let most_open = (self.options.state_bytes / OPEN_CHAINS_PART / last.lists.bytes().max(1)).max(1);
        let follows = self.options.chained && same_session && in_order && {
            let meeting = others.iter().filter(|other| other.times.meets(&last.times, time)).count();
            chains.extend(&mut last.times, meeting, time, most_open)
        };
        if !follows {
            chains.begin(&mut last.times, time);
            last.chain = self.chain_numbers.next();
        }
        let bytes = sample.decoded_bytes(&self.options);
        sample.write(&mut self.record, (last.chain, follows), bytes, &self.known);
        if statistics.counts_changes() {
            let (known, parts, positions) = (&self.known[..], &self.parts[..], sample.positions());
            let seen = Seen { key: (time, order, digest), lists: sample.lists, known, parts, positions };
            self.histories.push(identity.as_ref(), last.number, seen, statistics);
        }
        sample.replace(statistics, last, (&self.known, &self.parts))?;
        last.time = time;
        last.order.clear();
        last.order.extend_from_slice(order);
        last.digest = digest;
        match &mut last.record {
            Some(record) => {
                self.records.push(record, !follows)?;
                record.set(keys, time, digest, self.record.bytes());
            }
            none => *none = Some(Pending::new(keys, time, digest, self.record.bytes())),
        }
        let after = last.bytes();
        self.sessions.resize(before, after);
        Ok(())
    }
}

/// A sample to encode: a row of a batch.
#[derive(Clone, Copy)]
struct Row<'a> {
    batch: &'a Converted,
    row: usize,
    lists: &'a [&'a [i64]],
}

impl Row<'_> {
    fn floats(&self) -> impl Iterator<Item = f32> {
        self.batch.floats.iter().map(|floats| floats[self.row])
    }

    fn positions(&self) -> impl Iterator<Item = i64> {
        self.batch.positions.iter().map(|positions| positions[self.row])
    }

    fn kept(&self) -> impl Iterator<Item = Option<KeptValue<'_>>> {
        self.batch.kept.iter().map(|column| column.value(self.row))
    }

    /// Sets for each list the number of ids that are `known` from the `last` sample, and its part of the digest.
    fn compare(
        self,
        options: &EncoderOptions,
        seeds: &SampleSeeds,
        same_session: bool,
        last: &LastLists,
        (known, parts): (&mut [usize], &mut [u128]),
    ) {
        for (i, (list, (known, part))) in self.lists.iter().zip(known.iter_mut().zip(parts)).enumerate() {
            let before = last.list(i);
            if let Some(unchanged) = last.part(i)
                && are_equal(before, list)
            {
                (*known, *part) = (UNCHANGED, unchanged);
                continue;
            }
            *part = if i < options.digested { seeds.list(i, list) } else { 0 };
            *known = if same_session && options.lists[i].1 { overlap(before, list) } else { 0 };
        }
    }

    /// Computes the decoded size of the sample with all of its lists, in bytes, as the writer of datasets counts
    /// it.
    fn decoded_bytes(self, options: &EncoderOptions) -> usize {
        let numbers = 2 + options.kept.len() + usize::from(options.keyed);
        let logged: usize = self.lists.iter().map(|list| list.len()).sum();
        let windows = self.batch.positions.chunks_exact(2).zip(&options.timelines).map(|(places, lists)| {
            lists * usize::try_from(places[1][self.row] - places[0][self.row]).unwrap_or(0)
        });
        let ids = logged + windows.sum::<usize>();
        let texts = self.kept().flatten().map(|value| match value {
            KeptValue::Text(text) => text.len(),
            KeptValue::Integer(_) => 0,
        });
        4 * self.batch.floats.len() + 8 * (numbers + ids) + texts.sum::<usize>()
    }

    /// Writes the record of the sample. If `follows` is `false`, the record contains all lists and starts a chain.
    fn write(
        self,
        record: &mut RecordWriter,
        (chain, follows): (u64, bool),
        decoded_bytes: usize,
        known: &[usize],
    ) {
        record.start(chain, decoded_bytes, self.floats(), self.positions());
        for (i, (list, known)) in self.lists.iter().zip(known).enumerate() {
            match *known {
                UNCHANGED if follows => {}
                known if follows => record.changed(i, list.len(), &list[known..]),
                _ => record.changed(i, list.len(), list),
            }
        }
        self.kept().for_each(|value| record.kept(value));
    }

    /// Updates the statistics with the sample's lists and stores them as those of the `last` sample.
    fn replace(
        self,
        statistics: &mut SampleStatistics,
        last: &mut Last,
        (known, parts): (&[usize], &[u128]),
    ) -> Result<()> {
        let is_first = last.lists.is_empty();
        for (i, (list, known)) in self.lists.iter().zip(known).enumerate() {
            statistics.length(i, list.len());
            if *known == UNCHANGED {
                continue;
            }
            statistics.ids(i, &list[*known..]);
            statistics.replace(i, &mut last.entered, last.lists.list(i), list, *known)?;
            if !is_first {
                last.lists.set(i, list, parts[i]);
            }
        }
        if is_first {
            last.lists.fill(self.lists, parts.iter().copied());
        }
        for (timeline, positions) in self.batch.positions.chunks_exact(2).enumerate() {
            let length = positions[1][self.row] - positions[0][self.row];
            statistics.timeline_length(timeline, usize::try_from(length).unwrap_or(0));
        }
        last.entered.next_sample();
        Ok(())
    }
}

/// Whether two lists are equal. Most different lists differ in their length or first id, and lists of one id are so
/// frequent that a function call for each would be measurable.
fn are_equal(a: &[i64], b: &[i64]) -> bool {
    match (a, b) {
        ([first_a, rest_a @ ..], [first_b, rest_b @ ..]) => {
            first_a == first_b && a.len() == b.len() && (rest_a.is_empty() || rest_a == rest_b)
        }
        _ => a.len() == b.len(),
    }
}

impl Session {
    /// Completes the records of its last samples.
    fn forget(&mut self, statistics: &mut SampleStatistics, records: &mut RecordBatches) -> Result<()> {
        for last in &mut self.lasts {
            statistics.leave(last.lists.lists(), &mut last.entered)?;
            last.record.iter_mut().try_for_each(|record| records.push(record, true))?;
        }
        Ok(())
    }
}

impl Held for Session {
    fn bytes(&self) -> usize {
        self.lasts.iter().map(Last::bytes).sum::<usize>() + self.chains.bytes()
    }
}

/// Selects the sample that a sample with this time and order may follow: the latest one that is not after it.
/// Returns it together with the other ones. If all are after it, adds a new entry, or reuses the most recently used
/// entry if there are too many.
///
/// This is patience sorting: if parts of a log are read at the same time, each part gets its own entry.
fn last_before<'a>(lasts: &'a mut Vec<Last>, time: i64, order: &[u8]) -> (&'a mut Last, &'a [Last]) {
    let keys = lasts.iter().enumerate().map(|(place, last)| ((last.time, &last.order[..]), place));
    match keys.filter(|(key, _)| *key <= (time, order)).max() {
        // The most recently used entry is the last one.
        Some((_, place)) => lasts[place..].rotate_left(1),
        None if lasts.len() < MOST_LASTS => lasts.push(Last { number: lasts.len(), ..Last::default() }),
        None => {}
    }
    let (last, others) = lasts.split_last_mut().expect("there is one for every sample");
    (last, others)
}

impl Last {
    /// Reads from every cache line that the next sample is compared with or overwrites.
    fn touch(&self) -> u64 {
        let record = self.record.as_ref().map_or(0, Pending::touch);
        let order = self.order.first().map_or(0, |byte| u64::from(*byte));
        record.wrapping_add(order).wrapping_add(self.lists.touch())
    }

    /// Estimates its memory in bytes.
    fn bytes(&self) -> usize {
        let record = self.record.as_ref().map_or(0, Pending::bytes);
        256 + record + self.lists.bytes() + self.order.capacity() + self.entered.bytes()
    }
}
