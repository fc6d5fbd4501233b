//! Draws the session of each row of a log: samples of many sessions are interleaved as in the log of a busy service.
//!
//! # The model
//!
//! A cell of `T` rows is modelled as a **circle** of circumference `T`. A circle has no edges, so as many sessions
//! are active in the first row as in the middle. A session has a geometric number of samples with mean `m` and starts
//! uniformly on the circle. The gaps between its consecutive samples are exponential with mean `G`, in rows. The
//! samples sorted by position are the rows of the cell. A session that goes past the end continues at the beginning,
//! so it appears as one session with a long pause.
//!
//! # The number of sessions in `W` consecutive rows
//!
//! Let `q = 1/m`, `p = 1 - q`, `x = W/G`, and let `g(u)` be the probability that a session that continues after
//! position `u` never again has a sample in a given window of `W` rows. Positions are measured from the window's end.
//! Positions `u < T - W` are outside the window, where the exponential gaps give `G g' = q (g - 1)`, so
//! `g = 1 + A e^(q u / G)`. From inside the window, the session misses the rest of the window only if a gap jumps
//! over it. This closes the circle by `g(T - W) = e^(-x) g(0)`, which determines `A`. Integrating over the start of
//! the session, and multiplying by the `T/m` sessions of the cell, the window contains
//!
//! ```text
//! D = W/m + p G (1 - e^(-x)) (1 - e^(-y)) / (1 - e^(-x-y)),     y = (T - W) / (m G)
//! ```
//!
//! distinct sessions. The last factor results from the circle. It is 1 in an endless log, where the rest has a direct
//! interpretation: a row is the first row of its session in the window if it is the session's first row, or if the
//! gap before it is longer than its distance from the window's start. For `G → ∞` the samples are distributed
//! uniformly and `W / D → 1 + (m - 1) W / T`.
//!
//! `G` is found by bisection such that `W / D` is 1.15 for `W = 4096`. In an endless log, `G` is about 13,300 rows
//! for a mean size of 16.5, and 12,300 rows for 8. In a short log, a session goes around the circle and overlaps
//! itself, so `G` has to be longer. Below about 423,000 rows (mean 16.5) or 191,000 rows (mean 8), no `G` is long
//! enough. Positions are then uniform, and `W / D` increases as the log gets shorter: with mean 16.5 it is 1.21 at
//! 300,000 rows, 1.32 at 200,000, 1.63 at 100,000, and 16.5 at 4,096 rows and fewer, where the window is the whole
//! log.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_distr::Exp1;

/// The window for which the interleaving is specified, in rows.
const WINDOW_ROWS: f64 = 4096.0;
/// The number of samples per distinct session in a window.
const SAMPLES_PER_SESSION: f64 = 1.15;
/// The largest gap, in turns of the circle. Longer gaps are treated as uniform positions.
const LONGEST_GAP_TURNS: f64 = 1e3;

/// The arrival of one cell's samples.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    /// The session of each row, counted from 0 within the cell.
    pub(super) order: Vec<u32>,
    /// The number of samples of each session, at least 1.
    pub(super) sizes: Vec<u32>,
}

impl Arrival {
    /// Draws the arrival of exactly `samples` samples in sessions of mean size `mean_size`. The last session is
    /// truncated where the sum is reached.
    pub(super) fn draw(samples: u32, mean_size: f64, rng: &mut ChaCha8Rng) -> Self {
        let sizes = draw_sizes(samples, mean_size, rng);
        let circle = f64::from(samples);
        let gap = mean_gap(circle, mean_size);
        let mut positions: Vec<(f64, u32)> = Vec::with_capacity(samples as usize);
        for (session, &size) in (0u32..).zip(&sizes) {
            let mut position = rng.random::<f64>() * circle;
            for sample in 0..size {
                if sample > 0 {
                    position = next_position(position, circle, gap, rng);
                }
                positions.push((position, session));
            }
        }
        positions.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let order = positions.into_iter().map(|(_, session)| session).collect();
        Self { order, sizes }
    }
}

