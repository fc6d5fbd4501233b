//! The computation of one chain: the scores of all its pairs once, and all windows from these scores.

use super::plan::Chain;
use super::windows::{Windows, any, zeros};
use super::{QueryKey, Sequence};
use crate::gemm::{ROWS, Strided, gemm, transpose};
use crate::simd::WIDE;

/// The maximum number of queries whose scores are in memory at a time.
const BLOCK: usize = 48;

/// Buffers for one chain at a time; n is the chain's length, W the number of its windows.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// The elements' vectors, `[n, D]`.
    vectors: Vec<f32>,
    /// `[n, 2 D]`: scaled queries of all heads, then keys.
    projected: Vec<f32>,
    /// The transposed keys of one head, `[d, n]`.
    keys: Vec<f32>,
    /// `[BLOCK, n]`: scores, then exponentials, then gradients of scores.
    scores: Vec<f32>,
    /// The share of each element in each window's output, `[H, W, n]`.
    shares: Vec<f32>,
    /// The gradients of `projected`, `[n, 2 D]`.
    projected_gradients: Vec<f32>,
    /// The outputs or their gradients, `[H, W, D]`.
    outputs: Vec<f32>,
    windows: Windows,
}

impl Scratch {
    /// Looks up the chain's vectors and projects them to queries and keys.
    fn project(&mut self, sequence: &Sequence<'_>, chain: &Chain, weights: &QueryKey) {
        let (n, dim) = (chain.span(), weights.dim);
        let rows = &sequence.rows[chain.start..chain.end];
        let vectors = any(&mut self.vectors, n * dim);
        for (i, (vector, &row)) in vectors.chunks_exact_mut(dim).zip(rows).enumerate() {
            if let Some(&ahead) = rows.get(i + 8) {
                sequence.vector(ahead, dim).prefetch();
            }
            sequence.vector(row, dim).widen(vector);
        }
        let projected = any(&mut self.projected, 2 * n * dim);
        for row in projected.chunks_exact_mut(2 * dim) {
            row[..dim].copy_from_slice(&weights.bias);
            row[dim..].fill(0.0);
        }
        let size = (n, 2 * dim, dim);
        gemm(size, Strided::rows(vectors, dim), &weights.forward, 2 * dim, projected, 2 * dim, true);
    }
}

/// The layout of one head's values in the buffers.
struct Head {
    dim: usize,
    head_dim: usize,
    number: usize,
    /// The length n of the chain, and n rounded up to whole vectors.
    n: usize,
    padded: usize,
}

impl Head {
    fn new(weights: &QueryKey, number: usize, n: usize) -> Self {
        let padded = n.next_multiple_of(WIDE);
        let QueryKey { dim, heads, .. } = *weights;
        Self { dim, head_dim: dim / heads, number, n, padded }
    }

    /// Returns the head's queries from `row` on; the row stride is `2 dim`.
    fn queries<'a>(&self, projected: &'a [f32], row: usize) -> &'a [f32] {
        &projected[row * 2 * self.dim + self.number * self.head_dim..]
    }

    fn queries_mut<'a>(&self, projected: &'a mut [f32], row: usize) -> &'a mut [f32] {
        &mut projected[row * 2 * self.dim + self.number * self.head_dim..]
    }

    fn keys<'a>(&self, projected: &'a [f32]) -> &'a [f32] {
        &projected[self.dim + self.number * self.head_dim..]
    }

    fn keys_mut<'a>(&self, projected: &'a mut [f32]) -> &'a mut [f32] {
        &mut projected[self.dim + self.number * self.head_dim..]
    }

    fn transpose_keys(&self, projected: &[f32], keys: &mut Vec<f32>) {
        let keys = zeros(keys, self.head_dim * self.padded);
        transpose((self.n, self.head_dim), self.keys(projected), 2 * self.dim, keys, self.padded);
    }

    /// Computes the scores of queries `first..first + rows` with all keys.
    fn score(&self, (projected, keys): (&[f32], &[f32]), (first, rows): (usize, usize), scores: &mut [f32]) {
        let queries = Strided::rows(self.queries(projected, first), 2 * self.dim);
        let (padded, size) = (self.padded, (rows, self.padded, self.head_dim));
        gemm(size, queries, keys, padded, scores, padded, false);
    }
}

/// Returns the number of queries per block: blocks are nearly equal and have at most [`BLOCK`] queries.
fn block_rows(n: usize) -> usize {
    n.div_ceil(n.div_ceil(BLOCK).max(1)).next_multiple_of(ROWS)
}

