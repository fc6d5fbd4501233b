//! What the windows of a chain make of the scores of a block of queries.
//!
//! Of a query's exponentials, every window that has the query needs the sum over its own elements and, going back, the sum of
//! their products with the gradients of its shares. A few windows take their slices one after the other. Many take all
//! together, as products of matrices: with M and G, which have for every window a column of its members (zeros and ones) and of
//! its gradients, the sums of a block of exponentials E are `E M` and `E G`, the shares `Fᵀ E`, and the factors of the scores'
//! gradients `F Gᵀ - (F ∘ c) Mᵀ`, where F has `1 / (L Z_i(w))` for the windows of a query, and zeros for the others.

use super::Sequence;
use super::plan::Chain;
use crate::kernels::gemm::{Strided, gemm, transpose};
use crate::kernels::simd::{Lanes, WIDTH, axpy, dispatched, dot, sum};

/// A window whose exponentials sum to less, against the largest score of its chain, is computed by itself: above, what
/// rounds to zero is below a float's precision.
const SMALLEST_SUM: f32 = 1e-20;

/// Windows from which on products of matrices are faster than slices.
const MANY: usize = 4;

/// Where a window stands within its chain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Span {
    fn contains(self, query: usize) -> bool {
        (self.start..self.end).contains(&query)
    }

    fn len(self) -> usize {
        self.end - self.start
    }
}

/// The windows of one chain after the other, in buffers that grow; W are the windows, `stride` is that of scores.
#[derive(Debug, Default)]
pub(super) struct Windows {
    pub(super) spans: Vec<Span>,
    /// Whether each must be computed by itself.
    pub(super) alone: Vec<bool>,
    stride: usize,
    /// C, W rounded up to whole vectors; 0 if slices are taken one by one.
    columns: usize,
    /// `[2 C, stride]`: Mᵀ and Gᵀ.
    by_window: Vec<f32>,
    /// `[stride, 2 C]`: M beside G.
    by_element: Vec<f32>,
    /// `[queries, 2 C]`: the sums, then what `by_window` is multiplied by.
    sums: Vec<f32>,
    /// `[queries, stride]`.
    factors: Vec<f32>,
}

/// Zeros, in a buffer that grows and never shrinks.
pub(super) fn zeros(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.clear();
    buffer.resize(len, 0.0);
    buffer
}

