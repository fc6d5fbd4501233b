//! Counts which lists change from one sample of a session to the next, in the order of the dataset.
//!
//! Threads read parts of a log at the same time, so samples of a session come in an order that differs from run to run.
//! What changes from sample to sample must not depend on it. So a session keeps a few words of each of its samples: a
//! hash of every list and, of the windows of sequences, a hash of every id. The changes are counted later, in the order
//! of its samples by time, then by the columns that order samples of one time, then by digest. So the counts are those
//! of the sorted samples, whatever the order in which they came.
//!
//! A hash of 32 bits takes two different lists for equal once in 4 billion times, which no group depends on. Only windows
//! need their ids: how many of them a window shares with the one before cannot be told from hashes of whole lists. A
//! byte of each id is kept, and those that windows share are kept once. Of windows that share no id, one in some hundreds
//! is taken to share one.
//!
//! The memory is bounded, so some changes are counted before all samples of the session have come: those of sessions that
//! were not seen for long, and the older half of those of a session of many samples. The last sample that is counted
//! stays, and the next ones are compared with it. In a log in order of time, or nearly so, this makes no difference.
//! Counts are approximate where it does: a sample that comes after later ones were counted, and has no other one before
//! it, counts as unchanged. Where even the last samples of sessions take too much memory, a session that is forgotten
//! and comes back counts as two.

use std::ops::Range;

use onefold_datasets::digest::scramble;
use onefold_datasets::overlap;

use super::generations::{Generations, Held};
use super::statistics::SampleStatistics;

/// A session counts the changes of its older half when it has more samples than this and more bytes than that.
const MOST_SAMPLES: usize = 128;
const MOST_BYTES: usize = 64 << 10;

/// How the samples of a session are told apart.
#[derive(Debug)]
pub(super) struct Rules {
    /// The lists that may slide, which are windows.
    pub(super) sliding: Vec<usize>,
    /// The longest pause within a session, where a pause ends one.
    pub(super) gap_micros: Option<i64>,
}

/// The histories of sessions. Those of sessions that were not seen for long are reduced to their last samples.
#[derive(Debug)]
pub(super) struct Histories {
    rules: Rules,
    whole: Generations<History>,
    reduced: Generations<History>,
    limit: usize,
}

/// The samples of a session whose changes are to be counted.
#[derive(Debug, Default)]
struct History {
    samples: Vec<Past>,
    /// For every run of samples, each of which was compared with the one before, its windows.
    runs: Vec<Vec<Windows>>,
    bytes: usize,
}

/// A sample as it is encoded.
pub(super) struct Seen<'a, P> {
    /// Its time, what orders it among samples of that time, and its digest.
    pub(super) key: (i64, &'a [u8], u128),
    pub(super) lists: &'a [&'a [i64]],
    /// For every list, how many of its first ids are the last ids of the same list of the run's sample before. At least
    /// the list's length if it did not change.
    pub(super) known: &'a [usize],
    /// What every list adds to the digest.
    pub(super) parts: &'a [u128],
    /// Its starts and ends in timelines.
    pub(super) positions: P,
}

/// What is kept of a sample.
#[derive(Debug)]
struct Past {
    time: i64,
    order: Box<[u8]>,
    digest: u64,
    run: usize,
    /// Whether it is counted, and stays only so that the next one is compared with it.
    is_counted: bool,
    /// A hash of every list.
    hashes: Box<[u32]>,
    /// For every list that may slide, where its ids are among all that the list had in this run.
    windows: Box<[Range<u32>]>,
    positions: Box<[i64]>,
}

/// The ids that a list had in a run of samples, one window after the other. Ids that two windows share are there once.
#[derive(Debug, Default)]
struct Windows {
    /// Hashes of the ids.
    ids: Vec<u8>,
    /// How many ids were removed at the front.
    removed: u32,
    /// The last window; empty if its ids were removed.
    last: Range<u32>,
}

impl Histories {
    /// No samples yet, which may take so many bytes.
    pub(super) fn new(rules: Rules, bytes: usize) -> Self {
        Self { rules, whole: Generations::new(bytes), reduced: Generations::new(bytes / 2), limit: bytes }
    }

    /// Adds a sample to a run of a session.
    pub(super) fn push(
        &mut self,
        identity: &[u8],
        run: usize,
        seen: Seen<'_, impl Iterator<Item = i64>>,
        statistics: &mut SampleStatistics,
    ) {
        self.whole.set_limit(self.limit.saturating_sub(self.reduced.bytes()));
        for (identity, mut history) in self.whole.make_room(false).into_iter().flatten() {
            history.count(0, &self.rules, statistics);
            // All of these are counted.
            drop(self.reduced.make_room(false));
            self.reduced.insert(identity, history);
        }
        let reduced = || self.reduced.remove(identity).unwrap_or_default();
        let history = self.whole.entry(identity, reduced);
        let before = history.bytes();
        history.push(run, seen, &self.rules, statistics);
        let after = history.bytes();
        self.whole.resize(before, after);
    }

