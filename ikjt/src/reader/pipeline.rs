//! Decoding ahead, cutting, deduplicating: the threads between the files and the caller.
//!
//! One scheduler thread keeps row groups of all streams in decoding, as many as the threads can use and the memory
//! budget allows, those first that are needed first. It takes each stream's samples in their order, cuts them into
//! batches of exact size, and hands each batch to the pool for deduplication and preprocessing. What reaches the caller
//! is a queue of promises in batch order, so work overlaps and the order does not depend on which thread was faster. A
//! slow caller stops the scheduler, and with it the decoding.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onefold_base::fault::{Fault, option, text};
use onefold_base::units::{format_bytes, format_least_bytes};

use super::budget::{Account, Budget, Granted, Reservation};
use super::convert::{Conversion, Pieces};
use super::decode::{Decoded, Decoding, RowGroup};
use super::file::OpenFiles;
use super::files::Opener;
use super::output::{Output, Packing};
use super::position::Position;
use super::stages::{StageFigures, Stages};
use super::stream::Stream;
use super::workers::Workers;
use crate::{Batch, Error, Result};

/// A result that another thread will send.
pub(super) type Promise<T> = Receiver<Result<T>>;

/// A finished batch on its way, with the row groups whose buffers it shares, and its memory, which counts until the
/// caller has it. Dropped in this order, so that the row groups' memory is free when the scheduler hears of the
/// batch's.
pub(super) type Delivery<T> = (T, Pieces, Reservation);

/// Does `work` on a thread of the pool.
pub(super) fn promise<T: Send + 'static>(
    pool: &rayon::ThreadPool,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Promise<T> {
    let (task, promise) = promised(work);
    pool.spawn(task);
    promise
}

/// Does `work` on a thread of its own: work that mostly waits for an object store must not keep one of the pool's
/// threads from computing.
///
/// # Errors
///
/// The operating system's error if the thread cannot be started.
pub(super) fn promise_beside<T: Send + 'static>(
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
        // A machine without more memory or threads is no bug, and the caller learns of it.
        let result = catch_unwind(AssertUnwindSafe(work));
        let result = result.unwrap_or_else(|panic| Err(Fault::of_panic(&*panic).into()));
        // The caller may have gone.
        let _ = sender.send(result);
    };
    (task, promise)
}

/// Waits for another thread.
fn fulfilled<T>(promise: &Promise<T>) -> Result<T> {
    promise.recv().unwrap_or_else(|_| Err(ended()))
}

/// The error for a thread that ended, and so dropped its end of a promise.
pub(super) fn ended() -> Error {
    Error::invariant("reader", "a reader thread ended without a result")
}

/// A step of an epoch: this rank's part of a global batch, and where to go on after it.
#[derive(Debug, Clone)]
pub struct Step<T = Batch> {
    /// The samples of this rank. There may be none at the end of an epoch, with [`Tail::Short`](super::Tail::Short).
    pub batch: T,
    /// The position after this step: whoever resumes there gets the next one, whatever was read ahead.
    pub position: Position,
}

/// The steps of one epoch. Dropping it stops the reader.
#[derive(Debug)]
pub struct Batches<T = Batch> {
    queue: Option<Receiver<Promise<Delivery<T>>>>,
    /// The next step, if [`wait`](Self::wait) has taken it from the queue.
    promised: Option<Promise<Delivery<T>>>,
    scheduler: Option<JoinHandle<()>>,
    account: Arc<Account>,
    stages: Arc<Stages>,
    position: Position,
    /// The step that comes next, and from one that comes to the one after it.
    next: u64,
    every: u64,
    steps: u64,
    waited: Waited,
}

/// How long a caller has waited, as the thread that makes its batches sees it, too.
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

/// What an epoch's threads share.
#[derive(Debug, Clone)]
pub(super) struct Work {
    pub(super) workers: Workers,
    pub(super) account: Arc<Account>,
    pub(super) decoding: Arc<Decoding>,
    pub(super) conversion: Arc<Conversion>,
    pub(super) stages: Arc<Stages>,
    /// Row groups that may be on their way from the storage while threads decode others.
    pub(super) reads_ahead: usize,
    /// Bytes that reading ahead leaves to batches.
    pub(super) headroom: u64,
}

/// Steps that follow each other, of those that a rank reads in an epoch.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) streams: Vec<Stream>,
    /// From the first one to those of the whole epoch.
    pub(super) range: Range<u64>,
    /// The first step is delivered, and every `every`-th after it.
    pub(super) every: u64,
    pub(super) horizon: Horizon,
}

/// The steps that one of several processes delivers which take turns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turns {
    pub(super) first: u64,
    pub(super) every: u64,
}

impl Turns {
    pub(super) fn has(self, step: u64) -> bool {
        (step - self.first).is_multiple_of(self.every)
    }

