//! Statistics that are collected while samples are encoded: how often ids occur (for vocabularies), which lists
//! change together, and the values of columns.
//!
//! Ids are counted when a list changes, not when it repeats: when an id leaves its list, it is counted once for
//! each sample that contained it.

use std::ops::Range;
use std::{iter, mem};

use onefold_datasets::{CountBudget, VocabularyCounter};
use serde::{Deserialize, Serialize};

use super::counts::{ColumnCounts, IdCounts, ListCounts};
use crate::error::Result;
use crate::groups::CoChange;

/// The number of ids of a list that are observed together. Meanwhile the registers of the list's distinct ids stay
/// in the first-level cache, where those of all lists would not fit.
const OBSERVED_TOGETHER: usize = 128;

/// Which statistics to count.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StatisticsOptions {
    /// Names of the vocabularies. Ids of one vocabulary are counted together.
    pub(super) vocabularies: Vec<String>,
    /// For each list of the records, the index of its vocabulary.
    pub(super) vocabulary_of: Vec<Option<usize>>,
    /// For each timeline, the number of lists that it produces.
    pub(super) timelines: Vec<usize>,
    /// Whether to count which lists change together.
    pub(super) changes: bool,
    /// Whether to observe the values of columns.
    pub(super) values: bool,
}

/// The statistics of samples.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SampleStatistics {
    vocabulary_of: Vec<Option<usize>>,
    /// For each vocabulary, the counts of its ids.
    #[serde(skip)]
    pub(crate) counters: Vec<VocabularyCounter>,
    /// Counts of the sets of lists that changed together. The lists of the log come first, then those of timelines.
    pub(crate) changes: Option<CoChange>,
    /// For each list, its number of ids over all samples, and the number of ids that would be stored if it were a
    /// window. The second is counted only if changes are, and only for sequences and lists of timelines.
    pub(crate) values: Vec<[u64; 2]>,
    /// Counts of the columns of the log. It has no samples if values are not observed.
    pub(crate) columns: ColumnCounts,
    /// The ids of each list; those of timelines are added after samples are decoded. Empty if values are not
    /// observed.
    pub(crate) ids: Vec<IdCounts>,
    /// For each list, ids that are waiting to be [observed](Self::observe_ids).
    #[serde(skip)]
    waiting: Vec<Vec<i64>>,
    /// For each timeline, the number of lists that it produces.
    timelines: Vec<usize>,
    /// For each timeline, the number of samples whose window is empty.
    empty_windows: Vec<u64>,
    #[serde(skip)]
    set: Vec<u64>,
}

/// For each counted list of a session's last sample, the index of the sample at which each id entered the list.
#[derive(Debug, Default)]
pub(super) struct Entered {
    sample: u64,
    since: Vec<Vec<u64>>,
}

impl SampleStatistics {
    /// Creates empty statistics. Counts of ids take their memory from `budget`.
    pub(super) fn new(wanted: &StatisticsOptions, budget: &CountBudget) -> Self {
        let lists = wanted.vocabulary_of.len() + wanted.timelines.iter().sum::<usize>();
        let counter = |name: &String| VocabularyCounter::new(name, budget);
        let changes = wanted.changes.then(|| CoChange::new(lists));
        let observed = if wanted.values { lists } else { 0 };
        Self {
            vocabulary_of: wanted.vocabulary_of.clone(),
            counters: wanted.vocabularies.iter().map(counter).collect(),
            set: vec![0; changes.as_ref().map_or(0, CoChange::words)],
            changes,
            values: vec![[0; 2]; lists],
            columns: ColumnCounts::default(),
            ids: (0..observed).map(|_| IdCounts::new()).collect(),
            waiting: vec![Vec::new(); observed],
            empty_windows: vec![0; wanted.timelines.len()],
            timelines: wanted.timelines.clone(),
        }
    }

    /// Whether changes are counted.
    pub(super) fn counts_changes(&self) -> bool {
        self.changes.is_some()
    }

    /// Counts the first sample of a session.
    pub(super) fn start_session(&mut self) {
        self.changes.iter_mut().for_each(CoChange::start_session);
    }

    /// Counts which lists, and windows of timelines, differ from those of the previous sample of the session.
    /// `digest` is the digest of the sample.
    pub(super) fn observe(
        &mut self,
        lists: impl Iterator<Item = bool>,
        timelines: impl Iterator<Item = bool>,
        digest: u64,
    ) {
        let Some(changes) = &mut self.changes else { return };
        let made =
            timelines.zip(&self.timelines).flat_map(|(changed, lists)| iter::repeat_n(changed, *lists));
        self.set.fill(0);
        for (i, _) in lists.chain(made).enumerate().filter(|(_, changed)| *changed) {
            self.set[i / 64] |= 1 << (i % 64);
        }
        changes.observe(&self.set, 1, digest);
    }

    /// Adds the length of a sample's list.
    pub(super) fn length(&mut self, list: usize, length: usize) {
        self.values[list][0] += length as u64;
    }

