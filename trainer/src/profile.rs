//! Measures what embedding tables cost on this machine: what `onefold-shard pretrain` learns from.
//!
//! Random sets of tables are looked up, and updated from a gradient, by the same code that trains. Each set is a sample of
//! the computation of one rank. [`plans`] measures the ranks of plans in the same way.

pub mod plans;

use std::time::Instant;

use onefold_datasets::console::Reporter;
use onefold_ikjt::{Feature, Group};
use onefold_sharding::{
    ACCESS_BATCH, AccessBins, ComputeSample, Costs, DataType, IdPolicy, PoolTable, Pooling, ShardFeatures,
    TableConfig, pool,
};
use rand::distr::Distribution;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Result;
use crate::config::{TableOptimizerConfig, TableOptimizerKind};
use crate::embedding::{Embeddings as _, LocalEmbeddings, Lookup, LookupGradients, Steps, Table};

/// The kernels that are measured. Raise it with any change that makes them faster or slower: models keep it.
pub const KERNEL_VERSION: &str = "cpu-2";

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct ProfileOptions {
    /// Sets of tables.
    pub sets: usize,
    /// The number of the first set: sets of one seed differ by their number alone, so that they can be measured in parts.
    pub first_set: usize,
    /// The most samples per step, before deduplication.
    pub samples: usize,
    /// The most bytes of a set's tables.
    pub memory_bytes: u64,
    /// Threads of lookups and updates.
    pub threads: usize,
    /// Another seed gives other sets.
    pub seed: u64,
}

/// The most tables of a set, as in NeuroShard.
const MAX_TABLES: usize = 15;
/// Columns of a shard: dimensions of 4 to 128 and what halving them gives.
const COLUMNS: [u64; 6] = [4, 8, 16, 32, 64, 128];
/// One in so many sets is of tables that are not deduplicated.
const PLAIN_SETS: usize = 3;
/// The fewest samples of a set's steps.
const LEAST_SAMPLES: usize = 1024;
/// A set of more ids than this gets fewer samples, so that none takes seconds.
const MAX_IDS: f64 = 8e6;
const WARM_UP: usize = 2;
const TIMED: usize = 5;
/// Of steps that take long, three are enough.
const LEAST_TIMED: usize = 3;
const ENOUGH_MS: f64 = 400.0;

/// Measures sets of tables: 1 to 15, rows and pooling factors from the [pool] of the planner's tasks, columns from
/// 4 to 128, ids by Zipf's law with an exponent of 0.4 to 1.2, dedupe factors from 1 to 16, and from 1,024 samples to
/// [`samples`](ProfileOptions::samples). A sample's time is the median of five steps, or of three that take long, after two
/// that warm up; a step is lookup and pooling, then backward and update. What its threads waited for a processor that other
/// processes had is taken off.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) if threads cannot be started.
pub fn profile(options: &ProfileOptions, reporter: &dyn Reporter) -> Result<Costs> {
    let pool = pool();
    let mut compute = Vec::with_capacity(options.sets);
    reporter.begin("Measuring sets of tables", Some(options.sets as u64), "sets");
    for set in options.first_set..options.first_set.saturating_add(options.sets) {
        // A stream of its own, so that a set does not depend on how many numbers the one before drew.
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(set as u64);
        let tables = draw(&mut rng, &pool, options, set % PLAIN_SETS == 0);
        compute.push(measure(&mut rng, &tables, options.threads)?);
        reporter.advance(1);
    }
    reporter.end();
    Ok(Costs {
        machine: machine(options.threads),
        kernel_version: KERNEL_VERSION.to_owned(),
        compute,
        exchanges: Vec::new(),
    })
}

/// The processor's name and the threads: `AMD EPYC, 2 threads`.
pub fn machine(threads: usize) -> String {
    let known = fs_err::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = known.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown processor", |(_, name)| name.trim());
    format!("{model}, {threads} thread{}", if threads == 1 { "" } else { "s" })
}

/// A shard of a set, and how its ids are drawn.
struct Drawn {
    features: ShardFeatures,
    exponent: f64,
}

