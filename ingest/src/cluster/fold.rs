//! Folds samples in the order of the log, session by session: each becomes a record of its changes.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, BinaryBuilder, Int64Array, RecordBatch, UInt32Array, UInt64Array};
use datafusion::arrow::compute::take;
use datafusion::arrow::datatypes::SchemaRef;
use onefold_datasets::digest::{Digest, SampleDigest, SampleSeeds};
use onefold_datasets::overlap;

use super::convert::{Converted, engine};
use super::facts::{Entered, SampleStatistics, StatisticsOptions};
use super::record::{RecordWriter, Shape};
use crate::Result;

/// Marks a list that did not change, in [`SessionFolder::known`].
const UNCHANGED: usize = usize::MAX;

/// How samples are folded.
#[derive(Debug, Clone)]
pub(super) struct FoldOptions {
    /// Names of the floats, in the records' order.
    pub(super) floats: Vec<String>,
    /// Names of the lists, in the records' order, and whether their order matters, so that they may slide.
    pub(super) lists: Vec<(String, bool)>,
    /// Numbers of timelines that are carried along.
    pub(super) positions: usize,
    /// The longest pause within a session, where a pause ends one.
    pub(super) gap_micros: Option<i64>,
    /// Whether samples refer to the one before: not where a session's samples will not stand together.
    pub(super) chained: bool,
    /// Bytes that the last samples of sessions may take.
    pub(super) state_bytes: usize,
}

impl FoldOptions {
    pub(super) fn shape(&self) -> Shape {
        Shape { floats: self.floats.len(), positions: self.positions, lists: self.lists.len() }
    }

    /// The seeds of the samples' digests.
    pub(super) fn seeds(&self) -> SampleSeeds {
        SampleSeeds::new(
            self.floats.iter().map(String::as_str),
            self.lists.iter().map(|(name, _)| name.as_str()),
        )
    }
}

/// Folds the samples of those sessions that fall to one worker.
///
/// It keeps the last sample of every session. That of a session not seen for long is forgotten when the limit is
/// reached, and the session's next sample is whole again: memory bounds what is saved, not what comes out.
#[derive(Debug)]
pub(super) struct SessionFolder {
    options: FoldOptions,
    seeds: SampleSeeds,
    sessions: Sessions,
    next_chain: u64,
    record: RecordWriter,
    /// Of every list of the current sample, how many of its first ids the list before ends with, or [`UNCHANGED`].
    known: Vec<usize>,
    outcome: Folded,
}

/// The digest and statistics of folded samples.
#[derive(Debug)]
pub(crate) struct Folded {
    pub(crate) samples: u64,
    /// Of the times, floats and lists; lists from timelines are not known here.
    pub(crate) digest: Digest,
    pub(crate) facts: SampleStatistics,
}

/// The last samples of sessions: those seen lately, and those seen before them. Two generations stand in for the order
/// of last use, at no cost per sample.
#[derive(Debug)]
struct Sessions {
    recent: HashMap<Box<[u8]>, Last>,
    older: HashMap<Box<[u8]>, Last>,
    recent_bytes: usize,
    limit: usize,
}

/// The last sample of a session.
#[derive(Debug, Default)]
struct Last {
    /// Whether there is one.
    is_known: bool,
    chain: u64,
    time: i64,
    /// The columns that order samples of one time, as comparable bytes.
    order: Box<[u8]>,
    digest: u128,
    lists: Vec<Vec<i64>>,
    /// The part of each list in the sample's digest.
    parts: Vec<u128>,
    /// Its starts and ends in timelines.
    positions: Vec<i64>,
    entered: Entered,
}

impl Folded {
    /// Adds other samples.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there are more distinct ids than may be counted.
    pub(super) fn merge(&mut self, other: Self) -> Result<()> {
        self.samples += other.samples;
        self.digest.merge(other.digest);
        self.facts.merge(other.facts)
    }
}

impl SessionFolder {
    /// The folder of one worker, whose chains differ from those of others.
    pub(super) fn new(options: FoldOptions, facts: &StatisticsOptions, worker: usize) -> Self {
        Self {
            seeds: options.seeds(),
            sessions: Sessions {
                recent: HashMap::new(),
                older: HashMap::new(),
                recent_bytes: 0,
                limit: options.state_bytes,
            },
            next_chain: (worker as u64) << 48,
            record: RecordWriter::new(options.shape()),
            known: vec![0; options.lists.len()],
            outcome: Folded { samples: 0, digest: Digest::default(), facts: SampleStatistics::new(facts) },
            options,
        }
    }

