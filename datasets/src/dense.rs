//! Statistics of dense features, by which a model normalizes them.

mod sketch;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(crate) use self::sketch::DenseSketch;
use self::sketch::Moments;

/// The quantiles of a [`DenseStatistics`]: 0, 1/16, … 1.
pub const DENSE_QUANTILES: usize = 17;
/// Quantiles but the first and the last are rounded to so many digits, means and variances to [`MOMENT_DIGITS`].
const QUANTILE_DIGITS: usize = 6;
const MOMENT_DIGITS: usize = 12;

/// Statistics of a dense feature over some samples. Infinities and NaNs are counted, and left out of everything else.
///
/// The same samples give the same bits, on any number of threads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct DenseStatistics {
    /// Finite values.
    pub finite: u64,
    /// Infinities and NaNs.
    pub not_finite: u64,
    /// The mean; 0 without a finite value, as all that follows.
    pub mean: f64,
    /// The population variance.
    pub variance: f64,
    /// The mean of `sign(x) * ln(1 + |x|)`.
    pub log_mean: f64,
    /// The population variance of `sign(x) * ln(1 + |x|)`.
    pub log_variance: f64,
    /// The quantiles 0, 1/16, … 1, ascending. The first and the last are the smallest and the largest value exactly. Of
    /// the samples of one file the others are off by less than 1/128 of their size; [merging](Self::merge) interpolates
    /// between the quantiles of its parts.
    pub quantiles: [f32; DENSE_QUANTILES],
}

// No number of it is a NaN.
impl Eq for DenseStatistics {}

/// How statistics are stored: numbers in as few digits as give them back, separated by spaces.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    finite: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    not_finite: u64,
    /// Mean, variance, mean of the logarithms and variance of the logarithms.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    moments: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    quantiles: String,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl DenseStatistics {
    /// Of no finite values.
    fn without_values(not_finite: u64) -> Self {
        Self {
            finite: 0,
            not_finite,
            mean: 0.0,
            variance: 0.0,
            log_mean: 0.0,
            log_variance: 0.0,
            quantiles: [0.0; DENSE_QUANTILES],
        }
    }

    fn new(not_finite: u64, values: Moments, logs: Moments, quantiles: [f32; DENSE_QUANTILES]) -> Self {
        let short = |number: f64| rounded(number, MOMENT_DIGITS);
        Self {
            finite: values.count,
            not_finite,
            mean: short(values.mean),
            variance: short(values.variance()),
            log_mean: short(logs.mean),
            log_variance: short(logs.variance()),
            quantiles,
        }
    }

    /// The smallest value; `None` without a finite one.
    pub fn min(&self) -> Option<f32> {
        (self.finite > 0).then_some(self.quantiles[0])
    }

    /// The largest value; `None` without a finite one.
    pub fn max(&self) -> Option<f32> {
        (self.finite > 0).then_some(self.quantiles[DENSE_QUANTILES - 1])
    }

    fn moments(&self) -> [Moments; 2] {
        [(self.mean, self.variance), (self.log_mean, self.log_variance)].map(|(mean, variance)| Moments {
            count: self.finite,
            mean,
            squares: variance * self.finite as f64,
        })
    }

    /// Adds the statistics of other samples. Means and variances are those of all samples (Chan, Golub and LeVeque
    /// 1979); quantiles are those of the mix of the two distributions, which run straight from quantile to quantile.
    pub fn merge(&mut self, other: &Self) {
        let not_finite = self.not_finite.saturating_add(other.not_finite);
        if other.finite == 0 || self.finite == 0 {
            let of = if other.finite == 0 { self.clone() } else { other.clone() };
            *self = Self { not_finite, ..of };
            return;
        }
        let [mut values, mut logs] = self.moments();
        let [other_values, other_logs] = other.moments();
        values.merge(other_values);
        logs.merge(other_logs);
        *self = Self::new(not_finite, values, logs, mixed_quantiles(self, other));
    }
}