fn draw(rng: &mut ChaCha8Rng, pool: &[PoolTable], options: &ProfileOptions, plain: bool) -> Vec<Drawn> {
    let count = rng.random_range(1..=MAX_TABLES);
    // One half for what comes first, the other in equal parts for what then finds no room.
    let (mut left, part) = (options.memory_bytes / 2, options.memory_bytes / 2 / MAX_TABLES as u64);
    let mut tables: Vec<(f64, f64, f64, f64, f64)> = Vec::with_capacity(count);
    while tables.len() < count {
        let source = &pool[rng.random_range(0..pool.len())];
        let columns = COLUMNS[rng.random_range(0..COLUMNS.len())];
        // Smaller tables too: the shards of tables that are divided by rows.
        let rows = (source.rows >> rng.random_range(0..8)).max(1);
        let bytes = rows * (columns + 1) * 4;
        let exponent = rng.random_range(0.4..1.2);
        let dedupe_factor = if plain { 1.0 } else { 16f64.powf(rng.random_range(0.0..1.0)) };
        if bytes > left {
            left = left.max(part);
            continue;
        }
        left -= bytes;
        tables.push((rows as f64, columns as f64, source.pooling_factor, exponent, dedupe_factor));
    }
    let most = options.samples as f64;
    let drawn = most.min(LEAST_SAMPLES as f64) * (most / LEAST_SAMPLES as f64).max(1.0).powf(rng.random());
    let ids: f64 = tables.iter().map(|(.., pooling_factor, _, factor)| pooling_factor / factor).sum();
    let samples = drawn.min(MAX_IDS / ids.max(1e-9)).floor().max(1.0);
    let shard = |(rows, columns, pooling_factor, exponent, dedupe_factor): (f64, f64, f64, f64, f64)| {
        let lists = (samples / dedupe_factor).round().max(1.0);
        let dedupe_factor = samples / lists;
        let accesses = pooling_factor * ACCESS_BATCH as f64 / dedupe_factor;
        let access_bins = AccessBins::zipf(rows as u64, accesses, exponent);
        let features = ShardFeatures {
            rows,
            columns,
            pooling_factor,
            dedupe_factor,
            lists,
            vectors: lists,
            access_bins,
        };
        Drawn { features, exponent }
    };
    tables.into_iter().map(shard).collect()
}

/// The time of a step of these shards together; the features come back with the ids that were drawn.
fn measure(rng: &mut ChaCha8Rng, set: &[Drawn], threads: usize) -> Result<ComputeSample> {
    let mut tables = Vec::with_capacity(set.len());
    let mut groups = Vec::with_capacity(set.len());
    let mut shards = Vec::with_capacity(set.len());
    for (i, drawn) in set.iter().enumerate() {
        let (table, group, features) = table(rng, i, drawn)?;
        tables.push(table);
        groups.push(group);
        shards.push(features);
    }
    let mut embeddings = LocalEmbeddings::from_tables(tables, threads)?;
    for _ in 0..WARM_UP {
        step_ms(&mut embeddings, &groups, threads)?;
    }
    let mut times = Vec::with_capacity(TIMED);
    while times.len() < TIMED && (times.len() < LEAST_TIMED || times.iter().sum::<f64>() < ENOUGH_MS) {
        times.push(step_ms(&mut embeddings, &groups, threads)?);
    }
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    let even = times.len().is_multiple_of(2);
    let ms = if even { (times[middle - 1] + times[middle]) / 2.0 } else { times[middle] };
    Ok(ComputeSample { shards, ms })
}

/// The time of one step: lookup and pooling, then backward and update.
fn step_ms(embeddings: &mut LocalEmbeddings, groups: &[Group], threads: usize) -> Result<f64> {
    let optimizer = TableOptimizerConfig::new(TableOptimizerKind::RowWiseAdagrad, 0.01);
    let forward = Clock::start(threads);
    let lookups = embeddings.lookup(groups, Steps::default())?;
    let forward_ms = forward.ms();
    // The gradient comes from the dense model, which is not measured.
    let gradient = |lookup: &Lookup| LookupGradients {
        pooled: vec![0.001; lookup.pooled.len()].into(),
        sequences: Vec::new(),
    };
    let gradients: Vec<_> = lookups.iter().map(gradient).collect();
    let update = Clock::start(threads);
    embeddings.update(&lookups, &gradients, &optimizer);
    Ok(forward_ms + update.ms())
}

/// The time since a moment, less what other processes took of it: on a machine that does something else too, threads wait
/// for a processor, and the kernel counts how long.
struct Clock {
    waited_ns: u64,
    started: Instant,
    threads: usize,
}

impl Clock {
    fn start(threads: usize) -> Self {
        Self { waited_ns: waited_ns(), started: Instant::now(), threads }
    }

    /// Work is shared by all threads, so each one's waiting delays the end by its part.
    fn ms(&self) -> f64 {
        let ms = self.started.elapsed().as_secs_f64() * 1e3;
        let waited = waited_ns().saturating_sub(self.waited_ns) as f64 / 1e6 / self.threads as f64;
        (ms - waited).max(ms / 8.0)
    }
}

