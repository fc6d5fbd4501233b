//! Operators on dense features, including operators that map a dense feature to one id.

use serde::Deserialize;

use super::arguments::{Arguments, finite};
use super::problem::{Checked, Problem};

/// An operator that maps a number to a number.
#[derive(Debug, Clone)]
pub(super) enum DenseOp {
    Clamp { min: f32, max: f32 },
    Logit { epsilon: f32 },
    BoxCox { lambda: f32 },
    Log1p,
    FillNull { value: f32 },
}

/// An operator that maps a number to an id.
#[derive(Debug, Clone)]
pub(super) enum IdOp {
    Bucketize { borders: Vec<f32>, edges: Edges },
    OneHot { low: f32, step: f32, buckets: i64 },
}

/// Which end of a bucket is inclusive. `b` are the borders, `v` is the value.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Edges {
    /// `b[i-1] <= v < b[i]`
    Left,
    /// `b[i-1] < v <= b[i]`
    #[default]
    Right,
}

pub(super) fn logit(arguments: &mut Arguments) -> Checked<DenseOp> {
    let epsilon = arguments.finite("epsilon", Some(1e-6))?;
    if epsilon > 0.0 && epsilon < 0.5 && 1.0 - epsilon < 1.0 {
        return Ok(DenseOp::Logit { epsilon });
    }
    Err(Problem::new(
        format!("`epsilon` is {epsilon}, which leaves no room between 0 and 1 in 32-bit floats"),
        "write a number between 1e-7 and 0.5",
    ))
}

pub(super) fn bucketize(arguments: &mut Arguments) -> Checked<IdOp> {
    let borders: Vec<f64> = arguments.required("borders")?;
    let borders = borders.iter().map(|border| finite("borders", *border)).collect::<Checked<Vec<f32>>>()?;
    if borders.is_empty() {
        return Err(Problem::new("`borders` is empty", "write at least one border, in ascending order"));
    }
    if let Some(i) = (1..borders.len()).find(|i| borders[i - 1] > borders[*i]) {
        let message = format!("`borders` is not sorted: {} is before {}", borders[i - 1], borders[i]);
        return Err(Problem::new(message, "write the borders in ascending order"));
    }
    Ok(IdOp::Bucketize { borders, edges: arguments.optional("edges")?.unwrap_or_default() })
}

pub(super) fn onehot(arguments: &mut Arguments) -> Checked<IdOp> {
    let (low, high) = (arguments.finite("low", None)?, arguments.finite("high", None)?);
    let buckets = arguments.integer("buckets", None, (1, i64::from(i32::MAX)))?;
    let step = (high - low) / buckets as f32;
    if low < high && step > 0.0 && step.is_finite() {
        return Ok(IdOp::OneHot { low, step, buckets });
    }
    Err(Problem::new(
        format!("{buckets} buckets between `low` = {low} and `high` = {high} have no width"),
        "`low` must be below `high`, and there must be room for the buckets",
    ))
}

impl DenseOp {
    pub(super) fn apply(&self, column: &mut [f32]) {
        match *self {
            Self::Clamp { min, max } => each(column, |x| x.clamp(min, max)),
            Self::Logit { epsilon } => each(column, |x| logit_of(x.clamp(epsilon, 1.0 - epsilon))),
            Self::BoxCox { lambda } => each(column, |x| box_cox(x, lambda)),
            Self::Log1p => each(column, f32::ln_1p),
            Self::FillNull { value } => each(column, |x| if x.is_nan() { value } else { x }),
        }
    }
}

fn each(column: &mut [f32], op: impl Fn(f32) -> f32) {
    for x in column {
        *x = op(*x);
    }
}

fn logit_of(x: f32) -> f32 {
    (x / (1.0 - x)).ln()
}

/// Computes the Box-Cox transform of positive numbers, and returns other numbers unchanged. Source: G. E. P. Box and
/// D. R. Cox, "An Analysis of Transformations" (1964).
fn box_cox(x: f32, lambda: f32) -> f32 {
    match x {
        x if x <= 0.0 => x,
        x if lambda == 0.0 => x.ln(),
        x => (x.powf(lambda) - 1.0) / lambda,
    }
}

