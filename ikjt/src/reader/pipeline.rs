//! Decoding ahead, cutting, deduplicating: the threads between the files and the caller.
//!
//! One scheduler thread keeps row groups in decoding, as many as the threads can use and the memory budget allows, takes
//! them in order, cuts their samples into batches of exact size, and hands each batch to the pool for deduplication and
//! preprocessing. What reaches the caller is a queue of promises in batch order, so work overlaps and the
//! order does not depend on which thread was faster. A slow caller stops the scheduler, and with it the decoding.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onefold_datasets::units::{format_bytes, format_least_bytes};

use super::budget::{Budget, Granted, Reservation};
use super::convert::{Conversion, Pieces};
use super::decode::{Decoded, Decoding, RowGroup};
use super::order::{Position, Shuffle, shuffle_blocks};
use super::source::Source;
use super::stages::{StageFigures, Stages};
use crate::{Batch, Error, Result};

/// A result that a pool thread will send.
pub(super) type Promise<T> = Receiver<Result<T>>;

/// A batch on its way, with the row groups whose buffers it shares, and its memory, which counts until the caller has it.
/// Dropped in this order, so that the row groups' memory is free when the scheduler hears of the batch's.
type Delivery = (Batch, Pieces, Reservation);

/// Does `work` on a thread of its own: work that mostly waits for an object store must not keep one of the pool's threads
/// from computing.
///
/// # Errors
///
/// The operating system's error if the thread cannot be started.
pub(super) fn promise_beside_pool<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Promise<T>> {
    let (task, promise) = promised(work);
    std::thread::Builder::new().name("onefold-open".to_owned()).spawn(task)?;
    Ok(promise)
}

/// A task that sends what `work` gives.
fn promised<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> (impl FnOnce() + Send + 'static, Promise<T>) {
    let (sender, promise) = sync_channel(1);
    let task = move || {
        // The caller may have gone.
        let _ = sender.send(work());
    };
    (task, promise)
}

/// The pool, as the reader's parts use it.
#[derive(Debug, Clone)]
pub(super) struct Pool(pub(super) Arc<rayon::ThreadPool>);

impl Pool {
    pub(super) fn promise<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Promise<T> {
        let (task, promise) = promised(work);
        self.0.spawn(task);
        promise
    }
}

/// The batches of one epoch. Dropping it stops the reader.
#[derive(Debug)]
pub struct Batches {
    queue: Option<Receiver<(Promise<Delivery>, u64)>>,
    scheduler: Option<JoinHandle<()>>,
    budget: Arc<Budget>,
    stages: Arc<Stages>,
    position: Position,
    waited: Duration,
}

/// What an epoch's threads share.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) pool: Pool,
    pub(super) threads: usize,
    pub(super) batch_size: usize,
    pub(super) decoding: Arc<Decoding>,
    pub(super) conversion: Arc<Conversion>,
    pub(super) stages: Arc<Stages>,
    pub(super) budget: Arc<Budget>,
    /// Row groups that may be on their way from the storage while threads decode others.
    pub(super) reads_ahead: usize,
    /// Bytes that reading ahead leaves to batches.
    pub(super) headroom: u64,
}

impl Batches {
    /// Starts reading `source`, whose first sample is number `first_sample` of the epoch, at `position`.
    pub(super) fn start(work: Work, source: Source, first_sample: u64, position: Position) -> Result<Self> {
        let (budget, stages) = (Arc::clone(&work.budget), Arc::clone(&work.stages));
        let (sender, queue) = sync_channel(2 * work.threads);
        let scheduler = Scheduler {
            shuffle: position.shuffle,
            epoch: position.epoch,
            sample: first_sample,
            source,
            next: None,
            failed: None,
            decoding: VecDeque::new(),
            cut: Cut::default(),
            work,
        };
        let scheduler = std::thread::Builder::new()
            .name("onefold-schedule".to_owned())
            .spawn(move || scheduler.run(&sender))?;
        Ok(Self {
            queue: Some(queue),
            scheduler: Some(scheduler),
            budget,
            stages,
            position,
            waited: Duration::ZERO,
        })
    }

    /// How long [`next`](Iterator::next) has waited for batches so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The position after the batches taken so far: a reader that resumes there delivers the next one first.
    pub fn position(&self) -> Position {
        self.position.clone()
    }

    /// What the scheduler's end was: a panic there must not look like the end of the epoch.
    fn ended(&mut self) -> Result<()> {
        match self.scheduler.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(Error::invariant("reader", "the scheduler ended before the epoch did")),
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// Where the time of the reader's threads went so far, and the bytes they read.
    pub fn stages(&self) -> StageFigures {
        self.stages.figures()
    }
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let started = Instant::now();
        let delivered = self.queue.as_ref()?.recv().ok();
        let batch = match delivered {
            Some((promise, samples)) => Some(fulfilled(&promise).map(|(batch, _, _)| {
                self.position.samples += samples;
                batch
            })),
            None => self.ended().err().map(Err),
        };
        self.waited += started.elapsed();
        if !matches!(batch, Some(Ok(_))) {
            self.queue = None;
        }
        batch
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        // Closing the queue and the budget ends the scheduler at its next send or wait.
        self.queue = None;
        self.budget.close();
        if let Some(scheduler) = self.scheduler.take() {
            let _ = scheduler.join();
        }
    }
}