/// How long this process's threads have waited for a processor so far; 0 where the kernel does not tell.
fn waited_ns() -> u64 {
    let Ok(threads) = fs_err::read_dir("/proc/self/task") else { return 0 };
    // Time on a processor, time waiting for one, and how often.
    let waited = |thread: fs_err::DirEntry| {
        let counts = fs_err::read_to_string(thread.path().join("schedstat")).ok()?;
        counts.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    threads.flatten().filter_map(waited).sum()
}

/// A table, a group with its feature's lists, and the features as they came out of the draw.
fn table(rng: &mut ChaCha8Rng, i: usize, drawn: &Drawn) -> Result<(Table, Group, ShardFeatures)> {
    let mut features = drawn.features;
    let config = TableConfig {
        feature: format!("table_{i}"),
        rows: features.rows as u64,
        dim: features.columns as u64,
        pooling: Pooling::Sum,
        target: None,
        ids: IdPolicy::Checked,
        dtype: DataType::Fp32,
    };
    // Lengths around the mean; a mean below one leaves most lists empty.
    let mean = features.pooling_factor;
    let lengths: Vec<usize> =
        (0..features.lists as usize).map(|_| (mean * 2.0 * rng.random::<f64>()).round() as usize).collect();
    let total: usize = lengths.iter().sum();
    features.pooling_factor = total as f64 / features.lists;
    let rows = config.rows;
    let ids: Vec<i64> = match rand_distr::Zipf::new(rows as f64, drawn.exponent) {
        // Frequent rows do not stand together: a step that shares no divisor with the rows spreads them.
        Ok(zipf) => (0..total).map(|_| spread(zipf.sample(rng) as u64 - 1, rows) as i64).collect(),
        Err(_) => (0..total).map(|_| rng.random_range(0..rows) as i64).collect(),
    };
    let feature = Feature::from_lengths(config.feature.clone(), ids, lengths)?;
    let group = Group::try_new(config.feature.clone(), None, vec![feature])?;
    let weights = vec![0.01; (config.rows * config.dim) as usize];
    let accumulators = vec![0.0; config.rows as usize];
    let table = match Table::from_parts(&config, weights, accumulators) {
        Some(table) => table,
        // The sizes are the configuration's own.
        None => Table::new(&config, 0, 0, 1),
    };
    Ok((table, group, features))
}

/// A large prime: a divisor of no table's rows.
const PRIME: u64 = 2_654_435_761;

fn spread(row: u64, rows: u64) -> u64 {
    row.wrapping_mul(PRIME) % rows
}

#[cfg(test)]
mod tests {
    use onefold_datasets::console::Silent;

    use super::*;

    #[test]
    fn sets_are_measured_as_described() {
        let options =
            ProfileOptions { sets: 4, first_set: 0, samples: 64, memory_bytes: 8 << 20, threads: 1, seed: 3 };
        let costs = profile(&options, &Silent).unwrap();
        assert_eq!(costs.compute.len(), 4);
        for sample in &costs.compute {
            assert!(sample.ms > 0.0 && (1..=MAX_TABLES).contains(&sample.shards.len()));
            for shard in &sample.shards {
                shard.validate().unwrap();
                assert!(shard.lists <= 64.0 && shard.rows * shard.columns * 4.0 <= (8 << 20) as f64);
            }
        }
        assert!(costs.compute[0].shards.iter().all(|shard| shard.dedupe_factor == 1.0));
        let again = profile(&options, &Silent).unwrap();
        let shards =
            |costs: &Costs| -> Vec<_> { costs.compute.iter().map(|set| set.shards.clone()).collect() };
        assert_eq!(shards(&again), shards(&costs));
        assert!(costs.machine.ends_with(", 1 thread"), "{}", costs.machine);
        let last = profile(&ProfileOptions { sets: 1, first_set: 3, ..options }, &Silent).unwrap();
        assert_eq!(shards(&last), shards(&costs)[3..]);
    }

    #[test]
    fn steps_have_samples_within_bounds() {
        let options = ProfileOptions {
            sets: 0,
            first_set: 0,
            samples: 65_536,
            memory_bytes: 1 << 30,
            threads: 1,
            seed: 1,
        };
        let (pool, mut rng) = (pool(), ChaCha8Rng::seed_from_u64(9));
        let mut seen = Vec::new();
        for i in 0..300 {
            let set = draw(&mut rng, &pool, &options, i % 3 == 0);
            let samples: Vec<f64> =
                set.iter().map(|drawn| drawn.features.lists * drawn.features.dedupe_factor).collect();
            assert!(samples.iter().all(|all| (all - samples[0]).abs() < 1e-6), "{samples:?}");
            let ids: f64 = set.iter().map(|drawn| drawn.features.lists * drawn.features.pooling_factor).sum();
            assert!(ids <= 1.01 * MAX_IDS && samples[0] <= 65_536.0, "{ids}");
            seen.push(samples[0]);
        }
        seen.sort_by(f64::total_cmp);
        assert!(seen[30] < 2_048.0 && seen[150] > 4_096.0 && seen[270] > 16_384.0, "{seen:?}");
    }

    #[test]
    fn spreading_loses_no_row() {
        let mut seen: Vec<u64> = (0..1000).map(|row| spread(row, 1000)).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    }
}
