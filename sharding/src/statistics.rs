//! Statistics of prediction errors, and the fit of linear cost models.

/// Returns the mean squared error of `predicted` against `measured`, in the square of their unit.
pub(crate) fn mean_squared_error(predicted: &[f64], measured: &[f64]) -> f64 {
    let squares = predicted.iter().zip(measured).map(|(p, m)| (p - m) * (p - m));
    squares.sum::<f64>() / measured.len().max(1) as f64
}

/// Returns Kendall's tau-b: 1 if both have the same order, -1 if the orders are reversed, 0 if one of them has only
/// ties.
pub fn kendall_tau(a: &[f64], b: &[f64]) -> f64 {
    let (mut agree, mut ties_a, mut ties_b, mut pairs) = (0i64, 0i64, 0i64, 0i64);
    for i in 0..a.len() {
        for j in 0..i {
            let (x, y) = (a[i].total_cmp(&a[j]) as i64, b[i].total_cmp(&b[j]) as i64);
            agree += x * y;
            ties_a += i64::from(x == 0);
            ties_b += i64::from(y == 0);
            pairs += 1;
        }
    }
    let untied = ((pairs - ties_a) as f64 * (pairs - ties_b) as f64).sqrt();
    if untied == 0.0 { 0.0 } else { agree as f64 / untied }
}

/// Returns the standard normal distribution function, by Abramowitz and Stegun, 7.1.26, with an error of at most
/// 1.5e-7.
pub fn normal_cdf(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let polynomial = t
        * (0.254_829_592
            + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    let tail = 0.5 * polynomial * (-z * z).exp();
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Returns the standard deviation of Kendall's tau for `pairs` independent pairs (Kendall, 1938).
pub(crate) fn kendall_deviation(pairs: usize) -> f64 {
    let n = pairs.max(2) as f64;
    (2.0 * (2.0 * n + 5.0) / (9.0 * n * (n - 1.0))).sqrt()
}

/// Returns non-negative weights of columns whose weighted sums approximate the targets, by weighted least squares.
/// The algorithm is cyclic coordinate descent on the normal equations (Franc, Hlaváč and Navara, 2005), which
/// converges from any start.
pub(crate) fn nonnegative_fit(rows: &[Vec<f64>], targets: &[f64], weights: &[f64]) -> Vec<f64> {
    const PASSES: usize = 20_000;
    let width = rows.first().map_or(0, Vec::len);
    let scales: Vec<f64> = (0..width)
        .map(|i| rows.iter().zip(weights).map(|(row, w)| w * row[i] * row[i]).sum::<f64>().sqrt())
        .map(|norm| if norm > 0.0 { norm } else { 1.0 })
        .collect();
    let mut gram = vec![vec![0.0; width]; width];
    let mut right = vec![0.0; width];
    for ((row, target), weight) in rows.iter().zip(targets).zip(weights) {
        for i in 0..width {
            right[i] += weight * row[i] / scales[i] * target;
            for j in 0..width {
                gram[i][j] += weight * row[i] / scales[i] * row[j] / scales[j];
            }
        }
    }
    let mut solution = vec![0.0; width];
    for _ in 0..PASSES {
        let mut moved = 0.0f64;
        for i in 0..width {
            // A column of zeros keeps the weight 0.
            if gram[i][i] > 0.0 {
                let product: f64 = gram[i].iter().zip(&solution).map(|(g, x)| g * x).sum();
                let next = (solution[i] + (right[i] - product) / gram[i][i]).max(0.0);
                moved = moved.max((next - solution[i]).abs() / next.max(1e-12));
                solution[i] = next;
            }
        }
        if moved < 1e-9 {
            break;
        }
    }
    solution.iter().zip(&scales).map(|(x, scale)| x / scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tau_counts_pairs_in_order() {
        assert_eq!(kendall_tau(&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0]), 1.0);
        assert_eq!(kendall_tau(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), -1.0);
        // Five of six pairs have the same order.
        assert!((kendall_tau(&[1.0, 2.0, 3.0, 4.0], &[1.0, 2.0, 4.0, 3.0]) - 4.0 / 6.0).abs() < 1e-12);
        // scipy.stats.kendalltau([1, 1, 2, 3], [1, 2, 2, 3]) = 0.8.
        assert!((kendall_tau(&[1.0, 1.0, 2.0, 3.0], &[1.0, 2.0, 2.0, 3.0]) - 0.8).abs() < 1e-12);
        assert_eq!(kendall_tau(&[1.0, 1.0], &[1.0, 2.0]), 0.0);
    }

    #[test]
    fn nonnegative_weights_are_fitted() {
        let rows: Vec<Vec<f64>> =
            (0..40).map(|i| vec![f64::from(i % 7), 1e6 * f64::from(i * i % 11), 1.0, 0.0]).collect();
        let targets = |w: [f64; 3]| -> Vec<f64> {
            rows.iter().map(|x| w[0] * x[0] + w[1] * x[1] + w[2] * x[2]).collect()
        };
        let ones = vec![1.0; rows.len()];
        let found = nonnegative_fit(&rows, &targets([3.0, 2e-6, 0.5]), &ones);
        assert!((found[0] - 3.0).abs() < 1e-3 && (found[1] - 2e-6).abs() < 1e-9, "{found:?}");
        assert!((found[2] - 0.5).abs() < 1e-2 && found[3] == 0.0, "{found:?}");
        // A weight that would be negative is 0, and the other weights compensate for it.
        let found = nonnegative_fit(&rows, &targets([-1.0, 2e-6, 9.0]), &ones);
        assert!(found[0] == 0.0 && found[1] > 0.0 && found[2] > 0.0, "{found:?}");
        // Only the first rows have a positive weight.
        let mut mixed = targets([3.0, 2e-6, 0.5]);
        mixed[20..].fill(100.0);
        let weights: Vec<f64> = (0..40).map(|i| if i < 20 { 1.0 } else { 0.0 }).collect();
        assert!((nonnegative_fit(&rows, &mixed, &weights)[0] - 3.0).abs() < 1e-3);
    }

    #[test]
    fn errors_are_squared() {
        assert_eq!(mean_squared_error(&[1.0, 5.0], &[2.0, 3.0]), 2.5);
    }
}