/// Waits for a pool thread; one that panicked has dropped its end.
pub(super) fn fulfilled<T>(promise: &Promise<T>) -> Result<T> {
    promise
        .recv()
        .unwrap_or_else(|_| Err(Error::invariant("reader", "a reader thread ended without a result")))
}

/// A row group that is read next.
#[derive(Debug)]
pub(super) struct Next {
    pub(super) row_group: RowGroup,
    /// Its samples in this shard.
    pub(super) rows: Range<usize>,
    /// Whether its chunk of the shuffle ends with it.
    pub(super) ends_chunk: bool,
}

struct InDecoding {
    promise: Promise<Decoded>,
    rows: Range<usize>,
    ends_chunk: bool,
}

struct Scheduler {
    work: Work,
    source: Source,
    shuffle: Option<Shuffle>,
    epoch: u64,
    /// Number in the epoch of the next batch's first sample.
    sample: u64,
    /// A row group that did not fit into memory yet.
    next: Option<Next>,
    /// Why nothing comes after what is in decoding: told once that is delivered, whatever the threads did first.
    failed: Option<Error>,
    decoding: VecDeque<InDecoding>,
    cut: Cut,
}

/// Why the scheduler stops early.
enum Stop {
    /// The caller is gone.
    Gone,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

type Queue = SyncSender<(Promise<Delivery>, u64)>;

impl Scheduler {
    /// Sends promises until the shard or the caller's interest ends.
    fn run(mut self, queue: &Queue) {
        if let Err(Stop::Failed(error)) = self.deliver(queue) {
            let _ = queue.send((self.work.pool.promise(move || Err(error)), 0));
        }
    }

    fn deliver(&mut self, queue: &Queue) -> Result<(), Stop> {
        let mut chunk = Pieces::new();
        let mut chunk_start = self.source.first_chunk_sample();
        loop {
            self.decode_ahead()?;
            let Some(decoding) = self.decoding.pop_front() else {
                match self.failed.take() {
                    Some(error) => return Err(error.into()),
                    None => break,
                }
            };
            chunk.push((Arc::new(fulfilled(&decoding.promise)?), decoding.rows));
            if decoding.ends_chunk {
                let pieces = self.arrange(std::mem::take(&mut chunk), &mut chunk_start);
                self.cut.extend(pieces, &mut self.source.skip);
                while self.cut.count >= self.work.batch_size {
                    let pieces = self.cut.take(self.work.batch_size);
                    self.send(pieces, queue)?;
                }
            }
        }
        if self.cut.count > 0 {
            let rest = self.cut.take(self.cut.count);
            self.send(rest, queue)?;
        }
        Ok(())
    }

    /// The samples of a chunk in the order of the epoch.
    fn arrange(&self, chunk: Pieces, chunk_start: &mut u64) -> Pieces {
        let Some(shuffle) = self.shuffle else { return chunk };
        let samples: usize = chunk.iter().map(|(_, rows)| rows.len()).sum();
        let blocks = chunk.into_iter().flat_map(|(decoded, rows)| {
            let blocks = decoded.blocks(rows);
            blocks.into_iter().map(move |block| (Arc::clone(&decoded), block))
        });
        let mut blocks: Pieces = blocks.collect();
        shuffle_blocks(&mut blocks, shuffle, self.epoch, *chunk_start);
        *chunk_start += samples as u64;
        blocks
    }

    /// Starts decoding what comes next: enough to keep the threads busy and to complete a chunk, as memory allows.
    fn decode_ahead(&mut self) -> Result<(), Stop> {
        let mixed = self.shuffle.map_or(1, |shuffle| shuffle.row_groups);
        let ahead = self.work.threads.saturating_add(mixed).saturating_add(self.work.reads_ahead);
        while self.decoding.len() < ahead && self.failed.is_none() {
            let next =
                match self.next.take().map_or_else(|| self.source.next(&self.work), |next| Ok(Some(next))) {
                    Ok(Some(next)) => next,
                    Ok(None) => break,
                    Err(error) => {
                        self.failed = Some(error);
                        break;
                    }
                };
            let bytes = next.row_group.decoding_bytes();
            let reservation = match self.work.budget.try_reserve(bytes, self.work.headroom) {
                Some(reservation) => reservation,
                None if self.decoding.is_empty() => {
                    self.source.release_kept();
                    match self.work.budget.reserve(bytes) {
                        Granted::Yes(reservation) => reservation,
                        Granted::Never { total } => {
                            return Err(too_large(&next.row_group, bytes, total, &self.work.budget).into());
                        }
                        Granted::Closed => return Err(Stop::Gone),
                    }
                }
                None => {
                    self.next = Some(next);
                    break;
                }
            };
            let Next { row_group, rows, ends_chunk } = next;
            let promise = match self.start_decoding(row_group, reservation) {
                Ok(promise) => promise,
                Err(error) => {
                    self.failed = Some(error);
                    break;
                }
            };
            self.decoding.push_back(InDecoding { promise, rows, ends_chunk });
        }
        Ok(())
    }