    /// Counts all changes that are not counted yet.
    pub(super) fn finish(&mut self, statistics: &mut SampleStatistics) {
        loop {
            let some = self.whole.take_some();
            if some.is_empty() {
                return;
            }
            some.into_iter().for_each(|mut history| history.count(0, &self.rules, statistics));
        }
    }
}

impl History {
    /// Adds a sample to a run.
    fn push(
        &mut self,
        run: usize,
        seen: Seen<'_, impl Iterator<Item = i64>>,
        rules: &Rules,
        statistics: &mut SampleStatistics,
    ) {
        if run >= self.runs.len() {
            let windows = || rules.sliding.iter().map(|_| Windows::default()).collect();
            self.runs.resize_with(run + 1, windows);
        }
        let window = |(list, windows): (&usize, &mut Windows)| {
            let (ids, known) = (seen.lists[*list], seen.known[*list]);
            windows.push(ids, known.min(ids.len()))
        };
        let sample = Past {
            time: seen.key.0,
            order: seen.key.1.into(),
            digest: seen.key.2 as u64,
            run,
            is_counted: false,
            hashes: seen.parts.iter().map(|part| *part as u32).collect(),
            windows: rules.sliding.iter().zip(&mut self.runs[run]).map(window).collect(),
            positions: seen.positions.collect(),
        };
        self.bytes += sample.bytes();
        self.samples.push(sample);
        if self.samples.len() > MOST_SAMPLES && self.bytes() > MOST_BYTES {
            self.count(self.samples.len() / 2, rules, statistics);
        }
    }

    /// Counts the changes of all samples but the last `kept`, with which it goes on.
    fn count(&mut self, kept: usize, rules: &Rules, statistics: &mut SampleStatistics) {
        let end = self.samples.len().saturating_sub(kept);
        if end == 0 {
            return;
        }
        self.samples.sort_unstable_by(|a, b| a.key().cmp(&b.key()));
        let goes_on = self.samples.iter().any(|sample| sample.is_counted);
        for (i, sample) in self.samples[..end].iter().enumerate().filter(|(_, sample)| !sample.is_counted) {
            // Where the sample before it is not known any more, it counts as unchanged.
            let before = i.checked_sub(1).map(|i| &self.samples[i]).or(goes_on.then_some(sample));
            let before = before.filter(|before| is_one_session(rules.gap_micros, before.time, sample.time));
            match before {
                Some(before) => {
                    statistics.observe(sample.changed(before), sample.moved(before), sample.digest);
                }
                None => statistics.start_session(),
            }
            self.count_windows(before, sample, rules, statistics);
        }
        self.samples[end - 1].is_counted = true;
        self.samples.drain(..end - 1);
        self.samples.shrink_to_fit();
        self.bytes = self.samples.iter().map(Past::bytes).sum();
        self.remove_ids();
    }

    /// Counts the ids in windows of a sample that the windows of the sample `before` do not have.
    fn count_windows(
        &self,
        before: Option<&Past>,
        sample: &Past,
        rules: &Rules,
        statistics: &mut SampleStatistics,
    ) {
        for (window, list) in rules.sliding.iter().enumerate() {
            let ids = self.window(sample, window);
            let shared = match before {
                None => 0,
                Some(before) if before.hashes[*list] == sample.hashes[*list] => ids.len(),
                Some(before) => overlap(self.window(before, window), ids),
            };
            statistics.stored(*list, ids.len() - shared);
        }
        for (timeline, positions) in sample.positions.chunks_exact(2).enumerate() {
            let (start, end) = (positions[0], positions[1]);
            let seen = before.map_or(start, |before| before.positions[2 * timeline + 1]);
            statistics.timeline_stored(timeline, usize::try_from(end - seen.clamp(start, end)).unwrap_or(0));
        }
    }

    /// The hashes of the ids in a window of a sample.
    fn window(&self, sample: &Past, window: usize) -> &[u8] {
        self.runs[sample.run][window].ids(&sample.windows[window])
    }

    /// Removes the ids of windows that no sample has any more.
    fn remove_ids(&mut self) {
        for (number, run) in self.runs.iter_mut().enumerate() {
            for (window, windows) in run.iter_mut().enumerate() {
                let samples = self.samples.iter().filter(|sample| sample.run == number);
                let first = samples.map(|sample| sample.windows[window].start).min();
                windows.remove_before(first.unwrap_or(windows.end()));
            }
        }
    }
}

impl Held for History {
    fn bytes(&self) -> usize {
        let windows = self.runs.iter().flatten().map(Windows::bytes);
        size_of::<Self>() + self.bytes + windows.sum::<usize>()
    }
}

/// Whether a sample at one time and the next one, at another, are of one session, where a pause of more than
/// `gap_micros` ends one.
pub(super) fn is_one_session(gap_micros: Option<i64>, time: i64, next: i64) -> bool {
    gap_micros.is_none_or(|gap| time.abs_diff(next) <= gap.unsigned_abs())
}

impl Past {
    /// What the samples of a session are in the order of.
    fn key(&self) -> (i64, &[u8], u64) {
        (self.time, &self.order, self.digest)
    }