/// Draws geometric sizes of at least 1 whose sum is `samples`.
fn draw_sizes(samples: u32, mean_size: f64, rng: &mut ChaCha8Rng) -> Vec<u32> {
    let log_continue = (-1.0 / mean_size).ln_1p();
    let mut left = samples;
    let mut sizes = Vec::new();
    while left > 0 {
        // Inversion: 1 - u is in (0, 1], so the logarithm is finite.
        let size = 1.0 + ((1.0 - rng.random::<f64>()).ln() / log_continue).floor();
        let size = (size as u32).min(left);
        sizes.push(size);
        left -= size;
    }
    sizes
}

fn next_position(position: f64, circle: f64, gap: Option<f64>, rng: &mut ChaCha8Rng) -> f64 {
    match gap {
        Some(gap) => (position + gap * rng.sample::<f64, _>(Exp1)) % circle,
        None => rng.random::<f64>() * circle,
    }
}

/// Returns the expected number of samples per distinct session in a window, by the module's formula. `None` is an
/// infinite gap.
fn samples_per_session(circle: f64, mean_size: f64, gap: Option<f64>) -> f64 {
    let outside = circle - WINDOW_ROWS;
    if outside <= 0.0 {
        return mean_size;
    }
    let Some(gap) = gap else {
        return 1.0 + (mean_size - 1.0) * WINDOW_ROWS / circle;
    };
    let (x, y) = (WINDOW_ROWS / gap, outside / (mean_size * gap));
    // For small arguments, `exp_m1` keeps digits that `1 - exp` would lose.
    let reopened = -gap * (-x).exp_m1() * (-y).exp_m1() / (-x - y).exp_m1();
    WINDOW_ROWS / (WINDOW_ROWS / mean_size + (1.0 - 1.0 / mean_size) * reopened)
}

