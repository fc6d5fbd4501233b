use std::collections::BTreeSet;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;

/// The size of every batch in bytes.
const BYTES: u64 = 100;

/// The number of steps of a block.
const LENGTH: u64 = 4;

/// The number of steps of an epoch.
const STEPS: u64 = 42;

/// A simulation of clients, runs and a network that use a schedule.
struct World {
    schedule: Schedule<()>,
    now: Instant,
    /// The next step of each run.
    runs: BTreeMap<u64, u64>,
    readers: Vec<Reader>,
    /// How often the batch of each step was computed.
    computed: BTreeMap<(String, u64), u64>,
}

struct Reader {
    job: String,
    name: String,
    reading: u64,
    /// The first step of the next block.
    next: u64,
    /// The subscriptions, and their next steps.
    open: VecDeque<(u64, u64)>,
    /// The subscriptions of batches that the network has not taken.
    under_way: VecDeque<u64>,
    got: u64,
    left: bool,
}

/// Returns a client's request for the block that begins at `start`, from the step `from` on.
fn reading(job: &str, client: &str, reading: u64, start: u64, from: u64) -> Request<()> {
    let block = Block { job: job.to_owned(), epoch: 0, steps: start..(start + LENGTH).min(STEPS) };
    let ticket = Ticket { block, from, client: client.to_owned(), pass: 0 };
    Request { ticket, reading, of_block: (), cached: None }
}

fn message(step: u64) -> Message {
    Message { header: Bytes::new(), body: vec![0; BYTES as usize].into(), samples: step }
}

impl World {
    fn new(reading: u64, batches: u64) -> Self {
        Self {
            schedule: Schedule::new(Limits { reading, batches: batches * BYTES }),
            now: Instant::now(),
            runs: BTreeMap::new(),
            readers: Vec::new(),
            computed: BTreeMap::new(),
        }
    }

    /// Adds a client of a job whose reader needs `reading` bytes. Returns its number.
    fn join(&mut self, job: &str, reading: u64) -> usize {
        let number = self.readers.len();
        self.readers.push(Reader {
            job: job.to_owned(),
            name: format!("client {number}"),
            reading,
            next: 0,
            open: VecDeque::new(),
            under_way: VecDeque::new(),
            got: 0,
            left: false,
        });
        number
    }

    fn follow(&mut self) {
        for action in self.schedule.take_actions() {
            match action {
                Action::Start { run, from, .. } => {
                    self.runs.insert(run, from);
                }
                Action::Keep { block, batches, .. } => {
                    let steps = batches.iter().map(|message| message.samples);
                    assert!(steps.eq(block.steps.clone()), "a part of {block:?} is kept");
                }
                Action::Wake(_) | Action::Close => (),
            }
        }
        let reading: u64 = self.schedule.runs.values().map(|run| run.reading).sum();
        let Limits { reading: most, batches } = self.schedule.limits;
        assert!(self.schedule.runs.len() <= 1 || reading <= most, "{reading} bytes are read with");
        let used = self.schedule.used();
        // Every client can get one batch beyond the limit.
        let clients = BYTES * self.readers.len() as u64;
        assert!(used <= batches + clients, "{used} bytes of batches, of {batches}");
    }

    /// Makes a run compute a batch, or try to.
    fn compute(&mut self, run: u64) {
        let Some(step) = self.runs.get(&run).copied() else { return };
        let known = &self.schedule.runs[&run];
        let (job, end) = (known.job.clone(), known.end);
        let verdict = match step < end {
            true => self.schedule.offer(run, step, BYTES, self.now),
            false => Verdict::End,
        };
        match verdict {
            Verdict::Add => {
                self.schedule.add(run, step, message(step), Duration::from_millis(1));
                self.runs.insert(run, step + 1);
                *self.computed.entry((job, step)).or_default() += 1;
            }
            Verdict::Wait => (),
            Verdict::End => {
                self.runs.remove(&run);
                self.schedule.ended(run, Ok(()), self.now);
            }
        }
        self.follow();
    }

