//! Tests against the definition in double precision, and against finite differences of it.

use proptest::prelude::*;

use super::*;

const ROWS: usize = 12;

/// A small case: the configuration, the parameters, one sequence, and the upstream gradient.
#[derive(Debug, Clone)]
struct Case {
    heads: usize,
    dim: usize,
    weights: Vec<f32>,
    bias: Vec<f32>,
    table: Vec<f32>,
    rows: Vec<u32>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
    /// The gradient of the output.
    upstream: Vec<f32>,
}

impl Case {
    fn sequence(&self) -> Sequence<'_> {
        Sequence {
            table: Elements::Fp32(&self.table),
            rows: &self.rows,
            offsets: &self.offsets,
            sizes: &self.sizes,
        }
    }

    fn query_key(&self) -> QueryKey {
        QueryKey::new(&self.weights, &self.bias, self.heads)
    }

    fn vectors(&self) -> Vec<f64> {
        let row = |row: &u32| self.table[*row as usize * self.dim..][..self.dim].iter();
        self.rows.iter().flat_map(row).map(|value| f64::from(*value)).collect()
    }

    /// Returns bounds for the rounding errors in the gradients of vectors, weights and bias.
    ///
    /// A saturated softmax has gradients close to zero: they are differences `g_j - c_i` of dot products of vectors
    /// and upstream gradients. Each product has an error of a few units in the last place of the sum of the
    /// magnitudes of its terms. The errors are then multiplied by keys or queries, and by vectors or weights.
    fn rounding(&self) -> [f64; 3] {
        let largest = |values: &[f64]| values.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        let (vectors, weights, bias) = (self.vectors(), doubles(&self.weights), doubles(&self.bias));
        let dim = self.dim;
        let magnitudes = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
        let upstream = doubles(&self.upstream);
        let products = upstream
            .chunks_exact(dim)
            .flat_map(|upstream| vectors.chunks_exact(dim).map(move |vector| magnitudes(vector, upstream)));
        let products = products.fold(0.0, f64::max);
        let projections = weights
            .chunks_exact(dim)
            .flat_map(|row| vectors.chunks_exact(dim).map(move |vector| magnitudes(vector, row)));
        let projections = projections.fold(0.0, f64::max) + largest(&bias);
        let head_dim = (dim / self.heads) as f64;
        let scores = 4.0 * f64::from(f32::EPSILON) * products * projections / head_dim.sqrt();
        let scores = scores * self.sizes.len() as f64;
        [scores * dim as f64 * largest(&weights), scores * largest(&vectors), scores]
    }
}

/// Computes the outputs in double precision, with all probabilities, from weights, bias, and the timeline's
/// vectors.
fn naive(case: &Case, weights: &[f64], bias: &[f64], vectors: &[f64]) -> Vec<f64> {
    let (dim, head_dim) = (case.dim, case.dim / case.heads);
    let mut output = Vec::new();
    for (offset, size) in case.offsets.iter().zip(&case.sizes) {
        let window = &vectors[*offset as usize * dim..][..*size as usize * dim];
        for head in 0..case.heads {
            let mut y = vec![0.0; dim];
            let project =
                |x: &[f64], row: usize| (0..dim).map(|d| weights[row * dim + d] * x[d]).sum::<f64>();
            for query in window.chunks_exact(dim) {
                let score = |key: &[f64]| {
                    let rows = head * head_dim..(head + 1) * head_dim;
                    let products =
                        rows.map(|row| (project(query, row) + bias[row]) * project(key, dim + row));
                    products.sum::<f64>() / (head_dim as f64).sqrt()
                };
                let scores: Vec<f64> = window.chunks_exact(dim).map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exponentials: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let total: f64 = exponentials.iter().sum();
                for (e, key) in exponentials.iter().zip(window.chunks_exact(dim)) {
                    for (y, x) in y.iter_mut().zip(key) {
                        *y += e / total / f64::from(*size) * x;
                    }
                }
            }
            output.extend(y);
        }
    }
    output
}

