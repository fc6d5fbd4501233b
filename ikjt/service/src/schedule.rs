//! The schedule of a worker: which blocks it computes next, and which batches it holds. This module only keeps state:
//! events are inputs, [actions](Action) are outputs, and the caller passes the time.
//!
//! # Memory
//!
//! There are two budgets.
//!
//! - **Reading.** A run computes consecutive blocks with one reader. It begins only if the memory of its reader fits
//!   beside the memory of the other runs. A run is paused while there is no room for its next batch. If another run
//!   could proceed instead, the paused run ends, and its blocks are computed later from the same step.
//! - **Batches** that wait for clients, and batches that the network has not taken yet. Jobs have equal shares. A
//!   client that waits for its next batch and has no other batch under way gets it even if its job exceeds its share,
//!   so every client makes progress. The room comes first from batches that all clients have received, then from jobs
//!   that exceed their shares.
//!
//! # Clients of equal jobs
//!
//! A block that several clients read is computed once. Clients may be up to [`WINDOW`] blocks apart: complete blocks
//! are kept until the last client has received them. A client at the front waits for the clients behind it at the end
//! of the window, and also if these blocks use up the job's share. It does not wait for a client that takes nothing
//! for [`PATIENCE`], or that begins far behind it.

mod clients;
mod room;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onefold_ikjt::Horizon;
use onefold_ikjt::service::protocol::{Block, Ticket};
use tokio::sync::Notify;
use tonic::Status;

use crate::sending::Message;

/// The number of runs that compute at the same time. Each run uses all threads; the second one computes while the
/// first one waits for storage.
const COMPUTING: usize = 2;

/// The number of blocks by which clients of a job may be apart. A client waits for others that are farther behind, up
/// to twice this distance.
const WINDOW: u64 = 16;

/// The time after which a client that takes nothing is no longer waited for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The limits of a worker's memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The memory that all runs may use for reading.
    pub(crate) reading: u64,
    /// The memory for batches that wait for clients.
    pub(crate) batches: u64,
}

/// A client's request for the batches of a block.
#[derive(Debug)]
pub(crate) struct Request<T> {
    /// The block, and the first requested step: a step of the block, or its end.
    pub(crate) ticket: Ticket,
    /// The memory in bytes that computing the block takes.
    pub(crate) reading: u64,
    /// A value of the caller, which actions for the block return.
    pub(crate) of_block: T,
    /// All batches of the block, if they were in the cache.
    pub(crate) cached: Option<Vec<Message>>,
}

/// An action that the caller must carry out.
#[derive(Debug)]
pub(crate) enum Action<T> {
    /// Computes the batches of a run from a step on, up to the horizon.
    Start { run: u64, of_block: T, epoch: u64, from: u64, horizon: Horizon },
    /// Wakes the clients that wait for batches of a block.
    Wake(Arc<Notify>),
    /// Wakes the paused runs, so that one that must end offers its batch again and is told to end.
    Close,
    /// Offers a complete block that no client reads any more to the cache. `made` is the processor time of its
    /// batches, if they were computed here.
    Keep { of_block: T, block: Block, batches: Vec<Message>, made: Option<Duration> },
}

/// The decision about a computed batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// There is room for the batch: call [`Schedule::add`].
    Add,
    /// There is no room at present: offer the batch again after the next event.
    Wait,
    /// The run must end.
    End,
}

/// The answer to a client that requests its next batch.
#[derive(Debug)]
pub(crate) enum Taken {
    Message(Message),
    Failed(Status),
    /// There is no batch yet. The client tries again when it is notified.
    Wait(Arc<Notify>),
    /// The block has no further batch.
    End,
}

