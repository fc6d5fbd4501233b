//! The assignment of blocks to workers. This module only keeps state; it does not send or wait.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use crate::messages::{WorkerFigures, WorkerState};
use crate::rates::WorkerRate;

/// The time without a report after which a worker is considered lost.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// Rates are averages over one to two times this duration.
const RATES_OVER: Duration = Duration::from_secs(2);

/// The time constant of the decay of [`Given`]. Workers report their blocks at the same interval.
const LATELY: Duration = Duration::from_millis(500);

/// The maximal number of keys whose workers are stored. The oldest keys are dropped first.
const MOST_KEYS: usize = 1 << 18;

/// The number of blocks per thread by which a worker may exceed the least loaded worker and still get a block because
/// of its affinity.
const MOST_AHEAD: f64 = 2.0;

/// The running workers, and the blocks that were assigned to them.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    workers: BTreeMap<String, Worker>,
    /// The worker of each key. `oldest` has the keys in the order of their first request.
    keys: HashMap<String, String>,
    oldest: VecDeque<String>,
    /// The processes that must end.
    drained: HashSet<String>,
    leases: u64,
    given: Given,
}

/// The number of recently assigned blocks, which decays exponentially with time.
#[derive(Debug, Default)]
struct Given {
    blocks: f64,
    when: Option<Instant>,
}

impl Given {
    fn add_one(&mut self, now: Instant) {
        *self = Self { blocks: self.blocks(now) + 1.0, when: Some(now) };
    }

    fn blocks(&self, now: Instant) -> f64 {
        let since = self.when.map_or(Duration::ZERO, |when| now.duration_since(when));
        self.blocks * (-since.div_duration_f64(LATELY)).exp()
    }

    fn per_second(&self, now: Instant) -> f64 {
        self.blocks(now) / LATELY.as_secs_f64()
    }
}

/// A value of a few seconds ago, for computing rates of change.
#[derive(Debug, Clone)]
pub(crate) struct Earlier<T> {
    pub(crate) what: T,
    pub(crate) when: Instant,
    /// The value that will replace it.
    newer: Option<(T, Instant)>,
}

impl<T> Earlier<T> {
    pub(crate) fn new(what: T, when: Instant) -> Self {
        Self { what, when, newer: None }
    }

    /// Records the value `what` at the time `when`.
    pub(crate) fn then(self, what: T, when: Instant) -> Self {
        match self.newer {
            None => Self { newer: Some((what, when)), ..self },
            Some((newer, since)) if when.duration_since(since) >= RATES_OVER => {
                Self { what: newer, when: since, newer: Some((what, when)) }
            }
            newer => Self { newer, ..self },
        }
    }
}

#[derive(Debug)]
struct Worker {
    state: WorkerState,
    seen: Instant,
    /// The counters of some seconds before.
    earlier: Earlier<WorkerFigures>,
    /// The number of blocks that were assigned since its last report.
    given: usize,
    /// The process that reported at the address before this one.
    former: Option<String>,
    /// Whether both of them report by turns.
    is_shared: bool,
}

impl Worker {
    fn is_there(&self, now: Instant) -> bool {
        now.duration_since(self.seen) < LOST_AFTER
    }

    fn rate(&self) -> WorkerRate {
        let (figures, earlier) = (&self.state.figures, &self.earlier.what);
        let seconds = self.seen.duration_since(self.earlier.when).as_secs_f64();
        let per_second = |amount: f64| if seconds > 0.0 { amount.max(0.0) / seconds } else { 0.0 };
        let counted = |of: fn(&WorkerFigures) -> u64| of(figures).saturating_sub(of(earlier)) as f64;
        let sent = counted(|figures| figures.batches_sent);
        let shared = (sent - counted(|figures| figures.batches_computed)).max(0.0);
        WorkerRate {
            address: self.state.address.clone(),
            threads: self.state.threads,
            busy_threads: per_second(figures.cpu_seconds - earlier.cpu_seconds),
            samples_computed_per_second: per_second(counted(|figures| figures.samples_computed)),
            bytes_sent_per_second: per_second(counted(|figures| figures.bytes_sent)),
            shared_share: if sent > 0.0 { shared / sent } else { 0.0 },
            stages: figures.stages.since(&earlier.stages).scaled(per_second(1.0)),
        }
    }

