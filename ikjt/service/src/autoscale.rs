//! How many workers the clients need. A pure function of what was observed, so that it can be tried on any course of
//! events.
//!
//! A client that waits for a share w of its time and gets r samples a second would take r / (1 - w). What a sample costs
//! in threads is measured, and so the number of workers that such a demand needs is known: a demand that grows tenfold
//! is met within a few decisions, not one worker at a time. Two rules keep the number still. More workers stay only if
//! clients get more by them (the rule of Cachew, ATC 2022), and only as many as that takes: storage or the network may be
//! what limits. And fewer are wanted only after minutes in which fewer would always have done, by a margin: workers that
//! go take their caches with them, and a trainer that evaluates or writes a checkpoint comes back.

use std::collections::{BTreeMap, VecDeque};
use std::str::FromStr;

use crate::messages::{ClientRate, Status, WorkerRate};

/// Workers have so much more to give than clients take, so that small changes make nobody wait.
const HEADROOM: f64 = 1.2;

/// A share of waiting that is not worth a worker.
const WAITS: f64 = 0.05;

/// The most by which one decision multiplies the workers: from few samples of a second a demand is known badly.
const MOST_GROWTH: f64 = 4.0;

/// Fewer workers are wanted if so large a part of them would do.
const SHRINKS_BELOW: f64 = 0.75;

/// The number of consecutive decisions for fewer workers after which the service has fewer: those of three minutes.
const LOW_FOR: usize = 36;

/// Clients must get more by this factor for workers that were added to stay.
const GAIN: f64 = 1.07;

/// Decisions after which workers that gained nothing are tried again.
const TRY_AGAIN: u32 = 12;

/// The most by which a decision multiplies the workers where some gained nothing before.
const TRIED_GROWTH: f64 = 2.0;

/// Decisions in which workers that were added may start, before what they gain is judged.
const STARTS_WITHIN: u32 = 12;

/// What was seen since the last decision.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Observed {
    /// Workers that are there.
    pub(crate) workers: usize,
    /// Threads of a worker, on average.
    pub(crate) threads: f64,
    /// Threads of all of them that were busy, on average over time.
    pub(crate) busy_threads: f64,
    /// Samples that workers computed a second.
    pub(crate) computed_per_second: f64,
    /// Samples that clients got a second.
    pub(crate) delivered_per_second: f64,
    /// The same by job.
    pub(crate) delivered_by_job: BTreeMap<String, f64>,
    /// Samples that clients would have taken a second if they had not waited.
    pub(crate) demand_per_second: f64,
}

impl Observed {
    /// Sums the rates of a service's workers and clients.
    pub(crate) fn of(status: &Status) -> Self {
        let (workers, clients) = (&status.worker_rates, &status.client_rates);
        let mut delivered_by_job = BTreeMap::<String, f64>::new();
        for (client, rate) in status.clients.iter().zip(clients) {
            *delivered_by_job.entry(client.job.clone()).or_default() += rate.samples_per_second;
        }
        let sum = |of: fn(&WorkerRate) -> f64| workers.iter().map(of).sum::<f64>();
        let threads = sum(|worker| worker.threads as f64) / workers.len().max(1) as f64;
        let demand = |client: &ClientRate| {
            client.samples_per_second / (1.0 - client.waiting_share).max(1.0 / (2.0 * MOST_GROWTH))
        };
        Self {
            workers: workers.len(),
            threads,
            busy_threads: sum(|worker| worker.busy_threads),
            computed_per_second: sum(|worker| worker.samples_computed_per_second),
            delivered_per_second: clients.iter().map(|client| client.samples_per_second).sum(),
            delivered_by_job,
            demand_per_second: clients.iter().map(demand).sum(),
        }
    }
}

/// How many workers there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) least: usize,
    pub(crate) most: usize,
}

impl FromStr for Bounds {
    type Err = String;

    /// `N`, or `LEAST..MOST`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| (1..=4096).contains(number));
        let bounds = number(least).zip(number(most)).filter(|(least, most)| least <= most);
        let (least, most) =
            bounds.ok_or("expected a number of workers from 1 to 4096, or `LEAST..MOST`, as `1..8`")?;
        Ok(Self { least, most })
    }
}

/// Decides how many workers are wanted.
#[derive(Debug)]
pub(crate) struct Autoscaler {
    bounds: Bounds,
    wanted: usize,
    /// What the last decisions would have, if they were for fewer workers.
    fewer: VecDeque<usize>,
    /// What was before workers were added.
    before: Option<Before>,
    /// Decisions left before more workers are tried again.
    held: u32,
    /// Whether some of the workers that were added last gained nothing.
    limited: bool,
}

/// What was before workers were added.
#[derive(Debug, Clone)]
struct Before {
    workers: usize,
    delivered_by_job: BTreeMap<String, f64>,
    /// Decisions since then.
    decisions: u32,
}