/// The schedule of a worker; see the [module](self).
#[derive(Debug)]
pub(crate) struct Schedule<T> {
    limits: Limits,
    entries: BTreeMap<u64, Entry<T>>,
    /// The entry that new clients of a block join.
    by_block: HashMap<Block, u64>,
    /// The entry of each subscription.
    subscriptions: HashMap<u64, u64>,
    runs: BTreeMap<u64, Run>,
    jobs: HashMap<String, Job>,
    /// For each subscription, the bytes that the network has not taken yet of blocks that were removed.
    left: HashMap<u64, u64>,
    /// A counter of events, which orders them and generates ids.
    clock: u64,
    actions: Vec<Action<T>>,
}

#[derive(Debug, Default)]
struct Job {
    /// The time of the event at which a run of the job last began.
    begun: u64,
    /// The size of its largest batch in bytes.
    largest: u64,
    /// Its clients, by name.
    clients: HashMap<String, Client>,
}

/// A client that reads an epoch of a job.
#[derive(Debug)]
struct Client {
    epoch: u64,
    pass: u64,
    /// The last step that it has requested.
    at: u64,
    /// The time at which it last took a batch.
    seen: Instant,
}

/// A block that clients read or wait for, or that one of them will request.
#[derive(Debug)]
struct Entry<T> {
    block: Block,
    of_block: T,
    reading: u64,
    /// The step of the first batch that is held.
    first: u64,
    batches: VecDeque<Message>,
    progress: Progress,
    /// The clients that read the block, by subscription.
    takers: BTreeMap<u64, Taker>,
    /// For each subscription, including ended ones, the steps and bytes of batches that the network has not taken
    /// yet.
    under_way: BTreeMap<u64, VecDeque<(u64, u64)>>,
    made: Option<Duration>,
    more: Arc<Notify>,
}

#[derive(Debug, Clone)]
struct Taker {
    client: String,
    pass: u64,
    /// The next step.
    next: u64,
}

#[derive(Debug)]
enum Progress {
    Waiting,
    Running,
    Complete,
    Failed(Status),
}

/// Consecutive blocks that are computed in one pass. Longer runs are cheaper, because only a part of the row groups at
/// the two ends of a run is needed, but these are decoded completely.
#[derive(Debug)]
struct Run {
    job: String,
    epoch: u64,
    reading: u64,
    /// The end of its last block.
    end: u64,
    horizon: Horizon,
    /// Its incomplete blocks in order, each with the end of its steps.
    entries: VecDeque<(u64, u64)>,
    /// The number of batches that were added.
    added: u64,
    /// Whether it waits for room.
    paused: bool,
    /// Whether it must end.
    closing: bool,
}

impl<T> Entry<T> {
    /// Creates the entry of a block from the step `from` on, or of the whole block if it was cached.
    fn new(request: Request<T>) -> Self {
        let Request { ticket: Ticket { block, from, .. }, reading, of_block, cached } = request;
        let made = cached.is_none().then_some(Duration::ZERO);
        let (first, progress, batches) = match cached {
            Some(batches) => (block.steps.start, Progress::Complete, batches.into()),
            None if from >= block.steps.end => (block.steps.end, Progress::Complete, VecDeque::new()),
            None => (from, Progress::Waiting, VecDeque::new()),
        };
        let (takers, under_way, more) = (BTreeMap::new(), BTreeMap::new(), Arc::new(Notify::new()));
        Self { block, of_block, reading, first, batches, progress, takers, under_way, made, more }
    }

    fn bytes(&self) -> u64 {
        self.batches.iter().map(Message::bytes).sum()
    }

    /// Returns the step of the batch that is computed next.
    fn next_batch(&self) -> u64 {
        self.first + self.batches.len() as u64
    }

    fn is_whole(&self) -> bool {
        matches!(self.progress, Progress::Complete) && self.first == self.block.steps.start
    }