    /// Estimates the number of blocks per thread that the worker still has to compute, if a thread completes `rate`
    /// blocks per second. The estimate subtracts the blocks that were completed since the last report, which may be
    /// half a second old. Otherwise the worker that reported last would seem to have the least work, and would get
    /// one block after the other.
    fn load(&self, rate: f64, now: Instant) -> f64 {
        let named = (self.state.blocks + self.given) as f64 / self.state.threads.max(1) as f64;
        named - rate * now.duration_since(self.seen).as_secs_f64()
    }
}

impl Placement {
    /// Records the report of a worker. Returns whether the worker must drain.
    pub(crate) fn heard(&mut self, state: WorkerState, now: Instant) -> bool {
        let known = self.workers.remove(&state.address);
        let begins = || Earlier::new(state.figures.clone(), now);
        let (earlier, former, is_shared) = match known {
            Some(known) if known.state.process == state.process => {
                (known.earlier.then(known.state.figures, known.seen), known.former, false)
            }
            // A new process at the address of an earlier one starts with new counters.
            Some(known) => {
                self.drained.remove(&known.state.process);
                let is_shared = known.former.as_ref() == Some(&state.process);
                (begins(), Some(known.state.process), is_shared)
            }
            None => (begins(), None, false),
        };
        let drain = self.drained.contains(&state.process);
        let worker = Worker { seen: now, earlier, given: 0, former, is_shared, state };
        self.workers.insert(worker.state.address.clone(), worker);
        drain
    }

    /// Returns whether two processes report that they are the worker at this address.
    pub(crate) fn is_shared(&self, address: &str) -> bool {
        self.workers.get(address).is_some_and(|worker| worker.is_shared)
    }

    /// Returns the worker for a key: the previous worker of the key; otherwise the worker of `affinity`, unless it
    /// has much more work than others; otherwise the worker with the least work. Workers in `avoid` are chosen only
    /// if there are no others. Returns `None` if no worker makes batches of the version `same_bytes`.
    pub(crate) fn lease(
        &mut self,
        key: &str,
        affinity: Option<&str>,
        (avoid, same_bytes): (&[String], u32),
        now: Instant,
    ) -> Option<String> {
        let drained = &mut self.drained;
        self.workers.retain(|_, worker| {
            let is_there = worker.is_there(now);
            if !is_there {
                drained.remove(&worker.state.process);
            }
            is_there
        });
        let may = |worker: &&Worker| {
            let WorkerState { draining, process, .. } = &worker.state;
            worker.state.same_bytes == same_bytes && !draining && !self.drained.contains(process)
        };
        let is_avoided = |worker: &Worker| avoid.contains(&worker.state.address);
        let threads: usize = self.workers.values().map(|worker| worker.state.threads).sum();
        // In the long run, workers complete blocks at the rate at which they are assigned.
        let rate = self.given.per_second(now) / threads.max(1) as f64;
        let load = |worker: &Worker| worker.load(rate, now);
        let least = self
            .workers
            .values()
            .filter(may)
            .min_by(|a, b| is_avoided(a).cmp(&is_avoided(b)).then(load(a).total_cmp(&load(b))))?;
        let of = |key: &str| {
            let known = self.keys.get(key).and_then(|address| self.workers.get(address));
            known.filter(|worker| may(worker) && !is_avoided(worker))
        };
        let of_affinity = || affinity.and_then(of).filter(|worker| load(worker) <= load(least) + MOST_AHEAD);
        let chosen = of(key).or_else(of_affinity).unwrap_or(least).state.address.clone();
        self.leases += 1;
        let is_new = self.remember(key, &chosen);
        if let Some(affinity) = affinity {
            self.remember(affinity, &chosen);
        }
        if is_new && let Some(worker) = self.workers.get_mut(&chosen) {
            worker.given += 1;
            self.given.add_one(now);
        }
        Some(chosen)
    }

