//! A pool of tables like those of Meta's public benchmark data, drawn from their published statistics.

use onefold_sharding::{ACCESS_BATCH, AccessBins, normal_cdf};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The number of tables in the pool, as in `fbgemm_t856_bs65536` of facebookresearch/dlrm_datasets.
pub const POOL_TABLES: usize = 856;
/// The number of these tables that are never looked up.
pub const POOL_EMPTY_TABLES: usize = 36;
/// The mean and standard deviation of the number of rows (the largest index in a batch of 65,536 samples, plus one).
pub const POOL_ROWS: (f64, f64) = (4_107_472.0, 3_134_816.0);
/// The mean and standard deviation of the pooling factors.
pub const POOL_POOLING: (f64, f64) = (15.8117, 25.59);

/// The least number of rows of a table, as in NeuroShard's task generator.
const MIN_ROWS: u64 = 100;
/// The seed of the pool. It is fixed, so that all tasks choose from the same tables, whatever their own seeds are.
const SEED: u64 = 856;
/// The range of the exponents of Zipf's law, by which rows are looked up. This is an assumption: no histograms of
/// single tables are published.
const EXPONENTS: std::ops::Range<f64> = 0.4..1.2;

/// A table of the pool. Tasks add a dimension.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolTable {
    /// The number of rows.
    pub rows: u64,
    /// The mean number of ids per sample.
    pub pooling_factor: f64,
    /// How often the rows are looked up.
    pub accesses: AccessBins,
}

/// Returns the pool: 856 tables whose numbers of rows and pooling factors have the published means and standard
/// deviations. 36 of them have no lookups.
///
/// The original data are hard to obtain, but their moments are published. Numbers of rows follow a Weibull
/// distribution and pooling factors a log-normal distribution. Both are taken at evenly spaced quantiles, with
/// parameters that meet both moments, and paired at random.
pub fn pool() -> Vec<PoolTable> {
    let looked_up = POOL_TABLES - POOL_EMPTY_TABLES;
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let quantiles: Vec<f64> = (0..looked_up).map(|i| (i as f64 + 0.5) / looked_up as f64).collect();
    // Powers of exponential quantiles are Weibull quantiles, and powers of log-normal quantiles are log-normal again.
    let exponential: Vec<f64> = quantiles.iter().map(|q| -(1.0 - q).ln()).collect();
    let log_normal: Vec<f64> = quantiles.iter().map(|q| normal_quantile(*q).exp()).collect();
    let mut rows = with_moments(&exponential, POOL_ROWS, MIN_ROWS as f64);
    let mut pooling = with_moments(&log_normal, POOL_POOLING, 0.0);
    rows.shuffle(&mut rng);
    pooling.shuffle(&mut rng);

    let mut tables = Vec::with_capacity(POOL_TABLES);
    for (rows, pooling_factor) in rows.into_iter().zip(pooling) {
        let rows = (rows.round() as u64).max(MIN_ROWS);
        let accesses =
            AccessBins::zipf(rows, pooling_factor * ACCESS_BATCH as f64, rng.random_range(EXPONENTS));
        tables.push(PoolTable { rows, pooling_factor, accesses });
    }
    let empty =
        PoolTable { rows: MIN_ROWS, pooling_factor: 0.0, accesses: AccessBins::uniform(MIN_ROWS, 0.0) };
    tables.resize(POOL_TABLES, empty);
    tables.shuffle(&mut rng);
    tables
}

/// Returns `a · x^p`, where a and p are chosen so that mean and deviation are met, including the empty tables with
/// the value `empty`.
fn with_moments(x: &[f64], (mean, deviation): (f64, f64), empty: f64) -> Vec<f64> {
    let all = POOL_TABLES as f64;
    let empties = all - x.len() as f64;
    let sum = mean * all - empty * empties;
    let squares = (deviation * deviation + mean * mean) * all - empty * empty * empties;
    // Σy² ÷ (Σy)² increases with p and does not depend on a.
    let wanted = squares / (sum * sum);
    let (mut low, mut high) = (0.01, 4.0);
    for _ in 0..100 {
        let p = 0.5 * (low + high);
        let (first, second) = x.iter().map(|x| x.powf(p)).fold((0.0, 0.0), |(s, q), y| (s + y, q + y * y));
        if second / (first * first) < wanted { low = p } else { high = p }
    }
    let bent: Vec<f64> = x.iter().map(|x| x.powf(low)).collect();
    let scale = sum / bent.iter().sum::<f64>();
    bent.into_iter().map(|y| y * scale).collect()
}

/// Returns the inverse of the standard normal distribution function, by bisection.
fn normal_quantile(q: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        if normal_cdf(middle) < q { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let count = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / count;
        let variance = values.map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }

    #[test]
    fn the_pool_has_the_published_marginals() {
        let pool = pool();
        assert_eq!(pool.len(), POOL_TABLES);
        assert_eq!(pool.iter().filter(|table| table.pooling_factor == 0.0).count(), POOL_EMPTY_TABLES);
        let close = |(a, b): (f64, f64), (c, d): (f64, f64)| {
            assert!((a - c).abs() < 1e-3 * c && (b - d).abs() < 1e-3 * d, "{a} ± {b} is not {c} ± {d}");
        };
        close(moments(pool.iter().map(|table| table.rows as f64)), POOL_ROWS);
        close(moments(pool.iter().map(|table| table.pooling_factor)), POOL_POOLING);
        assert!(pool.iter().all(|table| table.accesses.validate().is_ok() && table.rows >= MIN_ROWS));
    }

    #[test]
    fn the_pool_is_always_the_same() {
        assert_eq!(pool(), pool());
    }
}