    /// Folds the samples `rows` of `batch`, in their order, into a batch of `schema`: the key columns, the time, the two
    /// halves of the digest, and the record.
    pub(super) fn fold(
        &mut self,
        batch: &Converted,
        rows: &[u32],
        schema: &SchemaRef,
    ) -> Result<RecordBatch> {
        let mut records = BinaryBuilder::with_capacity(rows.len(), 0);
        let mut digests = Vec::with_capacity(rows.len());
        for row in rows {
            digests.push(self.fold_sample(batch, *row as usize)?);
            records.append_value(self.record.bytes());
        }
        let indices = UInt32Array::from(rows.to_vec());
        let mut columns = Vec::with_capacity(schema.fields().len());
        for key in &batch.keys {
            columns.push(take(key, &indices, None).map_err(engine)?);
        }
        let times = rows.iter().map(|row| batch.time[*row as usize]);
        let half = |shift: u32| -> ArrayRef {
            Arc::new(UInt64Array::from_iter_values(digests.iter().map(|digest| (digest >> shift) as u64)))
        };
        columns.push(Arc::new(Int64Array::from_iter_values(times)));
        columns.extend([half(64), half(0)]);
        columns.push(Arc::new(records.finish()));
        RecordBatch::try_new(Arc::clone(schema), columns).map_err(engine)
    }

    /// The digest and statistics of everything folded.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset) if there are more distinct ids than may be counted.
    pub(super) fn finish(mut self) -> Result<Folded> {
        let Sessions { recent, older, .. } = self.sessions;
        for mut last in recent.into_values().chain(older.into_values()) {
            self.outcome.facts.leave(&last.lists, &mut last.entered)?;
        }
        Ok(self.outcome)
    }

    /// Writes the record of a sample and gives its digest.
    fn fold_sample(&mut self, batch: &Converted, row: usize) -> Result<u128> {
        let sample = Row { batch, row };
        let facts = &mut self.outcome.facts;
        for mut last in self.sessions.make_room() {
            facts.leave(&last.lists, &mut last.entered)?;
        }
        let last = self.sessions.entry(batch.identity.row(row).as_ref());
        let (time, order) = (batch.time[row], batch.order_bytes(row));
        let is_first = !mem::replace(&mut last.is_known, true);
        if is_first {
            last.lists.resize_with(self.known.len(), Vec::new);
            last.parts.resize(self.known.len(), 0);
            last.positions.resize(batch.positions.len(), 0);
            facts.enter(&mut last.entered);
        }
        let gap = self.options.gap_micros;
        let same_session = !is_first && gap.is_none_or(|gap| time.abs_diff(last.time) <= gap.unsigned_abs());
        let mut digested = self.seeds.numbers(time, sample.floats());
        sample.compare(
            &self.options,
            &self.seeds,
            (is_first, same_session),
            last,
            &mut self.known,
            &mut digested,
        );
        let digest = digested.number();
        self.outcome.digest.add(digested);
        self.outcome.samples += 1;

        // A sample refers only to one that the sort will leave before it; equal ones may change places.
        let in_order = (last.time, &*last.order, last.digest) < (time, order, digest);
        let follows = self.options.chained && same_session && in_order;
        if !follows {
            last.chain = self.next_chain;
            self.next_chain += 1;
        }
        sample.write(&mut self.record, last.chain, follows, &self.known);
        sample.observe(facts, same_session, last, &self.known);
        let (added, removed) = sample.replace(facts, same_session, last, &self.known)?;
        last.time = time;
        if *last.order != *order {
            last.order = order.into();
        }
        last.digest = digest;
        self.sessions.recent_bytes = (self.sessions.recent_bytes + added).saturating_sub(removed);
        Ok(digest)
    }
}

/// A sample that is folded.
#[derive(Clone, Copy)]
struct Row<'a> {
    batch: &'a Converted,
    row: usize,
}

