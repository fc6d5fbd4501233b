//! The pipeline between the files and the caller: decodes ahead, cuts batches and deduplicates them in threads.
//!
//! One scheduler thread keeps row groups of all streams in decoding, in the order in which they are needed. Their
//! number is limited by the threads and by the memory budget. The scheduler takes each stream's samples in order,
//! cuts them into batches of exact size, and passes each batch to the pool for deduplication and preprocessing. The
//! caller receives a queue of promises in batch order, so the work overlaps and the order of batches does not depend
//! on the speed of threads. A slow caller blocks the scheduler, and thereby the decoding.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onefold_base::fault::{Fault, option, text};
use onefold_base::units::{format_bytes, format_least_bytes};

use super::budget::{Account, Budget, Granted, Reservation};
use super::convert::Pieces;
use super::decode::Decoded;
use super::file::OpenFiles;
use super::files::Opener;
use super::order::Item;
use super::output::{Output, Packing};
use super::position::{Position, Share};
use super::promise::{Promise, fulfilled, promise};
use super::recipe::Epoch;
use super::row_group::RowGroup;
use super::stages::{StageFigures, Stages};
use super::stream::Stream;
use super::workers::Workers;
use crate::batch::Batch;
use crate::error::{Error, Result};

/// A finished batch in the queue, the row groups that it shares buffers with, and its reservation, which counts until
/// the caller has the batch. The fields are dropped in this order, so that the memory of the row groups is free when
/// the reservation is released.
pub(super) type Delivery<T> = (T, Pieces, Reservation);

/// A step of an epoch: this rank's part of a global batch, and the position after it.
#[derive(Debug, Clone)]
pub struct Step<T = Batch> {
    /// The samples of this rank. The batch may be empty at the end of an epoch with
    /// [`Tail::Short`](super::Tail::Short).
    pub batch: T,
    /// The position after this step. A reader that resumes there returns the next step, independent of read-ahead.
    pub position: Position,
}

/// An iterator over the steps of one epoch. Dropping it stops the reader.
#[derive(Debug)]
pub struct Batches<T = Batch> {
    queue: Option<Receiver<Promise<Delivery<T>>>>,
    /// The next step, if [`wait`](Self::wait) has already taken it from the queue.
    promised: Option<Promise<Delivery<T>>>,
    scheduler: Option<JoinHandle<()>>,
    account: Arc<Account>,
    stages: Arc<Stages>,
    position: Position,
    /// The number of the next step, and the distance from each step to the one after it.
    next: u64,
    every: u64,
    steps: u64,
    waited: Waited,
}

/// The total time that a caller has waited, shared with the thread that makes its batches.
#[derive(Debug, Clone, Default)]
pub(super) struct Waited(Arc<AtomicU64>);

impl Waited {
    pub(super) fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }

    fn add(&self, time: Duration) {
        self.0.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}

/// The steps that one of several processes delivers when they take turns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turns {
    pub(super) first: u64,
    pub(super) every: u64,
}

impl Turns {
    pub(super) fn has(self, step: u64) -> bool {
        (step - self.first).is_multiple_of(self.every)
    }

    /// Returns the end of the range of steps that the process delivers, in an epoch of `steps` steps.
    fn end(self, steps: u64) -> u64 {
        if steps > self.first { steps - (steps - 1 - self.first) % self.every } else { steps }
    }
}

/// The step before which reading ends. It can be moved forward while batches are read; readers that have not reached
/// it continue.
#[derive(Debug, Clone)]
pub struct Horizon(Arc<AtomicU64>);

impl Horizon {
    /// Creates a horizon: reading ends before `step`.
    pub fn at(step: u64) -> Self {
        Self(Arc::new(AtomicU64::new(step)))
    }

    /// Moves the horizon to `step`, unless it is already behind it.
    pub fn move_to(&self, step: u64) {
        self.0.fetch_max(step, Relaxed);
    }

