//! Measures the cost of embedding tables on this machine, as training data for `onefold-shard pretrain`.
//!
//! ```text
//! draw (tables and a random plan) ─┐                          ┌─▶ costs.parquet
//!                                  ├─▶ ranks, steps in turns ─┤
//! plans (tables and their plans) ──┘                          └─▶ beside the prediction
//! ```
//!
//! The ranks of a plan take whole steps with the tables, with the code that trains: requests, lookups, answers,
//! gradients and updates. They take turns, so that the work of each rank is timed as if it had the machine for
//! itself. [`profile`] measures random plans of random tables, [`plans`] measures given plans, and
//! [`collectives`] measures the exchange between processes.

pub(crate) mod agreement;
pub(crate) mod collectives;
mod draw;
mod machine;
pub(crate) mod plans;
mod ranks;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use onefold_base::progress::Reporter;
use onefold_sharding::{AskedFeatures, ComputeSample, Costs, ShardFeatures};
use onefold_sharding_benchmark::pool;
use onefold_trainer::distributed::{Collectives, threads};
use onefold_trainer::embedding::thread_pool;
use onefold_trainer::{Error, Result};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use self::draw::{Drawn, draw};
pub(crate) use self::machine::Machine;
use self::ranks::{Limits, PlanRank, Workload};
use self::turns::{Step, Turns};

/// The options of a measurement.
#[derive(Debug, Clone)]
pub(crate) struct ProfileOptions {
    /// The number of sets of tables.
    pub(crate) sets: usize,
    /// The number of the first set. A set depends only on the seed and its number, so sets can be measured in
    /// several parts.
    pub(crate) first_set: usize,
    /// The maximum number of samples per step, over all ranks and before deduplication.
    pub(crate) samples: usize,
    /// The maximum size of a set's tables in bytes.
    pub(crate) memory_bytes: u64,
    /// The numbers of ranks to choose from; each set draws one at random. Not empty.
    pub(crate) ranks: Vec<u32>,
    /// The seed of the random sets.
    pub(crate) seed: u64,
}

const WARM_UP: usize = 2;
/// The speed of a machine changes by several percent from second to second, so steps are timed over seconds.
const TIMED: usize = 41;
/// For long steps, nine timed steps are enough.
const LEAST_TIMED: usize = 9;
const ENOUGH_MS: u64 = 3000;
/// The time that a rank waits for other ranks that fill their tables.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Measures random sets of tables. A set has up to 15 tables for two ranks, with rows and pooling factors from
/// the [pool] of the planner's tasks, dimensions from 4 to 128, weights of 32 and 16 bits, any optimizer,
/// pooled and unpooled lookups, Zipf-distributed ids with an exponent of 0.4 to 1.2, dedupe factors from 1 to
/// 16, and from 1,024 samples per rank to [`samples`](ProfileOptions::samples) in total. Tables are placed at
/// random: whole on a rank, split by columns, split by rows, or replicated.
///
/// Every rank contributes a sample: its shards, its requests, and the median time of its timed steps, after two
/// warm-up steps. Timing ends after 41 steps, or after three seconds and at least nine steps. On the processor,
/// ranks are threads that take turns, and time in which other processes occupied the processor is subtracted.
/// On a GPU, all tables of a set are whole on one rank; a step lasts until the GPU has finished it, and its
/// batch is copied before.
pub(crate) fn profile(options: &ProfileOptions, machine: &Machine, reporter: &dyn Reporter) -> Result<Costs> {
    let (pool, threads) = (pool(), Arc::new(thread_pool(machine.threads)?));
    let mut costs = Costs { sets: options.sets as u64, ..machine.no_costs() };
    reporter.begin("Measuring sets of tables", Some(options.sets as u64), "sets");
    for set in options.first_set..options.first_set.saturating_add(options.sets) {
        // Each set has its own random stream, so that it does not depend on the numbers that earlier sets drew.
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(set as u64);
        let Drawn { tables, plan, exponents } = draw(&mut rng, &pool, options, set)?;
        let workload = Workload { tables: &tables, plan: &plan, exponents: &exponents };
        let loads = plan.loads(&tables).map_err(|source| workload.wrong(source))?;
        let limits = Limits { most: TIMED, least: LEAST_TIMED, enough: Duration::from_millis(ENOUGH_MS) };
        let work = |ranks| steps(&workload, &ranks, (machine, &threads), set as u64, limits);
        let times = on_threads(plan.topology.ranks, work)?;
        let asked = AskedFeatures::by_rank(&loads);
        for ((loads, steps), asked) in loads.iter().zip(&times).zip(asked) {
            costs.compute.push(ComputeSample {
                set: set as u64,
                shards: loads.iter().flat_map(ShardFeatures::of).collect(),
                asked,
                ms: median(steps.iter().map(Step::work_ms).collect()),
            });
        }
        reporter.advance(1);
    }
    reporter.end();
    Ok(costs)
}

