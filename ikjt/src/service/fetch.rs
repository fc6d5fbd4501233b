//! Fetches the batches of an epoch from workers: each batch exactly once and in order, even if workers or the master
//! fail.
//!
//! An epoch is divided into **blocks** of steps. The client asks the master which worker computes a block, and asks
//! that worker for its batches. It requests several blocks at the same time, so that several workers compute in
//! parallel, and delivers the batches of the first block. The bytes of a batch depend only on the job and the step.
//! Therefore every failure has the same remedy: request the missing batches from another worker.
//!
//! ```text
//!           first block                      further blocks from other workers
//! caller ◀── batch │ batch │ batch ◀─ worker    batch │ batch ◀─ worker    batch │ batch ◀─ worker
//!                     │ no batch arrives for long:
//!                     └─ the same steps from another worker; the first answer is used
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use arrow::buffer::Buffer;
use arrow_flight::FlightData;
use onefold_base::fault::{Fault, Kind};
use onefold_base::sync::locked;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use xxhash_rust::xxh3::xxh3_64;

use super::client::{PATIENCE, Service, Tries, unexpected};
use super::network::{BLOCK_WINDOW, Failure, malformed};
use super::pace::Pace;
use super::protocol::{BatchHeader, Block, ClientState, Job, Lease, Leased, Notice, SAME_BYTES, Ticket};
use super::waiting::Waiting;
use crate::batch::PackedBatch;
use crate::error::{Error, Result};
use crate::reader::{Deliver, IsGone, Wanted};

/// The maximal number of blocks that one client requests at the same time, and thereby of workers that compute for
/// it.
const MOST_BLOCKS: u64 = 16;

/// The least number of batches of a block that must fit into this process's memory.
const READY: u64 = 2;

/// Returns the least memory in bytes that a requested block takes in this process, for batches of `batch_bytes`:
/// batches that wait for delivery, one that arrives, and the network's buffers.
fn block_bytes(batch_bytes: u64) -> u64 {
    batch_bytes.saturating_mul(READY + 1).saturating_add(u64::from(BLOCK_WINDOW))
}

/// The unit in which memory is counted, in bytes, because a semaphore cannot count enough bytes.
const ROOM_UNIT: usize = 1 << 10;

/// The number of blocks that are requested per worker, so that a worker begins the next block while the client reads
/// the previous one.
const BLOCKS_OF_WORKER: usize = 2;

/// The interval of progress reports to the master.
const REPORT: Duration = Duration::from_secs(1);

/// The time limit of a report.
const REPORTED_WITHIN: Duration = Duration::from_secs(5);

/// The interval of checking whether the caller is gone.
const LOOK: Duration = Duration::from_millis(50);

fn ended_early(stream: &Stream) -> Fault {
    let worker = stream.worker().unwrap_or_default();
    Fault::new(Kind::Storage, format!("the worker `{worker}` ended before its batches did"))
}

/// Waits until the caller is gone.
async fn until_gone(is_gone: &IsGone<'_>) {
    while !is_gone() {
        tokio::time::sleep(LOOK).await;
    }
}

/// The progress of a client, which it reports to the master.
struct ProgressReport {
    service: Arc<Service>,
    began: Instant,
    state: Mutex<ClientState>,
    waiting: Waiting,
}

impl ProgressReport {
    /// Counts a batch that has arrived.
    fn got(&self, batch: &PackedBatch) {
        let mut state = locked(&self.state);
        state.samples += batch.places().size as u64;
        state.bytes += batch.memory().len() as u64;
    }

    /// Returns the state to report now.
    fn now(&self) -> ClientState {
        ClientState { seconds: self.began.elapsed().as_secs_f64(), ..locked(&self.state).clone() }
    }

    /// Reports to the master once a second, including while the caller evaluates or writes a checkpoint. Does not
    /// repeat a report that fails.
    async fn report(self: Arc<Self>) {
        loop {
            tokio::time::sleep(REPORT).await;
            let report = Arc::clone(&self);
            tokio::spawn(async move {
                let state = report.now();
                let _ = tokio::time::timeout(REPORTED_WITHIN, report.service.ask_master(&state)).await;
            });
        }
    }
}

