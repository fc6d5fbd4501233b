//! The blocks of steps that a worker computes, and those that it keeps for clients that come later.
//!
//! A block that several clients ask for is computed once. Its batches wait in memory until every client has had them;
//! then a complete block goes to the [cache](onefold_ikjt::cache), which has what memory is left. Jobs share the memory:
//! a job that is slow to take its batches stops its own blocks and no others. The first block of a job goes on for as
//! long as a client waits for its next batch, whatever the others hold.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use onefold_base::fault::Explain;
use onefold_ikjt::cache::Cache;
use onefold_ikjt::service::protocol::Block;
use onefold_ikjt::{Horizon, Position, Reader, StageFigures};
use tokio::sync::Notify;
use tonic::Status;

use crate::jobs::to_status;
use crate::messages::WorkerFigures;
use crate::sending::Message;

/// Blocks that are computed at the same time. Each uses all threads; a second one computes while the first one waits for
/// storage.
const RUNNING: usize = 2;

/// The blocks of a worker.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// Bytes that batches may take, but for a batch of each job's first block.
    limit: u64,
    /// Has the memory that batches do not need.
    cache: Arc<Cache>,
    state: Mutex<State>,
    /// Memory came free, or somebody lost interest.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    /// The entry to which new clients of a block come.
    by_block: HashMap<Block, u64>,
    /// Blocks that are computed now, without those that wait for memory.
    running: usize,
    bytes: u64,
    /// Counts events, to tell earlier from later ones, and gives names.
    clock: u64,
    /// When blocks of each job were begun last.
    begun: HashMap<String, u64>,
    /// What is computed now, by number.
    runs: HashMap<u64, Run>,
    figures: WorkerFigures,
}

#[derive(Debug)]
struct Entry {
    block: Block,
    reader: Arc<Reader>,
    /// The step of the first of the batches.
    first: u64,
    batches: VecDeque<Message>,
    progress: Progress,
    /// The next step of each client.
    clients: HashMap<u64, u64>,
    /// The share of the epoch before it, from 0 to 1.
    epoch_share: f32,
    /// Processor time that its batches took.
    made: Duration,
    more: Arc<Notify>,
}

/// A block that the cache had.
#[derive(Debug)]
pub(crate) struct CachedBlock(Vec<Message>);

/// Blocks that follow each other, which are computed in one go: at the ends of a run a row group is decoded of which
/// only a part is needed.
#[derive(Debug)]
struct Run {
    job: String,
    epoch: u64,
    /// The step after its last block.
    end: u64,
    horizon: Horizon,
    /// Its blocks that are not complete, in order, and the steps after their last ones.
    entries: VecDeque<(u64, u64)>,
}

#[derive(Debug)]
enum Progress {
    Waiting,
    Running,
    Complete,
    Failed(Status),
}

impl Message {
    /// As the cache keeps it.
    fn into_parts(self) -> [Bytes; 3] {
        [self.header, self.body, Bytes::copy_from_slice(&self.samples.to_le_bytes())]
    }

    fn of_parts(parts: &[Bytes; 3]) -> Option<Self> {
        let [header, body, samples] = parts;
        let samples = u64::from_le_bytes(samples.as_ref().try_into().ok()?);
        Some(Self { header: header.clone(), body: body.clone(), samples })
    }
}

impl CachedBlock {
    /// The block as the cache has it; `None` if these are not all of its parts.
    fn of_parts(parts: &[Bytes], steps: u64) -> Option<Self> {
        let (messages, rest) = parts.as_chunks::<3>();
        let complete = rest.is_empty() && messages.len() as u64 == steps;
        complete.then(|| messages.iter().map(Message::of_parts).collect::<Option<_>>().map(Self))?
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(Message::bytes).sum()
    }
}

impl Entry {
    /// A block from the step `from` on, or all of it if it was cached.
    fn new(
        block: Block,
        from: u64,
        reader: Arc<Reader>,
        epoch_share: f32,
        cached: Option<CachedBlock>,
    ) -> Self {
        let (first, progress, batches) = match cached {
            Some(CachedBlock(batches)) => (block.steps.start, Progress::Complete, batches.into()),
            None if from >= block.steps.end => (block.steps.end, Progress::Complete, VecDeque::new()),
            None => (from, Progress::Waiting, VecDeque::new()),
        };
        let (clients, made, more) = (HashMap::new(), Duration::ZERO, Arc::new(Notify::new()));
        Self { block, reader, first, batches, progress, clients, epoch_share, made, more }
    }