/// Returns the mean gap that gives [`SAMPLES_PER_SESSION`], or `None` if no gap is long enough.
fn mean_gap(circle: f64, mean_size: f64) -> Option<f64> {
    // The number decreases as the gap grows, so a bisection of the gap's logarithm finds it.
    let (mut short, mut long) = (0.0, (circle * LONGEST_GAP_TURNS).ln());
    if samples_per_session(circle, mean_size, Some(long.exp())) >= SAMPLES_PER_SESSION {
        return None;
    }
    for _ in 0..100 {
        let middle: f64 = (short + long) / 2.0;
        if samples_per_session(circle, mean_size, Some(middle.exp())) > SAMPLES_PER_SESSION {
            short = middle;
        } else {
            long = middle;
        }
    }
    Some(long.exp())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::SeedableRng;

    use super::*;

    /// Returns the number of samples per distinct session over all disjoint windows of the log.
    fn measure(arrival: &Arrival) -> f64 {
        let windows = arrival.order.chunks_exact(WINDOW_ROWS as usize);
        let distinct: usize = windows.clone().map(|rows| rows.iter().collect::<HashSet<_>>().len()).sum();
        windows.len() as f64 * WINDOW_ROWS / distinct as f64
    }

    fn draw(samples: u32, mean_size: f64) -> Arrival {
        Arrival::draw(samples, mean_size, &mut ChaCha8Rng::seed_from_u64(7))
    }

    #[test]
    fn long_logs_hold_the_specified_samples_per_session() {
        for (samples, mean_size) in [(500_000, 16.5), (1 << 20, 16.5), (300_000, 8.0), (1 << 20, 8.0)] {
            let measured = measure(&draw(samples, mean_size));
            assert!((measured - 1.15).abs() < 0.02, "{samples} rows, mean {mean_size}: {measured}");
        }
    }

    #[test]
    fn short_logs_grow_as_the_formula_says() {
        for samples in [300_000, 200_000, 100_000] {
            let circle = f64::from(samples);
            assert_eq!(mean_gap(circle, 16.5), None);
            let expected = samples_per_session(circle, 16.5, None);
            let measured = measure(&draw(samples, 16.5));
            assert!((measured / expected - 1.0).abs() < 0.02, "{samples} rows: {measured}, not {expected}");
        }
        let documented = [(300_000.0, 1.21), (200_000.0, 1.32), (100_000.0, 1.63), (4_096.0, 16.5)];
        for (circle, expected) in documented {
            let uniform = samples_per_session(circle, 16.5, None);
            assert!((uniform - expected).abs() < 0.006, "{circle} rows: {uniform}");
            let limit = samples_per_session(circle, 16.5, Some(1e12));
            assert!((uniform / limit - 1.0).abs() < 1e-6, "{circle} rows: {uniform}, not {limit}");
        }
    }

    #[test]
    fn the_formula_holds_for_any_gap() {
        let (samples, mean_size) = (400_000u32, 16.5);
        for gap in [500.0, 13_300.0, 200_000.0] {
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            let circle = f64::from(samples);
            let mut positions = Vec::new();
            for (session, &size) in (0u32..).zip(&draw_sizes(samples, mean_size, &mut rng)) {
                let mut position = rng.random::<f64>() * circle;
                for _ in 0..size {
                    positions.push((position, session));
                    position = next_position(position, circle, Some(gap), &mut rng);
                }
            }
            positions.sort_by(|a, b| a.0.total_cmp(&b.0));
            let order = positions.into_iter().map(|(_, session)| session).collect();
            let measured = measure(&Arrival { order, sizes: Vec::new() });
            let expected = samples_per_session(circle, mean_size, Some(gap));
            assert!((measured / expected - 1.0).abs() < 0.02, "gap {gap}: {measured}, not {expected}");
        }
    }

    #[test]
    fn the_gap_is_the_documented_one_and_the_figure_falls_with_it() {
        for (mean_size, expected) in [(16.5, 13_300.0), (8.0, 12_300.0)] {
            let gap = mean_gap(1e9, mean_size).unwrap();
            assert!((gap / expected - 1.0).abs() < 0.005, "mean {mean_size}: {gap}");
        }
        for (circle, mean_size) in [(424_000.0, 16.5), (192_000.0, 8.0), (1e6, 16.5)] {
            let gap = mean_gap(circle, mean_size).unwrap();
            let reached = samples_per_session(circle, mean_size, Some(gap));
            assert!((reached - 1.15).abs() < 1e-9, "{circle} rows: {reached}");
            let figures = (0..60).map(|i| samples_per_session(circle, mean_size, Some(1.3f64.powi(i))));
            assert!(figures.is_sorted_by(|a, b| a > b));
        }
        assert_eq!(mean_gap(422_000.0, 16.5), None);
        assert_eq!(mean_gap(190_000.0, 8.0), None);
    }

    #[test]
    fn sizes_are_geometric_and_add_up() {
        for mean_size in [16.5, 8.0] {
            let arrival = draw(500_000, mean_size);
            assert_eq!(arrival.order.len(), 500_000);
            assert_eq!(arrival.sizes.iter().sum::<u32>(), 500_000);
            let sessions = arrival.sizes.len() as f64;
            assert!((500_000.0 / sessions / mean_size - 1.0).abs() < 0.02);
            let singles = arrival.sizes.iter().filter(|size| **size == 1).count() as f64;
            assert!((singles / sessions * mean_size - 1.0).abs() < 0.06, "{singles} of {sessions}");
            let mut counted = vec![0; arrival.sizes.len()];
            arrival.order.iter().for_each(|session| counted[*session as usize] += 1);
            assert_eq!(counted, arrival.sizes);
        }
        assert_eq!(draw(1, 16.5), Arrival { order: vec![0], sizes: vec![1] });
    }
}