/// An epoch that is being fetched.
pub(super) struct Fetch {
    job: Arc<Job>,
    /// The key of the job.
    key: String,
    wanted: Wanted,
    /// The client's name, which is unique to this epoch.
    name: String,
    progress: Arc<ProgressReport>,
    /// The maximal number of blocks that are requested at the same time.
    most_ahead: usize,
    /// The memory in bytes that each of them may take in this process. More memory lets workers run further ahead.
    block_bytes: u64,
    /// The number of requested blocks that keeps all workers busy.
    ahead: usize,
    pace: Pace,
}

impl Fetch {
    pub(super) fn new(service: &Arc<Service>, job: Job, wanted: Wanted) -> Self {
        let blocks = (wanted.memory / block_bytes(wanted.batch_bytes)).clamp(1, MOST_BLOCKS);
        let (name, key) = (onefold_storage::random_name(), job.key());
        let state = ClientState {
            client: name.clone(),
            job: key.clone(),
            dataset: job.dataset.clone(),
            ..ClientState::default()
        };
        let progress = Arc::new(ProgressReport {
            service: Arc::clone(service),
            began: Instant::now(),
            state: Mutex::new(state),
            waiting: service.waiting(),
        });
        Self {
            job: Arc::new(job),
            key,
            name,
            progress,
            most_ahead: blocks as usize,
            block_bytes: wanted.memory / blocks,
            wanted,
            ahead: BLOCKS_OF_WORKER,
            pace: Pace::new(Instant::now()),
        }
    }

    /// Returns the name of the run of row groups that a step reads.
    fn affinity(&self, step: u64) -> Option<String> {
        let row_groups = &self.wanted.row_groups;
        let after = row_groups.partition_point(|(start, _)| *start <= step);
        row_groups.get(after.checked_sub(1)?).map(|(_, name)| name.clone())
    }

    /// Fetches all batches and passes each one to `deliver`. Ends early if `deliver` returns `None` or the caller
    /// `is_gone`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for an error that a worker reports about the job or its data, and if no batch arrives for a
    /// long time.
    pub(super) async fn run(mut self, deliver: &mut Deliver<'_>, is_gone: &IsGone<'_>) -> Result<()> {
        let progress = Arc::clone(&self.progress);
        let mut reporting = JoinSet::new();
        reporting.spawn(Arc::clone(&progress).report());
        let ended = tokio::select! {
            ended = progress.waiting.watch(self.fetch_all(deliver)) => ended,
            () = until_gone(is_gone) => Ok(()),
        };
        drop(reporting);
        // Reports the end, which the master would otherwise notice only some seconds later. A caller that is gone, for
        // example after Ctrl-C, does not wait for a master that does not answer.
        let state = ClientState { ended: true, ..progress.now() };
        let reported = tokio::spawn(async move {
            let _ = tokio::time::timeout(REPORT, progress.service.ask_master(&state)).await;
        });
        let given_up = async {
            until_gone(is_gone).await;
            tokio::time::sleep(LOOK).await;
        };
        tokio::select! {
            _ = reported => {}
            () = given_up => {}
        }
        ended
    }

    async fn fetch_all(&mut self, deliver: &mut Deliver<'_>) -> Result<()> {
        let (Range { start, end }, block_steps) = (self.wanted.steps.clone(), self.wanted.block_steps);
        let block_of = |step: u64| step - step % block_steps;
        let mut coming: VecDeque<(Range<u64>, u64, Stream)> = VecDeque::new();
        let mut next = start;
        loop {
            while coming.len() < self.ahead.clamp(1, self.most_ahead) && next < end {
                let block = block_of(next)..block_of(next).saturating_add(block_steps).min(end);
                let stream = self.open(&block, next, Vec::new());
                let from = std::mem::replace(&mut next, block.end);
                coming.push_back((block, from, stream));
            }
            let Some((block, from, stream)) = coming.pop_front() else { return Ok(()) };
            if !self.block(&block, from, stream, deliver).await? {
                return Ok(());
            }
        }
    }

    /// Requests the batches of a block from the step `from` on.
    fn open(&self, block: &Range<u64>, from: u64, avoid: Vec<String>) -> Stream {
        let block = Block { job: self.key.clone(), epoch: self.wanted.epoch, steps: block.clone() };
        let affinity = self.affinity(block.steps.start);
        let client = Some(self.progress.now());
        let lease = Lease { key: block.key(), affinity, avoid, client, same_bytes: SAME_BYTES };
        let room = self.block_bytes.saturating_sub(u64::from(BLOCK_WINDOW));
        let ticket = Ticket { block, from, client: self.name.clone(), pass: self.wanted.pass };
        Stream::open(&self.progress.service, &self.job, lease, ticket, room)
    }

