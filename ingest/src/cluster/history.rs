//! Counts which lists change from one sample of a session to the next, in the order of the dataset.
//!
//! Threads read parts of a log at the same time, so the samples of a session arrive in an order that differs from
//! run to run. The counted changes must not depend on it. So a session keeps a few words of each sample: a hash of
//! every list and, for windows of sequences, a hash of every id. The changes are counted later, with the samples in
//! the order of the dataset: by time, then by the columns that order samples with equal times, then by digest. So
//! the counts are those of the sorted samples, whatever the order of arrival.
//!
//! A 32-bit hash treats two different lists as equal once in 4 billion cases, which does not affect the choice of
//! groups. Hashes of ids are needed only for windows, because hashes of whole lists do not tell how many ids a
//! window shares with the previous one. One byte per id is kept, and ids that windows share are kept once. Among
//! windows that share no id, about one in some hundreds is mistaken for one that shares an id.
//!
//! The memory is bounded, so some changes are counted before all samples of the session have arrived: those of
//! sessions that have not been seen for a long time, and those of the older half of the samples of a long session.
//! The last counted sample is kept, and later samples are compared with it. In a log in time order, or almost, this
//! does not change the counts. Otherwise counts are approximate: a sample that arrives after later samples were
//! counted, and that has no earlier sample in memory, counts as unchanged. If even the last samples of sessions
//! take too much memory, a session that is forgotten and returns counts as two.

use std::ops::Range;

use onefold_datasets::digest::scramble;
use onefold_datasets::overlap;

use super::generations::{Generations, Held};
use super::statistics::SampleStatistics;

/// A session with more samples than this, or more bytes than that, counts the changes of its older half.
const MOST_SAMPLES: usize = 128;
const MOST_BYTES: usize = 64 << 10;

/// Rules that define windows and the end of a session.
#[derive(Debug)]
pub(super) struct Rules {
    /// The indexes of the lists that may be windows.
    pub(super) sliding: Vec<usize>,
    /// The longest pause within a session, in microseconds, if sessions end with a pause.
    pub(super) gap_micros: Option<i64>,
}

/// The histories of sessions. Histories of sessions that have not been seen for a long time are reduced to their
/// last samples.
#[derive(Debug)]
pub(super) struct Histories {
    rules: Rules,
    whole: Generations<History>,
    reduced: Generations<History>,
    limit: usize,
}

/// The samples of a session whose changes have not been counted yet, and the last counted sample.
#[derive(Debug, Default)]
struct History {
    samples: Vec<Past>,
    /// For each run of samples, the ids of its windows. Each sample of a run was compared with the previous one of
    /// the run.
    runs: Vec<Vec<Windows>>,
    bytes: usize,
}

/// A sample that is being encoded.
pub(super) struct Seen<'a, P> {
    /// The time, the order within that time, and the digest.
    pub(super) key: (i64, &'a [u8], u128),
    pub(super) lists: &'a [&'a [i64]],
    /// For every list, the number of its first ids that are the last ids of the same list of the previous sample of
    /// the run. It is at least the length of the list if the list did not change.
    pub(super) known: &'a [usize],
    /// The part of each list in the digest.
    pub(super) parts: &'a [u128],
    /// The start and end positions in timelines.
    pub(super) positions: P,
}

/// The data that is kept of a sample.
#[derive(Debug)]
struct Past {
    time: i64,
    order: Box<[u8]>,
    digest: u64,
    run: usize,
    /// Whether its change is counted. Then the sample is kept only for the comparison with the next one.
    is_counted: bool,
    /// A hash of every list.
    hashes: Box<[u32]>,
    /// For every window list, the range of its ids within [`Windows`] of the run.
    windows: Box<[Range<u64>]>,
    positions: Box<[i64]>,
}

/// The ids of a list in a run of samples, window after window. Ids that consecutive windows share are stored once.
#[derive(Debug, Default)]
struct Windows {
    /// 8-bit hashes of the ids.
    ids: Vec<u8>,
    /// The number of ids that were removed at the front. A long session can have more than 2^32.
    removed: u64,
    /// The range of the last window; empty if its ids were removed.
    last: Range<u64>,
}

impl Histories {
    /// Creates histories without samples that may take `bytes` bytes.
    pub(super) fn new(rules: Rules, bytes: usize) -> Self {
        Self { rules, whole: Generations::new(bytes), reduced: Generations::new(bytes / 2), limit: bytes }
    }

    /// Adds a sample to run number `run` of a session.
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
    /// Adds a sample to run number `run`.
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