    /// For every list, whether it differs from that of the sample `before`.
    fn changed(&self, before: &Self) -> impl Iterator<Item = bool> {
        self.hashes.iter().zip(&before.hashes).map(|(now, before)| now != before)
    }

    /// For every timeline, whether the window differs from that of the sample `before`.
    fn moved(&self, before: &Self) -> impl Iterator<Item = bool> {
        self.positions.chunks(2).zip(before.positions.chunks(2)).map(|(now, before)| now != before)
    }

    /// Estimates the bytes that it takes in memory.
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.order.len()
            + size_of_val(&*self.hashes)
            + size_of_val(&*self.windows)
            + size_of_val(&*self.positions)
    }
}

impl Windows {
    /// Adds a window. The first `known` of its ids are the last ones of the last window.
    fn push(&mut self, ids: &[i64], known: usize) -> Range<u32> {
        let known = if known > self.last.len() { 0 } else { known };
        // Less room than a vector makes by itself: there are many.
        let appended = ids.len() - known;
        if self.ids.capacity() - self.ids.len() < appended {
            self.ids.reserve_exact(appended + self.ids.len() / 4);
        }
        self.ids.extend(ids[known..].iter().map(|id| scramble(*id as u64) as u8));
        self.last = self.end() - ids.len() as u32..self.end();
        self.last.clone()
    }

    /// The ids of a window.
    fn ids(&self, window: &Range<u32>) -> &[u8] {
        &self.ids[(window.start - self.removed) as usize..(window.end - self.removed) as usize]
    }

    /// The end of all ids.
    fn end(&self) -> u32 {
        self.removed + self.ids.len() as u32
    }

    /// Removes the ids before a place.
    fn remove_before(&mut self, start: u32) {
        self.ids.drain(..(start - self.removed) as usize);
        self.ids.shrink_to_fit();
        self.removed = start;
        if self.last.start < start {
            self.last = start..start;
        }
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.ids.capacity()
    }
}

#[cfg(test)]
mod tests {
    use onefold_datasets::CountBudget;

    use super::super::statistics::StatisticsOptions;
    use super::*;

    fn histories(whole: usize) -> Histories {
        let rules = Rules { sliding: vec![0], gap_micros: None };
        let reduced = Generations::new(1 << 20);
        Histories { rules, whole: Generations::new(whole), reduced, limit: whole }
    }

    /// The ids of the windows of samples of sessions at these times, and how often they changed. Each window has the last
    /// 30 times.
    fn counted(
        samples: impl Iterator<Item = (u8, i64)>,
        sessions: usize,
        mut histories: Histories,
    ) -> ([u64; 2], u64) {
        let wanted = StatisticsOptions {
            vocabularies: Vec::new(),
            vocabulary_of: vec![None],
            timelines: Vec::new(),
            changes: true,
            values: false,
        };
        let mut statistics = SampleStatistics::new(&wanted, &CountBudget::new(1 << 20));
        let mut last = vec![<[Vec<i64>; 2]>::default(); sessions];
        for (session, time) in samples {
            let window: Vec<i64> = (time - 30..time).map(|id| id / 2).collect();
            let run = usize::from(time / 50 % 2 == 1);
            let last = &mut last[usize::from(session)][run];
            let known = if window == *last { usize::MAX } else { overlap(last, &window) };
            let seen = Seen {
                key: (time, &[], 0),
                lists: &[&window],
                known: &[known],
                parts: &[time as u128 / 2],
                positions: std::iter::empty(),
            };
            histories.push(&[session], run, seen, &mut statistics);
            let bytes = histories.whole.entry(&[session], History::default).bytes();
            assert!(bytes < 2 * MOST_BYTES, "{bytes}");
            *last = window;
        }
        histories.finish(&mut statistics);
        let changes = statistics.changes.unwrap();
        assert_eq!((changes.samples(), changes.sessions()), (10_000, sessions as u64));
        (statistics.values[0], changes.changes(0))
    }

    #[test]
    fn a_long_session_takes_little_memory() {
        let in_order = counted((0..10_000).map(|time| (0, time)), 1, histories(1 << 20));
        assert_eq!(in_order.1, 4_999);
        // Parts of 50 samples, two of which are read at the same time.
        let parts = (0..10_000).map(|i| (0, i / 100 * 100 + i % 2 * 50 + i % 100 / 2));
        assert_eq!(counted(parts, 1, histories(1 << 20)), in_order);
    }

    #[test]
    fn a_session_that_is_not_seen_for_long_goes_on_after_its_last_sample() {
        let samples = || (0..10_000).map(|i| ((i % 100) as u8, i / 10));
        let in_order = counted(samples(), 100, histories(1 << 30));
        assert_eq!(in_order.1, 9_900);
        assert_eq!(counted(samples(), 100, histories(0)), in_order);
        // The first half comes when the second one is counted, sample by sample.
        let late = samples().skip(5_000).chain(samples().take(5_000));
        assert_eq!(counted(late, 100, histories(0)).1, 4_900);
        let late = samples().skip(5_000).chain(samples().take(5_000));
        assert_eq!(counted(late, 100, histories(1 << 30)), in_order);
    }
}