impl Autoscaler {
    /// Begins with the fewest workers.
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self { bounds, wanted: bounds.least, fewer: VecDeque::new(), before: None, held: 0, limited: false }
    }

    /// How many workers are wanted now.
    #[cfg(test)]
    fn wanted(&self) -> usize {
        self.wanted
    }

    /// Decides anew.
    pub(crate) fn decide(&mut self, observed: Observed) -> usize {
        // Without a worker there is nothing to see yet.
        if observed.workers == 0 {
            return self.wanted;
        }
        self.held = self.held.saturating_sub(1);
        if let Some(before) = self.before.take().filter(|_| waits(&observed))
            && let Some(settled) = self.judge(before, &observed)
        {
            return settled;
        }
        let needed = needed(&observed);
        match needed {
            _ if needed > self.wanted => {
                self.fewer.clear();
                if waits(&observed) && self.held == 0 && self.wanted < self.bounds.most {
                    let delivered_by_job = observed.delivered_by_job;
                    self.before = Some(Before { workers: self.wanted, delivered_by_job, decisions: 0 });
                    let growth = if self.limited { TRIED_GROWTH } else { MOST_GROWTH };
                    return self.settle(needed.min((growth * self.wanted as f64) as usize));
                }
            }
            _ if (needed as f64) < SHRINKS_BELOW * self.wanted as f64 => {
                self.fewer.push_back(needed);
                if self.fewer.len() >= LOW_FOR {
                    let most = self.fewer.iter().copied().max().unwrap_or(needed);
                    return self.settle(most);
                }
            }
            _ => self.fewer.clear(),
        }
        self.wanted
    }

    /// How many of the workers that were added stay, while clients still wait; `None` if all do.
    fn judge(&mut self, before: Before, observed: &Observed) -> Option<usize> {
        let decisions = before.decisions + 1;
        if observed.workers < self.wanted && decisions < STARTS_WITHIN {
            self.before = Some(Before { decisions, ..before });
            return Some(self.wanted);
        }
        // Jobs that began or ended meanwhile say nothing about what the others gain.
        let common = |of: &BTreeMap<String, f64>, other: &BTreeMap<String, f64>| {
            of.iter().filter(|(job, _)| other.contains_key(*job)).map(|(_, delivered)| delivered).sum::<f64>()
        };
        let then = common(&before.delivered_by_job, &observed.delivered_by_job);
        if then <= 0.0 {
            return None;
        }
        let gain = common(&observed.delivered_by_job, &before.delivered_by_job) / then;
        // Workers give as much as those before them, up to where something else limits.
        let of_use = (HEADROOM * gain * before.workers as f64).ceil() as usize;
        self.limited = gain < GAIN || of_use < self.wanted;
        if gain < GAIN {
            self.held = TRY_AGAIN;
            return Some(self.settle(before.workers));
        }
        self.limited.then(|| self.settle(of_use))
    }

    fn settle(&mut self, wanted: usize) -> usize {
        self.fewer.clear();
        self.wanted = wanted.clamp(self.bounds.least, self.bounds.most);
        self.wanted
    }
}

fn waits(observed: &Observed) -> bool {
    observed.delivered_per_second < (1.0 - WAITS) * observed.demand_per_second
}