/// Of statistics by feature, those of all parts together, for features of which every part has some.
pub(crate) fn merged<'s>(
    parts: impl IntoIterator<Item = &'s BTreeMap<String, DenseStatistics>>,
) -> BTreeMap<String, DenseStatistics> {
    let mut parts = parts.into_iter();
    let mut all = parts.next().cloned().unwrap_or_default();
    for part in parts {
        all.retain(|name, _| part.contains_key(name));
        for (name, statistics) in &mut all {
            statistics.merge(&part[name]);
        }
    }
    all
}

/// The share of values below `x`, and of those up to `x`, of a distribution with these quantiles.
fn share_below(quantiles: &[f32; DENSE_QUANTILES], x: f64) -> (f64, f64) {
    let steps = (DENSE_QUANTILES - 1) as f64;
    let share = |below: usize| {
        if below == 0 {
            return 0.0;
        }
        let last = below - 1;
        let Some(next) = quantiles.get(below) else { return 1.0 };
        let (from, to) = (f64::from(quantiles[last]), f64::from(*next));
        (last as f64 + (x - from) / (to - from)) / steps
    };
    (
        share(quantiles.partition_point(|q| f64::from(*q) < x)),
        share(quantiles.partition_point(|q| f64::from(*q) <= x)),
    )
}

/// The quantiles of two distributions together.
fn mixed_quantiles(a: &DenseStatistics, b: &DenseStatistics) -> [f32; DENSE_QUANTILES] {
    let part = a.finite as f64 / (a.finite as f64 + b.finite as f64);
    let mut points: Vec<f64> = a.quantiles.iter().chain(&b.quantiles).map(|q| f64::from(*q)).collect();
    points.sort_by(f64::total_cmp);
    let shares: Vec<(f64, f64)> = points
        .iter()
        .map(|x| {
            let (of_a, of_b) = (share_below(&a.quantiles, *x), share_below(&b.quantiles, *x));
            (part * of_a.0 + (1.0 - part) * of_b.0, part * of_a.1 + (1.0 - part) * of_b.1)
        })
        .collect();
    let at = |share: f64| {
        let place = shares.partition_point(|(_, up_to)| *up_to < share).min(points.len() - 1);
        let (below, _) = shares[place];
        if place == 0 || share > below {
            return points[place];
        }
        let (from, (_, before)) = (points[place - 1], shares[place - 1]);
        let along = if below > before { (share - before) / (below - before) } else { 1.0 };
        from + along * (points[place] - from)
    };
    let ends = [points[0], points[points.len() - 1]].map(|x| x as f32);
    short_quantiles(ends, at)
}

/// The quantiles between `ends`, in few digits: `at` gives the one of a share.
fn short_quantiles(ends: [f32; 2], at: impl Fn(f64) -> f64) -> [f32; DENSE_QUANTILES] {
    let [min, max] = ends;
    let last = DENSE_QUANTILES - 1;
    let mut quantiles = [min; DENSE_QUANTILES];
    for i in 1..last {
        let quantile = rounded(at(i as f64 / last as f64), QUANTILE_DIGITS) as f32;
        quantiles[i] = quantile.clamp(quantiles[i - 1], max);
    }
    quantiles[last] = max;
    quantiles
}

/// `number` in so many digits.
fn rounded(number: f64, digits: usize) -> f64 {
    format!("{number:.*e}", digits - 1).parse().unwrap_or(number)
}

impl From<DenseStatistics> for Stored {
    fn from(statistics: DenseStatistics) -> Self {
        let DenseStatistics { finite, not_finite, mean, variance, log_mean, log_variance, quantiles } =
            statistics;
        if finite == 0 {
            return Self { finite, not_finite, moments: String::new(), quantiles: String::new() };
        }
        let moments = [mean, variance, log_mean, log_variance].map(|number| format!("{number:?}")).join(" ");
        Self { finite, not_finite, moments, quantiles: quantiles.map(|q| format!("{q:?}")).join(" ") }
    }
}

impl TryFrom<Stored> for DenseStatistics {
    type Error = String;