    /// The step after the last one of the process, in an epoch of `steps` steps.
    fn end(self, steps: u64) -> u64 {
        if steps > self.first { steps - (steps - 1 - self.first) % self.every } else { steps }
    }
}

/// The step before which reading ends. It may be moved on while batches are read: those who read ahead go on if they
/// have not ended before.
#[derive(Debug, Clone)]
pub struct Horizon(Arc<AtomicU64>);

impl Horizon {
    /// Reading ends before `step`.
    pub fn at(step: u64) -> Self {
        Self(Arc::new(AtomicU64::new(step)))
    }

    /// Reading ends before `step`, which is not before where it would have ended.
    pub fn move_to(&self, step: u64) {
        self.0.fetch_max(step, Relaxed);
    }

    pub(super) fn step(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl<T: Send + 'static> Batches<T> {
    /// Starts reading at `position`.
    pub(super) fn start(
        work: Work,
        steps: Steps,
        opener: Opener,
        position: Position,
        packing: Packing,
    ) -> Result<Self>
    where
        T: Output,
    {
        let (account, stages) = (Arc::clone(&work.account), Arc::clone(&work.stages));
        let room = 2 * work.workers.threads();
        let Steps { streams, range, every, horizon } = steps;
        let Range { start, end } = range;
        let turns = Turns { first: start, every };
        let steps = turns.end(end);
        let scheduler = Scheduler { work, opener, streams, step: start, steps, turns, horizon, packing };
        Self::of_thread("onefold-schedule", room, (account, stages), (position, every), end, |queue, _| {
            scheduler.run(&queue)
        })
    }

    /// Batches that a thread of their own sends, at most `room` ahead: of the first step, and of every `every`-th after it.
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
    /// Waits for the next step, at most for `limit`. Returns whether [`next`](Iterator::next) need not wait any more:
    /// the step is there, there is an error, or the epoch has no step left.
    pub fn wait(&mut self, limit: Duration) -> bool {
        let started = Instant::now();
        let arrived = self.position.step >= self.steps || self.arrives_within(limit);
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
                // The receiver exists, and the channel has room.
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

    /// How long [`next`](Iterator::next) and [`wait`](Self::wait) have waited for batches so far.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// The steps of the epoch, the same on all ranks, also those before the position where this began.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What the scheduler's end was: a panic there must not look like the end of the epoch.
    fn ended(&mut self) -> Result<()> {
        match self.scheduler.take().map(JoinHandle::join) {
            Some(Err(panic)) => Err(Fault::of_panic(&*panic).into()),
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// Where the time of the reader's threads went so far, and the bytes they read.
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

struct Scheduler {
    work: Work,
    opener: Opener,
    streams: Vec<Stream>,
    /// The next step.
    step: u64,
    /// The step after the last one that is delivered.
    steps: u64,
    turns: Turns,
    horizon: Horizon,
    packing: Packing,
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

/// What came of the attempt to start decoding a stream's next row group.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Begun {
    Yes,
    /// The stream has none, or its file is not open yet.
    NotNow,
    /// There is no memory for it.
    NoRoom,
}

/// Where batches wait for the caller.
pub(super) type Queue<T> = SyncSender<Promise<Delivery<T>>>;

impl Scheduler {
    /// Sends promises until the epoch or the caller's interest ends.
    fn run<T: Output>(mut self, queue: &Queue<T>) {
        if let Err(Stop::Failed(error)) = self.deliver(queue) {
            let _ = queue.send(promise(&self.work.workers.pool, move || Err(error)));
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
                self.streams[stream].take(wanted, &mut pieces);
            }
            // Samples of other steps end here: another process makes a batch of them.
            if self.turns.has(self.step) {
                self.send(pieces, queue)?;
            }
            self.step += 1;
        }
        Ok(())
    }

    /// The step before which reading ends, as far as is known.
    fn end(&self) -> u64 {
        self.steps.min(self.horizon.step())
    }

    /// The samples of a stream from the next step on.
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

    /// Starts decoding the next row group of the stream `needed`, unless it is in decoding, and what comes next in the
    /// others: enough to keep the threads busy, as memory allows.
    fn decode_ahead(&mut self, needed: usize) -> Result<(), Stop> {
        if self.streams[needed].in_decoding() == 0 {
            self.begin(needed, true)?;
        }
        let ahead = self.work.workers.threads().saturating_add(self.work.reads_ahead);
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

    /// Starts decoding the next row group of a stream, if there is memory and its file is open: both are waited for if
    /// it `must` come next. What is wrong with the file is told when the stream comes to it.
    fn begin(&mut self, stream: usize, must: bool) -> Result<Begun, Stop> {
        let Some(item) = self.streams[stream].next_item() else { return Ok(Begun::NotNow) };
        if self.streams[stream].failed.is_some() {
            return Ok(Begun::NotNow);
        }
        let files = match self.open(stream, item.file, must) {
            Ok(Some(files)) => files,
            Ok(None) => return Ok(Begun::NotNow),
            Err(error) => {
                self.streams[stream].failed = Some(error);
                return Ok(Begun::NotNow);
            }
        };
        let row_group = RowGroup { files, index: item.row_group, first: item.first };
        let bytes = row_group.decoding_bytes();
        let reservation = match self.work.account.try_reserve(bytes, self.work.headroom) {
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

    /// The files that a stream reads next.
    fn open(&mut self, stream: usize, file: usize, wait: bool) -> Result<Option<Arc<OpenFiles>>> {
        if let Some((_, open)) = self.streams[stream].current.as_ref().filter(|(current, _)| *current == file)
        {
            return Ok(Some(Arc::clone(open)));
        }
        let open = self.opener.file(file, &self.work, wait)?;
        if let Some(open) = &open {
            self.streams[stream].current = Some((file, Arc::clone(open)));
        }
        Ok(open)
    }

    /// The memory for a row group that must come next.
    fn reserve(&self, row_group: &RowGroup, bytes: u64) -> Result<Reservation, Stop> {
        match self.work.account.reserve(bytes) {
            Granted::Yes(reservation) => Ok(reservation),
            Granted::Never { total } => {
                Err(too_large(row_group, bytes, total, self.work.account.budget()).into())
            }
            Granted::Closed => Err(Stop::Gone),
        }
    }

    /// Starts reading a row group, which a pool thread decodes when its bytes are there.
    fn start_decoding(&self, row_group: RowGroup, reservation: Reservation) -> Result<Promise<Decoded>> {
        let (sender, promise) = sync_channel(1);
        let (decoding, stages) = (Arc::clone(&self.work.decoding), Arc::clone(&self.work.stages));
        let (pool, account) = (Arc::clone(&self.work.workers.pool), Arc::clone(&self.work.account));
        let cached = self.work.decoding.cached.clone();
        row_group.clone().gather(cached.as_ref(), &self.work.stages, move |gathered| {
            pool.spawn(move || {
                let decoded = account
                    .check_open()
                    .and(gathered)
                    .and_then(|gathered| row_group.decode(gathered, &decoding, reservation, &stages));
                // The caller may have gone.
                let _ = sender.send(decoded);
            });
        })?;
        Ok(promise)
    }

    fn send<T: Output>(&mut self, pieces: Pieces, queue: &Queue<T>) -> Result<(), Stop> {
        let bytes = self.work.conversion.batch_bytes(&pieces, u64::from(T::COPIED));
        let budget = self.work.account.budget();
        if bytes > budget.total() {
            let samples = pieces.iter().map(|(_, rows)| rows.len()).sum();
            return Err(batch_too_large(samples, bytes, budget).into());
        }
        let Some(mut reservation) = self.work.account.reserve_batch(bytes) else { return Err(Stop::Gone) };
        let (conversion, stages) = (Arc::clone(&self.work.conversion), Arc::clone(&self.work.stages));
        let (account, packing) = (Arc::clone(&self.work.account), self.packing);
        let promise = promise(&self.work.workers.pool, move || {
            account.check_open()?;
            let (made, bytes, shared) = T::make(&conversion, pieces, packing, &stages)?;
            reservation.resize(bytes);
            Ok((made, shared, reservation))
        });
        queue.send(promise).map_err(|_| Stop::Gone)
    }
}

/// The error of a row group that takes so many bytes: the budget would have to be `total` bytes with what is held
/// already.
fn too_large(row_group: &RowGroup, bytes: u64, total: u64, budget: &Budget) -> Error {
    Error::options(
        format!(
            "decoding row group {} of `{}` takes up to {}, and the reader's memory limit of {} has no room for it: it must \
             be at least {}",
            row_group.index,
            row_group.files.path.display(),
            format_bytes(bytes),
            format_bytes(budget.limit()),
            format_least_bytes(Budget::limit_for(total)),
        ),
        text![
            "raise ",
            option("memory_limit"),
            ", read fewer features, or take smaller batches or a shuffle of fewer row groups"
        ],
    )
}

fn batch_too_large(batch_size: usize, bytes: u64, budget: &Budget) -> Error {
    Error::options(
        format!(
            "a batch of {batch_size} samples takes up to {}, and the reader's memory limit of {} has no room for it: it must \
             be at least {}",
            format_bytes(bytes),
            format_bytes(budget.limit()),
            format_least_bytes(Budget::limit_for(bytes)),
        ),
        text!["raise ", option("memory_limit"), ", or take smaller batches"],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_task_is_its_result() {
        let (task, promise) =
            promised::<()>(|| panic!("failed to spawn thread: Resource temporarily unavailable"));
        task();
        let error = fulfilled(&promise).unwrap_err().to_string();
        assert!(error.contains("pids.max") && !error.contains("bug"), "{error}");
    }
}