    /// Starts reading a row group, which a pool thread decodes when its bytes are there.
    fn start_decoding(&self, row_group: RowGroup, reservation: Reservation) -> Result<Promise<Decoded>> {
        let (sender, promise) = sync_channel(1);
        let (decoding, stages) = (Arc::clone(&self.work.decoding), Arc::clone(&self.work.stages));
        let (pool, budget) = (self.work.pool.clone(), Arc::clone(&self.work.budget));
        row_group.clone().start_reading(&self.work.stages, move |ranges| {
            pool.0.spawn(move || {
                let decoded = budget
                    .check_open()
                    .and(ranges)
                    .and_then(|ranges| row_group.decode(ranges, &decoding, reservation, &stages));
                // The caller may have gone.
                let _ = sender.send(decoded);
            });
        })?;
        Ok(promise)
    }

    fn send(&mut self, pieces: Pieces, queue: &Queue) -> Result<(), Stop> {
        let bytes = self.work.conversion.batch_bytes(&pieces);
        if bytes > self.work.budget.total() {
            return Err(batch_too_large(self.work.batch_size, bytes, &self.work.budget).into());
        }
        if !self.work.budget.has_room(bytes) {
            self.source.release_kept();
        }
        let Some(mut reservation) = self.work.budget.reserve_batch(bytes) else { return Err(Stop::Gone) };
        let samples: u64 = pieces.iter().map(|(_, rows)| rows.len() as u64).sum();
        let start = self.sample;
        self.sample += samples;
        let (conversion, stages) = (Arc::clone(&self.work.conversion), Arc::clone(&self.work.stages));
        let budget = Arc::clone(&self.work.budget);
        let mut pieces = pieces;
        let promise = self.work.pool.promise(move || {
            budget.check_open()?;
            let batch = conversion.run(&pieces, start, &stages)?;
            // Of several pieces a batch has a copy.
            if pieces.len() > 1 {
                pieces.clear();
            }
            reservation.resize(batch.bytes());
            Ok((batch, pieces, reservation))
        });
        queue.send((promise, samples)).map_err(|_| Stop::Gone)
    }
}

/// The error of a row group that takes so many bytes: the budget would have to be `total` bytes with what is held already.
fn too_large(row_group: &RowGroup, bytes: u64, total: u64, budget: &Budget) -> Error {
    Error::Options {
        message: format!(
            "decoding row group {} of `{}` takes up to {}, and the reader's memory limit of {} has no room for it: it must \
             be at least {}",
            row_group.index,
            row_group.file.path.display(),
            format_bytes(bytes),
            format_bytes(budget.limit()),
            format_least_bytes(Budget::limit_for(total)),
        ),
        hint: "raise the option `memory_limit`, read fewer features, or take smaller batches or a shuffle of fewer row groups"
            .to_owned(),
    }
}

fn batch_too_large(batch_size: usize, bytes: u64, budget: &Budget) -> Error {
    Error::Options {
        message: format!(
            "a batch of {batch_size} samples takes up to {}, and the reader's memory limit of {} has no room for it: it must \
             be at least {}",
            format_bytes(bytes),
            format_bytes(budget.limit()),
            format_least_bytes(Budget::limit_for(bytes)),
        ),
        hint: "raise the option `memory_limit`, or take smaller batches".to_owned(),
    }
}

/// Decoded samples that are in no batch yet.
#[derive(Default)]
struct Cut {
    pieces: VecDeque<(Arc<Decoded>, Range<usize>)>,
    count: usize,
}

impl Cut {
    /// Appends `pieces`, less the first `skip` samples.
    fn extend(&mut self, pieces: Pieces, skip: &mut usize) {
        for (decoded, mut rows) in pieces {
            let skipped = rows.len().min(*skip);
            *skip -= skipped;
            rows.start += skipped;
            if !rows.is_empty() {
                self.count += rows.len();
                self.pieces.push_back((decoded, rows));
            }
        }
    }

    /// The first `size` samples, of which there are enough.
    fn take(&mut self, size: usize) -> Pieces {
        let mut taken = Pieces::new();
        let mut missing = size;
        while missing > 0 {
            let Some((decoded, rows)) = self.pieces.pop_front() else { break };
            let end = rows.end.min(rows.start + missing);
            missing -= end - rows.start;
            if end < rows.end {
                self.pieces.push_front((Arc::clone(&decoded), end..rows.end));
            }
            taken.push((decoded, rows.start..end));
        }
        self.count -= size - missing;
        taken
    }
}
