//! The number of workers that the clients need. It is a pure function of observations, so that tests can simulate any
//! course of events.
//!
//! A client that waits for a share w of its time and receives r samples per second would take r / (1 - w) without
//! waiting. The worker threads per sample are measured, which gives the number of workers for this demand. Therefore
//! a tenfold demand is met after a few decisions, not one worker at a time.
//!
//! Two rules keep the number stable. First, added workers stay only if clients receive more because of them (the rule
//! of Cachew, ATC 2022), and only as many as the gain justifies, because storage or the network may be the limit.
//! Second, the number is reduced only if a clearly smaller number would have sufficed for minutes, because workers
//! that end lose their caches, and a trainer that evaluates or writes a checkpoint will continue reading.

use std::collections::{BTreeMap, VecDeque};
use std::str::FromStr;

use crate::messages::Status;
use crate::rates::{ClientRate, WorkerRate};

/// The capacity of the workers relative to the demand, so that small changes cause no waiting.
const HEADROOM: f64 = 1.2;

/// The share of waiting that does not justify another worker.
const WAITS: f64 = 0.05;

/// The maximal growth factor of one decision, because a demand that is estimated from few samples per second is
/// imprecise.
const MOST_GROWTH: f64 = 4.0;

/// The number of workers is reduced if less than this fraction of them is needed.
const SHRINKS_BELOW: f64 = 0.75;

/// The number of consecutive decisions for fewer workers after which the service has fewer: three minutes of
/// decisions.
const LOW_FOR: usize = 36;

/// The factor by which the throughput of clients must grow for added workers to stay.
const GAIN: f64 = 1.07;

/// The number of decisions after which workers are added again, if the last ones gained nothing.
const TRY_AGAIN: u32 = 12;

/// The maximal growth factor of one decision if some of the last added workers gained nothing.
const TRIED_GROWTH: f64 = 2.0;

/// The number of decisions within which added workers may start before their gain is judged.
const STARTS_WITHIN: u32 = 12;

/// The observations since the last decision.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Observed {
    /// The number of running workers.
    pub(crate) workers: usize,
    /// The average number of threads per worker.
    pub(crate) threads: f64,
    /// The average number of busy threads over time, over all workers.
    pub(crate) busy_threads: f64,
    /// The samples per second that workers computed.
    pub(crate) computed_per_second: f64,
    /// The samples per second that clients received.
    pub(crate) delivered_per_second: f64,
    /// The samples per second that clients received, by job.
    pub(crate) delivered_by_job: BTreeMap<String, f64>,
    /// The samples per second that clients would have taken without waiting.
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

/// The range of the number of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) least: usize,
    pub(crate) most: usize,
}

impl FromStr for Bounds {
    type Err = String;

    /// Parses `N` or `LEAST..MOST`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| (1..=4096).contains(number));
        let bounds = number(least).zip(number(most)).filter(|(least, most)| least <= most);
        let (least, most) =
            bounds.ok_or("expected a number of workers from 1 to 4096, or `LEAST..MOST`, as `1..8`")?;
        Ok(Self { least, most })
    }
}

/// Decides the number of workers.
#[derive(Debug)]
pub(crate) struct Autoscaler {
    bounds: Bounds,
    wanted: usize,
    /// The numbers of needed workers of the last decisions, if all of them were for fewer workers.
    fewer: VecDeque<usize>,
    /// The state before workers were added, until their gain is judged.
    before: Option<Before>,
    /// The number of decisions before workers may be added again.
    held: u32,
    /// Whether some of the workers that were added last gained nothing.
    limited: bool,
}

/// The state before workers were added.
#[derive(Debug, Clone)]
struct Before {
    workers: usize,
    delivered_by_job: BTreeMap<String, f64>,
    /// The number of decisions since then.
    decisions: u32,
}

impl Autoscaler {
    /// Starts with the least number of workers.
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self { bounds, wanted: bounds.least, fewer: VecDeque::new(), before: None, held: 0, limited: false }
    }

    /// Makes the next decision, and returns the number of wanted workers.
    pub(crate) fn decide(&mut self, observed: Observed) -> usize {
        // Without workers there are no observations yet.
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

    /// Judges the workers that were added, while clients still wait. Returns the number of workers to keep if some of
    /// them have not started or gained nothing, and `None` if all of them stay.
    fn judge(&mut self, before: Before, observed: &Observed) -> Option<usize> {
        let decisions = before.decisions + 1;
        if observed.workers < self.wanted && decisions < STARTS_WITHIN {
            self.before = Some(Before { decisions, ..before });
            return Some(self.wanted);
        }
        // Compares only jobs that existed before and after, because other jobs show no gain.
        let common = |of: &BTreeMap<String, f64>, other: &BTreeMap<String, f64>| {
            of.iter().filter(|(job, _)| other.contains_key(*job)).map(|(_, delivered)| delivered).sum::<f64>()
        };
        let then = common(&before.delivered_by_job, &observed.delivered_by_job);
        if then <= 0.0 {
            return None;
        }
        let gain = common(&observed.delivered_by_job, &before.delivered_by_job) / then;
        // The useful number of workers, if the throughput was proportional to their number until something else
        // became the limit.
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

/// Returns the number of workers that meet the demand.
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
        // No client reads, or all batches come from memory.
        return usize::from(delivered_per_second > 0.0);
    }
    // Assumes that the share of samples from memory, which cost no threads, does not change.
    let growth = (demand_per_second / delivered_per_second).clamp(1.0, MOST_GROWTH);
    // While clients wait, all threads count as busy, even if they wait for storage.
    let used = if waits(observed) { threads * workers as f64 } else { busy_threads };
    let headroom = if waits(observed) { 1.0 } else { HEADROOM };
    (used * growth * headroom / threads).ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a service whose workers compute `of_worker` samples per second each, up to `limit` in total, and a
    /// trainer that would take `demand` samples per second.
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
            let workers = scaler.wanted;
            scaler.decide(observe(workers, 100.0, limit, demand))
        };
        (0..count).map(decide).collect()
    }

    #[test]
    fn a_tenfold_change_of_demand_is_met_within_three_decisions() {
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
    fn workers_without_a_gain_are_removed() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        // Storage gives 300 samples per second, independent of the number of workers.
        let found = decisions(&mut scaler, 10, 300.0, 1000.0);
        assert!(found.iter().all(|workers| *workers <= 16), "{found:?}");
        assert!(found[4..].iter().all(|workers| *workers == found[4]), "{found:?}");
        assert!(found[9] <= 4, "{found:?}");
        // Workers are added again later, because storage may have become faster.
        let later = decisions(&mut scaler, 2 * TRY_AGAIN as usize, f64::MAX, 1000.0);
        assert!(later.last().is_some_and(|workers| (10..=13).contains(workers)), "{later:?}");
    }

    #[test]
    fn workers_beyond_the_limit_of_the_storage_are_removed_at_once() {
        let mut scaler = Autoscaler::new(Bounds { least: 1, most: 64 });
        decisions(&mut scaler, 6, f64::MAX, 350.0);
        // Four workers compute as much as they can, and sixteen would compute as much as six.
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
