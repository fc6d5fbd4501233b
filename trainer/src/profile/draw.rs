//! Random sets of tables, and the ids that are looked up in them.

use onefold_ikjt::{Feature, Group};
use onefold_sharding::{ACCESS_BATCH, AccessBins, DataType, FeatureConfig, IdPolicy, Pooling, ShardFeatures};
use onefold_sharding_benchmark::PoolTable;
use rand::Rng;
use rand::distr::Distribution;
use rand_chacha::ChaCha8Rng;

use super::ProfileOptions;
use crate::Result;

/// The most tables of a set, as in NeuroShard.
pub(super) const MAX_TABLES: usize = 15;
/// Columns of a shard: dimensions of 4 to 128 and what halving them gives.
const COLUMNS: [u64; 6] = [4, 8, 16, 32, 64, 128];
/// One in so many sets is of tables that are not deduplicated.
pub(super) const PLAIN_SETS: usize = 3;
/// The fewest samples of a set's steps.
const LEAST_SAMPLES: usize = 1024;
/// A set of more ids than this gets fewer samples, so that none takes seconds.
const MAX_IDS: f64 = 8e6;

/// A shard of a set, and how its ids are drawn.
pub(super) struct Drawn {
    pub(super) features: ShardFeatures,
    pub(super) exponent: f64,
}

/// Draws the shards of a set.
pub(super) fn draw(
    rng: &mut ChaCha8Rng,
    pool: &[PoolTable],
    options: &ProfileOptions,
    plain: bool,
) -> Vec<Drawn> {
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

/// A table, and the lists that a step looks up in it.
pub(super) struct Filled {
    pub(super) config: FeatureConfig,
    pub(super) group: Group,
    /// As they came out of the draw.
    pub(super) features: ShardFeatures,
}

/// Draws the lists of a shard, the `i`-th of its set.
pub(super) fn fill(rng: &mut ChaCha8Rng, i: usize, drawn: &Drawn) -> Result<Filled> {
    let mut features = drawn.features;
    let config = FeatureConfig {
        feature: format!("table_{i}"),
        table: None,
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
    Ok(Filled { config, group, features })
}

/// A large prime: a divisor of no table's rows.
const PRIME: u64 = 2_654_435_761;

fn spread(row: u64, rows: u64) -> u64 {
    row.wrapping_mul(PRIME) % rows
}

#[cfg(test)]
pub(super) mod tests {
    use onefold_sharding_benchmark::pool;
    use rand::SeedableRng;

    use super::*;

    /// Tables of these rows, columns and pooling factors, and `lists` lists for each.
    pub(in super::super) fn set(tables: &[(u64, u64, f64)], lists: f64) -> Vec<Drawn> {
        let drawn = |&(rows, columns, pooling_factor): &(u64, u64, f64)| Drawn {
            features: ShardFeatures {
                rows: rows as f64,
                columns: columns as f64,
                pooling_factor,
                dedupe_factor: 1.0,
                lists,
                vectors: lists,
                access_bins: AccessBins::uniform(rows, lists * pooling_factor),
            },
            exponent: 0.8,
        };
        tables.iter().map(drawn).collect()
    }

    #[test]
    fn steps_have_samples_within_bounds() {
        let options =
            ProfileOptions { sets: 0, first_set: 0, samples: 65_536, memory_bytes: 1 << 30, seed: 1 };
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