    /// Makes a client request blocks ahead, and take the next batch of one of them.
    fn read(&mut self, number: usize, which: usize) {
        let (reader, now) = (&mut self.readers[number], self.now);
        if reader.left {
            return;
        }
        while reader.open.len() < 2 && reader.next < STEPS {
            let start = reader.next;
            let request = reading(&reader.job, &reader.name, reader.reading, start, start);
            reader.next = request.ticket.block.steps.end;
            reader.open.push_back((self.schedule.subscribe(request, now), start));
        }
        let which = which % reader.open.len().max(1);
        if let Some((subscription, next)) = reader.open.get_mut(which) {
            match self.schedule.take(*subscription, now) {
                Taken::Message(message) => {
                    assert_eq!(message.samples, *next, "{}", reader.name);
                    *next += 1;
                    reader.got += 1;
                    reader.under_way.push_back(*subscription);
                }
                Taken::End => {
                    self.schedule.unsubscribe(*subscription, now);
                    reader.open.remove(which);
                }
                Taken::Wait(_) => (),
                // The client had read nothing for a long time, and asks again.
                Taken::Failed(_) => {
                    self.schedule.unsubscribe(*subscription, now);
                    let start = *next - *next % LENGTH;
                    let request = reading(&reader.job, &reader.name, reader.reading, start, *next);
                    *subscription = self.schedule.subscribe(request, now);
                }
            }
        }
        self.follow();
    }

    /// Makes the network take a batch of a client.
    fn send(&mut self, number: usize) {
        if let Some(subscription) = self.readers[number].under_way.pop_front() {
            self.schedule.sent(subscription, BYTES, self.now);
        }
        self.follow();
    }

    /// Makes a client end.
    fn leave(&mut self, number: usize) {
        self.readers[number].left = true;
        while let Some((subscription, _)) = self.readers[number].open.pop_front() {
            self.schedule.unsubscribe(subscription, self.now);
        }
        self.follow();
    }

    fn pass(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.schedule.pass(self.now);
        self.follow();
    }

    /// Lets all runs and the given clients proceed for one second.
    fn go_on(&mut self, readers: impl IntoIterator<Item = usize>) {
        for run in self.runs.keys().copied().collect::<Vec<_>>() {
            self.compute(run);
        }
        for number in readers {
            self.read(number, 0);
            self.read(number, 1);
            self.send(number);
        }
        self.pass(1);
    }

    /// Lets all clients except the paused ones, `still`, read to the end.
    fn finish(&mut self, still: &BTreeSet<usize>) {
        let others: Vec<usize> = (0..self.readers.len()).filter(|number| !still.contains(number)).collect();
        for _ in 0..20_000 {
            let is_over = |number: &usize| {
                let Reader { left, got, .. } = self.readers[*number];
                left || got == STEPS
            };
            if others.iter().all(is_over) {
                return;
            }
            self.go_on(others.clone());
        }
        panic!("nobody goes on: {:#?}", self.schedule);
    }

