//! The threads and subscriptions of a worker's blocks. The [schedule](crate::schedule) makes the decisions, and this
//! module carries out its actions. Blocks that no client reads any more move to the [cache](onefold_ikjt::cache),
//! which uses the remaining memory.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use onefold_base::fault::Explain;
use onefold_base::sync::locked;
use onefold_ikjt::cache::Cache;
use onefold_ikjt::service::protocol::{Block, Notice};
use onefold_ikjt::{Horizon, Position, Reader, StageFigures};
use tonic::Status;

use crate::jobs::to_status;
use crate::messages::WorkerFigures;
use crate::schedule::{Action, Limits, Request, Schedule, Taken, Verdict};
use crate::sending::{Message, Sent};

/// The time of waiting after which a client is told the reason.
const TELL_AFTER: Duration = Duration::from_millis(200);

/// The blocks of a worker.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// The cache, which uses the memory that batches do not need.
    cache: Arc<Cache>,
    state: Mutex<State>,
    /// Notified after every event that a run may wait for.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    schedule: Schedule<OfBlock>,
    /// The bytes of batches that were last reported to the cache.
    told: u64,
    figures: WorkerFigures,
}

/// The values that are needed to compute a block and to cache it.
#[derive(Debug, Clone)]
pub(crate) struct OfBlock {
    pub(crate) reader: Arc<Reader>,
    /// The position of the block in the epoch, from 0 to 1.
    pub(crate) epoch_share: f32,
}

impl Message {
    /// Converts the message to the form for the cache.
    fn into_parts(self) -> [Bytes; 3] {
        [self.header, self.body, Bytes::copy_from_slice(&self.samples.to_le_bytes())]
    }

    fn of_parts(parts: &[Bytes; 3]) -> Option<Self> {
        let [header, body, samples] = parts;
        let samples = u64::from_le_bytes(samples.as_ref().try_into().ok()?);
        Some(Self { header: header.clone(), body: body.clone(), samples })
    }
}

/// Returns all batches of a block from its parts in the cache.
fn messages(block: &Block, parts: &[Bytes]) -> Option<Vec<Message>> {
    let (messages, rest) = parts.as_chunks::<3>();
    let steps = block.steps.end.saturating_sub(block.steps.start);
    let is_whole = rest.is_empty() && messages.len() as u64 == steps;
    is_whole.then(|| messages.iter().map(Message::of_parts).collect::<Option<_>>())?
}

impl Blocks {
    /// Creates the blocks of a worker with these limits. `cache` uses the remaining memory.
    pub(crate) fn new(limits: Limits, cache: Arc<Cache>) -> Arc<Self> {
        let (schedule, figures) = (Schedule::new(limits), WorkerFigures::default());
        let state = Mutex::new(State { schedule, told: 0, figures });
        Arc::new(Self { cache, state, changed: Condvar::new() })
    }

    /// Passes an event to the schedule, and carries out the resulting actions.
    fn event<R>(self: &Arc<Self>, event: impl FnOnce(&mut State) -> R) -> R {
        let mut state = locked(&self.state);
        let result = event(&mut state);
        self.follow(state);
        result
    }

    /// Carries out the actions of the schedule.
    fn follow(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let (mut actions, used) = (state.schedule.take_actions(), state.schedule.used());
        let has_changed = std::mem::replace(&mut state.told, used) != used;
        let is_kept = |action: &mut Action<OfBlock>| matches!(action, Action::Keep { .. });
        let kept: Vec<Action<OfBlock>> = actions.extract_if(.., is_kept).collect();
        // Blocks move to the cache under the lock, so that a client finds each of them here or there, and no block is
        // computed again because a client comes at that moment.
        let locked = (!kept.is_empty()).then_some(state);
        if has_changed {
            self.cache.leave(used);
        }
        for action in kept {
            if let Action::Keep { of_block, block, batches, made } = action
                && let Some(interest) = of_block.reader.interest()
            {
                let parts = batches.into_iter().flat_map(Message::into_parts).collect();
                self.cache.put_block(block, parts, (&interest, of_block.epoch_share), made);
            }
        }
        drop(locked);
        self.changed.notify_all();
        for action in actions {
            match action {
                Action::Wake(more) => more.notify_waiters(),
                // All waiting runs have been notified above, and the cache has the kept blocks.
                Action::Close | Action::Keep { .. } => (),
                Action::Start { run, of_block, epoch, from, horizon } => {
                    self.start(run, of_block.reader, (epoch, from), horizon);
                }
            }
        }
    }

    /// Returns the number of blocks that clients read or wait for.
    pub(crate) fn active(&self) -> usize {
        locked(&self.state).schedule.active()
    }

    pub(crate) fn figures(&self) -> WorkerFigures {
        let state = locked(&self.state);
        WorkerFigures { bytes_kept: state.told, cache: self.cache.figures(), ..state.figures.clone() }
    }

    /// Informs the schedule that time has passed.
    pub(crate) fn pass(self: &Arc<Self>) {
        self.event(|state| state.schedule.pass(Instant::now()));
    }

    /// Reads all batches of a block from the disk of the cache, if no client reads the block and it is only there.
    pub(crate) fn on_disk(&self, block: &Block) -> Option<Vec<Message>> {
        if locked(&self.state).schedule.has(block) || !self.cache.has_on_disk(block) {
            return None;
        }
        messages(block, &self.cache.take_block(block)?)
    }