    pub(super) fn step(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl<T: Send + 'static> Batches<T> {
    /// Starts reading at `position`.
    pub(super) fn start(scheduler: Scheduler, position: Position) -> Result<Self>
    where
        T: Output,
    {
        let Scheduler { workers, account, stages, .. } = &scheduler;
        let (room, shared) = (2 * workers.threads(), (Arc::clone(account), Arc::clone(stages)));
        let (every, steps) = (scheduler.turns.every, scheduler.steps);
        let run = |queue: Queue<T>, _| scheduler.run(&queue);
        Self::of_thread("onefold-schedule", room, shared, (position, every), steps, run)
    }

    /// Starts a thread that sends batches, at most `room` ahead of the caller: the batch of the first step, and of
    /// every `every`-th step after it.
    pub(super) fn of_thread(
        name: &str,
        room: usize,
        (account, stages): (Arc<Account>, Arc<Stages>),
        (position, every): (Position, u64),
        steps: u64,
        run: impl FnOnce(Queue<T>, Waited) + Send + 'static,
    ) -> Result<Self> {
        let (sender, queue) = sync_channel(room);
        let waited = Waited::default();
        let of_thread = waited.clone();
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(move || run(sender, of_thread))?;
        let (queue, scheduler) = (Some(queue), Some(thread));
        Ok(Self {
            queue,
            promised: None,
            scheduler,
            account,
            stages,
            next: position.step,
            position,
            every,
            steps,
            waited,
        })
    }
}

impl<T> Batches<T> {
    /// Waits for the next step, at most for `limit`. Returns whether the step has arrived, or an error, or whether no
    /// step is left. In the last case [`next`](Iterator::next) still waits for the thread of the epoch to end, which
    /// with a service reports the end to the master first. So all ranks stop waiting after the same step.
    pub fn wait(&mut self, limit: Duration) -> bool {
        self.position.step >= self.steps || self.wait_for_next(limit)
    }

    /// Waits for the next step or for the end of the epoch's thread, at most for `limit`. Returns whether
    /// [`next`](Iterator::next) will return without waiting.
    pub fn wait_for_next(&mut self, limit: Duration) -> bool {
        let started = Instant::now();
        let arrived = self.arrives_within(limit);
        self.waited.add(started.elapsed());
        arrived
    }

    fn arrives_within(&mut self, limit: Duration) -> bool {
        let Some(queue) = &self.queue else { return true };
        let started = Instant::now();
        let left = || limit.saturating_sub(started.elapsed());
        let promise = match self.promised.take() {
            Some(promise) => promise,
            None => match queue.recv_timeout(left()) {
                Ok(promise) => promise,
                Err(error) => return error == RecvTimeoutError::Disconnected,
            },
        };
        match promise.recv_timeout(left()) {
            Ok(delivery) => {
                let (sender, arrived) = sync_channel(1);
                // Sending cannot fail: the receiver exists, and the channel has room.
                let _ = sender.send(delivery);
                self.promised = Some(arrived);
                true
            }
            Err(error) => {
                self.promised = Some(promise);
                error == RecvTimeoutError::Disconnected
            }
        }
    }

    /// Returns the total time that [`next`](Iterator::next) and [`wait`](Self::wait) have waited for batches.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Returns the number of steps of the epoch, including steps before the start position. It is the same on all
    /// ranks.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Joins the scheduler, and returns an error if it panicked, so that a panic is not taken for the end of the
    /// epoch.
    fn ended(&mut self) -> Result<()> {
        match self.scheduler.take().map(JoinHandle::join) {
            Some(Err(panic)) => Err(Fault::of_panic(&*panic).into()),
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// Returns the time that the reader's threads have spent in each stage, and the bytes that they have read.
    pub fn stages(&self) -> StageFigures {
        self.stages.figures()
    }
}

impl<T> Iterator for Batches<T> {
    type Item = Result<Step<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let started = Instant::now();
        let queue = self.queue.as_ref()?;
        let delivered = self.promised.take().or_else(|| queue.recv().ok());
        let step = match delivered {
            Some(promise) => Some(fulfilled(&promise).map(|(batch, _, _)| {
                self.position.step = self.next + 1;
                self.next = self.next.saturating_add(self.every);
                Step { batch, position: self.position.clone() }
            })),
            None => self.ended().err().map(Err),
        };
        self.waited.add(started.elapsed());
        if !matches!(step, Some(Ok(_))) {
            self.queue = None;
        }
        step
    }
}

impl<T> Drop for Batches<T> {
    fn drop(&mut self) {
        // Closing the queue and the account ends the scheduler at its next send or wait.
        self.queue = None;
        self.account.close();
        if let Some(scheduler) = self.scheduler.take() {
            let _ = scheduler.join();
        }
    }
}

/// The thread of an epoch that keeps row groups in decoding and cuts batches.
pub(super) struct Scheduler {
    pub(super) workers: Workers,
    pub(super) account: Arc<Account>,
    pub(super) epoch: Arc<Epoch>,
    pub(super) stages: Arc<Stages>,
    /// The number of row groups that may be read from storage while the threads decode others.
    pub(super) reads_ahead: usize,
    /// The number of bytes that reading ahead leaves free for batches.
    pub(super) headroom: u64,
    pub(super) opener: Opener,
    pub(super) streams: Vec<Stream>,
    /// This rank's part of what each stream contributes to a step.
    pub(super) share: Share,
    /// The next step to process.
    pub(super) step: u64,
    /// The number of steps of the epoch.
    pub(super) steps: u64,
    pub(super) turns: Turns,
    pub(super) horizon: Horizon,
    pub(super) packing: Packing,
}

/// The reason for which the scheduler stops early.
enum Stop {
    /// The caller no longer takes batches.
    Gone,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The result of an attempt to start decoding a stream's next row group.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Begun {
    Yes,
    /// The stream has no further row group, or its file is not open yet.
    NotNow,
    /// There is not enough memory.
    NoRoom,
}

/// The queue of batches for the caller.
pub(super) type Queue<T> = SyncSender<Promise<Delivery<T>>>;

impl Scheduler {
    /// Sends promises until the epoch ends or the caller stops taking them.
    fn run<T: Output>(mut self, queue: &Queue<T>) {
        if let Err(Stop::Failed(error)) = self.deliver(queue) {
            let _ = queue.send(promise(&self.workers.pool, move || Err(error)));
        }
    }

