//! Self-attention over jagged sequences, followed by the mean over queries. Each distinct pair of elements is
//! computed once.
//!
//! A window w of L elements with vectors x_i has queries `q_i = W_q x_i + b_q` and keys `k_i = W_k x_i`. The output
//! of the block depends only on
//!
//! ```text
//! y(w) = 1/L Σ_i Σ_j P_ij x_j,   P_ij = e_ij / Z_i,   e_ij = exp(q_i·k_j / √d),   Z_i = Σ_j e_ij   (i, j in w)
//! ```
//!
//! per head, because all later operations are linear: the mean over queries, the value projection (applied to `y`,
//! once per window instead of once per element) and the output projection. (A bias of the keys adds the same value
//! to all scores of a query and cancels in the softmax.) With the sums swapped, `y(w) = Σ_j p_j x_j` with the
//! shares `p_j = 1/L Σ_i e_ij / Z_i`, so the product of P with the values is a matrix-vector product.
//!
//! Windows that slide over one timeline share elements. Projections, scores and exponentials do not depend on the
//! window. They are computed once per **chain** of overlapping windows, with one maximum per query; each window sums
//! its part of a row. In the backward pass, the gradients of all windows of a chain are combined in
//! `dS_ij = e_ij Σ_w (g_j(w) - c_i(w)) / (L Z_i(w))` with `g_j = x_j·dy` and `c_i = Σ_j P_ij g_j`. Then `dQ = dS K`
//! and `dK = dSᵀ Q` are computed once per chain.
//!
//! If all scores of a window lie far below the chain's maximum, its exponentials lose precision. Such a window is
//! detected by its tiny sum and computed separately. No memory of size windows × length is kept between forward and
//! backward: the backward pass looks up a chain's vectors and computes its scores again, in buffers that stay in
//! the cache.

mod chain;
mod plan;
#[cfg(test)]
mod tests;
mod windows;

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use self::chain::Scratch;
use self::plan::{Chain, Component};
use super::element::Elements;
use super::fresh::Fresh;

/// The number of pieces that the work of a batch is cut into. It is fixed, so that the order of sums is fixed.
const PIECES: usize = 64;

/// The query and key projections of a self-attention block, in the layout of the kernels.
#[derive(Debug, Clone)]
pub struct QueryKey {
    dim: usize,
    heads: usize,
    /// Transposed weights, `[D, 2 D]`; the query weights are scaled so that scores are exponents of base 2.
    forward: Vec<f32>,
    /// Weights, `[2 D, D]`, scaled to compute the gradients of vectors from the gradients of scaled queries and of
    /// keys.
    backward: Vec<f32>,
    /// The scaled query bias, `[D]`.
    bias: Vec<f32>,
}

impl QueryKey {
    /// Creates projections from the query and key weights `[2 D, D]` (rows are outputs, by head) and the query bias
    /// `[D]`.
    ///
    /// # Panics
    ///
    /// If the sizes do not match, or `dim` is not a multiple of `heads`.
    pub fn new(weights: &[f32], bias: &[f32], heads: usize) -> Self {
        let dim = bias.len();
        assert!(weights.len() == 2 * dim * dim && heads > 0 && dim.is_multiple_of(heads), "sizes do not fit");
        let (to_queries, to_keys) = gradient_scales(dim, heads);
        let scale = std::f32::consts::LOG2_E * to_queries;
        let mut forward = vec![0.0; 2 * dim * dim];
        let mut backward = vec![0.0; 2 * dim * dim];
        for (row, weights) in weights.chunks_exact(dim).enumerate() {
            let (there, back) = if row < dim { (scale, to_queries) } else { (1.0, to_keys) };
            for (column, weight) in weights.iter().enumerate() {
                forward[column * 2 * dim + row] = there * weight;
                backward[row * dim + column] = back * weight;
            }
        }
        let bias = bias.iter().map(|bias| scale * bias).collect();
        Self { dim, heads, forward, backward, bias }
    }
}

/// Returns the factors that convert gradients of natural scores to gradients of queries and of keys.
fn gradient_scales(dim: usize, heads: usize) -> (f32, f32) {
    (1.0 / ((dim / heads) as f32).sqrt(), std::f32::consts::LN_2)
}