    /// What a client gets for a step; `None` if it has to wait.
    fn message(&self, step: u64) -> Option<Result<Message, Status>> {
        match (self.batches.get((step - self.first) as usize), &self.progress) {
            (Some(message), _) => Some(Ok(message.clone())),
            (None, Progress::Failed(status)) => Some(Err(status.clone())),
            (None, _) => None,
        }
    }

    fn bytes(&self) -> u64 {
        self.batches.iter().map(Message::bytes).sum()
    }

    /// The step of the batch that is computed next.
    fn next_batch(&self) -> u64 {
        self.first + self.batches.len() as u64
    }

    /// Whether a client waits for the next batch, or nobody is left.
    fn is_awaited(&self) -> bool {
        self.clients.values().max().is_none_or(|next| *next >= self.next_batch())
    }

    fn is_complete(&self) -> bool {
        matches!(self.progress, Progress::Complete)
    }

    /// Gives a block that is whole to the cache.
    fn keep(self, cache: &Arc<Cache>) {
        if self.is_complete()
            && self.first == self.block.steps.start
            && let Some(interest) = self.reader.interest()
        {
            let parts = self.batches.into_iter().flat_map(Message::into_parts).collect();
            cache.put_block(self.block, parts, (&interest, self.epoch_share), self.made);
        }
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.bytes -= entry.bytes();
        if self.by_block.get(&entry.block) == Some(&id) {
            self.by_block.remove(&entry.block);
        }
        Some(entry)
    }

    /// The block to compute next: of the job whose turn it is, the first.
    fn next_waiting(&self) -> Option<u64> {
        let turn = |entry: &Entry| {
            let begun = self.begun.get(&entry.block.job).copied().unwrap_or(0);
            (begun, entry.block.epoch, entry.block.steps.start)
        };
        self.waiting().min_by_key(|(_, entry)| turn(entry)).map(|(id, _)| *id)
    }

    fn waiting(&self) -> impl Iterator<Item = (&u64, &Entry)> {
        self.entries.iter().filter(|(_, entry)| matches!(entry.progress, Progress::Waiting))
    }

    /// Adds waiting blocks that follow a run's last one to the run.
    fn extend(&mut self, run: u64) {
        let Some(run) = self.runs.get_mut(&run) else { return };
        loop {
            let follows = |entry: &Entry| {
                matches!(entry.progress, Progress::Waiting)
                    && (entry.block.job.as_str(), entry.block.epoch) == (run.job.as_str(), run.epoch)
                    && entry.next_batch() == run.end
            };
            let Some((id, entry)) = self.entries.iter_mut().find(|(_, entry)| follows(entry)) else { return };
            entry.progress = Progress::Running;
            run.end = entry.block.steps.end;
            run.horizon.move_to(run.end);
            run.entries.push_back((*id, run.end));
        }
    }

    /// The block of a run that a step belongs to; `None` if there is none any more: nobody wants it.
    fn entry_of(&mut self, run: u64, step: u64) -> Option<u64> {
        let entries = &mut self.runs.get_mut(&run)?.entries;
        // Those before it are complete.
        while entries.front().is_some_and(|(_, end)| *end <= step) {
            entries.pop_front();
        }
        entries.front().map(|(id, _)| *id).filter(|id| self.entries.contains_key(id))
    }

    /// Whether an entry may have so many bytes more.
    fn may_grow(&self, id: u64, bytes: u64, limit: u64) -> bool {
        let Some(entry) = self.entries.get(&id) else { return true };
        let active = || self.entries.values().filter(|entry| !entry.clients.is_empty());
        let of_job = || active().filter(|other| other.block.job == entry.block.job);
        let order = |entry: &Entry| (entry.block.epoch, entry.block.steps.start);
        let is_first = of_job().map(order).min().is_none_or(|first| order(entry) <= first);
        if is_first && entry.is_awaited() {
            return true;
        }
        let jobs =
            active().map(|entry| entry.block.job.as_str()).collect::<std::collections::HashSet<_>>().len();
        let share = limit / jobs.max(1) as u64;
        self.bytes + bytes <= limit && of_job().map(Entry::bytes).sum::<u64>() + bytes <= share
    }