/// Returns a loss: the outputs of `naive`, weighted by the upstream gradient.
fn naive_loss(case: &Case, weights: &[f64], bias: &[f64], vectors: &[f64]) -> f64 {
    let output = naive(case, weights, bias, vectors);
    output.iter().zip(&case.upstream).map(|(y, g)| y * f64::from(*g)).sum()
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Returns the central differences of `loss` at `at`.
fn differences(at: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let difference = |i: usize| {
        let mut moved = at.to_vec();
        moved[i] += step;
        let up = loss(&moved);
        moved[i] -= 2.0 * step;
        (up - loss(&moved)) / (2.0 * step)
    };
    (0..at.len()).map(difference).collect()
}

fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_close_from(1e-3, what, found, expected, tolerance);
}

/// Asserts that errors, relative to the largest expected value or to `least` if all values are smaller, are within
/// the tolerance.
fn assert_close_from(least: f64, what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(least, |scale, value| scale.max(value.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= tolerance * scale, "{what} {i}: {found}, expected {expected}, scale {scale}");
    }
}

fn numbers(length: usize, bound: f32) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-bound..bound, length)
}

/// Windows that slide, repeat, are apart, are empty or have one element, in any order.
fn windows() -> impl Strategy<Value = (Vec<i32>, Vec<i32>)> {
    let sliding = (0_i32..8, 1_i32..12, 1_usize..6)
        .prop_map(|(start, size, count)| (0..count as i32).map(|i| (start + i, size)).collect::<Vec<_>>());
    let random = prop::collection::vec((0_i32..20, 0_i32..4), 0..5);
    (sliding, random)
        .prop_flat_map(|(a, b)| Just([a, b].concat()).prop_shuffle())
        .prop_map(|w| w.into_iter().unzip())
}

/// `bound` is the maximum magnitude of weights and vectors: about 1 gives even scores, 6 gives extreme ones.
fn cases(bound: f32) -> impl Strategy<Value = Case> {
    (prop::sample::select(vec![(1_usize, 4_usize), (2, 4), (2, 16)]), windows()).prop_flat_map(
        move |((heads, dim), (offsets, sizes))| {
            let parts = (
                numbers(2 * dim * dim, bound),
                numbers(dim, bound),
                numbers(ROWS * dim, bound),
                prop::collection::vec(0..ROWS as u32, 26),
                numbers(sizes.len() * heads * dim, 1.0),
            );
            parts.prop_map(move |(weights, bias, table, rows, upstream)| Case {
                heads,
                dim,
                weights,
                bias,
                table,
                rows,
                offsets: offsets.clone(),
                sizes: sizes.clone(),
                upstream,
            })
        },
    )
}

proptest! {
    #![proptest_config(onefold_property::cases(64))]
    #[test]
    fn forward_equals_the_definition(case in cases(1.0), share: bool) {
        check_forward(&case, share, 1e-4);
    }

    /// Scores reach thousands. A float then has about four decimal places, which limits the precision of
    /// exponentials.
    #[test]
    fn forward_equals_the_definition_at_extreme_scores(case in cases(6.0), share: bool) {
        check_forward(&case, share, 3e-3);
    }

    #[test]
    fn backward_equals_finite_differences(case in cases(1.0), share: bool) {
        check_gradients(&case, share);
    }

    #[test]
    fn extreme_scores_share_as_exactly_as_they_do_not(case in cases(5.0)) {
        let gradients = |share| {
            let (_, plan) = forward(&case.query_key(), &[case.sequence()], share);
            backward(&case.query_key(), &[case.sequence()], &plan, &[&case.upstream])
        };
        let (alone, shared) = (gradients(false), gradients(true));
        let [vectors, weights, bias] = case.rounding().map(|rounding| rounding / 1e-3);
        assert_close_from(vectors, "vectors", &shared.vectors[0], &doubles(&alone.vectors[0]), 1e-3);
        assert_close_from(weights, "weights", &shared.weights, &doubles(&alone.weights), 1e-3);
        assert_close_from(bias, "bias", &shared.bias, &doubles(&alone.bias), 1e-3);
    }
}

fn check_forward(case: &Case, share: bool, tolerance: f64) {
    let (found, _) = forward(&case.query_key(), &[case.sequence()], share);
    let expected = naive(case, &doubles(&case.weights), &doubles(&case.bias), &case.vectors());
    assert_close("output", &found[0], &expected, tolerance);
}