    /// Subscribes a client to the batches that it requests. Takes the block from the memory of the cache, if it is
    /// there.
    pub(crate) fn read(self: &Arc<Self>, mut request: Request<OfBlock>) -> Subscription {
        let id = self.event(|state| {
            let block = &request.ticket.block;
            if request.cached.is_none() && !state.schedule.has(block) && !self.cache.has_on_disk(block) {
                request.cached = self.cache.take_block(block).and_then(|parts| messages(block, &parts));
            }
            state.schedule.subscribe(request, Instant::now())
        });
        Subscription { blocks: Arc::clone(self), id }
    }

    /// Starts the thread of a run.
    fn start(self: &Arc<Self>, run: u64, reader: Arc<Reader>, (epoch, from): (u64, u64), horizon: Horizon) {
        let blocks = Arc::clone(self);
        let compute = move || {
            let position = Position { step: from, ..reader.position(epoch) };
            let computed = blocks.compute(run, &reader, position, &horizon);
            blocks.event(|state| state.schedule.ended(run, computed, Instant::now()));
        };
        if let Err(error) = std::thread::Builder::new().name("onefold-block".to_owned()).spawn(compute) {
            let status = Status::unavailable(format!("a thread cannot be started: {error}"));
            self.event(|state| state.schedule.ended(run, Err(status), Instant::now()));
        }
    }

    /// Computes the blocks of a run, and releases the memory for reading at the end.
    fn compute(
        self: &Arc<Self>,
        run: u64,
        reader: &Reader,
        mut position: Position,
        horizon: &Horizon,
    ) -> Result<(), Status> {
        let mut batches =
            reader.sent_until(&position, horizon.clone()).map_err(|error| to_status(&error.fault()))?;
        let mut counted = StageFigures::default();
        while let Some(batch) = batches.next() {
            let message =
                Message::new(position.step, batch.map_err(|error| to_status(&error.fault()))?.batch)?;
            let stages = batches.stages();
            let done = stages.since(&counted);
            counted = stages;
            if !self.add(run, position.step, message, &done) {
                break;
            }
            position.step += 1;
        }
        Ok(())
    }

    /// Adds a batch to its block as soon as there is room for it. Returns whether the run continues.
    fn add(self: &Arc<Self>, run: u64, step: u64, message: Message, done: &StageFigures) -> bool {
        let mut state = locked(&self.state);
        let figures = &mut state.figures;
        figures.stages = figures.stages.and(done);
        figures.batches_computed += 1;
        figures.samples_computed += message.samples;
        loop {
            match state.schedule.offer(run, step, message.bytes(), Instant::now()) {
                // Carries out actions meanwhile, so that other runs can continue.
                Verdict::Wait if state.schedule.has_actions() => {
                    self.follow(state);
                    state = locked(&self.state);
                }
                Verdict::Wait => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Verdict::Add => {
                    state.schedule.add(run, step, message, done.seconds());
                    self.follow(state);
                    return true;
                }
                Verdict::End => {
                    self.follow(state);
                    return false;
                }
            }
        }
    }
}

/// The progress of a client through a block.
#[derive(Debug)]
pub(crate) struct Subscription {
    blocks: Arc<Blocks>,
    id: u64,
}

impl Subscription {
    /// Returns the next batch or the reason for waiting, or `None` after the last batch.
    pub(crate) async fn next(&mut self) -> Option<Result<Sent, Status>> {
        let mut silent_since = Instant::now();
        loop {
            let taken = self.blocks.event(|state| match state.schedule.take(self.id, Instant::now()) {
                // Subscribes while the state is locked, so that no notification is missed.
                Taken::Wait(more) => Err(more.notified_owned()),
                taken => Ok(taken),
            });
            match taken {
                Ok(Taken::Message(message)) => return Some(Ok(Sent::Batch(self.counted(message)))),
                Ok(Taken::Failed(status)) => return Some(Err(status)),
                Ok(Taken::End | Taken::Wait(_)) => return None,
                Err(more) => {
                    // Other clients of the job often wake this one before its batch is there.
                    let left = TELL_AFTER.saturating_sub(silent_since.elapsed());
                    if tokio::time::timeout(left, more).await.is_err() {
                        silent_since = Instant::now();
                        if let Some(notice) = self.why_waiting() {
                            return Some(Ok(Sent::Notice(notice)));
                        }
                    }
                }
            }
        }
    }

    fn why_waiting(&self) -> Option<Notice> {
        locked(&self.blocks.state).schedule.why_waiting(self.id, Instant::now())
    }

    /// Counts the message as sent, and keeps it in memory accounting until the network has taken it.
    fn counted(&self, message: Message) -> Message {
        let (bytes, blocks) = (message.bytes(), Arc::clone(&self.blocks));
        let mut state = locked(&blocks.state);
        state.figures.batches_sent += 1;
        state.figures.bytes_sent += bytes;
        drop(state);
        let under_way = UnderWay { body: message.body, blocks, subscription: self.id, bytes };
        Message { body: Bytes::from_owner(under_way), ..message }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.blocks.event(|state| state.schedule.unsubscribe(self.id, Instant::now()));
    }
}

/// The body of a message that the network has not taken yet.
struct UnderWay {
    body: Bytes,
    blocks: Arc<Blocks>,
    subscription: u64,
    bytes: u64,
}

impl AsRef<[u8]> for UnderWay {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.blocks.event(|state| state.schedule.sent(self.subscription, self.bytes, Instant::now()));
    }
}
