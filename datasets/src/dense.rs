//! Statistics of dense features. Models use them to normalize the features.

mod histogram;
mod sum;

use base64::prelude::{BASE64_STANDARD_NO_PAD, Engine as _};
use onefold_base::varint::{read_varint, write_varint};
use serde::{Deserialize, Serialize};

use self::histogram::{Histogram, Pages};
use self::sum::{MOST_TIMES, Moments};

/// The number of [quantiles](DenseStatistics::quantiles): 0, 1/16, …, 1.
pub const DENSE_QUANTILES: usize = 17;

/// The statistics of a dense feature over some samples. Infinities and NaNs are only counted; all other
/// statistics ignore them.
///
/// The statistics consist of counts and exact sums. Therefore the same samples give the same bits in any
/// order, with any number of threads, and with any division into parts that are [merged](Self::merge).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DenseStatistics {
    not_finite: u64,
    histogram: Histogram,
    values: Moments,
    /// The moments of `sign(x) * ln(1 + |x|)`.
    logs: Moments,
}

impl DenseStatistics {
    /// Computes the statistics of values, which may be divided into parts in any way.
    pub fn of<'v>(parts: impl IntoIterator<Item = &'v [f32]>) -> Self {
        let mut statistics = Self::default();
        let mut pages = Pages::new();
        for part in parts.into_iter().flat_map(|part| part.chunks(MOST_TIMES)) {
            // Values often repeat within a session, so each run of equal values is added at once.
            for run in part.chunk_by(|a, b| a.to_bits() == b.to_bits()) {
                let (x, times) = (run[0], run.len());
                if !x.is_finite() {
                    statistics.not_finite += times as u64;
                    continue;
                }
                let value = f64::from(x);
                pages.add(x, times);
                statistics.values.add(value, times);
                statistics.logs.add(value.abs().ln_1p().copysign(value), times);
            }
        }
        statistics.histogram = pages.histogram();
        statistics
    }

    /// Returns the statistics of `samples` samples with the same value.
    pub(crate) fn repeated(value: f32, samples: u64) -> Self {
        let values = vec![value; MOST_TIMES];
        let (whole, rest) = (samples / MOST_TIMES as u64, samples % MOST_TIMES as u64);
        let whole = std::iter::repeat_n(&values[..], usize::try_from(whole).unwrap_or(usize::MAX));
        Self::of(whole.chain([&values[..rest as usize]]))
    }

    /// Adds the statistics of other samples. The result equals the statistics of all samples together.
    pub fn merge(&mut self, other: &Self) {
        self.not_finite = self.not_finite.saturating_add(other.not_finite);
        self.histogram.merge(&other.histogram);
        self.values.merge(&other.values);
        self.logs.merge(&other.logs);
    }

    /// Returns the number of finite values.
    pub fn finite(&self) -> u64 {
        self.histogram.count()
    }

    /// Returns the number of infinities and NaNs.
    pub fn not_finite(&self) -> u64 {
        self.not_finite
    }

    /// Returns the smallest finite value; `None` without finite values.
    pub fn min(&self) -> Option<f32> {
        self.histogram.min()
    }

    /// Returns the largest finite value; `None` without finite values.
    pub fn max(&self) -> Option<f32> {
        self.histogram.max()
    }

    /// Returns the mean; 0 without finite values, as for all statistics below.
    pub fn mean(&self) -> f64 {
        self.values.mean(self.finite())
    }

    /// Returns the population variance.
    pub fn variance(&self) -> f64 {
        self.values.variance(self.finite())
    }

    /// Returns the mean of `sign(x) * ln(1 + |x|)`.
    pub fn log_mean(&self) -> f64 {
        self.logs.mean(self.finite())
    }

    /// Returns the population variance of `sign(x) * ln(1 + |x|)`.
    pub fn log_variance(&self) -> f64 {
        self.logs.variance(self.finite())
    }

    /// Returns the quantile `share`, from 0 (the smallest value) to 1 (the largest value); these two are
    /// exact. Other quantiles are estimated from a histogram with at most 1,024 bins. The error is less than
    /// the width of a bin: 1/128 of the quantile's size if the values lie within 8 octaves, 1/64 within 16,
    /// 1/32 within 32. A bin with only one distinct value is exact. For many values with a smooth density,
    /// the errors are much smaller.
    pub fn quantile(&self, share: f64) -> f64 {
        self.histogram.quantile(share)
    }

    /// Returns the [quantiles](Self::quantile) 0, 1/16, …, 1, in ascending order.
    pub fn quantiles(&self) -> [f32; DENSE_QUANTILES] {
        std::array::from_fn(|i| self.quantile(i as f64 / (DENSE_QUANTILES - 1) as f64) as f32)
    }

    /// Returns the population stability index of these samples relative to `before`: the sum of
    /// `(p - q) ln(p / q)` over the deciles of `before`, where `p` and `q` are the shares of these samples
    /// and of the earlier samples in each bin. Shares are at least 1/10,000. Values that are not finite have their
    /// own bin. The index is about 0 for equal distributions; above 0.25, distributions are usually
    /// considered different. Returns `None` if either side has no samples.
    pub fn stability_index(&self, before: &Self) -> Option<f64> {
        const TENTHS: u32 = 10;
        const LEAST: f64 = 1e-4;
        let all = |of: &Self| (of.finite() + of.not_finite) as f64;
        if all(self) == 0.0 || all(before) == 0.0 {
            return None;
        }
        let mut ends: Vec<f64> = match before.finite() {
            0 => Vec::new(),
            _ => (1..TENTHS).map(|i| before.quantile(f64::from(i) / f64::from(TENTHS))).collect(),
        };
        ends.dedup();
        let shares = |of: &Self| -> Vec<f64> {
            let ends = ends.iter().map(|end| of.histogram.count_to(*end)).chain([of.finite() as f64]);
            let mut start = 0.0;
            let counts = ends.map(|end| end - std::mem::replace(&mut start, end));
            counts.chain([of.not_finite as f64]).map(|count| (count / all(of)).max(LEAST)).collect()
        };
        Some(shares(self).iter().zip(shares(before)).map(|(p, q)| (p - q) * (p / q).ln()).sum())
    }

    /// Encodes the statistics: at most a few KiB, or about 60 bytes for a feature with one distinct value.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_varint(&mut bytes, self.not_finite);
        self.histogram.encode(&mut bytes);
        if self.finite() > 0 {
            self.values.encode(&mut bytes);
            self.logs.encode(&mut bytes);
        }
        bytes
    }

    /// Decodes the output of [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// Returns an error if `bytes` are not encoded statistics.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let decoded = Self::decode_all(bytes);
        decoded.ok_or_else(|| format!("{} bytes are not the statistics of a dense feature", bytes.len()))
    }

    fn decode_all(mut bytes: &[u8]) -> Option<Self> {
        let from = &mut bytes;
        let (not_finite, histogram) = (read_varint(from)?, Histogram::decode(from)?);
        let mut statistics = Self { not_finite, histogram, ..Self::default() };
        if statistics.finite() > 0 {
            statistics.values = Moments::decode(from)?;
            statistics.logs = Moments::decode(from)?;
        }
        bytes.is_empty().then_some(statistics)
    }
}

