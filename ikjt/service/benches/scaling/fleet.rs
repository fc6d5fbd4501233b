//! A simulated service: what happens at which time, and how busy everything is.
//!
//! A worker computes two blocks at a time, batch by batch in turn, with all of its threads. Its network card sends the
//! batches of its clients in turn, as far as each client has room for them; the card of the trainer's host receives
//! them one after the other. A client takes its blocks in order. The master answers one question after the other.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::{Duration, Instant};

use onefold_serve::simulation::Placing;

use crate::Service;

/// Blocks that a worker computes at the same time: `RUNNING`.
const RUNNING: usize = 2;

/// Bytes of a block that the network holds: `BLOCK_WINDOW`.
const WINDOW_BYTES: f64 = (4 << 20) as f64;

/// How often a worker gives a sign of life, in nanoseconds.
const HEARTBEAT: u64 = 500_000_000;

/// How often a client says how it fares, in nanoseconds.
const REPORT: u64 = 1_000_000_000;

/// What happens at a time, which is in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A question for a worker arrives at the master.
    Asks(usize),
    /// The master has come to it.
    Leases(usize),
    /// A client asks a worker for a block.
    Reads(usize),
    /// A worker has computed a batch.
    Computed(usize),
    /// A worker has sent a batch.
    Sent(usize),
    /// A batch of a block has arrived.
    Arrived(usize),
    /// A trainer wants its next batch.
    Wants(usize),
    Heartbeat(usize),
    Report(usize),
    /// From here on it is counted.
    Begins,
    Ends,
}

#[derive(Debug, Default)]
struct Block {
    client: usize,
    number: u64,
    worker: usize,
    computed: u64,
    sent: u64,
    arrived: u64,
    taken: u64,
    /// Whether its worker has heard of it.
    there: bool,
}

#[derive(Debug, Default)]
struct Worker {
    waiting: Vec<usize>,
    /// Blocks that are computed, the one whose turn it is first.
    running: VecDeque<usize>,
    computing: bool,
    /// Blocks that are not sent to their ends, the one whose turn it is first.
    sending: VecDeque<usize>,
    is_sending: bool,
    /// When blocks of each client were begun last.
    begun: Vec<u64>,
    /// Time that is to be computed before the next batch.
    edge: f64,
    busy: u64,
}

#[derive(Debug)]
struct Client {
    /// Its blocks in order: those on their way.
    coming: VecDeque<usize>,
    next: u64,
    ahead: usize,
    /// Until when its card receives what it was sent.
    card_free: u64,
    /// When it wants the next batch.
    wants_at: u64,
    /// Since when it waits for one, and what for.
    waits: Option<(u64, Wait)>,
}

/// What a trainer waits for.
#[derive(Debug, Clone, Copy)]
enum Wait {
    /// The master and the network: the worker has not heard of the block yet.
    Master,
    Worker,
    /// The batch is computed.
    Card,
}

/// How busy everything was, as shares of the time.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) samples_per_second: f64,
    pub(crate) workers: f64,
    pub(crate) least_worker: f64,
    pub(crate) most_worker: f64,
    pub(crate) worker_cards: f64,
    pub(crate) trainer_cards: f64,
    pub(crate) master: f64,
    /// How long trainers wait: for the master, for a block to be computed, for a batch to be sent.
    pub(crate) waits: [f64; 3],
}

/// A service that is simulated.
pub(crate) struct Fleet<'a> {
    service: &'a Service,
    /// Samples a second that a trainer takes; all that there are if `None`.
    rate: Option<f64>,
    start: Instant,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Events so far, to keep those of one time in order.
    counter: u64,
    placing: Placing,
    names: Vec<String>,
    blocks: Vec<Block>,
    workers: Vec<Worker>,
    clients: Vec<Client>,
    master_free: u64,
    draws: u64,
    // What is counted.
    taken: u64,
    sent: u64,
    asked: u64,
    waited: [u64; 3],
}

fn nanos(us: f64) -> u64 {
    (1e3 * us) as u64
}

impl<'a> Fleet<'a> {
    pub(crate) fn new(service: &'a Service, workers: usize, rate: Option<f64>) -> Self {
        let client =
            |_| Client { coming: VecDeque::new(), next: 0, ahead: 2, card_free: 0, wants_at: 0, waits: None };
        let worker = |_| Worker { begun: vec![0; service.trainers], ..Worker::default() };
        let mut fleet = Self {
            service,
            rate,
            start: Instant::now(),
            now: 0,
            events: BinaryHeap::new(),
            counter: 0,
            placing: Placing::default(),
            names: (0..workers).map(|worker| format!("{worker:05}")).collect(),
            blocks: Vec::new(),
            workers: (0..workers).map(worker).collect(),
            clients: (0..service.trainers).map(client).collect(),
            master_free: 0,
            draws: 0,
            taken: 0,
            sent: 0,
            asked: 0,
            waited: [0; 3],
        };
        for worker in 0..workers {
            fleet.placing.heard(&fleet.names[worker], service.threads, 0, fleet.start);
            fleet.at(HEARTBEAT * worker as u64 / workers as u64, Event::Heartbeat(worker));
        }
        for client in 0..service.trainers {
            // Trainers do not begin at the same moment.
            let begin = REPORT * client as u64 / 4 / service.trainers as u64;
            fleet.at(begin, Event::Wants(client));
            fleet.at(begin + REPORT, Event::Report(client));
        }
        let counted = nanos(1e6 * service.seconds);
        fleet.at(counted, Event::Begins);
        fleet.at(2 * counted, Event::Ends);
        fleet
    }