impl Row<'_> {
    fn floats(&self) -> impl Iterator<Item = f32> {
        self.batch.floats.iter().map(|floats| floats[self.row])
    }

    fn positions(&self) -> impl Iterator<Item = i64> {
        self.batch.positions.iter().map(|positions| positions[self.row])
    }

    /// Sets for every list how many ids are `known` from the `last` sample, and adds the lists' parts to the digest.
    fn compare(
        self,
        options: &FoldOptions,
        seeds: &SampleSeeds,
        (is_first, same_session): (bool, bool),
        last: &mut Last,
        known: &mut [usize],
        digested: &mut SampleDigest,
    ) {
        for (i, known) in known.iter_mut().enumerate() {
            let list = self.batch.list(i, self.row);
            *known = match last.lists[i] == list {
                true if !is_first => UNCHANGED,
                _ => {
                    last.parts[i] = seeds.list(i, list);
                    if same_session && options.lists[i].1 { overlap(&last.lists[i], list) } else { 0 }
                }
            };
            digested.add(last.parts[i]);
        }
    }

    /// Writes the record of the sample, which `follows` the one before in its chain or holds all of its lists.
    fn write(self, record: &mut RecordWriter, chain: u64, follows: bool, known: &[usize]) {
        record.start(chain, self.floats(), self.positions());
        for (i, known) in known.iter().enumerate() {
            let list = self.batch.list(i, self.row);
            match *known {
                UNCHANGED if follows => {}
                known if follows => record.changed(i, list.len(), &list[known..]),
                _ => record.changed(i, list.len(), list),
            }
        }
    }

    /// Observes which lists changed, and how long those of timelines are.
    fn observe(self, facts: &mut SampleStatistics, same_session: bool, last: &Last, known: &[usize]) {
        let positions: &[_] = &self.batch.positions;
        let pairs = last.positions.chunks(2).zip(positions.chunks(2));
        let moved =
            pairs.map(|(before, now)| before.iter().zip(now).any(|(before, now)| *before != now[self.row]));
        facts.observe(same_session, known.iter().map(|known| *known != UNCHANGED), moved);
        for (timeline, positions) in positions.chunks_exact(2).enumerate() {
            let (start, end) = (positions[0][self.row], positions[1][self.row]);
            let seen = if same_session { last.positions[2 * timeline + 1] } else { start };
            let length = |from: i64| usize::try_from(end - from.clamp(start, end)).unwrap_or(0);
            facts.timeline_length(timeline, length(start), length(seen));
        }
    }

    /// Makes the sample's lists and positions those of the `last` one; gives the bytes added and removed.
    fn replace(
        self,
        facts: &mut SampleStatistics,
        same_session: bool,
        last: &mut Last,
        known: &[usize],
    ) -> Result<(usize, usize)> {
        let (mut added, mut removed) = (0, 0);
        for (i, known) in known.iter().enumerate() {
            let (list, before) = (self.batch.list(i, self.row), &mut last.lists[i]);
            if *known == UNCHANGED {
                facts.length(i, list.len(), if same_session { 0 } else { list.len() });
                continue;
            }
            facts.length(i, list.len(), list.len() - known);
            facts.replace(i, &mut last.entered, before, list, *known)?;
            added += 8 * list.len();
            removed += 8 * before.len();
            before.clear();
            before.extend_from_slice(list);
        }
        last.entered.next_sample();
        last.positions.iter_mut().zip(self.positions()).for_each(|(last, now)| *last = now);
        Ok((added, removed))
    }
}

impl Sessions {
    /// If there is no room for another session, forgets those not seen for long, and returns their last samples.
    fn make_room(&mut self) -> impl Iterator<Item = Last> + use<> {
        let mut forgotten = HashMap::new();
        if self.recent_bytes > self.limit / 2 {
            forgotten = mem::replace(&mut self.older, mem::take(&mut self.recent));
            self.recent_bytes = 0;
        }
        forgotten.into_values()
    }

    /// The last sample of a session, without lists if none is known.
    fn entry(&mut self, identity: &[u8]) -> &mut Last {
        if !self.recent.contains_key(identity) {
            let last = self.older.remove(identity).unwrap_or_default();
            self.recent_bytes += last.bytes() + 2 * identity.len();
            self.recent.insert(identity.into(), last);
        }
        self.recent.get_mut(identity).expect("it was put there if it was not")
    }
}

impl Last {
    /// About the bytes that it takes in memory, including its entry in the hash table.
    fn bytes(&self) -> usize {
        256 + self.lists.iter().map(|list| 64 + 8 * list.len()).sum::<usize>()
    }
}