    fn try_from(stored: Stored) -> Result<Self, String> {
        let Stored { finite, not_finite, moments, quantiles } = stored;
        if finite == 0 {
            return Ok(Self::without_values(not_finite));
        }
        let numbers =
            moments.split(' ').map(|text| text.parse().ok().filter(|number: &f64| number.is_finite()));
        let numbers: Option<Vec<f64>> = numbers.collect();
        let Some(&[mean, variance, log_mean, log_variance]) = numbers.as_deref() else {
            return Err(format!("`{moments}` are not the mean and the variance of a dense feature, twice"));
        };
        let ordered = quantiles.split(' ').map(|text| text.parse().ok().filter(|q: &f32| q.is_finite()));
        let ordered: Option<Vec<f32>> = ordered.collect();
        let ordered = ordered.filter(|ordered| ordered.is_sorted()).and_then(|all| all.try_into().ok());
        let Some(quantiles) = ordered else {
            return Err(format!("`{quantiles}` are not {DENSE_QUANTILES} quantiles of a dense feature"));
        };
        Ok(Self { finite, not_finite, mean, variance, log_mean, log_variance, quantiles })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn signed_log(x: f32) -> f64 {
        f64::from(x).abs().ln_1p().copysign(f64::from(x))
    }

    fn of(values: &[f32]) -> DenseStatistics {
        DenseSketch::of(&[values]).statistics()
    }

    /// Mean and population variance.
    fn naive(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let count = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / count;
        (mean, values.map(|x| (x - mean) * (x - mean)).sum::<f64>() / count)
    }

    fn assert_near(found: f64, expected: f64, scale: f64) {
        assert!((found - expected).abs() <= 1e-9 * scale.max(1e-300), "{found} is not {expected}");
    }

    fn values() -> impl Strategy<Value = Vec<f32>> {
        let value = prop_oneof![
            8 => -1000.0_f32..1000.0,
            4 => (0..6_u8).prop_map(f32::from),
            2 => any::<f32>(),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
            1 => Just(-0.0_f32),
        ];
        prop::collection::vec(value, 0..300)
    }

    fn check(values: &[f32]) {
        let found = of(values);
        let mut finite: Vec<f32> = values.iter().copied().filter(|x| x.is_finite()).collect();
        finite.sort_by(f32::total_cmp);
        assert_eq!(
            (found.finite, found.not_finite),
            (finite.len() as u64, (values.len() - finite.len()) as u64)
        );
        let (Some(min), Some(max)) = (finite.first(), finite.last()) else {
            assert_eq!((found.min(), found.max(), found.mean), (None, None, 0.0));
            return;
        };
        assert_eq!((found.min(), found.max()), (Some(*min), Some(*max)));
        let largest = f64::from(min.abs().max(max.abs()));
        let (mean, variance) = naive(finite.iter().map(|x| f64::from(*x)));
        assert_near(found.mean, mean, largest);
        assert_near(found.variance, variance, largest * largest);
        let (mean, variance) = naive(finite.iter().map(|x| signed_log(*x)));
        assert_near(found.log_mean, mean, 100.0);
        assert_near(found.log_variance, variance, 10_000.0);
        assert!(found.quantiles.is_sorted());
        for (i, quantile) in found.quantiles.iter().enumerate() {
            let rank = i as f64 * (finite.len() - 1) as f64 / 16.0;
            let [low, high] = [rank.floor(), rank.ceil()].map(|rank| f64::from(finite[rank as usize]));
            let exact = low + rank.fract() * (high - low);
            let bound = (low.abs().max(high.abs())) / 128.0 + 1e-5 * exact.abs() + 1e-40;
            assert!((f64::from(*quantile) - exact).abs() <= bound, "{i}: {quantile} is not {exact}");
        }
    }

    proptest! {
        #[test]
        fn figures_are_those_of_the_values(values in values()) {
            check(&values);
        }

        #[test]
        fn what_is_stored_is_what_is_read(values in values()) {
            let statistics = of(&values);
            let text = serde_json::to_string(&statistics).unwrap();
            prop_assert_eq!(serde_json::from_str::<DenseStatistics>(&text).unwrap(), statistics);
        }

        #[test]
        fn how_values_are_cut_changes_no_bit(values in values(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4)) {
            let many: Vec<f32> = values.iter().cycle().take(values.len() * 20).copied().collect();
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(many.len() + 1)).chain([0, many.len()]).collect();
            ends.sort_unstable();
            let parts: Vec<&[f32]> = ends.windows(2).map(|pair| &many[pair[0]..pair[1]]).collect();
            prop_assert_eq!(DenseSketch::of(&parts).statistics(), of(&many));
        }

        #[test]
        fn sketches_add_up(a in values(), b in values()) {
            let all = [a.clone(), b.clone()].concat();
            let mut sketch = DenseSketch::of(&[&a]);
            sketch.merge(&DenseSketch::of(&[&b]));
            let (found, expected) = (sketch.statistics(), of(&all));
            prop_assert_eq!(found.quantiles, expected.quantiles);
            assert_near(found.mean, expected.mean, f64::from(expected.max().unwrap_or(0.0).abs().max(expected.min().unwrap_or(0.0).abs())));
        }

        #[test]
        fn a_merge_has_the_moments_and_the_ends_of_the_whole(a in values(), b in values()) {
            let mut found = of(&a);
            found.merge(&of(&b));
            let expected = of(&[a, b].concat());
            prop_assert_eq!((found.finite, found.not_finite), (expected.finite, expected.not_finite));
            prop_assert_eq!((found.min(), found.max()), (expected.min(), expected.max()));
            let largest = f64::from(expected.max().unwrap_or(0.0).abs().max(expected.min().unwrap_or(0.0).abs()));
            assert_near(found.mean, expected.mean, largest);
            assert_near(found.variance, expected.variance, largest * largest);
            assert_near(found.log_mean, expected.log_mean, 100.0);
            assert_near(found.log_variance, expected.log_variance, 10_000.0);
            prop_assert!(found.quantiles.is_sorted());
        }
    }