impl From<DenseStatistics> for String {
    fn from(statistics: DenseStatistics) -> Self {
        BASE64_STANDARD_NO_PAD.encode(statistics.encode())
    }
}

impl TryFrom<String> for DenseStatistics {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let bytes = BASE64_STANDARD_NO_PAD
            .decode(text)
            .map_err(|error| format!("the statistics of a dense feature are not Base64: {error}"))?;
        Self::decode(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::TAU;

    use onefold_property::cases;
    use proptest::prelude::*;

    use super::*;

    fn signed_log(x: f32) -> f64 {
        f64::from(x).abs().ln_1p().copysign(f64::from(x))
    }

    fn of(values: &[f32]) -> DenseStatistics {
        DenseStatistics::of([values])
    }

    fn merged_in_order(parts: &[DenseStatistics]) -> DenseStatistics {
        parts.iter().fold(DenseStatistics::default(), |mut all, part| {
            all.merge(part);
            all
        })
    }

    /// Computes the mean and the population variance.
    fn naive(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let count = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / count;
        (mean, values.map(|x| (x - mean) * (x - mean)).sum::<f64>() / count)
    }

    /// Computes a quantile of sorted values, and returns it with the two values around it.
    fn naive_quantile(sorted: &[f32], share: f64) -> (f64, [f64; 2]) {
        let rank = share * (sorted.len() - 1) as f64;
        let [low, high] = [rank.floor(), rank.ceil()].map(|rank| f64::from(sorted[rank as usize]));
        (low + rank.fract() * (high - low), [low, high])
    }

    fn assert_near(found: f64, expected: f64, scale: f64) {
        assert!((found - expected).abs() <= 1e-9 * scale.max(1e-300), "{found} is not {expected}");
    }

    fn value() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => -1000.0_f32..1000.0,
            4 => (0..6_u8).prop_map(f32::from),
            2 => any::<f32>(),
            1 => (1..1000_u32).prop_map(f32::from_bits),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
            1 => Just(f32::NEG_INFINITY),
            1 => Just(-0.0_f32),
        ]
    }

    fn values() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(value(), 0..300)
    }

    /// Generates values for more bins than a histogram can have.
    fn many_values() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![value(), any::<f32>()], 0..4000)
    }

    fn check(values: &[f32]) {
        let found = of(values);
        let mut finite: Vec<f32> = values.iter().copied().filter(|x| x.is_finite()).collect();
        finite.sort_by(f32::total_cmp);
        let counts = (finite.len() as u64, (values.len() - finite.len()) as u64);
        assert_eq!((found.finite(), found.not_finite()), counts);
        let (Some(min), Some(max)) = (finite.first(), finite.last()) else {
            assert_eq!((found.min(), found.max(), found.mean(), found.variance()), (None, None, 0.0, 0.0));
            assert_eq!(found.quantiles(), [0.0; DENSE_QUANTILES]);
            return;
        };
        assert_eq!((found.min(), found.max()), (Some(*min), Some(*max)));
        let largest = f64::from(min.abs().max(max.abs()));
        let (mean, variance) = naive(finite.iter().map(|x| f64::from(*x)));
        assert_near(found.mean(), mean, largest);
        assert_near(found.variance(), variance, largest * largest);
        let (mean, variance) = naive(finite.iter().map(|x| signed_log(*x)));
        assert_near(found.log_mean(), mean, 100.0);
        assert_near(found.log_variance(), variance, 10_000.0);
        assert!(found.quantiles().is_sorted());
        // The relative width of a bin. Below the smallest normal number, the absolute width is constant.
        let width = 2.0_f64.powi(found.histogram.shift as i32 - 23);
        for (i, quantile) in found.quantiles().into_iter().enumerate() {
            let (exact, around) = naive_quantile(&finite, i as f64 / 16.0);
            let [low, high] = around.map(f64::abs);
            let bound = width * low.max(high).max(f32::MIN_POSITIVE.into()) + 1e-7 * exact.abs();
            assert!((f64::from(quantile) - exact).abs() <= bound, "{i}: {quantile} is not {exact}");
        }
    }

    proptest! {
        #[test]
        fn statistics_of_few_values_equal_the_definitions(values in values()) {
            check(&values);
        }

        #[test]
        fn decoding_restores_encoded_statistics(values in values()) {
            let statistics = of(&values);
            prop_assert_eq!(DenseStatistics::decode(&statistics.encode()), Ok(statistics.clone()));
            let text = serde_json::to_string(&statistics).unwrap();
            prop_assert_eq!(serde_json::from_str::<DenseStatistics>(&text).unwrap(), statistics);
        }

        #[test]
        fn decoding_arbitrary_bytes_does_not_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..100),
            values in values(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut changed = of(&values).encode();
            let at = at.index(changed.len());
            changed[at] = byte;
            for bytes in [bytes, changed] {
                let Ok(mut found) = DenseStatistics::decode(&bytes) else { continue };
                prop_assert_eq!(DenseStatistics::decode(&found.encode()), Ok(found.clone()));
                prop_assert!(found.mean().is_finite() && found.log_mean().is_finite());
                prop_assert!(found.variance().is_finite() && found.log_variance() >= 0.0);
                prop_assert!(found.quantiles().is_sorted());
                found.merge(&of(&values));
                prop_assert_eq!(DenseStatistics::decode(&found.encode()), Ok(found.clone()));
            }
        }
    }

    proptest! {
        #![proptest_config(cases(64))]

        #[test]
        fn statistics_of_many_values_equal_the_definitions(values in many_values()) {
            check(&values);
        }

        #[test]
        fn statistics_do_not_depend_on_the_order_and_grouping_of_values(
            (values, shuffled) in many_values()
                .prop_flat_map(|values| (Just(values.clone()), Just(values).prop_shuffle())),
            count in 1..9_usize,
        ) {
            let whole = of(&values);
            prop_assert!(DenseStatistics::of(values.chunks(7)) == whole);
            let parts: Vec<_> = shuffled.chunks(shuffled.len() / count + 1).map(of).collect();
            prop_assert!(merged_in_order(&parts) == whole);
            let reversed: Vec<_> = parts.iter().rev().cloned().collect();
            prop_assert!(merged_in_order(&reversed) == whole);
            let pairs: Vec<_> = parts.chunks(2).map(merged_in_order).collect();
            prop_assert!(merged_in_order(&pairs) == whole);
        }
    }

    #[test]
    fn bins_are_united_if_there_are_too_many() {
        // The values cover 72 octaves and would fill all bins with 16 bins per octave.
        let values: Vec<f32> = (-2500..2500).map(|i| 1.01_f64.powi(i) as f32).collect();
        assert_eq!(of(&values).histogram.shift, 20);
        check(&values);
        let mut few = of(&values[..100]);
        assert_eq!(few.histogram.shift, 16);
        few.merge(&of(&values[100..]));
        assert_eq!(few, of(&values));
    }

    /// Merges the statistics of the days of a year, and compares the quantiles with the quantiles of the
    /// sorted values.
    fn check_year(value: impl Fn(f64, f64) -> f64) {
        // SplitMix64 (Steele, Lea and Flood 2014), which provides normally distributed numbers (Box and
        // Muller 1958).
        let mut state = 58_u64;
        let mut uniform = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        };
        let mut normal = || (-2.0 * (1.0 - uniform()).ln()).sqrt() * (TAU * uniform()).cos();
        let mut all = Vec::new();
        let mut merged = DenseStatistics::default();
        for day in 0..365 {
            let values: Vec<f32> = (0..1000).map(|_| value(f64::from(day), normal()) as f32).collect();
            merged.merge(&of(&values));
            all.extend(values);
        }
        assert_eq!(merged, of(&all));
        all.sort_by(f32::total_cmp);
        for (i, quantile) in merged.quantiles().into_iter().enumerate() {
            let (exact, _) = naive_quantile(&all, i as f64 / 16.0);
            assert!(
                (f64::from(quantile) - exact).abs() <= 0.01 * exact.abs(),
                "{i}: {quantile} is not {exact}"
            );
        }
    }

    #[test]
    fn quantiles_of_a_year_are_those_of_its_values() {
        check_year(|_, normal| (2.0 * normal).exp());
        // The mean moves, or the distribution widens.
        check_year(|day, normal| 20.0 + day / 10.0 + normal);
        check_year(|day, normal| (day / 365.0 * normal - 3.0).exp());
    }

    #[test]
    fn the_stability_index_tells_how_far_a_distribution_has_moved() {
        let uniform = |from: f32, to: f32| -> Vec<f32> {
            (0..20_000).map(|i| from + (to - from) * i as f32 / 20_000.0).collect()
        };
        let index = |now: &[f32], before: &[f32]| of(now).stability_index(&of(before)).unwrap();
        let before = uniform(1.0, 2.0);
        assert_eq!(index(&before, &before), 0.0);
        // All samples now lie in the lower five deciles, each of which has twice its earlier share. The
        // other five are empty.
        let moved = index(&uniform(1.0, 1.5), &before);
        let expected = 5.0 * (0.1 * 2.0_f64.ln() + (1e-4_f64 - 0.1) * (1e-4_f64 / 0.1).ln());
        assert!((moved - expected).abs() < 0.05 * expected, "{moved} {expected}");
        assert!(index(&uniform(1.0, 2.1), &before) < 0.25);
        // Few values: shares of 0.5 and 0.5 become 0.9 and 0.1.
        let coin = |ones: usize| -> Vec<f32> { (0..100).map(|i| f32::from(u8::from(i < ones))).collect() };
        let found = index(&coin(10), &coin(50));
        let expected = 0.4 * (0.9_f64 / 0.5).ln() - 0.4 * (0.1_f64 / 0.5).ln();
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        // NaNs are counted, and the index is undefined without samples.
        assert!(index(&[f32::NAN, 1.0], &[1.0, 1.0]) > 1.0);
        assert_eq!(
            (of(&[]).stability_index(&of(&[1.0])), of(&[1.0]).stability_index(&of(&[]))),
            (None, None)
        );
    }

    #[test]
    fn few_and_equal_values_are_exact() {
        let halves: Vec<f32> = (0..1600).map(|i| (i / 400) as f32 / 2.0).collect();
        assert_eq!(of(&halves).quantiles()[..6], [0.0, 0.0, 0.0, 0.0, 0.375, 0.5]);
        let mut same = of(&[7.3; 9]);
        same.merge(&of(&[7.3; 3]));
        assert_eq!((same.quantiles(), same.variance(), same.finite()), ([7.3; 17], 0.0, 12));
        check(&[3.0]);
        check(&[f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, 0.0]);
        check(&[-1e-45, 1e-45, 3e-45, -0.0, f32::NAN, f32::NEG_INFINITY]);
    }

    #[test]
    fn constant_features_take_few_bytes() {
        assert!(of(&[]).encode().len() <= 3);
        assert!(of(&[0.0; 1000]).encode().len() <= 20);
        assert!(of(&[7.25; 1000]).encode().len() <= 60);
    }

    #[test]
    fn malformed_statistics_are_refused() {
        let good = serde_json::to_string(&of(&[1.0, 2.0])).unwrap();
        assert!(serde_json::from_str::<DenseStatistics>(&good).is_ok());
        for (text, part) in [
            (good.replace('"', ""), "expected"),
            (good.replacen('"', "\"*", 1), "Base64"),
            (good.replacen('"', "\"AAAA", 1), "the statistics of a dense feature"),
            (r#""""#.to_owned(), "0 bytes"),
        ] {
            let error = serde_json::from_str::<DenseStatistics>(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