/// Writes `[W, H, D]`: for each window and head, the mean over the queries of the attended vectors. Returns the
/// windows that must be computed separately; their outputs are not valid.
pub(super) fn forward(
    sequence: &Sequence<'_>,
    chain: &Chain,
    weights: &QueryKey,
    scratch: &mut Scratch,
    output: &mut [f32],
) -> Vec<u32> {
    let (n, windows, dim) = (chain.span(), chain.windows.len(), weights.dim);
    let padded = n.next_multiple_of(WIDE);
    scratch.windows.of(sequence, chain, padded);
    scratch.project(sequence, chain, weights);
    let shares = zeros(&mut scratch.shares, weights.heads * windows * padded);
    for (number, shares) in shares.chunks_exact_mut(windows * padded).enumerate() {
        let head = Head::new(weights, number, n);
        head.transpose_keys(&scratch.projected, &mut scratch.keys);
        let rows = block_rows(n);
        let scores = any(&mut scratch.scores, rows * padded);
        for first in (0..n).step_by(rows) {
            let rows = rows.min(n - first);
            let operands = (&scratch.projected[..], &scratch.keys[..]);
            head.score(operands, (first, rows), scores);
            scratch.windows.attend(&mut scores[..rows * padded], first, shares);
        }
        scratch.windows.clear_outside(shares);
    }
    let outputs = any(&mut scratch.outputs, weights.heads * windows * dim);
    let shares = Strided::rows(shares, padded);
    let (size, vectors) = ((weights.heads * windows, dim, n), &scratch.vectors);
    gemm(size, shares, vectors, dim, outputs, dim, false);
    for (i, output) in output.chunks_exact_mut(dim).enumerate() {
        let (window, head) = (i / weights.heads, i % weights.heads);
        output.copy_from_slice(&outputs[(head * windows + window) * dim..][..dim]);
    }
    scratch.windows.alone().map(|window| chain.windows[window]).collect()
}

/// Adds the gradients of one chain.
///
/// - `upstream`: the gradients of the outputs, `[W, H, D]`.
/// - `vectors`: the gradients of the chain's part of the timeline, `[n, D]`.
/// - `parameters`: the gradients of the query and key weights `[2 D, D]`, then of the query bias `[D]`, both
///   unscaled.
pub(super) fn backward(
    sequence: &Sequence<'_>,
    chain: &Chain,
    weights: &QueryKey,
    scratch: &mut Scratch,
    upstream: &[f32],
    vectors: &mut [f32],
    parameters: &mut [f32],
) {
    let (n, windows, dim) = (chain.span(), chain.windows.len(), weights.dim);
    let padded = n.next_multiple_of(WIDE);
    scratch.windows.of(sequence, chain, padded);
    scratch.project(sequence, chain, weights);
    // Reorders the upstream gradients by head, the order of the shares.
    let outputs = any(&mut scratch.outputs, weights.heads * windows * dim);
    for (i, upstream) in upstream.chunks_exact(dim).enumerate() {
        let (window, head) = (i / weights.heads, i % weights.heads);
        outputs[(head * windows + window) * dim..][..dim].copy_from_slice(upstream);
    }
    scratch.windows.take_upstream(outputs, &scratch.vectors[..n * dim], dim);
    zeros(&mut scratch.shares, weights.heads * windows * padded);
    any(&mut scratch.projected_gradients, 2 * n * dim);
    for number in 0..weights.heads {
        backward_head(&Head::new(weights, number, n), windows, scratch);
    }
    let gradients = &scratch.projected_gradients[..2 * n * dim];
    let add = |size: (usize, usize, usize), a: Strided<'_>, b: &[f32], sums: &mut [f32]| {
        gemm(size, a, b, dim, sums, dim, true);
    };
    add((n, dim, 2 * dim), Strided::rows(gradients, 2 * dim), &weights.backward, vectors);
    let shares = Strided::transposed(&scratch.shares, padded);
    add((n, dim, weights.heads * windows), shares, &scratch.outputs, vectors);
    let (matrix, bias) = parameters.split_at_mut(2 * dim * dim);
    add((2 * dim, dim, n), Strided::transposed(gradients, 2 * dim), &scratch.vectors, matrix);
    for row in gradients.chunks_exact(2 * dim) {
        bias.iter_mut().zip(row).for_each(|(bias, gradient)| *bias += gradient);
    }
}

fn backward_head(head: &Head, windows: usize, scratch: &mut Scratch) {
    let Head { dim, head_dim, number, n, padded } = *head;
    let Scratch { projected, keys, scores, shares, projected_gradients: gradients, windows: own, .. } =
        scratch;
    head.transpose_keys(projected, keys);
    let shares = &mut shares[number * windows * padded..(number + 1) * windows * padded];
    own.take_head(number);
    let rows = block_rows(n);
    let scores = any(scores, rows * padded);
    for first in (0..n).step_by(rows) {
        let rows = rows.min(n - first);
        head.score((projected, keys), (first, rows), scores);
        let scores = &mut scores[..rows * padded];
        own.score_gradients(scores, first, shares);
        let multiply = |size, scores: Strided<'_>, b: &[f32], gradients: &mut [f32], adds| {
            gemm(size, scores, b, 2 * dim, gradients, 2 * dim, adds);
        };
        let to_queries = head.queries_mut(gradients, first);
        let by_rows = Strided::rows(scores, padded);
        multiply((rows, head_dim, n), by_rows, head.keys(projected), to_queries, false);
        let (queries, transposed) = (head.queries(projected, first), Strided::transposed(scores, padded));
        multiply((n, head_dim, rows), transposed, queries, head.keys_mut(gradients), first > 0);
    }
    own.clear_outside(shares);
}