fn check_gradients(case: &Case, share: bool) {
    let sequences = [case.sequence()];
    let (_, plan) = forward(&case.query_key(), &sequences, share);
    let found = backward(&case.query_key(), &sequences, &plan, &[&case.upstream]);
    let (weights, bias, vectors) = (doubles(&case.weights), doubles(&case.bias), case.vectors());
    let expected = differences(&vectors, |vectors| naive_loss(case, &weights, &bias, vectors));
    assert_close("vectors", &found.vectors[0], &expected, 1e-3);
    let expected = differences(&weights, |weights| naive_loss(case, weights, &bias, &vectors));
    assert_close("weights", &found.weights, &expected, 1e-3);
    let expected = differences(&bias, |bias| naive_loss(case, &weights, bias, &vectors));
    assert_close("bias", &found.bias, &expected, 1e-3);
}

/// A case with several blocks of queries and several pieces, and the dimensions of the reference model.
fn long_case(length: i32, windows: i32) -> Case {
    let (heads, dim) = (2, 64);
    let number = |i: usize| ((i * 2_654_435_761) % 1_000) as f32 / 500.0 - 1.0;
    let numbers = |length: usize, scale: f32| (0..length).map(|i| scale * number(i)).collect::<Vec<_>>();
    Case {
        heads,
        dim,
        weights: numbers(2 * dim * dim, 0.3),
        bias: numbers(dim, 0.1),
        table: numbers(ROWS * dim, 1.0),
        rows: (0..(length + windows) as usize).map(|i| (i * 7 % ROWS) as u32).collect(),
        offsets: (0..windows).collect(),
        sizes: vec![length; windows as usize],
        upstream: numbers(windows as usize * heads * dim, 1.0),
    }
}

#[test]
fn long_windows_equal_the_definition_and_each_other() {
    let case = long_case(130, 7);
    let expected = naive(&case, &doubles(&case.weights), &doubles(&case.bias), &case.vectors());
    let run = |share| {
        let (output, plan) = forward(&case.query_key(), &[case.sequence()], share);
        let gradients = backward(&case.query_key(), &[case.sequence()], &plan, &[&case.upstream]);
        assert_close("output", &output[0], &expected, 1e-4);
        gradients
    };
    let (alone, shared) = (run(false), run(true));
    assert_close("vectors", &shared.vectors[0], &doubles(&alone.vectors[0]), 1e-4);
    assert_close("weights", &shared.weights, &doubles(&alone.weights), 1e-4);
}

/// The score of the first element with itself is hundreds above all others. Windows without this element would lose
/// all precision relative to the chain's maximum.
#[test]
fn a_window_far_below_its_chain_is_computed_by_itself() {
    // Few windows sum slices, many windows use matrix products.
    for windows in [3, 6] {
        let mut case = long_case(8, windows);
        (case.heads, case.dim) = (1, 4);
        let unit = || (0..16).map(|i| if i % 5 == 0 { 1.0 } else { 0.0 });
        case.weights = unit().chain(unit()).collect();
        case.bias = vec![0.0; 4];
        case.table = (0..ROWS * 4).map(|i| ((i * 5) % 7) as f32 / 7.0).collect();
        case.rows = (1..9 + windows as u32).map(|i| if i < ROWS as u32 { i } else { 2 }).collect();
        case.table[4..8].copy_from_slice(&[400.0; 4]);
        case.upstream.truncate(windows as usize * 4);
        let (output, plan) = forward(&case.query_key(), &[case.sequence()], true);
        assert!(plan.pieces[0].chains().any(|chain| chain.windows == [1]), "{plan:?}");
        let expected = naive(&case, &doubles(&case.weights), &doubles(&case.bias), &case.vectors());
        for (found, expected) in output[0].chunks_exact(4).zip(expected.chunks_exact(4)) {
            assert_close("output", found, expected, 1e-5);
        }
        check_gradients(&case, true);
    }
}

#[test]
fn threads_change_no_bit() {
    let case = long_case(40, 30);
    let sequences = [case.sequence(), case.sequence()];
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (output, plan) = forward(&case.query_key(), &sequences, true);
            let gradients = backward(&case.query_key(), &sequences, &plan, &[&case.upstream, &case.upstream]);
            (output, gradients.vectors, gradients.weights, gradients.bias)
        })
    };
    assert!(run(1) == run(3));
}