/// A sequence feature of a batch: windows over a timeline of table rows.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    /// The table's weights, `[rows, D]`.
    pub table: Elements<'a>,
    /// The table row of every element of the timeline, `[T]`.
    pub rows: &'a [u32],
    /// The position of each window's first element in the timeline, `[U]`.
    pub offsets: &'a [i32],
    /// The number of elements of each window, `[U]`.
    pub sizes: &'a [i32],
}

impl Sequence<'_> {
    fn vector(&self, row: u32, dim: usize) -> Elements<'_> {
        self.table.slice(row as usize * dim, dim)
    }
}

/// A piece of work: components of one sequence.
#[derive(Debug)]
struct Piece {
    sequence: usize,
    components: Vec<Component>,
}

impl Piece {
    fn chains(&self) -> impl Iterator<Item = &Chain> {
        self.components.iter().flatten()
    }

    /// Returns the range of the timeline that the piece covers.
    fn range(&self) -> std::ops::Range<usize> {
        let end = self.chains().map(|chain| chain.end).max().unwrap_or(0);
        self.chains().next().map_or(0, |chain| chain.start)..end
    }
}

/// The decomposition of a batch's windows into chains, which [`forward`] returns and [`backward`] needs.
#[derive(Debug)]
pub struct Plan {
    pieces: Vec<Piece>,
}

/// The gradients of the inputs of [`forward`].
#[derive(Debug)]
pub struct Gradients {
    /// The gradients of all elements of every sequence's timeline, `[T, D]` per sequence.
    pub vectors: Vec<Vec<f32>>,
    /// The gradient of the query and key weights, `[2 D, D]`.
    pub weights: Vec<f32>,
    /// The gradient of the query bias, `[D]`.
    pub bias: Vec<f32>,
}

/// Computes `y`, `[U, H, D]` for each sequence, of every window; zeros for an empty window. Without `share`, every
/// window is computed separately, also if it overlaps others.
///
/// # Panics
///
/// If a window ends after its timeline, or a row is outside the table.
pub fn forward(weights: &QueryKey, sequences: &[Sequence<'_>], share: bool) -> (Vec<Vec<f32>>, Plan) {
    let mut pieces = cut(sequences, share);
    let scratches = Scratches::default();
    let work = pieces.par_iter_mut().with_max_len(1).map(|piece| {
        scratches.lend(|scratch| forward_piece(weights, &sequences[piece.sequence], piece, scratch))
    });
    let outputs: Vec<(Vec<u32>, Vec<f32>)> = work.collect();
    let size = weights.heads * weights.dim;
    let mut all: Vec<Vec<f32>> =
        sequences.iter().map(|sequence| vec![0.0; sequence.sizes.len() * size]).collect();
    for (piece, (windows, outputs)) in pieces.iter().zip(outputs) {
        for (window, output) in windows.iter().zip(outputs.chunks_exact(size)) {
            all[piece.sequence][*window as usize * size..][..size].copy_from_slice(output);
        }
    }
    (all, Plan { pieces })
}

/// Buffers that pieces reuse, so that there are at most as many as threads.
#[derive(Default)]
struct Scratches(Mutex<Vec<Scratch>>);

impl Scratches {
    fn lend<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let free = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = free().pop().unwrap_or_default();
        let result = work(&mut scratch);
        free().push(scratch);
        result
    }
}

/// Returns the windows of a piece and their outputs. If a window is listed twice, the second output is valid.
/// Windows that must be computed separately are moved from their chains to new chains.
fn forward_piece(
    weights: &QueryKey,
    sequence: &Sequence<'_>,
    piece: &mut Piece,
    scratch: &mut Scratch,
) -> (Vec<u32>, Vec<f32>) {
    let size = weights.heads * weights.dim;
    let (mut windows, mut outputs) = (Vec::new(), Vec::new());
    let mut run = |chain: &Chain| {
        let start = outputs.len();
        outputs.resize(start + chain.windows.len() * size, 0.0);
        windows.extend_from_slice(&chain.windows);
        chain::forward(sequence, chain, weights, scratch, &mut outputs[start..])
    };
    for component in &mut piece.components {
        let mut separated = Vec::new();
        for chain in component.iter_mut() {
            for window in run(chain) {
                let (start, size) = (sequence.offsets[window as usize], sequence.sizes[window as usize]);
                let own = Chain::of(window, start as usize, size as usize);
                run(&own);
                separated.push(own);
                chain.windows.retain(|other| *other != window);
            }
        }
        component.append(&mut separated);
    }
    (windows, outputs)
}