    /// Counts the changes of all samples except the last `kept` ones, and keeps those for later.
    fn count(&mut self, kept: usize, rules: &Rules, statistics: &mut SampleStatistics) {
        let end = self.samples.len().saturating_sub(kept);
        if end == 0 {
            return;
        }
        self.samples.sort_unstable_by(|a, b| a.key().cmp(&b.key()));
        let goes_on = self.samples.iter().any(|sample| sample.is_counted);
        for (i, sample) in self.samples[..end].iter().enumerate().filter(|(_, sample)| !sample.is_counted) {
            // A sample whose predecessor is no longer known counts as unchanged.
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

    /// Counts the ids in the windows of a sample that are not in the windows of the sample `before`.
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

    /// Returns the hashes of the ids in a window of a sample.
    fn window(&self, sample: &Past, window: usize) -> &[u8] {
        self.runs[sample.run][window].ids(&sample.windows[window])
    }

    /// Removes the ids that no window of a sample refers to any more.
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

/// Whether consecutive samples at `time` and `next` belong to one session, if a pause of more than `gap_micros`
/// ends a session.
pub(super) fn is_one_session(gap_micros: Option<i64>, time: i64, next: i64) -> bool {
    gap_micros.is_none_or(|gap| time.abs_diff(next) <= gap.unsigned_abs())
}

impl Past {
    /// The sort key of the samples of a session.
    fn key(&self) -> (i64, &[u8], u64) {
        (self.time, &self.order, self.digest)
    }

    /// For every list, whether it differs from the list of the sample `before`.
    fn changed(&self, before: &Self) -> impl Iterator<Item = bool> {
        self.hashes.iter().zip(&before.hashes).map(|(now, before)| now != before)
    }

    /// For every timeline, whether the window differs from the window of the sample `before`.
    fn moved(&self, before: &Self) -> impl Iterator<Item = bool> {
        self.positions.chunks(2).zip(before.positions.chunks(2)).map(|(now, before)| now != before)
    }

    /// Estimates its memory in bytes.
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.order.len()
            + size_of_val(&*self.hashes)
            + size_of_val(&*self.windows)
            + size_of_val(&*self.positions)
    }
}

impl Windows {
    /// Adds a window whose first `known` ids are the last ids of the previous window.
    fn push(&mut self, ids: &[i64], known: usize) -> Range<u64> {
        let known = if known as u64 > self.last.end - self.last.start { 0 } else { known };
        // Reserve less than a vector does by default, because there are many windows.
        let appended = ids.len() - known;
        if self.ids.capacity() - self.ids.len() < appended {
            self.ids.reserve_exact(appended + self.ids.len() / 4);
        }
        self.ids.extend(ids[known..].iter().map(|id| scramble(*id as u64) as u8));
        self.last = self.end() - ids.len() as u64..self.end();
        self.last.clone()
    }

    /// Returns the hashes of the ids of a window.
    fn ids(&self, window: &Range<u64>) -> &[u8] {
        &self.ids[(window.start - self.removed) as usize..(window.end - self.removed) as usize]
    }

    /// The end of the range of all ids.
    fn end(&self) -> u64 {
        self.removed + self.ids.len() as u64
    }

    /// Removes the ids before position `start`.
    fn remove_before(&mut self, start: u64) {
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

    /// Returns the statistics of the ids and the number of changes of samples given as (session, time). The window
    /// of each sample contains the last 30 times of its session.
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
    fn a_session_may_have_more_ids_than_32_bits_can_count() {
        let removed = u64::from(u32::MAX) - 2;
        let mut windows = Windows { ids: Vec::new(), removed, last: removed..removed };
        let first = windows.push(&[1, 2, 3], 0);
        let second = windows.push(&[2, 3, 4, 5], 2);
        let of = |ids: &[i64]| ids.iter().map(|id| scramble(*id as u64) as u8).collect::<Vec<_>>();
        assert_eq!(
            (windows.ids(&first), windows.ids(&second)),
            (&of(&[1, 2, 3])[..], &of(&[2, 3, 4, 5])[..])
        );
        windows.remove_before(second.start);
        assert_eq!(windows.ids(&second), of(&[2, 3, 4, 5]));
    }

    #[test]
    fn a_long_session_takes_little_memory() {
        let in_order = counted((0..10_000).map(|time| (0, time)), 1, histories(1 << 20));
        assert_eq!(in_order.1, 4_999);
        // Parts of 50 samples each. Two parts are read at the same time.
        let parts = (0..10_000).map(|i| (0, i / 100 * 100 + i % 2 * 50 + i % 100 / 2));
        assert_eq!(counted(parts, 1, histories(1 << 20)), in_order);
    }

    #[test]
    fn a_session_that_is_not_seen_for_long_goes_on_after_its_last_sample() {
        let samples = || (0..10_000).map(|i| ((i % 100) as u8, i / 10));
        let in_order = counted(samples(), 100, histories(1 << 30));
        assert_eq!(in_order.1, 9_900);
        assert_eq!(counted(samples(), 100, histories(0)), in_order);
        // The first half arrives after the second one was counted, sample by sample.
        let late = samples().skip(5_000).chain(samples().take(5_000));
        assert_eq!(counted(late, 100, histories(0)).1, 4_900);
        let late = samples().skip(5_000).chain(samples().take(5_000));
        assert_eq!(counted(late, 100, histories(1 << 30)), in_order);
    }
}
