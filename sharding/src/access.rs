//! How often the rows of a table are looked up. Caches profit from rows that are looked up repeatedly.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::statistics::normal_cdf;

/// The number of bins.
pub const ACCESS_BINS: usize = 17;

/// The number of samples over which accesses are counted, as in NeuroShard's benchmark.
pub const ACCESS_BATCH: u64 = 65_536;

/// The shares of a batch's distinct rows that are looked up once, twice, 3–4 times, 5–8 times, … and more than 32,768
/// times.
///
/// This is NeuroShard's reuse encoding (Zha et al., MLSys 2023): bin 0 holds rows that are looked up once, bin k
/// holds rows that are looked up more than 2^(k-1) and at most 2^k times, and the last bin also holds all rows above.
/// Accesses are counted over [`ACCESS_BATCH`] samples. Shares are relative to the number of distinct rows and sum to
/// 1; all shares of a table without lookups are 0. If lists are deduplicated, only the ids of distinct lists count as
/// lookups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AccessBins(pub [f64; ACCESS_BINS]);

impl AccessBins {
    /// Computes the bins from the number of lookups of every distinct row. Zeros are skipped.
    pub fn from_counts(counts: impl IntoIterator<Item = u64>) -> Self {
        let mut bins = [0.0; ACCESS_BINS];
        for count in counts {
            if count > 0 {
                bins[bin(count)] += 1.0;
            }
        }
        Self::normalised(bins)
    }

    /// Returns the expected bins if `accesses` lookups are distributed evenly over `rows` rows.
    pub fn uniform(rows: u64, accesses: f64) -> Self {
        Self::expected([(rows as f64, 1.0)].into_iter(), accesses)
    }

    /// Returns the expected bins if row r of `rows` is looked up with a probability proportional to r^-`exponent`
    /// (Zipf's law).
    pub fn zipf(rows: u64, accesses: f64, exponent: f64) -> Self {
        Self::expected(zipf_groups(rows, exponent).into_iter(), accesses)
    }

    /// Returns the exponent, 0 to 2 in steps of 1/64, of the Zipf distribution whose expected bins are closest to
    /// these bins for `rows` rows and `accesses` lookups. The distance is the largest difference of the cumulative
    /// shares (Kolmogorov's distance). Callers use the exponent to draw ids when only the bins are known.
    pub fn nearest_zipf(&self, rows: u64, accesses: f64) -> f64 {
        const STEPS: u32 = 128;
        let distance = |exponent: f64| {
            let other = Self::zipf(rows, accesses, exponent);
            let (mut sum, mut most) = (0.0f64, 0.0f64);
            for (a, b) in self.0.iter().zip(other.0) {
                sum += a - b;
                most = most.max(sum.abs());
            }
            most
        };
        let distances = (0..=STEPS).map(|step| {
            let exponent = f64::from(step) / 64.0;
            (distance(exponent), exponent)
        });
        distances.reduce(|best, other| if other.0 < best.0 { other } else { best }).map_or(0.0, |best| best.1)
    }

    /// Returns the expected number of distinct rows that `accesses` lookups touch, given that these bins describe
    /// `counted` lookups. A row that `counted` lookups touch c times is missed by all of `accesses` with probability
    /// (1 - accesses/counted)^c. If `accesses` exceeds `counted`, the rows that were looked up once grow in
    /// proportion to it, and all others keep their number.
    pub fn expected_rows(&self, accesses: f64, counted: f64) -> f64 {
        let per_row: f64 = self.0.iter().enumerate().map(|(k, share)| share * typical_count(k)).sum();
        if per_row <= 0.0 || counted <= 0.0 || accesses <= 0.0 {
            return 0.0;
        }
        let counted_rows = counted / per_row;
        let part = accesses / counted;
        if part >= 1.0 {
            return counted_rows * (1.0 + self.0[0] * (part - 1.0));
        }
        let seen = |(k, share): (usize, &f64)| share * (1.0 - (1.0 - part).powf(typical_count(k)));
        counted_rows * self.0.iter().enumerate().map(seen).sum::<f64>()
    }