    /// Stores the worker of a key. Returns whether it is another worker than before.
    fn remember(&mut self, key: &str, worker: &str) -> bool {
        match self.keys.get_mut(key) {
            Some(known) if known == worker => return false,
            Some(known) => worker.clone_into(known),
            None => {
                self.keys.insert(key.to_owned(), worker.to_owned());
                self.oldest.push_back(key.to_owned());
            }
        }
        while self.keys.len() > MOST_KEYS
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.keys.remove(&oldest);
        }
        true
    }

    /// Marks a worker as draining. Returns whether the worker exists.
    pub(crate) fn drain(&mut self, worker: &str, now: Instant) -> bool {
        let there = self.workers.get(worker).filter(|worker| worker.is_there(now));
        there.is_some_and(|worker| {
            self.drained.insert(worker.state.process.clone());
            true
        })
    }

    /// Returns the running workers.
    pub(crate) fn workers(&self, now: Instant) -> Vec<WorkerState> {
        let there = self.workers.values().filter(|worker| worker.is_there(now));
        there.map(|worker| worker.state.clone()).collect()
    }

    /// Returns the rates of the running workers.
    pub(crate) fn rates(&self, now: Instant) -> Vec<WorkerRate> {
        self.workers.values().filter(|worker| worker.is_there(now)).map(Worker::rate).collect()
    }

    /// Returns the number of workers, including workers that were lost since the last lease.
    pub(crate) fn count(&self) -> usize {
        self.workers.len()
    }

    /// Returns the number of leases.
    pub(crate) fn leases(&self) -> u64 {
        self.leases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(address: &str, threads: usize, blocks: usize) -> WorkerState {
        WorkerState {
            address: address.to_owned(),
            process: format!("process at {address}"),
            same_bytes: 1,
            threads,
            memory_limit_bytes: 1 << 30,
            blocks,
            draining: false,
            figures: Default::default(),
        }
    }

    #[test]
    fn the_least_loaded_worker_is_chosen_and_kept() {
        let (mut placement, now) = (Placement::default(), Instant::now());
        assert_eq!(placement.lease("a", None, (&[], 1), now), None);
        placement.heard(worker("one", 1, 0), now);
        placement.heard(worker("three", 3, 0), now);
        let lease = |placement: &mut Placement, key: &str| placement.lease(key, None, (&[], 1), now).unwrap();
        let given: Vec<_> = (0..8).map(|block| lease(&mut placement, &block.to_string())).collect();
        assert_eq!(given.iter().filter(|worker| *worker == "one").count(), 2, "{given:?}");
        assert_eq!(given, (0..8).map(|block| lease(&mut placement, &block.to_string())).collect::<Vec<_>>());
        placement.heard(worker("three", 3, 100), now);
        assert_eq!(lease(&mut placement, "8"), "one");
    }

    #[test]
    fn blocks_are_spread_over_workers_between_heartbeats() {
        let (mut placement, start) = (Placement::default(), Instant::now());
        // Eight workers complete 100 blocks per second each, and 800 are assigned.
        let mut blocks = [20_usize; 8];
        for who in 0..8 {
            placement.heard(worker(&who.to_string(), 16, 20), start);
        }
        let mut given = Vec::new();
        for lease in 0..4000_usize {
            let now = start + Duration::from_micros(1250) * lease as u32;
            blocks[lease % 8] = blocks[lease % 8].saturating_sub(1);
            if lease % 50 == 0 {
                // Each worker reports every half second, one after the other.
                let who = lease / 50 % 8;
                placement.heard(worker(&who.to_string(), 16, blocks[who]), now);
            }
            let chosen: usize =
                placement.lease(&lease.to_string(), None, (&[], 1), now).unwrap().parse().unwrap();
            blocks[chosen] += 1;
            given.push(chosen);
        }
        let settled = &given[2000..];
        let longest = settled.chunk_by(|a, b| a == b).map(<[usize]>::len).max();
        assert!(longest < Some(8), "{longest:?}");
        let of = |who| settled.iter().filter(|chosen| **chosen == who).count();
        assert!((0..8).all(|who| (225..=275).contains(&of(who))), "{:?}", (0..8).map(of).collect::<Vec<_>>());
    }

    #[test]
    fn lost_avoided_and_drained_workers_are_not_chosen() {
        let (mut placement, start) = (Placement::default(), Instant::now());
        placement.heard(worker("one", 1, 0), start);
        placement.heard(worker("two", 1, 9), start);
        let lease = |placement: &mut Placement, avoid: &[&str], now| {
            let avoid: Vec<String> = avoid.iter().map(|worker| (*worker).to_owned()).collect();
            placement.lease("key", None, (&avoid, 1), now).unwrap()
        };
        assert_eq!(lease(&mut placement, &[], start), "one");
        assert_eq!(lease(&mut placement, &["one"], start), "two");
        assert_eq!(lease(&mut placement, &[], start), "two", "the key has moved");
        assert_eq!(lease(&mut placement, &["one", "two"], start), "one", "there is no other");
        let later = start + LOST_AFTER;
        placement.heard(worker("two", 1, 9), later);
        assert_eq!(lease(&mut placement, &[], later), "two");
        placement.heard(worker("three", 1, 99), later);
        assert!(placement.drain("two", later) && !placement.drain("one", later));
        assert!(placement.heard(worker("two", 1, 9), later));
        assert_eq!(lease(&mut placement, &[], later), "three");
    }

    #[test]
    fn a_process_at_the_address_of_a_drained_one_is_not_drained_and_begins_anew() {
        let (mut placement, now) = (Placement::default(), Instant::now());
        for process in 0..3 {
            let later = now + Duration::from_secs(process);
            let mut state = WorkerState { process: process.to_string(), ..worker("one", 1, 0) };
            assert!(!placement.heard(state.clone(), later), "process {process}");
            assert_eq!(placement.lease("key", None, (&[], 1), later).as_deref(), Some("one"));
            state.figures.samples_computed = 1000 * (3 - process);
            state.figures.stages.decode_seconds = 100.0 * (3 - process) as f64;
            placement.heard(state.clone(), later);
            assert!(placement.rates(later)[0].stages.decode_seconds >= 0.0, "process {process}");
            assert!(placement.drain("one", later));
            assert!(placement.heard(state, later) && placement.lease("key", None, (&[], 1), later).is_none());
        }
    }

    #[test]
    fn two_processes_at_one_address_are_noticed() {
        let (mut placement, now) = (Placement::default(), Instant::now());
        let mut heard = |process: &str| {
            placement.heard(WorkerState { process: process.to_owned(), ..worker("one", 1, 0) }, now);
            placement.is_shared("one")
        };
        assert_eq!(["a", "b", "b", "c"].map(&mut heard), [false; 4], "processes that follow each other");
        assert_eq!(["b", "c", "c"].map(&mut heard), [true, true, false]);
    }

    #[test]
    fn batches_come_from_workers_that_make_the_same_bytes() {
        let (mut placement, now) = (Placement::default(), Instant::now());
        placement.heard(worker("old", 1, 50), now);
        placement.heard(WorkerState { same_bytes: 2, ..worker("new", 1, 0) }, now);
        let mut lease =
            |same_bytes: u32| placement.lease(&same_bytes.to_string(), None, (&[], same_bytes), now);
        assert_eq!([lease(1), lease(2), lease(3)], [Some("old".to_owned()), Some("new".to_owned()), None]);
    }

    #[test]
    fn blocks_of_the_same_row_groups_go_to_one_worker_unless_it_is_overloaded() {
        let (mut placement, now) = (Placement::default(), Instant::now());
        placement.heard(worker("one", 1, 0), now);
        placement.heard(worker("two", 1, 0), now);
        let mut lease = |job: u64, affinity: &str| {
            placement.lease(&format!("{job}/{affinity}"), Some(affinity), (&[], 1), now).unwrap()
        };
        let first: Vec<_> = ["a", "b"].into_iter().map(|affinity| lease(0, affinity)).collect();
        assert_eq!(first, ["one", "two"]);
        // Other jobs use the same workers, unless all of them would use one worker.
        assert_eq!([lease(1, "b"), lease(2, "b"), lease(1, "a")], ["two", "two", "one"]);
        let crowded: Vec<_> = (3..9).map(|job| lease(job, "b")).collect();
        assert!(crowded.contains(&"one".to_owned()), "{crowded:?}");
    }

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let (mut placement, start) = (Placement::default(), Instant::now());
        for second in 0..20_u32 {
            let mut state = worker("one", 2, 0);
            let done = second.saturating_sub(10);
            state.figures.samples_computed = 100 * u64::from(done);
            state.figures.cpu_seconds = 1.5 * f64::from(done);
            placement.heard(state, start + Duration::from_secs(second.into()));
        }
        let rates = placement.rates(start + Duration::from_secs(19));
        assert_eq!((rates[0].samples_computed_per_second, rates[0].busy_threads), (100.0, 1.5));
    }

    #[test]
    fn only_the_most_recent_leases_are_remembered() {
        let (mut placement, now) = (Placement::default(), Instant::now());
        placement.heard(worker("one", 1, 0), now);
        for key in 0..MOST_KEYS + 10 {
            placement.lease(&key.to_string(), None, (&[], 1), now);
        }
        assert_eq!((placement.keys.len(), placement.oldest.len()), (MOST_KEYS, MOST_KEYS));
        assert!(!placement.keys.contains_key("9") && placement.keys.contains_key("10"));
    }
}