/// Any values, in a buffer that grows and never shrinks.
pub(super) fn any(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Windows {
    /// Begins with a chain.
    pub(super) fn of(&mut self, sequence: &Sequence<'_>, chain: &Chain, stride: usize) {
        let span = |&window: &u32| {
            let start = sequence.offsets[window as usize] as usize - chain.start;
            Span { start, end: start + sequence.sizes[window as usize] as usize }
        };
        self.spans.clear();
        self.spans.extend(chain.windows.iter().map(span));
        self.alone.clear();
        self.alone.resize(self.spans.len(), false);
        self.stride = stride;
        self.columns = if self.spans.len() < MANY { 0 } else { self.spans.len().next_multiple_of(WIDTH) };
        if self.columns > 0 {
            let by_window = zeros(&mut self.by_window, 2 * self.columns * stride);
            for (members, span) in by_window.chunks_exact_mut(stride).zip(&self.spans) {
                members[span.start..span.end].fill(1.0);
            }
            let by_element = zeros(&mut self.by_element, stride * 2 * self.columns);
            transpose((self.spans.len(), stride), by_window, stride, by_element, 2 * self.columns);
        }
    }

    /// Takes the gradients `[W, stride]` of one head's shares for [`score_gradients`](Self::score_gradients); what
    /// stands outside of windows is not looked at.
    pub(super) fn take_gradients(&mut self, gradients: &[f32]) {
        if self.columns == 0 {
            return;
        }
        let own = &mut self.by_window[self.columns * self.stride..];
        let rows = own.chunks_exact_mut(self.stride).zip(gradients.chunks_exact(self.stride));
        for ((own, gradients), span) in rows.zip(&self.spans) {
            own[span.start..span.end].copy_from_slice(&gradients[span.start..span.end]);
        }
        let by_element = &mut self.by_element[self.columns..];
        transpose((self.spans.len(), self.stride), own, self.stride, by_element, 2 * self.columns);
    }

    /// From scores of queries from `first` on to their exponentials, and to what windows give elements: adds
    /// `e_ij / (L Z_i)` to `shares[w][j]` for every query i and element j of window w. Shares outside of windows are any values
    /// until [`clear_outside`](Self::clear_outside).
    pub(super) fn attend(&mut self, scores: &mut [f32], first: usize, shares: &mut [f32]) {
        let Self { spans, alone, stride, columns, .. } = self;
        let (stride, columns) = (*stride, *columns);
        if columns == 0 {
            attend_one_by_one(scores, stride, first, spans, shares, alone);
            return;
        }
        exponentials_of_rows(scores, stride, first, spans);
        let rows = scores.len() / stride;
        let sums = any(&mut self.sums, rows * 2 * columns);
        let exponentials = Strided::rows(scores, stride);
        gemm((rows, columns, stride), exponentials, &self.by_element, 2 * columns, sums, 2 * columns, false);
        for (i, sums) in sums.chunks_exact_mut(2 * columns).enumerate() {
            for ((total, span), alone) in sums.iter_mut().zip(&*spans).zip(&mut *alone) {
                let contains = span.contains(first + i);
                *alone |= contains && *total < SMALLEST_SUM;
                *total = if contains { 1.0 / (span.len() as f32 * *total) } else { 0.0 };
            }
        }
        gemm(
            (spans.len(), stride, rows),
            Strided::transposed(sums, 2 * columns),
            scores,
            stride,
            shares,
            stride,
            true,
        );
    }

    /// From scores of queries from `first` on to their gradients, `e_ij Σ_w (g_j(w) - c_i(w)) / (L Z_i(w))` with
    /// `c_i(w) = Σ_j e_ij g_j(w) / Z_i(w)`, and the shares as [`attend`](Self::attend) gives them.
    pub(super) fn score_gradients(
        &mut self,
        scores: &mut [f32],
        first: usize,
        shares: &mut [f32],
        share_gradients: &[f32],
    ) {
        let Self { spans, stride, columns, .. } = self;
        let (stride, columns) = (*stride, *columns);
        if columns == 0 {
            let factors = any(&mut self.factors, stride);
            gradients_one_by_one(scores, stride, first, spans, shares, share_gradients, factors);
            return;
        }
        exponentials_of_rows(scores, stride, first, spans);
        let rows = scores.len() / stride;
        let sums = any(&mut self.sums, rows * 2 * columns);
        let exponentials = Strided::rows(scores, stride);
        gemm(
            (rows, 2 * columns, stride),
            exponentials,
            &self.by_element,
            2 * columns,
            sums,
            2 * columns,
            false,
        );
        for (i, sums) in sums.chunks_exact_mut(2 * columns).enumerate() {
            let (totals, products) = sums.split_at_mut(columns);
            for ((total, product), span) in totals.iter_mut().zip(products).zip(&*spans) {
                let contains = span.contains(first + i);
                let factor = if contains { 1.0 / (span.len() as f32 * *total) } else { 0.0 };
                let mean = if contains { *product / *total } else { 0.0 };
                (*total, *product) = (-factor * mean, factor);
            }
        }
        gemm(
            (spans.len(), stride, rows),
            Strided::transposed(&sums[columns..], 2 * columns),
            scores,
            stride,
            shares,
            stride,
            true,
        );
        let factors = any(&mut self.factors, rows * stride);
        let sums = Strided::rows(sums, 2 * columns);
        gemm((rows, stride, 2 * columns), sums, &self.by_window, stride, factors, stride, false);
        multiply_all(scores, factors);
    }

    /// Sets the shares `[W, stride]` outside of windows to zero.
    pub(super) fn clear_outside(&self, shares: &mut [f32]) {
        if self.columns > 0 {
            for (shares, span) in shares.chunks_exact_mut(self.stride).zip(&self.spans) {
                shares[..span.start].fill(0.0);
                shares[span.end..].fill(0.0);
            }
        }
    }
}

dispatched! {
    /// From scores of queries from `first` on to their exponentials; zeros for elements that a query meets in no window.
    fn exponentials_of_rows(scores: &mut [f32], stride: usize, first: usize, spans: &[Span]) = wide exponentials_of_rows_with
}

#[inline(always)]
fn exponentials_of_rows_with<L: Lanes<N>, const N: usize>(
    scores: &mut [f32],
    stride: usize,
    first: usize,
    spans: &[Span],
) {
    for (i, row) in scores.chunks_exact_mut(stride).enumerate() {
        let hull = hull(spans, first + i).unwrap_or(Span { start: 0, end: 0 });
        row[..hull.start].fill(0.0);
        row[hull.end..].fill(0.0);
        exponentials::<L, N>(&mut row[hull.start..hull.end]);
    }
}

dispatched! {
    /// [`Windows::attend`], window by window.
    fn attend_one_by_one(
        scores: &mut [f32], stride: usize, first: usize, spans: &[Span], shares: &mut [f32], alone: &mut [bool],
    ) = wide attend_one_by_one_with
}

#[inline(always)]
fn attend_one_by_one_with<L: Lanes<N>, const N: usize>(
    scores: &mut [f32],
    stride: usize,
    first: usize,
    spans: &[Span],
    shares: &mut [f32],
    alone: &mut [bool],
) {
    for (i, row) in scores.chunks_exact_mut(stride).enumerate() {
        let query = first + i;
        let Some(hull) = hull(spans, query) else { continue };
        exponentials::<L, N>(&mut row[hull.start..hull.end]);
        for (window, span) in spans.iter().enumerate().filter(|(_, span)| span.contains(query)) {
            let exponentials = &row[span.start..span.end];
            let total = sum::<L, N>(exponentials);
            if total < SMALLEST_SUM {
                alone[window] = true;
                continue;
            }
            let factor = 1.0 / (exponentials.len() as f32 * total);
            axpy::<L, N>(&mut shares[window * stride..][span.start..span.end], factor, exponentials);
        }
    }
}

/// From the first to the last key that `query` meets in any window.
#[inline(always)]
fn hull(spans: &[Span], query: usize) -> Option<Span> {
    let mut meets = spans.iter().filter(|span| span.contains(query));
    let first = *meets.next()?;
    Some(
        meets.fold(first, |hull, span| Span {
            start: hull.start.min(span.start),
            end: hull.end.max(span.end),
        }),
    )
}

/// `2^(s - max s)`.
#[inline(always)]
fn exponentials<L: Lanes<N>, const N: usize>(scores: &mut [f32]) {
    let (chunks, rest) = scores.as_chunks_mut::<N>();
    let largest =
        chunks.iter().fold(L::splat(f32::NEG_INFINITY), |largest, chunk| largest.max(L::load(chunk)));
    let largest = rest.iter().copied().fold(largest.largest(), f32::max);
    let shift = L::splat(largest);
    for chunk in chunks {
        L::load(chunk).sub(shift).exp2().store(chunk);
    }
    if !rest.is_empty() {
        let mut padded = [f32::NEG_INFINITY; N];
        padded[..rest.len()].copy_from_slice(rest);
        let powers = L::load(&padded).sub(shift).exp2().to_array();
        rest.copy_from_slice(&powers[..rest.len()]);
    }
}

dispatched! {
    /// [`Windows::score_gradients`], window by window.
    fn gradients_one_by_one(
        scores: &mut [f32], stride: usize, first: usize, spans: &[Span], shares: &mut [f32],
        share_gradients: &[f32], factors: &mut [f32],
    ) = wide gradients_one_by_one_with
}

#[inline(always)]
fn gradients_one_by_one_with<L: Lanes<N>, const N: usize>(
    scores: &mut [f32],
    stride: usize,
    first: usize,
    spans: &[Span],
    shares: &mut [f32],
    share_gradients: &[f32],
    factors: &mut [f32],
) {
    for (i, row) in scores.chunks_exact_mut(stride).enumerate() {
        let query = first + i;
        let Some(hull) = hull(spans, query) else {
            row.fill(0.0);
            continue;
        };
        row[..hull.start].fill(0.0);
        row[hull.end..].fill(0.0);
        exponentials::<L, N>(&mut row[hull.start..hull.end]);
        factors[hull.start..hull.end].fill(0.0);
        for (window, span) in spans.iter().enumerate().filter(|(_, span)| span.contains(query)) {
            let exponentials = &row[span.start..span.end];
            let gradients = &share_gradients[window * stride..][span.start..span.end];
            let total = sum::<L, N>(exponentials);
            let mean = dot::<L, N>(exponentials, gradients) / total;
            let factor = 1.0 / (exponentials.len() as f32 * total);
            axpy::<L, N>(&mut shares[window * stride..][span.start..span.end], factor, exponentials);
            add_centred::<L, N>(&mut factors[span.start..span.end], factor, gradients, mean);
        }
        multiply::<L, N>(&mut row[hull.start..hull.end], &factors[hull.start..hull.end]);
    }
}

/// `y[i] += a (x[i] - centre)`.
#[inline(always)]
fn add_centred<L: Lanes<N>, const N: usize>(y: &mut [f32], a: f32, x: &[f32], centre: f32) {
    let ((y, y_rest), (x, x_rest)) = (y.as_chunks_mut::<N>(), x.as_chunks::<N>());
    let (factor, shift) = (L::splat(a), L::splat(centre));
    for (y, x) in y.iter_mut().zip(x) {
        L::load(y).fma(factor, L::load(x).sub(shift)).store(y);
    }
    y_rest.iter_mut().zip(x_rest).for_each(|(y, x)| *y += a * (x - centre));
}

dispatched! {
    fn multiply_all(y: &mut [f32], x: &[f32]) = wide multiply
}

/// `y[i] *= x[i]`.
#[inline(always)]
fn multiply<L: Lanes<N>, const N: usize>(y: &mut [f32], x: &[f32]) {
    let ((y, y_rest), (x, x_rest)) = (y.as_chunks_mut::<N>(), x.as_chunks::<N>());
    y.iter_mut().zip(x).for_each(|(y, x)| L::load(y).mul(L::load(x)).store(y));
    y_rest.iter_mut().zip(x_rest).for_each(|(y, x)| *y *= x);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::simd::each_copy;

    /// A block of scores of a chain, its windows, and the gradients of their shares.
    #[derive(Debug, Clone)]
    struct Block {
        spans: Vec<Span>,
        first: usize,
        stride: usize,
        scores: Vec<f32>,
        gradients: Vec<f32>,
    }

    fn blocks() -> impl Strategy<Value = Block> {
        let spans = prop::collection::vec((0_usize..40, 1_usize..30), MANY..20);
        (spans, 0_usize..30, 1_usize..30).prop_flat_map(|(spans, first, queries)| {
            let spans: Vec<Span> =
                spans.into_iter().map(|(start, len)| Span { start, end: start + len }).collect();
            let stride = 80;
            let scores = prop::collection::vec(-8.0_f32..8.0, queries * stride);
            let gradients = prop::collection::vec(-2.0_f32..2.0, spans.len() * stride);
            (scores, gradients).prop_map(move |(scores, gradients)| Block {
                spans: spans.clone(),
                first,
                stride,
                scores,
                gradients,
            })
        })
    }

    impl Block {
        fn windows(&self) -> Windows {
            let offsets: Vec<i32> = self.spans.iter().map(|span| span.start as i32).collect();
            let sizes: Vec<i32> = self.spans.iter().map(|span| span.len() as i32).collect();
            let sequence =
                Sequence { table: (&[0.0][..]).into(), rows: &[], offsets: &offsets, sizes: &sizes };
            let chain = Chain { windows: (0..self.spans.len() as u32).collect(), start: 0, end: self.stride };
            let mut windows = Windows::default();
            windows.of(&sequence, &chain, self.stride);
            windows.take_gradients(&self.gradients);
            windows
        }

        fn zeros(&self) -> Vec<f32> {
            vec![0.0; self.spans.len() * self.stride]
        }
    }

    /// Shares, and what became of the scores, slice by slice.
    fn by_slices<L: Lanes<N>, const N: usize>(
        block: &Block,
        found: &mut Vec<(Vec<f32>, Vec<f32>, Vec<f32>)>,
    ) {
        let Block { spans, first, stride, gradients, .. } = block;
        let (mut scores, mut shares) = (block.scores.clone(), block.zeros());
        let mut alone = vec![false; spans.len()];
        attend_one_by_one_with::<L, N>(&mut scores, *stride, *first, spans, &mut shares, &mut alone);
        assert!(alone.iter().all(|alone| !alone));
        let (mut scores, mut again) = (block.scores.clone(), block.zeros());
        let mut factors = vec![0.0; *stride];
        gradients_one_by_one_with::<L, N>(
            &mut scores,
            *stride,
            *first,
            spans,
            &mut again,
            gradients,
            &mut factors,
        );
        found.push((shares, again, scores));
    }

    fn close(found: &[f32], expected: &[f32]) -> bool {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5 * (1.0 + b.abs());
        found.len() == expected.len() && found.iter().zip(expected).all(near)
    }

    proptest! {
        #[test]
        fn matrices_give_what_slices_give(block in blocks()) {
            let mut windows = block.windows();
            prop_assert!(windows.columns > 0);
            let (mut scores, mut shares) = (block.scores.clone(), block.zeros());
            windows.attend(&mut scores, block.first, &mut shares);
            windows.clear_outside(&mut shares);
            let (mut scores, mut again) = (block.scores.clone(), block.zeros());
            windows.score_gradients(&mut scores, block.first, &mut again, &block.gradients);
            windows.clear_outside(&mut again);
            let mut of_slices = Vec::new();
            each_copy!(by_slices(&block, &mut of_slices));
            for (expected_shares, expected_again, expected_scores) in &of_slices {
                prop_assert!(close(&shares, expected_shares));
                prop_assert!(close(&again, expected_again));
                prop_assert!(close(&scores, expected_scores));
            }
        }
    }
}