    /// Returns the expected bins for groups of rows, each given as `(rows, weight of one row)`. The number of lookups
    /// of a row is taken as Poisson distributed, which holds for independent lookups of many rows.
    fn expected(groups: impl Iterator<Item = (f64, f64)> + Clone, accesses: f64) -> Self {
        let total: f64 = groups.clone().map(|(rows, weight)| rows * weight).sum();
        let mut bins = [0.0; ACCESS_BINS];
        if accesses > 0.0 && total > 0.0 {
            for (rows, weight) in groups {
                let rate = accesses * weight / total;
                let mut below = poisson_cdf(0.0, rate);
                for (k, share) in bins.iter_mut().enumerate() {
                    let at_most =
                        if k + 1 == ACCESS_BINS { 1.0 } else { poisson_cdf(f64::from(1u32 << k), rate) };
                    *share += rows * (at_most - below).max(0.0);
                    below = below.max(at_most);
                }
            }
        }
        Self::normalised(bins)
    }

    fn normalised(mut bins: [f64; ACCESS_BINS]) -> Self {
        let sum: f64 = bins.iter().sum();
        if sum > 0.0 {
            bins.iter_mut().for_each(|share| *share /= sum);
        }
        Self(bins)
    }

    /// Checks that the shares sum to 1, or are all zero.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a share that is not a number from 0 to 1, or a sum that is neither 0 nor 1.
    pub fn validate(&self) -> Result<()> {
        let hint = "give the shares of distinct rows looked up once, twice, 3–4 times, …: 17 numbers that sum to 1, \
                    or all 0 for a table without lookups";
        if let Some((k, share)) = self.0.iter().enumerate().find(|(_, share)| !(0.0..=1.0).contains(*share)) {
            return Err(Error::invalid(format!("`access_bins` has {share} in place {k}"), hint));
        }
        let sum: f64 = self.0.iter().sum();
        if sum != 0.0 && (sum - 1.0).abs() > 1e-6 {
            return Err(Error::invalid(format!("`access_bins` sum to {sum}"), hint));
        }
        Ok(())
    }
}

/// Returns the mean number of lookups of a bin's rows, if all counts of the bin are equally likely.
fn typical_count(bin: usize) -> f64 {
    match bin {
        0 => 1.0,
        bin => (f64::from(1u32 << (bin - 1)) + 1.0 + f64::from(1u32 << bin)) / 2.0,
    }
}

fn bin(count: u64) -> usize {
    let doublings = u64::BITS - (count.max(1) - 1).leading_zeros();
    (doublings as usize).min(ACCESS_BINS - 1)
}

/// Returns the rows of a Zipf distribution in groups of geometrically growing size, each given as
/// `(rows, weight of one row)`.
fn zipf_groups(rows: u64, exponent: f64) -> Vec<(f64, f64)> {
    let mut groups = Vec::new();
    let mut first = 1u64;
    while first <= rows {
        let last = first.saturating_add(first / 8).min(rows);
        let middle = (first as f64 * last as f64).sqrt();
        groups.push(((last - first + 1) as f64, middle.powf(-exponent)));
        first = last.saturating_add(1);
    }
    groups
}

/// Above this rate, the Poisson distribution is approximated by a normal distribution.
const NORMAL_FROM: f64 = 64.0;