    fn at(&mut self, time: u64, event: Event) {
        self.counter += 1;
        self.events.push(Reverse((time, self.counter, event)));
    }

    fn steps(&self) -> u64 {
        self.service.row_group * self.service.row_groups
    }

    fn batch_bytes(&self) -> f64 {
        self.service.batch as f64 * self.service.sample_bytes
    }

    /// The time of a batch on a card.
    fn transfer(&self, gbit: f64) -> u64 {
        (8.0 * self.batch_bytes() / gbit) as u64
    }

    /// Time of a worker for so many batches, with what no two batches have in common.
    fn computing(&mut self, batches: f64) -> u64 {
        self.draws += 1;
        // SplitMix64.
        let mut bits = self.draws.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let draw = ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64;
        let mean = self.service.batch as f64 * self.service.sample_us / self.service.threads as f64;
        nanos(batches * mean * (1.0 + self.service.spread * (2.0 * draw - 1.0)))
    }

    /// Simulates it.
    pub(crate) fn run(mut self) -> Found {
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now = time;
            match event {
                Event::Asks(block) => {
                    let answered = self.ask_master();
                    self.at(answered, Event::Leases(block));
                }
                Event::Leases(block) => self.lease(block),
                Event::Reads(block) => self.read(block),
                Event::Computed(worker) => self.computed(worker),
                Event::Sent(worker) => self.sent(worker),
                Event::Arrived(block) => {
                    self.blocks[block].arrived += 1;
                    self.take(self.blocks[block].client);
                }
                Event::Wants(client) => self.take(client),
                Event::Heartbeat(worker) => {
                    self.ask_master();
                    let (name, blocks) = (&self.names[worker], self.active(worker));
                    let now = self.start + Duration::from_nanos(self.now);
                    self.placing.heard(name, self.service.threads, blocks, now);
                    self.at(self.now + HEARTBEAT, Event::Heartbeat(worker));
                }
                Event::Report(client) => {
                    self.ask_master();
                    self.at(self.now + REPORT, Event::Report(client));
                }
                Event::Begins => {
                    (self.taken, self.sent, self.asked, self.waited) = (0, 0, 0, [0; 3]);
                    self.workers.iter_mut().for_each(|worker| worker.busy = 0);
                }
                Event::Ends => break,
            }
        }
        self.found()
    }

    fn found(&self) -> Found {
        let Service { seconds, batch, trainers, lease_us, worker_gbit, trainer_gbit, .. } = *self.service;
        let busy = |worker: &Worker| 1e-9 * worker.busy as f64 / seconds;
        let shares: Vec<f64> = self.workers.iter().map(busy).collect();
        let count = self.workers.len() as f64;
        let bits = 8e-9 * self.batch_bytes() / seconds;
        Found {
            samples_per_second: (self.taken * batch) as f64 / seconds,
            workers: shares.iter().sum::<f64>() / count,
            least_worker: shares.iter().copied().fold(1.0, f64::min),
            most_worker: shares.iter().copied().fold(0.0, f64::max),
            worker_cards: bits * self.sent as f64 / worker_gbit / count,
            trainer_cards: bits * self.sent as f64 / trainer_gbit / trainers as f64,
            master: 1e-6 * lease_us * self.asked as f64 / seconds,
            waits: self.waited.map(|time| 1e-9 * time as f64 / seconds / trainers as f64),
        }
    }

    /// When the master has answered what arrives now.
    fn ask_master(&mut self) -> u64 {
        self.asked += 1;
        self.master_free = self.master_free.max(self.now) + nanos(self.service.lease_us);
        self.master_free
    }

    /// Opens the blocks that a client may have on their way.
    fn open(&mut self, client: usize) {
        while self.clients[client].coming.len() < self.clients[client].ahead {
            let block = self.blocks.len();
            let number = self.clients[client].next;
            self.blocks.push(Block { client, number, ..Block::default() });
            self.clients[client].next += 1;
            self.clients[client].coming.push_back(block);
            self.at(self.now + nanos(self.service.trip_us), Event::Asks(block));
        }
    }

    fn lease(&mut self, block: usize) {
        let Block { client, number, .. } = self.blocks[block];
        let now = self.start + Duration::from_nanos(self.now);
        let worker = self.placing.lease(&format!("{client}/0/{number}"), now).expect("there are workers");
        self.blocks[block].worker = worker.parse().expect("a name is a number");
        self.at(self.now + 2 * nanos(self.service.trip_us), Event::Reads(block));
    }

    fn read(&mut self, block: usize) {
        let worker = self.blocks[block].worker;
        self.blocks[block].there = true;
        self.workers[worker].waiting.push(block);
        self.workers[worker].sending.push_back(block);
        self.begin(worker);
    }

    /// Blocks of a worker that are not at their ends.
    fn active(&self, worker: usize) -> usize {
        self.workers[worker].sending.len()
    }

    /// Begins to compute blocks that wait, and the next batch.
    fn begin(&mut self, worker: usize) {
        while self.workers[worker].running.len() < RUNNING && !self.workers[worker].waiting.is_empty() {
            self.begin_block(worker, None);
        }
        let Worker { computing, running, .. } = &self.workers[worker];
        if !computing && !running.is_empty() {
            let edge = std::mem::take(&mut self.workers[worker].edge);
            let time = self.computing(1.0 + edge);
            self.workers[worker].computing = true;
            self.at(self.now + time, Event::Computed(worker));
            self.workers[worker].busy += time;
        }
    }

    /// Begins a block: the one after the block `last` in the same run, or the first one of the client whose turn it is.
    fn begin_block(&mut self, worker: usize, last: Option<usize>) {
        let (state, blocks) = (&mut self.workers[worker], &self.blocks);
        let turn = |block: &usize| {
            let Block { client, number, .. } = blocks[*block];
            (state.begun[client], number)
        };
        let alone = |client| state.waiting.iter().all(|block| blocks[*block].client == client);
        let follows = last.filter(|last| alone(blocks[*last].client)).and_then(|last| {
            state.waiting.iter().position(|block| blocks[*block].number == blocks[last].number + 1)
        });
        let first = || (0..state.waiting.len()).min_by_key(|place| turn(&state.waiting[*place]));
        let Some(place) = follows.or_else(first) else { return };
        if follows.is_none() {
            // On average half a row group at either end is decoded for others.
            state.edge += self.service.row_group as f64 * self.service.decoding;
        }
        let block = state.waiting.remove(place);
        self.counter += 1;
        state.begun[blocks[block].client] = self.counter;
        state.running.push_back(block);
    }

    fn computed(&mut self, worker: usize) {
        let steps = self.steps();
        let state = &mut self.workers[worker];
        state.computing = false;
        let block = state.running.pop_front().expect("what was computed");
        self.blocks[block].computed += 1;
        if self.blocks[block].computed < steps {
            self.workers[worker].running.push_back(block);
        } else if !self.workers[worker].waiting.is_empty() {
            self.begin_block(worker, Some(block));
        }
        self.begin(worker);
        self.send(worker);
    }

    /// Sends the next batch that a client has room for.
    fn send(&mut self, worker: usize) {
        if self.workers[worker].is_sending {
            return;
        }
        let room = self.service.ready + 1 + (WINDOW_BYTES / self.batch_bytes()) as u64;
        let may = |block: &usize| {
            let Block { computed, sent, taken, .. } = self.blocks[*block];
            sent < computed && sent - taken < room
        };
        let Some(place) = self.workers[worker].sending.iter().position(may) else { return };
        let state = &mut self.workers[worker];
        state.is_sending = true;
        // The one that is sent now stands first until it is sent.
        if let Some(block) = state.sending.remove(place) {
            state.sending.push_front(block);
        }
        let time = self.transfer(self.service.worker_gbit);
        self.at(self.now + time, Event::Sent(worker));
    }

    fn sent(&mut self, worker: usize) {
        let state = &mut self.workers[worker];
        state.is_sending = false;
        let block = state.sending.pop_front().expect("what was sent");
        self.blocks[block].sent += 1;
        self.sent += 1;
        if self.blocks[block].sent < self.steps() {
            self.workers[worker].sending.push_back(block);
        }
        let time = self.transfer(self.service.trainer_gbit);
        let client = &mut self.clients[self.blocks[block].client];
        client.card_free = client.card_free.max(self.now) + time;
        let arrives = client.card_free + nanos(self.service.trip_us);
        self.at(arrives, Event::Arrived(block));
        self.send(worker);
    }

    /// A trainer takes what has arrived of its first block, as fast as it wants to.
    fn take(&mut self, client: usize) {
        self.open(client);
        while self.clients[client].wants_at <= self.now {
            let block = self.clients[client].coming[0];
            let Block { worker, computed, arrived, taken, there, .. } = self.blocks[block];
            if let Some((since, wait)) = self.clients[client].waits.take() {
                self.waited[wait as usize] += self.now - since;
            }
            if taken == arrived {
                let wait = match there {
                    false => Wait::Master,
                    true if computed == taken => Wait::Worker,
                    true => Wait::Card,
                };
                self.clients[client].waits = Some((self.now, wait));
                return;
            }
            self.blocks[block].taken += 1;
            self.taken += 1;
            let ahead = self.service.blocks_of_worker * self.workers.len();
            self.clients[client].ahead = ahead.clamp(1, self.service.most_blocks);
            if taken + 1 == self.steps() {
                self.clients[client].coming.pop_front();
            }
            self.open(client);
            if let Some(rate) = self.rate {
                let next = self.now + (1e9 * self.service.batch as f64 / rate) as u64;
                self.clients[client].wants_at = next;
                self.at(next, Event::Wants(client));
            }
            self.send(worker);
        }
    }
}