    /// Adds the number of ids of a sample's list that would be stored if the list were a window.
    pub(super) fn stored(&mut self, list: usize, ids: usize) {
        self.values[list][1] += ids as u64;
    }

    /// Adds the length of a sample's lists from a timeline.
    pub(super) fn timeline_length(&mut self, timeline: usize, length: usize) {
        self.empty_windows[timeline] += u64::from(length == 0);
        self.made_by(timeline).for_each(|list| self.length(list, length));
    }

    /// Adds the number of ids of a sample's lists from a timeline that would be stored in windows.
    pub(super) fn timeline_stored(&mut self, timeline: usize, ids: usize) {
        self.made_by(timeline).for_each(|list| self.stored(list, ids));
    }

    /// Returns the indexes of the lists that a timeline produces.
    fn made_by(&self, timeline: usize) -> Range<usize> {
        let first = self.vocabulary_of.len() + self.timelines[..timeline].iter().sum::<usize>();
        first..first + self.timelines[timeline]
    }

    /// Adds ids of a list. Ids that were added before do not change the result.
    #[inline]
    pub(super) fn ids(&mut self, list: usize, ids: &[i64]) {
        let Some(waiting) = self.waiting.get_mut(list) else { return };
        // Avoid a function call for a single id: its cost would be measurable.
        match ids {
            [id] => waiting.push(*id),
            ids if ids.len() >= OBSERVED_TOGETHER => return self.ids[list].add(ids),
            ids => waiting.extend_from_slice(ids),
        }
        if waiting.len() >= OBSERVED_TOGETHER {
            self.ids[list].add(waiting);
            waiting.clear();
        }
    }

    /// Observes the waiting ids. Call it after all samples are counted.
    pub(super) fn observe_ids(&mut self) {
        for (counts, waiting) in self.ids.iter_mut().zip(&mut self.waiting) {
            counts.add(&mem::take(waiting));
        }
    }

    /// Adds the ids of the lists from timelines, in their order.
    pub(super) fn timeline_ids(&mut self, ids: &[IdCounts]) {
        let made = self.ids.iter_mut().skip(self.vocabulary_of.len());
        made.zip(ids).for_each(|(counts, ids)| counts.merge(ids));
    }

    /// Returns the number of samples without ids in a list.
    pub(crate) fn list_counts(&self, list: usize) -> ListCounts {
        if let Some(counts) = self.columns.lists.get(list) {
            return *counts;
        }
        let mut lists = self.vocabulary_of.len();
        for (made, empty) in self.timelines.iter().zip(&self.empty_windows) {
            lists += made;
            if list < lists {
                return ListCounts { null: 0, empty: *empty };
            }
        }
        ListCounts::default()
    }

    /// Counts the ids that leave list number `list` when `before` becomes `after`, if the list has a vocabulary.
    /// The first `known` ids of `after` are the last ones of `before`.
    pub(super) fn replace(
        &mut self,
        list: usize,
        entered: &mut Entered,
        before: &[i64],
        after: &[i64],
        known: usize,
    ) -> Result<()> {
        let Some(counter) = self.vocabulary_of.get(list).copied().flatten() else { return Ok(()) };
        let Some(since) = entered.since.get_mut(list) else { return Ok(()) };
        let gone = before.len() - known;
        for (id, since) in before.iter().zip(since.drain(..gone)) {
            self.counters[counter].add(*id, entered.sample - since)?;
        }
        since.resize(after.len(), entered.sample);
        Ok(())
    }

    /// Prepares the counts of a new session.
    pub(super) fn enter(&self, entered: &mut Entered) {
        if !self.counters.is_empty() {
            entered.since.resize_with(self.vocabulary_of.len(), Vec::new);
        }
    }

    /// Counts the ids of a session's last sample.
    pub(super) fn leave<'a>(
        &mut self,
        lists: impl Iterator<Item = &'a [i64]>,
        entered: &mut Entered,
    ) -> Result<()> {
        for (list, ids) in lists.enumerate() {
            self.replace(list, entered, ids, &[], 0)?;
        }
        Ok(())
    }

    /// Adds the statistics of another worker, all of whose ids are observed.
    pub(super) fn merge(&mut self, other: Self) -> Result<()> {
        for (counter, other) in self.counters.iter_mut().zip(other.counters) {
            counter.merge(other)?;
        }
        if let (Some(changes), Some(other)) = (&mut self.changes, other.changes) {
            changes.merge(other);
        }
        for (values, other) in self.values.iter_mut().zip(other.values) {
            values[0] += other[0];
            values[1] += other[1];
        }
        self.columns.merge(&other.columns);
        self.ids.iter_mut().zip(&other.ids).for_each(|(ids, other)| ids.merge(other));
        if !other.ids.is_empty() {
            self.empty_windows.iter_mut().zip(other.empty_windows).for_each(|(empty, other)| *empty += other);
        }
        Ok(())
    }
}

impl Entered {
    /// The number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.since.iter().map(|since| 24 + 8 * since.capacity()).sum()
    }

    /// Advances to the next sample of the session.
    pub(super) fn next_sample(&mut self) {
        self.sample += 1;
    }
}