    /// Returns the bytes of batches on their way to clients that the entry itself no longer holds.
    fn under_way(&self) -> u64 {
        let held = self.first..self.next_batch();
        let under_way = self.under_way.values().flatten();
        under_way.filter(|(step, _)| !held.contains(step)).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the number of steps of the block, at least 1.
    fn length(&self) -> u64 {
        self.block.steps.end.saturating_sub(self.block.steps.start).max(1)
    }

    fn is_of(&self, job: &str) -> bool {
        self.block.job == job
    }

    fn is_read_by(&self, client: &str) -> bool {
        self.takers.values().any(|taker| taker.client == client)
    }
}

impl<T: Clone> Schedule<T> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: BTreeMap::new(),
            by_block: HashMap::new(),
            subscriptions: HashMap::new(),
            runs: BTreeMap::new(),
            jobs: HashMap::new(),
            left: HashMap::new(),
            clock: 0,
            actions: Vec::new(),
        }
    }

    /// Takes the actions that the events since the last call require, in order.
    pub(crate) fn take_actions(&mut self) -> Vec<Action<T>> {
        std::mem::take(&mut self.actions)
    }

    /// Returns whether there are actions to carry out.
    pub(crate) fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// Returns the number of blocks that clients read or wait for.
    pub(crate) fn active(&self) -> usize {
        self.entries.values().filter(|entry| !entry.takers.is_empty()).count()
    }

    /// Returns whether a client reads a block, or will request it.
    pub(crate) fn has(&self, block: &Block) -> bool {
        self.by_block.contains_key(block)
    }

    /// Returns the bytes of batches that are held, and of batches that the network has not taken yet.
    pub(crate) fn used(&self) -> u64 {
        let held = self.entries.values().map(|entry| entry.bytes() + entry.under_way());
        held.sum::<u64>() + self.left.values().sum::<u64>()
    }

    /// Subscribes a client to a block, and returns the id of the subscription.
    pub(crate) fn subscribe(&mut self, request: Request<T>, now: Instant) -> u64 {
        let subscription = self.tick();
        let Ticket { block, from: next, client, pass } = request.ticket.clone();
        let job = block.job.clone();
        let known = self.by_block.get(&block).copied().filter(|id| {
            let entry = self.entries.get(id);
            entry.is_some_and(|entry| entry.first <= next && !matches!(entry.progress, Progress::Failed(_)))
        });
        let id = known.unwrap_or(subscription);
        if known.is_none() {
            let used = self.used();
            let fits = |batches: &Vec<Message>| {
                used + batches.iter().map(Message::bytes).sum::<u64>() <= self.limits.batches
            };
            let cached = request.cached.filter(fits);
            self.by_block.insert(block.clone(), id);
            self.entries.insert(id, Entry::new(Request { cached, ..request }));
        }
        let taker = Taker { client, pass, next };
        self.saw(&block, &taker, now);
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.takers.insert(subscription, taker);
        }
        self.subscriptions.insert(subscription, id);
        // Runs are extended unless another job's block waits.
        if !self.waiting(now).any(|(_, entry)| !entry.is_of(&job)) {
            let runs: Vec<u64> = self.runs.keys().copied().collect();
            runs.into_iter().for_each(|run| self.extend(run));
        }
        self.begin(now);
        subscription
    }

    /// Returns the next batch of a subscription, if it is available.
    pub(crate) fn take(&mut self, subscription: u64, now: Instant) -> Taken {
        let found = self.subscriptions.get(&subscription).copied();
        let found = found.and_then(|id| {
            let entry = self.entries.get(&id)?;
            Some((id, entry, entry.takers.get(&subscription)?))
        });
        let Some((id, entry, taker)) = found.filter(|(_, entry, taker)| taker.next < entry.block.steps.end)
        else {
            return Taken::End;
        };
        let (step, more) = (taker.next, Arc::clone(&entry.more));
        let Some(place) = step.checked_sub(entry.first) else {
            let message = "the worker has given up batches that a client had not read for long";
            return Taken::Failed(Status::unavailable(message));
        };
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        let Some(message) = entry.batches.get(place).cloned() else {
            return match &entry.progress {
                Progress::Failed(status) => Taken::Failed(status.clone()),
                _ => Taken::Wait(more),
            };
        };
        let bytes = message.bytes();
        let is_next = !entry.under_way.contains_key(&subscription) && self.is_first(entry, &taker.client);
        if !is_next && self.under_way_of(&entry.block.job) + bytes > self.share() {
            return Taken::Wait(more);
        }
        let (block, taker) = (entry.block.clone(), taker.clone());
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.under_way.entry(subscription).or_default().push_back((step, bytes));
            if let Some(taker) = entry.takers.get_mut(&subscription) {
                taker.next += 1;
            }
        }
        self.saw(&block, &taker, now);
        self.begin(now);
        Taken::Message(message)
    }

    /// Records that the network has taken the oldest batch of a subscription, which has `bytes` bytes.
    pub(crate) fn sent(&mut self, subscription: u64, bytes: u64, now: Instant) {
        if let Some(left) = self.left.get_mut(&subscription) {
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                self.left.remove(&subscription);
            }
        }
        let id = self.subscriptions.get(&subscription);
        if let Some(entry) = id.and_then(|id| self.entries.get_mut(id)) {
            if let Some(under_way) = entry.under_way.get_mut(&subscription) {
                under_way.pop_front();
                if under_way.is_empty() {
                    entry.under_way.remove(&subscription);
                }
            }
            let is_over =
                !entry.takers.contains_key(&subscription) && !entry.under_way.contains_key(&subscription);
            let job = entry.block.job.clone();
            if is_over {
                self.subscriptions.remove(&subscription);
            }
            self.wake(&job);
        }
        self.begin(now);
    }

    /// Ends a subscription.
    pub(crate) fn unsubscribe(&mut self, subscription: u64, now: Instant) {
        let id = self.subscriptions.get(&subscription);
        let Some(entry) = id.and_then(|id| self.entries.get_mut(id)) else { return };
        let (job, end) = (entry.block.job.clone(), entry.block.steps.end);
        let Some(taker) = entry.takers.remove(&subscription) else { return };
        if !entry.under_way.contains_key(&subscription) {
            self.subscriptions.remove(&subscription);
        }
        let reads_more =
            self.entries.values().any(|entry| entry.is_of(&job) && entry.is_read_by(&taker.client));
        let clients = self.jobs.get_mut(&job).map(|job| &mut job.clients);
        if let Some(clients) = clients {
            if taker.next < end && !reads_more {
                // The client has ended, or asks other workers.
                clients.remove(&taker.client);
            } else if let Some(client) = clients.get_mut(&taker.client) {
                client.at = client.at.max(taker.next);
                client.seen = now;
            }
        }
        self.wake(&job);
        self.pass(now);
    }

    /// Updates the schedule after time has passed.
    pub(crate) fn pass(&mut self, now: Instant) {
        for job in self.jobs.values_mut() {
            job.clients.retain(|_, client| client.is_there(now));
        }
        let is_over =
            |entry: &Entry<T>| entry.takers.is_empty() && !(entry.is_whole() && self.is_owed(entry, now));
        let over: Vec<u64> =
            self.entries.iter().filter(|(_, entry)| is_over(entry)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.remove(id));
        let of_entries = self.entries.values().map(|entry| &entry.block.job);
        let known: HashSet<String> =
            of_entries.chain(self.runs.values().map(|run| &run.job)).cloned().collect();
        self.jobs.retain(|name, job| !job.clients.is_empty() || known.contains(name));
        self.begin(now);
    }

    /// Decides what happens to a batch of `bytes` bytes that a run has computed.
    pub(crate) fn offer(&mut self, run: u64, step: u64, bytes: u64, now: Instant) -> Verdict {
        let Some(id) = self.entry_of(run, step) else { return self.close(run) };
        if let Some(job) = self.runs.get(&run).and_then(|run| self.jobs.get_mut(&run.job)) {
            job.largest = job.largest.max(bytes);
        }
        let has_room = self.make_room(id, bytes, now);
        let Some(known) = self.runs.get_mut(&run).filter(|run| !run.closing) else { return self.close(run) };
        known.paused = !has_room;
        if has_room {
            return Verdict::Add;
        }
        // Other clients may wait for the blocks after this one, so another run may compute them.
        let later = known.entries.split_off(1);
        known.end = known.entries.front().map_or(known.end, |(_, end)| *end);
        for (id, _) in later {
            let entry = self.entries.get_mut(&id);
            if let Some(entry) = entry.filter(|entry| matches!(entry.progress, Progress::Running)) {
                entry.progress = Progress::Waiting;
            }
        }
        // Another block may need less memory.
        self.begin(now);
        match self.runs.get(&run).is_some_and(|run| !run.closing) {
            true => Verdict::Wait,
            false => Verdict::End,
        }
    }

    fn close(&mut self, run: u64) -> Verdict {
        if let Some(run) = self.runs.get_mut(&run) {
            run.closing = true;
        }
        Verdict::End
    }

    /// Adds a batch after [`Verdict::Add`]. Its processor time was `made`.
    pub(crate) fn add(&mut self, run: u64, step: u64, message: Message, made: Duration) {
        let id = self.entry_of(run, step);
        let Some(entry) = id.and_then(|id| self.entries.get_mut(&id)) else { return };
        entry.batches.push_back(message);
        if let Some(all) = &mut entry.made {
            *all += made;
        }
        if entry.next_batch() == entry.block.steps.end {
            entry.progress = Progress::Complete;
        }
        self.actions.push(Action::Wake(Arc::clone(&entry.more)));
        let is_complete = matches!(entry.progress, Progress::Complete);
        if let Some(run) = self.runs.get_mut(&run) {
            run.added += 1;
            if is_complete {
                run.entries.pop_front();
            }
        }
    }

    /// Records that a run has ended and released its memory. Its incomplete blocks wait for another run. If the run
    /// failed, its current block fails.
    pub(crate) fn ended(&mut self, run: u64, computed: Result<(), Status>, now: Instant) {
        let Some(run) = self.runs.remove(&run) else { return };
        let mut failed = match computed {
            Err(status) => Some(status),
            // Another try would end in the same way.
            Ok(()) if run.added == 0 && !run.closing => {
                Some(Status::internal("the epoch ends before a block that was asked for"))
            }
            Ok(()) => None,
        };
        for (id, _) in run.entries {
            let running = |entry: &&mut Entry<T>| matches!(entry.progress, Progress::Running);
            let Some(entry) = self.entries.get_mut(&id).filter(running) else { continue };
            // The failure of one block does not affect the next one.
            match failed.take() {
                None => entry.progress = Progress::Waiting,
                Some(status) => {
                    entry.progress = Progress::Failed(status);
                    self.actions.push(Action::Wake(Arc::clone(&entry.more)));
                    if self.by_block.get(&entry.block) == Some(&id) {
                        self.by_block.remove(&entry.block);
                    }
                }
            }
        }
        self.pass(now);
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Wakes the clients that wait for batches of a job's blocks.
    fn wake(&mut self, job: &str) {
        let entries = self.entries.values().filter(|entry| entry.is_of(job) && !entry.takers.is_empty());
        self.actions.extend(entries.map(|entry| Action::Wake(Arc::clone(&entry.more))));
    }

    fn remove(&mut self, id: u64) {
        let Some(entry) = self.entries.remove(&id) else { return };
        for (subscription, under_way) in &entry.under_way {
            self.left.insert(*subscription, under_way.iter().map(|(_, bytes)| bytes).sum());
            self.subscriptions.remove(subscription);
        }
        if self.by_block.get(&entry.block) == Some(&id) {
            self.by_block.remove(&entry.block);
        }
        if entry.is_whole() {
            let Entry { block, of_block, batches, made, .. } = entry;
            self.actions.push(Action::Keep { of_block, block, batches: batches.into(), made });
        }
    }

    /// Returns the blocks that may be computed now.
    fn waiting(&self, now: Instant) -> impl Iterator<Item = (&u64, &Entry<T>)> {
        let (share, needed) = (self.share(), self.needed_by_job(now));
        let may_begin = move |entry: &Entry<T>| {
            if !matches!(entry.progress, Progress::Waiting) || entry.takers.is_empty() {
                return false;
            }
            let job = entry.block.job.as_str();
            let needed = needed[job];
            let largest = self.jobs.get(job).map_or(0, |job| job.largest);
            // Starting a run for a few batches only would cost more than it gains.
            let is_worth_it = needed <= share / 2 && needed.saturating_add(largest) <= share;
            (is_worth_it || self.is_awaited(entry, now)) && !self.is_held(entry, now)
        };
        self.entries.iter().filter(move |(_, entry)| may_begin(entry))
    }

    /// Starts computing waiting blocks, in turns over the jobs. The first block of a job comes first.
    fn begin(&mut self, now: Instant) {
        while self.runs.values().filter(|run| !run.paused).count() < COMPUTING {
            let turn = |entry: &Entry<T>| {
                let begun = self.jobs.get(&entry.block.job).map_or(0, |job| job.begun);
                (begun, entry.block.epoch, entry.block.steps.start)
            };
            let next = self.waiting(now).min_by_key(|(_, entry)| turn(entry)).map(|(id, _)| *id);
            let Some(id) = next else { return };
            let Some(reading) = self.entries.get(&id).map(|entry| entry.reading) else { return };
            let held: u64 = self.runs.values().map(|run| run.reading).fold(0, u64::saturating_add);
            if !self.runs.is_empty() && held.saturating_add(reading) > self.limits.reading {
                if !self.runs.values().any(|run| run.closing)
                    && let Some(paused) = self.runs.values_mut().find(|run| run.paused)
                {
                    paused.closing = true;
                    self.actions.push(Action::Close);
                }
                return;
            }
            self.start(id);
        }
    }

    /// Starts a run with a waiting block.
    fn start(&mut self, id: u64) {
        let run = self.tick();
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.progress = Progress::Running;
        let (from, of_block, reading) = (entry.next_batch(), entry.of_block.clone(), entry.reading);
        let Block { job, epoch, steps } = entry.block.clone();
        self.jobs.entry(job.clone()).or_default().begun = run;
        let (horizon, end) = (Horizon::at(steps.end), steps.end);
        let entries = VecDeque::from([(id, end)]);
        let begun = Run {
            job,
            epoch,
            reading,
            end,
            horizon: horizon.clone(),
            entries,
            added: 0,
            paused: false,
            closing: false,
        };
        self.runs.insert(run, begun);
        self.extend(run);
        self.actions.push(Action::Start { run, of_block, epoch, from, horizon });
    }

    /// Adds waiting blocks that follow the last block of a run to the run.
    fn extend(&mut self, run: u64) {
        let may_go_on = |run: &&mut Run| !run.closing && !run.paused;
        let Some(run) = self.runs.get_mut(&run).filter(may_go_on) else { return };
        loop {
            let follows = |entry: &Entry<T>| {
                matches!(entry.progress, Progress::Waiting)
                    && entry.is_of(&run.job)
                    && entry.block.epoch == run.epoch
                    && entry.next_batch() == run.end
            };
            let Some((id, entry)) = self.entries.iter_mut().find(|(_, entry)| follows(entry)) else { return };
            entry.progress = Progress::Running;
            run.end = entry.block.steps.end;
            run.horizon.move_to(run.end);
            run.entries.push_back((*id, run.end));
        }
    }

    /// Returns the block of a run whose next batch is the batch of `step`, or `None` if no client reads it any more.
    fn entry_of(&mut self, run: u64, step: u64) -> Option<u64> {
        let entries = &mut self.runs.get_mut(&run)?.entries;
        // The entries before this step are complete.
        while entries.front().is_some_and(|(_, end)| *end <= step) {
            entries.pop_front();
        }
        let id = entries.front().map(|(id, _)| *id)?;
        let entry = self.entries.get(&id)?;
        (matches!(entry.progress, Progress::Running) && entry.next_batch() == step).then_some(id)
    }
}

#[cfg(test)]
mod tests;