    /// The quantiles of the parts bound the shares of values: those of the whole are off by at most a step of each.
    #[test]
    fn merged_quantiles_are_near_those_of_the_whole() {
        let many = |count: usize, of: &dyn Fn(f64) -> f64| -> Vec<f32> {
            (0..count).map(|i| of((i as f64 + 0.5) / count as f64) as f32).collect()
        };
        let a = many(3000, &|x| 10.0 * x);
        let b = many(1000, &|x| -(1.0 - x).ln());
        let zeros = vec![0.0; 2000];
        let mut found = of(&a);
        found.merge(&of(&b));
        found.merge(&of(&zeros));
        let mut all = [a, b, zeros].concat();
        all.sort_by(f32::total_cmp);
        for (i, quantile) in found.quantiles.iter().enumerate() {
            let below = all.partition_point(|x| x < quantile) as f64 / all.len() as f64;
            let up_to = all.partition_point(|x| x <= quantile) as f64 / all.len() as f64;
            let share = i as f64 / 16.0;
            assert!(
                (below - 0.03..=up_to + 0.03).contains(&share),
                "{share}: {quantile}, {below} to {up_to}"
            );
        }
    }

    #[test]
    fn few_and_equal_values_are_exact() {
        let halves: Vec<f32> = (0..1600).map(|i| (i / 400) as f32 / 2.0).collect();
        let found = of(&halves);
        assert_eq!(found.quantiles[..6], [0.0, 0.0, 0.0, 0.0, 0.375, 0.5]);
        let mut same = of(&[7.25; 9]);
        same.merge(&of(&[7.25; 3]));
        assert_eq!((same.quantiles, same.variance, same.finite), ([7.25; 17], 0.0, 12));
        check(&[3.0]);
        check(&[f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, 0.0]);
    }

    #[test]
    fn malformed_statistics_are_refused() {
        let good = serde_json::to_string(&of(&[1.0, 2.0])).unwrap();
        assert!(serde_json::from_str::<DenseStatistics>(&good).is_ok());
        for (from, to, part) in [
            ("1.0 1.0625", "1.5 1.0625", "17 quantiles"),
            ("1.0 1.0625", "NaN 1.0625", "17 quantiles"),
            ("1.0 1.0625", "1.0625", "17 quantiles"),
            ("\"1.5 ", "\"x ", "mean"),
        ] {
            assert!(good.contains(from), "{good}");
            let error = serde_json::from_str::<DenseStatistics>(&good.replace(from, to)).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