    fn deliver<T: Output>(&mut self, queue: &Queue<T>) -> Result<(), Stop> {
        while self.step < self.end() {
            let mut pieces = Pieces::new();
            for stream in 0..self.streams.len() {
                let wanted = self.left(stream).min(self.streams[stream].each);
                while self.streams[stream].ready() < wanted {
                    self.advance(stream)?;
                }
                self.streams[stream].take(wanted, self.share.of(wanted), &mut pieces);
            }
            // The samples of the other steps are dropped, because other processes make batches of them.
            if self.turns.has(self.step) {
                self.send(pieces, queue)?;
            }
            self.step += 1;
        }
        Ok(())
    }

    /// Returns the step before which reading ends at present.
    fn end(&self) -> u64 {
        self.turns.end(self.steps).min(self.horizon.step())
    }

    /// Returns the number of samples that a stream still has to deliver, from the next step on.
    fn left(&self, stream: usize) -> u64 {
        let stream = &self.streams[stream];
        let end = stream.samples().min(self.end().saturating_mul(stream.each));
        end.saturating_sub(self.step * stream.each)
    }

    /// Waits for the next row group of a stream.
    fn advance(&mut self, stream: usize) -> Result<(), Stop> {
        self.decode_ahead(stream)?;
        let stream = &mut self.streams[stream];
        let Some(promise) = stream.take_decoding() else {
            let missing = || Error::invariant("reader", "a stream ended before the epoch did");
            return Err(stream.failed.take().unwrap_or_else(missing).into());
        };
        Ok(stream.add(fulfilled(&promise)?)?)
    }

    /// Starts decoding the next row group of the stream `needed`, unless it is in decoding already. Then starts
    /// decoding further row groups of all streams, enough to keep the threads busy and as far as memory allows.
    fn decode_ahead(&mut self, needed: usize) -> Result<(), Stop> {
        if self.streams[needed].in_decoding() == 0 {
            self.begin(needed, true)?;
        }
        let ahead = self.workers.threads().saturating_add(self.reads_ahead);
        let mut stalled = vec![false; self.streams.len()];
        while self.streams.iter().map(Stream::in_decoding).sum::<usize>() < ahead {
            let can =
                |stream: &usize| !stalled[*stream] && self.streams[*stream].covered() < self.left(*stream);
            let covered_steps = |stream: &usize| {
                let stream = &self.streams[*stream];
                stream.covered() / stream.each
            };
            let least = (0..self.streams.len()).filter(can).min_by_key(covered_steps);
            let Some(stream) = least else { break };
            match self.begin(stream, false)? {
                Begun::Yes => (),
                Begun::NotNow => stalled[stream] = true,
                Begun::NoRoom => break,
            }
        }
        Ok(())
    }