    /// Delivers the batches of a block from the step `from` on. Returns whether the caller wants more.
    async fn block(
        &mut self,
        block: &Range<u64>,
        from: u64,
        stream: Stream,
        deliver: &mut Deliver<'_>,
    ) -> Result<bool> {
        let mut sources = Sources { first: stream, second: None };
        let mut tries = Tries::new(PATIENCE);
        let mut step = from;
        let progress = Arc::clone(&self.progress);
        let (waiting, master) = (&progress.waiting, progress.service.master());
        waiting.because(sources.reason());
        self.pace.restart(Instant::now());
        while step < block.end {
            let cause = match sources.next(self.pace.left(Instant::now())).await {
                Next::Came(Ok(Came::Batch(found, batch))) if found == step => {
                    tries.succeeded();
                    waiting.over();
                    self.pace.came(Instant::now());
                    if let Some(leased) = sources.first.worker.get() {
                        self.ahead = BLOCKS_OF_WORKER * leased.workers;
                    }
                    progress.got(&batch);
                    step += 1;
                    let Some(waited) = deliver(batch) else { return Ok(false) };
                    locked(&progress.state).waited_seconds = waited.as_secs_f64();
                    self.pace.restart(Instant::now());
                    waiting.because(sources.reason());
                    continue;
                }
                Next::Came(Ok(Came::Notice(Notice { reason, waits_for_client }))) => {
                    waiting.because(reason);
                    self.pace.heard(Instant::now(), waits_for_client);
                    continue;
                }
                Next::Nothing => {
                    locked(&progress.state).second_requests += 1;
                    sources.second = Some(self.open(block, step, sources.workers()));
                    continue;
                }
                Next::OneFailed => {
                    self.pace.restart(Instant::now());
                    continue;
                }
                Next::Came(Ok(Came::Batch(found, _))) => {
                    let message = format!("the batch of step {found} came in place of that of step {step}");
                    Fault::new(Kind::Storage, message)
                }
                Next::Came(Err(Failure::Passing(cause))) => cause,
                Next::Came(Err(Failure::Final(error))) => return Err(error),
                Next::Came(Err(Failure::UnknownJob)) => return Err(unexpected()),
            };
            locked(&progress.state).retries += 1;
            tries.again(waiting, master, cause).await?;
            sources = Sources { first: self.open(block, step, sources.workers()), second: None };
            self.pace.restart(Instant::now());
        }
        Ok(true)
    }
}

/// The sources of a block's batches: one worker, and a second one if the first is a straggler.
struct Sources {
    first: Stream,
    second: Option<Stream>,
}

/// The next event.
enum Next {
    Came(Received),
    /// Nothing arrived within the time limit.
    Nothing,
    /// One of two workers failed.
    OneFailed,
}

impl Sources {
    /// Returns the first event of either worker. If it is a batch, the other worker is given up; if it is a failure,
    /// the other worker remains.
    async fn next(&mut self, patience: Duration) -> Next {
        let Some(second) = &mut self.second else {
            return match tokio::time::timeout(patience, self.first.next()).await {
                Ok(Some(came)) => Next::Came(came),
                Ok(None) => Next::Came(Err(Failure::Passing(ended_early(&self.first)))),
                Err(_) => Next::Nothing,
            };
        };
        let (second_came, came) = tokio::select! {
            came = self.first.next() => (false, came),
            came = second.next() => (true, came),
        };
        let came = match came {
            Some(notice @ Ok(Came::Notice(_))) => return Next::Came(notice),
            came => came,
        };
        let succeeded = matches!(came, Some(Ok(_)));
        if let Some(second) = self.second.take().filter(|_| second_came == succeeded) {
            self.first = second;
        }
        match came {
            Some(came @ (Ok(_) | Err(Failure::Final(_)))) => Next::Came(came),
            _ => Next::OneFailed,
        }
    }

    /// Returns the reason for waiting, for people.
    fn reason(&self) -> String {
        match self.first.worker() {
            Some(worker) => format!("the worker `{worker}` has not given the next batch yet"),
            None => "the master has not named a worker yet".to_owned(),
        }
    }