    /// Frees the memory of batches that all clients of a block have had. Whether there were any.
    fn free_some(&mut self) -> bool {
        let mut freed = 0;
        for entry in self.entries.values_mut() {
            let Some(&needed) = entry.clients.values().min() else { continue };
            while entry.first < needed
                && let Some(message) = entry.batches.pop_front()
            {
                entry.first += 1;
                freed += message.bytes();
            }
        }
        self.bytes -= freed;
        freed > 0
    }
}

impl Blocks {
    /// Batches take at most `limit` bytes, but for one of each job; `cache` has the rest of them.
    pub(crate) fn new(limit: u64, cache: Arc<Cache>) -> Arc<Self> {
        Arc::new(Self { limit, cache, state: Mutex::default(), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks that clients read, or wait for.
    pub(crate) fn active(&self) -> usize {
        self.state().entries.values().filter(|entry| !entry.clients.is_empty()).count()
    }

    pub(crate) fn figures(&self) -> WorkerFigures {
        let state = self.state();
        WorkerFigures { bytes_kept: state.bytes, cache: self.cache.figures(), ..state.figures.clone() }
    }

    /// A block that no client reads, if the cache has it. This may read a disk.
    pub(crate) fn cached(&self, block: &Block) -> Option<CachedBlock> {
        if self.state().by_block.contains_key(block) {
            return None;
        }
        let parts = self.cache.take_block(block)?;
        CachedBlock::of_parts(&parts, block.steps.end.saturating_sub(block.steps.start))
    }

    /// The batches of a block from the step `from` on, for one client. `epoch_share`, from 0 to 1, of its epoch
    /// comes before it.
    pub(crate) fn read(
        self: &Arc<Self>,
        block: Block,
        from: u64,
        reader: Arc<Reader>,
        epoch_share: f32,
        cached: Option<CachedBlock>,
    ) -> Subscription {
        let mut state = self.state();
        let (client, job) = (state.tick(), block.job.clone());
        let known = state.by_block.get(&block).copied().filter(|id| {
            let entry = &state.entries[id];
            entry.first <= from && !matches!(entry.progress, Progress::Failed(_))
        });
        let id = known.unwrap_or(client);
        if known.is_none() {
            let fits = |cached: &CachedBlock| state.bytes + cached.bytes() <= self.limit;
            let entry = Entry::new(block.clone(), from, reader, epoch_share, cached.filter(fits));
            state.bytes += entry.bytes();
            self.cache.leave(state.bytes);
            state.by_block.insert(block, id);
            state.entries.insert(id, entry);
        }
        let mut end = from;
        if let Some(entry) = state.entries.get_mut(&id) {
            entry.clients.insert(client, from);
            end = entry.block.steps.end;
        }
        // A run goes on unless others wait for their turn.
        let others = state.waiting().any(|(_, entry)| entry.block.job != job);
        let runs: Vec<u64> = state.runs.keys().copied().collect();
        runs.into_iter().filter(|_| !others).for_each(|run| state.extend(run));
        self.begin_next(&mut state);
        Subscription { blocks: Arc::clone(self), id, client, next: from, end }
    }

    /// Begins to compute waiting blocks.
    fn begin_next(self: &Arc<Self>, state: &mut State) {
        while state.running < RUNNING
            && let Some(id) = state.next_waiting()
        {
            let run = state.tick();
            let Some(entry) = state.entries.get_mut(&id) else { return };
            entry.progress = Progress::Running;
            let (reader, first, block) = (Arc::clone(&entry.reader), entry.next_batch(), entry.block.clone());
            state.begun.insert(block.job.clone(), run);
            let position = Position { step: first, ..reader.position(block.epoch) };
            let (horizon, entries) = (Horizon::at(block.steps.end), VecDeque::from([(id, block.steps.end)]));
            let Block { job, epoch, steps } = block;
            state.runs.insert(run, Run { job, epoch, end: steps.end, horizon: horizon.clone(), entries });
            state.extend(run);
            state.running += 1;
            let blocks = Arc::clone(self);
            let compute = move || {
                let computed = blocks.compute(run, &reader, position, &horizon);
                blocks.finished(run, computed);
            };
            if let Err(error) = std::thread::Builder::new().name("onefold-block".to_owned()).spawn(compute) {
                let status = Status::unavailable(format!("a thread cannot be started: {error}"));
                self.end_run(state, run, Err(status));
            }
        }
    }

    /// Computes the blocks of a run.
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
            self.count(&done);
            counted = stages;
            if !self.add(run, position.step, message, done.seconds()) {
                break;
            }
            position.step += 1;
        }
        Ok(())
    }

    fn count(&self, stages: &StageFigures) {
        let figures = &mut self.state().figures;
        figures.stages = figures.stages.and(stages);
    }

    /// Adds a batch to its block once there is memory for it. Whether somebody wants more.
    fn add(self: &Arc<Self>, run: u64, step: u64, message: Message, made: Duration) -> bool {
        let (bytes, samples) = (message.bytes(), message.samples);
        let mut state = self.state();
        state.figures.batches_computed += 1;
        state.figures.samples_computed += samples;
        let Some(id) = state.entry_of(run, step) else { return false };
        let mut paused = false;
        while state.bytes + bytes > self.limit || !state.may_grow(id, bytes, self.limit) {
            if state.bytes + bytes > self.limit && state.free_some() {
                continue;
            }
            if state.may_grow(id, bytes, self.limit) {
                break;
            }
            if !paused {
                // Another block may need less.
                paused = true;
                state.running -= 1;
                self.begin_next(&mut state);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.running += usize::from(paused);
        let Some(entry) = state.entries.get_mut(&id) else { return false };
        entry.batches.push_back(message);
        entry.made += made;
        if entry.next_batch() == entry.block.steps.end {
            entry.progress = Progress::Complete;
        }
        entry.more.notify_waiters();
        state.bytes += bytes;
        self.cache.leave(state.bytes);
        true
    }

    /// The end of a run's computation.
    fn finished(self: &Arc<Self>, run: u64, computed: Result<(), Status>) {
        let mut state = self.state();
        self.end_run(&mut state, run, computed);
        self.begin_next(&mut state);
        self.changed.notify_all();
    }

    /// Blocks of the run that are not complete wait for another run; the one that failed fails.
    fn end_run(&self, state: &mut State, run: u64, computed: Result<(), Status>) {
        state.running -= 1;
        let Some(run) = state.runs.remove(&run) else { return };
        let mut failed = computed.err();
        for (id, _) in run.entries {
            let Some(entry) = state.entries.get_mut(&id).filter(|entry| !entry.is_complete()) else {
                continue;
            };
            entry.progress = Progress::Waiting;
            // What is wrong with one block need not be wrong with the next.
            if let Some(status) = failed.take() {
                self.fail(state, id, status);
            }
        }
    }

    /// Tells the clients of a block what is wrong, and forgets the block.
    fn fail(&self, state: &mut State, id: u64, status: Status) {
        let Some(entry) = state.entries.get_mut(&id) else { return };
        entry.progress = Progress::Failed(status);
        entry.more.notify_waiters();
        let block = entry.block.clone();
        if state.by_block.get(&block) == Some(&id) {
            state.by_block.remove(&block);
        }
    }
}

/// A client's way through a block.
#[derive(Debug)]
pub(crate) struct Subscription {
    blocks: Arc<Blocks>,
    id: u64,
    client: u64,
    next: u64,
    end: u64,
}

impl Subscription {
    /// The next batch; `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<Result<Message, Status>> {
        if self.next >= self.end {
            return None;
        }
        loop {
            let more = {
                let mut state = self.blocks.state();
                let entry = state.entries.get_mut(&self.id)?;
                if let Some(message) = entry.message(self.next) {
                    self.next += 1;
                    entry.clients.insert(self.client, self.next);
                    self.blocks.changed.notify_all();
                    if let Ok(message) = &message {
                        state.figures.batches_sent += 1;
                        state.figures.bytes_sent += message.bytes();
                    }
                    return Some(message);
                }
                // From here on it hears of what comes.
                Arc::clone(&entry.more).notified_owned()
            };
            more.await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut state = self.blocks.state();
        if let Some(entry) = state.entries.get_mut(&self.id) {
            entry.clients.remove(&self.client);
            if entry.clients.is_empty()
                && let Some(entry) = state.remove(self.id)
            {
                self.blocks.cache.leave(state.bytes);
                entry.keep(&self.blocks.cache);
            }
        }
        self.blocks.begin_next(&mut state);
        self.blocks.changed.notify_all();
    }
}
