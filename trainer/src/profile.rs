//! Measures what embedding tables cost on this machine: what `onefold-shard pretrain` learns from.
//!
//! ```text
//! draw (tables, ids) ──▶ machine (a rank's tables on the processor or a GPU) ──steps──▶ costs.parquet
//! plans (a rank's shards) ──▶         ″                                      ──steps──▶ beside the prediction
//! plans (all shards) ───────▶ ranks (processes that exchange rows)           ──steps──▶         ″
//! ```
//!
//! Random sets of tables are looked up, and updated from a gradient, by the same code that trains. Each set is a sample
//! of the computation of one rank. [`plans`] measures the ranks of plans in the same way, one after the other, and
//! [`ranks`] whole steps of all of them together.

mod draw;
mod machine;
pub mod plans;
pub mod ranks;

use onefold_datasets::progress::Reporter;
use onefold_sharding::{ComputeSample, Costs};
use onefold_sharding_benchmark::pool;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use self::draw::{Drawn, PLAIN_SETS, draw};
pub use self::machine::Machine;
use crate::Result;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct ProfileOptions {
    /// Sets of tables.
    pub sets: usize,
    /// The number of the first set: sets of one seed differ by their number alone, so that they can be measured in
    /// parts.
    pub first_set: usize,
    /// The most samples per step, before deduplication.
    pub samples: usize,
    /// The most bytes of a set's tables.
    pub memory_bytes: u64,
    /// Another seed gives other sets.
    pub seed: u64,
}

const WARM_UP: usize = 2;
const TIMED: usize = 5;
/// Of steps that take long, three are enough.
const LEAST_TIMED: usize = 3;
const ENOUGH_MS: f64 = 400.0;

/// Measures sets of tables: 1 to 15, rows and pooling factors from the [pool] of the planner's tasks, columns from 4 to
/// 128, ids by Zipf's law with an exponent of 0.4 to 1.2, dedupe factors from 1 to 16, and from 1,024 samples to
/// [`samples`](ProfileOptions::samples). A sample's time is the median of five steps, or of three that take long, after
/// two that warm up; a step is lookup and pooling, then backward and update. On the processor, what threads waited for
/// it while other processes had it is taken off; a GPU's step lasts until the GPU has ended it, and its batch was
/// copied before.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) if threads cannot be started; [`Error::Device`](crate::Error::Device) if a GPU fails
/// or has too little memory.
pub fn profile(options: &ProfileOptions, machine: &Machine, reporter: &dyn Reporter) -> Result<Costs> {
    let pool = pool();
    let mut compute = Vec::with_capacity(options.sets);
    reporter.begin("Measuring sets of tables", Some(options.sets as u64), "sets");
    for set in options.first_set..options.first_set.saturating_add(options.sets) {
        // A stream of its own, so that a set does not depend on how many numbers the one before drew.
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(set as u64);
        let tables = draw(&mut rng, &pool, options, set % PLAIN_SETS == 0);
        compute.push(measure(&mut rng, &tables, machine)?);
        reporter.advance(1);
    }
    reporter.end();
    Ok(Costs {
        machine: machine.name(),
        kernel_version: machine.kernel_version().to_owned(),
        compute,
        exchanges: Vec::new(),
    })
}

/// The time of a step of these shards together; the features come back with the ids that were drawn.
fn measure(rng: &mut ChaCha8Rng, set: &[Drawn], machine: &Machine) -> Result<ComputeSample> {
    let (mut rank, shards) = machine.rank(rng, set)?;
    for _ in 0..WARM_UP {
        rank.step_ms()?;
    }
    let mut times = Vec::with_capacity(TIMED);
    while times.len() < TIMED && (times.len() < LEAST_TIMED || times.iter().sum::<f64>() < ENOUGH_MS) {
        times.push(rank.step_ms()?);
    }
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    let even = times.len().is_multiple_of(2);
    let ms = if even { (times[middle - 1] + times[middle]) / 2.0 } else { times[middle] };
    Ok(ComputeSample { shards, ms })
}

#[cfg(test)]
mod tests {
    use onefold_datasets::progress::Silent;

    use super::*;

    #[test]
    fn sets_are_measured_as_described() {
        let options = ProfileOptions { sets: 4, first_set: 0, samples: 64, memory_bytes: 8 << 20, seed: 3 };
        let machine = Machine { threads: 1, device: None };
        let costs = profile(&options, &machine, &Silent).unwrap();
        assert_eq!(costs.compute.len(), 4);
        for sample in &costs.compute {
            assert!(sample.ms > 0.0 && (1..=draw::MAX_TABLES).contains(&sample.shards.len()));
            for shard in &sample.shards {
                shard.validate().unwrap();
                assert!(shard.lists <= 64.0 && shard.rows * shard.columns * 4.0 <= (8 << 20) as f64);
            }
        }
        assert!(costs.compute[0].shards.iter().all(|shard| shard.dedupe_factor == 1.0));
        let again = profile(&options, &machine, &Silent).unwrap();
        let shards =
            |costs: &Costs| -> Vec<_> { costs.compute.iter().map(|set| set.shards.clone()).collect() };
        assert_eq!(shards(&again), shards(&costs));
        assert!(costs.machine.ends_with(", 1 thread"), "{}", costs.machine);
        let last = profile(&ProfileOptions { sets: 1, first_set: 3, ..options }, &machine, &Silent).unwrap();
        assert_eq!(shards(&last), shards(&costs)[3..]);
    }
}