/// Runs and times the steps of this rank of a plan. The rank takes turns with the others of `collectives`;
/// `threads` is the machine's thread pool.
fn steps(
    workload: &Workload<'_>,
    collectives: &Arc<dyn Collectives>,
    (machine, threads): (&Machine, &Arc<rayon::ThreadPool>),
    seed: u64,
    limits: Limits,
) -> Result<Vec<Step>> {
    let turns = Arc::new(Turns::new(Arc::clone(collectives), machine.threads)?);
    let rank = collectives.agree_on(|| PlanRank::new(workload, turns, (machine, threads), seed))?;
    rank.steps(limits)
}

/// Runs `work` on every rank, each in a thread, and returns the results. If several ranks fail, prefers an
/// error that is not a consequence of another rank's end.
fn on_threads<T: Send>(
    ranks: u32,
    work: impl Fn(Arc<dyn Collectives>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let of_rank = |own| scope.spawn(move || work(Arc::new(own)));
        let running: Vec<_> = threads(ranks, PATIENCE).into_iter().map(of_rank).collect();
        let joined = |rank: std::thread::ScopedJoinHandle<'_, _>| {
            rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(joined).collect()
    });
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(value) => values.push(value),
            Err(error) => errors.push(error),
        }
    }
    let cause = errors.iter().position(Error::is_own).unwrap_or(0);
    if errors.is_empty() { Ok(values) } else { Err(errors.swap_remove(cause)) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        even if even.is_multiple_of(2) => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use onefold_base::progress::Silent;
    use onefold_sharding::ShardFeatures;

    use super::*;

    fn options(ranks: &[u32]) -> ProfileOptions {
        let ranks = ranks.to_vec();
        ProfileOptions { sets: 6, first_set: 0, samples: 64, memory_bytes: 8 << 20, ranks, seed: 3 }
    }

    fn shards(costs: &Costs) -> Vec<(Vec<ShardFeatures>, AskedFeatures)> {
        costs.compute.iter().map(|sample| (sample.shards.clone(), sample.asked)).collect()
    }

    #[test]
    fn every_rank_of_a_set_is_measured() {
        let machine = Machine { threads: 1, device: None };
        let costs = profile(&options(&[1, 3]), &machine, &Silent).unwrap();
        assert!((6..18).contains(&costs.compute.len()), "{}", costs.compute.len());
        let (mut copied, mut asked) = (false, false);
        for sample in &costs.compute {
            assert!(sample.ms > 0.0);
            for shard in &sample.shards {
                shard.validate().unwrap();
                assert!(shard.lists <= 64.0 && shard.rows * shard.columns * 2.0 <= (8 << 20) as f64);
                copied |= shard.copies == 3.0;
            }
            asked |= sample.asked.bytes > 0.0;
        }
        assert!(copied && asked);
        let again = profile(&options(&[1, 3]), &machine, &Silent).unwrap();
        assert_eq!(shards(&again), shards(&costs));
        assert!(costs.machine.ends_with(", 1 thread"), "{}", costs.machine);
        let last = ProfileOptions { sets: 1, first_set: 5, ..options(&[1, 3]) };
        let last = shards(&profile(&last, &machine, &Silent).unwrap());
        assert!(shards(&costs).ends_with(&last));
    }
}