/// Returns the gradients of [`forward`] with the same weights and sequences, given the gradients of its outputs,
/// `[U, H, D]` for each sequence.
///
/// # Panics
///
/// If an upstream gradient is smaller than the output.
pub fn backward(
    weights: &QueryKey,
    sequences: &[Sequence<'_>],
    plan: &Plan,
    upstream: &[&[f32]],
) -> Gradients {
    let dim = weights.dim;
    let mut vectors: Vec<Fresh> =
        sequences.iter().map(|sequence| Fresh::new(sequence.rows.len() * dim)).collect();
    let mut tasks = Vec::with_capacity(plan.pieces.len());
    for (number, vectors) in vectors.iter_mut().enumerate() {
        let (mut rest, mut before) = (vectors.whole(), 0);
        for piece in plan.pieces.iter().filter(|piece| piece.sequence == number) {
            let range = piece.range();
            let (between, tail) = rest.split_at((range.start - before) * dim);
            between.zeroed();
            let (own, tail) = tail.split_at(range.len() * dim);
            (rest, before) = (tail, range.end);
            tasks.push((piece, range.start, own));
        }
        rest.zeroed();
    }
    let scratches = Scratches::default();
    let work = tasks.into_par_iter().with_max_len(1).map(|(piece, start, vectors)| {
        let (sequence, upstream) = (&sequences[piece.sequence], upstream[piece.sequence]);
        scratches.lend(|scratch| {
            backward_piece(weights, sequence, piece, scratch, upstream, start, vectors.zeroed())
        })
    });
    let parameters: Vec<Vec<f32>> = work.collect();
    let vectors = vectors.into_iter().map(Fresh::into_vec).collect();
    let mut total = vec![0.0; 2 * dim * dim + dim];
    for part in parameters {
        total.iter_mut().zip(part).for_each(|(total, part)| *total += part);
    }
    let (to_queries, to_keys) = gradient_scales(dim, weights.heads);
    let (queries, rest) = total.split_at_mut(dim * dim);
    let (keys, bias) = rest.split_at_mut(dim * dim);
    queries.iter_mut().chain(&mut *bias).for_each(|value| *value *= to_queries);
    keys.iter_mut().for_each(|value| *value *= to_keys);
    let bias = bias.to_vec();
    total.truncate(2 * dim * dim);
    Gradients { vectors, weights: total, bias }
}

/// Adds to the gradients of the vectors from element `start` on, and returns the unscaled gradients of the
/// parameters.
fn backward_piece(
    weights: &QueryKey,
    sequence: &Sequence<'_>,
    piece: &Piece,
    scratch: &mut Scratch,
    upstream: &[f32],
    start: usize,
    vectors: &mut [f32],
) -> Vec<f32> {
    let (dim, size) = (weights.dim, weights.heads * weights.dim);
    let mut parameters = vec![0.0; 2 * dim * dim + dim];
    let mut gathered = Vec::new();
    for chain in piece.chains().filter(|chain| !chain.windows.is_empty()) {
        gathered.clear();
        for window in &chain.windows {
            gathered.extend_from_slice(&upstream[*window as usize * size..][..size]);
        }
        let vectors = &mut vectors[(chain.start - start) * dim..][..chain.span() * dim];
        chain::backward(sequence, chain, weights, scratch, &gathered, vectors, &mut parameters);
    }
    parameters
}

/// Cuts the components of all sequences into about [`PIECES`] pieces of similar cost, in order.
fn cut(sequences: &[Sequence<'_>], share: bool) -> Vec<Piece> {
    let components: Vec<Vec<Component>> = sequences
        .par_iter()
        .map(|sequence| plan::components(sequence.offsets, sequence.sizes, share))
        .collect();
    let cost = |component: &Component| component.iter().map(Chain::cost).sum::<usize>();
    let total: usize = components.iter().flatten().map(cost).sum();
    let mut pieces = Vec::new();
    for (sequence, components) in components.into_iter().enumerate() {
        let mut room = 0;
        for component in components {
            if room == 0 {
                pieces.push(Piece { sequence, components: Vec::new() });
                room = (total / PIECES).max(1);
            }
            room = room.saturating_sub(cost(&component));
            if let Some(piece) = pieces.last_mut() {
                piece.components.push(component);
            }
        }
    }
    pieces
}
