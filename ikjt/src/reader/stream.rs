//! One stream of an epoch: receives row groups as they are decoded, and delivers their samples in the order of the
//! epoch.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::convert::Pieces;
use super::decode::Decoded;
use super::file::OpenFiles;
use super::order::{Item, StreamOrder};
use super::promise::Promise;
use crate::error::{Error, Result};

/// One stream of an epoch.
#[derive(Debug)]
pub(super) struct Stream {
    order: StreamOrder,
    /// The number of samples that the stream contributes to a step.
    pub(super) each: u64,
    /// The index in the order of the next row group to decode.
    next: usize,
    /// The index in the order of the next row group to arrive.
    arrived: usize,
    decoding: VecDeque<Promise<Decoded>>,
    /// The number of samples in decoding.
    coming: u64,
    /// Decoded sessions that sessions of later row groups may precede, by their keys, and by their places if keys are
    /// equal.
    held: BTreeMap<(u64, usize, usize), Piece>,
    held_samples: u64,
    ready: VecDeque<Piece>,
    ready_samples: u64,
    /// The number of samples to skip, because they belong to steps before the first one.
    skip: u64,
    /// The files that are being read, with the number of their set.
    pub(super) current: Option<(usize, Arc<OpenFiles>)>,
    /// The error of the next row group. It is reported after everything in decoding is delivered, so that its place
    /// does not depend on the timing of threads.
    pub(super) failed: Option<Error>,
}

/// A range of samples of a decoded row group.
type Piece = (Arc<Decoded>, Range<usize>);

impl Stream {
    /// Creates a stream that contributes `each` samples to a step, from `step` on.
    pub(super) fn new(order: StreamOrder, each: u64, step: u64) -> Self {
        let (first, skip) = order.find(step.saturating_mul(each).min(order.samples()));
        Self {
            order,
            each,
            next: first,
            arrived: first,
            decoding: VecDeque::new(),
            coming: 0,
            held: BTreeMap::new(),
            held_samples: 0,
            ready: VecDeque::new(),
            ready_samples: 0,
            skip,
            current: None,
            failed: None,
        }
    }

    /// Returns the number of samples of the stream in the epoch.
    pub(super) fn samples(&self) -> u64 {
        self.order.samples()
    }

    /// Returns the row groups that are still to be decoded, each with the first step that needs it.
    fn upcoming(&self) -> impl Iterator<Item = (u64, &Item)> {
        let starts = self.order.starts[self.next..].iter().map(|start| start / self.each);
        starts.zip(&self.order.items[self.next..])
    }

    /// Returns the row group to decode next.
    pub(super) fn next_item(&self) -> Option<Item> {
        self.order.items.get(self.next).cloned()
    }

    /// Returns the number of samples that can be delivered now.
    pub(super) fn ready(&self) -> u64 {
        self.ready_samples
    }

    /// Returns the number of samples that are decoded or in decoding, and not delivered yet.
    pub(super) fn covered(&self) -> u64 {
        (self.ready_samples + self.held_samples + self.coming).saturating_sub(self.skip)
    }

    /// Returns the number of row groups in decoding.
    pub(super) fn in_decoding(&self) -> usize {
        self.decoding.len()
    }

    /// Records that decoding of the next row group has begun.
    pub(super) fn began(&mut self, promise: Promise<Decoded>) {
        self.coming += self.order.items[self.next].samples;
        self.next += 1;
        self.decoding.push_back(promise);
    }

    /// Takes the promise of the row group that arrives next.
    pub(super) fn take_decoding(&mut self) -> Option<Promise<Decoded>> {
        self.decoding.pop_front()
    }

    /// Adds the row group that has arrived, and marks the samples that can now be delivered as ready.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if it has another number of samples than the plan of the epoch.
    pub(super) fn add(&mut self, decoded: Decoded) -> Result<()> {
        let number = self.arrived;
        let Item { part, samples: planned } = &self.order.items[number];
        let rows = decoded.samples_in(part.rows.clone());
        let samples = rows.len();
        if samples as u64 != *planned {
            let place = format!("row group {} of `{}`", part.row_group, decoded.origin.files.path.display());
            let message = format!("it has {samples} samples to read, the epoch was planned with {planned}");
            return Err(Error::invariant(place, message));
        }
        self.arrived += 1;
        self.coming -= planned;
        let decoded = Arc::new(decoded);
        if !self.order.is_shuffled() {
            self.push_ready((decoded, rows));
            return Ok(());
        }
        for (session, rows) in decoded.blocks(rows).into_iter().enumerate() {
            self.held_samples += rows.len() as u64;
            let key = (self.order.key(number, session), number, session);
            self.held.insert(key, (Arc::clone(&decoded), rows));
        }
        // Sessions of later row groups have keys of at least this value.
        let all = self.arrived == self.order.items.len();
        let settled = if all { u64::MAX } else { self.order.starts[self.arrived] };
        while let Some(first) = self.held.first_entry().filter(|first| first.key().0 < settled) {
            let piece = first.remove();
            self.held_samples -= piece.1.len() as u64;
            self.push_ready(piece);
        }
        Ok(())
    }

    fn push_ready(&mut self, (decoded, mut rows): Piece) {
        let skipped = self.skip.min(rows.len() as u64);
        self.skip -= skipped;
        rows.start += skipped as usize;
        if !rows.is_empty() {
            self.ready_samples += rows.len() as u64;
            self.ready.push_back((decoded, rows));
        }
    }

    /// Removes the next `count` samples, which must be ready, and appends the range `part` of them to `pieces`.
    pub(super) fn take(&mut self, count: u64, part: Range<u64>, pieces: &mut Pieces) {
        let mut taken = 0;
        while taken < count {
            let Some((decoded, rows)) = self.ready.pop_front() else { break };
            let end = taken + (count - taken).min(rows.len() as u64);
            let row = |sample: u64| rows.start + (sample.clamp(taken, end) - taken) as usize;
            let wanted = row(part.start)..row(part.end);
            if row(end) < rows.end {
                self.ready.push_front((Arc::clone(&decoded), row(end)..rows.end));
            }
            if !wanted.is_empty() {
                pieces.push((decoded, wanted));
            }
            taken = end;
        }
        self.ready_samples -= taken;
    }
}

/// Returns the files of some streams in the order in which they are first needed.
pub(super) fn files_by_first_use(streams: &[Stream]) -> VecDeque<usize> {
    let mut items: Vec<_> = streams
        .iter()
        .enumerate()
        .flat_map(|(number, stream)| {
            stream.upcoming().map(move |(step, item)| (step, number, item.part.file))
        })
        .collect();
    items.sort_by_key(|(step, number, _)| (*step, *number));
    let mut seen = HashSet::new();
    items.into_iter().map(|(_, _, file)| file).filter(|file| seen.insert(*file)).collect()
}