/// The workers that meet the demand.
fn needed(observed: &Observed) -> usize {
    let Observed {
        workers,
        threads,
        busy_threads,
        computed_per_second,
        delivered_per_second,
        demand_per_second,
        ..
    } = *observed;
    if delivered_per_second <= 0.0 || computed_per_second <= 0.0 || threads <= 0.0 {
        // Nobody reads, or everything comes from memory.
        return usize::from(delivered_per_second > 0.0);
    }
    // What comes from memory costs nothing, now and then.
    let growth = (demand_per_second / delivered_per_second).clamp(1.0, MOST_GROWTH);
    // Threads that work for clients who wait are all that there are, whatever they wait for themselves.
    let used = if waits(observed) { threads * workers as f64 } else { busy_threads };
    let headroom = if waits(observed) { 1.0 } else { HEADROOM };
    (used * growth * headroom / threads).ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service whose workers make `of_worker` samples a second each, up to `limit` together, and a trainer that would
    /// take `demand`.
    fn observe(workers: usize, of_worker: f64, limit: f64, demand: f64) -> Observed {
        let supply = (workers as f64 * of_worker).min(limit);
        let delivered = supply.min(demand);
        Observed {
            workers,
            threads: 2.0,
            busy_threads: 2.0 * delivered / of_worker,
            computed_per_second: delivered,
            delivered_per_second: delivered,
            delivered_by_job: [("job".to_owned(), delivered)].into(),
            demand_per_second: demand,
        }
    }

    fn decisions(scaler: &mut Autoscaler, count: usize, limit: f64, demand: f64) -> Vec<usize> {
        let decide = |_| {
            let workers = scaler.wanted();
            scaler.decide(observe(workers, 100.0, limit, demand))
        };
        (0..count).map(decide).collect()
    }

    #[test]
    fn a_tenfold_change_is_followed_in_three_decisions_and_then_still() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        let enough =
            |demand: f64| (demand / 100.0).ceil() as usize..=(HEADROOM * demand / 100.0).ceil() as usize + 1;
        for (demand, next) in [(250.0, 2500.0), (2500.0, 250.0), (190.0, 1900.0)] {
            let before = decisions(&mut scaler, 8, f64::MAX, demand);
            assert!(enough(demand).contains(&before[2]), "{demand}: {before:?}");
            assert!(before[3..].windows(2).all(|pair| pair[0] == pair[1]), "{demand}: {before:?}");
            if next < demand {
                decisions(&mut scaler, LOW_FOR, f64::MAX, next);
            }
            let after = decisions(&mut scaler, 8, f64::MAX, next);
            assert!(enough(next).contains(&after[2]), "{next}: {after:?}");
            assert!(after[3..].windows(2).all(|pair| pair[0] == pair[1]), "{next}: {after:?}");
        }
    }

    #[test]
    fn workers_that_gain_nothing_go_again() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        // Storage gives 300 samples a second, however many workers ask for them.
        let found = decisions(&mut scaler, 10, 300.0, 1000.0);
        assert!(found.iter().all(|workers| *workers <= 16), "{found:?}");
        assert!(found[4..].iter().all(|workers| *workers == found[4]), "{found:?}");
        assert!(found[9] <= 4, "{found:?}");
        // They are tried again when storage may have become faster.
        let later = decisions(&mut scaler, 2 * TRY_AGAIN as usize, f64::MAX, 1000.0);
        assert!(later.last().is_some_and(|workers| (10..=13).contains(workers)), "{later:?}");
    }

    #[test]
    fn workers_beyond_what_storage_gives_go_at_once() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        decisions(&mut scaler, 6, f64::MAX, 350.0);
        // Four workers read all that they can, and sixteen would read as much as six.
        let found = decisions(&mut scaler, 40, 600.0, 2500.0);
        assert!(found[3..].iter().filter(|workers| **workers > 8).count() <= 4, "{found:?}");
        assert!(found.iter().all(|workers| (4..=16).contains(workers)), "{found:?}");
        assert!((6..=8).contains(found.last().unwrap()), "{found:?}");
    }

    #[test]
    fn workers_that_start_late_are_waited_for() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        let mut there = VecDeque::from([1; 7]);
        let decide = |_| {
            let wanted = scaler.decide(observe(there.pop_front().unwrap(), 100.0, f64::MAX, 1000.0));
            there.push_back(wanted);
            wanted
        };
        let found: Vec<usize> = (0..40).map(decide).collect();
        assert!(found.windows(2).all(|pair| pair[0] <= pair[1]), "{found:?}");
        assert!((10..=13).contains(found.last().unwrap()), "{found:?}");
    }

    #[test]
    fn bounds_are_read_or_refused() {
        assert_eq!("3".parse(), Ok(Bounds { least: 3, most: 3 }));
        assert_eq!("1..8".parse(), Ok(Bounds { least: 1, most: 8 }));
        for wrong in ["0", "8..1", "1..", "..2", "x", "1..5000"] {
            assert!(wrong.parse::<Bounds>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn bounds_are_kept_and_idle_services_shrink() {
        let mut scaler = Autoscaler::new(Bounds { least: 2, most: 5 });
        assert_eq!(decisions(&mut scaler, 6, f64::MAX, 10_000.0).last(), Some(&5));
        assert_eq!(decisions(&mut scaler, LOW_FOR, f64::MAX, 0.0).last(), Some(&2));
    }

    #[test]
    fn a_job_that_ends_is_no_loss_of_the_others() {
        let mut scaler = Autoscaler::new(Bounds { least: 4, most: 64 });
        let observe = |workers, jobs: &[(&str, f64)], demand| {
            let delivered: f64 = jobs.iter().map(|(_, delivered)| delivered).sum();
            Observed {
                delivered_by_job: jobs
                    .iter()
                    .map(|(job, delivered)| ((*job).to_owned(), *delivered))
                    .collect(),
                ..observe(workers, delivered / workers as f64, f64::MAX, demand)
            }
        };
        let before = scaler.decide(observe(4, &[("ends", 200.0), ("stays", 200.0)], 1600.0));
        assert_eq!(before, 16);
        let after = scaler.decide(observe(16, &[("stays", 400.0)], 800.0));
        assert!(after > 4, "{after}");
    }

    #[test]
    fn a_pause_of_two_minutes_changes_nothing() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        let settled = *decisions(&mut scaler, 6, f64::MAX, 1000.0).last().unwrap();
        assert!(settled >= 10, "{settled}");
        for _ in 0..4 {
            let paused = decisions(&mut scaler, 24, f64::MAX, 0.0);
            let after = decisions(&mut scaler, 24, f64::MAX, 1000.0);
            assert!(paused.iter().chain(&after).all(|workers| *workers == settled), "{paused:?} {after:?}");
        }
    }

    #[test]
    fn small_changes_move_nothing() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        let settled = *decisions(&mut scaler, 6, f64::MAX, 1000.0).last().unwrap();
        for (i, factor) in [0.95, 1.04, 0.9, 1.05, 1.0].into_iter().enumerate() {
            let found = decisions(&mut scaler, 1, f64::MAX, factor * 1000.0);
            assert_eq!(found, [settled], "change {i}");
        }
    }
}
