//! One chain: scores of all its pairs once, then every window from them.

use super::plan::Chain;
use super::windows::{Windows, any, zeros};
use super::{QueryKey, Sequence};
use crate::kernels::gemm::{ROWS, Strided, gemm, transpose};
use crate::kernels::simd::WIDE;

/// Queries whose scores are held at a time.
const BLOCK: usize = 48;

/// Buffers of one chain after the other; n is the chain's length, W its windows.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// `[n, D]`.
    vectors: Vec<f32>,
    /// `[n, 2 D]`: scaled queries of all heads, then keys.
    projected: Vec<f32>,
    /// `[d, n]` of one head.
    keys: Vec<f32>,
    /// `[BLOCK, n]`: scores, then exponentials, then gradients of scores.
    scores: Vec<f32>,
    /// `[H, W, n]`: what each window gives each element.
    shares: Vec<f32>,
    /// `[n, 2 D]`.
    projected_gradients: Vec<f32>,
    /// `[H, W, D]`.
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
        gemm(
            (n, 2 * dim, dim),
            Strided::rows(vectors, dim),
            &weights.forward,
            2 * dim,
            projected,
            2 * dim,
            true,
        );
    }
}

/// Where one head's numbers stand.
struct Head {
    dim: usize,
    head_dim: usize,
    number: usize,
    /// n, and n rounded up so that rows are whole vectors.
    n: usize,
    padded: usize,
}

impl Head {
    fn new(weights: &QueryKey, number: usize, n: usize) -> Self {
        let padded = n.next_multiple_of(WIDE);
        Self { dim: weights.dim, head_dim: weights.dim / weights.heads, number, n, padded }
    }

    /// The queries from `row` on, rows `2 dim` apart.
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

    /// The scores of queries `first..first + rows` with all keys.
    fn score(&self, projected: &[f32], keys: &[f32], first: usize, rows: usize, scores: &mut [f32]) {
        let queries = Strided::rows(self.queries(projected, first), 2 * self.dim);
        gemm((rows, self.padded, self.head_dim), queries, keys, self.padded, scores, self.padded, false);
    }
}

/// Queries per block: nearly equal blocks of at most [`BLOCK`].
fn block_rows(n: usize) -> usize {
    n.div_ceil(n.div_ceil(BLOCK).max(1)).next_multiple_of(ROWS)
}

/// Writes `[W, H, D]`, the mean over each window's queries of the elements that they attend to, and returns the windows
/// that must be computed by themselves, whose outputs are not valid.
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
            head.score(&scratch.projected, &scratch.keys, first, rows, scores);
            scratch.windows.attend(&mut scores[..rows * padded], first, shares);
        }
        scratch.windows.clear_outside(shares);
    }
    let outputs = any(&mut scratch.outputs, weights.heads * windows * dim);
    let shares = Strided::rows(shares, padded);
    gemm((weights.heads * windows, dim, n), shares, &scratch.vectors, dim, outputs, dim, false);
    for (i, output) in output.chunks_exact_mut(dim).enumerate() {
        let (window, head) = (i / weights.heads, i % weights.heads);
        output.copy_from_slice(&outputs[(head * windows + window) * dim..][..dim]);
    }
    scratch.windows.alone().map(|window| chain.windows[window]).collect()
}

/// Adds the gradients that one chain gives.
///
/// - `upstream`: of the outputs, `[W, H, D]`.
/// - `vectors`: of the chain's part of the timeline, `[n, D]`.
/// - `parameters`: of the query and key weights `[2 D, D]`, then of the query bias `[D]`, both unscaled.
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
    // By head first, as the shares are.
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
    gemm((n, dim, 2 * dim), Strided::rows(gradients, 2 * dim), &weights.backward, dim, vectors, dim, true);
    let shares = Strided::transposed(&scratch.shares, padded);
    gemm((n, dim, weights.heads * windows), shares, &scratch.outputs, dim, vectors, dim, true);
    let (matrix, bias) = parameters.split_at_mut(2 * dim * dim);
    let transposed = Strided::transposed(gradients, 2 * dim);
    gemm((2 * dim, dim, n), transposed, &scratch.vectors, dim, matrix, dim, true);
    for row in gradients.chunks_exact(2 * dim) {
        bias.iter_mut().zip(row).for_each(|(bias, gradient)| *bias += gradient);
    }
}

fn backward_head(head: &Head, windows: usize, scratch: &mut Scratch) {
    let Head { dim, head_dim, number, n, padded } = *head;
    head.transpose_keys(&scratch.projected, &mut scratch.keys);
    let shares = &mut scratch.shares[number * windows * padded..(number + 1) * windows * padded];
    scratch.windows.take_head(number);
    let gradients = &mut scratch.projected_gradients;
    let rows = block_rows(n);
    let scores = any(&mut scratch.scores, rows * padded);
    for first in (0..n).step_by(rows) {
        let rows = rows.min(n - first);
        head.score(&scratch.projected, &scratch.keys, first, rows, scores);
        let scores = &mut scores[..rows * padded];
        scratch.windows.score_gradients(scores, first, shares);
        let keys = head.keys(&scratch.projected);
        let queries = head.queries(&scratch.projected, first);
        let to_queries = head.queries_mut(gradients, first);
        gemm((rows, head_dim, n), Strided::rows(scores, padded), keys, 2 * dim, to_queries, 2 * dim, false);
        let (to_keys, later) = (head.keys_mut(gradients), first > 0);
        gemm(
            (n, head_dim, rows),
            Strided::transposed(scores, padded),
            queries,
            2 * dim,
            to_keys,
            2 * dim,
            later,
        );
    }
    scratch.windows.clear_outside(shares);
}