/// Returns P(X ≤ `count`) for a Poisson variable X with mean `rate`.
fn poisson_cdf(count: f64, rate: f64) -> f64 {
    if rate > NORMAL_FROM {
        return normal_cdf((count + 0.5 - rate) / rate.sqrt());
    }
    let mut term = (-rate).exp();
    let mut sum = term;
    let mut k = 1.0;
    // After the mode the terms vanish, so a large `count` needs no more of them.
    while k <= count && !(k > rate && term < 1e-17) {
        term *= rate / k;
        sum += term;
        k += 1.0;
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn bins_double() {
        let bins: Vec<usize> = [1, 2, 3, 4, 5, 8, 9, 32_768, 32_769, u64::MAX].map(bin).to_vec();
        assert_eq!(bins, [0, 1, 2, 2, 3, 3, 4, 15, 16, 16]);
        let counted = AccessBins::from_counts([1, 1, 0, 2, 7]);
        assert_eq!(counted.0[..4], [0.5, 0.25, 0.0, 0.25]);
        assert_eq!(AccessBins::from_counts([]).0, [0.0; ACCESS_BINS]);
    }

    fn drawn(rows: u64, accesses: u64, exponent: f64) -> AccessBins {
        let weights: Vec<f64> = (1..=rows).map(|row| (row as f64).powf(-exponent)).collect();
        let choice = rand_distr::weighted::WeightedAliasIndex::new(weights).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut counts = HashMap::new();
        for _ in 0..accesses {
            *counts.entry(rng.sample(&choice)).or_insert(0u64) += 1;
        }
        AccessBins::from_counts(counts.into_values())
    }

    #[test]
    fn expected_distinct_rows_equal_those_of_random_draws() {
        for (rows, accesses, exponent) in [
            (20_000u64, 200_000u64, 0.0),
            (1_000, 300_000, 0.0),
            (50_000, 200_000, 0.8),
            (5_000, 300_000, 1.1),
        ] {
            let expected = match exponent {
                0.0 => AccessBins::uniform(rows, accesses as f64),
                _ => AccessBins::zipf(rows, accesses as f64, exponent),
            };
            expected.validate().unwrap();
            let found = drawn(rows, accesses, exponent);
            for (k, (expected, found)) in expected.0.iter().zip(found.0).enumerate() {
                assert!((expected - found).abs() < 0.03, "{rows} {exponent} bin {k}: {expected} {found}");
            }
        }
    }

    #[test]
    fn the_zipf_exponent_behind_bins_is_found() {
        for (rows, accesses, exponent) in
            [(1_000_000u64, 900_000.0, 0.75), (5_000, 60_000.0, 1.125), (80_000, 2e6, 0.4375)]
        {
            let bins = AccessBins::zipf(rows, accesses, exponent);
            assert_eq!(bins.nearest_zipf(rows, accesses), exponent);
        }
        assert_eq!(AccessBins::uniform(30_000, 90_000.0).nearest_zipf(30_000, 90_000.0), 0.0);
    }

    /// Compares the rows that smaller batches touch with the expectation from the bins of a larger batch.
    #[test]
    fn distinct_rows_of_smaller_batches_equal_those_of_random_draws() {
        for (rows, exponent, part) in
            [(20_000u64, 0.7, 0.1), (50_000, 1.0, 0.02), (2_000, 0.5, 0.5), (9_000, 0.9, 1.0)]
        {
            let counted = 200_000u64;
            let weights: Vec<f64> = (1..=rows).map(|row| (row as f64).powf(-exponent)).collect();
            let choice = rand_distr::weighted::WeightedAliasIndex::new(weights).unwrap();
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            let accesses = counted as f64 * part;
            let seen: std::collections::HashSet<usize> =
                (0..accesses as u64).map(|_| rng.sample(&choice)).collect();
            let expected =
                AccessBins::zipf(rows, counted as f64, exponent).expected_rows(accesses, counted as f64);
            let found = seen.len() as f64;
            assert!((expected / found - 1.0).abs() < 0.3, "{rows} {exponent} {part}: {expected} {found}");
        }
        assert_eq!(AccessBins([0.0; ACCESS_BINS]).expected_rows(10.0, 10.0), 0.0);
    }

    #[test]
    fn invalid_shares_are_refused() {
        let refused = |k: usize, share| {
            let mut bins = AccessBins::uniform(100, 1000.0);
            bins.0[k] += share;
            bins.validate().unwrap_err().to_string()
        };
        assert!(refused(3, f64::NAN).starts_with("`access_bins` has NaN in place 3"));
        assert!(refused(0, -2.0).contains("in place 0"));
        assert!(refused(0, 0.5).contains("sum to 1.5"));
        assert!(AccessBins([0.0; ACCESS_BINS]).validate().is_ok());
    }

    proptest! {
        #[test]
        fn every_expectation_is_valid(rows in 1u64..1 << 40, accesses in 0.0..1e12f64, exponent in 0.0..3.0f64) {
            prop_assert!(AccessBins::zipf(rows, accesses, exponent).validate().is_ok());
            prop_assert!(AccessBins::uniform(rows, accesses).validate().is_ok());
        }
    }
}