    fn most_computed(&self) -> u64 {
        self.computed.values().copied().max().unwrap_or(0)
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Compute(usize),
    Read(usize, usize),
    Send(usize),
    Leave(usize),
    Pass(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        8 => (0_usize..4).prop_map(Event::Compute),
        16 => (0_usize..6, 0_usize..2).prop_map(|(client, which)| Event::Read(client, which)),
        8 => (0_usize..6).prop_map(Event::Send),
        1 => (0_usize..6).prop_map(Event::Leave),
        1 => (0_u64..20).prop_map(Event::Pass),
    ];
    prop::collection::vec(event, 0..300)
}

proptest! {
    #![proptest_config(onefold_property::cases(500))]

    /// For any behavior of clients, memory stays within its limits, every batch arrives once and in order, and all
    /// active clients get all of their batches, even if other clients are paused.
    #[test]
    fn all_active_clients_make_progress_within_the_memory_limit(
        batches in 0_u64..40,
        clients in prop::collection::vec((0_usize..4, 1_u64..12), 1..6),
        events in events(),
        still in prop::collection::btree_set(0_usize..6, 0..3),
    ) {
        let mut world = World::new(10, batches);
        for (job, reading) in &clients {
            world.join(&format!("job {job}"), *reading);
        }
        for event in events {
            match event {
                Event::Compute(which) => {
                    if let Some(run) = world.runs.keys().nth(which).copied() {
                        world.compute(run);
                    }
                }
                Event::Read(client, which) => world.read(client % clients.len(), which),
                Event::Send(client) => world.send(client % clients.len()),
                Event::Leave(client) => world.leave(client % clients.len()),
                Event::Pass(seconds) => world.pass(seconds),
            }
        }
        world.finish(&still);
    }
}

#[test]
fn clients_of_equal_jobs_have_each_batch_computed_once() {
    // Memory from less than a block to the whole epoch.
    for batches in [2, 6, 20, 1000] {
        let mut world = World::new(10, batches);
        let (fast, slow) = (world.join("job", 5), world.join("job", 5));
        for second in 0..5 * STEPS {
            let readers = if second % 5 == 0 { vec![fast, slow] } else { vec![fast] };
            world.go_on(readers);
        }
        world.finish(&BTreeSet::new());
        assert_eq!(world.most_computed(), 1, "room for {batches} batches");
    }
}

#[test]
fn a_client_is_told_that_its_batch_is_computed() {
    let mut world = World::new(10, 1000);
    let subscription = world.schedule.subscribe(reading("job", "client", 5, 0, 0), world.now);
    world.follow();
    assert!(matches!(world.schedule.take(subscription, world.now), Taken::Wait(_)));
    let notice = world.schedule.why_waiting(subscription, world.now).unwrap();
    assert!(notice.reason.contains("computes the batch") && !notice.waits_for_client, "{notice:?}");
    world.go_on([]);
    assert_eq!(world.schedule.why_waiting(subscription, world.now), None, "the batch is there");
}

#[test]
fn a_client_that_begins_late_does_not_hold_up_others() {
    let mut world = World::new(10, 1000);
    let read = |world: &mut World, client: &str, start: u64| {
        let block = Block { job: "job".to_owned(), epoch: 0, steps: start..start + LENGTH };
        let mut request = reading("job", client, 5, start, start);
        request.ticket.block = block;
        let subscription = world.schedule.subscribe(request, world.now);
        world.follow();
        (0..5).for_each(|_| world.go_on([]));
        subscription
    };
    let far = (2 * WINDOW + 1) * LENGTH;
    read(&mut world, "late", 0);
    let front = read(&mut world, "front", far);
    assert!(matches!(world.schedule.take(front, world.now), Taken::Message(_)));
    // A client that begins one block closer to `late` waits for it, as long as `late` is active.
    let near = read(&mut world, "near", far - LENGTH);
    assert!(matches!(world.schedule.take(near, world.now), Taken::Wait(_)));
    let notice = world.schedule.why_waiting(near, world.now).unwrap();
    assert!(notice.waits_for_client, "{notice:?}");
    world.pass(PATIENCE.as_secs());
    (0..5).for_each(|_| world.go_on([]));
    assert!(matches!(world.schedule.take(near, world.now), Taken::Message(_)));
}

#[test]
fn a_client_in_another_epoch_with_the_same_batches_is_not_waited_for() {
    let mut world = World::new(10, 1000);
    let mut again = reading("job", "again", 5, 0, 0);
    again.ticket.pass = 1;
    world.schedule.subscribe(again, world.now);
    let steps = 20 * LENGTH..21 * LENGTH;
    let block = Block { job: "job".to_owned(), epoch: 0, steps: steps.clone() };
    let mut request = reading("job", "still", 5, steps.start, steps.start);
    request.ticket.block = block;
    let still = world.schedule.subscribe(request, world.now);
    world.follow();
    (0..5).for_each(|_| world.go_on([]));
    assert!(matches!(world.schedule.take(still, world.now), Taken::Message(_)));
}

#[test]
fn a_run_begins_if_its_memory_fits() {
    let mut world = World::new(10, 1000);
    let readers = [world.join("a", 6), world.join("b", 4), world.join("c", 1)];
    for number in readers {
        world.read(number, 0);
    }
    assert_eq!(world.runs.len(), COMPUTING, "the third one waits for its turn");
    let mut world = World::new(10, 1000);
    let (large, small) = (world.join("a", 30), world.join("b", 1));
    world.read(large, 0);
    world.read(small, 0);
    assert_eq!(world.runs.len(), 1, "one alone may need more than there is");
    world.finish(&BTreeSet::new());
}

#[test]
fn a_paused_run_makes_room_for_another_and_is_started_again() {
    // Memory for three batches of each job.
    let mut world = World::new(10, 6);
    let (slow, other) = (world.join("slow", 8), world.join("other", 8));
    world.read(slow, 0);
    for _ in 0..20 {
        world.go_on([]);
    }
    assert_eq!(world.schedule.runs.values().filter(|run| run.paused).count(), 1);
    let still = BTreeSet::from([slow]);
    world.finish(&still);
    assert_eq!(world.readers[other].got, STEPS);
    world.finish(&BTreeSet::new());
    assert_eq!(world.readers[slow].got, STEPS);
}

#[test]
fn a_run_that_ends_without_batches_fails_its_block() {
    let mut world = World::new(10, 1000);
    let reader = world.join("job", 1);
    world.read(reader, 0);
    let mut runs = 0;
    while let Some(run) = world.schedule.runs.keys().next().copied() {
        world.schedule.ended(run, Ok(()), world.now);
        runs += 1;
    }
    assert!(runs <= world.readers[reader].open.len(), "a block is not tried again: {runs} runs");
    for (subscription, _) in world.readers[reader].open.clone() {
        assert!(matches!(world.schedule.take(subscription, world.now), Taken::Failed(_)));
    }
}