impl IdOp {
    /// Returns the id of a number, or 0 for NaN.
    pub(super) fn id(&self, x: f32) -> i64 {
        match self {
            Self::Bucketize { borders, edges: Edges::Right } => {
                borders.partition_point(|border| *border < x) as i64
            }
            Self::Bucketize { borders, edges: Edges::Left } => {
                borders.partition_point(|border| *border <= x) as i64
            }
            // The cast truncates, saturates, and converts NaN to 0.
            Self::OneHot { low, step, buckets } => match ((x - low) / step) as i64 {
                index if (0..*buckets).contains(&index) => index,
                _ => 0,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(op: &DenseOp, mut column: Vec<f32>) -> Vec<f32> {
        op.apply(&mut column);
        column
    }

    /// The expected numbers come from 64-bit arithmetic (`scipy.special.logit`, `scipy.special.boxcox`,
    /// `numpy.log1p`).
    #[test]
    fn numbers_agree_with_scipy() {
        let near = |found: Vec<f32>, expected: &[f64]| {
            for (found, expected) in found.into_iter().zip(expected) {
                assert!(
                    (f64::from(found) - expected).abs() <= 1e-6 * (1.0 + expected.abs()),
                    "{found} {expected}"
                );
            }
        };
        let logit = DenseOp::Logit { epsilon: 0.01 };
        let end = 4.595_119_850_134_59;
        near(
            applied(&logit, vec![0.25, 0.5, 0.0, 1.0, -3.0]),
            &[-1.098_612_288_668_11, 0.0, -end, end, -end],
        );
        let half = DenseOp::BoxCox { lambda: 0.5 };
        near(applied(&half, vec![4.0, 2.0, -2.0, 0.0]), &[2.0, 0.828_427_124_746_19, -2.0, 0.0]);
        let zero = DenseOp::BoxCox { lambda: 0.0 };
        near(applied(&zero, vec![10.0, 1.0]), &[std::f64::consts::LN_10, 0.0]);
        near(applied(&DenseOp::Log1p, vec![1.0, 1e-5]), &[std::f64::consts::LN_2, 9.999_950_000_333e-6]);
    }

    #[test]
    fn nan_remains_until_it_is_filled() {
        let ops = [
            DenseOp::Clamp { min: 0.0, max: 1.0 },
            DenseOp::Logit { epsilon: 0.1 },
            DenseOp::BoxCox { lambda: 2.0 },
            DenseOp::BoxCox { lambda: 0.0 },
            DenseOp::Log1p,
        ];
        for op in ops {
            assert!(applied(&op, vec![f32::NAN])[0].is_nan(), "{op:?}");
        }
        assert_eq!(applied(&DenseOp::FillNull { value: 3.0 }, vec![f32::NAN, 1.0]), [3.0, 1.0]);
    }

    /// The expected ids come from `torcharrow.functional.bucketize([1, 2, 3, 5, 8, 10, 11], [2, 5, 10])` in
    /// TorchArrow's tests, and from `numpy.digitize` with the same arguments.
    #[test]
    fn buckets_have_the_edges_of_torcharrow_and_numpy() {
        let numbers = [1.0, 2.0, 3.0, 5.0, 8.0, 10.0, 11.0];
        let ids = |edges| {
            let op = IdOp::Bucketize { borders: vec![2.0, 5.0, 10.0], edges };
            numbers.map(|x| op.id(x))
        };
        assert_eq!(ids(Edges::Right), [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!(ids(Edges::Left), [0, 1, 1, 2, 2, 3, 3]);
        for edges in [Edges::Left, Edges::Right] {
            let op = IdOp::Bucketize { borders: vec![-1.0], edges };
            assert_eq!(op.id(f32::NAN), 0);
            assert_eq!([op.id(f32::NEG_INFINITY), op.id(f32::INFINITY)], [0, 1]);
        }
    }

    #[test]
    fn one_hot_places_out_of_range_are_zero() {
        let op = IdOp::OneHot { low: -1.0, step: 0.5, buckets: 4 };
        let ids =
            [-1.0, -0.6, -0.5, 0.99, 1.0, -7.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|x| op.id(x));
        assert_eq!(ids, [0, 0, 1, 3, 0, 0, 0, 0, 0]);
    }
}