    /// Starts decoding the next row group of a stream if there is enough memory and its file is open. If it `must`
    /// come next, waits for both. An error of opening the file is reported when the stream needs the row group.
    fn begin(&mut self, stream: usize, must: bool) -> Result<Begun, Stop> {
        let Some(Item { part, .. }) = self.streams[stream].next_item() else { return Ok(Begun::NotNow) };
        if self.streams[stream].failed.is_some() {
            return Ok(Begun::NotNow);
        }
        let files = match self.open(stream, part.file, must) {
            Ok(Some(files)) => files,
            Ok(None) => return Ok(Begun::NotNow),
            Err(error) => {
                self.streams[stream].failed = Some(error);
                return Ok(Begun::NotNow);
            }
        };
        let row_group = RowGroup { files, index: part.row_group, first: part.first };
        let bytes = row_group.decoding_bytes();
        let reservation = match self.account.try_reserve(bytes, self.headroom) {
            Some(reservation) => reservation,
            None if must => self.reserve(&row_group, bytes)?,
            None => return Ok(Begun::NoRoom),
        };
        match self.start_decoding(row_group, reservation) {
            Ok(promise) => self.streams[stream].began(promise),
            Err(error) => self.streams[stream].failed = Some(error),
        }
        Ok(Begun::Yes)
    }

    /// Returns the files that a stream reads next, or `None` if they are not open yet and `wait` is false.
    fn open(&mut self, stream: usize, file: usize, wait: bool) -> Result<Option<Arc<OpenFiles>>> {
        if let Some((_, open)) = self.streams[stream].current.as_ref().filter(|(current, _)| *current == file)
        {
            return Ok(Some(Arc::clone(open)));
        }
        let open = self.opener.file(file, wait)?;
        if let Some(open) = &open {
            self.streams[stream].current = Some((file, Arc::clone(open)));
        }
        Ok(open)
    }

    /// Reserves memory for a row group that must come next.
    fn reserve(&self, row_group: &RowGroup, bytes: u64) -> Result<Reservation, Stop> {
        match self.account.reserve(bytes) {
            Granted::Yes(reservation) => Ok(reservation),
            Granted::Never { total } => {
                let RowGroup { files, index, .. } = row_group;
                let what = format!("decoding row group {index} of `{}`", files.path.display());
                let hint = ", read fewer features, or take smaller batches or a shuffle of fewer row groups";
                Err(too_large(&what, (bytes, total), self.account.budget(), hint).into())
            }
            Granted::Closed => Err(Stop::Gone),
        }
    }

    /// Starts reading a row group. A thread of the pool decodes it when its bytes have arrived.
    fn start_decoding(&self, row_group: RowGroup, reservation: Reservation) -> Result<Promise<Decoded>> {
        let (sender, promise) = sync_channel(1);
        let (epoch, stages) = (Arc::clone(&self.epoch), Arc::clone(&self.stages));
        let (pool, account) = (Arc::clone(&self.workers.pool), Arc::clone(&self.account));
        let cached = epoch.cached.clone();
        row_group.clone().gather(cached.as_ref(), &self.stages, move |gathered| {
            pool.spawn(move || {
                let decoded = account
                    .check_open()
                    .and(gathered)
                    .and_then(|gathered| row_group.decode(gathered, &epoch, reservation, &stages));
                // Sending fails if the caller no longer waits.
                let _ = sender.send(decoded);
            });
        })?;
        Ok(promise)
    }

    fn send<T: Output>(&mut self, pieces: Pieces, queue: &Queue<T>) -> Result<(), Stop> {
        let bytes = self.epoch.batch_bytes(&pieces, u64::from(T::COPIED));
        let budget = self.account.budget();
        if bytes > budget.total() {
            let samples: usize = pieces.iter().map(|(_, rows)| rows.len()).sum();
            let what = format!("a batch of {samples} samples");
            return Err(too_large(&what, (bytes, bytes), budget, ", or take smaller batches").into());
        }
        let Some(mut reservation) = self.account.reserve_batch(bytes) else { return Err(Stop::Gone) };
        let (epoch, stages) = (Arc::clone(&self.epoch), Arc::clone(&self.stages));
        let (account, packing) = (Arc::clone(&self.account), self.packing);
        let promise = promise(&self.workers.pool, move || {
            account.check_open()?;
            let (made, bytes, shared) = T::make(&epoch, pieces, packing, &stages)?;
            reservation.resize(bytes);
            Ok((made, shared, reservation))
        });
        queue.send(promise).map_err(|_| Stop::Gone)
    }
}

/// Returns the error for work that takes `bytes` bytes. Including the memory that is already held, the budget would have
/// to be `total` bytes. `hint` names what the caller can do besides raising the limit.
fn too_large(what: &str, (bytes, total): (u64, u64), budget: &Budget, hint: &str) -> Error {
    let message = format!(
        "{what} takes up to {}, and the reader's memory limit of {} has no room for it: it must be at least {}",
        format_bytes(bytes),
        format_bytes(budget.limit()),
        format_least_bytes(Budget::limit_for(total)),
    );
    Error::options(message, text!["raise ", option("memory_limit"), hint])
}