    /// Returns the workers that were asked.
    fn workers(&self) -> Vec<String> {
        let streams = [Some(&self.first), self.second.as_ref()];
        streams.into_iter().flatten().filter_map(Stream::worker).collect()
    }
}

/// A message of a worker: a batch with its step, or a notice.
enum Came {
    Batch(u64, PackedBatch),
    Notice(Notice),
}

/// A message of a worker, or the failure that ended the connection.
type Received = Result<Came, Failure>;

/// The batches that one worker sends.
struct Stream {
    /// The received batches, each with the memory that it reserves until it is delivered.
    batches: mpsc::UnboundedReceiver<(Received, Option<OwnedSemaphorePermit>)>,
    worker: Arc<OnceLock<Leased>>,
    /// Its task ends when this is dropped.
    _task: JoinSet<()>,
}

impl Stream {
    /// Asks the master for a worker, and the worker for batches. Received batches may take `room` bytes, or the size
    /// of one batch if it is larger.
    fn open(service: &Arc<Service>, job: &Arc<Job>, lease: Lease, ticket: Ticket, room: u64) -> Self {
        let (sender, batches) = mpsc::unbounded_channel();
        let worker = Arc::new(OnceLock::new());
        let (service, job, of_task) = (Arc::clone(service), Arc::clone(job), Arc::clone(&worker));
        let room = usize::try_from(room).unwrap_or(usize::MAX) / ROOM_UNIT;
        let mut task = JoinSet::new();
        task.spawn(async move {
            let room = room.clamp(1, Semaphore::MAX_PERMITS);
            let received = receive(&service, &job, lease, ticket, &of_task, (room, &sender)).await;
            if let Err(failure) = received {
                let _ = sender.send((Err(failure), None));
            }
        });
        Self { batches, worker, _task: task }
    }

    async fn next(&mut self) -> Option<Received> {
        // Dropping the permit releases the memory of the batch for the next ones.
        self.batches.recv().await.map(|(received, _)| received)
    }

    /// Returns the worker, if the master has assigned one.
    fn worker(&self) -> Option<String> {
        self.worker.get().map(|leased| leased.worker.clone())
    }
}

/// Receives the batches of a ticket. Those that wait in the queue `sender` take at most `room` units of [`ROOM_UNIT`].
async fn receive(
    service: &Service,
    job: &Job,
    lease: Lease,
    ticket: Ticket,
    worker: &OnceLock<Leased>,
    (room, sender): (usize, &mpsc::UnboundedSender<(Received, Option<OwnedSemaphorePermit>)>),
) -> Result<(), Failure> {
    let leased = service.ask_master(&lease).await?;
    let leased = worker.get_or_init(|| leased);
    let failed = |failure: Failure| failure.of_worker(&leased.worker);
    let mut messages = service.get(&leased.worker, job, &ticket).await.map_err(failed)?;
    let free = Arc::new(Semaphore::new(room));
    while let Some(message) = messages.message().await.map_err(|status| failed(status.into()))? {
        let came = came(message)?;
        let bytes = match &came {
            Came::Batch(_, batch) => batch.memory().len(),
            Came::Notice(_) => 0,
        };
        let units = bytes.div_ceil(ROOM_UNIT).clamp(1, room);
        let taken = Arc::clone(&free).acquire_many_owned(u32::try_from(units).unwrap_or(u32::MAX)).await;
        if sender.send((Ok(came), taken.ok())).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Decodes a message to a batch and its step, or to a notice.
fn came(message: FlightData) -> Result<Came, Failure> {
    if !message.data_header.is_empty() {
        let notice = serde_json::from_slice(&message.data_header);
        return notice.map(Came::Notice).map_err(|error| malformed("a notice", &error));
    }
    let header: BatchHeader = serde_json::from_slice(&message.app_metadata)
        .map_err(|error| malformed("the header of a batch", &error))?;
    if xxh3_64(&message.data_body) != header.checksum {
        return Err(Failure::Passing(Fault::new(Kind::Storage, "a batch arrived damaged")));
    }
    let batch = PackedBatch::received(Buffer::from(message.data_body), header.places, header.narrow);
    Ok(Came::Batch(header.step, batch.map_err(|error| Failure::Final(Error::wrong_batch(&error)))?))
}
